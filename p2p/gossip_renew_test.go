package p2p

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"
)

// keepFor seals an envelope that is renewed, issued some time ago.
func keepFor(t testing.TB, id Identity, body string, age time.Duration) ([]byte, renewals) {
	t.Helper()
	r, err := newRenewals(time.Minute, minStep)
	if err != nil {
		t.Fatal(err)
	}
	return sealFor(t, id, body, func(e *Envelope) {
		anchor := r.at(0)
		e.Step, e.Anchor, e.Issued = minStep, anchor.value[:], e.Issued.Add(-age)
		e.Seq -= uint64(age.Microseconds())
	}), r
}

// An envelope whose own time is over counts while it is renewed, for those too who hear of it
// only then, and not longer.
func TestRenewedEnvelope(t *testing.T) {
	_, topic, log := startGossip(t, nil)
	var renewed []Envelope
	topic.cfg.Renew = func(e Envelope) { renewed = append(renewed, e) }
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	raw, chain := keepFor(t, id, "kept", 2*time.Minute)
	sealed, err := parseEnvelope(raw)
	if err != nil {
		t.Fatal(err)
	}
	entry := func(n int) told { return told{authorHash(id.ID()), seqMark(sealed.Seq), chain.at(n)} }
	const via = "somebody"

	topic.take(via, raw, true)
	if log.heard("kept") {
		t.Fatal("an expired envelope counts")
	}
	if v, _ := topic.renew(via, entry(11), time.Now()); v != renewalLacking {
		t.Fatalf("renewal of what is not here: %v", v)
	}
	topic.takeRenewed(via, raw, chain.at(11), true)
	if !log.heard("kept") || latestOf(topic, id.ID()) != "kept" {
		t.Fatal("the renewed envelope does not count")
	}
	tests := []struct {
		name string
		r    told
		want renewalVerdict
	}{
		{"known", entry(11), renewalUseless},
		{"earlier", entry(9), renewalEarlier},
		{"none of it", told{entry(12).author, entry(12).seq, chain.at(13)}, renewalTaken},
		{"forged", told{entry(14).author, entry(14).seq, renewal{14, chain.at(13).value}}, renewalWrong},
		{"before its time", entry(30), renewalWrong},
		{"of an older envelope", told{entry(14).author, entry(14).seq - 1, chain.at(14)}, renewalUseless},
		{"of a newer envelope", told{entry(14).author, entry(14).seq + 1, chain.at(14)}, renewalLacking},
		{"of an unknown author", told{1, entry(14).seq, chain.at(14)}, renewalLacking},
	}
	for _, tt := range tests {
		v, mine := topic.renew(via, tt.r, time.Now())
		if v != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, v, tt.want)
		}
		if v == renewalEarlier && mine != entry(11) {
			t.Errorf("%s: answered with %v", tt.name, mine)
		}
	}
	if len(renewed) != 1 || renewed[0].Renewed != 13*minStep || topic.Latest()[0].Renewed != 13*minStep {
		t.Errorf("told of %+v", renewed)
	}
	// Its time over, it is forgotten, and only a newer renewal brings it back.
	topic.sweep(time.Now().Add(time.Hour))
	topic.takeRenewed(via, raw, chain.at(13), true)
	if latestOf(topic, id.ID()) != "kept" {
		t.Error("a renewed envelope is not taken in again")
	}
	if n := len(log.bodies()); n != 2 {
		t.Errorf("handled %d times, want 2", n)
	}
}

