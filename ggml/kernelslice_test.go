//go:build cgo

package ggml

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"kvasird/ggml/gguf"
)

// layers of the shipped model in which the tests load
var twoLayers = gguf.Range{Begin: 1, End: 3}

func experts(begin, end int) gguf.Slice {
	return gguf.Slice{Layers: twoLayers, Experts: gguf.Range{Begin: begin, End: end}}
}

// oracle has a row of every expert of a layer, from a kernel that holds them all.
func oracle(t *testing.T, rt *Runtime, layer int, in []float32) [][]float32 {
	t.Helper()
	k := newKernels(t, rt, tinyPath, 1, KernelConfig{}).list[0]
	prog, _, _, err := k.SetProgram(layer, must(swiglu(256, 256).Marshal()))
	if err != nil {
		t.Fatal(err)
	}
	var rows [][]float32
	for e := range int32(32) {
		out := make([]float32, 256)
		if err := k.Compute(prog, in, []int32{0}, []int32{e}, out); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, out)
	}
	return rows
}

func sineRow() []float32 {
	in := make([]float32, 256)
	for i := range in {
		in[i] = float32(math.Sin(float64(i)))
	}
	return in
}

// sliceKernel holds experts 0 to 8 of two layers, with a program on the first.
func sliceKernel(t *testing.T, rt *Runtime) (*Kernel, *gguf.Model, int) {
	t.Helper()
	m, err := gguf.OpenModel(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	k, err := rt.NewKernel(KernelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	if err := k.LoadSlice(t.Context(), m, experts(0, 8)); err != nil {
		t.Fatal(err)
	}
	prog, _, _, err := k.SetProgram(twoLayers.Begin, must(swiglu(256, 256).Marshal()))
	if err != nil {
		t.Fatal(err)
	}
	return k, m, prog
}

// Slices come and go 200 times while others compute: every row is right or its
// expert is not loaded, and the memory is level.
func TestSlicesComeAndGo(t *testing.T) {
	rt := openRuntime(t)
	in := sineRow()
	want := oracle(t, rt, twoLayers.Begin, in)
	k, m, prog := sliceKernel(t, rt)
	var stop atomic.Bool
	var rows, refused atomic.Int64
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() {
			out := make([]float32, 3*256)
			for i := 0; !stop.Load(); i++ {
				pick := []int32{int32(i % 8), int32((i*5 + g) % 24), int32((i + 3) % 8)}
				err := k.Compute(prog, in, []int32{0, 0, 0}, pick, out)
				if errors.Is(err, ErrNotLoaded) && pick[1] >= 8 {
					refused.Add(1)
					continue
				}
				if err != nil {
					t.Errorf("experts %v: %v", pick, err)
					return
				}
				rows.Add(3)
				for j, e := range pick {
					if !slices.Equal(out[j*256:][:256], want[e]) {
						t.Errorf("a row of expert %d beside %v is wrong", e, pick)
						return
					}
				}
			}
		})
	}
	before, level := k.Bytes(), 0
	for i := range 200 {
		s := experts(8, 16+i%9)
		held, passing, err := k.SliceBytes(m, s)
		if err != nil || passing == 0 || passing > held {
			t.Fatalf("SliceBytes: %d, %d, %v", held, passing, err)
		}
		if err := k.LoadSlice(t.Context(), m, s); err != nil {
			t.Fatal(err)
		}
		if got := k.Bytes() - before; got != held {
			t.Fatalf("slice %v takes %d bytes, SliceBytes said %d", s, got, held)
		}
		if err := k.DropSlice(s); err != nil {
			t.Fatal(err)
		}
		if i == 20 {
			level = resident(t)
		}
	}
	if err := k.LoadSlice(t.Context(), m, experts(8, 24)); err != nil {
		t.Fatal(err)
	}
	out := make([]float32, 32*256)
	var pick []int32
	for e := range int32(24) {
		pick = append(pick, e)
	}
	if err := k.Compute(prog, in, make([]int32, 24), pick, out[:24*256]); err != nil {
		t.Errorf("a program that was set before its experts were loaded: %v", err)
	}
	for _, e := range pick {
		if !slices.Equal(out[e*256:][:256], want[e]) {
			t.Errorf("expert %d of two banks is wrong", e)
		}
	}
	stop.Store(true)
	wg.Wait()
	if k.Bytes() <= before || rows.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d bytes before and %d now, %d rows, %d refused", before, k.Bytes(), rows.Load(), refused.Load())
	}
	if err := k.DropSlice(experts(8, 24)); err != nil {
		t.Fatal(err)
	}
	grown := resident(t) - level
	t.Logf("%d rows and %d refusals beside 200 slices; resident memory grew by %d KB after the 20th", rows.Load(), refused.Load(), grown>>10)
	if grown > 32<<20 { // each of 180 slices takes 1 MB and more, so one in five lost would be seen; the rest is Go's
		t.Errorf("resident memory grew by %d bytes", grown)
	}
}

