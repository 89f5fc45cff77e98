package p2p

import (
	"testing"
	"time"
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
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	type tick struct {
		at   time.Duration
		idle bool
		want bool
	}
	tests := []struct {
		name    string
		watched bool
		heard   time.Duration
		since   time.Duration
		ticks   []tick
	}{
		{"two ticks must agree", true, 0, 0, []tick{{4 * time.Second, false, false}, {4500 * time.Millisecond, false, false}, {5 * time.Second, false, true}}},
		{"does not speak ctl/1", false, 0, 0, []tick{{time.Hour, false, false}, {2 * time.Hour, false, false}}},
		{"one of many, unused", true, 0, 0, []tick{{17 * time.Second, true, false}, {18 * time.Second, true, false}, {19 * time.Second, true, true}}},
		{"in use again", true, 0, 0, []tick{{15 * time.Second, true, false}, {16 * time.Second, false, false}, {20 * time.Second, false, false}, {21 * time.Second, false, false}, {22 * time.Second, false, true}}},
		{"time began anew", true, 0, time.Minute, []tick{{61 * time.Second, false, false}, {62 * time.Second, false, false}, {65 * time.Second, false, false}, {66 * time.Second, false, true}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := pulse{watched: tt.watched, heard: at(tt.heard)}
			for _, tick := range tt.ticks {
				if got := p.silent(at(tick.at), at(tt.since), tick.idle); got != tick.want {
					t.Errorf("silent at %v: %v, want %v", tick.at, got, tick.want)
				}
			}
		})
	}
}

// A process that was suspended, or starved, blames nobody.
func TestHeartTicks(t *testing.T) {
	start := time.Now()
	tests := []struct {
		at     time.Duration
		onTime bool
		since  time.Duration
	}{
		{500 * time.Millisecond, true, 0},
		{1900 * time.Millisecond, true, 0},          // 0.9 s late
		{3500 * time.Millisecond, false, 0},         // 1.1 s late
		{4 * time.Second, true, 0},                  // on time again
		{10 * time.Minute, false, 10 * time.Minute}, // suspended
		{10*time.Minute + time.Second, true, 10 * time.Minute},
	}
	ticks := newHeartTicks(start)
	for _, tt := range tests {
		if got := ticks.next(start.Add(tt.at)); got != tt.onTime || !ticks.since.Equal(start.Add(tt.since)) {
			t.Errorf("tick at %v: on time %v, since %v; want %v, %v", tt.at, got, ticks.since.Sub(start), tt.onTime, tt.since)
		}
	}
}

// A peer that does not speak ctl/1 is a peer like others.
func TestPeerWithoutHeartbeat(t *testing.T) {
	low, high := twoIdentities(t)
	a := startHost(t, func(c *Config) { c.Identity = low })
	b := startHost(t, func(c *Config) { c.Identity = high })
	b.node.RemoveStreamHandler(b.protocolID(ctlProtocol))
	p := hello(t, a, b)
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
					return nil // it was cut short
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
			s, err := b.node.NewStream(t.Context(), a.ID(), b.protocolID(ctlProtocol))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Reset()
			if err := tt.send(NewFrameWriter(s, 1)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it costs standing", func() bool { return a.Standing(b.ID()).Last == tt.fault && a.Standing(b.ID()).Score > 0 })
			if a.Peer(b.ID()) == nil {
				t.Error("cut off for one fault")
			}
		})
	}
}
