package experts

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	testWidth, testHidden = 32, 16
	testExperts           = 64
)

func layerSlice(from, to int) Slice {
	return Slice{FirstLayer: 0, EndLayer: 2, FirstExpert: from, EndExpert: to}
}

func testCall(seed uint64, tokens int, ownRows bool) *Call {
	return layerCall(rand.New(rand.NewPCG(seed, 1)), int(seed%2), testWidth, testHidden, testExperts, 8, tokens, ownRows)
}

// cuts splits [0, experts) into k uneven ranges.
func cuts(rng *rand.Rand, experts, k int) []int {
	at := append([]int{0}, rng.Perm(experts - 1)[:k-1]...)
	for i := 1; i < k; i++ {
		at[i]++
	}
	at = append(at, experts)
	for i := range at { // insertion sort: k is small
		for j := i; j > 0 && at[j] < at[j-1]; j-- {
			at[j], at[j-1] = at[j-1], at[j]
		}
	}
	return at
}

// TestShardsEqualTheLayer is the oracle: dispatch and combine over k shards of a layer against
// the layer in one piece.
func TestShardsEqualTheLayer(t *testing.T) {
	whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	rng := rand.New(rand.NewPCG(3, 4))
	for _, k := range []int{1, 2, 4, 7, 32} {
		t.Run(fmt.Sprintf("k=%d", k), func(t *testing.T) {
			w := newSwarm(t)
			at := cuts(rng, testExperts, k)
			for i := range k {
				w.start(fmt.Sprintf("w%d", i), newFFN(testWidth, testHidden, layerSlice(at[i], at[i+1])), nil)
			}
			d := w.dispatcher(nil)
			waitFor(t, d, "connected", connected)
			var most float64
			for seed := range uint64(6) {
				call := testCall(seed, 1+int(seed)*7, seed >= 3)
				poison(call)
				if err := d.Compute(t.Context(), call); err != nil {
					t.Fatal(err)
				}
				want := alone(t, whole, call)
				most = max(most, maxDiff(call.Out, want))
			}
			t.Logf("%d shards at %v: maximum difference %g", k, at, most)
			if most != 0 {
				t.Errorf("maximum difference %g, want 0", most)
			}
		})
	}
}

// TestPieces sends a call in many frames, since the worker takes few rows and pairs at once.
func TestPieces(t *testing.T) {
	w := newSwarm(t)
	k := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	w.start("a", k, func(c *WorkerConfig) { c.MaxRows, c.MaxPairs, c.SessionQueue = 3, 10, 4 })
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	for _, own := range []bool{false, true} {
		call := testCall(8, 33, own)
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		if diff := maxDiff(call.Out, alone(t, newFFN(testWidth, testHidden, layerSlice(0, testExperts)), call)); diff != 0 {
			t.Errorf("own rows %v: maximum difference %g", own, diff)
		}
	}
}

// bothReaders runs a test with Compute reading the answers itself and without.
func bothReaders(t *testing.T, test func(t *testing.T, noLead bool)) {
	for _, noLead := range []bool{false, true} {
		t.Run(fmt.Sprintf("lead=%v", !noLead), func(t *testing.T) { test(t, noLead) })
	}
}

// TestManyContexts has many calls in flight over the same sessions.
func TestManyContexts(t *testing.T) { bothReaders(t, manyContexts) }

