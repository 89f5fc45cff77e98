package ggml

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// Reference computes what a Kernel computes, in plain Go: it is the oracle of
// the kernels, written to be read and not to be fast. Weights are dequantised
// exactly; a dot product is summed in float64; every operation is computed in
// float64 and its result rounded to float32, as ggml stores it between two
// operations. It does not quantise activations, as CPU kernels do: see
// Tolerance. It needs no cgo, and belongs to one goroutine at a time.
type Reference struct {
	weights  map[int]map[string]*referenceWeight // by layer, by name after "blk.L."
	programs []referenceProgram                  // by number; a number without a Program is free
	row      []float32                           // scratch: one row of a weight
}

// referenceWeight is a stacked tensor as far as it was loaded.
type referenceWeight struct {
	WeightShape
	dtype tensor.DType
	slabs map[int32][]byte // by expert id
}

type referenceProgram struct {
	*Program
	layer   int
	encoded string
}

// NewReference returns a reference kernel without experts.
func NewReference() *Reference {
	return &Reference{weights: map[int]map[string]*referenceWeight{}}
}

// Load reads a slice of a model, slice or backbone file. It may be called
// again for more.
func (r *Reference) Load(m *gguf.Model, s gguf.Slice) error {
	tensors, err := m.SliceTensors(s)
	if err != nil {
		return err
	}
	for _, t := range tensors {
		if !slices.Contains(tensor.Dequantisable(), t.DType) {
			return fmt.Errorf("%s: the reference kernel has no dequantiser for %s", t.Name, t.DType)
		}
		if err := r.add(t); err != nil {
			return err
		}
	}
	return nil
}

func (r *Reference) add(t gguf.ExpertTensor) error {
	var layer int
	var name string
	if _, err := fmt.Sscanf(t.Name, "blk.%d.%s", &layer, &name); err != nil {
		return fmt.Errorf("%s is no tensor of a layer: %v", t.Name, err)
	}
	shape, ok := referenceShape(name, t.Shape)
	if !ok {
		return nil
	}
	if r.weights[layer] == nil {
		r.weights[layer] = map[string]*referenceWeight{}
	}
	w := r.weights[layer][name]
	if w == nil {
		w = &referenceWeight{WeightShape: shape, dtype: t.DType, slabs: map[int32][]byte{}}
		r.weights[layer][name] = w
	}
	data := make([]byte, t.Bytes)
	if err := t.ReadInto(data); err != nil {
		return err
	}
	size := len(data) / t.Rows.Len()
	for i := range t.Rows.Len() {
		w.slabs[int32(t.Rows.Begin+i)] = data[i*size : (i+1)*size]
	}
	return nil
}

// referenceShape says what a tensor is by its name; programs read no others.
func referenceShape(name string, s tensor.Shape) (WeightShape, bool) {
	base, suffix, _ := strings.Cut(name, ".")
	if !strings.HasSuffix(base, "_exps") {
		return WeightShape{}, false
	}
	switch suffix {
	case "weight":
		return WeightShape{In: int(s[0]), Out: int(s[1]), Dims: 3}, true
	case "bias":
		return WeightShape{In: 1, Out: int(s[0]), Dims: 2}, true
	case "scale":
		return WeightShape{In: 1, Out: 1, Dims: 1}, true
	}
	return WeightShape{}, false
}

// SetProgram is Kernel.SetProgram.
func (r *Reference) SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error) {
	if r.weights[layer] == nil {
		return 0, 0, 0, fmt.Errorf("layer %d is not loaded here", layer)
	}
	prog = len(r.programs)
	for i, p := range r.programs {
		switch {
		case p.Program == nil:
			prog = i
		case p.layer == layer && p.encoded == string(program):
			return i, int(p.RowWidth), p.OutWidth(), nil
		}
	}
	p, err := ParseProgram(program)
	if err != nil {
		return 0, 0, 0, err
	}
	shapes := map[string]WeightShape{}
	for name, w := range r.weights[layer] {
		shapes[name] = w.WeightShape
	}
	if err := p.CheckWeights(shapes); err != nil {
		return 0, 0, 0, fmt.Errorf("layer %d: %w", layer, err)
	}
	if prog == len(r.programs) {
		r.programs = append(r.programs, referenceProgram{})
	}
	r.programs[prog] = referenceProgram{p, layer, string(program)}
	return prog, int(p.RowWidth), p.OutWidth(), nil
}

