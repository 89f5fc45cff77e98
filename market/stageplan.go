package market

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// stager is what one author says about windows of a model.
type stager struct {
	peer    string
	rank    uint64 // among rivals: the lower goes first
	room    Footprint
	windows []WindowHolding // that count and are legally cut
}

// stagers lists who gives room to, or has, a window, by rank; false while the model's shape is not
// set.
func (t *Table) stagers(f *fit, now time.Time) ([]stager, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	shape, ok := t.known[f.ID]
	if !ok {
		return nil, false
	}
	var list []stager
	for _, x := range t.authors {
		m := x.model(f.ID)
		if m == nil || !m.Shape.Equal(shape) {
			continue
		}
		s := stager{peer: x.id, rank: rank(x.hash, hashID(f.ID), 0), room: m.Room}
		for _, w := range m.Windows {
			if _, _, legal := f.legal(w.Layers); legal && x.stateOf(w.State, w.Lease) != 0 {
				s.windows = append(s.windows, w)
			}
		}
		if len(s.windows) > 0 || s.room != (Footprint{}) {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b stager) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.peer, b.peer)) })
	return list, true
}

// has returns the windows in any of some states.
func (s *stager) has(states ...State) (list []gguf.Range) {
	for _, w := range s.windows {
		if slices.Contains(states, w.State) {
			list = append(list, w.Layers)
		}
	}
	return list
}

// view is what one node makes of what the others say.
type view struct {
	*fit
	me     stager
	others []stager     // by rank
	fixed  []gguf.Range // of others, whatever this node does
	free   []stager     // others that have only claimed, by rank
}

func newView(f *fit, me stager, all []stager) *view {
	v := &view{fit: f, me: me}
	for _, s := range all {
		if s.peer == me.peer {
			continue
		}
		v.others = append(v.others, s)
		held := s.has(Serving, Loading)
		claimed := s.has(Claimed)
		switch first := s.before(&me); {
		case len(claimed) == 0:
			v.fixed = append(v.fixed, held...)
		case len(held) == 0 && len(s.has(Leaving)) == 0 && s.room != (Footprint{}):
			v.free = append(v.free, s)
		case !first: // yields if both want the same, or leave the same
			v.fixed = append(append(v.fixed, held...), s.has(Leaving)...)
		case s.room == (Footprint{}):
			v.fixed = append(append(v.fixed, held...), claimed...)
		default: // moves
			v.fixed = append(v.fixed, claimed...)
		}
	}
	return v
}

func (s *stager) before(o *stager) bool {
	return s.rank < o.rank || s.rank == o.rank && s.peer < o.peer
}

// choose returns the window that this node should claim, empty if none fits, and the graph of the
// windows of all others that go before it.
func (v *view) choose() (gguf.Range, *tiling) {
	g := newTiling(v.at, v.fixed)
	if v.me.room == (Footprint{}) {
		return gguf.Range{}, g
	}
	rivals := append(slices.Clone(v.free), v.me)
	slices.SortFunc(rivals, func(a, b stager) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.peer, b.peer)) })
	plan := map[string]gguf.Range{}
	if g.clone().fill(1) == 0 {
		plan = v.complete(v.fixed, rivals)
	}
	for peer, w := range plan {
		if peer != v.me.peer {
			g.add(w)
		}
	}
	if w, ok := plan[v.me.peer]; ok {
		return w, g
	}
	for i := range rivals {
		s := &rivals[i]
		if _, ok := plan[s.peer]; ok {
			continue
		}
		w := v.pick(g, s)
		if s.peer == v.me.peer {
			return w, g
		}
		g.add(w)
	}
	return gguf.Range{}, g
}

// spare bounds the chains that pick looks beyond the one that lacks.
const spare = 64

// pick returns the scarcest window for one node: of the windows that fit, the one that brings the
// chain that is next to be complete nearest to it. One that is laid against the model's ends or
// another's bounds goes before one that splits what lacks in two; then the fewest layers that
// still lack decide, then the length, then rendezvous hash. Where none helps that chain, the one
// after it is looked at.
func (v *view) pick(g *tiling, s *stager) gguf.Range {
	if !v.room(s) {
		return gguf.Range{}
	}
	g.fill(math.MaxInt)
	next := g
	for range spare {
		if w := v.nearest(next, s); w.Len() > 0 {
			return w
		}
		missing := next.missing()
		if len(missing) == 1 && missing[0].Len() == len(v.Layers) {
			break // nothing of it is there, and still nothing fits
		}
		if next == g {
			next = g.clone()
		}
		for _, w := range missing {
			next.add(w)
		}
		next.fill(math.MaxInt)
	}
	return gguf.Range{}
}

