package gguf

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrCut is wrapped when a model cannot be cut so, or at all.
var ErrCut = errors.New("llama.cpp does not compute the parts of it as it computes the whole")

// cutRule says how models of an architecture may be cut into stages. The zero value is
// before any layer.
type cutRule struct {
	// every is a metadata key (after "<arch>."), an integer n by which llama.cpp tells
	// the kinds of layers apart: by the index modulo n. missing is n without the key.
	// A window begins at a multiple, or its layers would be taken for others, and the
	// last one has n layers, or it would lack a kind, on which the library aborts.
	every   string
	missing int
	// kinds are arrays per layer in which zero makes another kind of layer. A window
	// takes its part of them, and must have both kinds.
	kinds []string
	// embeddingScale is by what the graph multiplies embeddings of tokens, but not
	// other rows; nil: nothing.
	embeddingScale func(width int) float32
	// check refuses models of the architecture that cannot be cut; nil: none.
	check func(*Model) error
	// counts are numbers of layers that make llama.cpp take a model for another
	// variant: no window has as many.
	counts []int
}

func rootOfWidth(width int) float32 { return float32(math.Sqrt(float64(width))) }

// cutRules are the architectures that are exact when cut so: the tests of package
// ggml compare the logits of every cut, bit for bit, with those of the whole model.
var cutRules = map[string]cutRule{
	"llama":     {},
	"qwen3moe":  {},
	"deepseek2": {},
}

// Cuts returns the layers, but for 0, at which a stage may begin, ascending: any two
// of them, 0 and Layers included, bound a window that is exact. An error that wraps
// ErrCut says why there are none. It reads metadata only.
func (m *Model) Cuts() ([]int, error) {
	rule, ok := cutRules[m.arch]
	if !ok {
		return nil, m.noCut("its architecture is not among those that were proved")
	}
	if rule.check != nil {
		if err := rule.check(m); err != nil {
			return nil, err
		}
	}
	main, err := m.mainLayers()
	if err != nil {
		return nil, err
	}
	step, err := m.period(rule)
	if err != nil {
		return nil, err
	}
	step = m.avoid(step, main, rule.counts)
	var cuts []int
	for at := step; at+step <= main; at += step {
		cuts = append(cuts, at)
	}
	for _, key := range rule.kinds {
		v, ok := m.Meta().Get(m.arch + "." + key)
		if ok && v.Type() == Array && v.Len() >= main { // stages refuse other arrays
			cuts = withBothKinds(cuts, main, v)
		}
	}
	return cuts, nil
}

func (m *Model) noCut(why string) error {
	return fmt.Errorf("a model of %s cannot be cut into stages: %w: %s", m.arch, ErrCut, why)
}

// period returns the n of a rule's every; 1 without one.
func (m *Model) period(rule cutRule) (int, error) {
	if rule.every == "" {
		return 1, nil
	}
	key := m.arch + "." + rule.every
	if v, ok := m.Meta().Get(key); ok && v.Type() == Array {
		return 1, nil // its values are told by layer
	}
	n, err := m.Meta().count(key, rule.missing, maxIndex)
	return max(n, 1), err
}

// avoid returns the least multiple of step with which no window has one of the counts.
func (m *Model) avoid(step, main int, counts []int) int {
	fits := func(n int) bool {
		for _, c := range counts {
			// windows have k*n layers, or what remains at the end
			if c < m.layers && (c%n == 0 || (main-c) > 0 && (main-c)%n == 0 || m.layers-c > 0 && (m.layers-c)%n == 0) {
				return false
			}
		}
		return true
	}
	for n := step; n <= main; n += step {
		if fits(n) {
			return n
		}
	}
	return main
}

// withBothKinds keeps the cuts between which, as between the last and the end, an
// array per layer is zero for one and not for another, if it is so anywhere.
func withBothKinds(cuts []int, main int, perLayer Value) []int {
	zero := make([]bool, main)
	for i := range zero {
		n, _ := perLayer.Index(i).Float()
		b, _ := perLayer.Index(i).Bool()
		zero[i] = n == 0 && !b
	}
	mixed := func(part []bool) bool { return slices.Contains(part, true) && slices.Contains(part, false) }
	if !mixed(zero) {
		return cuts
	}
	var out []int
	from := 0
	for _, at := range cuts {
		if mixed(zero[from:at]) && mixed(zero[at:]) {
			out = append(out, at)
			from = at
		}
	}
	return out
}

// mainLayers returns the number of layers without those for multi-token prediction.
func (m *Model) mainLayers() (int, error) {
	nextn, err := m.Meta().count(m.arch+".nextn_predict_layers", 0, max(m.layers-1, 0))
	return m.layers - nextn, err
}

// checkCut refuses a window that is not between two cuts.
func (m *Model) checkCut(window Range) error {
	cuts, err := m.Cuts()
	if err != nil {
		return err
	}
	for _, at := range []int{window.Begin, window.End} {
		if at != 0 && at != m.layers && !slices.Contains(cuts, at) {
			return fmt.Errorf("no stage of this %s may begin or end at layer %d, only at %v: %w", m.arch, at, cuts, ErrCut)
		}
	}
	return nil
}
