//go:build cgo

package ggml

import (
	"context"
	"slices"
	"testing"
)

// A stage reuses its memory: a decode in steady state allocates nothing.
func TestStageDecodeAllocatesNothing(t *testing.T) {
	rt := openRuntime(t)
	file := openGGUF(t, tinyPath)
	ch := newChain(t, rt, []int{0, 2, 4}, ContextConfig{Tokens: 256, Batch: 4}, file.RowStage)
	defer ch.close(t)
	b, pos := NewBatch(4), 0
	step := func() {
		b.Reset()
		b.Add(Token(7+pos), pos, 0, true)
		ch.decode(t, b)
		pos++
	}
	for range 8 {
		step()
	}
	if n := testing.AllocsPerRun(50, step); n > 0 && !raceEnabled {
		t.Errorf("%g allocations per token of two stages, want 0", n)
	}
}

// The order in which the library takes rows, by sequence.
func TestSplitOrder(t *testing.T) {
	equal := splitter{ubatch: 8, equal: true}
	inARow := splitter{ubatch: 8, equal: true, consecutive: true}
	tests := []struct {
		name string
		s    *splitter
		seq  []int
		want []int32
	}{
		{"as they come", &splitter{ubatch: 2}, []int{1, 0, 1}, []int32{0, 1, 2}},
		{"one sequence", &equal, []int{0, 0, 0}, []int32{0, 1, 2}},
		{"equally many of each", &equal, []int{0, 0, 0, 2}, []int32{0, 3, 1, 2}},
		{"interleaved", &equal, []int{1, 0, 1, 0}, []int32{0, 2, 1, 3}},
		{"full ubatch", &splitter{ubatch: 3, equal: true}, []int{0, 0, 1, 1}, []int32{0, 2, 1, 3}},
		{"only neighbours", &inARow, []int{0, 2, 0, 2}, []int32{0, 2, 1, 3}},
		{"a later entry counts", &inARow, []int{0, 2, 1, 2}, []int32{0, 2, 1, 3}},
		{"backwards", &inARow, []int{1, 0}, []int32{0, 1}},
	}
	for _, tt := range tests {
		for range 2 { // it is used again and again
			got := tt.s.order(nil, len(tt.seq), func(i int) int { return tt.seq[i] })
			if !slices.Equal(got, tt.want) {
				t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
			}
		}
	}
}

// BenchmarkBoundary decodes with the shipped model, whole and cut in two in one
// process: what a boundary costs besides the network.
func BenchmarkBoundary(b *testing.B) {
	rt := openRuntime(b)
	file := openGGUF(b, tinyPath)
	cfg := ContextConfig{Tokens: 512, Batch: 8, Threads: 1}
	m := loadModel(b, rt, ModelConfig{Path: tinyPath})
	c, err := m.NewContext(cfg)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ch := newChain(b, rt, []int{0, 2, 4}, cfg, file.RowStage)
	defer ch.close(b)
	run := func(b *testing.B, contexts []*Context, decode func(*Batch)) {
		batch := NewBatch(1)
		for i := 0; b.Loop(); i++ {
			pos := i % 256
			if pos == 0 {
				for _, c := range contexts {
					c.SeqRemove(0, -1, -1)
				}
			}
			batch.Reset()
			batch.Add(Token(i%1000), pos, 0, true)
			decode(batch)
		}
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tok/s")
	}
	b.Run("whole", func(b *testing.B) {
		run(b, []*Context{c}, func(batch *Batch) {
			if err := c.Decode(context.Background(), batch); err != nil {
				b.Fatal(err)
			}
		})
	})
	b.Run("two stages", func(b *testing.B) {
		run(b, ch.contexts, func(batch *Batch) { ch.decode(b, batch) })
	})
}