// A slice that cannot be loaded in full leaves the kernel as it was.
func TestSliceAllOrNothing(t *testing.T) {
	rt := openRuntime(t)
	k, m, prog := sliceKernel(t, rt)
	hollow := filepath.Join(t.TempDir(), "hollow.gguf")
	if err := gguf.WriteBackbone(t.Context(), hollow, m); err != nil {
		t.Fatal(err)
	}
	backbone, err := gguf.OpenModel(hollow)
	if err != nil {
		t.Fatal(err)
	}
	defer backbone.Close()
	if _, _, _, err := k.SetProgram(twoLayers.Begin, must(swiglu(256, 256).Marshal())); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the budget changed")
	cancel(cause)
	before := k.Bytes()
	tests := []struct {
		name string
		do   func() error
		is   error
		text string
	}{
		{"overlap", func() error { return k.LoadSlice(t.Context(), m, experts(4, 12)) }, nil, "expert 4 is loaded already"},
		{"not held by the file", func() error { return k.LoadSlice(t.Context(), backbone, experts(8, 12)) }, gguf.ErrNotHeld, "hole"},
		{"cancelled", func() error { return k.LoadSlice(gone, m, experts(8, 12)) }, cause, "budget"},
		{"beyond the model", func() error { return k.LoadSlice(t.Context(), m, experts(30, 40)) }, nil, "32 experts"},
		{"no layer", func() error { return k.LoadSlice(t.Context(), m, gguf.Slice{Layers: gguf.Range{Begin: 9, End: 10}}) }, ErrNotLoaded, "no MoE layer"},
		{"bytes beyond the model", func() error { _, _, err := k.SliceBytes(m, experts(30, 40)); return err }, nil, "32 experts"},
		{"drop a part", func() error { return k.DropSlice(experts(0, 4)) }, nil, "loaded together"},
		{"drop what is not there", func() error { return k.DropSlice(experts(8, 12)) }, ErrNotLoaded, "8:12"},
	}
	for _, test := range tests {
		err := test.do()
		if err == nil || test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.text)
		}
		if k.Bytes() != before {
			t.Errorf("%s: %d bytes, %d before", test.name, k.Bytes(), before)
		}
	}
	in, out := sineRow(), make([]float32, 256)
	if err := k.Compute(prog, in, []int32{0}, []int32{7}, out); err != nil {
		t.Error(err)
	}
	// a program outlives the last slice of its layer
	if err := k.DropSlice(experts(0, 8)); err != nil {
		t.Fatal(err)
	}
	if err := k.Compute(prog, in, []int32{0}, []int32{7}, out); !errors.Is(err, ErrNotLoaded) || k.Bytes() != 0 {
		t.Errorf("after the last slice was dropped: %v, %d bytes", err, k.Bytes())
	}
	if err := k.LoadSlice(t.Context(), m, experts(6, 8)); err != nil {
		t.Fatal(err)
	}
	if err := k.Compute(prog, in, []int32{0}, []int32{7}, out); err != nil {
		t.Errorf("loaded again: %v", err)
	}
}

// Half of what was loaded as one is given up while the other half goes on being
// computed, and can then be dropped by itself.
func TestReplaceSlice(t *testing.T) {
	rt := openRuntime(t)
	in := sineRow()
	want := oracle(t, rt, twoLayers.Begin, in)
	k, m, prog := sliceKernel(t, rt)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		out := make([]float32, 256)
		for i := 0; !stop.Load(); i++ {
			e := int32(4 + i%4)
			if err := k.Compute(prog, in, []int32{0}, []int32{e}, out); err != nil || !slices.Equal(out, want[e]) {
				t.Errorf("expert %d, which stays: %v", e, err)
				return
			}
		}
	})
	before := k.Bytes()
	tests := []struct {
		name string
		err  string
		do   func() error
	}{
		{"a part of another slice", "is no part of", func() error { return k.ReplaceSlice(t.Context(), m, experts(0, 8), experts(4, 9)) }},
		{"cuts", "cuts the experts", func() error { return k.ReplaceSlice(t.Context(), m, experts(0, 4), experts(0, 2)) }},
		{"not loaded", ErrNotLoaded.Error(), func() error { return k.ReplaceSlice(t.Context(), m, experts(8, 16), experts(8, 9)) }},
		{"half", "", func() error { return k.ReplaceSlice(t.Context(), m, experts(0, 8), experts(4, 8)) }},
	}
	for _, tt := range tests {
		err := tt.do()
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: error %v, want %q", tt.name, err, tt.err)
		}
	}
	if got := k.Bytes(); got > before*6/10 || got < before*4/10 {
		t.Errorf("%d bytes after half of %d was given up", got, before)
	}
	out := make([]float32, 256)
	if err := k.Compute(prog, in, []int32{0}, []int32{1}, out); !errors.Is(err, ErrNotLoaded) {
		t.Errorf("an expert that was given up: %v", err)
	}
	stop.Store(true)
	wg.Wait()
	if err := k.ReplaceSlice(t.Context(), m, experts(4, 8)); err != nil || k.Bytes() != 0 {
		t.Errorf("drop the rest: %v, %d bytes left", err, k.Bytes())
	}
}
