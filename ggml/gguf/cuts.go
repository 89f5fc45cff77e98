package gguf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// ErrCut is wrapped when a model cannot be cut so, or at all.
var ErrCut = errors.New("llama.cpp does not compute the parts of it as it computes the whole")

// cutRule says how models of an architecture may be cut into stages; the zero value:
// before any layer.
type cutRule struct {
	// every are integers n by which llama.cpp tells the kinds of layers apart: by the
	// index modulo n. A window begins at a multiple, or its layers would be taken for
	// others, and the last one has n layers at the least, or it would lack a kind, on
	// which the library aborts.
	every []period
	// kinds are arrays per layer in which zero makes another kind of layer. A window
	// takes its part of them, and must have both kinds.
	kinds []string
	// pastLead: the first window has a layer after the leading dense ones, which have
	// another attention; the library aborts on a window of these alone.
	pastLead bool
	// embeddingScale is by what the graph multiplies the rows of tokens, but not rows
	// that are given; nil: nothing.
	embeddingScale func(width int) float32
	// check says why a model of the architecture cannot be cut; "" when it can.
	check func(m *Model, main int) string
	// counts are numbers of layers that make llama.cpp take a model for another
	// variant: no window has as many.
	counts []int
	// mend writes down what llama.cpp would otherwise derive from what a stage has less
	// of, such as layers; nil: nothing.
	mend func(m *Model, main int, meta *Metadata)
}

// period is a metadata key (after "<arch>.") and its value where it is missing.
type period struct {
	key     string
	missing int
}

// Cuts returns the layers, but for 0, at which a stage may begin, ascending: any two
// of them, 0 and Layers included, bound a window that is exact. An error that wraps
// ErrCut says why there are none. It reads metadata only.
func (m *Model) Cuts() ([]int, error) {
	if m.Pooling() != NoPooling {
		return nil, m.noCut("it makes embeddings, of all rows of an input together")
	}
	rule, ok := cutRules[m.arch]
	if !ok {
		return nil, m.noCut("its architecture is not among those that were proved")
	}
	main, err := m.mainLayers()
	if err != nil {
		return nil, err
	}
	if m.Meta().has(m.arch + ".deepstack_mapping") {
		return nil, m.noCut("embeddings of pictures are added in several of its layers")
	}
	if rule.check != nil {
		if why := rule.check(m, main); why != "" {
			return nil, m.noCut(why)
		}
	}
	step, err := m.period(rule)
	if err != nil {
		return nil, err
	}
	step = avoid(step, main, rule.counts)
	lead := 0
	if rule.pastLead {
		if lead, err = m.Meta().count(m.arch+".leading_dense_block_count", 0, maxIndex); err != nil {
			return nil, err
		}
	}
	var cuts []int
	for at := step; at+step <= main; at += step {
		if at > lead {
			cuts = append(cuts, at)
		}
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

// period returns the least common multiple of a rule's every.
func (m *Model) period(rule cutRule) (int, error) {
	all := 1
	for _, p := range rule.every {
		key := m.arch + "." + p.key
		if v, ok := m.Meta().Get(key); ok && v.Type() == Array {
			continue // which is taken apart by layer
		}
		n, err := m.Meta().count(key, p.missing, maxIndex)
		if err != nil {
			return 0, err
		}
		n = max(n, 1)
		all = min(all/gcd(all, n)*n, maxIndex)
	}
	return all, nil
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// avoid returns the least multiple of step with which no window has one of the counts.
func avoid(step, main int, counts []int) int {
	fits := func(n int) bool {
		return !slices.ContainsFunc(counts, func(c int) bool {
			// a window has k*n layers, or what remains of them at the end
			return c < main && (c%n == 0 || (main-c)%n == 0)
		})
	}
	for n := step; n < main; n += step {
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

// CutArchitectures returns the architectures of which there are models that can be cut,
// sorted.
func CutArchitectures() []string { return slices.Sorted(maps.Keys(cutRules)) }
