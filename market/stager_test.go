package market

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// stageHand drives one stager by hand; the others say what the test says. The model has eight
// equal layers that may be cut at every second.
type stageHand struct {
	t     *testing.T
	table *Table
	s     *Stager
	b     Budget
	now   time.Time
	seq   uint64
}

func eight() StageModel {
	m := StageModel{ID: modelA, Cuts: []int{2, 4, 6}}
	for range 8 {
		m.Layers = append(m.Layers, Footprint{100, 100})
	}
	return m
}

func newStageHand(t *testing.T, layers int) *stageHand {
	s, err := NewStager("me", Policy{}, eight())
	if err != nil {
		t.Fatal(err)
	}
	n := int64(layers) * 100
	return &stageHand{t: t, table: newTable(t, Policy{}, modelA, dense), s: s, now: t0, b: Budget{Disk: n, Memory: n}}
}

// others has a peer say what it holds; with room for layers it moves and ranks as stagers do.
func (h *stageHand) others(id string, layers int, list ...WindowHolding) {
	h.t.Helper()
	h.seq++
	for i := range list {
		if list[i].wanted() {
			list[i].Lease = MaxLease
		}
	}
	m := ModelNews{ID: modelA, Shape: dense, Windows: list, Room: Footprint{int64(layers) * 100, int64(layers) * 100}}
	body := encode(h.t, &Announcement{Models: []ModelNews{m}})
	if _, err := h.table.Update(Record{id, h.seq, h.now, 24 * time.Hour, body}, h.now); err != nil {
		h.t.Fatal(err)
	}
}

func win(begin, end int, s State) WindowHolding {
	return WindowHolding{Layers: layerRange(begin, end), State: s}
}

// decide lets time pass, and announces what changed.
func (h *stageHand) decide(after time.Duration) StageDecision {
	h.t.Helper()
	h.now = h.now.Add(after)
	d := h.s.Decide(h.table, h.b, h.now)
	if !d.Next.After(h.now) {
		h.t.Errorf("to be called again at %v, now is %v", d.Next, h.now)
	}
	if d.Announce {
		h.seq++
		m := ModelNews{ID: modelA, Shape: dense, Windows: h.s.Windows(), Room: h.s.Room()}
		body := encode(h.t, &Announcement{Models: []ModelNews{m}})
		if _, err := h.table.Update(Record{"me", h.seq, h.now, 24 * time.Hour, body}, h.now); err != nil {
			h.t.Fatal(err)
		}
		h.s.Announced(h.now)
	}
	return d
}

func (h *stageHand) want(what, state string, d StageDecision, load, drop gguf.Range) {
	h.t.Helper()
	var list []string
	for _, w := range h.s.Windows() {
		list = append(list, fmt.Sprintf("%v %v", w.State, w.Layers))
	}
	if got := strings.Join(list, ", "); got != state || d.Load != load || d.Drop != drop {
		h.t.Errorf("%s: %q, load %v, drop %v; want %q, %v, %v", what, got, d.Load, d.Drop, state, load, drop)
	}
}

var none gguf.Range

// serves brings a stager to serve, alone or beside others.
func (h *stageHand) serves(w gguf.Range) {
	h.t.Helper()
	if err := h.s.Restore(w, true); err != nil {
		h.t.Fatal(err)
	}
}

func TestStageClaimLoadServe(t *testing.T) {
	h := newStageHand(t, 4)
	h.others("a", 4, win(0, 4, Serving))
	h.want("claims what lacks", "claimed 4:8", h.decide(0), none, none)
	h.want("waits for rivals", "claimed 4:8", h.decide(time.Second), none, none)
	if r := h.s.Room(); r != (Footprint{400, 400}) {
		t.Errorf("room %v", r)
	}
	d := h.decide(settling)
	h.want("loads", "loading 4:8", d, layerRange(4, 8), none)
	h.want("is told once", "loading 4:8", h.decide(time.Second), none, none)
	h.s.Done(layerRange(0, 4)) // not what it loads
	h.want("is not done", "loading 4:8", h.decide(time.Second), none, none)
	h.s.Done(d.Load)
	h.want("serves", "serving 4:8", h.decide(time.Second), none, none)
	if got, odd := h.s.Takes(layerRange(4, 8)), h.s.Takes(layerRange(5, 99)); got.beyond(Footprint{400, 400}) || got.Memory == 0 || odd != (Footprint{}) {
		t.Errorf("it takes %v, and a window that is none %v", got, odd)
	}
	h.want("stays", "serving 4:8", h.decide(time.Hour), none, none)
}

