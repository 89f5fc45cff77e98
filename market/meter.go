package market

import (
	"cmp"
	"math"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// halfLife is the time in which a count loses half of its weight.
const halfLife = 10 * time.Minute

// Meter counts which experts a backbone's router picks. Old counts decay, so that it follows what
// is asked now. It is not safe for concurrent use.
type Meter struct {
	shape  Shape
	counts []float32 // per cell, decayed to the instant at
	at     time.Time
}

// NewMeter returns a meter for a model.
func NewMeter(s Shape) (*Meter, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if s.Experts == 0 {
		return nil, refuse(BadShape, "a dense model has no experts to count")
	}
	return &Meter{shape: s, counts: make([]float32, s.Layers*s.Experts)}, nil
}

// Add counts pairs of a row and an expert. Cells that do not exist are ignored.
func (m *Meter) Add(layer, expert, pairs int, now time.Time) {
	if pairs <= 0 || layer < 0 || expert < 0 || !m.shape.Has(cellSlice(layer, expert)) {
		return
	}
	if m.at.IsZero() {
		m.at = now
	}
	// Decay in steps, not on every call: a step is far below the half-life.
	if now.Sub(m.at) > halfLife/20 {
		m.decay(now)
	}
	m.counts[m.shape.cell(layer, expert)] += float32(pairs)
}

func cellSlice(layer, expert int) gguf.Slice {
	return gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{Begin: expert, End: expert + 1}}
}

func (m *Meter) decay(now time.Time) {
	f := float32(math.Exp2(-float64(now.Sub(m.at)) / float64(halfLife)))
	for i := range m.counts {
		m.counts[i] *= f
	}
	m.at = now
}

// significant is how many pairs a layer must have for each expert before some count as hot: a
// few tokens say nothing of what is asked for.
const significant = 16

// Demand returns what to announce: the pairs of every layer that has any, to three binary digits,
// and, once there are enough to tell, the experts that get more than one and a half times the mean, at most MaxHot of a layer
// and fewer where a model has many layers, their shares to three binary digits. So a steady load
// has a steady description.
func (m *Meter) Demand(now time.Time) []LayerDemand {
	if m.at.IsZero() {
		return nil
	}
	m.decay(now)
	layers := m.shape.Cells() / m.shape.Experts
	most := min(MaxHot, maxHotAll/layers)
	var list []LayerDemand
	for l := range m.shape.Layers {
		row := m.counts[m.shape.cell(l, 0):m.shape.cell(l+1, 0)]
		var sum float64
		for _, n := range row {
			sum += float64(n)
		}
		if sum < 1 {
			continue
		}
		d := LayerDemand{Layer: l, Pairs: coarse(min(uint64(sum), maxPairs))}
		if sum >= float64(significant*len(row)) {
			d.Hot = hot(row, sum, most)
		}
		list = append(list, d)
	}
	return list
}

// hot lists the experts of a layer that are worth mentioning.
func hot(row []float32, sum float64, most int) []HotExpert {
	var list []HotExpert
	for e, n := range row {
		share := int(float64(n) / sum * shareUnit)
		if share > 0 && 2*share*len(row) > 3*shareUnit {
			list = append(list, HotExpert{e, share})
		}
	}
	slices.SortFunc(list, func(a, b HotExpert) int {
		return cmp.Or(cmp.Compare(b.Share, a.Share), cmp.Compare(a.Expert, b.Expert))
	})
	list = list[:min(len(list), most)]
	for i := range list {
		list[i].Share = int(coarse(uint64(list[i].Share)))
	}
	slices.SortFunc(list, func(a, b HotExpert) int { return cmp.Compare(a.Expert, b.Expert) })
	return list
}

// coarse rounds down to three binary digits, so that sums stay below what they were.
func coarse(n uint64) uint64 {
	shift := 0
	for n>>shift > 7 {
		shift++
	}
	return n >> shift << shift
}
