package experts

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func wholeLayer() *ffn { return newFFN(testWidth, testHidden, layerSlice(0, testExperts)) }

// TestSlicesChangeUnderCalls has slices come and go: no row is wrong or missing, and the kernel
// is never asked for what it was told to drop.
func TestSlicesChangeUnderCalls(t *testing.T) { bothReaders(t, slicesChange) }

func slicesChange(t *testing.T, noLead bool) {
	w := newSwarm(t)
	w.start("base", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	moving := w.start("moving", wholeLayer(), func(c *WorkerConfig) {
		c.Slices, c.Drain = nil, patient
	})
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 4)
	before := moving.kernel.calls.Load()
	for i := range 40 {
		s := layerSlice(i%5*8, 40+i%3*8)
		moving.kernel.gone.Store(&[]Slice{layerSlice(0, s.FirstExpert), layerSlice(s.EndExpert, testExperts)})
		if err := moving.worker.AddSlice(s); err != nil {
			t.Fatal(err)
		}
		if i%4 == 0 {
			within(t, patient, "the slice is used", func() bool { return moving.kernel.calls.Load() > before })
		}
		if err := moving.worker.RemoveSlice(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		before = moving.kernel.calls.Load()
		moving.kernel.gone.Store(&[]Slice{layerSlice(0, testExperts)})
	}
	answers := stop()
	st := moving.worker.Stats()
	t.Logf("%d answers, %d calls of the moving worker, %d of them refused as too late", answers, st.Calls, st.Refused)
	if n := moving.kernel.misused.Load(); n != 0 {
		t.Errorf("the kernel was asked %d times for what it had dropped", n)
	}
	for _, p := range d.Peers() {
		if p.Failed != 0 {
			t.Errorf("%s: %d calls failed", p.ID, p.Failed)
		}
	}
}

// TestWorkerWithoutSlices is connected to, and used once it has some.
func TestWorkerWithoutSlices(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", wholeLayer(), func(c *WorkerConfig) { c.Slices = nil })
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	call := testCall(0, 2, false)
	var missing *MissingError
	if err := d.Compute(t.Context(), call); !errors.As(err, &missing) || len(missing.Experts) == 0 {
		t.Errorf("without slices: got %v", err)
	}
	if err := p.worker.AddSlice(layerSlice(0, testExperts)); err != nil {
		t.Fatal(err)
	}
	within(t, patient, "computed", func() bool { return d.Compute(t.Context(), call) == nil })
	if diff := maxDiff(call.Out, alone(t, wholeLayer(), call)); diff != 0 {
		t.Errorf("maximum difference %g", diff)
	}
	for _, err := range []error{
		p.worker.AddSlice(layerSlice(10, 12)), p.worker.AddSlice(layerSlice(70, 70)),
		p.worker.RemoveSlice(t.Context(), layerSlice(0, 3)), p.worker.SetSlices(t.Context(), make([]Slice, maxSlices+1)),
	} {
		if err == nil || len(p.worker.Slices()) != 1 {
			t.Errorf("got %v with the slices %v", err, p.worker.Slices())
		}
	}
}

// TestRemovedSlice reads what a dispatcher is told: the offer first, and no refusal before it
// was taken.
func TestRemovedSlice(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", wholeLayer(), func(c *WorkerConfig) {
		c.Slices, c.Drain = []Slice{layerSlice(0, 8), layerSlice(8, 16)}, patient
	})
	s, other := client(t, w, "a"), client(t, w, "a")
	s.conn.SetDeadline(time.Now().Add(patient))
	removed := make(chan error)
	go func() { removed <- p.worker.RemoveSlice(t.Context(), layerSlice(8, 16)) }()
	f := s.must(frameOffer)
	o, err := decodeOffer(f.Payload)
	if err != nil || f.ID == 0 || len(o.Slices) != 1 || o.Slices[0] != layerSlice(0, 8) || o.State != serving {
		t.Fatalf("got offer %d %+v, %v", f.ID, o, err)
	}
	s.send(frameCall, 2, smallCall(9))
	s.must(frameReply)
	gate := make(chan struct{})
	p.kernel.gate.Store(&gate)
	before := p.kernel.calls.Load()
	other.send(frameTaken, other.must(frameOffer).ID, []byte{0})
	other.send(frameCall, 2, smallCall(1)) // holds the kernel
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() > before })
	s.send(frameCall, 4, smallCall(9)) // waits behind it
	s.send(frameTaken, f.ID, []byte{0})
	within(t, patient, "taken", func() bool { return p.worker.allTaken() })
	select {
	case err := <-removed:
		t.Errorf("removed (%v) while a call for it waits", err)
	case <-time.After(20 * time.Millisecond):
	}
	p.kernel.gate.Store(nil)
	close(gate)
	if f := s.must(frameReply); f.ID != 4 {
		t.Errorf("reply to %d, want 4, which was accepted", f.ID)
	}
	if err := <-removed; err != nil {
		t.Error(err)
	}
	s.send(frameCall, 5, smallCall(9))
	if e, err := decodeError(s.must(frameError).Payload); err != nil || e.Code != CodeExpert || !strings.Contains(e.Text, "expert 9 of layer 0") {
		t.Errorf("got %v, %v", e, err)
	}
	s.send(frameCall, 6, smallCall(7))
	s.must(frameReply)
}

