//go:build cgo && vulkan

package ggml

import (
	"math"
	"strings"
	"testing"
)

// Run by `make test-vulkan`: the kernel on a Vulkan device against the CPU's.
func TestKernelOnVulkan(t *testing.T) {
	rt := openRuntime(t)
	gpu := ""
	for _, d := range rt.Devices() {
		if strings.HasPrefix(d.Name, "Vulkan") {
			gpu = d.Name
		}
	}
	if gpu == "" {
		t.Fatalf("no Vulkan device among %v: install a driver (mesa-vulkan-drivers computes on the CPU) and set GGML_VK_VISIBLE_DEVICES=0", rt.Devices())
	}
	cpu := newKernels(t, rt, tinyPath, 1, KernelConfig{}).list[0]
	far := newKernels(t, rt, tinyPath, 1, KernelConfig{Device: gpu}).list[0]
	program := must(swiglu(256, 256).Marshal())
	rows := make([]float32, 24*256)
	for i := range rows {
		rows[i] = float32(math.Sin(float64(i) / 3))
	}
	var row, expert []int32
	for i := range int32(24) {
		row, expert = append(row, i/2), append(expert, i)
	}
	compute := func(k *Kernel) []float32 {
		prog, _, _, err := k.SetProgram(1, program)
		if err != nil {
			t.Fatal(err)
		}
		out := make([]float32, len(row)*256)
		if err := k.Compute(prog, rows, row, expert, out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	cos, worst := similarity(compute(cpu), compute(far))
	t.Logf("%s against the CPU: cosine %.8f, max |Δ| %.3g", gpu, cos, worst)
	if cos < 0.9999 {
		t.Errorf("cosine %g, want at least 0.9999", cos)
	}
}

// A model whose layers lie on the GPU, but for experts that rules keep in RAM.
func TestPlacedOnVulkan(t *testing.T) {
	rt := openRuntime(t)
	prompt := testTokens(12, 1536)
	alone := run(t, loadModel(t, rt, ModelConfig{Path: tinyPath}), prompt, 2)
	var all [][]float32
	for _, rules := range [][]Override{nil, {{`blk\.[23]\.ffn_(up|down|gate)_(ch|)exps`, "CPU"}}} {
		placed := run(t, loadModel(t, rt, ModelConfig{Path: tinyPath, GPULayers: -1, Overrides: rules}), prompt, 2)
		worst := 1.0
		for i := range alone {
			cos, _ := similarity(alone[i], placed[i])
			worst = min(worst, cos)
		}
		t.Logf("rules %v: cosine with the CPU %.6f", rules, worst)
		if worst < 0.999 {
			t.Errorf("rules %v: cosine %g, want at least 0.999", rules, worst)
		}
		if d := maxAbs(alone, placed); d == 0 {
			t.Errorf("rules %v: nothing was computed on the GPU", rules)
		}
		if all != nil && maxAbs(all, placed) == 0 {
			t.Errorf("rules %v changed nothing", rules)
		}
		all = placed
	}
}
