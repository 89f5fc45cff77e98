package experts

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
)

// block is the experts [8i, 8i+8) of both layers.
func block(i int) Slice { return layerSlice(8*i, 8*i+8) }

// TestSetLocal: what is here is computed here, from the call after SetLocal on, and none of what
// went.
func TestSetLocal(t *testing.T) {
	w := newSwarm(t)
	w.start("a", wholeLayer(), nil)
	own := wholeLayer()
	served := newLedger()
	d := w.dispatcher(func(c *Config) { c.Local, c.Served = &Local{Kernel: own, First: true}, served.add })
	waitFor(t, d, "connected", connected)
	call := testCall(2, 20, false)
	want := alone(t, wholeLayer(), call)
	all := 0
	for i, held := range [][]Slice{nil, {block(0)}, {block(0), block(5)}, {block(5)}, {layerSlice(0, testExperts)}, nil} {
		d.SetLocal(held)
		here, before := 0, served.of("")
		for _, id := range call.IDs {
			for _, s := range held {
				if s.holds(call.Layer, id) {
					here++
				}
			}
		}
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		all += len(call.IDs)
		if diff := maxDiff(call.Out, want); diff != 0 {
			t.Errorf("%d: maximum difference %g", i, diff)
		}
		if got := served.of("") - before; got != here {
			t.Errorf("%d: %d pairs computed here, want %d", i, got, here)
		}
	}
	if d.Pairs() != uint64(all) || d.LocalPairs() != uint64(served.of("")) || served.sum() != all {
		t.Errorf("%d of %d pairs here, told of %d of %d", d.LocalPairs(), d.Pairs(), served.of(""), served.sum())
	}
}

// TestLocalOverlaps: the worker is at its part of a call while the backbone is at its own.
func TestLocalOverlaps(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", wholeLayer(), nil)
	own := wholeLayer()
	d := w.dispatcher(func(c *Config) {
		c.Local = &Local{Kernel: own, Slices: []Slice{layerSlice(0, 32)}, First: true}
	})
	waitFor(t, d, "connected", connected)
	call := testCall(2, 20, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	own.gate.Store(&gate)
	before := a.kernel.calls.Load()
	done := make(chan error)
	go func() { done <- d.Compute(t.Context(), call) }()
	within(t, patient, "the worker computes while the own copy is held up", func() bool { return a.kernel.calls.Load() > before })
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestLocalChanges changes what is here again and again while calls run: none of them asks the
// kernel for what was dropped, and all are right.
func TestLocalChanges(t *testing.T) {
	w := newSwarm(t)
	w.start("a", wholeLayer(), nil)
	own := wholeLayer()
	d := w.dispatcher(func(c *Config) { c.Local = &Local{Kernel: own, First: true} })
	waitFor(t, d, "connected", connected)
	stop := make(chan struct{})
	var running sync.WaitGroup
	for i := range 4 {
		call := testCall(uint64(i), 1+9*i, i%2 == 0)
		want := alone(t, wholeLayer(), call)
		running.Go(func() {
			for !ended(stop) {
				poison(call)
				if err := d.Compute(t.Context(), call); err != nil {
					t.Error(err)
					return
				}
				if diff := maxDiff(call.Out, want); diff != 0 {
					t.Errorf("call %d: maximum difference %g", i, diff)
				}
			}
		})
	}
	guess := testCall(9, 5, false)
	guess.Draft = true
	right := alone(t, wholeLayer(), guess)
	running.Go(func() {
		for !ended(stop) {
			if err := d.Compute(t.Context(), guess); err != nil {
				t.Error(err)
				return
			}
			for i, v := range guess.Out {
				if v != 0 && v != right[i] {
					t.Errorf("a draft has %g, want 0 or %g", v, right[i])
					return
				}
			}
		}
	})
	rng := rand.New(rand.NewPCG(5, 6))
	held := map[int]bool{}
	without := func(a, b map[int]bool) *[]Slice { // which are in neither
		var gone []Slice
		for i := range testExperts / 8 {
			if !a[i] && !b[i] {
				gone = append(gone, block(i))
			}
		}
		return &gone
	}
	for range 100 {
		next, list := map[int]bool{}, []Slice(nil)
		for i := range testExperts / 8 {
			if rng.IntN(2) == 0 {
				next[i], list = true, append(list, block(i))
			}
		}
		own.gone.Store(without(held, next))
		d.SetLocal(list)
		own.gone.Store(without(next, nil))
		held = next
		before := d.Pairs()
		within(t, patient, "calls go on", func() bool { return d.Pairs() > before+200 })
	}
	close(stop)
	running.Wait()
	if n := own.misused.Load(); n > 0 {
		t.Errorf("%d calls for experts that were dropped", n)
	}
	if d.LocalPairs() == 0 || d.LocalPairs() == d.Pairs() {
		t.Errorf("%d of %d pairs were computed here", d.LocalPairs(), d.Pairs())
	}
}

func TestResident(t *testing.T) {
	w := newSwarm(t)
	d := w.dispatcher(func(c *Config) { c.Local = &Local{Kernel: wholeLayer(), First: true} })
	for i, held := range [][]Slice{nil, {block(3)}, nil} {
		if d.SetLocal(held); d.Resident() != (len(held) > 0) {
			t.Errorf("%d: resident %v with %v", i, d.Resident(), held)
		}
	}
	if w.dispatcher(nil).Resident() {
		t.Error("experts are resident without a copy")
	}
}

// TestLeavingIsNeededBesideACache: what a cache has now it may give up, so it lets no worker go.
func TestLeavingIsNeededBesideACache(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprintf("first=%v", first), func(t *testing.T) {
			w := newSwarm(t)
			w.start("a", wholeLayer(), nil)
			d := w.dispatcher(func(c *Config) {
				c.Local = &Local{Kernel: wholeLayer(), Slices: []Slice{layerSlice(0, testExperts)}, First: first}
			})
			waitFor(t, d, "connected", connected)
			if err := d.Compute(t.Context(), testCall(2, 4, false)); err != nil {
				t.Fatal(err)
			}
			d.mu.Lock()
			s := d.sessions[0]
			d.mu.Unlock()
			s.leavingSoon.Store(true)
			if got := d.needs(s); got != first {
				t.Errorf("the worker is needed: %v, want %v", got, first)
			}
		})
	}
}
