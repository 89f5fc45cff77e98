package market

import (
	"testing"
	"time"
)

// renewed tells a table that a's record of t0, first valid for 90 s, was renewed at an instant.
func renewed(t *testing.T, x *Table, seq uint64, at time.Duration, now time.Time) bool {
	t.Helper()
	body := encode(t, &Announcement{Models: []ModelNews{news(serving(slice(1, 2, 0, 8))...)}})
	changed, err := x.Renew(Record{"a", seq, t0, 90*time.Second + at, body}, t0.Add(at), now)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

func TestRenew(t *testing.T) {
	at := func(d time.Duration) time.Time { return t0.Add(d) }
	const all, none = "11111111", "00000000"
	x := newTable(t, Policy{}, modelA, odd)
	tell(t, x, "a", 5, t0, news(serving(slice(1, 2, 0, 8))...))
	steps := []struct {
		what    string
		do      func() bool
		changed bool
		now     time.Duration
		want    string
	}{
		{"renewed in time", func() bool { return renewed(t, x, 5, 30*time.Second, at(40*time.Second)) }, false, 110 * time.Second, all},
		{"its time is over", nil, false, 120 * time.Second, none},
		{"renewed late, when it was forgotten", func() bool { return renewed(t, x, 5, 60*time.Second, at(125*time.Second)) }, true, 130 * time.Second, all},
		{"an earlier renewal", func() bool { return renewed(t, x, 5, 30*time.Second, at(130*time.Second)) }, false, 140 * time.Second, all},
		{"a renewal of another record", func() bool { return renewed(t, x, 4, 90*time.Second, at(140*time.Second)) }, false, 150 * time.Second, none},
		{"a renewal that is over itself", func() bool { return renewed(t, x, 5, 60*time.Second, at(150*time.Second)) }, false, 151 * time.Second, none},
		{"back", func() bool { return renewed(t, x, 5, 150*time.Second, at(155*time.Second)) }, true, 155 * time.Second, all},
		{"lost", func() bool { x.Lost("a", at(160*time.Second)); return false }, false, 160 * time.Second, none},
		{"a renewal from before that", func() bool { return renewed(t, x, 5, 155*time.Second, at(161*time.Second)) }, false, 161 * time.Second, none},
		{"a renewal that a fast clock dates after that", func() bool { return renewed(t, x, 5, 210*time.Second, at(161*time.Second)) }, false, 162 * time.Second, none},
		{"a renewal from after that", func() bool { return renewed(t, x, 5, 240*time.Second, at(241*time.Second)) }, true, 241 * time.Second, all},
	}
	for _, s := range steps {
		changed := false
		if s.do != nil {
			changed = s.do()
		}
		if changed != s.changed {
			t.Errorf("%s: changed is %v", s.what, changed)
		}
		got, _ := replicas(t, x, 1, at(s.now))
		if got != s.want {
			t.Errorf("%s: replicas %s, want %s", s.what, got, s.want)
		}
	}
	// A claim's lease is not made longer with the record.
	y := newTable(t, Policy{}, modelA, odd)
	claim := news(Holding{Slice: slice(1, 2, 0, 8), State: Claimed, Lease: time.Minute})
	tell(t, y, "a", 5, t0, claim)
	body := encode(t, &Announcement{Models: []ModelNews{claim}})
	if _, err := y.Renew(Record{"a", 5, t0, 120 * time.Second, body}, at(30*time.Second), at(30*time.Second)); err != nil {
		t.Fatal(err)
	}
	wantReplicas(t, y, at(59*time.Second), 1, none, all)
	wantReplicas(t, y, at(60*time.Second), 1, none, none)
}

// The bytes of all announcements are bounded, and come back with those that are over.
func TestBodiesAreBounded(t *testing.T) {
	x := newTable(t, Policy{}, modelA, odd)
	body := encode(t, &Announcement{Models: []ModelNews{news(serving(slice(1, 2, 0, 8))...)}})
	x.bodies = MaxBodies - len(body)
	if _, err := x.Update(Record{"a", 1, t0, time.Minute, body}, t0); err != nil {
		t.Fatal(err)
	}
	// One that is over, and swept away only now that it comes back, counts once.
	again := Record{"a", 2, t0.Add(2 * time.Minute), time.Minute, body}
	y := newTable(t, Policy{}, modelA, odd)
	if _, err := y.Update(Record{"a", 1, t0, time.Minute, body}, t0); err != nil {
		t.Fatal(err)
	}
	y.bodies = MaxBodies
	if newer, err := y.Update(again, again.Issued); !newer || err != nil || y.bodies != MaxBodies || y.authors["a"] == nil {
		t.Errorf("back: %v, %v, %d bytes are counted, %d before", newer, err, y.bodies, MaxBodies)
	}
	_, err := x.Update(Record{"b", 1, t0, time.Minute, body}, t0)
	if r, ok := err.(*RefusedError); !ok || r.Reason != Full || r.AuthorsFault() {
		t.Errorf("one more: %v", err)
	}
	if _, err := x.Update(Record{"a", 2, t0, time.Minute, body}, t0); err != nil {
		t.Errorf("a newer one in its place: %v", err)
	}
	if _, err := x.Update(Record{"b", 1, t0.Add(time.Minute), time.Minute, body}, t0.Add(time.Minute)); err != nil {
		t.Errorf("after the other expired: %v", err)
	}
}
