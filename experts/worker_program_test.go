package experts

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// give sends a program under a number; nil if the worker took it.
func (s *script) give(number uint32, layer int, program []byte) *RemoteError {
	s.t.Helper()
	id := uint64(number) + 1
	s.send(frameProgram, id, putProgram(nil, number, layer, program))
	for {
		f, err := s.r.Next()
		switch {
		case err != nil:
			s.t.Fatal(err)
		case f.Type == frameResult && f.ID == id:
			return nil
		case f.Type == frameError && f.ID == id:
			e, err := decodeError(f.Payload)
			if err != nil {
				s.t.Fatal(err)
			}
			return e
		case f.Type != framePing:
			s.t.Fatalf("frame of type %d for %d", f.Type, f.ID)
		}
	}
}

// TestProgramsOfOnePeer has a peer, which pipes are all from, give more programs than a peer
// may have: others are served, and what it gave is forgotten when it leaves.
func TestProgramsOfOnePeer(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	var serving sync.WaitGroup
	open := func() *script {
		here, there := net.Pipe()
		serving.Go(func() { p.worker.Serve(t.Context(), there) })
		s := newScript(t, here)
		s.must(frameOffer)
		s.send(frameWant, 0, encodeControl(want{wireVersion, testModel, F32}))
		return s
	}
	variant := func(i int) []byte { return fmt.Appendf(programFor(testWidth, testHidden), "#%d", i) }
	flood := func(s *script, number uint32, first int) (taken []int) {
		for i := first; i < first+20; i++ {
			e := s.give(number, 0, variant(i))
			number++
			if e == nil {
				taken = append(taken, i)
			} else if e.Code != CodeLimit || !strings.Contains(e.Text, "layer 0: this peer uses 2 other programs") {
				t.Fatalf("variant %d: got %v", i, e)
			}
		}
		return taken
	}
	one, two := open(), open()
	if got := flood(one, 0, 0); !slices.Equal(got, []int{0, 1}) {
		t.Errorf("the worker took %v, want the first two", got)
	}
	if got := flood(two, 0, 1); !slices.Equal(got, []int{1}) {
		t.Errorf("in another session of the peer it took %v, want 1, which the peer has", got)
	}
	if e := one.give(100, 0, variant(0)); e != nil {
		t.Errorf("a program of the session under another number: %v", e)
	}
	if e := one.give(101, 1, variant(0)); e != nil {
		t.Errorf("a program of another layer: %v", e)
	}

	d := w.dispatcher(nil) // is another peer
	waitFor(t, d, "connected", connected)
	compute := func() {
		t.Helper()
		if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
			t.Error(err)
		}
	}
	compute()
	keeps := func(n int64) {
		t.Helper()
		within(t, patient, fmt.Sprintf("%d programs are kept", n), func() bool { return p.kernel.set.Load() == n })
	}
	keeps(4)
	one.conn.Close()
	keeps(2) // of the other session, and of the dispatcher
	two.send(frameCall, 99, smallCall(3))
	two.must(frameReply)
	if got := flood(two, 200, 50); !slices.Equal(got, []int{50}) {
		t.Errorf("after a session left it took %v, want one more", got)
	}
	two.conn.Close()
	keeps(1)
	compute()
	d.Close()
	keeps(0)
	serving.Wait()
	p.kill()
	if n := len(p.kernel.programs); n != 4 {
		t.Errorf("the kernel gave %d numbers, want 4 again and again", n)
	}
}

// TestProgramOutlivesSession ends a session while its call is computed and another one's call
// of the same program waits.
func TestProgramOutlivesSession(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	leaves, stays := client(t, w, "a"), client(t, w, "a")
	gate := make(chan struct{})
	p.kernel.gate.Store(&gate)
	leaves.send(frameCall, 2, smallCall(make([]int32, inlinePairs+1)...)) // is computed by the combiner
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() == 1 })
	stays.send(frameCall, 2, smallCall(1))
	within(t, patient, "waiting", func() bool { return p.worker.Stats().Waiting == 1 })
	leaves.conn.Close()
	time.Sleep(20 * time.Millisecond)
	p.kernel.gate.Store(nil)
	close(gate)
	stays.must(frameReply)
	within(t, patient, "one session", func() bool { return p.worker.Stats().Sessions == 1 })
	if n := p.kernel.set.Load(); n != 1 {
		t.Errorf("%d programs are kept, want that of the session that stays", n)
	}

	alone := make(chan struct{}) // the last session leaves while its call is computed
	p.kernel.gate.Store(&alone)
	stays.send(frameCall, 3, smallCall(make([]int32, 4096)...))
	within(t, patient, "computing", func() bool { return p.kernel.calls.Load() == 3 })
	stays.conn.Close()
	time.Sleep(20 * time.Millisecond)
	if n := p.kernel.set.Load(); n != 1 {
		t.Errorf("%d programs are kept while one is computed", n)
	}
	close(alone)
	within(t, patient, "no session", func() bool { return p.worker.Stats().Sessions == 0 })
	if n := p.kernel.set.Load(); n != 0 {
		t.Errorf("%d programs are kept for nobody", n)
	}
}

// widths is a kernel that takes every program for rows of a width.
type widths struct {
	ffn
	width int
}

func (k *widths) SetProgram(int, []byte) (prog, rowWidth, outWidth int, err error) {
	k.programs = append(k.programs, 0)
	k.set.Add(1)
	return len(k.programs) - 1, k.width, 1, nil
}

// TestProgramOfBadWidth is refused after the kernel took it, which is told to forget it.
func TestProgramOfBadWidth(t *testing.T) {
	for _, width := range []int{0, MaxWidth + 1} {
		k := &widths{width: width}
		worker, err := NewWorker(WorkerConfig{Model: testModel, Kernel: k, Slices: []Slice{layerSlice(0, 1)}})
		if err != nil {
			t.Fatal(err)
		}
		_, refused := worker.program(&workerSession{peer: "x"}, 0, []byte{1})
		if refused == nil || refused.Code != CodeProgram || !strings.Contains(refused.Text, "elements, want 1 to") {
			t.Errorf("width %d: got %v", width, refused)
		}
		worker.Close()
		if n := k.set.Load(); n != 0 {
			t.Errorf("width %d: %d programs are kept", width, n)
		}
	}
}