// room reports whether a node can hold any window.
func (v *view) room(s *stager) bool {
	for i := range v.at[1:] {
		if v.reach(i, s.room) > i {
			return true
		}
	}
	return false
}

// nearest is pick for the one chain that is next.
func (v *view) nearest(g *tiling, s *stager) (best gguf.Range) {
	to, from := g.paths(false), g.paths(true)
	now, _ := to[len(v.at)-1].best()
	type key struct {
		splits int
		cost   int
		length int
		hash   uint64
	}
	var least key
	h := hash(s.peer)
	for i := range v.at {
		begin, _ := to[i].best()
		for j := v.reach(i, s.room); j > i; j-- {
			end, _ := from[j].best()
			if begin+end >= now {
				continue
			}
			k := key{0, begin + end, v.at[i] - v.at[j], mix(h, hashID(v.ID), uint64(i), uint64(j))}
			if (begin+end)%costLayer > now%costLayer {
				k.splits = 1
			}
			if best.Len() == 0 || cmp.Or(cmp.Compare(k.splits, least.splits), cmp.Compare(k.cost, least.cost),
				cmp.Compare(k.length, least.length), cmp.Compare(k.hash, least.hash)) < 0 {
				best, least = gguf.Range{Begin: v.at[i], End: v.at[j]}, k
			}
		}
	}
	return best
}

// maxPlanned is how many nodes are planned at once; the work doubles with each.
const maxPlanned = 12

// complete places nodes, the fewest, so that with the windows that are fixed there is a chain; nil
// if the largest of them cannot. Everybody who sees the same gets the same.
func (v *view) complete(fixed []gguf.Range, nodes []stager) map[string]gguf.Range {
	if len(nodes) > maxPlanned {
		nodes = slices.Clone(nodes)
		slices.SortStableFunc(nodes, func(a, b stager) int {
			return -cmp.Compare(min(a.room.Disk, a.room.Memory), min(b.room.Disk, b.room.Memory))
		})
		nodes = nodes[:maxPlanned]
	}
	last := len(v.at) - 1
	p := planner{view: v, g: newTiling(v.at, fixed), nodes: nodes, reached: make([][]bool, 1<<len(nodes))}
	p.far = make([][]int, len(nodes))
	for k := range nodes {
		for i := range v.at {
			p.far[k] = append(p.far[k], v.reach(i, nodes[k].room))
		}
	}
	best := -1
	for set := range p.reached {
		p.extend(set)
		if p.reached[set][last] && (best < 0 || bits.OnesCount(uint(set)) < bits.OnesCount(uint(best))) {
			best = set
		}
	}
	if best < 0 {
		return nil
	}
	return p.trace(best)
}

// planner finds by exhaustion which nodes, in which order, reach how far.
type planner struct {
	*view
	g       *tiling // of what is fixed
	nodes   []stager
	far     [][]int  // by node and bound: how far its window goes from there
	reached [][]bool // by set of nodes, then bound
}

// extend computes the bounds that a set of nodes reaches, from those of the sets with one less.
func (p *planner) extend(set int) {
	r := make([]bool, len(p.at))
	r[0] = true
	for k := range p.nodes {
		if set>>k&1 == 0 {
			continue
		}
		end := 0
		for i, ok := range p.reached[set&^(1<<k)] {
			if i <= end && i > 0 {
				r[i] = true
			}
			if ok {
				end = max(end, p.far[k][i])
				r[i] = true
			}
		}
	}
	for i := range r {
		for j := i + 1; r[i] && j < len(r); j++ {
			r[j] = r[j] || p.g.left[i][j] > 0
		}
	}
	p.reached[set] = r
}

// trace reads back from the last bound who is where.
func (p *planner) trace(set int) map[string]gguf.Range {
	plan := map[string]gguf.Range{}
	for j := len(p.at) - 1; j > 0; {
		i, k := p.before(set, j)
		if k >= 0 {
			plan[p.nodes[k].peer] = gguf.Range{Begin: p.at[i], End: p.at[j]}
			set &^= 1 << k
		}
		j = i
	}
	return plan
}

// before returns the bound, and the node or -1 for what is fixed, from which a set reached one.
func (p *planner) before(set, j int) (bound, node int) {
	for i := range j {
		for k := range p.nodes {
			if set>>k&1 == 1 && p.reached[set&^(1<<k)][i] && p.far[k][i] >= j {
				return i, k
			}
		}
	}
	for i := range j {
		if p.g.left[i][j] > 0 && p.reached[set][i] {
			return i, -1
		}
	}
	return 0, -1 // a set of nodes more than are needed was reached by fewer
}
