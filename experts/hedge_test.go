package experts

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// stuck starts a call and returns the worker that computes it and does not get on, the other
// one, and where the call's error will be.
func stuck(t *testing.T, d *Dispatcher, call *Call, a, b *peer) (held, other *peer, open func(), done chan error) {
	t.Helper()
	gateA, gateB := make(chan struct{}), make(chan struct{})
	a.kernel.gate.Store(&gateA)
	b.kernel.gate.Store(&gateB)
	beforeA, beforeB := a.kernel.calls.Load(), b.kernel.calls.Load()
	poison(call)
	done = make(chan error, 1)
	go func() { done <- d.Compute(context.Background(), call) }()
	within(t, patient, "somebody computes", func() bool {
		return a.kernel.calls.Load() > beforeA || b.kernel.calls.Load() > beforeB
	})
	held, other, mine, its := a, b, gateA, gateB
	if b.kernel.calls.Load() > beforeB && a.kernel.calls.Load() == beforeA {
		held, other, mine, its = b, a, gateB, gateA
	}
	other.kernel.gate.Store(nil)
	close(its)
	return held, other, func() { held.kernel.gate.Store(nil); close(mine) }, done
}

// TestHedge has a worker stop in the middle of a call: the other one answers, and only that is
// waited for. The late answer changes nothing.
func TestHedge(t *testing.T) { bothReaders(t, hedgesOne) }

func hedgesOne(t *testing.T, noLead bool) {
	w := newSwarm(t)
	a, b := w.start("a", wholeLayer(), nil), w.start("b", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 1, false)
	want := alone(t, wholeLayer(), call)
	for range 10 {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		d.hedges.credit.Store(mostCredit)
		before := d.Hedges()
		held, _, open, done := stuck(t, d, call, a, b)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if after := d.Hedges(); after.Hedged == before.Hedged || after.Won == before.Won {
			t.Errorf("before %+v, after %+v: no hedge, or it did not win", before, after)
		}
		out := append([]float32(nil), call.Out...)
		open()
		within(t, patient, "trusted again", func() bool {
			for _, p := range d.Peers() {
				if p.ID == held.id {
					return p.Hedged > 0 && !p.Suspect
				}
			}
			return false
		})
		if maxDiff(call.Out, want) != 0 || maxDiff(call.Out, out) != 0 {
			t.Errorf("maximum difference %g, and %g to before the late answer", maxDiff(call.Out, want), maxDiff(call.Out, out))
		}
	}
}

// TestHedgeOverCuts has the pairs of a late worker computed by two that hold a part each.
func TestHedgeOverCuts(t *testing.T) {
	w := newSwarm(t)
	whole := w.start("whole", wholeLayer(), nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	call := testCall(0, 2, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	whole.kernel.gate.Store(&gate)
	poison(call)
	done := make(chan error, 1)
	before := whole.kernel.calls.Load()
	go func() { done <- d.Compute(context.Background(), call) }()
	within(t, patient, "computing", func() bool { return whole.kernel.calls.Load() > before })
	if d.Hedges().Hedged != 0 {
		t.Error("hedged with nobody else there")
	}
	whole.kernel.gate.Store(nil)
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		id := fmt.Sprint(i)
		w.start(id, newFFN(testWidth, testHidden, layerSlice(32*i, 32*i+32)), nil)
		d.AddPeer(id)
	}
	routed := func() bool { return len((*d.programs.Load())[0][0].routes.Load().sessions) == 3 }
	within(t, patient, "proved", routed)
	second := make(chan struct{})
	whole.kernel.gate.Store(&second)
	for d.Hedges().Won == 0 { // until a call goes to the one that is stuck
		d.hedges.credit.Store(mostCredit)
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		if diff := maxDiff(call.Out, alone(t, wholeLayer(), call)); diff != 0 {
			t.Fatalf("maximum difference %g", diff)
		}
	}
	close(second)
}

// TestHedgeThatFails leaves the call to whom it was with, and one that outlives that answers it.
func TestHedgeThatFails(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprintf("the first dies=%v", first), func(t *testing.T) {
			w := newSwarm(t)
			a, b := w.start("a", wholeLayer(), nil), w.start("b", wholeLayer(), nil)
			d := w.dispatcher(nil)
			waitFor(t, d, "connected", connected)
			call := layerCall(rand.New(rand.NewPCG(1, 1)), 0, testWidth, testHidden, testExperts, 1, 1, false) // of one worker
			want := alone(t, wholeLayer(), call)
			for range 10 {
				if err := d.Compute(t.Context(), call); err != nil {
					t.Fatal(err)
				}
			}
			gateA, gateB := make(chan struct{}), make(chan struct{})
			a.kernel.gate.Store(&gateA)
			b.kernel.gate.Store(&gateB)
			beforeA, beforeB := a.kernel.calls.Load(), b.kernel.calls.Load()
			poison(call)
			done := make(chan error, 1)
			go func() { done <- d.Compute(context.Background(), call) }()
			within(t, patient, "both compute", func() bool {
				return a.kernel.calls.Load() > beforeA && b.kernel.calls.Load() > beforeB
			})
			dies, lives, its, mine := b, a, gateB, gateA
			if late := d.Peers()[0].Hedged > 0; late == first { // a was late
				dies, lives, its, mine = a, b, gateA, gateB
			}
			dies.cut()
			within(t, patient, "the one is lost", func() bool {
				for _, p := range d.Peers() {
					if p.ID == dies.id {
						return !p.Connected || p.Failed > 0
					}
				}
				return false
			})
			calls := lives.kernel.calls.Load()
			close(mine)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if diff := maxDiff(call.Out, want); diff != 0 {
				t.Errorf("maximum difference %g", diff)
			}
			if n := lives.kernel.calls.Load(); n != calls {
				t.Errorf("the one that lives was asked %d times more", n-calls)
			}
			close(its)
		})
	}
}

