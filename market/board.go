package market

import (
	"math"
	"time"

	"kvasird/ggml/gguf"
)

// board is one model's counts without one author: what a volunteer sees of the others.
type board struct {
	id        gguf.ModelID
	hash      uint64
	shape     Shape
	backbones int
	serving   []uint16 // per cell
	fixed     []uint16 // serving or loading
	pending   []uint16 // claimed
	target    []uint16
	base      int // target of cells that are not hot
	bids      []bid
}

// bid is a claim of another peer.
type bid struct {
	peer  uint64
	slice gguf.Slice
}

// board returns the counts of a model whose header was verified, nil of others.
func (t *Table) board(id gguf.ModelID, without string, now time.Time) *board {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	y := t.tallyLocked(id)
	if y == nil || !y.trusted {
		return nil
	}
	n := len(y.serving)
	cells := make([]uint16, 3*n)
	b := &board{id: id, hash: hashID(id), shape: y.shape, backbones: y.backbones, target: y.target,
		serving: cells[:n], fixed: cells[n : 2*n], pending: cells[2*n:], base: t.policy.Target}
	copy(b.serving, y.serving)
	copy(b.pending, y.claimed)
	for i := range b.fixed {
		b.fixed[i] = y.serving[i] + y.loading[i]
	}
	for x, holdings := range y.claims {
		for _, h := range holdings {
			if x.id != without && x.stateOf(h.State, h.Lease) == Claimed {
				b.bids = append(b.bids, bid{x.hash, h.Slice})
			}
		}
	}
	if x := t.authors[without]; x != nil {
		if m := x.model(id); m != nil && m.Shape.Equal(y.shape) {
			for _, h := range m.Holdings {
				b.remove(h.Slice, x.stateOf(h.State, h.Lease))
			}
		}
	}
	return b
}

func (b *board) remove(s gguf.Slice, state State) {
	b.shape.eachRow(s, func(begin, end int) {
		for i := begin; i < end; i++ {
			switch state {
			case Serving:
				b.serving[i]--
				b.fixed[i]--
			case Loading:
				b.fixed[i]--
			case Claimed:
				b.pending[i]--
			}
		}
	})
}

// key says how well a cell is covered that has n replicas: 1 at its target.
func (b *board) key(cell, n int) float64 { return float64(n) / float64(b.target[cell]) }

// total counts who serves, loads or has claimed a cell.
func (b *board) total(cell int) int { return int(b.fixed[cell]) + int(b.pending[cell]) }

// quota is how many replicas a cell has at a level, which counts replicas of cells that are not
// hot.
func (b *board) quota(cell, level int) int {
	return (level*int(b.target[cell]) + b.base - 1) / b.base
}

// level is the highest level to which supply cells, placed where they lack most, would bring
// every cell: as water poured on an uneven floor.
func (b *board) level(supply int) int {
	low, high := 0, maxTarget // low fits
	for low < high {
		mid := (low + high + 1) / 2
		if b.lacking(mid, supply) {
			high = mid - 1
		} else {
			low = mid
		}
	}
	return low
}

// lacking reports whether more than supply cells are needed to reach a level.
func (b *board) lacking(level, supply int) bool {
	for _, r := range b.shape.MoE {
		for i := b.shape.cell(r.Begin, 0); i < b.shape.cell(r.End, 0); i++ {
			if supply -= max(0, b.quota(i, level)-int(b.fixed[i])); supply < 0 {
				return true
			}
		}
	}
	return false
}

// search is what to look for on a board.
type search struct {
	peer   uint64
	spread bool           // spread equals over peers; else the first is taken
	room   func(int) int  // by layer: how many experts fit
	own    []bool         // per cell: held already; nil: nothing
	limit  func(int) bool // by cell: whether a further replica is wanted, counting total
	supply int            // cells that others and the searcher have yet to place
}

