//go:build cgo

package ggml

import (
	"context"
	"testing"
)

func benchDecode(b *testing.B, m *Model) {
	c, err := m.NewContext(ContextConfig{Tokens: 512, Batch: 16})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	batch := NewBatch(1)
	pos := 0
	for b.Loop() {
		if pos == 400 {
			c.SeqRemove(0, -1, -1)
			pos = 0
		}
		batch.Reset()
		batch.Add(Token(pos%100+300), pos, 0, true)
		pos++
		if err := c.Decode(context.Background(), batch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tok/s")
}

// One token at a time on the shipped model: alone, and through the device with
// one kernel in process. The difference is what the device and kernel cost.
func BenchmarkDecodeAlone(b *testing.B) {
	rt := openRuntime(b)
	benchDecode(b, loadModel(b, rt, ModelConfig{Path: tinyPath}))
}

func BenchmarkDecodeInProcess(b *testing.B) {
	rt := openRuntime(b)
	ks := newKernels(b, rt, tinyPath, 1, KernelConfig{Threads: 1})
	row := []int32{0, 0, 0, 0}
	experts := func(_ context.Context, call *ExpertCall) error {
		prog, _, _, err := ks.list[0].SetProgram(call.Layer, call.Program)
		if err != nil {
			return err
		}
		return ks.list[0].Compute(prog, call.Rows, row, call.IDs, call.Out)
	}
	benchDecode(b, loadModel(b, rt, ModelConfig{Path: tinyPath, Experts: experts}))
}
