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