// Forget is Kernel.Forget.
func (r *Reference) Forget(prog int) {
	if prog >= 0 && prog < len(r.programs) {
		r.programs[prog] = referenceProgram{}
	}
}

// Tolerance is what the results of one Compute of a CPU kernel may differ by:
// |kernel - reference| / |reference|, norms of all outputs of the call
// together. It is the largest over the weights of how the kernel rounds the
// activations that it multiplies them with, twice to five times what was
// measured with random weights (256 wide, every architecture):
//
//	F32                        1e-6   as they are, sums in another order
//	F16                        2e-3   to binary16
//	BF16                       1e-2   to bfloat16
//	Q4_0 … Q8_0, MXFP4, NVFP4  3e-2   to 8 bits per block of 32 (Q8_0, Q8_1)
//	Q2_K … Q6_K                6e-2   to 8 bits per block of 256 (Q8_K)
//
// A GELU is at least 1e-3: ggml looks it up in a table of binary16.
func (r *Reference) Tolerance(prog int) float64 {
	p := r.programs[prog]
	worst := 1e-6
	for _, o := range p.Ops {
		switch o.Act {
		case ActGeGLU, ActGELU, ActGeGLUQuick, ActGELUQuick:
			worst = max(worst, 1e-3)
		}
		if o.Code == OpMatMul {
			worst = max(worst, activationRounding(r.weights[p.layer][o.Weight].dtype))
		}
	}
	return worst
}

func activationRounding(t tensor.DType) float64 {
	switch {
	case t == tensor.F32:
		return 1e-6
	case t == tensor.F16:
		return 2e-3
	case t == tensor.BF16:
		return 1e-2
	case t.BlockSize() < 256:
		return 3e-2
	}
	return 6e-2
}

// Compute is Kernel.Compute.
func (r *Reference) Compute(prog int, rows []float32, row, expert []int32, out []float32) error {
	if prog < 0 || prog >= len(r.programs) || r.programs[prog].Program == nil {
		return fmt.Errorf("program %d is not set", prog)
	}
	p := r.programs[prog]
	in, width := int(p.RowWidth), p.OutWidth()
	if len(expert) != len(row) || len(out) != len(row)*width || len(rows)%in != 0 {
		return fmt.Errorf("layer %d: %d rows, %d experts, %d floats in and %d out do not fit", p.layer, len(row), len(expert), len(rows), len(out))
	}
	for i := range row {
		if row[i] < 0 || int(row[i]) >= len(rows)/in {
			return fmt.Errorf("layer %d: row %d of %d", p.layer, row[i], len(rows)/in)
		}
		at := int(row[i]) * in
		result, err := r.pair(p, rows[at:at+in], expert[i])
		if err != nil {
			return fmt.Errorf("layer %d: %w", p.layer, err)
		}
		copy(out[i*width:], result)
	}
	return nil
}

// pair runs a program on one row and one expert.
func (r *Reference) pair(p referenceProgram, row []float32, expert int32) ([]float32, error) {
	values := [][]float32{row}
	for i := range p.Ops {
		o := &p.Ops[i]
		out := make([]float32, o.Width)
		if err := r.step(p, o, values, expert, out); err != nil {
			return nil, fmt.Errorf("operation %d: %w", i, err)
		}
		values = append(values, out)
	}
	return values[len(values)-1], nil
}