// What Check refused does not come back by a renewal.
func TestRenewalOfTheRefused(t *testing.T) {
	x := newTarget(t)
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	raw, chain := keepFor(t, id, "fast", 2*time.Minute)
	x.ta.takeRenewed(x.honest.ID(), raw, chain.at(30), true) // of a fast clock, or the own one is slow
	if st := x.a.Standing(x.honest.ID()); st.Score != 0 || latestOf(x.ta, id.ID()) == "fast" || x.refused("future") != 1 {
		t.Fatalf("a renewal of the future: standing %+v of who passed it on, latest %q", st, latestOf(x.ta, id.ID()))
	}
	raw, chain = keepFor(t, id, "absurd", 2*time.Minute)
	x.ta.takeRenewed(x.honest.ID(), raw, chain.at(10), true)
	e, err := parseEnvelope(raw)
	if err != nil {
		t.Fatal(err)
	}
	faults := x.a.Faults()[Invalid]
	if faults != 1 {
		t.Fatalf("%d faults of the author", faults)
	}
	v, _ := x.ta.renew(x.honest.ID(), told{authorHash(id.ID()), seqMark(e.Seq), chain.at(11)}, time.Now())
	x.ta.takeRenewed(x.honest.ID(), raw, chain.at(11), true)
	if v != renewalUseless || x.a.Faults()[Invalid] != faults || latestOf(x.ta, id.ID()) == "absurd" {
		t.Errorf("verdict %v, %d faults, latest %q", v, x.a.Faults()[Invalid], latestOf(x.ta, id.ID()))
	}
	x.served(t)
}

func TestHostileTeller(t *testing.T) {
	head := append([]byte{byte(len(testTopic))}, testTopic...)
	unknown := func(n int) []byte { // renewals of authors that there are not
		b := append([]byte(nil), head...)
		for i := range n {
			b = told{author: uint64(i), renewal: renewal{n: 1}}.append(b)
		}
		return b
	}
	forged := func(x *target) []byte {
		b := append([]byte(nil), head...)
		for i := range maxWanted {
			b = told{authorHash(x.honest.ID()), seqMark(x.ta.seqOf(x.honest.ID())), renewal{n: 1 + i}}.append(b)
		}
		return b
	}
	tests := []struct {
		name  string
		typ   uint8
		told  func(*target) []byte
		after func(*FrameWriter) // the answer
		fault Fault
		times int
	}{
		{"wrong type", 9, func(*target) []byte { return head }, nil, Malformed, 1},
		{"no topic", renewTold, func(*target) []byte { return nil }, nil, Malformed, 1},
		{"topic is no name", renewTold, func(*target) []byte { return []byte("\x01/") }, nil, Malformed, 1},
		{"list is cut", renewTold, func(*target) []byte { return unknown(2)[:len(head)+toldSize+3] }, nil, Malformed, 1},
		{"list is too long", renewTold, func(*target) []byte { return make([]byte, maxRenewTold+1) }, nil, Malformed, 1},
		{"shows garbage", renewTold, func(*target) []byte { return unknown(1) },
			func(w *FrameWriter) { w.Write(Frame{Type: pullEnvelope, Payload: []byte("short")}) }, Malformed, 1},
		{"shows nothing", renewTold, func(*target) []byte { return unknown(maxWanted) },
			func(w *FrameWriter) { w.Write(Frame{Type: pullEnd}) }, Flood, 20},
		{"forged", renewTold, forged, nil, Flood, 20},
		{"too often", renewTold, func(*target) []byte { return head }, nil, Flood, 4 * maxTopics},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x := newTarget(t)
			if tt.name == "forged" {
				if err := x.thonest.Keep([]byte("kept"), time.Minute, minStep); err != nil {
					t.Fatal(err)
				}
				eventually(t, "it is heard", func() bool { return x.heard.heard("kept") })
			}
			for range tt.times {
				c, err := x.mallory.OpenStream(t.Context(), x.a.ID(), renewProtocol)
				if err != nil {
					break // cut off
				}
				c.SetDeadline(time.Now().Add(patience))
				w := NewFrameWriter(c, maxRenewTold+1)
				w.Write(Frame{Type: tt.typ, Payload: tt.told(x)})
				if tt.after != nil {
					NewFrameReader(c, maxRenewKnown).Next()
					tt.after(w)
				}
				io.Copy(io.Discard, c)
				c.Close()
			}
			eventually(t, "it costs standing", func() bool {
				st := x.a.Standing(x.mallory.ID())
				return st.Score > 0 && st.Last == tt.fault
			})
			x.served(t)
		})
	}
}