// found is a range to volunteer for.
type found struct {
	layer   int
	experts gguf.Range
	key     float64 // total/target
	weight  int     // how many replicas it lacks up to the level of the supply, at least 1
	grows   bool    // touches what is held already
	whole   bool    // as long as fits
	score   float64 // lower is better
}

// before orders candidates: growing ranges, then whole ones, then by score.
func (f *found) before(o *found) bool {
	if f.grows != o.grows {
		return f.grows
	}
	if f.whole != o.whole {
		return f.whole
	}
	return f.score < o.score
}

// pick finds the scarcest range that fits. While much is claimed and not yet placed, everything
// below the level that it will reach is a candidate, in proportion to what it lacks: else all
// who look for a better place at one time would meet in the scarcest.
func (b *board) pick(s *search) (best found, ok bool) {
	level := 0
	if s.supply > 0 {
		level = b.level(s.supply)
	}
	key, below := b.scarcest(s, level)
	if math.IsInf(key, 1) {
		return best, false
	}
	b.eachRun(s, func(layer int, run gguf.Range, total int) {
		cell := b.shape.cell(layer, run.Begin)
		weight := b.quota(cell, level) - total
		if below && weight <= 0 || !below && b.key(cell, total) != key {
			return
		}
		f := found{layer: layer, key: b.key(cell, total), weight: max(weight, 1)}
		b.eachWindow(s, f, run, func(f found) {
			if !ok || f.before(&best) {
				best, ok = f, true
			}
		})
	})
	return best, ok
}

// scarcest returns the least key of all cells that may be picked, and whether any of them is
// below the level.
func (b *board) scarcest(s *search, level int) (key float64, below bool) {
	key = math.Inf(1)
	b.eachRun(s, func(layer int, run gguf.Range, total int) {
		cell := b.shape.cell(layer, run.Begin)
		key = min(key, b.key(cell, total))
		below = below || total < b.quota(cell, level)
	})
	return key, below
}

// eachRun calls fn for every run of experts that may be picked and are equally covered.
func (b *board) eachRun(s *search, fn func(layer int, run gguf.Range, total int)) {
	for _, r := range b.shape.MoE {
		for l := r.Begin; l < r.End; l++ {
			if s.room(l) < 1 {
				continue
			}
			base := b.shape.cell(l, 0)
			for e := 0; e < b.shape.Experts; {
				i := base + e
				if s.own != nil && s.own[i] || !s.limit(i) {
					e++
					continue
				}
				run := gguf.Range{Begin: e, End: e + 1}
				for ; run.End < b.shape.Experts; run.End++ {
					j := base + run.End
					if s.own != nil && s.own[j] || b.total(j) != b.total(i) || b.target[j] != b.target[i] {
						break
					}
				}
				fn(l, run, b.total(i))
				e = run.End
			}
		}
	}
}

// eachWindow cuts a run into ranges that fit, from the end at which the searcher holds
// something.
func (b *board) eachWindow(s *search, f found, run gguf.Range, fn func(found)) {
	room := s.room(f.layer)
	base := b.shape.cell(f.layer, 0)
	left := s.own != nil && run.Begin > 0 && s.own[base+run.Begin-1]
	right := s.own != nil && run.End < b.shape.Experts && s.own[base+run.End]
	for at := 0; at < run.Len(); at += room {
		n := min(room, run.Len()-at)
		f.experts = gguf.Range{Begin: run.Begin + at, End: run.Begin + at + n}
		if right && !left {
			f.experts = gguf.Range{Begin: run.End - at - n, End: run.End - at}
		}
		f.grows = at == 0 && (left || right)
		f.whole = n == room
		f.score = 0
		if s.spread {
			h := mix(s.peer, b.hash, uint64(f.layer), uint64(f.experts.Begin))
			f.score = -math.Log((float64(h>>11)+1)/(1<<53)) / float64(f.weight)
		}
		fn(f)
	}
}
