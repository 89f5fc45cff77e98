package market

import (
	"testing"
	"time"
)

func TestAnnounceEvery(t *testing.T) {
	for peers, want := range map[int]time.Duration{0: 30 * time.Second, 1: 30 * time.Second, 100: 30 * time.Second,
		200: time.Minute, 1000: 5 * time.Minute, 1 << 30: 10 * time.Minute} {
		if got := AnnounceEvery(peers); got != want || Validity(peers) != 3*want {
			t.Errorf("%d peers: %v, valid %v", peers, got, Validity(peers))
		}
	}
}

func TestPace(t *testing.T) {
	var p Pace
	if due := p.Next("me", 1, false); due.After(t0) {
		t.Error("the first is not due at once")
	}
	p.Sent(t0, 1)
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
	// Changes without end.
	now, n := t0, 0
	for now.Before(t0.Add(10 * time.Minute)) {
		now = p.Next("me", 1, true)
		p.Sent(now, 1)
		n++
	}
	if n > 10*(hurryMost+2) {
		t.Errorf("%d announcements in ten minutes", n)
	}
}
