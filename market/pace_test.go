package market

import (
	"testing"
	"time"
)

func TestAnnounceEvery(t *testing.T) {
	tests := []struct {
		peers           int
		announce, renew time.Duration
	}{
		{0, 30 * time.Second, 30 * time.Second},
		{10, 30 * time.Second, 30 * time.Second},
		{100, 5 * time.Minute, 30 * time.Second},
		{200, 10 * time.Minute, 30 * time.Second},
		{1000, 50 * time.Minute, 69 * time.Second},
		{10_000, 500 * time.Minute, 392 * time.Second},
		{1 << 30, 20 * time.Hour, 15 * time.Minute},
	}
	for _, tt := range tests {
		if a, r, v := AnnounceEvery(tt.peers), RenewEvery(tt.peers), Validity(tt.peers); a != tt.announce || r != tt.renew || v != 3*r {
			t.Errorf("%d peers: announced every %v, renewed every %v, valid %v, want every %v, %v, three times that", tt.peers, a, r, v, tt.announce, tt.renew)
		}
	}
}

// What renewals cost a node grows no faster than the logarithm of the swarm.
func TestRenewalsGrowAsTheLogarithm(t *testing.T) {
	perSecond := func(peers int) float64 { return float64(peers) / RenewEvery(peers).Seconds() }
	for peers := 100; peers <= 12_800; peers *= 2 {
		if more := perSecond(2*peers) - perSecond(peers); more > 1.05*perSecond(100) {
			t.Errorf("from %d to %d peers %.2f renewals a second more", peers, 2*peers, more)
		}
	}
}

func TestPace(t *testing.T) {
	var p Pace
	if due := p.Next("me", 1, false); due.After(t0) {
		t.Error("the first is not due at once")
	}
	p.Sent(t0, 1, &Announcement{})
	rest := p.Next("me", 1, false).Sub(t0)
	if rest > 30*time.Second || rest < 27*time.Second {
		t.Errorf("the next without change after %v", rest)
	}
	if other := p.Next("you", 1, false).Sub(t0); other == rest {
		t.Error("two nodes announce at one instant")
	}
	if soon := p.Next("me", 1, true).Sub(t0); soon != hurryGap {
		t.Errorf("a change is told after %v", soon)
	}
	// A swarm that grew: the last was promised to be renewed in time.
	if grown := p.Next("me", 5000, false).Sub(t0); grown != rest {
		t.Errorf("the next after the swarm grew: %v, want %v", grown, rest)
	}
	// What is being loaded is told again before others take it for stalled.
	for _, m := range []ModelNews{
		{Holdings: []Holding{{State: Serving}, {State: Loading, Lease: MaxLease}}},
		{Windows: []WindowHolding{{State: Loading, Lease: MaxLease}}},
	} {
		var p Pace
		p.Sent(t0, 5000, &Announcement{Models: []ModelNews{{}, m}})
		if due := p.Next("me", 5000, false).Sub(t0); due > MaxLease/2 {
			t.Errorf("a download is told again after %v, its lease is %v", due, MaxLease)
		}
	}
	// Changes without end.
	now, n := t0, 0
	for now.Before(t0.Add(10 * time.Minute)) {
		now = p.Next("me", 1, true)
		p.Sent(now, 1, &Announcement{})
		n++
	}
	if n > 10*(hurryMost+2) {
		t.Errorf("%d announcements in ten minutes", n)
	}
}
