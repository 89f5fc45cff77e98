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
	TooMany    Reason = "too many"    // more models, holdings, windows, neighbours or hot experts than the limits
	BadName    Reason = "bad name"    // a name that is not fit for a terminal
	BadShape   Reason = "bad shape"   // a geometry that no model has
	WrongShape Reason = "wrong shape" // not the shape of the model of that id
	NoSuch     Reason = "no such"     // a range that does not exist in the shape
	Overlap    Reason = "overlap"     // a cell held twice, a model twice
	BadState   Reason = "bad state"   // a state that does not exist
	BadWindow  Reason = "bad window"  // slots or times that no window has
	BadService Reason = "bad service" // slots, a context or times that nobody has who answers
	BadNear    Reason = "bad near"    // a neighbour or a round trip that cannot be
	BadLease   Reason = "bad lease"   // a lease that has run out, is too long, or of what needs none
	BadDemand  Reason = "bad demand"  // figures that contradict each other
	BadHint    Reason = "bad hint"    // capacity beyond any machine
	BadMachine Reason = "bad machine" // a size or a speed that no machine has
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
	if a.Away && (len(a.Models) > 0 || len(a.Near) > 0 || a.Machine != nil || a.Capacity != Capacity{}) {
		return refuse(AwayHolds, "the author is away and announces %d models", len(a.Models))
	}
	if len(a.Models) > MaxModels {
		return refuse(TooMany, "%d models, at most %d", len(a.Models), MaxModels)
	}
	if c := a.Capacity; max(c.RowsPerSecond, c.FreeDisk, c.FreeMemory) > MaxHint {
		return refuse(BadHint, "capacity %+v, at most %d each", c, int64(MaxHint))
	}
	if err := a.Machine.check(); err != nil {
		return err
	}
	holdings, hot, windows := 0, 0, 0
	for i := range a.Models {
		m := &a.Models[i]
		holdings += len(m.Holdings)
		windows += len(m.Windows)
		for _, d := range m.Demand {
			hot += len(d.Hot)
		}
		if holdings > MaxHoldings || hot > maxHotAll {
			return refuse(TooMany, "%d holdings and %d hot experts, at most %d and %d", holdings, hot, MaxHoldings, maxHotAll)
		}
		if len(m.Windows) > MaxWindows || windows > MaxWindowsAll {
			return refuse(TooMany, "%d windows, at most %d of one model and %d in all", windows, MaxWindows, MaxWindowsAll)
		}
		if slices.ContainsFunc(a.Models[:i], func(o ModelNews) bool { return o.ID == m.ID }) {
			return refuse(Overlap, "model %v twice", m.ID)
		}
		if err := m.check(); err != nil {
			return err
		}
	}
	return checkNear(a.Near)
}

func (m *Machine) check() error {
	switch {
	case m == nil:
		return nil
	case max(m.VRAM, m.Bytes, m.Batch, m.Up, m.Down) > MaxHint:
		return refuse(BadMachine, "sizes and rates of %+v, at most %d each", *m, int64(MaxHint))
	case m.Cores < 0 || m.Cores > maxCores:
		return refuse(BadMachine, "%d cores, at most %d", m.Cores, maxCores)
	case m.Layer < 0 || m.Layer > maxLayer:
		return refuse(BadMachine, "%v for a layer, at most %v", m.Layer, maxLayer)
	case m.Call < 0 || m.Call > maxRTT:
		return refuse(BadMachine, "%v for asking another node, at most %v", m.Call, maxRTT)
	}
	return nil
}

func (m *ModelNews) check() error {
	if m.Memory > MaxHint {
		return refuse(BadHint, "a model loaded in %d bytes, at most %d", m.Memory, int64(MaxHint))
	}
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
	if err := checkWindows(m); err != nil {
		return err
	}
	if err := m.Service.check(); err != nil {
		return err
	}
	return checkDemand(m.Demand, m.Shape)
}

