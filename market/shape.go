package market

import (
	"fmt"

	"kvasird/ggml/gguf"
)

// Limits of a model's geometry, checked before anything is allocated for it.
const (
	MaxLayers  = 1024
	MaxExperts = 4096    // per layer
	MaxCells   = 1 << 18 // layers × experts
	maxRuns    = 256     // ranges of MoE layers
)

// Shape says which cells a model has: every MoE layer has Experts of them. A dense model has layers
// and no cells. The zero value is unknown.
type Shape struct {
	Layers  int          // all layers, also those without experts
	Experts int          // per MoE layer
	MoE     []gguf.Range // layers with experts: ascending, with a gap between two ranges
}

// ShapeOf reads the shape from a model's header.
func ShapeOf(m *gguf.Model) (Shape, error) {
	if m.Pooling() != gguf.NoPooling { // it runs on one node, experts and all
		s := Shape{Layers: m.Layers()}
		return s, s.Check()
	}
	s := Shape{Layers: m.Layers(), Experts: m.Experts()}
	for _, l := range m.ExpertLayers() {
		if n := len(s.MoE); n > 0 && s.MoE[n-1].End == l {
			s.MoE[n-1].End++
			continue
		}
		s.MoE = append(s.MoE, gguf.Range{Begin: l, End: l + 1})
	}
	return s, s.Check()
}

// Check says why the shape is not one, or nil.
func (s Shape) Check() error {
	if s.Layers < 1 || s.Layers > MaxLayers || s.Experts < 0 || s.Experts > MaxExperts ||
		s.Layers*s.Experts > MaxCells {
		return fmt.Errorf("%d layers of %d experts: want 1 to %d layers of up to %d experts, at most %d in all",
			s.Layers, s.Experts, MaxLayers, MaxExperts, MaxCells)
	}
	if s.Experts == 0 && len(s.MoE) == 0 {
		return nil
	}
	if s.Experts == 0 || len(s.MoE) < 1 || len(s.MoE) > maxRuns {
		return fmt.Errorf("%d ranges of MoE layers, with %d experts each, want 1 to %d", len(s.MoE), s.Experts, maxRuns)
	}
	last := -1
	for _, r := range s.MoE {
		if r.Begin <= last || r.Begin >= r.End || r.End > s.Layers {
			return fmt.Errorf("MoE layers %v of %d are not ascending ranges with gaps", r, s.Layers)
		}
		last = r.End
	}
	return nil
}

// Equal reports whether both name the same cells.
func (s Shape) Equal(o Shape) bool {
	if s.Layers != o.Layers || s.Experts != o.Experts || len(s.MoE) != len(o.MoE) {
		return false
	}
	for i, r := range s.MoE {
		if r != o.MoE[i] {
			return false
		}
	}
	return true
}

// Has reports whether every cell of the slice exists.
func (s Shape) Has(x gguf.Slice) bool {
	if x.Layers.Len() == 0 || x.Experts.Len() == 0 || x.Experts.Begin < 0 || x.Experts.End > s.Experts {
		return false
	}
	for _, r := range s.MoE {
		if r.Covers(x.Layers) {
			return true
		}
	}
	return false
}

// Cells counts the cells.
func (s Shape) Cells() int {
	n := 0
	for _, r := range s.MoE {
		n += r.Len() * s.Experts
	}
	return n
}

// cell is the index of a cell in a slice of Layers × Experts.
func (s Shape) cell(layer, expert int) int { return layer*s.Experts + expert }

// eachRow calls fn with the index range of the slice's cells in each layer.
func (s Shape) eachRow(x gguf.Slice, fn func(begin, end int)) {
	for l := x.Layers.Begin; l < x.Layers.End; l++ {
		fn(s.cell(l, x.Experts.Begin), s.cell(l, x.Experts.End))
	}
}

func (s Shape) String() string {
	if s.Experts == 0 {
		return fmt.Sprintf("%d layers without experts", s.Layers)
	}
	return fmt.Sprintf("%d layers, experts in %v, %d each", s.Layers, s.MoE, s.Experts)
}
