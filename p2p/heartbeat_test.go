package p2p

import (
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
)

// twoIdentities are the lower and the higher of two new peer ids.
func twoIdentities(t testing.TB) (low, high Identity) {
	t.Helper()
	a, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	if a.ID() > b.ID() {
		a, b = b, a
	}
	return a, b
}

func TestHeartbeatMeasures(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	hello(t, a, b)
	for _, end := range [][2]*Host{{a, b}, {b, a}} {
		eventually(t, "round trip is measured", func() bool {
			st := statusOf(t, end[0], end[1])
			return st.RTT > 0 && st.RTT == st.Peer.RTT() && st.RTT < patience
		})
	}
	if st := statusOf(t, a, b); st.Streams != 0 {
		t.Errorf("the heartbeat counts among %d streams", st.Streams)
	}
}

func TestPulse(t *testing.T) {
	const limit = int(heartSilence / heartTick)
	type step struct {
		ticks int
		idle  bool
		heard bool // before the ticks
		want  bool // at the last of them, and not before
	}
	tests := []struct {
		name    string
		watched bool
		steps   []step
	}{
		{"silent", true, []step{{ticks: limit, want: true}}},
		{"speaks late", true, []step{{ticks: limit - 1}, {ticks: limit, heard: true}, {ticks: 1, want: true}}},
		{"does not speak ctl/1", false, []step{{ticks: 100 * limit}}},
		{"one of many, unused", true, []step{{ticks: heartSlow * limit, idle: true, want: true}}},
		{"in use again", true, []step{{ticks: heartSlow*limit - 1, idle: true}, {ticks: limit}, {ticks: 1, want: true}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := pulse{watched: tt.watched}
			for i, s := range tt.steps {
				if s.heard {
					p.heard = time.Now()
				}
				for n := range s.ticks {
					if got, want := p.silent(s.idle), s.want && n == s.ticks-1; got != want {
						t.Fatalf("step %d, tick %d: silent %v, want %v", i, n, got, want)
					}
				}
			}
		})
	}
}

// A process that was suspended, or starved, blames nobody.
func TestLateTicks(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	p := hello(t, a, b)
	p.stay.watch()
	for range 100 {
		a.hearts.judge(heartLate + 1)
		a.hearts.judge(heartGap + 1)
	}
	if a.Peer(b.ID()) == nil || a.Faults()[Unresponsive] != 0 {
		t.Error("blamed for this process having run late")
	}
}

// A peer that does not speak ctl/1 is a peer like others.
func TestPeerWithoutHeartbeat(t *testing.T) {
	a := startHost(t, nil)
	p := mutePeer(t, a, false)
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.hearts.keepOpen(p)
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("tries for ever to open a stream that the peer does not know")
	}
	p.stay.pulse.mu.Lock()
	defer p.stay.pulse.mu.Unlock()
	if p.stay.pulse.watched {
		t.Error("is watched")
	}
}

// mutePeer is one of a that passes the hello and then neither says nor answers anything.
func mutePeer(t *testing.T, a *Host, heartbeats bool) *Peer {
	t.Helper()
	s := stranger(t)
	s.SetStreamHandler(a.protocolID("hello/1"), func(st network.Stream) {
		defer st.Close()
		record := a.cfg.hello(Capabilities{}, 0)
		record.ID, record.Heartbeats = s.ID(), heartbeats
		b, err := encodeHello(record)
		if err != nil {
			t.Error(err)
		}
		w, r := NewFrameWriter(st, maxHello), NewFrameReader(st, maxHello)
		w.Write(Frame{Type: frameHello, Payload: b})
		nextOfType(r, frameHello)
		exchangeVerdicts(w, r, verdict{})
	})
	p, err := a.Hello(t.Context(), peer.AddrInfo{ID: s.ID(), Addrs: s.Addrs()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Who froze right after the hello is noticed like others, though it never pinged.
func TestFrozenBeforeFirstPing(t *testing.T) {
	t.Parallel()
	a := startHost(t, nil)
	p, begin := mutePeer(t, a, true), time.Now()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatal("peer is not lost")
	}
	t.Logf("lost after %v", time.Since(begin).Round(time.Millisecond))
	if n := a.Faults()[Unresponsive]; n != 1 {
		t.Errorf("%d faults: the heartbeat did not notice", n)
	}
}

func TestHostileHeartbeat(t *testing.T) {
	tests := []struct {
		name  string
		fault Fault
		send  func(w *FrameWriter) error
	}{
		{"payload", Malformed, func(w *FrameWriter) error { return w.Write(Frame{Type: heartPing, Payload: []byte("x")}) }},
		{"unknown type", Malformed, func(w *FrameWriter) error { return w.Write(Frame{Type: 9}) }},
		{"flood", Flood, func(w *FrameWriter) error {
			for range 1000 {
				if err := w.Write(Frame{Type: heartPing}); err != nil {
					return err
				}
			}
			return nil
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			low, high := twoIdentities(t)
			a := startHost(t, func(c *Config) { c.Identity = high })
			b := startHost(t, func(c *Config) { c.Identity = low })
			hello(t, b, a)
			// The host's own heartbeat may take the stream's place at any time: try again,
			// with more time on a busy machine.
			pause := 100 * time.Millisecond
			eventually(t, "it costs standing", func() bool {
				s, err := b.node.NewStream(t.Context(), a.ID(), b.protocolID(ctlProtocol))
				if err == nil {
					defer s.Reset()
					tt.send(NewFrameWriter(s, 1)) // it may be cut short
					pause *= 2
					for end := time.Now().Add(pause); a.Standing(b.ID()).Score == 0 && time.Now().Before(end); {
						time.Sleep(10 * time.Millisecond)
					}
				}
				return a.Standing(b.ID()).Last == tt.fault && a.Standing(b.ID()).Score > 0
			})
		})
	}
}
