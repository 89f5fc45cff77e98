//go:build cgo

package ggml

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
)

// parity compares the logits of a generated model alone with those of the same
// model whose experts are computed by three kernels of uneven ranges, and
// counts the splits: one per MoE layer and ubatch.
func parity(t *testing.T, rt *Runtime, path string) {
	t.Helper()
	file, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	alone := loadModel(t, rt, ModelConfig{Path: path})
	rng := rand.New(rand.NewPCG(1, 2))
	prompt := make([]Token, 12)
	for i := range prompt {
		prompt[i] = Token(rng.IntN(alone.VocabSize()))
	}
	const single = 3
	want := run(t, alone, prompt, single)
	ks := newKernels(t, rt, path, min(3, file.Experts()), KernelConfig{})
	swarm := loadModel(t, rt, ModelConfig{Path: path, Experts: ks.compute})
	got := run(t, swarm, prompt, single)
	if d := maxAbs(want, got); d != 0 {
		t.Errorf("max |Δ| of the logits is %g, want 0", d)
	}
	for layer, n := range ks.calls {
		if n != 1+single {
			t.Errorf("layer %d: %d expert calls for %d ubatches: want one split each", layer, n, 1+single)
		}
	}
	total := 0
	for _, n := range ks.calls {
		total += n
	}
	if file.Arch() == "llama4" { // which weights the rows that the experts get
		total = 0
	}
	if ks.sums != total {
		t.Errorf("%d of %d expert calls go on with a sum", ks.sums, total)
	}
	if len(ks.calls) == 0 && file.Arch() != "refact" { // whose graph in llama.cpp never uses the experts
		t.Error("no expert call was made")
	}
}

func TestParityEveryArchitecture(t *testing.T) {
	rt := openRuntime(t)
	variants := map[string]GenerateConfig{
		"plain": {}, "scales": {Scales: true}, "biases": {Biases: true}, "fused": {Fused: true},
		"fused scales biases": {Fused: true, Scales: true, Biases: true},
	}
	if raceEnabled { // which does not see what is computed
		delete(variants, "scales")
		delete(variants, "biases")
		delete(variants, "fused")
	}
	for _, arch := range GenerateArchitectures() {
		for name, cfg := range variants {
			if cfg.Fused && !slices.Contains(GenerateFused(), arch) {
				continue
			}
			t.Run(arch+"/"+name, func(t *testing.T) {
				t.Parallel()
				cfg.Arch, cfg.Seed = arch, 7
				path := filepath.Join(t.TempDir(), "model.gguf")
				if err := rt.GenerateModel(path, cfg); err != nil {
					t.Fatal(err)
				}
				parity(t, rt, path)
			})
		}
	}
}

func TestParityQuantised(t *testing.T) {
	rt := openRuntime(t)
	for _, arch := range []string{"qwen3moe", "olmoe", "gpt-oss", "llama4"} {
		for _, dtype := range []string{"Q8_0", "Q6_K", "Q4_K", "Q4_0", "F16"} {
			t.Run(arch+"/"+dtype, func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "model.gguf")
				if err := rt.GenerateModel(path, GenerateConfig{Arch: arch, Seed: 7, Type: dtype}); err != nil {
					t.Fatal(err)
				}
				parity(t, rt, path)
			})
		}
	}
}