func TestHostileListener(t *testing.T) {
	tests := []struct {
		name   string
		fault  Fault
		answer func(w *FrameWriter, c Conn)
	}{
		{"wrong type", Malformed, func(w *FrameWriter, _ Conn) { w.Write(Frame{Type: 9, Payload: []byte{0}}) }},
		{"empty", Malformed, func(w *FrameWriter, _ Conn) { w.Write(Frame{Type: renewKnown}) }},
		{"lacks too much", Malformed, func(w *FrameWriter, _ Conn) {
			w.Write(Frame{Type: renewKnown, Payload: append([]byte{maxWanted + 1}, make([]byte, 8*(maxWanted+1))...)})
		}},
		{"is cut", Malformed, func(w *FrameWriter, _ Conn) { w.Write(Frame{Type: renewKnown, Payload: []byte{1, 2}}) }},
		{"oversized", Malformed, func(w *FrameWriter, _ Conn) {
			w.Write(Frame{Type: renewKnown, Payload: make([]byte, maxRenewKnown+1)})
		}},
		{"silent", Unresponsive, func(_ *FrameWriter, c Conn) { io.Copy(io.Discard, c) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, ta, _ := startGossip(t, nil)
			a.gossip.pullTimeout = time.Second
			mallory := startHost(t, nil)
			if err := mallory.HandleStream(renewProtocol, func(_ *Peer, c Conn) {
				NewFrameReader(c, maxRenewTold).Next()
				tt.answer(NewFrameWriter(c, maxRenewKnown+1), c)
			}); err != nil {
				t.Fatal(err)
			}
			hello(t, a, mallory)
			if err := a.gossip.tellRenewals(ta, mallory.ID(), []told{{author: 1}}); err == nil {
				t.Error("it is no error")
			}
			if st := a.Standing(mallory.ID()); st.Score == 0 || st.Last != tt.fault {
				t.Errorf("standing %+v", st)
			}
		})
	}
}

// Who missed an envelope is shown it when it is renewed, and who missed a renewal asks for it.
func TestMissedIsMadeUpFor(t *testing.T) {
	x := newTarget(t)
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	raw, chain := keepFor(t, id, "missed", 2*time.Minute)
	x.thonest.takeRenewed(x.a.ID(), raw, chain.at(11), true)
	list, from := x.thonest.takeFresh(time.Now())
	i := slices.IndexFunc(list, func(r told) bool { return r.author == authorHash(id.ID()) })
	if i < 0 || from[i] != x.a.ID() {
		t.Fatal("what was shown, and came by no mesh, is not passed on")
	}
	if v, _ := x.thonest.renew(x.a.ID(), told{authorHash(id.ID()), seqMark(x.thonest.seqOf(id.ID())), chain.at(12)}, time.Now()); v != renewalTaken {
		t.Fatalf("renewal: %v", v)
	}
	x.honest.gossip.passOn(x.thonest, time.Now())
	eventually(t, "the envelope is shown", func() bool { return latestOf(x.ta, id.ID()) == "missed" })
	// Both sides tell again what the other has: nothing more comes of it.
	before := len(x.heard.bodies())
	x.a.gossip.passOn(x.ta, time.Now())
	// a hears no more, and asks.
	later := time.Now().Add(20 * minStep)
	if v, _ := x.thonest.renew(x.a.ID(), told{authorHash(id.ID()), seqMark(x.thonest.seqOf(id.ID())), chain.at(14)}, later); v != renewalTaken {
		t.Fatalf("later renewal: %v", v)
	}
	_, at := x.ta.renewedOf(id)
	if at >= 14 {
		t.Fatal("a has heard of it already")
	}
	if err := x.a.gossip.tellRenewals(x.ta, x.honest.ID(), []told{{authorHash(id.ID()), seqMark(x.ta.seqOf(id.ID())), chain.at(at)}}); err != nil {
		t.Fatal(err)
	}
	if v, n := x.ta.renewedOf(id); n != 14 || v != chain.at(14).value {
		t.Errorf("renewal %d after asking, want 14", n)
	}
	if n := len(x.heard.bodies()); n != before {
		t.Errorf("%d envelopes more were handed over", n-before)
	}
}

