//go:build cgo

package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// lineExperts are the experts of the shipped model at the end of a short line. They compute in their
// turn, and count the calls that are on their way at the same time.
type lineExperts struct {
	kernel    *ggml.Kernel
	turn      Turn
	under     atomic.Int32
	most      atomic.Int32
	computing atomic.Int32
	overlap   atomic.Bool // two computed at once
	wait      func()
}

func openLine(t *testing.T) (*lineExperts, *ggml.Model) {
	t.Helper()
	file, err := gguf.OpenModel(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	f := &lineExperts{wait: func() { time.Sleep(time.Millisecond) }}
	if f.kernel, err = runtime.NewKernel(ggml.KernelConfig{Threads: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.kernel.Close() })
	all := gguf.Slice{Layers: gguf.Range{End: file.Layers()}, Experts: gguf.Range{End: file.Experts()}}
	if err := f.kernel.LoadSlices(file, all); err != nil {
		t.Fatal(err)
	}
	m, err := runtime.LoadModel(ggml.ModelConfig{Path: tinyPath, Experts: Experts(f.compute)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return f, m
}

func (f *lineExperts) compute(_ context.Context, call *ggml.ExpertCall) error {
	for now, most := f.under.Add(1), f.most.Load(); now > most && !f.most.CompareAndSwap(most, now); most = f.most.Load() {
	}
	defer f.under.Add(-1)
	f.wait()
	row := make([]int32, len(call.IDs))
	for p := range row {
		row[p] = int32(p * call.RowsPerToken / call.Used)
	}
	return f.turn.Compute(func() error {
		if f.computing.Add(1) > 1 {
			f.overlap.Store(true)
		}
		defer f.computing.Add(-1)
		prog, _, _, err := f.kernel.SetProgram(call.Layer, call.Program)
		if err != nil {
			return err
		}
		return f.kernel.Compute(prog, call.Rows, row, call.IDs, call.Out)
	})
}

// answersOf has all questions answered at once.
func answersOf(t *testing.T, e *Engine) []string {
	t.Helper()
	got := make([]string, len(questions))
	var wg sync.WaitGroup
	for i, q := range questions {
		g := start(t, t.Context(), e, greedy(t, e, q, 24))
		wg.Go(func() {
			var err error
			if got[i], err = read(t.Context(), g); err != nil {
				t.Errorf("%q: %v", q, err)
			}
		})
	}
	wg.Wait()
	return got
}

// TestLanes: answers are the same by 1, 2 and 4 contexts, whose calls are on their way at the same
// time while one of them computes; a canary and a caller who leaves do not disturb them.
func TestLanes(t *testing.T) {
	f, m := openLine(t)
	var want []string
	for _, lanes := range []int{1, 2, 4} {
		e := open(t, Config{Model: m, Sequences: 4, Lanes: lanes, Turn: &f.turn, Queue: 16})
		if err := e.Canary(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.most.Store(0)
		ctx, leave := context.WithCancel(t.Context())
		gone := start(t, ctx, e, endless(t, e, questions[0], 0))
		if _, err := gone.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		leave()
		got := answersOf(t, e)
		if want == nil {
			want = got
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d lanes: %q\nwant %q", lanes, got, want)
		}
		if most := f.most.Load(); (most > 1) != (lanes > 1) || f.overlap.Load() {
			t.Errorf("%d lanes: up to %d calls at once, two computed at once: %v", lanes, most, f.overlap.Load())
		}
		waitFor(t, "the one who left is noticed", func() bool { return e.Stats().Cancelled == 1 })
		if st := e.Stats(); st.Completed != int64(len(questions)) || st.Running != 0 || st.Lanes != lanes || st.TokensPerSecond <= 0 {
			t.Errorf("%+v", st)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLaneFor: a request goes where its conversation is, else to the lane with the fewest.
func TestLaneFor(t *testing.T) {
	e := open(t, Config{Context: 1024, Sequences: 4, Lanes: 2})
	conversation := func(owner string, text string) Request {
		return Request{Prompt: slices.Concat(tokensOf(t, tools), tokensOf(t, text)), MaxTokens: 8, Owner: owner}
	}
	first := []Request{conversation("a", questions[0]), conversation("b", questions[1])}
	laneOf := func(g *Generation) *lane {
		e.mu.Lock()
		defer e.mu.Unlock()
		return g.lane
	}
	var running []*Generation
	for _, req := range first {
		running = append(running, start(t, t.Context(), e, req))
	}
	lanes := []*lane{laneOf(running[0]), laneOf(running[1])}
	if lanes[0] == lanes[1] {
		t.Error("two requests are in one lane, the other one is free")
	}
	for i, g := range running {
		first[i].Prompt = append(first[i].Prompt, tokenIDs(t, g)...)
	}
	for i := range 2 { // those of the second lane first
		i = 1 - i
		g := start(t, t.Context(), e, first[i])
		if laneOf(g) != lanes[i] {
			t.Errorf("conversation %d does not go on where it was", i)
		}
		if tokenIDs(t, g); g.Cached() < len(first[i].Prompt)-9 {
			t.Errorf("conversation %d: %d of %d tokens were there", i, g.Cached(), len(first[i].Prompt))
		}
	}
	var many []*Generation
	for range 4 {
		many = append(many, start(t, t.Context(), e, endless(t, e, questions[2], 200)))
	}
	for _, l := range e.lanes {
		waitFor(t, "each lane runs two", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return l.load == 2 })
	}
	for _, g := range many {
		tokenIDs(t, g)
	}
}

// tokenIDs reads a generation to its end.
func tokenIDs(t *testing.T, g *Generation) (tokens []int32) {
	t.Helper()
	for {
		token, _, err := g.NextToken(t.Context())
		if err != nil {
			return tokens
		}
		tokens = append(tokens, int32(token))
	}
}

// TestSecondLane: a second context is made when several answers wait for about as long as they are
// computed, by a clock that says so, and memory is there; else not.
func TestSecondLane(t *testing.T) {
	for _, tt := range []struct {
		name  string
		wait  time.Duration // of an expert call
		spare bool
		lanes int
	}{
		{"waits longer", 4 * time.Millisecond, true, 2},
		{"no memory", 4 * time.Millisecond, false, 1},
		{"waits for hardly anything", 0, true, 1},
		{"does nothing but wait", time.Second, true, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, m := openLine(t)
			var clock atomic.Int64
			f.wait = func() { clock.Add(int64(tt.wait)) }
			e := open(t, Config{
				Model: m, Sequences: 4, Turn: &f.turn, Queue: 64, Spare: func() bool { return tt.spare },
				Now: func() time.Time { return time.Unix(0, clock.Add(int64(2*time.Millisecond))) },
			})
			want := answersOf(t, e)
			for range 3 {
				if got := answersOf(t, e); !slices.Equal(got, want) {
					t.Errorf("%q\nwant %q", got, want)
				}
			}
			if st := e.Stats(); st.Lanes != tt.lanes || st.Failed > 0 {
				t.Errorf("%+v, want %d lanes; %+v", st, tt.lanes, e.apart)
			}
		})
	}
}
