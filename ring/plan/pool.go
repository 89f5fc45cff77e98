package plan

import (
	"cmp"
	"math"
	"slices"

	"kvasird/ggml/gguf"
)

// pool is a set of expert workers: each has a range of the experts of every MoE
// layer, so that all compute at once.
type pool struct {
	workers []Node
	count   []int // of experts, for each worker
}

// room is how many experts of every layer a node can hold.
func (q *Query) room(n Node) int {
	var each int64
	for _, l := range q.Model.Layers {
		each += l.Expert
	}
	have := n.RAM - processBytes
	if n.device() > 0 {
		have = n.device() - deviceBytes // a worker's experts lie in one place
	}
	if !n.Has {
		have = min(have, n.Disk+q.held(n, q.everything()))
	}
	if each <= 0 || have <= 0 {
		return 0
	}
	return int(min(have/each, int64(q.Model.Experts)))
}

func (n Node) workerSpeed() Speed {
	if n.device() > 0 {
		return n.GPU
	}
	return n.CPU
}

// newPool shares the experts out among nodes by their speed and room; nil when
// they do not fit.
func (q *Query) newPool(nodes []Node) *pool {
	p := &pool{workers: nodes, count: make([]int, len(nodes))}
	left := q.Model.Experts
	for left > 0 {
		sum := 0.0
		for i, n := range nodes {
			if p.count[i] < q.room(n) {
				sum += n.workerSpeed().Bytes
			}
		}
		if sum == 0 {
			return nil
		}
		before := left
		for i, n := range nodes {
			want := int(math.Ceil(float64(before) * n.workerSpeed().Bytes / sum))
			take := max(0, min(want, q.room(n)-p.count[i], left))
			p.count[i] += take
			left -= take
		}
	}
	for i := len(nodes) - 1; i >= 0; i-- {
		if p.count[i] == 0 {
			p.workers = slices.Delete(slices.Clone(p.workers), i, i+1)
			p.count = slices.Delete(p.count, i, i+1)
		}
	}
	return p
}

// time is what the MoE layers of a backbone wait for their workers: in each layer
// for the slowest of them.
func (p *pool) time(q *Query, f *fitted, rows float64) cost {
	var c cost
	for i := f.load.window.Begin; i < f.load.window.End; i++ {
		l := q.Model.Layers[i]
		if l.Expert == 0 {
			continue
		}
		slowest, most := 0, -1.0
		for w := range p.workers {
			if ask, send, compute := p.call(q, f.node, w, l, rows); ask+send+compute > most {
				slowest, most = w, ask+send+compute
			}
		}
		ask, send, compute := p.call(q, f.node, slowest, l, rows)
		name := p.workers[slowest].Name
		c.add(part{ofAsking, f.Node, name, ask})
		c.add(part{ofTransfer, f.Node, name, send})
		c.add(part{ofExperts, name, "", compute})
	}
	return c
}

// call is what one layer's call to one worker takes, in seconds.
func (p *pool) call(q *Query, from Node, worker int, l Layer, rows float64) (ask, send, compute float64) {
	to := p.workers[worker]
	share := float64(p.count[worker]) / float64(q.Model.Experts)
	pairs := max(1, rows*float64(l.Used)*share)
	met := min(pairs, max(1, distinct(l.Used, q.Model.Experts, rows)*share))
	s := to.workerSpeed()
	ask = q.rtt(from, to).Seconds() + max(from.Call, to.Call).Seconds()
	send = rows*q.rowBytes()/min(from.Up, to.Down) + pairs*q.rowBytes()/min(to.Up, from.Down)
	return ask, send, s.experts(l.Expert, met, pairs) + s.Layer.Seconds()
}

// places are what the workers hold, in the order of what they have already.
func (p *pool) places(q *Query) []Place {
	var list []Place
	at := 0
	for _, i := range p.order() {
		n := p.workers[i]
		place := Place{Node: n.Name, Role: Worker, Layers: q.all(),
			Experts: gguf.Range{Begin: at, End: at + p.count[i]}, RAM: processBytes}
		for k, l := range q.Model.Layers {
			place.Disk += int64(p.count[i]) * l.Expert
			place.Download += int64(p.count[i]-n.experts(k, place.Experts)) * l.Expert
		}
		bytes := place.Disk
		if n.Has {
			place.Download = 0
		}
		if n.device() > 0 {
			place.VRAM = deviceBytes + bytes
		} else {
			place.RAM += bytes
		}
		at += p.count[i]
		list = append(list, place)
	}
	return list
}

