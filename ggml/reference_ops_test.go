package ggml

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"kvasird/ggml/tensor"
)

// oneLayer is a reference with two experts: matrices 2 to 2, a bias and a scale.
func oneLayer() *Reference {
	slabs := func(experts ...[]float32) map[int32][]byte {
		m := map[int32][]byte{}
		for e, values := range experts {
			for _, v := range values {
				m[int32(e)] = binary.LittleEndian.AppendUint32(m[int32(e)], math.Float32bits(v))
			}
		}
		return m
	}
	r := NewReference()
	r.weights[3] = map[string]*referenceWeight{
		"w": {WeightShape{In: 2, Out: 2, Dims: 3}, tensor.F32, slabs([]float32{1, 2, 3, 4}, []float32{-1, 0, 0, 1})},
		"b": {WeightShape{In: 1, Out: 2, Dims: 2}, tensor.F32, slabs([]float32{10, 20}, []float32{30, 40})},
		"s": {WeightShape{In: 1, Out: 1, Dims: 1}, tensor.F32, slabs([]float32{0.5}, []float32{-2})},
	}
	return r
}

func bits(a, b float32) [2]uint32 { return [2]uint32{math.Float32bits(a), math.Float32bits(b)} }

// gateAndUp takes the halves of a row of two apart for a gated activation.
func gateAndUp(o Op) []Op {
	o.A, o.B = 1, 2
	return []Op{{Code: OpView, Width: 1}, {Code: OpView, Offset: 1, Width: 1}, o}
}

func TestReferenceOperations(t *testing.T) {
	tests := []struct {
		name string
		row  []float32
		ops  []Op
		want [2][]float32 // by expert
	}{
		{"matrix", []float32{1, -1}, []Op{{Code: OpMatMul, Weight: "w", Width: 2}},
			[2][]float32{{-1, -1}, {-1, -1}}},
		{"matrix of another row", []float32{2, 1}, []Op{{Code: OpMatMul, Weight: "w", Width: 2}},
			[2][]float32{{4, 10}, {-2, 1}}},
		{"bias", []float32{1, 2}, []Op{{Code: OpBias, Weight: "b", Width: 2}}, [2][]float32{{11, 22}, {31, 42}}},
		{"pick and multiply", []float32{1, 2}, []Op{{Code: OpPick, Weight: "s", Width: 1}, {Code: OpMul, A: 0, B: 1, Width: 2}},
			[2][]float32{{0.5, 1}, {-2, -4}}},
		{"multiply", []float32{3, 4}, []Op{{Code: OpScale, F: bits(2, 1), Width: 2}, {Code: OpMul, A: 0, B: 1, Width: 2}},
			[2][]float32{{21, 36}, {21, 36}}},
		{"clamp", []float32{-9, 9}, []Op{{Code: OpClamp, F: bits(-1, 2), Width: 2}}, [2][]float32{{-1, 2}, {-1, 2}}},
		{"square", []float32{-3, 2}, []Op{{Code: OpSqr, Width: 2}}, [2][]float32{{9, 4}, {9, 4}}},
		{"silu", []float32{0, 1}, []Op{{Code: OpUnary, Act: ActSiLU, Width: 2}}, [2][]float32{{0, 0.7310586}, {0, 0.7310586}}},
		{"relu", []float32{-1, 1}, []Op{{Code: OpUnary, Act: ActReLU, Width: 2}}, [2][]float32{{0, 1}, {0, 1}}},
		{"tanh", []float32{0, 1}, []Op{{Code: OpUnary, Act: ActTanh, Width: 2}}, [2][]float32{{0, 0.7615942}, {0, 0.7615942}}},
		{"sigmoid", []float32{0, 1}, []Op{{Code: OpUnary, Act: ActSigmoid, Width: 2}}, [2][]float32{{0.5, 0.7310586}, {0.5, 0.7310586}}},
		{"gelu", []float32{-1, 1}, []Op{{Code: OpUnary, Act: ActGELU, Width: 2}}, [2][]float32{{-0.158808, 0.841192}, {-0.158808, 0.841192}}},
		{"gelu by erf", []float32{-1, 1}, []Op{{Code: OpUnary, Act: ActGELUErf, Width: 2}}, [2][]float32{{-0.1586553, 0.8413447}, {-0.1586553, 0.8413447}}},
		{"quick gelu", []float32{-1, 1}, []Op{{Code: OpUnary, Act: ActGELUQuick, Width: 2}}, [2][]float32{{-0.1542048, 0.8457952}, {-0.1542048, 0.8457952}}},
		{"swiglu of halves", []float32{1, 3}, []Op{{Code: OpGLU, Act: ActSwiGLU, Fused: true, Width: 1}}, [2][]float32{{2.1931758}, {2.1931758}}},
		{"swiglu of swapped halves", []float32{3, 1}, []Op{{Code: OpGLU, Act: ActSwiGLU, Fused: true, Swap: true, Width: 1}}, [2][]float32{{2.1931758}, {2.1931758}}},
		{"reglu of views", []float32{-1, 2}, []Op{{Code: OpView, Offset: 1, Width: 1}, {Code: OpView, Width: 1}, {Code: OpGLU, Act: ActReGLU, A: 1, B: 2, Width: 1}},
			[2][]float32{{-2}, {-2}}},
		{"clamped swiglu", []float32{1, 9}, gateAndUp(Op{Code: OpGLU, Act: ActSwiGLUClamp, F: bits(0, 3), Width: 1}), [2][]float32{{2.1931758}, {2.1931758}}},
		{"swiglu of gpt-oss", []float32{9, -9}, gateAndUp(Op{Code: OpGLU, Act: ActSwiGLUOAI, F: bits(1, 1), Width: 1}), [2][]float32{{0}, {0}}},
		{"swiglu of gpt-oss, alpha", []float32{1, 1}, gateAndUp(Op{Code: OpGLU, Act: ActSwiGLUOAI, F: bits(0, 7), Width: 1}), [2][]float32{{1}, {1}}},
	}
	for _, tt := range tests {
		r := oneLayer()
		p := &Program{Version: programVersion, RowWidth: uint32(len(tt.row)), Ops: tt.ops}
		prog, _, width, err := r.SetProgram(3, must(p.Marshal()))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		out := make([]float32, 2*width)
		if err := r.Compute(prog, tt.row, []int32{0, 0}, []int32{0, 1}, out); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		for e, want := range tt.want {
			for i, v := range want {
				if got := out[e*width+i]; math.Abs(float64(got-v)) > 1e-6 {
					t.Errorf("%s: expert %d gives %v at %d, want %v", tt.name, e, got, i, v)
				}
			}
		}
	}
}

