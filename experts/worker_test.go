package experts

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestBusy overloads the queue of a worker: it says so, and the dispatcher waits for it.
func TestBusy(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), func(c *WorkerConfig) { c.Queue = 2 })
	s := client(t, w, "a")
	gate := make(chan struct{})
	p.kernel.gate.Store(&gate)
	first := p.kernel.calls.Load()
	held := make(chan struct{})
	other := client(t, w, "a")
	go func() { other.send(frameCall, 2, smallCall(1)); close(held) }() // is computed by its reader
	<-held
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() > first })
	for id := uint64(10); id < 13; id++ {
		s.send(frameCall, id, smallCall(2))
	}
	e, err := decodeError(s.must(frameError).Payload)
	if err != nil || e.Code != CodeBusy {
		t.Fatalf("got %v, %v, want busy", e, err)
	}
	if st := p.worker.Stats(); st.Kernel <= 0 {
		t.Errorf("computing for %v", st.Kernel)
	}
	// A dispatcher meets the full queue and gets its answer once there is room.
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	done := make(chan error)
	call := testCall(0, 1, false)
	p.kernel.delay.Store(int64(time.Millisecond))
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	go func() {
		time.Sleep(30 * time.Millisecond)
		p.kernel.gate.Store(nil)
		close(gate)
	}()
	go func() { done <- d.Compute(ctx, call) }()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for id := uint64(10); id < 12; id++ {
		if f := s.must(frameReply); f.ID != id {
			t.Errorf("reply to %d, want %d", f.ID, id)
		}
	}
	if st := p.worker.Stats(); st.Busy == 0 || st.Waiting != 0 || st.Kernel != 0 {
		t.Errorf("stats say %+v", st)
	}
}

// TestCancelledAndExpired never reach the kernel.
func TestCancelledAndExpired(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	gate := make(chan struct{})
	busy, s := client(t, w, "a"), client(t, w, "a")
	p.kernel.gate.Store(&gate)
	busy.send(frameCall, 2, smallCall(1))
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() == 1 })
	late := smallCall(3)
	binary.LittleEndian.PutUint32(late[8:], 1)
	s.send(frameCall, 2, late)
	s.send(frameCall, 3, smallCall(4))
	s.send(frameCall, 4, smallCall(5))
	s.send(frameCancel, 3, nil)
	s.send(framePing, 9, nil)
	s.must(framePong) // so that the cancel was read
	time.Sleep(5 * time.Millisecond)
	p.kernel.gate.Store(nil)
	close(gate)
	f := s.must(frameError)
	if e, err := decodeError(f.Payload); err != nil || e.Code != CodeExpired || f.ID != 2 {
		t.Errorf("got %v, %v for %d, want expired for 2", e, err, f.ID)
	}
	if f := s.must(frameReply); f.ID != 4 {
		t.Errorf("reply to %d, want 4", f.ID)
	}
	busy.must(frameReply) // after which its row is counted
	within(t, patient, "2 rows of layer 0 are counted", func() bool {
		rows := p.worker.Stats().Rows
		return len(rows) == 1 && rows[0] == LayerRows{0, 2}
	})
}

// TestWorkerClose answers what it has, and sends the dispatcher elsewhere without an error.
func TestWorkerClose(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), func(c *WorkerConfig) { c.Drain = patient })
	w.start("b", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		wg.Go(func() {
			call := testCall(uint64(i), 2, false)
			for !ended(stop) {
				if err := d.Compute(context.Background(), call); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	time.Sleep(50 * time.Millisecond)
	began := time.Now()
	a.listen.Close()
	a.worker.Close()
	if took := time.Since(began); took > patient/2 {
		t.Errorf("Close took %v, the dispatcher did not leave by itself", took)
	}
	time.Sleep(50 * time.Millisecond)
	close(stop)
	wg.Wait()
	late, _ := net.Pipe()
	late.Close()
	if err := a.worker.Serve(t.Context(), late); !errors.Is(err, ErrClosed) {
		t.Errorf("Serve after Close: %v", err)
	}
}

// TestSessionsOfOnePeer has a peer, which pipes are all from, open one session too many.
func TestSessionsOfOnePeer(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), func(c *WorkerConfig) { c.PeerSessions = 2 })
	var serving sync.WaitGroup
	open := func() *script {
		here, there := net.Pipe()
		serving.Go(func() { p.worker.Serve(t.Context(), there) })
		return newScript(t, here)
	}
	first, second := open(), open()
	first.must(frameOffer)
	second.must(frameOffer)
	e, err := decodeError(open().must(frameError).Payload)
	if err != nil || e.Code != CodeLimit || !strings.Contains(e.Text, "2 sessions of this peer") {
		t.Errorf("the third session got %v, %v", e, err)
	}
	client(t, w, "a") // another peer is served
	first.conn.Close()
	within(t, patient, "a place is free", func() bool { return p.worker.Stats().Sessions == 2 })
	third := open()
	third.must(frameOffer)
	second.conn.Close()
	third.conn.Close()
	serving.Wait()
}

// TestSlowReader does not hold up the others: it asks for much and reads nothing.
func TestSlowReader(t *testing.T) {
	w := newSwarm(t)
	w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	s := client(t, w, "a")
	experts := make([]int32, 4096)
	for id := uint64(2); id < 66; id++ {
		s.send(frameCall, id, smallCall(experts...)) // 32 MB of replies
	}
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	for range 20 {
		if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
			t.Fatal(err)
		}
	}
}