func (t *Topic) renewedOf(id Identity) (value [renewalBytes]byte, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.authors[id.ID()]
	return a.last.value, a.last.n
}

// A node that hangs renews nothing, and goes on when it is well again.
func TestHungNodeIsNotRenewed(t *testing.T) {
	h, topic, _ := startGossip(t, nil)
	asked, well := 0, false
	topic.cfg.Well = func() bool { asked++; return well }
	if err := topic.Keep([]byte("kept"), time.Minute, minStep); err != nil {
		t.Fatal(err)
	}
	renewed := func(age time.Duration) int {
		h.gossip.passOn(topic, time.Now().Add(age))
		_, n := topic.renewedOf(h.cfg.Identity)
		return n
	}
	if n := renewed(minStep / 2); n != 0 || asked != 0 {
		t.Errorf("%d renewals before one is due, asked %d times", n, asked)
	}
	if n := renewed(2*minStep + minStep/2); n != 0 || asked != 1 {
		t.Errorf("%d renewals while it hangs, asked %d times", n, asked)
	}
	well = true
	if n := renewed(3*minStep + minStep/2); n != 3 {
		t.Errorf("renewal %d when it is well again, want 3", n)
	}
}

// Two envelopes of an author one after the other are told apart: a renewal is of one of them.
func TestEnvelopesAtOnce(t *testing.T) {
	h, topic, _ := startGossip(t, nil)
	mark := func(body string) told {
		t.Helper()
		if err := topic.Keep([]byte(body), time.Minute, minStep); err != nil {
			t.Fatal(err)
		}
		topic.mu.Lock()
		defer topic.mu.Unlock()
		return topic.authors[h.ID()].told(h.ID())
	}
	_, other, log := startGossip(t, nil)
	last := mark("first")
	for i := range publishBurst - 1 {
		raw := topic.wanted([]uint64{last.author})[0][renewalSize:]
		other.take("somebody", raw, true)
		chain := topic.renews
		next := mark(fmt.Sprint(i))
		if int32(next.seq-last.seq) <= 0 {
			t.Fatalf("envelope %d has mark %d after %d", i+1, next.seq, last.seq)
		}
		next.renewal = topic.renews.at(1)
		if v, _ := other.renew("somebody", next, time.Now().Add(minStep)); v != renewalLacking {
			t.Fatalf("a renewal of what is not here: verdict %v", v)
		}
		last.renewal = chain.at(1)
		if v, _ := other.renew("somebody", last, time.Now().Add(minStep)); v != renewalTaken {
			t.Fatalf("a renewal of what is here: verdict %v", v)
		}
		last = next
	}
	if n := len(log.bodies()); n != publishBurst-1 {
		t.Errorf("%d envelopes handed over, want %d", n, publishBurst-1)
	}
}

func TestWantedOnce(t *testing.T) {
	h, topic, _ := startGossip(t, nil)
	if err := topic.Keep([]byte("kept"), time.Minute, minStep); err != nil {
		t.Fatal(err)
	}
	own := authorHash(h.ID())
	list := topic.wanted([]uint64{own, 5, own})
	if len(list) != 1 || binary.LittleEndian.Uint16(list[0]) != 0 || len(list[0]) <= renewalSize {
		t.Errorf("%d envelopes", len(list))
	}
	if err := topic.Keep([]byte("kept"), time.Minute, time.Second); err == nil {
		t.Error("a renewal every second is not refused")
	}
}