func manyContexts(t *testing.T, noLead bool) {
	whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 40)), nil)
	w.start("b", newFFN(testWidth, testHidden, layerSlice(20, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	d2 := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	waitFor(t, d2, "connected", connected)
	var calls []*Call
	var want [][]float32
	for i := range 16 {
		calls = append(calls, testCall(uint64(i), 1+i%5*20, i%3 == 0))
		want = append(want, alone(t, whole, calls[i]))
	}
	var wg sync.WaitGroup
	for i, call := range calls {
		wg.Go(func() {
			for range 20 {
				poison(call)
				if err := []*Dispatcher{d, d2}[i%2].Compute(t.Context(), call); err != nil {
					t.Error(err)
					return
				}
				if diff := maxDiff(call.Out, want[i]); diff != 0 {
					t.Errorf("call %d: maximum difference %g", i, diff)
				}
			}
		})
	}
	wg.Wait()
	st := a.worker.Stats()
	t.Logf("worker a: %d calls in %d kernel calls, rows %v", st.Calls, st.Batches, st.Rows)
	if st.Batches > st.Calls || st.Calls == 0 {
		t.Errorf("%d calls in %d kernel calls", st.Calls, st.Batches)
	}
}

func TestKilledWorker(t *testing.T) { bothReaders(t, killedWorker) }

func killedWorker(t *testing.T, noLead bool) {
	whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	b := w.start("b", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 4, false)
	want := alone(t, whole, call)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}

	// With a replica, in the middle of a call: complete and identical.
	gateA, gateB := make(chan struct{}), make(chan struct{})
	a.kernel.gate.Store(&gateA)
	b.kernel.gate.Store(&gateB)
	poison(call)
	done := make(chan error)
	beforeA, beforeB := a.kernel.calls.Load(), b.kernel.calls.Load()
	go func() { done <- d.Compute(context.Background(), call) }()
	within(t, patient, "somebody computes", func() bool {
		return a.kernel.calls.Load() > beforeA || b.kernel.calls.Load() > beforeB
	})
	dead, alive, gate, otherGate := a, b, gateA, gateB
	if b.kernel.calls.Load() > beforeB {
		dead, alive, gate, otherGate = b, a, gateB, gateA
	}
	dead.listen.Close()
	dead.cut()
	close(otherGate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if diff := maxDiff(call.Out, want); diff != 0 {
		t.Errorf("after the kill: maximum difference %g", diff)
	}
	close(gate)
	dead.kill()

	// Without one: an error that names layer and experts, soon.
	alive.kill()
	began := time.Now()
	err := d.Compute(t.Context(), call)
	var missing *MissingError
	if !errors.As(err, &missing) || missing.Layer != call.Layer || len(missing.Experts) == 0 || len(missing.Reasons) == 0 {
		t.Fatalf("got %v, want a MissingError of layer %d with reasons", err, call.Layer)
	}
	if took := time.Since(began); took > patient/2 {
		t.Errorf("the error took %v", took)
	}

	// And again once a worker is back.
	w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	within(t, patient, "works again", func() bool {
		poison(call)
		return d.Compute(t.Context(), call) == nil && maxDiff(call.Out, want) == 0
	})
}

// TestCoverageWait waits for a worker that comes back while a call needs it.
func TestCoverageWait(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.CoverageWait = patient })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 1, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	want := append([]float32(nil), call.Out...)
	a.kill()
	poison(call)
	done := make(chan error)
	go func() { done <- d.Compute(context.Background(), call) }()
	for !d.Starved() {
		time.Sleep(time.Millisecond)
	}
	w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if diff := maxDiff(call.Out, want); diff != 0 || d.Starved() {
		t.Errorf("maximum difference %g", diff)
	}
}

// TestFrozenWorker costs a call or two a missed deadline, and nothing while the worker stays frozen.
func TestFrozenWorker(t *testing.T) { bothReaders(t, frozenWorker) }

func frozenWorker(t *testing.T, noLead bool) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	w.start("b", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { hasty(c); c.DeadAfter, c.NoLead, c.CoverageWait = time.Hour, noLead, patient })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 2, false)
	for range 10 {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	a.freeze(true)
	waited := func() uint64 { return d.Peers()[0].Hedged + d.Peers()[0].Failed } // for a
	before := waited()
	for range 50 {
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	if n := waited() - before; n > 3 {
		t.Errorf("the frozen worker was waited for %d times", n)
	}
	a.freeze(false)
	waitFor(t, d, "trusted again", func(p PeerStatus) bool { return p.Connected && !p.Suspect })
}

// TestFrozenAlone is a frozen worker without a replica: an error within the deadline, and an
// answer once it goes on.
func TestFrozenAlone(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { hasty(c); c.DeadAfter, c.MaxDeadline = time.Hour, 300*time.Millisecond })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 2, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	a.freeze(true)
	began := time.Now()
	err := d.Compute(t.Context(), call)
	var missing *MissingError
	if took := time.Since(began); !errors.As(err, &missing) || took > patient/2 {
		t.Fatalf("got %v after %v, want a MissingError soon", err, took)
	}
	if !strings.Contains(err.Error(), "no answer within") {
		t.Errorf("error does not say why: %v", err)
	}
	a.freeze(false)
	within(t, patient, "works again", func() bool { return d.Compute(t.Context(), call) == nil })
}

