package market

import (
	"fmt"
	"testing"
	"time"
)

func news(h ...Holding) ModelNews { return ModelNews{ID: modelA, Shape: odd, Holdings: h} }

// replicas returns the count of every expert of a layer of the odd model.
func replicas(t *testing.T, x *Table, layer int, now time.Time) (serving, claimed string) {
	t.Helper()
	for _, l := range coverage(t, x, modelA, now).Layers {
		if l.Layer != layer {
			continue
		}
		for _, s := range l.Segments {
			for range s.Experts.Len() {
				serving += fmt.Sprint(s.Replicas)
				claimed += fmt.Sprint(s.Claimed)
			}
		}
	}
	return serving, claimed
}

func wantReplicas(t *testing.T, x *Table, now time.Time, layer int, serving, claimed string) {
	t.Helper()
	if s, c := replicas(t, x, layer, now); s != serving || c != claimed {
		t.Errorf("layer %d: serving %s, claimed %s, want %s, %s", layer, s, c, serving, claimed)
	}
}

func TestCoverage(t *testing.T) {
	x := newTable(t, Policy{Target: 2}, modelA, odd)
	wantReplicas(t, x, t0, 1, "00000000", "00000000")
	tell(t, x, "a", 1, t0, news(serving(slice(1, 3, 0, 4))...))
	tell(t, x, "b", 1, t0, news(
		Holding{Slice: slice(1, 2, 2, 6), State: Serving},
		Holding{Slice: slice(2, 3, 0, 8), State: Leaving},
		Holding{Slice: slice(1, 2, 6, 8), State: Claimed, Lease: 30 * time.Second},
		Holding{Slice: slice(4, 5, 0, 2), State: Loading, Lease: time.Minute}))
	wantReplicas(t, x, t0, 1, "11221100", "00000011")
	wantReplicas(t, x, t0, 2, "11110000", "00000000")
	wantReplicas(t, x, t0, 4, "00000000", "11000000")
	c := coverage(t, x, modelA, t0)
	if c.Cells != 24 || c.Covered != 10 || c.AtTarget != 2 || c.Authors != 2 || !c.Trusted {
		t.Errorf("coverage %+v", c)
	}
	if s := c.Layers[0].Segments; len(s) != 4 || s[0].Scarcity != 0.5 || s[1].Scarcity != 0 || s[3].Scarcity != 1 {
		t.Errorf("segments %+v", s)
	}
	// Leases end by themselves, and validities.
	wantReplicas(t, x, t0.Add(30*time.Second), 1, "11221100", "00000000")
	wantReplicas(t, x, t0.Add(time.Minute), 4, "00000000", "00000000")
	wantReplicas(t, x, t0.Add(90*time.Second), 1, "00000000", "00000000")
	if n := x.Peers(t0.Add(90 * time.Second)); n != 0 {
		t.Errorf("%d peers after all records expired", n)
	}
}

// TestOrderOfRecords: the newest record counts, whatever order they come in, and once.
func TestOrderOfRecords(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	low, high := news(serving(slice(1, 2, 0, 4))...), news(serving(slice(1, 2, 4, 8))...)
	for _, tt := range []struct {
		seq  uint64
		news ModelNews
		want bool
	}{{5, low, true}, {5, high, false}, {4, high, false}, {7, high, true}, {6, low, false}, {8, high, true}} {
		if got := tell(t, x, "a", tt.seq, t0, tt.news); got != tt.want {
			t.Errorf("seq %d: newer is %v", tt.seq, got)
		}
	}
	wantReplicas(t, x, t0, 1, "00001111", "00000000")
	body := encode(t, &Announcement{})
	_, err := x.Update(Record{"a", 9, t0.Add(-time.Hour), time.Hour, body}, t0)
	if r, ok := err.(*RefusedError); !ok || r.Reason != Expired || r.AuthorsFault() {
		t.Errorf("an expired record: %v", err)
	}
	_, err = x.Update(Record{"", 9, t0, time.Hour, body}, t0)
	checkReason(t, "a record of nobody", err, NoAuthor)
}