// order lists the workers by the first expert that each has; those without come last.
func (p *pool) order() []int {
	order := make([]int, len(p.workers))
	first := make([]int, len(p.workers))
	for i, n := range p.workers {
		order[i], first[i] = i, math.MaxInt
		for _, h := range n.Held {
			if h.Experts.Len() > 0 {
				first[i] = min(first[i], h.Experts.Begin)
			}
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(first[a], first[b]) })
	return order
}

// workers is the best backbone on one node with the experts on others.
func (q *Query) workers() Candidate {
	if q.Model.moe(q.all()) == 0 {
		return Candidate{Kind: ExpertWorkers, Refused: "the model has no experts"}
	}
	if len(q.Nodes) < 2 {
		return Candidate{Kind: ExpertWorkers, Refused: "one node alone has nobody to ask"}
	}
	var best *Candidate
	var short *NoRoomError
	for i, n := range q.Nodes {
		f, err := q.fit(n, load{Backbone, q.all(), false})
		if no, ok := err.(*NoRoomError); ok {
			short = less(short, no)
			continue
		}
		others := q.byDistance(n, slices.Delete(slices.Clone(q.Nodes), i, i+1))
		fits := false
		for k := 1; k <= len(others); k++ {
			if p := q.newPool(others[:k]); p != nil {
				fits = true
				best = better(best, q.rate(ExpertWorkers, &ring{[]*fitted{f}, p}), oneStream)
			}
		}
		if !fits {
			short = less(short, q.shortOfExperts(others))
		}
	}
	if best == nil {
		return refused(ExpertWorkers, short)
	}
	return *best
}

func less(a, b *NoRoomError) *NoRoomError {
	if a == nil || b.Missing < a.Missing {
		return b
	}
	return a
}

func (q *Query) shortOfExperts(nodes []Node) *NoRoomError {
	_, need := q.Model.Bytes()
	each := need / int64(max(1, q.Model.Experts))
	for _, n := range nodes {
		need -= int64(q.room(n)) * each
	}
	return &NoRoomError{"", "the experts", max(need, each)}
}

// byDistance orders nodes by how soon they answer a call.
func (q *Query) byDistance(from Node, nodes []Node) []Node {
	slices.SortStableFunc(nodes, func(a, b Node) int {
		return cmp.Or(cmp.Compare(q.rtt(from, a), q.rtt(from, b)), cmp.Compare(b.workerSpeed().Bytes, a.workerSpeed().Bytes))
	})
	return nodes
}

// backbones is the best ring of backbones on some nodes with the experts on the
// others.
func (q *Query) backbones() Candidate {
	none := Candidate{Kind: BackboneRing}
	switch {
	case q.Model.moe(q.all()) == 0:
		none.Refused = "the model has no experts"
	case len(q.Cuts) == 0:
		none.Refused = cmp.Or(q.NoCuts, "this model cannot be cut into windows")
	case len(q.Nodes) < 3:
		none.Refused = "it takes three nodes at the least"
	}
	if none.Refused != "" {
		return none
	}
	var best *Candidate
	for k := 2; k < min(len(q.Nodes), maxBackbones+1); k++ {
		stages := q.tour(q.Nodes[:k])
		others := q.byDistance(stages[0], slices.Clone(q.Nodes[k:]))
		for _, p := range q.pools(others) {
			if r := q.divide(stages, oneStream, p); r != nil {
				best = better(best, q.rate(BackboneRing, r), oneStream)
			}
		}
	}
	if best == nil {
		return q.noWindows(BackboneRing)
	}
	return *best
}

// maxBackbones bounds the rings of backbones that are tried.
const maxBackbones = 8

// pools are the fewest of the nodes that hold all experts, and all of them.
func (q *Query) pools(nodes []Node) []*pool {
	all := q.newPool(nodes)
	if all == nil {
		return nil
	}
	for k := 1; k < len(nodes); k++ {
		if p := q.newPool(nodes[:k]); p != nil {
			return []*pool{p, all}
		}
	}
	return []*pool{all}
}