func TestReferenceRefuses(t *testing.T) {
	r := oneLayer()
	program := func(weight string, width uint32) []byte {
		p := &Program{Version: programVersion, RowWidth: width, Ops: []Op{{Code: OpMatMul, Weight: weight, Width: 2}}}
		return must(p.Marshal())
	}
	for name, call := range map[string]func() error{
		"no such weight": func() error { _, _, _, err := r.SetProgram(3, program("v", 2)); return err },
		"wrong width":    func() error { _, _, _, err := r.SetProgram(3, program("w", 3)); return err },
		"no program":     func() error { _, _, _, err := r.SetProgram(3, []byte{0xff}); return err },
	} {
		if err := call(); !errors.Is(err, ErrProgram) {
			t.Errorf("%s: got %v, want ErrProgram", name, err)
		}
	}
	if _, _, _, err := r.SetProgram(0, program("w", 2)); err == nil {
		t.Error("a layer that is not loaded: no error")
	}
	prog, _, _, err := r.SetProgram(3, program("w", 2))
	if err != nil {
		t.Fatal(err)
	}
	if again, _, _, err := r.SetProgram(3, program("w", 2)); again != prog || err != nil {
		t.Errorf("the same program is number %d, then %d, %v", prog, again, err)
	}
	row, out := make([]float32, 2), make([]float32, 2)
	if err := r.Compute(prog, row, []int32{0}, []int32{2}, out); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("expert that is not loaded: got %v, want ErrNotLoaded", err)
	}
	for name, err := range map[string]error{
		"no such program": r.Compute(prog+1, row, []int32{0}, []int32{0}, out),
		"row past end":    r.Compute(prog, row, []int32{1}, []int32{0}, out),
		"negative row":    r.Compute(prog, row, []int32{-1}, []int32{0}, out),
		"short out":       r.Compute(prog, row, []int32{0}, []int32{0}, out[:1]),
		"ragged rows":     r.Compute(prog, row[:1], []int32{0}, []int32{0}, out),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	r.Forget(prog)
	r.Forget(prog + 1) // not set: nothing happens
	if err := r.Compute(prog, row, []int32{0}, []int32{0}, out); err == nil {
		t.Error("a forgotten program: no error")
	}
	other, _, _, err := r.SetProgram(3, must((&Program{Version: programVersion, RowWidth: 2, Ops: []Op{{Code: OpSqr, Width: 2}}}).Marshal()))
	if err != nil || other != prog || len(r.programs) != 1 {
		t.Errorf("program %d of %d, %v: the number of a forgotten one is not used again", other, len(r.programs), err)
	}
}