// TestDeadPeerStaysDead (mesh-llm#1756): what a third party repeats of a departed peer never
// brings it back, but the peer itself is not locked out.
func TestDeadPeerStaysDead(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	held := news(serving(slice(1, 2, 0, 8))...)
	tell(t, x, "a", 1, t0, held)
	x.Lost("a", t0)
	wantReplicas(t, x, t0, 1, "00000000", "00000000")
	if tell(t, x, "a", 1, t0, held) {
		t.Error("the last record of a lost peer counts as new")
	}
	wantReplicas(t, x, t0, 1, "00000000", "00000000")
	x.Met("a", t0)
	wantReplicas(t, x, t0, 1, "11111111", "00000000")
	x.Lost("a", t0)
	tell(t, x, "a", 2, t0.Add(time.Second), held)
	wantReplicas(t, x, t0.Add(time.Second), 1, "11111111", "00000000")
	x.Met("a", t0.Add(time.Second))
	x.Lost("nobody", t0)
	x.Met("nobody", t0)
	wantReplicas(t, x, t0.Add(time.Second), 1, "11111111", "00000000")
	// Met after the record expired revives nothing.
	late := t0.Add(10 * time.Minute)
	x.Lost("a", t0)
	x.Met("a", late)
	wantReplicas(t, x, late, 1, "00000000", "00000000")
}

// TestReplayAfterShorterRecord: a farewell of short validity is not undone by a record before it
// that is valid longer.
func TestReplayAfterShorterRecord(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	body := encode(t, &Announcement{Models: []ModelNews{news(serving(slice(1, 2, 0, 8))...)}})
	old := Record{"a", 1, t0, time.Hour, body}
	if _, err := x.Update(old, t0); err != nil {
		t.Fatal(err)
	}
	away := Record{"a", 2, t0, time.Minute, encode(t, &Announcement{Away: true})}
	if _, err := x.Update(away, t0); err != nil {
		t.Fatal(err)
	}
	if n := x.Peers(t0); n != 0 {
		t.Errorf("%d peers, the only one is away", n)
	}
	for _, at := range []time.Duration{time.Second, 2 * time.Minute, 59 * time.Minute} {
		if newer, err := x.Update(old, t0.Add(at)); newer || err != nil {
			t.Errorf("replayed after %v: %v, %v", at, newer, err)
		}
		wantReplicas(t, x, t0.Add(at), 1, "00000000", "00000000")
	}
	x.Peers(t0.Add(time.Hour))
	if len(x.authors) != 0 {
		t.Error("the author is remembered for ever")
	}
}

// TestQuickRestarts (parallax#166): an identity that starts ten times counts once.
func TestQuickRestarts(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	for i := range 10 {
		at := t0.Add(time.Duration(i) * time.Second)
		tell(t, x, "a", uint64(10*i+1), at, news(Holding{slice(1, 2, 0, 8), Loading, time.Minute}))
		wantReplicas(t, x, at, 1, "00000000", "11111111")
		if i%2 == 0 {
			x.Lost("a", t0)
		}
		tell(t, x, "a", uint64(10*i+2), at, news(serving(slice(1, 2, 0, 8))...))
		wantReplicas(t, x, at, 1, "11111111", "00000000")
	}
	if x.Peers(t0.Add(10*time.Second)) != 1 {
		t.Error("not one peer")
	}
}