func (s Service) check() error {
	switch {
	case s == Service{}:
	case s.Slots < 1 || s.Slots > MaxSlots || s.Free < 0 || s.Free > s.Slots:
		return refuse(BadService, "%d of %d slots free, want 1 to %d slots", s.Free, s.Slots, MaxSlots)
	case s.Context < 1 || s.Context > maxWindow:
		return refuse(BadService, "a context of %d tokens, want 1 to %d", s.Context, maxWindow)
	case s.Token < 0 || s.Token > MaxToken:
		return refuse(BadService, "a token takes %v, at most %v", s.Token, MaxToken)
	}
	return nil
}

func (h *Holding) check(s Shape) error {
	if !s.Has(h.Slice) {
		return refuse(NoSuch, "%v of a model of %v", h.Slice, s)
	}
	return checkLease(h.State, h.Lease, h.Slice)
}

// checkLease checks the state of something, and its lease.
func checkLease(s State, lease time.Duration, what fmt.Stringer) error {
	switch s {
	case Claimed, Loading:
		if lease < time.Second || lease > MaxLease {
			return refuse(BadLease, "%v %v has a lease of %v, want 1s to %v", s, what, lease, MaxLease)
		}
	case Serving, Leaving:
		if lease != 0 {
			return refuse(BadLease, "%v %v needs no lease", s, what)
		}
	default:
		return refuse(BadState, "state %d of %v", s, what)
	}
	if lease%time.Second != 0 {
		return refuse(BadLease, "lease of %v is not in whole seconds", lease)
	}
	return nil
}

// wanted reports whether a window is not computed yet: it may overlap with one that the author
// still computes, and will give up for it.
func (w *WindowHolding) wanted() bool { return w.State == Claimed || w.State == Loading }

func checkWindows(m *ModelNews) error {
	if r := m.Room; min(r.Disk, r.Memory) < 0 || max(r.Disk, r.Memory) > MaxHint {
		return refuse(BadHint, "room for a window of %+v, at most %d each", r, int64(MaxHint))
	}
	for i := range m.Windows {
		w := &m.Windows[i]
		if w.Layers.Begin < 0 || w.Layers.Len() == 0 || w.Layers.End > m.Shape.Layers {
			return refuse(NoSuch, "window %v of a model of %d layers", w.Layers, m.Shape.Layers)
		}
		if err := checkLease(w.State, w.Lease, w.Layers); err != nil {
			return err
		}
		switch {
		case w.Free < 0 || w.Free > w.Slots || w.Slots > MaxSlots:
			return refuse(BadWindow, "%d of %d slots free, at most %d", w.Free, w.Slots, MaxSlots)
		case min(w.Token, w.Batched) < 0 || max(w.Token, w.Batched) > MaxToken:
			return refuse(BadWindow, "a token of window %v takes %v, or %v beside others: at most %v", w.Layers, w.Token, w.Batched, MaxToken)
		case w.wanted() && (w.Slots > 0 || w.Token > 0 || w.Batched > 0):
			return refuse(BadWindow, "%v window %v has slots or times", w.State, w.Layers)
		}
		for _, o := range m.Windows[:i] {
			if o.wanted() == w.wanted() && o.Layers.Intersect(w.Layers).Len() > 0 {
				return refuse(Overlap, "windows %v and %v", o.Layers, w.Layers)
			}
		}
	}
	return nil
}

func checkNear(list []Neighbour) error {
	if len(list) > MaxNear {
		return refuse(TooMany, "%d neighbours, at most %d", len(list), MaxNear)
	}
	for i, n := range list {
		if n.Peer == "" || len(n.Peer) > maxPeer || i > 0 && list[i-1].Peer >= n.Peer {
			return refuse(BadNear, "neighbours are not in order, once each, with names of 1 to %d bytes", maxPeer)
		}
		if n.RTT <= 0 || n.RTT > maxRTT {
			return refuse(BadNear, "round trip of %v to a neighbour, want above 0 and at most %v", n.RTT, maxRTT)
		}
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
