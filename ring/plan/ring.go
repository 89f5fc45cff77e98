package plan

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kvasird/ggml/gguf"
)

// goal is what a division of layers is to be best at.
type goal int

const (
	oneStream   goal = iota // the least sum of the stages' times
	manyStreams             // the least time of the slowest stage
)

// ring is stages in order, each on a node, and who computes their experts when they
// do not.
type ring struct {
	stages []*fitted
	pool   *pool // nil: stages have their experts
}

// rings are the best ring for one stream and, when that is another one, for many.
func (q *Query) rings() []Candidate {
	if len(q.Cuts) == 0 {
		why := q.NoCuts
		if why == "" {
			why = "this model cannot be cut into windows"
		}
		return []Candidate{{Kind: Ring, Refused: why}}
	}
	if len(q.Nodes) < 2 {
		return []Candidate{{Kind: Ring, Refused: "one node is no ring"}}
	}
	var found []Candidate
	for g, kind := range []Kind{oneStream: Ring, manyStreams: EvenRing} {
		var best *Candidate
		for k := 2; k <= len(q.Nodes); k++ {
			if r := q.divide(q.tour(q.Nodes[:k]), goal(g), nil); r != nil {
				best = better(best, q.rate(kind, r), goal(g))
			}
		}
		if best == nil {
			return []Candidate{q.noWindows(Ring)}
		}
		found = append(found, *best)
	}
	if slices.EqualFunc(found[0].Places, found[1].Places, samePlace) {
		found = found[:1]
	}
	return found
}

func samePlace(a, b Place) bool { return a.Node == b.Node && a.Layers == b.Layers }

// better is the faster of two candidates for a goal.
func better(best *Candidate, c Candidate, g goal) *Candidate {
	a := func(c *Candidate) float64 {
		if g == oneStream {
			return c.One.TokensPerSecond
		}
		return c.Many.TokensPerSecond
	}
	if best == nil || a(&c) > a(best) {
		return &c
	}
	return best
}

// noWindows says why no windows fit the nodes: what all of them lack together, or
// that the cuts are too coarse.
func (q *Query) noWindows(kind Kind) Candidate {
	all, _ := q.Model.Bytes()
	need := all
	for _, l := range q.Model.Layers {
		need += q.kv(l)
	}
	var have int64
	for _, n := range q.Nodes {
		have += max(0, n.RAM-processBytes-q.scratch(false)) + max(0, n.device()-deviceBytes-q.scratch(false))
	}
	if need > have {
		return refused(kind, &NoRoomError{"", fmt.Sprintf("the model with %d tokens of context", q.Context), need - have})
	}
	return Candidate{Kind: kind, Refused: fmt.Sprintf(
		"does not fit: all nodes together have room, but not for windows that begin at the layers %s", numbers(q.Cuts))}
}

// numbers lists the first of some numbers.
func numbers(list []int) string {
	const most = 12
	var texts []string
	for _, n := range list[:min(len(list), most)] {
		texts = append(texts, strconv.Itoa(n))
	}
	if len(list) > most {
		texts = append(texts, "…")
	}
	return strings.Join(texts, ", ")
}

// tour orders nodes so that neighbours are near: always on to the nearest, then
// parts of the way are turned around while that makes it shorter.
func (q *Query) tour(nodes []Node) []Node {
	way := slices.Clone(nodes)
	for i := 1; i < len(way); i++ {
		near := i
		for j := i + 1; j < len(way); j++ {
			if q.rtt(way[i-1], way[j]) < q.rtt(way[i-1], way[near]) {
				near = j
			}
		}
		way[i], way[near] = way[near], way[i]
	}
	n := len(way)
	for improved := true; improved; {
		improved = false
		for i := 0; i < n-1; i++ {
			for j := i + 1; j < n; j++ {
				a, b, c, d := way[(i+n-1)%n], way[i], way[j], way[(j+1)%n]
				if i == 0 && j == n-1 {
					continue
				}
				if q.rtt(a, c)+q.rtt(b, d) < q.rtt(a, b)+q.rtt(c, d) {
					slices.Reverse(way[i : j+1])
					improved = true
				}
			}
		}
	}
	return way
}

// divide gives each of the nodes a window, in their order from any of them on, so
// that the goal is met best; nil when nothing fits.
func (q *Query) divide(nodes []Node, g goal, p *pool) *ring {
	bounds := append([]int{0}, q.Cuts...)
	bounds = append(bounds, len(q.Model.Layers))
	if len(bounds)-1 < len(nodes) {
		return nil // fewer windows than nodes
	}
	t := q.newTable(nodes, bounds, g, p)
	var best *ring
	least := 0.0
	for turn := range nodes {
		if value, r := t.solve(turn); r != nil && (best == nil || value < least) {
			best, least = r, value
		}
	}
	return best
}

// table holds what each window would cost on each node.
type table struct {
	nodes  int
	bounds []int
	goal   goal
	pool   *pool
	cells  []*fitted // by node, first bound and last bound; nil: does not fit
	value  []float64
}

func (t *table) at(node, from, to int) int {
	return (node*len(t.bounds)+from)*len(t.bounds) + to
}

