package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
)

const (
	hotLine  = 5 * time.Millisecond
	hotEvery = 100 * time.Millisecond // so that the cache is warm soon
	hotCalls = 400                    // of skewed routing
)

// hotWays are the parts of the experts that are kept: none, and 1/n.
var hotWays = []int64{0, 8, 4, 2}

// hot measures what a backbone gains by experts that it keeps, over a line of 5 ms to the worker
// that has all: on the shipped model, and on its first layer with routing by Zipf's law.
func (b *bench) hot() error {
	path, err := b.tinyModel()
	if err != nil {
		return err
	}
	s, err := b.openSweep("shipped", path, true, rttStreams)
	if err != nil {
		return err
	}
	if err := s.openFar(); err != nil {
		return errors.Join(err, s.Close())
	}
	rows := make([]hotRow, len(hotWays))
	for i, n := range hotWays {
		if rows[i], err = s.keeping(n); err != nil {
			return errors.Join(err, s.Close())
		}
	}
	fmt.Fprintf(b.out, "\n### hot experts, shipped model, %d ms\n\nAll %d answers are those of the model alone, up to rounding where several rows are computed at a time.\n\n", hotLine.Milliseconds(), s.checked)
	t := tabwriter.NewWriter(b.out, 0, 0, 1, ' ', 0)
	fmt.Fprint(t, "| kept\t| here\t| calls without the line\t| tok/s, 1 stream\t| of none kept\t| tok/s, 8 streams\t| of none kept\t| skewed: here\t| calls without the line\t| calls/s of none kept\t|\n")
	fmt.Fprint(t, "|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|\n")
	for i, r := range rows {
		kept := "0"
		if hotWays[i] > 0 {
			kept = fmt.Sprintf("1/%d", hotWays[i])
		}
		fmt.Fprintf(t, "| %s\t| %.0f %%\t| %.0f %%\t| %s\t| %.2f\t| %s\t| %.2f\t| %.0f %%\t| %.0f %%\t| %.2f\t|\n", kept,
			100*r.model.hits, 100*r.model.free, rttRate(r.one), r.one/rows[0].one, rttRate(r.many), r.many/rows[0].many,
			100*r.skewed.hits, 100*r.skewed.free, r.calls/rows[0].calls)
	}
	return errors.Join(t.Flush(), s.Close())
}

// hotRow is what was measured with a part of the experts kept.
type hotRow struct {
	model, skewed hotShare
	one, many     float64 // tokens per second
	calls         float64 // per second, of skewed routing
}

// hotShare is how much was computed here of calls of one token.
type hotShare struct{ hits, free float64 }

// hotCount counts what is computed where, of calls of one token. It is told by one call at a time.
type hotCount struct {
	mu          sync.Mutex
	used        int
	free        int
	pairs, here int
}

func (c *hotCount) served(peer string, _, pairs int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pairs += pairs
	if peer == "" {
		c.here += pairs
		if pairs == c.used {
			c.free++
		}
	}
}

// share is what was counted since the last time, in so many pairs.
func (c *hotCount) share() hotShare {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := hotShare{float64(c.here) / float64(max(1, c.pairs)), float64(c.free) * float64(c.used) / float64(max(1, c.pairs))}
	c.free, c.pairs, c.here = 0, 0, 0
	return s
}

// keeping measures with 1/n of the experts kept, after the cache has seen all texts.
func (s *sweep) keeping(n int64) (row hotRow, err error) {
	count := &hotCount{used: s.file.ExpertsUsed()}
	s.far.served, s.far.local = count.served, nil
	run := func() error { return s.measureHot(&row, count, nil) }
	if n > 0 {
		h := &hotExperts{file: &modelFile{Model: s.file}, from: s.file, every: hotEvery, log: slog.New(slog.DiscardHandler)}
		if h.kernel, err = s.rt.NewKernel(ggml.KernelConfig{Threads: s.Threads}); err != nil {
			return row, err
		}
		defer h.kernel.Close()
		sizes, err := heldSizes(h.kernel, s.file)
		if err != nil {
			return row, err
		}
		for _, size := range sizes {
			h.budget += size * int64(s.file.Experts()) / n
		}
		s.far.local = &experts.Local{Kernel: h.kernel, First: true}
		run = func() error { return s.measureHot(&row, count, h) }
	}
	if err := s.far.dial(s.ctx, hotLine); err != nil {
		return row, err
	}
	defer s.far.hangUp()
	return row, run()
}

// measureHot runs the texts with a cache, or without one.
func (s *sweep) measureHot(row *hotRow, count *hotCount, h *hotExperts) error {
	far := func(texts []*rttText, n int) ([][]int32, float64, error) { return s.far.whole.run(s.ctx, texts, n) }
	if _, _, err := far(s.texts[:1], 4); err != nil { // the worker learns what it is to compute
		return err
	}
	if h != nil {
		c, err := h.open(s.far.dispatcher)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(s.ctx)
		var keeping sync.WaitGroup
		keeping.Go(func() { c.Run(ctx) }) // its errors are those of ctx
		defer keeping.Wait()
		defer cancel()
	}
	for range 3 { // the router is seen
		if _, _, err := far(s.texts, rttTokens); err != nil {
			return err
		}
		time.Sleep(2 * hotEvery)
	}
	count.share()
	line := rttRow{line: hotLine, way: "hot experts", streams: 1}
	var err error
	if row.one, err = s.measure(line, []*rttText{s.fresh}, 4*hotLine, far); err != nil {
		return err
	}
	row.model, line.streams = count.share(), rttStreams
	if row.many, err = s.measure(line, s.texts, 4*hotLine, far); err != nil {
		return err
	}
	return s.skewed(row, count)
}

// skewed computes calls of one token whose experts are drawn by Zipf's law, half of them unmeasured.
func (s *sweep) skewed(row *hotRow, count *hotCount) error {
	rng := rand.New(rand.NewPCG(7, 8))
	call := s.far.last
	call.Program = bytes.Clone(call.Program)
	call.Rows = make([]float32, call.RowsPerToken*call.RowWidth)
	for i := range call.Rows {
		call.Rows[i] = rng.Float32() - 0.5
	}
	call.Out = make([]float32, call.Used*call.OutWidth)
	var spent time.Duration
	for i := range 2 * hotCalls {
		call.IDs = zipfExperts(rng, s.file.Experts(), call.Used)
		began := time.Now()
		if err := s.far.dispatcher.Compute(s.ctx, &call); err != nil {
			return err
		}
		if i == hotCalls-1 {
			time.Sleep(2 * hotEvery)
			count.share()
		} else if i >= hotCalls {
			spent += time.Since(began)
		}
	}
	row.skewed, row.calls = count.share(), hotCalls/spent.Seconds()
	return nil
}

// zipfExperts draws different experts, the first one oftenest, the n-th one n times less often.
func zipfExperts(rng *rand.Rand, experts, used int) []int32 {
	type draw struct {
		id  int32
		key float64
	}
	list := make([]draw, experts)
	for i := range list {
		list[i] = draw{int32(i), math.Log(rng.Float64()) * float64(i+1)}
	}
	slices.SortFunc(list, func(a, b draw) int {
		if a.key > b.key {
			return -1
		}
		return 1
	})
	ids := make([]int32, used)
	for i := range ids {
		ids[i] = list[i].id
	}
	return ids
}
