package p2p

import (
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"
)

func TestRequestLimits(t *testing.T) {
	l := newRequestLimits(nil)
	now := time.Unix(1, 0)
	id := peer.ID("a")
	for i := range recordBurst {
		if !l.allow(id, true, now) {
			t.Fatalf("record %d refused, %d may come at once", i+1, recordBurst)
		}
	}
	if l.allow(id, true, now) {
		t.Error("one record too many")
	}
	if !l.allow(peer.ID("b"), true, now) {
		t.Error("another peer is refused")
	}
	if !l.allow(id, true, now.Add(time.Second)) {
		t.Error("refused after a second")
	}
	for l.allow(id, false, now.Add(time.Second)) {
	}
	l.prune(now.Add(time.Second))
	if l.peers[id] == nil {
		t.Error("forgotten before its limits have recovered")
	}
	l.prune(now.Add(time.Hour))
	if len(l.peers) != 0 {
		t.Errorf("%d peers are left after an hour", len(l.peers))
	}
}

// A member that floods the DHT is not served and loses its standing.
func TestDHTFlood(t *testing.T) {
	network := ownNetwork()
	on := func(c *Config) { c.Network, c.DHT = network, true }
	a, b := startHost(t, on), startHost(t, on)
	hello(t, a, b)
	// It is past its limit already, as after a flood.
	b.requests.allow(a.ID(), false, time.Now())
	b.requests.mu.Lock()
	b.requests.peers[a.ID()].records = rate.NewLimiter(0, 0)
	b.requests.mu.Unlock()
	if err := a.Provide(t.Context(), "flood"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b blames a for the flood", func() bool {
		s := b.Standing(a.ID())
		return s.Score > 0 && s.Last == Flood
	})
	key, err := b.keyID("flood")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.dht.ProviderStore().GetProviders(t.Context(), key.Hash()); err != nil || len(got) != 0 {
		t.Errorf("the record was stored: %v, %v", got, err)
	}
}
