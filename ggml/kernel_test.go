//go:build cgo

package ggml

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
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
	k := ks.list[0]
	for i := range maxLayerPrograms {
		if _, _, _, err := k.SetProgram(0, scaled(i)); err != nil {
			t.Fatalf("program %d: %v", i, err)
		}
	}
	if _, _, _, err := k.SetProgram(0, scaled(maxLayerPrograms)); err == nil || !strings.Contains(err.Error(), "layer 0: 64 programs are set already") {
		t.Errorf("one more: got %v", err)
	}
	if _, _, _, err := k.SetProgram(0, scaled(7)); err != nil {
		t.Errorf("a program that is set: %v", err)
	}
	if _, _, _, err := k.SetProgram(1, scaled(0)); err != nil {
		t.Errorf("another layer: %v", err)
	}
	k.Forget(7)
	if prog, _, _, err := k.SetProgram(0, scaled(maxLayerPrograms)); prog != 7 || err != nil {
		t.Errorf("after one was forgotten: program %d, %v, want 7", prog, err)
	}
}

// scaled is a valid program for the shipped model, another one for every i.
func scaled(i int) []byte {
	p := swiglu(256, 256)
	p.Ops = append(p.Ops, Op{Code: OpScale, A: 4, F: bits(float32(i+1), 0), Width: 256})
	return must(p.Marshal())
}

// resident is the memory of this process in bytes, 0 where the system does not say.
func resident(t *testing.T) int {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, pages int
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}

func TestKernelForgets(t *testing.T) {
	rt := openRuntime(t)
	k := newKernels(t, rt, tinyPath, 1, KernelConfig{}).list[0]
	kept, _, _, err := k.SetProgram(0, scaled(0))
	if err != nil {
		t.Fatal(err)
	}
	in, out := make([]float32, 256), make([]float32, 256)
	for i := range in {
		in[i] = float32(math.Sin(float64(i)))
	}
	compute := func(prog int) error { return k.Compute(prog, in, []int32{0}, []int32{3}, out) }
	if err := compute(kept); err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(out)
	before := resident(t)
	for i := range 1000 {
		prog, _, _, err := k.SetProgram(i%2, scaled(i+1))
		if err != nil || prog != kept+1 {
			t.Fatalf("program %d, %v, want %d again", prog, err, kept+1)
		}
		if err := compute(prog); err != nil {
			t.Fatal(err)
		}
		k.Forget(prog)
		if err := compute(prog); err == nil || !strings.Contains(err.Error(), "program 1 is not set") {
			t.Fatalf("a forgotten program: got %v", err)
		}
	}
	if n := len(k.programs); n != 2 {
		t.Errorf("%d programs are kept, want 2", n)
	}
	if grown := resident(t) - before; grown > 8<<20 {
		t.Errorf("%d bytes are kept for 1000 programs", grown)
	}
	k.Forget(kept + 1) // not set: nothing happens
	k.Forget(-1)
	k.Forget(99)
	if err := compute(kept); err != nil || !slices.Equal(out, want) {
		t.Errorf("the program that was not forgotten: %v, or other rows", err)
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
