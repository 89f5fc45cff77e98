package market

import (
	"cmp"
	"math"
	"slices"

	"kvasird/ggml/gguf"
)

// The tiling of a model by windows. A chain of stages needs windows that begin exactly where
// others end, from layer 0 to the last. So windows are edges between bounds, and a chain is a path;
// the most chains of which no two share a window are a maximum flow. What one more chain lacks is
// the cheapest path over what the flow leaves, on which a step from one bound to the next without
// a window costs its layers.

// Tiled reports whether some of the windows tile [0, layers) exactly. If none do, missing is what
// lacks: the least layers, in the fewest ranges of those, that windows of just these ranges would
// have to hold; so it may name layers that windows with other bounds cover.
func Tiled(windows []gguf.Range, layers int) (ok bool, missing []gguf.Range) {
	if layers < 1 {
		return false, nil
	}
	g := newTiling(boundsOf(windows, layers), windows)
	if g.fill(1) > 0 {
		return true, nil
	}
	return false, g.missing()
}

// Chains returns how many chains of windows there are of which no two share a window, at most
// most.
func Chains(windows []gguf.Range, layers, most int) int {
	if layers < 1 {
		return 0
	}
	return newTiling(boundsOf(windows, layers), windows).fill(most)
}

// boundsOf lists the bounds of windows of a model, and its own.
func boundsOf(windows []gguf.Range, layers int) []int {
	at := []int{0, layers}
	for _, w := range windows {
		if 0 <= w.Begin && w.Begin < w.End && w.End <= layers {
			at = append(at, w.Begin, w.End)
		}
	}
	slices.Sort(at)
	return slices.Compact(at)
}

// tiling is the graph. Bounds are told by their index in at.
type tiling struct {
	at     []int     // layers, ascending, from 0 to all
	left   [][]int32 // windows from one bound to another that no chain uses; backwards: those that one does
	chains int
}

// newTiling returns the graph of windows; those with other bounds are left out.
func newTiling(at []int, windows []gguf.Range) *tiling {
	g := &tiling{at: at, left: make([][]int32, len(at))}
	flat := make([]int32, len(at)*len(at))
	for i := range g.left {
		g.left[i] = flat[i*len(at) : (i+1)*len(at)]
	}
	for _, w := range windows {
		g.add(w)
	}
	return g
}

func (g *tiling) add(w gguf.Range) {
	i, ok := slices.BinarySearch(g.at, w.Begin)
	j, also := slices.BinarySearch(g.at, w.End)
	if ok && also && i < j {
		g.left[i][j]++
	}
}

// clone returns a copy to try something on.
func (g *tiling) clone() *tiling {
	c := newTiling(g.at, nil)
	for i := range g.left {
		copy(c.left[i], g.left[i])
	}
	c.chains = g.chains
	return c
}

// fill finds chains until there are most or no more, and returns how many there are.
func (g *tiling) fill(most int) int {
	last := len(g.at) - 1
	from := make([]int, len(g.at))
	for g.chains < most {
		for i := range from {
			from[i] = -1
		}
		queue := []int{0}
		for k := 0; k < len(queue) && from[last] < 0; k++ {
			for j, n := range g.left[queue[k]] {
				if n > 0 && j > 0 && from[j] < 0 {
					from[j] = queue[k]
					queue = append(queue, j)
				}
			}
		}
		if from[last] < 0 {
			break
		}
		for j := last; j > 0; j = from[j] {
			g.left[from[j]][j]--
			g.left[j][from[j]]++
		}
		g.chains++
	}
	return g.chains
}

// A cost is layers × costLayer + ranges of layers that lack; far is no path.
const (
	costLayer = 1 << 11
	far       = math.MaxInt / 2
)

// path is the least cost from the first bound to one, or from one to the last, split by whether
// its last step is without a window: then one more such step is of the same range.
type path struct {
	cost [2]int
	from [2]step
}

type step struct {
	bound int
	kind  int // of the path before
}

func (p *path) best() (cost, kind int) {
	if p.cost[1] < p.cost[0] {
		return p.cost[1], 1
	}
	return p.cost[0], 0
}

// paths returns the least costs from the first bound to every one, or to the last from every one.
func (g *tiling) paths(backwards bool) []path {
	n := len(g.at)
	list := make([]path, n)
	for i := range list {
		list[i].cost = [2]int{far, far}
	}
	start, ahead := 0, 1
	if backwards {
		start, ahead = n-1, -1
	}
	list[start].cost[0] = 0
	for changed := true; changed; {
		changed = false
		relax := func(to, kind, cost int, from step) {
			if p := &list[to]; cost < p.cost[kind] {
				p.cost[kind], p.from[kind], changed = cost, from, true
			}
		}
		for k := range n {
			i := start + ahead*k
			cost, kind := list[i].best()
			if cost >= far {
				continue
			}
			for j := range n {
				if !backwards && g.left[i][j] > 0 || backwards && g.left[j][i] > 0 {
					relax(j, 0, cost, step{i, kind})
				}
			}
			if j := i + ahead; 0 <= j && j < n {
				lacks := costLayer * (max(g.at[i], g.at[j]) - min(g.at[i], g.at[j]))
				relax(j, 1, list[i].cost[0]+lacks+1, step{i, 0})
				relax(j, 1, list[i].cost[1]+lacks, step{i, 1})
			}
		}
	}
	return list
}

// missing returns what one chain more lacks, ascending.
func (g *tiling) missing() []gguf.Range {
	list := g.paths(false)
	i := len(list) - 1
	_, kind := list[i].best()
	var out []gguf.Range
	for i > 0 {
		s := list[i].from[kind]
		if kind == 1 {
			r := gguf.Range{Begin: g.at[s.bound], End: g.at[i]}
			if n := len(out); n > 0 && out[n-1].Begin == r.End {
				out[n-1].Begin = r.Begin
			} else {
				out = append(out, r)
			}
		}
		i, kind = s.bound, s.kind
	}
	slices.SortFunc(out, func(a, b gguf.Range) int { return cmp.Compare(a.Begin, b.Begin) })
	return out
}

// worth is how many chains there are, and the part of one more that is there: what a window that
// is taken, left or moved is to raise.
func (g *tiling) worth() float64 {
	g.fill(math.MaxInt)
	cost, _ := g.paths(false)[len(g.at)-1].best()
	return float64(g.chains) + 1 - float64(cost/costLayer)/float64(g.at[len(g.at)-1])
}
