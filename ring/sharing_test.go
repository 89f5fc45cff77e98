package ring

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
)

// forever is a request whose answer is long and does not end by itself.
func forever(tokens int) Request {
	return Request{Tokens: []int32{1, 2, 3, 4}, MaxTokens: tokens, Sampling: Sampling{LogitBias: map[int32]float32{0: -1000}}}
}

// Two entries use stages in different chains at once: a stage has several predecessors and several
// successors, and a node is the last of one chain and the first of another.
func TestChainsShareStages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		front, rest := gguf.Range{Begin: 0, End: 6}, gguf.Range{Begin: 6, End: testLayers}
		for name, w := range map[string]gguf.Range{"a": front, "b": front, "c": rest, "d": rest} {
			f.stage(name, w, func(c *StageConfig, d *double) { d.delay = time.Millisecond })
		}
		c := f.nodes["c"]
		c.also = &member{name: "c"}
		f.fill(c.also, front)
		chains := []Chain{{{"a", front}, {"c", rest}}, {{"a", front}, {"d", rest}}, {{"b", front}, {"c", rest}}, {{"c", front}, {"d", rest}}, {{"b", front}, {"d", rest}}}
		one, two := f.entry(), f.entry()
		var wg sync.WaitGroup
		for i := range 15 {
			wg.Go(func() {
				e := one
				if i%2 == 1 {
					e = two
				}
				if err := ask(t, e, chains[i%len(chains)], request(rand.New(rand.NewPCG(3, uint64(i)))), nil); err != nil {
					t.Errorf("session %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		f.free()
		if s := c.also.stage.Stats(); s.Steps == 0 || s.Free != s.Sequences {
			t.Errorf("the second stage of a node: %+v", s)
		}
		if s := f.nodes["a"].stage.Stats(); s.Ways != 2 {
			t.Errorf("a stage with two successors has %d onward links", s.Ways)
		}
		f.close(one, two)
	})
}

// Links that no session uses are closed.
func TestIdleLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(2)
		e := f.entry()
		for range 2 {
			if err := ask(t, e, chain, forever(5), nil); err != nil {
				t.Error(err)
			}
			f.free()
			if s := f.nodes["s0"].stage.Stats(); s.Ways != 1 || s.Links != 2 {
				t.Errorf("got %d onward and %d incoming links, want 1 and 2", s.Ways, s.Links)
			}
			time.Sleep(2 * time.Minute)
			if s := f.nodes["s0"].stage.Stats(); s.Ways != 0 || s.Links != 0 {
				t.Errorf("%d onward and %d incoming links are not used", s.Ways, s.Links)
			}
		}
		f.close(e)
	})
}

// Cancel, Close and the end of the entry free every stage, whatever it is doing.
func TestCancelFrees(t *testing.T) {
	for _, how := range []string{"context", "close", "entry closed", "entry killed"} {
		for _, stages := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, %d stages", how, stages), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { cancelFrees(t, how, stages) })
			})
		}
	}
}

func cancelFrees(t *testing.T, how string, stages int) {
	f := newFleet(t)
	chain := f.ring(stages, func(c *StageConfig, d *double) { d.delay = 10 * time.Second }) // computes when it is cancelled
	e := f.entry()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var list []*Session
	for range 5 {
		s, err := e.Open(ctx, chain, forever(400), nil)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, s)
	}
	time.Sleep(15 * time.Second)
	switch how {
	case "context":
		cancel()
	case "close":
		for _, s := range list {
			s.Close()
		}
	case "entry closed":
		e.Close()
	case "entry killed":
		f.mu.Lock()
		f.nodes["entry"].dead = true
		f.mu.Unlock()
		f.between("entry", "")
	}
	if d := f.free(); d > time.Second {
		t.Errorf("free after %v", d)
	}
	for _, s := range list {
		if _, _, err := answer(t.Context(), s); err == nil {
			t.Error("an answer that was cancelled is complete")
		}
	}
	f.close(e)
}

// A Decode that fails for one session ends that one, with the stage and the cause; the others go on.
func TestDecodeFails(t *testing.T) {
	for at := range 3 {
		for _, recurrent := range []bool{false, true} {
			t.Run(fmt.Sprintf("stage %d, recurrent %v", at, recurrent), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { decodeFails(t, at, recurrent) })
			})
		}
	}
}