// TestSilentWorker is disconnected, and dialled again.
func TestSilentWorker(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.DeadAfter = 200 * time.Millisecond })
	waitFor(t, d, "connected", connected)
	a.freeze(true)
	waitFor(t, d, "disconnected as silent", func(p PeerStatus) bool { return strings.Contains(p.Trouble, "silent for") })
	a.freeze(false)
	waitFor(t, d, "connected again", connected)
}

func TestLocalCopy(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprintf("first=%v", first), func(t *testing.T) {
			w := newSwarm(t)
			w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 40)), nil)
			own := newFFN(testWidth, testHidden, layerSlice(30, testExperts))
			d := w.dispatcher(func(c *Config) {
				c.Local = &Local{Kernel: own, Slices: own.slices, First: first}
			})
			waitFor(t, d, "connected", connected)
			call := testCall(2, 20, true)
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			want := alone(t, newFFN(testWidth, testHidden, layerSlice(0, testExperts)), call)
			if diff := maxDiff(call.Out, want); diff != 0 {
				t.Errorf("maximum difference %g", diff)
			}
			var here uint64
			for _, id := range call.IDs {
				if id >= 40 || first && id >= 30 {
					here++
				}
			}
			if got := d.LocalPairs(); got != here {
				t.Errorf("%d pairs computed here, want %d", got, here)
			}
			own.fail.Store(true)
			var missing *MissingError
			if err := d.Compute(t.Context(), call); !errors.As(err, &missing) || !strings.Contains(err.Error(), "device lost") {
				t.Errorf("got %v, want a MissingError that says why", err)
			}
		})
	}
}

func TestCancel(t *testing.T) { bothReaders(t, cancelled) }

func cancelled(t *testing.T, noLead bool) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 1, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	a.kernel.gate.Store(&gate)
	ctx, cancel := context.WithCancel(t.Context())
	cause := errors.New("the client left")
	stop, stopCause := context.WithCancelCause(ctx)
	defer cancel()
	done := make(chan error)
	before := a.kernel.calls.Load()
	go func() { done <- d.Compute(stop, testCall(0, 1, false)) }() // computing
	within(t, patient, "computes", func() bool { return a.kernel.calls.Load() > before })
	began := time.Now()
	stopCause(cause)
	if err := <-done; !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause of the context", err)
	}
	if took := time.Since(began); took > patient/2 {
		t.Errorf("cancel took %v", took)
	}
	close(gate)
	a.kernel.gate.Store(nil)
	if err := d.Compute(t.Context(), call); err != nil { // the late answer is dropped
		t.Error(err)
	}
}

// TestChaos cuts and freezes workers at random under several contexts: every answer is complete
// and right.
func TestChaos(t *testing.T) { bothReaders(t, chaos) }

func chaos(t *testing.T, noLead bool) {
	w := newSwarm(t)
	var peers []*peer
	for i, s := range []Slice{layerSlice(0, 40), layerSlice(20, 64), layerSlice(0, 64), layerSlice(0, 64)} {
		peers = append(peers, w.start(fmt.Sprint(i), newFFN(testWidth, testHidden, s), nil))
	}
	d := w.dispatcher(func(c *Config) {
		hasty(c)
		c.NoLead, c.CoverageWait = noLead, patient
		c.DeadAfter = 300 * time.Millisecond
	})
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 4)
	rng := rand.New(rand.NewPCG(5, 6))
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); {
		p := peers[rng.IntN(len(peers))]
		if rng.IntN(2) == 0 {
			p.cut()
		} else {
			p.freeze(true)
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			p.freeze(false)
		}
		time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond)
	}
	answers := stop()
	t.Logf("%d answers", answers)
	if answers == 0 {
		t.Error("no answers at all")
	}
}
