package ring

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// spares adds a second holder of each window of a chain, and returns a Replan that takes the first
// holder of each that is not lost, or a lost one that lives if there is no other.
func (f *fleet) spares(chain Chain, change ...func(*StageConfig, *double)) Replan {
	holders := make([][]Hop, len(chain))
	for i, h := range chain {
		spare := Hop{"spare-" + h.Peer, h.Layers}
		f.stage(spare.Peer, h.Layers, change...)
		holders[i] = []Hop{h, spare}
	}
	return func(ctx context.Context, lost []Hop) (Chain, error) {
		var next Chain
		for i, list := range holders {
			at := slices.IndexFunc(list, func(h Hop) bool { return !slices.Contains(lost, h) })
			if at < 0 {
				at = slices.IndexFunc(list, func(h Hop) bool {
					f.mu.Lock()
					defer f.mu.Unlock()
					m := f.nodes[h.Peer]
					return !m.dead && m.frozen == nil
				})
			}
			if at < 0 {
				return nil, fmt.Errorf("nobody else holds layers %v", chain[i].Layers)
			}
			next = append(next, list[at])
		}
		return next, nil
	}
}

var losses = map[string]func(f *fleet, chain Chain, at int){
	"kill":   func(f *fleet, chain Chain, at int) { f.kill(chain[at].Peer) },
	"freeze": func(f *fleet, chain Chain, at int) { f.freeze(chain[at].Peer) },
	"cut": func(f *fleet, chain Chain, at int) { // from its predecessor, for a moment
		before := "entry"
		if at > 0 {
			before = chain[at-1].Peer
		}
		f.cut(before, chain[at].Peer, false)
	},
	"cut for good": func(f *fleet, chain Chain, at int) {
		before := chain[(at+len(chain)-1)%len(chain)].Peer // the last stage from the first one
		f.cut(before, chain[at].Peer, true)
	},
}

// A lost stage is replaced, wherever it is and whatever happened to it; no answer is lost or
// different, and when all is over every sequence is free.
func TestLoss(t *testing.T) {
	seeds := 5 // of four sessions each
	if testing.Short() || raceEnabled {
		seeds = 1
	}
	for name, lose := range losses {
		for _, stages := range []int{2, 3, 4} {
			for at := range stages {
				t.Run(fmt.Sprintf("%s, stage %d of %d", name, at, stages), func(t *testing.T) {
					for seed := range seeds {
						synctest.Test(t, func(t *testing.T) { loseOne(t, stages, at, uint64(seed), lose) })
					}
				})
			}
		}
	}
}

func loseOne(t *testing.T, stages, at int, seed uint64, lose func(f *fleet, chain Chain, at int)) {
	f := newFleet(t)
	slow := func(c *StageConfig, d *double) { d.delay = time.Millisecond }
	chain := f.ring(stages, slow)
	replan := f.spares(chain, slow)
	e := f.entry()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			req := request(r)
			req.MaxTokens += 40
			if err := ask(t, e, chain, req, replan); err != nil {
				t.Errorf("seed %d, session %d: %v", seed, i, err)
			}
		})
	}
	r := rand.New(rand.NewPCG(seed, 99))
	time.Sleep(time.Duration(r.IntN(120_000)) * time.Microsecond)
	lose(f, chain, at)
	wg.Wait()
	f.free()
	f.close(e)
}

// Several stages at once, again and again.
func TestLossOfSeveral(t *testing.T) {
	for seed := range uint64(8) {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			slow := func(c *StageConfig, d *double) { d.delay = time.Millisecond }
			chain := f.ring(4, slow)
			replan := f.spares(chain, slow)
			e := f.entry()
			var wg sync.WaitGroup
			for i := range 6 {
				wg.Go(func() {
					req := request(rand.New(rand.NewPCG(seed, uint64(i))))
					req.MaxTokens += 60
					if err := ask(t, e, chain, req, replan); err != nil {
						t.Errorf("seed %d, session %d: %v", seed, i, err)
					}
				})
			}
			r := rand.New(rand.NewPCG(seed, 98))
			for _, at := range r.Perm(4)[:3] {
				time.Sleep(time.Duration(r.IntN(30)) * time.Millisecond)
				if r.IntN(2) == 0 {
					f.kill(chain[at].Peer)
				} else {
					f.freeze(chain[at].Peer)
				}
			}
			wg.Wait()
			f.free()
			f.close(e)
		})
	}
}

