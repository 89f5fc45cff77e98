package market

import (
	"cmp"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// Part is a piece of a model that a node claims, loads, serves and gives up as a whole: experts
// of one layer.
type Part struct {
	Model gguf.ModelID
	Slice gguf.Slice // one layer
}

// held is a part of one's own.
type held struct {
	model   gguf.ModelID
	layer   int
	experts gguf.Range
	size    int64 // bytes of one expert
	state   State
	onDisk  bool      // bytes of it may be there
	dropped bool      // to be deleted: the node has been told, and has not said that it is done
	since   time.Time // of the state
	told    time.Time // when the state was first announced; zero: not yet
	swap    int       // not 0: the claim, and what is given up for it, of one move
}

func (h *held) part() Part {
	return Part{h.model, gguf.Slice{Layers: gguf.Range{Begin: h.layer, End: h.layer + 1}, Experts: h.experts}}
}

func (h *held) bytes() int64 { return int64(h.experts.Len()) * h.size }

// counts reports whether the part takes from the budget: all that is on disk or will be. A claim
// of a move does not until what it replaces is deleted.
func (h *held) counts() bool { return h.onDisk || h.swap == 0 || h.state != Claimed }

func (h *held) become(s State, now time.Time) {
	h.state, h.since, h.told = s, now, time.Time{}
}

// within reports whether all of it is in a part.
func (h *held) within(p Part) bool {
	return h.model == p.Model && p.Slice.Layers.Contains(h.layer) && p.Slice.Experts.Covers(h.experts)
}

// Used returns the bytes that count against the budget.
func (v *Volunteer) Used() int64 {
	var n int64
	for _, h := range v.own {
		if h.counts() {
			n += h.bytes()
		}
	}
	return n
}

// Restore tells of a part that is on disk when the node starts: complete and proven, or half
// downloaded. Half of a download counts in full. The layer must be in the model's shape.
func (v *Volunteer) Restore(p Part, complete bool, now time.Time) error {
	for layer := p.Slice.Layers.Begin; layer < p.Slice.Layers.End; layer++ {
		size := v.sizes(p.Model, layer)
		if size <= 0 || p.Slice.Experts.Len() == 0 {
			return refuse(NoSuch, "part %v of model %v", p.Slice, p.Model)
		}
		h := &held{model: p.Model, layer: layer, experts: p.Slice.Experts, size: size, onDisk: true, since: now, state: Claimed}
		if complete {
			h.state = Serving
		}
		v.own = append(v.own, h)
	}
	v.changed, v.rest = true, rest{}
	return nil
}

// Done tells that a part of Decision.Load is downloaded, loaded and has passed its canary.
func (v *Volunteer) Done(p Part, now time.Time) {
	for _, h := range v.own {
		if h.within(p) && h.state == Loading && !h.dropped {
			h.become(Serving, now)
			delete(v.failures, p.Model)
			v.changed, v.rest = true, rest{}
		}
	}
}

// Failed tells that a part could not be downloaded, loaded, or has not passed its canary, at any
// time. The node is told to delete it, and the model is left alone for a while, the longer the
// more often it failed.
func (v *Volunteer) Failed(p Part, now time.Time) {
	failed := false
	for _, h := range v.own {
		if h.within(p) && !h.dropped {
			h.dropped, failed = true, true
		}
	}
	if !failed {
		return
	}
	f := v.failures[p.Model]
	f.pause = min(max(2*f.pause, backoffMin), backoffMax)
	f.until = now.Add(v.jitter(f.pause))
	v.failures[p.Model] = f
	v.changed, v.rest = true, rest{}
}

// Dropped tells that a part of Decision.Drop is deleted. Until then its bytes count.
func (v *Volunteer) Dropped(p Part) {
	v.own = slices.DeleteFunc(v.own, func(h *held) bool { return h.dropped && h.within(p) })
	v.rest = rest{}
}

// Holdings returns what to announce, as few slices as possible.
func (v *Volunteer) Holdings() map[gguf.ModelID][]Holding {
	list := slices.DeleteFunc(slices.Clone(v.own), func(h *held) bool { return h.dropped })
	slices.SortFunc(list, func(a, b *held) int {
		return cmp.Or(compareIDs(a.model, b.model), cmp.Compare(a.layer, b.layer),
			cmp.Compare(a.experts.Begin, b.experts.Begin))
	})
	rows := make(map[gguf.ModelID][]Holding)
	for _, h := range list {
		x := Holding{Slice: h.part().Slice, State: h.state}
		switch h.state {
		case Claimed:
			x.Lease = claimLease
		case Loading:
			x.Lease = MaxLease
		}
		row := rows[h.model]
		if n := len(row); n > 0 && row[n-1].State == x.State && row[n-1].Slice.Layers == x.Slice.Layers &&
			row[n-1].Slice.Experts.End == x.Slice.Experts.Begin {
			row[n-1].Slice.Experts.End = x.Slice.Experts.End
			continue
		}
		rows[h.model] = append(row, x)
	}
	for id, row := range rows {
		rows[id] = stack(row)
	}
	return rows
}

// stack joins equal ranges of consecutive layers.
func stack(row []Holding) []Holding {
	var out []Holding
	for _, x := range row {
		i := slices.IndexFunc(out, func(o Holding) bool {
			return o.State == x.State && o.Slice.Experts == x.Slice.Experts && o.Slice.Layers.End == x.Slice.Layers.Begin
		})
		if i >= 0 {
			out[i].Slice.Layers.End = x.Slice.Layers.End
			continue
		}
		out = append(out, x)
	}
	return out
}

// Announced tells that Holdings was published. Claims are looked at again, and what leaves is
// given up, only after it was told and others had time to answer.
func (v *Volunteer) Announced(now time.Time) {
	v.changed = false
	for _, h := range v.own {
		if h.told.IsZero() {
			h.told, v.rest = now, rest{}
		}
	}
}

// cut splits a part so that the range is one of its own, and returns that.
func (v *Volunteer) cut(h *held, r gguf.Range) *held {
	for _, rest := range []gguf.Range{{Begin: h.experts.Begin, End: r.Begin}, {Begin: r.End, End: h.experts.End}} {
		if rest.Len() > 0 {
			x := *h
			x.experts = rest
			v.own = append(v.own, &x)
		}
	}
	h.experts = r
	return h
}