// TestNotTaken removes a slice beside a dispatcher that never takes the change.
func TestNotTaken(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", wholeLayer(), func(c *WorkerConfig) { c.Drain = 50 * time.Millisecond })
	s := client(t, w, "a")
	gate := make(chan struct{})
	p.kernel.gate.Store(&gate)
	s.send(frameCall, 2, smallCall(make([]int32, inlinePairs+1)...))
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() > 0 })
	s.send(frameCall, 3, smallCall(9))
	within(t, patient, "waiting", func() bool { return p.worker.Stats().Waiting == 1 })
	removed := make(chan error)
	go func() { removed <- p.worker.SetSlices(t.Context(), nil) }()
	s.must(frameOffer)
	if e, err := decodeError(s.must(frameError).Payload); err != nil || e.Code != CodeExpert {
		t.Errorf("the call that waited got %v, %v", e, err)
	}
	close(gate)
	s.must(frameReply) // what was being computed
	if err := <-removed; err != nil {
		t.Error(err)
	}
	if err := p.worker.AddSlice(layerSlice(0, 4)); err != nil { // it is sent when the other is taken
		t.Error(err)
	}
	s.send(framePing, 1, nil)
	s.must(framePong)
}

// TestTakenRefusals has a dispatcher take what was not offered.
func TestTakenRefusals(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", wholeLayer(), nil)
	for _, test := range []struct {
		id      uint64
		payload []byte
		text    string
	}{{1, []byte{0}, "offer 1 is taken, the last one was 0"}, {0, nil, "want 00 or 01"}, {0, []byte{7}, "want 00 or 01"}} {
		s := client(t, w, "a")
		s.send(frameTaken, test.id, test.payload)
		e, err := decodeError(s.must(frameError).Payload)
		if err != nil || e.Code != CodeProtocol || !strings.Contains(e.Text, test.text) {
			t.Errorf("got %v, %v, want %q", e, err, test.text)
		}
		if err := <-p.errs; !errors.Is(err, ErrProtocol) {
			t.Errorf("Serve returned %v", err)
		}
	}
}

// TestDrain moves the calls of a leaving worker to a replica, and back.
func TestDrain(t *testing.T) { bothReaders(t, drains) }

func drains(t *testing.T, noLead bool) {
	w := newSwarm(t)
	a := w.start("a", wholeLayer(), nil)
	b := w.start("b", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { c.NoLead = noLead })
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 3)
	within(t, patient, "both are used", func() bool { return a.kernel.calls.Load() > 5 && b.kernel.calls.Load() > 5 })
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	if err := a.worker.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	waitFor(t, d, "a is leaving", func(p PeerStatus) bool { return p.Leaving == (p.ID == "a") && p.Connected })
	// One that leaves is asked while the other is late, as on a busy machine, and for what
	// was planned before the news.
	within(t, patient, "the replica computes, and it alone", func() bool {
		before, other := a.kernel.calls.Load(), b.kernel.calls.Load()
		within(t, patient, "the replica computes", func() bool { return b.kernel.calls.Load() > other+50 })
		return a.kernel.calls.Load()-before <= 3
	})
	before := a.kernel.calls.Load()
	if err := a.worker.Resume(); err != nil {
		t.Fatal(err)
	}
	within(t, patient, "a is used again", func() bool { return a.kernel.calls.Load() > before+5 })
	if stop() == 0 {
		t.Error("no answers")
	}
	for _, p := range []*peer{a, b} {
		if st := p.worker.Stats(); st.Refused+st.Busy+st.Expired != 0 || st.Leaving {
			t.Errorf("%s: %+v", p.id, st)
		}
	}
}

// TestDrainOfTheLast goes on computing for as long as the drain lasts, and ends when nothing is
// asked any more, or with its context.
func TestDrainOfTheLast(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", wholeLayer(), nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 2)
	within(t, patient, "used", func() bool { return a.kernel.calls.Load() > 5 })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := a.worker.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the end of the context: it is needed", err)
	}
	before := a.kernel.calls.Load()
	within(t, patient, "it still computes", func() bool { return a.kernel.calls.Load() > before+5 })
	stop()
	long, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	if err := a.worker.Drain(long); err != nil {
		t.Errorf("nothing is asked any more: got %v", err)
	}
	b := w.start("b", wholeLayer(), nil) // a replacement ends the need at once
	d.AddPeer("b")
	stop = callers(t, d, 2)
	within(t, patient, "the replacement is used", func() bool { return b.kernel.calls.Load() > 5 })
	if err := a.worker.Drain(long); err != nil {
		t.Errorf("replaced: got %v", err)
	}
	a.kill()
	within(t, patient, "gone", func() bool { return !d.Peers()[0].Connected })
	if stop() == 0 {
		t.Error("no answers")
	}
	if err := a.worker.Resume(); !errors.Is(err, ErrClosed) {
		t.Errorf("Resume after Close: %v", err)
	}
}

// TestRights refuses a peer with the reason, which its status shows, and ends the session of one
// that lost its rights.
func TestRights(t *testing.T) {
	w := newSwarm(t)
	var refused atomic.Bool
	refused.Store(true)
	p := w.start("a", wholeLayer(), func(c *WorkerConfig) {
		c.Admit = func(peer string) error {
			if refused.Load() {
				return fmt.Errorf("this network gives inference rights by ticket: ask its owner for one with `infer`")
			}
			return nil
		}
	})
	noTicket := func(s PeerStatus) bool {
		return !s.Connected && strings.Contains(s.Trouble, "rights: this network gives inference rights by ticket")
	}
	d := w.dispatcher(nil)
	waitFor(t, d, "refused with the reason", noTicket)
	if st := p.worker.Stats(); st.Refused == 0 || st.Sessions != 0 {
		t.Errorf("%+v", st)
	}
	refused.Store(false)
	waitFor(t, d, "admitted", connected)
	if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
		t.Fatal(err)
	}
	refused.Store(true)
	p.worker.Recheck()
	p.worker.Recheck()
	waitFor(t, d, "refused again", noTicket)
	within(t, patient, "no session", func() bool { return p.worker.Stats().Sessions == 0 })
}
