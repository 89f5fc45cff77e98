//go:build cgo

package ggml

import (
	"context"
	"math"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// checkKernel runs a model whose experts a kernel computes, and has the
// reference compute every call too.
func checkKernel(t *testing.T, rt *Runtime, path string) {
	t.Helper()
	ref := loadReference(t, path)
	ks := newKernels(t, rt, path, 1, KernelConfig{})
	calls := 0
	m := loadModel(t, rt, ModelConfig{Path: path, Experts: func(ctx context.Context, call *ExpertCall) error {
		calls++
		if err := ks.compute(ctx, call); err != nil {
			return err
		}
		prog, _, _, err := ref.SetProgram(call.Layer, call.Program)
		if err != nil {
			return err
		}
		row := make([]int32, len(call.IDs))
		for p := range row {
			row[p] = int32(p)
			if call.RowsPerToken == 1 {
				row[p] = int32(p / call.Used)
			}
		}
		want, other := make([]float32, len(call.Out)), make([]float32, len(call.Out))
		if err := ref.Compute(prog, call.Rows, row, call.IDs, want); err != nil {
			return err
		}
		if d := relativeL2(call.Out, want); !(d <= ref.Tolerance(prog)) {
			t.Errorf("layer %d, %d pairs: the kernel differs by %g, at most %g allowed", call.Layer, len(row), d, ref.Tolerance(prog))
		}
		ids := slices.Clone(call.IDs)
		for i := range ids {
			ids[i] = (ids[i] + 1) % defaultExperts
		}
		if err := ref.Compute(prog, call.Rows, row, ids, other); err != nil {
			return err
		}
		if d := relativeL2(other, want); d < 0.3 {
			t.Errorf("layer %d: other experts differ by %g only, so that this test proves nothing", call.Layer, d)
		}
		return nil
	}})
	run(t, m, []Token{5, 17, 99, 3, 42, 64}, 2)
	if calls == 0 {
		t.Error("no expert call was made")
	}
}

func loadReference(t *testing.T, path string) *Reference {
	t.Helper()
	file, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ref := NewReference()
	for _, half := range []gguf.Range{{End: file.Experts() / 2}, {Begin: file.Experts() / 2, End: file.Experts()}} {
		if err := ref.Load(file, gguf.Slice{Layers: gguf.Range{End: file.Layers()}, Experts: half}); err != nil {
			t.Fatal(err)
		}
	}
	return ref
}

// relativeL2 is |got - want| / |want|; NaN anywhere gives +Inf.
func relativeL2(got, want []float32) float64 {
	var diff, norm float64
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		diff += d * d
		norm += float64(want[i]) * float64(want[i])
	}
	if r := math.Sqrt(diff / norm); !math.IsNaN(r) {
		return r
	}
	return math.Inf(1)
}

func TestKernelEqualsReference(t *testing.T) {
	rt := openRuntime(t)
	for _, cfg := range []GenerateConfig{ // one for every program that there is
		{Arch: "qwen3moe"}, {Arch: "deepseek2", Fused: true}, {Arch: "maple"}, {Arch: "bailingmoe3"}, {Arch: "kimi-k3"},
		{Arch: "gpt-oss"}, {Arch: "gpt-oss", Scales: true}, {Arch: "minimax-m3"}, {Arch: "grok"}, {Arch: "gemma4", Fused: true, Scales: true},
		{Arch: "smallthinker"}, {Arch: "nemotron_h_moe"}, {Arch: "llama4"}, {Arch: "grovemoe", Scales: true},
	} {
		t.Run(cfg.Arch, func(t *testing.T) { checkKernel(t, rt, generate(t, rt, cfg)) })
	}
	for _, dtype := range tensor.Dequantisable() {
		t.Run("qwen3moe "+dtype.String(), func(t *testing.T) {
			checkKernel(t, rt, generate(t, rt, GenerateConfig{Arch: "qwen3moe", Type: dtype.String()}))
		})
	}
}
