package ring

import (
	"context"
	"io"
	"testing"

	"kvasird/ggml/gguf"
)

// idleCompute computes nothing.
type idleCompute struct{}

func (idleCompute) Decode(context.Context, *Batch) error    { return nil }
func (idleCompute) Truncate(seq, pos int) bool              { return true }
func (idleCompute) NewSampler(Sampling) (Sampler, error)    { return idleCompute{}, nil }
func (idleCompute) Sample(int, int, []int32) (Drawn, error) { return Drawn{Token: 1}, nil }
func (idleCompute) Close()                                  {}

// BenchmarkRound is the ring's own cost: b.N tokens of one answer through three stages on loopback
// sockets, rows of 4096 elements, nothing computed. A token is three frames between stages and one
// to the entry.
func BenchmarkRound(b *testing.B) {
	for _, sessions := range []int{1, 8} {
		b.Run(map[int]string{1: "sessions=1", 8: "sessions=8"}[sessions], func(b *testing.B) { benchmarkRound(b, sessions) })
	}
}

func benchmarkRound(b *testing.B, sessions int) {
	f := newFleet(b)
	f.tcp = true
	var chain Chain
	most := b.N/sessions + 2
	for i, w := range []gguf.Range{{Begin: 0, End: 4}, {Begin: 4, End: 8}, {Begin: 8, End: 12}} {
		name := string(rune('a' + i))
		f.stage(name, w, func(c *StageConfig, d *double) {
			c.Compute, c.Width, c.Context, c.MemoryBytes, c.CanTruncate = idleCompute{}, 4096, max(most+8, 64), 1<<40, false
		})
		chain = append(chain, Hop{name, w})
	}
	e := f.entry()
	b.ReportAllocs()
	done := make(chan error)
	b.ResetTimer()
	for range sessions {
		go func() {
			s, err := e.Open(context.Background(), chain, Request{Tokens: []int32{1}, MaxTokens: most}, nil)
			for err == nil {
				_, err = s.Next(context.Background())
			}
			done <- err
		}()
	}
	for range sessions {
		if err := <-done; err != io.EOF {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(4*b.N)/b.Elapsed().Seconds(), "frames/s")
	f.close(e)
}
