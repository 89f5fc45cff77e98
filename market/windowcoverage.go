package market

import (
	"time"

	"kvasird/ggml/gguf"
)

// WindowSegment is a run of layers that are equally well covered by windows.
type WindowSegment struct {
	Layers  gguf.Range
	Serving int // authors that serve them in a window, and do not leave
	Claimed int // authors that have claimed, or are loading
}

// WindowCoverage is who covers the layers of a model by windows, as one node sees it.
type WindowCoverage struct {
	Model     gguf.ModelID
	Layers    int
	Holders   int // authors that serve a window
	Whole     int // windows that serve all layers: whole replicas
	Segments  []WindowSegment
	Uncovered []gguf.Range // layers that nobody serves
	// Chains is how many chains serve of which no two share a window, at most MaxChains. If there
	// is none, Missing is what lacks, see Tiled: also layers that are covered, where bounds do not
	// meet.
	Chains  int
	Missing []gguf.Range
}

// MaxChains is up to where chains are counted.
const MaxChains = 64

// WindowCoverage returns the coverage of a model by windows, false if nobody announces the model.
// own are windows that are not in the table, since no author hears itself.
func (t *Table) WindowCoverage(id gguf.ModelID, now time.Time, own ...WindowHolder) (WindowCoverage, bool) {
	holders := append(t.Windows(id, now), own...)
	t.mu.Lock()
	shape, _, ok := t.shapeLocked(id)
	t.mu.Unlock()
	if !ok {
		return WindowCoverage{}, false
	}
	c := WindowCoverage{Model: id, Layers: shape.Layers}
	serving, claimed := make([]int, shape.Layers), make([]int, shape.Layers)
	var windows []gguf.Range
	last := ""
	for _, w := range holders {
		if w.Layers.End > shape.Layers {
			continue // the shape changed between
		}
		count := claimed
		switch w.State {
		case Leaving:
			continue
		case Serving:
			count = serving
			windows = append(windows, w.Layers)
			if w.Peer != last {
				c.Holders++
			}
			if last = w.Peer; w.Layers.Len() == shape.Layers {
				c.Whole++
			}
		}
		for l := w.Layers.Begin; l < w.Layers.End; l++ {
			count[l]++
		}
	}
	for l := range shape.Layers {
		one := gguf.Range{Begin: l, End: l + 1}
		if n := len(c.Segments); n > 0 && c.Segments[n-1].Serving == serving[l] && c.Segments[n-1].Claimed == claimed[l] {
			c.Segments[n-1].Layers.End++
		} else {
			c.Segments = append(c.Segments, WindowSegment{one, serving[l], claimed[l]})
		}
		if n := len(c.Uncovered); serving[l] == 0 && n > 0 && c.Uncovered[n-1].End == l {
			c.Uncovered[n-1].End++
		} else if serving[l] == 0 {
			c.Uncovered = append(c.Uncovered, one)
		}
	}
	if c.Chains = Chains(windows, shape.Layers, MaxChains); c.Chains == 0 {
		_, c.Missing = Tiled(windows, shape.Layers)
	}
	return c, true
}
