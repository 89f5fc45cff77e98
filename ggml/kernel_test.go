//go:build cgo

package ggml

import (
	"errors"
	"math"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

func TestKernelRefuses(t *testing.T) {
	rt := openRuntime(t)
	if _, err := rt.NewKernel(KernelConfig{Device: "TPU7"}); err == nil || !strings.Contains(err.Error(), "CPU") {
		t.Errorf("unknown device: got %v, want an error that lists the devices", err)
	}
	m, err := gguf.OpenModel(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	k, err := rt.NewKernel(KernelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if err := k.LoadSlices(m, gguf.Slice{Layers: gguf.Range{Begin: 1, End: 2}, Experts: gguf.Range{Begin: 4, End: 9}},
		gguf.Slice{Layers: gguf.Range{Begin: 0, End: 2}, Experts: gguf.Range{Begin: 8, End: 12}}); err != nil {
		t.Fatal(err)
	}
	program := must(swiglu(256, 256).Marshal())
	if _, _, _, err := k.SetProgram(3, program); err == nil || !strings.Contains(err.Error(), "layer 3 is not loaded") {
		t.Errorf("layer that is not loaded: got %v", err)
	}
	if _, _, _, err := k.SetProgram(1, must(swiglu(512, 256).Marshal())); !errors.Is(err, ErrProgram) {
		t.Errorf("wrong widths: got %v, want ErrProgram", err)
	}
	prog, rowWidth, outWidth, err := k.SetProgram(1, program)
	if err != nil || rowWidth != 256 || outWidth != 256 {
		t.Fatal(rowWidth, outWidth, err)
	}
	rows, out := make([]float32, 2*256), make([]float32, 256)
	for name, call := range map[string]func() error{
		"expert not held":  func() error { return k.Compute(prog, rows, []int32{0}, []int32{12}, out) },
		"negative expert":  func() error { return k.Compute(prog, rows, []int32{0}, []int32{-1}, out) },
		"huge expert":      func() error { return k.Compute(prog, rows, []int32{0}, []int32{math.MaxInt32}, out) },
		"row past the end": func() error { return k.Compute(prog, rows, []int32{2}, []int32{4}, out) },
		"negative row":     func() error { return k.Compute(prog, rows, []int32{-1}, []int32{4}, out) },
		"short out":        func() error { return k.Compute(prog, rows, []int32{0}, []int32{4}, out[:255]) },
		"uneven lists":     func() error { return k.Compute(prog, rows, []int32{0}, []int32{4, 5}, out) },
		"ragged rows":      func() error { return k.Compute(prog, rows[:300], []int32{0}, []int32{4}, out) },
		"no such program":  func() error { return k.Compute(prog+1, rows, []int32{0}, []int32{4}, out) },
	} {
		if err := call(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for e := int32(4); e < 12; e++ {
		if err := k.Compute(prog, rows, []int32{1}, []int32{e}, out); err != nil {
			t.Errorf("expert %d: %v", e, err)
		}
	}
}

func TestKernelProgramsAreBounded(t *testing.T) {
	rt := openRuntime(t)
	ks := newKernels(t, rt, tinyPath, 1, KernelConfig{})
	p := swiglu(256, 256)
	var err error
	for i := 0; err == nil; i++ {
		if i > 100 {
			t.Fatal("100 programs were kept")
		}
		p.Ops[3] = Op{Code: OpScale, A: 3, F: [2]uint32{math.Float32bits(float32(i))}, Width: 256}
		_, _, _, err = ks.list[0].SetProgram(0, must(p.Marshal()))
	}
	if !strings.Contains(err.Error(), "programs are set already") {
		t.Error(err)
	}
}

// Kernels with and without repacked weights round sums differently; the
// difference is bounded, and reported for the README.
func TestRepackedAgainstPlain(t *testing.T) {
	rt := openRuntime(t)
	packed := newKernels(t, rt, tinyPath, 1, KernelConfig{})
	plain := newKernels(t, rt, tinyPath, 1, KernelConfig{NoRepack: true})
	program := must(swiglu(256, 256).Marshal())
	rows := make([]float32, 16*256)
	for i := range rows {
		rows[i] = float32(math.Sin(float64(i)))
	}
	var row, expert []int32
	for i := range int32(16) {
		row, expert = append(row, i), append(expert, i*2)
	}
	compute := func(ks *kernels) []float32 {
		prog, _, _, err := ks.list[0].SetProgram(1, program)
		if err != nil {
			t.Fatal(err)
		}
		out := make([]float32, len(row)*256)
		if err := ks.list[0].Compute(prog, rows, row, expert, out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	a, b := compute(packed), compute(plain)
	cos, worst := similarity(a, b)
	t.Logf("repacked against plain: cosine %.8f, max |Δ| %.3g", cos, worst)
	if cos < 0.9999 {
		t.Errorf("cosine %g, want at least 0.9999", cos)
	}
}

// similarity gives the cosine and the largest difference.
func similarity(a, b []float32) (cos, worst float64) {
	var ab, aa, bb float64
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		ab, aa, bb = ab+x*y, aa+x*x, bb+y*y
		worst = max(worst, math.Abs(x-y))
	}
	return ab / math.Sqrt(aa*bb), worst
}