func TestShapes(t *testing.T) {
	x, err := NewTable(Policy{})
	if err != nil {
		t.Fatal(err)
	}
	other := Shape{Layers: 1, Experts: 2, MoE: oneLayer.MoE}
	lie := ModelNews{ID: modelA, Shape: other, Holdings: serving(slice(0, 1, 0, 2))}
	tell(t, x, "liar", 1, t0, lie)
	if c := coverage(t, x, modelA, t0); !c.Shape.Equal(other) || c.Trusted || c.Covered != 2 {
		t.Errorf("first seen: %+v", c)
	}
	tell(t, x, "a", 1, t0, news(serving(slice(1, 2, 0, 8))...))
	if c := coverage(t, x, modelA, t0); !c.Shape.Equal(other) {
		t.Errorf("one against one: %+v", c.Shape)
	}
	tell(t, x, "b", 1, t0, news(serving(slice(1, 2, 0, 8))...))
	if c := coverage(t, x, modelA, t0); !c.Shape.Equal(odd) || c.Covered != 8 || c.Authors != 2 {
		t.Errorf("the majority: %+v", c)
	}
	if n := len(x.Holders(modelA, t0)); n != 2 {
		t.Errorf("%d holders of the shape of most, want 2", n)
	}
	if err := x.SetShape(modelA, other); err != nil {
		t.Fatal(err)
	}
	if c := coverage(t, x, modelA, t0); !c.Trusted || c.Covered != 2 || c.Authors != 1 {
		t.Errorf("the verified header: %+v", c)
	}
	r := Record{"a", 2, t0, time.Minute, encode(t, &Announcement{Models: []ModelNews{news()}})}
	checkReason(t, "a shape against the header", x.Check(r), WrongShape)
	_, err = x.Update(r, t0)
	checkReason(t, "a shape against the header", err, WrongShape)
	checkReason(t, "no shape", x.SetShape(modelB, Shape{}), BadShape)
}

// TestEndlessClaims: who claims for ever and never serves stops to count.
func TestEndlessClaims(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	claim := Holding{slice(1, 2, 0, 4), Loading, MaxLease}
	at := t0
	for i := range 61 {
		at = t0.Add(time.Duration(i) * time.Minute)
		tell(t, x, "liar", uint64(i+1), at, news(claim))
		done := serving(slice(4, 5, 0, i/10+1))
		tell(t, x, "slow", uint64(i+1), at, news(append(done, Holding{slice(1, 2, 4, 8), Loading, MaxLease})...))
		if i < 60 {
			wantReplicas(t, x, at, 1, "00000000", "11111111")
		}
	}
	wantReplicas(t, x, at, 1, "00000000", "00001111")
}

func TestDemandRaisesTargets(t *testing.T) {
	x := newTable(t, Policy{Target: 2, MaxBonus: 2}, modelA, odd) // mean share 1250
	hot := ModelNews{ID: modelA, Shape: odd, Backbone: true, Demand: []LayerDemand{
		{Layer: 1, Pairs: 1 << 20, Hot: []HotExpert{{0, 2499}, {1, 2500}, {2, 5000}}}}}
	tell(t, x, "a", 1, t0, hot)
	target := func(layer int) (s string) {
		for _, l := range coverage(t, x, modelA, t0).Layers {
			for _, g := range l.Segments {
				for range g.Experts.Len() {
					if l.Layer == layer {
						s += fmt.Sprint(g.Target)
					}
				}
			}
		}
		return s
	}
	if s := target(1); s != "23422222" {
		t.Errorf("targets %s", s)
	}
	if s := target(2); s != "22222222" {
		t.Errorf("targets of a layer without demand %s", s)
	}
	// One with a thousand times the pairs weighs one and a half times as much, not a thousand.
	tell(t, x, "liar", 1, t0, ModelNews{ID: modelA, Shape: odd, Backbone: true, Demand: []LayerDemand{
		{Layer: 1, Pairs: 1 << 30, Hot: []HotExpert{{7, 10000}}}}})
	if s := target(1); s != "22222224" {
		t.Errorf("targets of both %s", s)
	}
	x.Lost("liar", t0)
	if s := target(1); s != "23422222" {
		t.Errorf("targets after the liar is gone: %s", s)
	}
}