// TestHedgesAreBounded has all workers be late all the time: a tenth of the calls is hedged.
func TestHedgesAreBounded(t *testing.T) {
	w := newSwarm(t)
	for i := range 3 {
		w.start(fmt.Sprint(i), wholeLayer(), nil).kernel.delay.Store(int64(2 * time.Millisecond))
	}
	for _, off := range []bool{false, true} {
		d := w.dispatcher(func(c *Config) { c.NoHedge, c.MinHedge = off, 100*time.Microsecond })
		waitFor(t, d, "connected", connected)
		call := testCall(0, 1, false)
		for range 200 {
			impatient(d)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
		}
		h := d.Hedges()
		t.Logf("off %v: %+v", off, h)
		if off && h.Hedged+h.Refused != 0 {
			t.Errorf("hedges although they are off: %+v", h)
		}
		if most := h.Sent/10 + firstCredit/hedgeCost; !off && (h.Hedged < 10 || h.Hedged > most || h.Refused == 0 || h.Won > h.Hedged) {
			t.Errorf("%+v, want 10 to %d hedges, and some refused", h, most)
		}
	}
}

// impatient has a dispatcher expect all workers to be much faster than they are.
func impatient(d *Dispatcher) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sessions {
		s.lat.mu.Lock()
		s.lat.late = 1
		s.lat.base.Store(0)
		s.lat.perPair.Store(0)
		s.lat.mu.Unlock()
	}
}

// TestHedgeBudget earns a tenth of a hedge with every call, and saves ten.
func TestHedgeBudget(t *testing.T) {
	var h hedges
	for _, calls := range []int{5, 5, 25, 1000} {
		spent := -int(h.asked.Load())
		for range calls {
			h.earn()
		}
		for h.spend() {
			h.asked.Add(1)
		}
		spent += int(h.asked.Load())
		if most := min(calls/hedgeCost+1, mostCredit/hedgeCost); spent > most {
			t.Errorf("%d hedges after %d calls, want at most %d", spent, calls, most)
		}
	}
	if n := h.asked.Load(); n != 1+3+10-1 && n != 1+2+10 || h.refused.Load() != 4 {
		t.Errorf("%d hedges, %d refused", n, h.refused.Load())
	}
}

// TestRaces hedges nearly every call, so that answers of two workers meet.
func TestRaces(t *testing.T) {
	bothReaders(t, func(t *testing.T, noLead bool) { races(t, func(c *Config) { c.NoLead = noLead }) })
}