func (q *Query) newTable(nodes []Node, bounds []int, g goal, p *pool) *table {
	n := len(nodes) * len(bounds) * len(bounds)
	t := &table{len(nodes), bounds, g, p, make([]*fitted, n), make([]float64, n)}
	role := Stage
	if p != nil {
		role = Backbone
	}
	rows := 1.0
	if g == manyStreams {
		rows = q.share(len(nodes))
	}
	for i, node := range nodes {
		for from := range bounds {
			for to := from + 1; to < len(bounds); to++ {
				f, seconds := q.cell(node, load{role, gguf.Range{Begin: bounds[from], End: bounds[to]}, p == nil}, p, rows)
				if f == nil {
					break // a longer one does not fit either
				}
				t.cells[t.at(i, from, to)], t.value[t.at(i, from, to)] = f, seconds
			}
		}
	}
	return t
}

// cellKey names a load on a node, asked about for steps of some rows.
type cellKey struct {
	node string
	load load
	pool *pool
	rows float64
}

type cell struct {
	fitted  *fitted // nil: does not fit
	seconds float64
}

// stays is how much faster a window counts that is there than one that is to be
// downloaded: less than predictions err, so that what serves stays where it is.
const stays = 0.01

// cell fits a load and times it, once, for a comparison with others.
func (q *Query) cell(node Node, l load, p *pool, rows float64) (*fitted, float64) {
	key := cellKey{node.Name, l, p, rows}
	if c, ok := q.cells[key]; ok {
		return c.fitted, c.seconds
	}
	var c cell
	if f, err := q.fit(node, l); err == nil {
		step := q.stage(f, p, rows)
		c = cell{f, step.total() * (1 - stays*float64(f.Disk-f.Download)/float64(max(1, f.Disk)))}
	}
	q.cells[key] = c
	return c.fitted, c.seconds
}

// solve finds the best windows when the ring begins with a given node.
func (t *table) solve(turn int) (float64, *ring) {
	type state struct {
		value float64
		from  int // bound; -1: not reached
	}
	steps := make([][]state, t.nodes+1)
	for i := range steps {
		steps[i] = make([]state, len(t.bounds))
		for j := range steps[i] {
			steps[i][j].from = -1
		}
	}
	steps[0][0] = state{0, 0}
	for i := range t.nodes {
		node := (turn + i) % t.nodes
		for from, s := range steps[i] {
			if s.from < 0 {
				continue
			}
			for to := from + 1; to < len(t.bounds); to++ {
				if t.cells[t.at(node, from, to)] == nil {
					continue
				}
				v := t.value[t.at(node, from, to)]
				if t.goal == oneStream {
					v += s.value
				} else {
					v = max(v, s.value)
				}
				if next := &steps[i+1][to]; next.from < 0 || v < next.value {
					*next = state{v, from}
				}
			}
		}
	}
	to := len(t.bounds) - 1
	end := steps[t.nodes][to]
	if end.from < 0 {
		return 0, nil
	}
	r := &ring{stages: make([]*fitted, t.nodes), pool: t.pool}
	for i := t.nodes; i > 0; i-- {
		from := steps[i][to].from
		r.stages[i-1] = t.cells[t.at((turn+i-1)%t.nodes, from, to)]
		to = from
	}
	return end.value, r
}

// share are the rows of a step when the sequences are divided into as many
// micro-batches as there are stages.
func (q *Query) share(stages int) float64 {
	return float64((q.Sequences + stages - 1) / stages)
}

// stage is the cost of a step on one stage, the work of expert workers included.
func (q *Query) stage(f *fitted, p *pool, rows float64) cost {
	c := q.time(f, rows)
	if p != nil {
		c.join(p.time(q, f, rows))
	}
	return c
}

// round is the cost of a micro-batch's way round the ring.
func (q *Query) round(r *ring, rows float64) cost {
	var c cost
	for i, f := range r.stages {
		c.join(q.stage(f, r.pool, rows))
		next := r.stages[(i+1)%len(r.stages)].node
		bytes := rows * q.rowBytes()
		if i == len(r.stages)-1 {
			bytes = 0 // tokens only
		}
		q.link(f.node, next, bytes, &c)
	}
	return c
}

// rate predicts a ring, also one of a single stage.
func (q *Query) rate(kind Kind, r *ring) Candidate {
	c := Candidate{Kind: kind, One: q.round(r, 1).rate(1)}
	for _, f := range r.stages {
		c.Places = append(c.Places, f.Place)
	}
	if r.pool != nil {
		c.Places = append(c.Places, r.pool.places(q)...)
	}
	k := min(len(r.stages), q.Sequences)
	rows := q.share(k)
	many := q.round(r, rows)
	total := many.total()
	for _, f := range r.stages { // micro-batches follow each other: the slowest stage sets the pace
		step := q.stage(f, r.pool, rows)
		if busy := float64(k) * step.total(); busy > total {
			many, total = nil, busy
			for range k {
				many.join(step)
			}
		}
	}
	c.Many = many.rate(float64(q.Sequences))
	return c
}
