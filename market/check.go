package market

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// Reason is why an announcement was refused: what the node counts by.
type Reason string

// The reasons.
const (
	Malformed  Reason = "malformed"   // not the documented encoding
	Oversized  Reason = "oversized"   // more bytes than MaxBody
	TooMany    Reason = "too many"    // more models, holdings or hot experts than the limits
	BadName    Reason = "bad name"    // a name that is not fit for a terminal
	BadShape   Reason = "bad shape"   // a geometry that no model has
	WrongShape Reason = "wrong shape" // not the shape of the model of that id
	NoSuch     Reason = "no such"     // a range that does not exist in the shape
	Overlap    Reason = "overlap"     // a cell held twice, a model twice
	BadState   Reason = "bad state"   // a state that does not exist
	BadLease   Reason = "bad lease"   // a lease that has run out, is too long, or of what needs none
	BadDemand  Reason = "bad demand"  // figures that contradict each other
	BadHint    Reason = "bad hint"    // capacity beyond any machine
	AwayHolds  Reason = "away holds"  // says that it left, and that it has something
	NoAuthor   Reason = "no author"   // a record of nobody
	Expired    Reason = "expired"     // past its validity
	Full       Reason = "table full"  // more authors than MaxAuthors; not the author's fault
)

// RefusedError says why an announcement was refused.
type RefusedError struct {
	Reason Reason
	Detail string
}

func (e *RefusedError) Error() string { return fmt.Sprintf("market: %s: %s", e.Reason, e.Detail) }

// AuthorsFault reports whether an honest author would not have sent it.
func (e *RefusedError) AuthorsFault() bool { return e.Reason != Expired && e.Reason != Full }

func refuse(r Reason, format string, args ...any) *RefusedError {
	return &RefusedError{r, fmt.Sprintf(format, args...)}
}

// check applies every rule that needs no knowledge of models.
func (a *Announcement) check() error {
	if a.Away && (len(a.Models) > 0 || a.Capacity != Capacity{}) {
		return refuse(AwayHolds, "the author is away and announces %d models", len(a.Models))
	}
	if len(a.Models) > MaxModels {
		return refuse(TooMany, "%d models, at most %d", len(a.Models), MaxModels)
	}
	if c := a.Capacity; max(c.RowsPerSecond, c.FreeDisk, c.FreeMemory) > maxHint {
		return refuse(BadHint, "capacity %+v, at most %d each", c, int64(maxHint))
	}
	holdings, hot := 0, 0
	for i := range a.Models {
		m := &a.Models[i]
		holdings += len(m.Holdings)
		for _, d := range m.Demand {
			hot += len(d.Hot)
		}
		if holdings > MaxHoldings || hot > maxHotAll {
			return refuse(TooMany, "%d holdings and %d hot experts, at most %d and %d", holdings, hot, MaxHoldings, maxHotAll)
		}
		if slices.ContainsFunc(a.Models[:i], func(o ModelNews) bool { return o.ID == m.ID }) {
			return refuse(Overlap, "model %v twice", m.ID)
		}
		if err := m.check(); err != nil {
			return err
		}
	}
	return nil
}

func (m *ModelNews) check() error {
	if err := checkName(m.Name); err != nil {
		return refuse(BadName, "%v", err)
	}
	if err := m.Shape.Check(); err != nil {
		return refuse(BadShape, "%v", err)
	}
	for _, h := range m.Holdings {
		if err := h.check(m.Shape); err != nil {
			return err
		}
	}
	if a, b, ok := overlapping(m.Holdings); ok {
		return refuse(Overlap, "%v and %v", a, b)
	}
	return checkDemand(m.Demand, m.Shape)
}

func (h *Holding) check(s Shape) error {
	if !s.Has(h.Slice) {
		return refuse(NoSuch, "%v of a model of %v", h.Slice, s)
	}
	switch h.State {
	case Claimed, Loading:
		if h.Lease < time.Second || h.Lease > MaxLease {
			return refuse(BadLease, "%v %v has a lease of %v, want 1s to %v", h.State, h.Slice, h.Lease, MaxLease)
		}
	case Serving, Leaving:
		if h.Lease != 0 {
			return refuse(BadLease, "%v %v needs no lease", h.State, h.Slice)
		}
	default:
		return refuse(BadState, "state %d of %v", h.State, h.Slice)
	}
	if h.Lease%time.Second != 0 {
		return refuse(BadLease, "lease of %v is not in whole seconds", h.Lease)
	}
	return nil
}

// overlapping finds two holdings that share a cell.
func overlapping(list []Holding) (a, b gguf.Slice, ok bool) {
	order := make([]gguf.Slice, len(list))
	for i, h := range list {
		order[i] = h.Slice
	}
	slices.SortFunc(order, func(x, y gguf.Slice) int { return cmp.Compare(x.Layers.Begin, y.Layers.Begin) })
	for i, x := range order {
		for _, y := range order[i+1:] {
			if y.Layers.Begin >= x.Layers.End {
				break
			}
			if x.Experts.Intersect(y.Experts).Len() > 0 {
				return x, y, true
			}
		}
	}
	return a, b, false
}

func checkDemand(list []LayerDemand, s Shape) error {
	last := -1
	for _, d := range list {
		one := gguf.Range{Begin: d.Layer, End: d.Layer + 1}
		if d.Layer < 0 || !s.Has(gguf.Slice{Layers: one, Experts: gguf.Range{Begin: 0, End: 1}}) {
			return refuse(NoSuch, "demand for layer %d of a model of %v", d.Layer, s)
		}
		if d.Layer <= last || d.Pairs > maxPairs {
			return refuse(BadDemand, "layer %d after %d with %d pairs", d.Layer, last, d.Pairs)
		}
		if last = d.Layer; len(d.Hot) > MaxHot {
			return refuse(TooMany, "%d hot experts in layer %d, at most %d", len(d.Hot), d.Layer, MaxHot)
		}
		sum, before := 0, -1
		for _, h := range d.Hot {
			if h.Expert >= s.Experts {
				return refuse(NoSuch, "hot expert %d in a model of %v", h.Expert, s)
			}
			if h.Expert <= before || h.Share < 1 || h.Share > shareUnit {
				return refuse(BadDemand, "expert %d after %d with a share of %d", h.Expert, before, h.Share)
			}
			before, sum = h.Expert, sum+h.Share
		}
		if sum > shareUnit {
			return refuse(BadDemand, "shares of layer %d sum up to %d of %d", d.Layer, sum, shareUnit)
		}
	}
	return nil
}