// TestStageChoice has one case for every part of the rule.
func TestStageChoice(t *testing.T) {
	type says map[string][]WindowHolding
	for _, tt := range []struct {
		name   string
		layers int
		others says
		want   string
	}{
		{"nothing fits", 1, nil, ""},
		{"the whole, where it fits", 8, says{"a": {win(0, 4, Serving)}}, "0:8"},
		{"the gap", 3, says{"a": {win(0, 4, Serving)}, "b": {win(6, 8, Serving)}, "c": {win(0, 4, Serving)}}, "4:6"},
		{"more than the gap, if others end there", 4, says{"a": {win(0, 4, Serving)}, "b": {win(4, 6, Serving)}, "c": {win(0, 6, Serving)}}, "4:8"},
		{"covered, but the bounds do not meet", 2, says{"a": {win(0, 4, Serving)}, "b": {win(2, 8, Serving)}}, "0:2"},
		{"the longest of two that make them meet", 4, says{"a": {win(0, 4, Serving)}, "b": {win(2, 8, Serving)}}, "4:8"},
		{"what loads counts", 4, says{"a": {win(0, 4, Loading)}}, "4:8"},
		{"what is left does not", 6, says{"a": {win(0, 2, Leaving)}, "b": {win(6, 8, Serving)}}, "0:6"},
		{"bounds that are not legal are nothing", 4, says{"a": {win(0, 3, Serving)}, "b": {win(0, 4, Serving)}}, "4:8"},
		{"a second chain", 4, says{"a": {win(0, 8, Serving)}, "b": {win(4, 8, Serving)}}, "0:4"},
		{"a complete chain, a gap too small for the rest", 2, says{"a": {win(0, 8, Serving)}, "b": {win(2, 8, Serving)}}, "0:2"},
	} {
		h := newStageHand(t, tt.layers)
		for id, list := range tt.others {
			h.others(id, 0, list...)
		}
		h.decide(0)
		got := ""
		if list := h.s.Windows(); len(list) == 1 {
			got = list[0].Layers.String()
		}
		if got != tt.want {
			t.Errorf("%s: claims %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestStageRivals: of two that claim the same only one loads it, and both agree which.
func TestStageRivals(t *testing.T) {
	lost := 0
	for i := range 40 {
		h := newStageHand(t, 4)
		h.decide(0)
		mine := h.s.Windows()[0].Layers
		rival := fmt.Sprint("rival ", i)
		h.others(rival, 4, WindowHolding{Layers: mine, State: Claimed})
		d := h.decide(settling)
		other := layerRange(4, 8)
		if mine == other {
			other = layerRange(0, 4)
		}
		// Both see the same plan, in which they stand side by side.
		if d.Load.Len() > 0 {
			h.want("wins", "loading "+mine.String(), d, mine, none)
		} else {
			h.want("goes elsewhere", "claimed "+other.String(), d, none, none)
			h.others(rival, 4, WindowHolding{Layers: mine, State: Loading})
			h.want("loads that", "loading "+other.String(), h.decide(settling), other, none)
			lost++
		}
	}
	if lost < 1 || lost > 39 {
		t.Errorf("lost %d of 40", lost)
	}
}

// TestStageSteady: a rival that claims something else all the time does not keep a node from work.
func TestStageSteady(t *testing.T) {
	rival := ""
	for i := 0; rival == ""; i++ {
		if id := fmt.Sprint(i); rank(hash(id), hashID(modelA), 0) < rank(hash("me"), hashID(modelA), 0) {
			rival = id
		}
	}
	h := newStageHand(t, 4)
	h.others("a", 0, win(0, 8, Serving))
	h.decide(0)
	for range 3 * steady {
		at := h.s.Windows()[0].Layers
		h.others(rival, 0, WindowHolding{Layers: at, State: Claimed})
		if d := h.decide(settling); d.Load.Len() > 0 {
			return
		}
	}
	t.Error("never loads")
}

// TestStageMove: a node whose window others have moves to where there is none, not at once, tells
// that it leaves, and only if others stay.
func TestStageMove(t *testing.T) {
	begin := func() *stageHand {
		h := newStageHand(t, 4)
		h.serves(layerRange(0, 4))
		h.others("a", 0, win(0, 4, Serving))
		h.want("begins to look", "serving 0:4", h.decide(0), none, none)
		h.want("dwells", "serving 0:4", h.decide(29*time.Second), none, none)
		h.want("claims", "serving 0:4, claimed 4:8", h.decide(31*time.Second), none, none)
		return h
	}
	h := begin()
	h.want("leaves", "leaving 0:4, claimed 4:8", h.decide(settling), none, none)
	h.want("gives up", "claimed 4:8", h.decide(settling), none, layerRange(0, 4))
	h.want("is not told that it is deleted", "claimed 4:8", h.decide(time.Minute), none, layerRange(0, 4))
	h.s.Dropped(layerRange(4, 8)) // not what it drops
	h.s.Dropped(layerRange(0, 4))
	h.want("loads", "loading 4:8", h.decide(time.Second), layerRange(4, 8), none)

	h = begin()
	h.others("b", 0, win(4, 8, Serving))
	h.want("another was faster", "serving 0:4", h.decide(settling), none, none)

	h = begin()
	h.want("leaves", "leaving 0:4, claimed 4:8", h.decide(settling), none, none)
	h.others("b", 0, win(4, 8, Serving))
	h.others("a", 0, win(0, 4, Leaving))
	h.want("is needed where it is", "serving 0:4", h.decide(settling), none, none)

	h = newStageHand(t, 4)
	h.serves(layerRange(0, 4))
	h.others("a", 0, win(4, 8, Serving))
	for range 10 {
		h.want("the last of its kind", "serving 0:4", h.decide(time.Minute), none, none)
	}
	// Two chains are the target: a third is worth a move only by the margin.
	h = newStageHand(t, 2)
	h.serves(layerRange(0, 2))
	for _, id := range []string{"a", "b", "c", "d"} {
		h.others(id, 0, win(0, 8, Serving))
	}
	h.others("e", 0, win(2, 4, Serving), win(6, 8, Serving))
	h.others("f", 0, win(0, 2, Serving))
	for range 10 {
		h.want("four chains serve", "serving 0:2", h.decide(time.Minute), none, none)
	}
}

// TestStageRearranged: where no chain is complete and no single move completes one, all are placed
// anew.
func TestStageRearranged(t *testing.T) {
	m := eight()
	m.First, m.Last = Footprint{200, 200}, Footprint{200, 200}
	h := newStageHand(t, 6)
	var err error
	if h.s, err = NewStager("me", Policy{}, m); err != nil {
		t.Fatal(err)
	}
	h.serves(layerRange(2, 8)) // 800 with the head
	h.b = Budget{Disk: 800, Memory: 800}
	h.others("a", 2)
	h.want("the other cannot hold the first layers", "serving 2:8", h.decide(0), none, none)
	h.others("a", 4, win(0, 2, Serving)) // 400 with the embedding
	h.want("complete", "serving 2:8", h.decide(time.Hour), none, none)

	h = newStageHand(t, 6)
	if h.s, err = NewStager("me", Policy{}, m); err != nil {
		t.Fatal(err)
	}
	h.serves(layerRange(2, 6))
	h.others("a", 4, win(0, 2, Serving)) // can hold either end, or four in the middle
	h.others("b", 4)
	d := h.decide(0)
	h.want("b can hold the other end", "serving 2:6", d, none, none)
	h.others("b", 2) // only in the middle
	h.decide(glance)
	d = h.decide(time.Minute)
	h.want("moves to the end, although nobody else has the middle", "serving 2:6, claimed 4:8", d, none, none)
	h.want("leaves", "leaving 2:6, claimed 4:8", h.decide(settling), none, none)
	h.want("gives up", "claimed 4:8", h.decide(settling), none, layerRange(2, 6))
	h.s.Dropped(layerRange(2, 6))
	h.want("loads", "loading 4:8", h.decide(time.Second), layerRange(4, 8), none)
}

func TestStageDrain(t *testing.T) {
	h := newStageHand(t, 4)
	h.serves(layerRange(0, 4))
	h.others("a", 0, win(4, 8, Serving))
	h.decide(0)
	h.b.Drain = true
	h.want("leaves", "leaving 0:4", h.decide(time.Second), none, none)
	h.want("keeps the only chain", "leaving 0:4", h.decide(time.Hour), none, none)
	if h.s.Room() != (Footprint{}) {
		t.Errorf("room %v of who leaves", h.s.Room())
	}
	h.b.Drain = false
	h.want("changed its mind", "serving 0:4", h.decide(time.Second), none, none)
	h.b.Drain = true
	h.decide(time.Second)
	h.others("b", 0, win(0, 4, Serving))
	h.want("gives up what another has", "", h.decide(settling), none, layerRange(0, 4))

	h = newStageHand(t, 4)
	h.decide(0)
	h.b.Drain = true
	h.want("forgets a claim", "", h.decide(time.Second), none, none)
}

func TestStageFailures(t *testing.T) {
	h := newStageHand(t, 8)
	pause := backoffMin
	for range 8 {
		h.decide(0)
		d := h.decide(settling)
		h.want("loads", "loading 0:8", d, layerRange(0, 8), none)
		h.s.Failed(layerRange(0, 4), h.now) // not what it loads
		h.s.Failed(d.Load, h.now)
		h.s.Failed(d.Load, h.now) // twice is once
		h.want("failed", "", h.decide(0), none, layerRange(0, 8))
		h.s.Dropped(layerRange(0, 8))
		h.want("waits", "", h.decide(pause-time.Second), none, none)
		h.want("tries again", "claimed 0:8", h.decide(pause+time.Second), none, none)
		pause = min(2*pause, backoffMax)
	}
}

func TestStageBudget(t *testing.T) {
	h := newStageHand(t, 8)
	h.serves(layerRange(0, 8))
	h.want("serves", "serving 0:8", h.decide(0), none, none)
	h.b.Memory = 400
	d := h.decide(time.Second)
	if d.Drop != layerRange(0, 8) || h.s.Windows()[0].Layers.Len() != 4 {
		t.Errorf("a smaller budget: %+v, %+v", d, h.s.Windows())
	}
	h.want("waits for the room", "claimed "+h.s.Windows()[0].Layers.String(), h.decide(settling), none, layerRange(0, 8))
	h.s.Dropped(layerRange(0, 8))
	if d := h.decide(settling); d.Load.Len() != 4 {
		t.Errorf("loads %v", d.Load)
	}
	h = newStageHand(t, 8)
	h.b.Disk = 0
	h.want("no disk", "", h.decide(0), none, none)
}

func TestStageRestart(t *testing.T) {
	h := newStageHand(t, 4)
	if err := h.s.Restore(layerRange(1, 4), true); err == nil {
		t.Error("a window that cannot be cut so was restored")
	}
	if err := h.s.Restore(layerRange(2, 6), false); err != nil {
		t.Fatal(err)
	}
	if err := h.s.Restore(layerRange(2, 4), false); err == nil {
		t.Error("a second window was restored")
	}
	h.others("a", 0, win(0, 2, Serving))
	h.want("half of it is here", "claimed 2:6", h.decide(0), none, none)
	h.want("goes on", "loading 2:6", h.decide(settling), layerRange(2, 6), none)

	h = newStageHand(t, 4)
	if err := h.s.Restore(layerRange(2, 6), false); err != nil {
		t.Fatal(err)
	}
	h.others("a", 0, win(0, 4, Serving))
	h.others("b", 0, win(2, 6, Serving))
	h.decide(0)
	h.want("is of no use any more", "claimed 4:8", h.decide(settling), none, layerRange(2, 6))
}

func TestStageNeedsShape(t *testing.T) {
	h := newStageHand(t, 8)
	var err error
	if h.table, err = NewTable(Policy{}); err != nil {
		t.Fatal(err)
	}
	h.want("no shape", "", h.decide(0), none, none)
	if err := h.table.SetShape(modelA, dense); err != nil {
		t.Fatal(err)
	}
	h.want("shape", "claimed 0:8", h.decide(time.Second), none, none)
}

func TestStagerRefuses(t *testing.T) {
	model := func(f func(*StageModel)) StageModel {
		m := eight()
		f(&m)
		return m
	}
	for name, m := range map[string]StageModel{
		"no layers":              {ID: modelA},
		"many layers":            {Layers: make([]Footprint, MaxLayers+1)},
		"negative layer":         model(func(m *StageModel) { m.Layers[3].Disk = -1 }),
		"layer of a planet":      model(func(m *StageModel) { m.Layers[3].Memory = MaxHint }),
		"negative embedding":     model(func(m *StageModel) { m.First.Disk = -1 }),
		"more shared than there": model(func(m *StageModel) { m.Shared.Disk = 1 }),
		"cut at 0":               model(func(m *StageModel) { m.Cuts = []int{0, 2} }),
		"cut at the end":         model(func(m *StageModel) { m.Cuts = []int{2, 8} }),
		"cut beyond":             model(func(m *StageModel) { m.Cuts = []int{2, 9} }),
		"cuts backwards":         model(func(m *StageModel) { m.Cuts = []int{4, 2} }),
		"a cut twice":            model(func(m *StageModel) { m.Cuts = []int{2, 2} }),
	} {
		if _, err := NewStager("me", Policy{}, m); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if _, err := NewStager("", Policy{}, eight()); err == nil {
		t.Error("a stager without identity was made")
	}
	if _, err := NewStager("me", Policy{Target: -1}, eight()); err == nil {
		t.Error("a policy without sense was taken")
	}
}

// ranked returns a peer that ranks before or after "me".
func ranked(before bool) string {
	for i := 0; ; i++ {
		id := fmt.Sprint("peer ", i)
		if (rank(hash(id), hashID(modelA), 0) < rank(hash("me"), hashID(modelA), 0)) == before {
			return id
		}
	}
}

// TestStageMover: one that moves counts where it moves to if it ranks before, else where it is.
func TestStageMover(t *testing.T) {
	for before, want := range map[bool]string{true: "claimed 0:4", false: "claimed 4:8"} {
		h := newStageHand(t, 4)
		h.others(ranked(before), 4, win(0, 4, Serving), win(4, 8, Claimed))
		h.others("a", 0, win(0, 4, Serving))
		h.others("b", 0, win(4, 8, Serving))
		h.want(fmt.Sprint("ranks before: ", before), want, h.decide(0), none, none)
	}
}

// TestStageBothLeave: of two that leave the same window to each other one goes and one stays; one
// that leaves for good goes in any case.
func TestStageBothLeave(t *testing.T) {
	for _, tt := range []struct {
		name          string
		before, moves bool
		state         string
		drop          gguf.Range
	}{
		{"the other ranks before", true, true, "serving 0:2", none},
		{"the other yields", false, true, "claimed 0:4", layerRange(0, 2)},
		{"the other ends", false, false, "serving 0:2", none},
	} {
		h := newStageHand(t, 4)
		h.serves(layerRange(0, 2))
		other := ranked(tt.before)
		h.others(other, 2, win(0, 2, Serving))
		h.others("a", 0, win(2, 8, Serving))
		h.others("b", 0, win(4, 8, Serving))
		h.decide(0)
		h.decide(5 * time.Minute)
		h.want("leaves", "leaving 0:2, claimed 0:4", h.decide(settling), none, none)
		if tt.moves {
			h.others(other, 2, win(0, 2, Leaving), win(6, 8, Claimed))
		} else {
			h.others(other, 0, win(0, 2, Leaving))
		}
		h.want(tt.name, tt.state, h.decide(settling), none, tt.drop)
	}
}

// TestStageLiar: who gives room for all and claims the whole, but never serves, does not keep
// others from a chain.
func TestStageLiar(t *testing.T) {
	s := newStageSim(t, 3, layered(48, 4))
	for range 3 {
		s.add(20, 0)
	}
	s.run(time.Second)
	var seq uint64
	for range 30 {
		seq++
		w := WindowHolding{Layers: layerRange(0, 48), State: Loading, Lease: MaxLease}
		body := encode(t, &Announcement{Models: []ModelNews{{ID: modelA, Shape: s.shape, Windows: []WindowHolding{w}, Room: Footprint{MaxHint, MaxHint}}}})
		for _, n := range s.nodes {
			if _, err := n.table.Update(Record{"liar", seq, s.now, 5 * time.Minute, body}, s.now); err != nil {
				t.Fatal(err)
			}
		}
		s.run(time.Minute)
	}
	if s.chains() != 1 || s.loads != 3 {
		t.Errorf("%d chains of %v after %d downloads", s.chains(), s.windows(), s.loads)
	}
}