func decodeFails(t *testing.T, at int, recurrent bool) {
	f := newFleet(t)
	const poison = 100 // in one prompt, and never drawn
	chain := f.ring(3, func(c *StageConfig, d *double) {
		d.delay, d.recurrent, c.CanTruncate = time.Millisecond, recurrent, !recurrent
		if c.Layers == windows(3)[at] {
			d.fault = func(b *Batch) error {
				for i, tok := range b.Token {
					if tok == poison {
						return fmt.Errorf("expert %d is missing", b.Seq[i]*0+17)
					}
				}
				return nil
			}
		}
	})
	e := f.entry()
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() {
			req := request(rand.New(rand.NewPCG(9, uint64(i))))
			req.MaxTokens += 60
			if err := ask(t, e, chain, req, func(context.Context, []Hop) (Chain, error) { return chain, nil }); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(30 * time.Millisecond)
	bad := forever(30)
	bad.Tokens = []int32{1, 2, poison, 3}
	err := ask(t, e, chain, bad, func(context.Context, []Hop) (Chain, error) { return nil, errors.New("asked for another chain") })
	wantError(t, err, at, CodeCompute, "expert 17 is missing")
	wg.Wait()
	f.free()
	f.close(e)
}

// A model whose memory cannot drop a part is not drafted for, and lost stages are replaced as well.
func TestRecurrent(t *testing.T) {
	for at := range 3 {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			change := func(c *StageConfig, d *double) {
				// Only the middle window is recurrent: all stages have to know.
				d.delay = time.Millisecond
				d.recurrent = c.Layers.Begin == 4
				c.CanTruncate = !d.recurrent
			}
			chain := f.ring(3, change)
			replan := f.spares(chain, change)
			e := f.entry()
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() {
					req := request(rand.New(rand.NewPCG(4, uint64(i))))
					req.MaxTokens += 40
					if err := ask(t, e, chain, req, replan); err != nil {
						t.Error(err)
					}
				})
			}
			time.Sleep(60 * time.Millisecond)
			f.kill(chain[at].Peer)
			wg.Wait()
			if n := f.nodes["s0"].stage.Stats().Drafted; n != 0 {
				t.Errorf("%d drafts", n)
			}
			f.free()
			f.close(e)
		})
	}
}

// A Decode that hangs is ended, and the session with it.
func TestStepTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3, func(c *StageConfig, d *double) {
			if c.Layers.Begin == 4 {
				d.delay = time.Hour
			}
		})
		e := f.entry()
		err := ask(t, e, chain, forever(5), nil)
		wantError(t, err, 1, CodeCompute, "at most 2m0s are allowed")
		f.free()
		f.close(e)
	})
}

// A stage that computes rows that are not finite is replaced by another.
func TestBadRowsAreBlamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3, func(c *StageConfig, d *double) {
			if c.Layers.Begin == 4 {
				n := 0
				d.spoil = func(b *Batch) {
					if n++; n == 20 {
						b.Out[3] /= 0 * b.Out[3]
					}
				}
			}
		})
		replan := f.spares(chain)
		e := f.entry()
		var lost []Hop
		err := ask(t, e, chain, forever(100), func(ctx context.Context, l []Hop) (Chain, error) {
			lost = l
			return replan(ctx, l)
		})
		if err != nil || len(lost) != 1 || lost[0] != chain[1] {
			t.Errorf("lost %v, %v", lost, err)
		}
		f.free()
		f.close(e)
	})
}

// What is wrong with a request is told, by the entry or by the stage that knows.
func TestRequestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(2)
		e := f.entry()
		for _, tt := range []struct {
			want  string
			chain Chain
			req   Request
		}{
			{"prompt is empty", chain, Request{MaxTokens: 1}},
			{"at most 0 tokens", chain, Request{Tokens: []int32{1}}},
			{"prompt token 1 is -1", chain, Request{Tokens: []int32{1, -1}, MaxTokens: 1}},
			{"nobody has layers 6:12", chain[:1], forever(1)},
			{"chain of 0", nil, forever(1)},
			{"stage 0 (peer s0, layers 0:6): limit", chain, forever(600)},
			{"stage 1 (peer s1, layers 6:12): request: logit bias for token 999", chain,
				Request{Tokens: []int32{1}, MaxTokens: 1, Sampling: Sampling{LogitBias: map[int32]float32{999: 1}}}},
		} {
			err := ask(t, e, tt.chain, tt.req, nil)
			if err == nil || !contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		}
		f.free()
		f.close(e)
	})
}

func TestCanary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3)
		e := f.entry()
		req := Request{Tokens: []int32{5, 6, 1}, MaxTokens: 1}
		want, _, _ := oracle(t, req)
		got, err := e.Canary(t.Context(), chain, req.Tokens)
		if err != nil || got != want[0] {
			t.Errorf("got %d, %v, want %d", got, err, want[0])
		}
		f.free()
		f.kill("s1")
		if _, err := e.Canary(t.Context(), chain, req.Tokens); err == nil {
			t.Error("a broken ring passes its canary")
		}
		f.free()
		f.close(e)
	})
}

// An answer that its grammar leaves no token for fails alone, with the reason, on no other chain.
func TestGrammarTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3)
		e := f.entry()
		req := Request{Tokens: []int32{1, 2, 3}, MaxTokens: 5, Sampling: Sampling{Grammar: noGrammar}}
		err := ask(t, e, chain, req, func(context.Context, []Hop) (Chain, error) {
			t.Error("another chain was asked for")
			return chain, nil
		})
		wantError(t, err, 2, CodeCompute, "position 3 cannot be drawn: the grammar takes no token")
		req.Sampling.Grammar = sumGrammar
		if err := ask(t, e, chain, req, nil); err != nil {
			t.Error(err)
		}
		f.free()
		f.close(e)
	})
}
