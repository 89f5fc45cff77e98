package p2p

import (
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// watchLog writes down what it is told.
type watchLog struct {
	mu  sync.Mutex
	got []string
}

func (w *watchLog) PeerReady(p *Peer) { w.add("ready " + p.ID.String()) }
func (w *watchLog) PeerLost(p *Peer)  { w.add("lost " + p.ID.String()) }

func (w *watchLog) add(s string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.got = append(w.got, s)
}

func (w *watchLog) has(s string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.got, s)
}

func statusOf(t *testing.T, h, peer *Host) PeerStatus {
	t.Helper()
	for _, s := range h.Peers() {
		if s.ID == peer.ID() {
			return s
		}
	}
	t.Fatalf("no status of %s", peer.ID())
	return PeerStatus{}
}

// openBoth opens a stream and a lane from a to b, which are counted.
func openBoth(t *testing.T, a, b *Host) []Conn {
	t.Helper()
	stream, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	lane, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(echo(stream, 10), echo(lane, 10)); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, a, b); s.Streams != 1 || s.Lanes != 1 {
		t.Errorf("%d streams and %d lanes, want 1 and 1", s.Streams, s.Lanes)
	}
	return []Conn{stream, lane}
}

// Three hosts: a keeps b and c. b is restarted on its port, c is of another network.
func TestKeeperReconnects(t *testing.T) {
	b := startHost(t, nil)
	c := startHost(t, func(c *Config) { c.Network = "othernet" })

	var listen []string
	for _, addr := range b.Addrs() {
		listen = append(listen, strings.Split(addr, "/p2p/")[0])
	}
	cfg := testConfig(t)
	cfg.Peers = append(b.Addrs(), c.Addrs()...)
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var w watchLog
	a.Watch(&w)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	connected := func() bool { s := statusOf(t, a, b); return s.State == Connected && s.Peer != nil }
	eventually(t, "b connected", connected)
	eventually(t, "c refused", func() bool {
		var refused *RefusedError
		s := statusOf(t, a, c)
		return s.State == Refused && errors.As(s.Err, &refused) && refused.Field == "network"
	})

	conns := openBoth(t, a, b)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b unreachable", func() bool { s := statusOf(t, a, b); return s.State == Unreachable && s.Err != nil })
	for _, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read after the peer is gone: %v", err)
		}
		conn.Close()
	}
	eventually(t, "the watcher hears of the loss", func() bool { return w.has("lost " + b.ID().String()) })

	startHost(t, func(cfg *Config) { cfg.Identity, cfg.Listen = b.cfg.Identity, listen })
	eventually(t, "b connected again", connected)
	again, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := echo(again, 10); err != nil {
		t.Error(err)
	}
	if w.has("ready " + c.ID().String()) {
		t.Error("the watcher heard of a refused peer")
	}
}

func TestJitter(t *testing.T) {
	for _, r := range []float64{0, 0.5, 0.999} {
		if got := jitter(time.Second, r); got > time.Second || got < time.Second/2 {
			t.Errorf("jitter(1s, %v) = %v", r, got)
		}
	}
}
