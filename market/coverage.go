package market

import (
	"math/bits"
	"time"

	"kvasird/ggml/gguf"
)

// Segment is a run of experts of one layer that are equally well covered.
type Segment struct {
	Experts  gguf.Range
	Replicas int // authors that serve
	Claimed  int // authors that have claimed, or are loading
	Target   int
	Scarcity float64 // max(0, 1 - Replicas/Target)
}

// LayerCoverage is all segments of a layer, in order.
type LayerCoverage struct {
	Layer    int
	Segments []Segment
}

// Coverage is who covers a model, as one node sees it.
type Coverage struct {
	Model     gguf.ModelID
	Name      string // as the author with the least identity names it
	Shape     Shape
	Trusted   bool // the shape is from a verified header
	Target    int  // for experts that are not hot
	Authors   int  // that say something of the model
	Sources   int  // that have every byte
	Backbones int  // that run it
	Cells     int
	Covered   int // cells with a replica
	AtTarget  int // cells with all that they should have
	Layers    []LayerCoverage
}

// Coverage returns the coverage of a model, false if nobody announces it.
func (t *Table) Coverage(id gguf.ModelID, now time.Time) (Coverage, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	y := t.tallyLocked(id)
	if y == nil {
		return Coverage{}, false
	}
	c := Coverage{Model: id, Shape: y.shape, Trusted: y.trusted, Target: t.policy.Target, Authors: y.authors,
		Sources: y.sources, Backbones: y.backbones, Cells: y.shape.Cells()}
	first := ""
	for _, x := range t.authors {
		if m := x.model(id); m != nil && m.Name != "" && (c.Name == "" || x.id < first) {
			c.Name, first = m.Name, x.id
		}
	}
	for _, r := range y.shape.MoE {
		for l := r.Begin; l < r.End; l++ {
			lc := LayerCoverage{l, y.segments(l)}
			for _, s := range lc.Segments {
				if s.Replicas > 0 {
					c.Covered += s.Experts.Len()
				}
				if s.Replicas >= s.Target {
					c.AtTarget += s.Experts.Len()
				}
			}
			c.Layers = append(c.Layers, lc)
		}
	}
	return c, true
}

// tally counts a model's authors per cell.
type tally struct {
	policy    *Policy
	id        gguf.ModelID
	shape     Shape
	trusted   bool
	serving   []uint16 // per cell, see Shape.cell
	claimed   []uint16
	loading   []uint16
	authors   int
	sources   int
	backbones int
	demand    map[*author][]LayerDemand
	claims    map[*author][]Holding // of authors that have claimed something
	target    []uint16              // nil: to be computed from demand
}

// tallyLocked returns the counts of a model, nil if nobody announces it.
func (t *Table) tallyLocked(id gguf.ModelID) *tally {
	y := t.tallies[id]
	if y == nil {
		shape, trusted, ok := t.shapeLocked(id)
		if !ok {
			return nil
		}
		n := shape.Layers * shape.Experts
		y = &tally{policy: &t.policy, id: id, shape: shape, trusted: trusted, serving: make([]uint16, n),
			claimed: make([]uint16, n), loading: make([]uint16, n), demand: map[*author][]LayerDemand{},
			claims: map[*author][]Holding{}}
		for _, x := range t.authors {
			if m := x.model(id); m != nil {
				y.add(x, m, 1)
			}
		}
		if y.authors == 0 && !trusted {
			return nil
		}
		t.makeRoomLocked()
		t.tallies[id] = y
	}
	if y.target == nil {
		y.setTargets()
	}
	return y
}

func (t *Table) makeRoomLocked() {
	for id := range t.tallies {
		if len(t.tallies) < maxTallies {
			return
		}
		delete(t.tallies, id)
	}
}

// add counts what an author says, sign 1, or takes it out again, sign -1.
func (y *tally) add(x *author, m *ModelNews, sign int) {
	if !m.Shape.Equal(y.shape) {
		return
	}
	y.authors += sign
	if m.Full {
		y.sources += sign
	}
	if m.Backbone {
		y.backbones += sign
	}
	if len(m.Demand) > 0 {
		y.target = nil
		if sign > 0 {
			y.demand[x] = m.Demand
		} else {
			delete(y.demand, x)
		}
	}
	for _, h := range m.Holdings {
		var counts []uint16
		switch x.stateOf(h.State, h.Lease) {
		case Claimed:
			counts = y.claimed
			if sign > 0 {
				y.claims[x] = m.Holdings
			} else {
				delete(y.claims, x)
			}
		case Loading:
			counts = y.loading
		case Serving:
			counts = y.serving
		default:
			continue
		}
		y.shape.eachRow(h.Slice, func(begin, end int) {
			for i := range counts[begin:end] {
				counts[begin+i] += uint16(sign)
			}
		})
	}
}

// setTargets computes the target of every cell.
//
// An expert that gets r times the mean share of its layer's pairs has a target higher by
// floor(log2(r)), at most MaxBonus: twice the mean is one replica more, four times two. Where
// several backbones measured, each weighs the number of digits of its pairs (binary), not the
// pairs: nobody proves its figures, and so a lie multiplies little.
func (y *tally) setTargets() {
	y.target = make([]uint16, len(y.serving))
	for i := range y.target {
		y.target[i] = uint16(y.policy.Target)
	}
	weights := make([]int, y.shape.Layers)
	shares := make(map[int]int)
	for _, list := range y.demand {
		for _, d := range list {
			w := bits.Len64(d.Pairs)
			weights[d.Layer] += w
			for _, h := range d.Hot {
				shares[y.shape.cell(d.Layer, h.Expert)] += w * h.Share
			}
		}
	}
	for cell, sum := range shares {
		if w := weights[cell/y.shape.Experts]; w > 0 {
			y.target[cell] += uint16(bonus(sum*y.shape.Experts, w*shareUnit, y.policy.MaxBonus))
		}
	}
}

// bonus is floor(log2(num/den)), from 0 to most.
func bonus(num, den, most int) int {
	n := 0
	for n < most && num >= 2*den {
		n++
		den *= 2
	}
	return n
}

// segments returns the runs of a layer.
func (y *tally) segments(layer int) []Segment {
	var list []Segment
	base := y.shape.cell(layer, 0)
	for e := range y.shape.Experts {
		i := base + e
		s := Segment{gguf.Range{Begin: e, End: e + 1}, int(y.serving[i]), int(y.claimed[i] + y.loading[i]),
			int(y.target[i]), scarcity(int(y.serving[i]), int(y.target[i]))}
		if n := len(list); n > 0 {
			last := &list[n-1]
			if last.Replicas == s.Replicas && last.Claimed == s.Claimed && last.Target == s.Target {
				last.Experts.End++
				continue
			}
		}
		list = append(list, s)
	}
	return list
}

// scarcity is max(0, 1 - replicas/target).
func scarcity(replicas, target int) float64 {
	if replicas >= target {
		return 0
	}
	return 1 - float64(replicas)/float64(target)
}