// Without another holder the answer ends with an error that says which stage is missing and why,
// and all that is left of the ring is free.
func TestLossWithoutReplacement(t *testing.T) {
	for name, lose := range losses {
		if name == "cut" {
			continue // heals
		}
		for at := range 3 {
			t.Run(fmt.Sprintf("%s, stage %d", name, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newFleet(t)
					chain := f.ring(3, func(c *StageConfig, d *double) { d.delay = time.Millisecond })
					e := f.entry()
					nobody := errors.New("nobody else holds them")
					done := make(chan error)
					go func() {
						done <- ask(t, e, chain, Request{Tokens: []int32{1, 2, 3}, MaxTokens: 400, Sampling: Sampling{LogitBias: map[int32]float32{0: -1000}}},
							func(context.Context, []Hop) (Chain, error) { return nil, nobody })
					}()
					time.Sleep(50 * time.Millisecond)
					lose(f, chain, at)
					start := time.Now()
					err := <-done
					var se *StageError
					if !errors.As(err, &se) || se.Code != CodeLost || !errors.Is(err, nobody) {
						t.Errorf("got %v, want a lost stage and that there is no other", err)
					}
					if d := time.Since(start); d > 7*time.Second {
						t.Errorf("known after %v", d)
					}
					if d := f.free(); d > time.Second {
						t.Errorf("freed after %v", d)
					}
					f.close(e)
				})
			})
		}
	}
}

// A frozen neighbour is known after DeadAfter, which can be set.
func TestFrozenIsKnown(t *testing.T) {
	for _, dead := range []time.Duration{time.Second, 5 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			chain := f.ring(3, func(c *StageConfig, d *double) { c.DeadAfter, d.delay = dead, time.Millisecond })
			e := f.entry(func(c *EntryConfig) { c.DeadAfter = dead })
			var known time.Duration
			var frozen time.Time
			s, err := e.Open(t.Context(), chain, Request{Tokens: []int32{1}, MaxTokens: 500, Sampling: Sampling{LogitBias: map[int32]float32{0: -1000}}},
				func(ctx context.Context, lost []Hop) (Chain, error) {
					known = time.Since(frozen)
					return nil, errors.New("enough")
				})
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
			frozen = time.Now()
			f.freeze("s1")
			if _, _, err := answer(t.Context(), s); err == nil {
				t.Error("the answer of a frozen ring is complete")
			}
			if known < dead*4/5 || known > dead*6/5 {
				t.Errorf("known after %v, want about %v", known, dead)
			}
			f.close(e)
		})
	}
}

// A chain with other windows computes everything again, under another identity.
func TestReplanWithOtherWindows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		slow := func(c *StageConfig, d *double) { d.delay = time.Millisecond }
		chain := f.ring(3, slow)
		var other Chain
		for i, w := range windows(2) {
			h := Hop{fmt.Sprintf("o%d", i), w}
			f.stage(h.Peer, w, slow)
			other = append(other, h)
		}
		e := f.entry()
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				req := request(rand.New(rand.NewPCG(5, uint64(i))))
				req.MaxTokens += 50
				if err := ask(t, e, chain, req, func(context.Context, []Hop) (Chain, error) { return other, nil }); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(30 * time.Millisecond)
		f.kill("s1")
		wg.Wait()
		f.free()
		f.close(e)
	})
}

// A stage that leaves is replaced while it still serves; one that nobody can replace stays until it
// is closed.
func TestDrain(t *testing.T) {
	for at := range 3 {
		for _, replaceable := range []bool{true, false} {
			t.Run(fmt.Sprintf("stage %d, replaceable %v", at, replaceable), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { drainOne(t, at, replaceable) })
			})
		}
	}
}

