package market

import (
	"fmt"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// hand drives one volunteer, with others as the test says, all of it by hand.
type hand struct {
	t     *testing.T
	table *Table
	vol   *Volunteer
	b     Budget
	now   time.Time
	seq   uint64
}

func newHand(t *testing.T, experts int) *hand {
	v, err := NewVolunteer("me", Policy{}, sized(1000))
	if err != nil {
		t.Fatal(err)
	}
	return &hand{t: t, table: newTable(t, Policy{}, modelA, odd), vol: v, now: t0,
		b: Budget{Disk: int64(experts) * 1000, Memory: int64(experts) * 1000}}
}

// others has a peer say what it holds.
func (h *hand) others(id string, list ...Holding) {
	h.t.Helper()
	h.seq++
	body := encode(h.t, &Announcement{Models: []ModelNews{news(list...)}})
	if _, err := h.table.Update(Record{id, h.seq, h.now, 24 * time.Hour, body}, h.now); err != nil {
		h.t.Fatal(err)
	}
}

// decide lets time pass, and announces what changed.
func (h *hand) decide(after time.Duration) Decision {
	h.t.Helper()
	h.now = h.now.Add(after)
	d := h.vol.Decide(h.table, h.b, h.now)
	if d.Announce {
		h.others("me", h.vol.Holdings()[modelA]...)
		h.vol.Announced(h.now)
	}
	if used := h.vol.Used(); used > h.b.bytes() && len(d.Drop) == 0 && !h.b.Drain {
		h.t.Errorf("uses %d of %d bytes", used, h.b.bytes())
	}
	return d
}

// state writes what the volunteer announces.
func (h *hand) state() (s string) {
	for _, x := range h.vol.Holdings()[modelA] {
		s += fmt.Sprintf("%v %v; ", x.State, x.Slice)
	}
	return s
}

func (h *hand) want(what, state string, d Decision, load, drop int) {
	h.t.Helper()
	if got := h.state(); got != state || len(d.Load) != load || len(d.Drop) != drop {
		h.t.Errorf("%s: %q, %d to load, %d to drop; want %q, %d, %d", what, got, len(d.Load), len(d.Drop), state, load, drop)
	}
}

func (h *hand) done(parts []Part) {
	for _, p := range parts {
		h.vol.Done(p, h.now)
	}
}

// settling is a little more than the settle time.
const settling = 7 * time.Second

func TestClaimLoadServe(t *testing.T) {
	h := newHand(t, 8)
	h.others("a", serving(slice(1, 3, 0, 8))...)
	h.others("b", serving(slice(1, 3, 0, 8))...)
	h.want("claims what is scarcest", "claimed 4:5/0:8; ", h.decide(0), 0, 0)
	h.want("waits for rivals", "claimed 4:5/0:8; ", h.decide(time.Second), 0, 0)
	d := h.decide(settling)
	h.want("loads", "loading 4:5/0:8; ", d, 1, 0)
	if n := coverage(t, h.table, modelA, h.now).Covered; n != 16 {
		t.Errorf("%d cells covered while it loads", n)
	}
	h.done(d.Load)
	h.want("serves", "serving 4:5/0:8; ", h.decide(time.Second), 0, 0)
	if n := coverage(t, h.table, modelA, h.now).Covered; n != 24 {
		t.Errorf("%d cells covered in the end", n)
	}
	h.want("stays", "serving 4:5/0:8; ", h.decide(time.Hour), 0, 0)
}

// TestLoserWithdraws: of two that claim the last place only one downloads, and both agree which.
func TestLoserWithdraws(t *testing.T) {
	lost := 0
	for i := range 40 {
		h := newHand(t, 8)
		h.vol.policy.Ceiling = 2
		for _, id := range []string{"a", "b"} {
			h.others(id, serving(slice(1, 3, 0, 8))...)
		}
		h.others("a", serving(slice(1, 3, 0, 8), slice(4, 5, 0, 8))...)
		h.want("claims", "claimed 4:5/0:8; ", h.decide(0), 0, 0)
		rival := fmt.Sprint("rival ", i)
		h.others(rival, Holding{slice(4, 5, 0, 8), Claimed, time.Minute})
		d := h.decide(settling)
		if loses := rank(hash(rival), hashID(modelA), 4) < rank(hash("me"), hashID(modelA), 4); loses {
			h.want("loses", "", d, 0, 0)
			lost++
		} else {
			h.want("wins", "loading 4:5/0:8; ", d, 1, 0)
		}
	}
	if lost < 8 || lost > 32 {
		t.Errorf("lost %d of 40", lost)
	}
	h := newHand(t, 8)
	h.vol.policy.Ceiling = 2
	h.decide(0)
	for _, id := range []string{"a", "b"} { // these began before
		h.others(id, serving(slice(1, 3, 0, 8), slice(4, 5, 0, 8))...)
	}
	h.want("nothing is left", "", h.decide(settling), 0, 0)
}

func TestBudgetsAreHard(t *testing.T) {
	for _, tt := range []struct {
		name string
		b    Budget
		want int // cells
	}{
		{"none", Budget{}, 0},
		{"disk only", Budget{Disk: 1 << 40}, 0},
		{"memory only", Budget{Memory: 1 << 40}, 0},
		{"the smaller", Budget{Disk: 5999, Memory: 1 << 40}, 5},
		{"all", Budget{Disk: 1 << 40, Memory: 1 << 40}, 24},
		{"a line of 10 B/s takes four minutes for two", Budget{Disk: 1 << 40, Memory: 1 << 40, Bandwidth: 10}, 2},
		{"a line that takes longer for one", Budget{Disk: 1 << 40, Memory: 1 << 40, Bandwidth: 1}, 1},
		{"draining", Budget{Disk: 1 << 40, Memory: 1 << 40, Drain: true}, 0},
	} {
		h := newHand(t, 0)
		h.b = tt.b
		h.decide(0)
		if got := int(h.vol.Used() / 1000); got != tt.want {
			t.Errorf("%s: claims %d experts, want %d", tt.name, got, tt.want)
		}
	}
}

func TestSmallerBudget(t *testing.T) {
	h := newHand(t, 24)
	h.done(h.decideTwice().Load)
	h.others("a", serving(slice(1, 2, 0, 8))...)
	h.want("serves all", "serving 1:3/0:8; serving 4:5/0:8; ", h.decide(0), 0, 0)
	h.b.Disk = 16_000
	d := h.decide(time.Second)
	h.want("gives up what another serves", "serving 2:3/0:8; serving 4:5/0:8; ", d, 0, 1)
	if h.vol.Used() != 24_000 {
		t.Error("what is not deleted does not count")
	}
	if again := h.decide(time.Second); len(again.Drop) != 1 || again.Drop[0] != d.Drop[0] {
		t.Errorf("drops %v, then %v", d.Drop, again.Drop)
	}
	h.vol.Dropped(d.Drop[0])
	h.b.Disk = 8000
	for _, p := range h.decide(time.Second).Drop {
		h.vol.Dropped(p)
	}
	h.want("gives up even the last replica", "serving 4:5/0:8; ", h.decide(time.Second), 0, 0)
}

// decideTwice claims, settles and loads.
func (h *hand) decideTwice() Decision {
	h.decide(0)
	return h.decide(settling)
}

// TestRestart: half of a download counts in full, is finished where it is still wanted, and
// deleted where it is not.
func TestRestart(t *testing.T) {
	h := newHand(t, 16)
	for _, p := range []struct {
		slice    gguf.Slice
		complete bool
	}{{slice(1, 2, 0, 8), true}, {slice(2, 3, 0, 8), false}} {
		if err := h.vol.Restore(Part{modelA, p.slice}, p.complete, h.now); err != nil {
			t.Fatal(err)
		}
	}
	h.want("goes on", "serving 1:2/0:8; claimed 2:3/0:8; ", h.decide(0), 0, 0)
	if h.vol.Used() != 16_000 {
		t.Errorf("uses %d", h.vol.Used())
	}
	h.vol.policy.Ceiling = 2
	for _, id := range []string{"a", "b"} {
		h.others(id, serving(slice(2, 3, 0, 6))...)
	}
	h.others("c", serving(slice(1, 2, 0, 8), slice(4, 5, 0, 8))...)
	h.others("d", serving(slice(4, 5, 0, 8))...)
	d := h.decide(settling)
	h.want("finishes two, deletes six", "serving 1:2/0:8; loading 2:3/6:8; ", d, 1, 1)
	if d.Drop[0].Slice != slice(2, 3, 0, 6) {
		t.Errorf("drops %v", d.Drop)
	}
	over := newHand(t, 8)
	if err := over.vol.Restore(Part{modelA, slice(1, 3, 0, 8)}, false, over.now); err != nil {
		t.Fatal(err)
	}
	if d := over.decide(0); len(d.Drop) != 1 || over.vol.Used()-8000 != 8000 {
		t.Errorf("over its budget after a restart: %+v, uses %d", d, over.vol.Used())
	}
	if err := h.vol.Restore(Part{modelA, slice(1, 2, 3, 3)}, true, h.now); err == nil {
		t.Error("an empty part was restored")
	}
}

func TestDrain(t *testing.T) {
	h := newHand(t, 16)
	h.done(h.decideTwice().Load)
	state := h.state()
	h.b.Drain = true
	d := h.decide(time.Second)
	if len(d.Drop) != 0 || h.state() == state {
		t.Errorf("draining: %q, drops %v", h.state(), d.Drop)
	}
	d = h.decide(time.Minute)
	if len(d.Drop) != 0 {
		t.Errorf("drops the last replicas %v", d.Drop)
	}
	h.others("a", serving(slice(1, 3, 0, 8), slice(4, 5, 0, 8))...)
	d = h.decide(settling)
	if len(d.Drop) == 0 || h.state() != "" {
		t.Errorf("replaced: %q, drops %v", h.state(), d.Drop)
	}
	back := newHand(t, 8)
	back.done(back.decideTwice().Load)
	state = back.state()
	back.decide(0)
	back.b.Drain = true
	back.decide(time.Second)
	back.b.Drain = false
	back.decide(settling)
	if back.state() != state {
		t.Errorf("after it changed its mind: %q, want %q", back.state(), state)
	}
}

func TestFailures(t *testing.T) {
	h := newHand(t, 8)
	pause := backoffMin
	for range 8 {
		d := h.decideTwice()
		for len(d.Load) == 0 {
			d = h.decide(settling)
		}
		for _, p := range d.Load {
			h.vol.Failed(p, h.now)
			h.vol.Failed(p, h.now) // twice is once
		}
		d = h.decide(0)
		h.want("failed", "", d, 0, 1)
		h.vol.Dropped(d.Drop[0])
		h.want("waits", "", h.decide(pause-time.Second), 0, 0)
		if d = h.decide(pause + time.Second); h.state() == "" {
			t.Fatalf("does not try again after %v", 2*pause)
		}
		pause = min(2*pause, backoffMax)
	}
}

// TestMove: a full node moves to what is uncovered, not at once, tells that it leaves, and only
// if others stay.
func TestMove(t *testing.T) {
	full := func(others ...string) *hand {
		h := newHand(t, 8)
		if err := h.vol.Restore(Part{modelA, slice(1, 2, 0, 8)}, true, h.now); err != nil {
			t.Fatal(err)
		}
		for _, id := range others {
			h.others(id, serving(slice(1, 3, 0, 8))...)
		}
		return h
	}
	h := full("a", "b")
	h.want("begins to look", "serving 1:2/0:8; ", h.decide(0), 0, 0)
	h.want("dwells", "serving 1:2/0:8; ", h.decide(29*time.Second), 0, 0)
	d := h.decide(31 * time.Second)
	h.want("claims", "serving 1:2/0:8; claimed 4:5/0:8; ", d, 0, 0)
	d = h.decide(settling)
	h.want("leaves", "leaving 1:2/0:8; claimed 4:5/0:8; ", d, 0, 0)
	d = h.decide(settling)
	h.want("deletes", "claimed 4:5/0:8; ", d, 0, 1)
	h.want("is not told that it is deleted", "claimed 4:5/0:8; ", h.decide(time.Minute), 0, 1)
	h.vol.Dropped(d.Drop[0])
	h.want("loads", "loading 4:5/0:8; ", h.decide(time.Second), 1, 0)

	last := full() // nobody else serves what it would leave
	for range 10 {
		last.want("the last replica", "serving 1:2/0:8; ", last.decide(time.Minute), 0, 0)
	}

	gone := full("a") // the other leaves, or dies, meanwhile
	gone.decide(0)
	gone.decide(4 * time.Minute)
	gone.want("leaves", "leaving 1:2/0:8; claimed 4:5/0:8; ", gone.decide(settling), 0, 0)
	gone.others("a", Holding{Slice: slice(1, 3, 0, 8), State: Leaving})
	gone.want("stays after all", "serving 1:2/0:8; ", gone.decide(settling), 0, 0)

	h = full("a", "b") // the need passes
	h.decide(0)
	h.decide(4 * time.Minute)
	h.decide(settling)
	h.others("c", serving(slice(4, 5, 0, 8))...)
	h.others("d", serving(slice(4, 5, 0, 8))...)
	h.decide(settling)
	h.want("no need any more", "serving 1:2/0:8; ", h.decide(settling), 0, 0)
}

// TestPrefersModelsThatRun: of two models equally scarce, the one that a backbone runs; and only
// those of the network's list.
func TestPrefersModelsThatRun(t *testing.T) {
	for _, tt := range []struct {
		list []gguf.ModelID
		want gguf.ModelID
	}{{nil, modelB}, {[]gguf.ModelID{modelA}, modelA}} {
		x := newTable(t, Policy{}, modelA, odd)
		if err := x.SetShape(modelB, odd); err != nil {
			t.Fatal(err)
		}
		tell(t, x, "backbone", 1, t0, ModelNews{ID: modelB, Shape: odd, Backbone: true})
		v, err := NewVolunteer("me", Policy{Models: tt.list}, sized(1))
		if err != nil {
			t.Fatal(err)
		}
		v.Decide(x, Budget{Disk: 8, Memory: 8}, t0)
		if got := v.Holdings(); len(got) != 1 || len(got[tt.want]) != 1 {
			t.Errorf("list %v: %v", tt.list, got)
		}
	}
}

func TestPolicyRefuses(t *testing.T) {
	for _, p := range []Policy{{Target: -1}, {Target: 5000}, {Target: 4, Ceiling: 3}, {Settle: time.Minute},
		{Dwell: -1}, {Margin: 2}, {Piece: time.Hour}} {
		if _, err := NewTable(p); err == nil {
			t.Errorf("%+v was taken", p)
		}
	}
	if _, err := NewVolunteer("", Policy{}, sized(1)); err == nil {
		t.Error("a volunteer without identity was made")
	}
}