func (r *Reference) step(p referenceProgram, o *Op, values [][]float32, expert int32, out []float32) error {
	a, b := values[o.A], values[o.B]
	switch o.Code {
	case OpMatMul:
		return r.matMul(p.layer, o.Weight, expert, a, out)
	case OpBias:
		bias, err := r.weightRow(p.layer, o.Weight, expert, 0, len(out))
		if err != nil {
			return err
		}
		apply(out, a, bias, func(x, y float64) float64 { return x + y })
	case OpPick:
		scale, err := r.weightRow(p.layer, o.Weight, expert, 0, 1)
		if err != nil {
			return err
		}
		out[0] = scale[0]
	case OpGLU:
		gate, up := a, b
		if o.Fused {
			gate, up = a[:len(out)], a[len(out):]
		}
		if o.Swap {
			gate, up = up, gate
		}
		apply(out, gate, up, o.gated())
	case OpUnary:
		f := unaryFunc(o.Act)
		apply(out, a, a, func(x, _ float64) float64 { return f(x) })
	case OpMul:
		if len(b) == 1 {
			b = slices.Repeat(b, len(a))
		}
		apply(out, a, b, func(x, y float64) float64 { return x * y })
	case OpScale:
		factor, bias := float64(o.float(0)), float64(o.float(1))
		apply(out, a, a, func(x, _ float64) float64 { return x*factor + bias })
	case OpClamp:
		low, high := float64(o.float(0)), float64(o.float(1))
		apply(out, a, a, func(x, _ float64) float64 { return max(min(x, high), low) })
	case OpSqr:
		apply(out, a, a, func(x, _ float64) float64 { return x * x })
	case OpView:
		copy(out, a[o.Offset:])
	default:
		return fmt.Errorf("%w: code %d is not in the set", ErrProgram, o.Code)
	}
	return nil
}

func apply(out, a, b []float32, f func(x, y float64) float64) {
	for i := range out {
		out[i] = float32(f(float64(a[i]), float64(b[i])))
	}
}

// matMul is out[o] = Σ w[expert][o][i] · a[i].
func (r *Reference) matMul(layer int, name string, expert int32, a, out []float32) error {
	for o := range out {
		w, err := r.weightRow(layer, name, expert, o, len(a))
		if err != nil {
			return err
		}
		sum := 0.0
		for i := range a {
			sum += float64(w[i]) * float64(a[i])
		}
		out[o] = float32(sum)
	}
	return nil
}

// weightRow dequantises row n, width elements wide, of an expert's slab. It is
// valid until the next call.
func (r *Reference) weightRow(layer int, name string, expert int32, n, width int) ([]float32, error) {
	w := r.weights[layer][name]
	slab, ok := w.slabs[expert]
	if !ok {
		return nil, fmt.Errorf("%w: %d", ErrNotLoaded, expert)
	}
	size, err := w.dtype.RowBytes(int64(width))
	if err != nil {
		return nil, err
	}
	r.row = slices.Grow(r.row[:0], width)[:width]
	return r.row, w.dtype.Dequantize(r.row, slab[int64(n)*size:int64(n+1)*size])
}

// gated is the function of an OpGLU of gate and up.
func (o *Op) gated() func(gate, up float64) float64 {
	alpha, limit := float64(o.float(0)), float64(o.float(1))
	clamp := func(x float64) float64 { return max(min(x, limit), -limit) }
	switch o.Act {
	case ActSwiGLUOAI:
		return func(gate, up float64) float64 {
			gate = min(gate, limit)
			return gate / (1 + math.Exp(-alpha*gate)) * (clamp(up) + 1)
		}
	case ActSwiGLUClamp:
		return func(gate, up float64) float64 { return silu(min(gate, limit)) * clamp(up) }
	}
	f := map[Activation]func(float64) float64{
		ActSwiGLU: silu, ActGeGLU: gelu, ActReGLU: relu, ActGeGLUErf: geluErf, ActGeGLUQuick: geluQuick,
	}[o.Act]
	return func(gate, up float64) float64 { return f(gate) * up }
}

// unaryFunc is the function of an OpUnary.
func unaryFunc(a Activation) func(float64) float64 {
	return map[Activation]func(float64) float64{
		ActSiLU: silu, ActGELU: gelu, ActReLU: relu, ActTanh: math.Tanh, ActSigmoid: sigmoid,
		ActGELUErf: geluErf, ActGELUQuick: geluQuick,
	}[a]
}

func sigmoid(x float64) float64   { return 1 / (1 + math.Exp(-x)) }
func silu(x float64) float64      { return x * sigmoid(x) }
func relu(x float64) float64      { return max(x, 0) }
func geluErf(x float64) float64   { return x / 2 * (1 + math.Erf(x/math.Sqrt2)) }
func geluQuick(x float64) float64 { return x * sigmoid(1.702*x) }

func gelu(x float64) float64 {
	return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*x*(1+0.044715*x*x)))
}
