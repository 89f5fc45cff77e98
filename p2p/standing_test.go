package p2p

import (
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

func randomID(t testing.TB) peer.ID {
	t.Helper()
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	return id.ID()
}

func TestStandingDecays(t *testing.T) {
	s, id, start := newStandings(), randomID(t), time.Now()
	if s.blame(id, Forged, "a", start) {
		t.Error("one forgery cuts off")
	}
	at := start.Add(standingHalfLife)
	if st := s.get(id, at); st.Score != 25 || st.CutOff {
		t.Errorf("a half-life later: %+v", st)
	}
	for range 2 {
		if s.blame(id, WrongData, "b\n\x1b[31m", at) != (s.get(id, at).Score >= cutOffScore) {
			t.Error("cut off and score do not agree")
		}
	}
	st := s.get(id, at)
	if !st.CutOff || st.Score != 125 || st.Last != WrongData || st.Reason != "b..[31m" || !st.Until.Equal(at.Add(cutOffTime)) {
		t.Errorf("after 50/2 + 50 + 50: %+v", st)
	}
	// More faults neither lengthen the cut nor outlast it.
	for range 100 {
		if s.blame(id, Forged, "c", at) {
			t.Error("cut off twice")
		}
	}
	if st := s.get(id, at.Add(cutOffTime)); st.CutOff || st.Score >= cutOffScore {
		t.Errorf("when the cut ends: %+v", st)
	}
}

// Deadlines missed now and then never cut off.
func TestStandingForgivesTimeouts(t *testing.T) {
	s, id, now := newStandings(), randomID(t), time.Now()
	for range 1000 {
		now = now.Add(30 * time.Second)
		if s.blame(id, Unresponsive, "late", now) {
			t.Fatalf("cut off with a score of %.1f", s.get(id, now).Score)
		}
	}
}

func TestStandingsAreBounded(t *testing.T) {
	s, now := newStandings(), time.Now()
	bad := randomID(t)
	s.blame(bad, Forged, "", now)
	s.blame(bad, Forged, "", now)
	for range 2 * maxStandings {
		var b [8]byte
		rand.Read(b[:])
		s.blame(peer.ID(b[:]), Unresponsive, "", now)
	}
	if len(s.peers) > maxStandings || !s.get(bad, now).CutOff {
		t.Errorf("%d peers; the worst: %+v", len(s.peers), s.get(bad, now))
	}
}

func TestBlameCutsOff(t *testing.T) {
	b := startHost(t, nil)
	var log watchLog
	cfg := testConfig(t)
	cfg.Peers = b.Addrs()
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	a.Watch(&log)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	eventually(t, "hosts meet", func() bool { return a.Peer(b.ID()) != nil && b.Peer(a.ID()) != nil })
	c, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	if err := echo(c, 100); err != nil {
		t.Fatal(err)
	}
	a.Blame(b.ID(), WrongData, "group 7 of file 0")
	if a.Peer(b.ID()) == nil || a.Standing(b.ID()).CutOff {
		t.Fatal("cut off for one fault")
	}
	a.Blame(b.ID(), WrongData, "group 8 of file 0")
	if a.Peer(b.ID()) != nil {
		t.Error("still ready")
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("stream of a peer that was cut off: %v", err)
	}
	eventually(t, "watcher is told", func() bool { return log.has("lost " + b.ID().String()) })
	eventually(t, "connections close", func() bool { return len(a.node.Network().ConnsToPeer(b.ID())) == 0 })
	eventually(t, "configured peer is shown as refused", func() bool {
		var refused *RefusedError
		st := statusOf(t, a, b)
		return st.State == Refused && errors.As(st.Err, &refused) && refused.Field == "standing" && !refused.ByPeer
	})
	// The peer hears why.
	_, err = b.Hello(t.Context(), infoOf(t, a))
	var refused *RefusedError
	if !errors.As(err, &refused) || refused.Field != "standing" || !refused.ByPeer || !strings.Contains(refused.Want+refused.Got, "group 8 of file 0") {
		t.Errorf("hello of a peer that is cut off: %v", err)
	}
	// At once again, it is not even let in.
	if _, err := b.Hello(t.Context(), infoOf(t, a)); err == nil {
		t.Error("let in at once again")
	}
	if n := a.Faults()[WrongData]; n != 2 {
		t.Errorf("%d faults counted, want 2", n)
	}
	if list := a.Standings(); len(list) != 1 || list[0].ID != b.ID() || !list[0].CutOff {
		t.Errorf("standings: %+v", list)
	}
	// When the time is over, the configured peer is back unaided.
	a.standings.mu.Lock()
	a.standings.peers[b.ID()].until = time.Now()
	a.standings.mu.Unlock()
	eventually(t, "peer is back", func() bool { return a.Peer(b.ID()) != nil })
}