func TestMeter(t *testing.T) {
	m, err := NewMeter(odd)
	if err != nil {
		t.Fatal(err)
	}
	if d := m.Demand(t0); d != nil {
		t.Errorf("demand of nothing: %v", d)
	}
	m.Add(1, 3, 100, t0)
	if got := fmt.Sprint(m.Demand(t0)); got != "[{1 96 []}]" {
		t.Errorf("demand %s after a few tokens, want no hot expert", got)
	}
	for e := range 8 {
		m.Add(1, e, 100, t0)
	}
	m.Add(1, 3, 800, t0)
	for _, cell := range [][2]int{{0, 0}, {3, 0}, {6, 0}, {1, 8}, {-1, 0}, {1, -1}} {
		m.Add(cell[0], cell[1], 1000, t0) // do not exist
	}
	got := fmt.Sprint(m.Demand(t0))
	if want := "[{1 1536 [{3 5120}]}]"; got != want {
		t.Errorf("demand %s, want %s", got, want)
	}
	got = fmt.Sprint(m.Demand(t0.Add(halfLife)))
	if want := "[{1 768 [{3 5120}]}]"; got != want {
		t.Errorf("demand after a half-life %s, want %s", got, want)
	}
	m.Add(1, 0, 10_000, t0.Add(10*halfLife))
	got = fmt.Sprint(m.Demand(t0.Add(10 * halfLife)))
	if want := "[{1 8192 [{0 8192}]}]"; got != want {
		t.Errorf("demand after it moved %s, want %s", got, want)
	}
	if d := m.Demand(t0.Add(1000 * halfLife)); d != nil {
		t.Errorf("demand long after: %v", d)
	}
}

func TestTableIsBounded(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	body := encode(t, &Announcement{Models: []ModelNews{news(serving(slice(1, 2, 0, 8))...)}})
	for i := range MaxAuthors {
		if _, err := x.Update(Record{fmt.Sprint(i), 1, t0, time.Minute, body}, t0); err != nil {
			t.Fatal(err)
		}
	}
	_, err := x.Update(Record{"one more", 1, t0, time.Minute, body}, t0)
	if r, ok := err.(*RefusedError); !ok || r.Reason != Full || r.AuthorsFault() {
		t.Errorf("one more: %v", err)
	}
	if _, err := x.Update(Record{"17", 2, t0, time.Minute, body}, t0); err != nil {
		t.Errorf("one that is known: %v", err)
	}
	if _, err := x.Update(Record{"one more", 1, t0.Add(time.Minute), time.Minute, body}, t0.Add(time.Minute)); err != nil {
		t.Errorf("after the others expired: %v", err)
	}
}

// bigSwarm is 1,000 authors of a 49×256 model, with 20 holdings each.
func bigSwarm(b *testing.B) (*Table, []Record) {
	x := newTable(b, Policy{}, modelA, big)
	var list []Record
	for i := range 1000 {
		m := ModelNews{ID: modelA, Shape: big}
		for j := range 20 {
			l, e := (i+j)%49, (i*7)%240
			m.Holdings = append(m.Holdings, Holding{Slice: slice(l, l+1, e, e+16), State: Serving})
		}
		list = append(list, Record{fmt.Sprint("peer ", i), 1, t0, time.Hour, encode(b, &Announcement{Models: []ModelNews{m}})})
		if _, err := x.Update(list[i], t0); err != nil {
			b.Fatal(err)
		}
	}
	x.Coverage(modelA, t0)
	return x, list
}

func BenchmarkUpdate(b *testing.B) {
	x, list := bigSwarm(b)
	for i := 0; b.Loop(); i++ {
		r := &list[i%len(list)]
		r.Seq++
		if _, err := x.Update(*r, t0); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCoverage(b *testing.B) {
	x, _ := bigSwarm(b)
	for b.Loop() {
		x.Coverage(modelA, t0)
	}
}

func BenchmarkAssign(b *testing.B) {
	x, _ := bigSwarm(b)
	w := Want{Peer: "me", MaxExperts: 64}
	w.Models = x.Verified()
	for b.Loop() {
		x.Assign(w, t0)
	}
}

func BenchmarkDecide(b *testing.B) {
	x, _ := bigSwarm(b)
	for b.Loop() {
		v, err := NewVolunteer("me", Policy{}, sized(expertBytes))
		if err != nil {
			b.Fatal(err)
		}
		v.Decide(x, Budget{Disk: 64 * expertBytes, Memory: 64 * expertBytes}, t0)
	}
}