func drainOne(t *testing.T, at int, replaceable bool) {
	f := newFleet(t)
	slow := func(c *StageConfig, d *double) { d.delay = time.Millisecond }
	chain := f.ring(3, slow)
	replan := f.spares(chain, slow)
	if !replaceable {
		replan = func(context.Context, []Hop) (Chain, error) { return nil, errors.New("no other") }
	}
	e := f.entry()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			req := request(rand.New(rand.NewPCG(uint64(at), uint64(i))))
			req.MaxTokens += 100
			if err := ask(t, e, chain, req, replan); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(40 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	start := time.Now()
	if err := f.nodes[chain[at].Peer].stage.Drain(ctx); err != nil {
		t.Errorf("drain: %v", err)
	}
	if d := time.Since(start); replaceable && d > 500*time.Millisecond {
		t.Errorf("left after %v", d)
	}
	if replaceable {
		f.kill(chain[at].Peer)
	}
	wg.Wait()
	if !replaceable {
		err := ask(t, e, chain, Request{Tokens: []int32{1}, MaxTokens: 1}, nil)
		wantError(t, err, at, CodeClosing, "no new sessions")
	}
	f.free()
	f.close(e)
}

// A stage without room, and without another holder, is asked again: a session that is moved
// may find there what is left of its former self.
func TestBusyStageIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(2, func(c *StageConfig, d *double) { c.Sequences, d.delay = 1, 20*time.Millisecond })
		e := f.entry()
		var avoided [][]Hop
		alone := func(_ context.Context, lost []Hop) (Chain, error) {
			avoided = append(avoided, lost)
			return nil, errors.New("there is no other")
		}
		first, err := e.Open(t.Context(), chain, forever(400), nil)
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(500*time.Millisecond, func() { first.Close() })
		if err := ask(t, e, chain, forever(10), alone); err != nil {
			t.Error(err)
		}
		if len(avoided) < 2 || !slices.Equal(avoided[len(avoided)-1], chain[:1]) {
			t.Errorf("chains without %v were asked for, want without %v each time", avoided, chain[:1])
		}
		f.free()

		// not for ever
		if first, err = e.Open(t.Context(), chain, forever(400), nil); err != nil {
			t.Fatal(err)
		}
		_, err = e.Open(t.Context(), chain, Request{Tokens: []int32{1}, MaxTokens: 400}, alone)
		if !errors.Is(err, errRepairs) {
			wantError(t, err, 0, CodeBusy, "all 1 sequences are in use")
		}
		first.Close()
		f.free()
		f.close(e)
	})
}

// Sessions whose predecessor is gone keep nobody out once a repair would have come: a stage that
// was stopped for a while is left with all that went on elsewhere.
func TestOrphansMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.ring(3, func(c *StageConfig, d *double) { c.Sequences = 3 })
		e, s := f.entry(), f.dial(t, "s1")
		s.greet(hostileMiddle)
		for id := range uint64(3) {
			o := opening{Epoch: 1, Key: make([]byte, keySize), Hop: 1, Prompt: 1, Most: 1, Known: 1, Entry: "entry"}
			o.setChain(hostileLone)
			s.send(frameOpen, 1000+id, encodeControl(o))
		}
		synctest.Wait()
		s.conn.Close()
		synctest.Wait()
		short := Request{Tokens: []int32{1, 2, 3}, MaxTokens: 5}
		_, err := e.Open(t.Context(), hostileChain, short, nil)
		wantError(t, err, 1, CodeBusy, "all 3 sequences are in use")
		time.Sleep(orphanTime)
		if err := ask(t, e, hostileChain, short, nil); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if n := f.nodes["s1"].stage.Stats(); n.Sequences-n.Free != 2 {
			t.Errorf("%d sequences are taken, want 2: one orphan made room", n.Sequences-n.Free)
		}
		f.free()
		f.close(e)
	})
}
