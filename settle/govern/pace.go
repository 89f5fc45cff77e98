package govern

import (
	"errors"
	"fmt"

	"kvasird/settle"
)

// ErrNotice is a change that would hold too soon.
var ErrNotice = errors.New("the change needs more notice")

// refName is the parameter that is set again, unchanged too, to say that it is still right.
const refName = "reference"

// pace compares each change with every value that held in the 24 hours before it is to hold, so
// that many small changes gain nothing.
func (h *History) pace(now Moment, p *Proposal, t taken) error {
	latest := h.latest().params
	for _, c := range p.Changes {
		f, err := settle.FieldByName(c.Name)
		if err != nil {
			return err
		}
		if t.due-now.At < f.NoticeSeconds {
			return fmt.Errorf("govern: %s in %d s: %w, %d s: propose a later epoch", c.Name, t.due-now.At, ErrNotice, f.NoticeSeconds)
		}
		for i := len(h.taken) - 1; i >= 0; i-- {
			if err := f.CheckMove(f.Get(h.taken[i].params), f.Get(latest), c.New); err != nil {
				return fmt.Errorf("govern: %w", err)
			}
			if h.taken[i].due+settle.Day <= t.due { // what held before it had ended by then
				break
			}
		}
	}
	return nil
}