func races(t *testing.T, change func(*Config)) {
	w := newSwarm(t)
	var peers []*peer
	for i, s := range []Slice{layerSlice(0, 64), layerSlice(0, 40), layerSlice(24, 64), layerSlice(0, 64)} {
		peers = append(peers, w.start(fmt.Sprint(i), newFFN(testWidth, testHidden, s), nil))
	}
	d := w.dispatcher(func(c *Config) {
		c.MinHedge, c.CoverageWait = time.Microsecond, patient
		change(c)
	})
	d.hedges.credit.Store(1 << 40)
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 4)
	rng := rand.New(rand.NewPCG(9, 9))
	for end := time.Now().Add(patient); d.Hedges().Won < 100 && time.Now().Before(end); {
		p := peers[rng.IntN(len(peers))]
		p.kernel.delay.Store(int64(rng.IntN(3)) * int64(time.Millisecond))
		if rng.IntN(100) == 0 {
			p.cut()
		}
		impatient(d)
		time.Sleep(2 * time.Millisecond)
	}
	answers := stop()
	h := d.Hedges()
	t.Logf("%d answers, %+v", answers, h)
	if h.Won == 0 || h.Won > h.Hedged {
		t.Errorf("%+v", h)
	}
}

// TestStoppedReplica stops a worker, as SIGSTOP does, while requests go on: it costs a request or
// two a hedge, and is left alone from then on.
func TestStoppedReplica(t *testing.T) { bothReaders(t, stoppedReplica) }

func stoppedReplica(t *testing.T, noLead bool) {
	const requests, layers = 24, 10
	w := newSwarm(t)
	a := w.start("a", wholeLayer(), nil)
	w.start("b", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { hasty(c); c.DeadAfter, c.NoLead, c.CoverageWait = time.Hour, noLead, patient })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 2, false)
	want := alone(t, wholeLayer(), call)
	run := func() time.Duration {
		began := time.Now()
		for range requests * layers {
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			if diff := maxDiff(call.Out, want); diff != 0 {
				t.Fatalf("maximum difference %g", diff)
			}
		}
		return time.Since(began)
	}
	run()
	both := run()
	waited := func() uint64 { return d.Peers()[0].Hedged + d.Peers()[0].Failed } // for a
	before := waited()
	a.freeze(true)
	stopped := run()
	cost := waited() - before
	a.freeze(false)
	waitFor(t, d, "trusted again", func(p PeerStatus) bool { return p.Connected && !p.Suspect })
	d.RemovePeer("a")
	without := run()
	t.Logf("%d requests of %d layers: %v with both, %v with one stopped, %v without it", requests, layers,
		both.Round(time.Millisecond), stopped.Round(time.Millisecond), without.Round(time.Millisecond))
	if cost > 6 {
		t.Errorf("the stopped worker was waited for %d times in %d calls", cost, requests*layers)
	}
}

// TestReplicasShare has several backbones use equal replicas: each gets a share, and one that is
// slow gets little.
func TestReplicasShare(t *testing.T) {
	w := newSwarm(t)
	var peers []*peer
	for i := range 4 {
		p := w.start(fmt.Sprint(i), wholeLayer(), nil)
		p.kernel.delay.Store(int64(time.Millisecond))
		peers = append(peers, p)
	}
	slowOne := peers[3].kernel
	slowOne.delay.Store(int64(100 * time.Millisecond))
	var stops []func() int64
	var answers atomic.Int64
	for range 3 {
		d := w.dispatcher(nil)
		waitFor(t, d, "connected", connected)
		stops = append(stops, callers(t, d, 1))
	}
	within(t, patient, "enough calls", func() bool {
		return peers[0].kernel.calls.Load()+peers[1].kernel.calls.Load()+peers[2].kernel.calls.Load() > 600
	})
	for _, stop := range stops {
		answers.Add(stop())
	}
	var calls [4]int64
	var sum int64
	for i, p := range peers {
		calls[i] = p.kernel.calls.Load()
		sum += calls[i]
	}
	t.Logf("%d answers, calls of the workers %v", answers.Load(), calls)
	for i, n := range calls {
		if share := float64(n) / float64(sum); i < 3 && share < 0.1 || i == 3 && share > 0.15 {
			t.Errorf("worker %d has a share of %.2f", i, share)
		}
	}
}
