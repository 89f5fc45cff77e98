package ring

import (
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func contains(s, part string) bool { return strings.Contains(s, part) }

// Rows as f16 are half as large; the double's are exact in it.
func TestHalfPrecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3, func(c *StageConfig, d *double) { c.Precision = F16 })
		e := f.entry()
		for i := range uint64(4) {
			if err := ask(t, e, chain, request(rand.New(rand.NewPCG(2, i))), nil); err != nil {
				t.Error(err)
			}
		}
		f.close(e)
	})
}

// All stages compute at once: with as many sessions as stages, each answer is as fast as alone.
func TestStagesWorkAtOnce(t *testing.T) {
	took := map[int]time.Duration{}
	for _, sessions := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			chain := f.ring(4, func(c *StageConfig, d *double) { d.perRow = time.Millisecond })
			e := f.entry()
			start := time.Now()
			var wg sync.WaitGroup
			for range sessions {
				wg.Go(func() {
					req := forever(100)
					req.NoDraft = true
					if err := ask(t, e, chain, req, nil); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			took[sessions] = time.Since(start)
			f.close(e)
		})
	}
	if took[4] > took[1]*5/4 {
		t.Errorf("four answers took %v, one %v", took[4], took[1])
	}
}

// Where drafts are wrong and their rows cost as much as others, they cost little, also behind a
// prompt that takes much longer than a round.
func TestWrongDraftsCostLittle(t *testing.T) {
	took := map[bool]time.Duration{}
	for _, drafts := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			chain := f.ring(2, func(c *StageConfig, d *double) { d.perRow = time.Millisecond })
			e := f.entry()
			req := forever(120)
			req.NoDraft = !drafts
			rng := rand.New(rand.NewPCG(7, 8))
			for token := range int32(testVocab) { // so few that nearly every pair of them was there before
				if token == 0 || token > 7 {
					req.Sampling.LogitBias[token] = -1000
				}
			}
			for range 300 {
				req.Tokens = append(req.Tokens, 1+rng.Int32N(7))
			}
			start := time.Now()
			if err := ask(t, e, chain, req, nil); err != nil {
				t.Error(err)
			}
			took[drafts] = time.Since(start)
			f.close(e)
		})
	}
	if took[true] > took[false]*11/10 {
		t.Errorf("%v with drafts, %v without", took[true], took[false])
	}
}

// A long prompt does not stall answers that run: between two tokens of theirs there are at most two
// chunks of it at each stage, the one that runs and the one that comes with them.
func TestPromptDoesNotStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		chain := f.ring(3, func(c *StageConfig, d *double) { d.perRow = time.Millisecond })
		e := f.entry()
		req := forever(300)
		req.NoDraft = true
		s, err := e.Open(t.Context(), chain, req, nil)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(100 * time.Millisecond)
			long := forever(4)
			for len(long.Tokens) < 450 {
				long.Tokens = append(long.Tokens, 1+int32(len(long.Tokens)%7))
			}
			if err := ask(t, e, chain, long, nil); err != nil {
				t.Error(err)
			}
		})
		var gaps []time.Duration
		last := time.Now()
		for {
			if _, err := s.Next(t.Context()); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			gaps = append(gaps, time.Since(last))
			last = time.Now()
		}
		wg.Wait()
		if worst := slices.Max(gaps[2:]); worst > 3*(20+22)*time.Millisecond {
			t.Errorf("%v between two tokens; at each of 3 stages a chunk of 20 ms may run and another may come with it; the prompt takes 450 ms", worst)
		}
		f.close(e)
	})
}

// Over real sockets, with real time.
func TestSockets(t *testing.T) {
	f := newFleet(t)
	f.tcp = true
	chain := f.ring(3)
	replan := f.spares(chain)
	e := f.entry()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			req := request(rand.New(rand.NewPCG(6, uint64(i))))
			req.MaxTokens += 100
			if err := ask(t, e, chain, req, replan); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(5 * time.Millisecond)
	f.kill("s1")
	wg.Wait()
	if d := f.free(); d > 10*time.Second {
		t.Errorf("free after %v", d)
	}
	f.close(e)
}

// More rows than may wait for a socket are sent as it takes them.
func TestRowsWaitForTheSocket(t *testing.T) {
	f := newFleet(t)
	f.tcp = true
	var chain Chain
	for i, w := range windows(2) {
		name := string(rune('a' + i))
		f.stage(name, w, func(c *StageConfig, d *double) { c.Compute, c.Width = idleCompute{}, MaxWidth })
		chain = append(chain, Hop{name, w})
	}
	e := f.entry()
	s, err := e.Open(t.Context(), chain, Request{Tokens: make([]int32, 100), MaxTokens: 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := answer(t.Context(), s); err != nil || len(got) != 3 {
		t.Errorf("got %v, %v", got, err)
	}
	f.free()
	f.close(e)
}
