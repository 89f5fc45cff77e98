package market

import (
	"cmp"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// WindowHolder is a window of an author that counts, as Table.Windows lists it.
type WindowHolder struct {
	Peer string
	WindowHolding
	Room Footprint   // what the author gives to a window of the model; zero: not told
	Near []Neighbour // of the author; not to be changed
}

// Windows lists the windows of a model, by peer, then by first layer: those of authors that are
// present, have the model's shape, and whose lease has not run out. State says which of them
// compute.
func (t *Table) Windows(id gguf.ModelID, now time.Time) []WindowHolder {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	shape, _, ok := t.shapeLocked(id)
	if !ok {
		return nil
	}
	var list []WindowHolder
	for _, x := range t.authors {
		m := x.model(id)
		if m == nil || !m.Shape.Equal(shape) {
			continue
		}
		for _, w := range m.Windows {
			if x.stateOf(w.State, w.Lease) != 0 {
				list = append(list, WindowHolder{x.id, w, m.Room, x.news.Near})
			}
		}
	}
	slices.SortFunc(list, func(a, b WindowHolder) int {
		return cmp.Or(cmp.Compare(a.Peer, b.Peer), cmp.Compare(a.Layers.Begin, b.Layers.Begin),
			cmp.Compare(a.State, b.State))
	})
	return list
}

// RTT returns the round trip between two peers as they announce it, false if neither does. Where
// both do, it is the longer: a peer cannot draw work to itself by telling a short one.
func (t *Table) RTT(a, b string, now time.Time) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	d := max(t.nearLocked(a, b), t.nearLocked(b, a))
	return d, d > 0
}

// nearLocked is the round trip that one author tells of another, 0 if it tells none.
func (t *Table) nearLocked(author, peer string) time.Duration {
	x := t.authors[author]
	if x == nil || !x.present {
		return 0
	}
	i, ok := slices.BinarySearchFunc(x.news.Near, peer, func(n Neighbour, p string) int { return cmp.Compare(n.Peer, p) })
	if !ok {
		return 0
	}
	return x.news.Near[i].RTT
}
