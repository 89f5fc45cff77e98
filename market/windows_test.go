package market

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

var dense = Shape{Layers: 8}

func layerRange(begin, end int) gguf.Range { return gguf.Range{Begin: begin, End: end} }

// ringSample uses every field of windows.
func ringSample() *Announcement {
	return &Announcement{
		Models: []ModelNews{{ID: modelA, Shape: dense, Room: Footprint{Disk: 9000, Memory: 8000}, Windows: []WindowHolding{
			{Layers: layerRange(0, 4), State: Serving, Slots: 16, Free: 3, Token: 2 * time.Millisecond, Batched: 300 * time.Microsecond},
			{Layers: layerRange(4, 8), State: Leaving},
			{Layers: layerRange(2, 4), State: Claimed, Lease: time.Minute},
			{Layers: layerRange(4, 6), State: Loading, Lease: 10 * time.Minute},
		}}},
		Near: []Neighbour{{"a", 250 * time.Microsecond}, {"b", 20 * time.Millisecond}},
	}
}

func TestWindowBytes(t *testing.T) {
	want := "a3" + "0101" + "0481" + "a4" + "0158200a" + strings.Repeat("00", 31) + "0383080080" +
		"0784" + "880004030010031907d019012c" + "880408040000000000" + "88020401183c00000000" + "8804060219025800000000" +
		"08821923281" + "91f40" + "0582" + "82616118fa" + "826162194e20"
	got := encode(t, ringSample())
	if hex.EncodeToString(got) != want {
		t.Errorf("got %x\nwant %s", got, want)
	}
	back, err := Decode(got)
	if err != nil || !reflect.DeepEqual(back, ringSample()) {
		t.Errorf("read back %+v, %v", back, err)
	}
	up := &Announcement{Near: []Neighbour{{"a", 1}}}
	if back, err := Decode(encode(t, up)); err != nil || back.Near[0].RTT != time.Microsecond {
		t.Errorf("a nanosecond is read as %v, %v", back, err)
	}
}

// TestLargestRingFits adds the most windows and neighbours to the most of everything else.
func TestLargestRingFits(t *testing.T) {
	a := &Announcement{}
	for i := range MaxWindowsAll / MaxWindows {
		m := ModelNews{ID: gguf.ModelID{byte(i)}, Name: strings.Repeat("n", maxName), Shape: big, Room: Footprint{MaxHint, MaxHint}}
		for w := range MaxWindows {
			m.Windows = append(m.Windows, WindowHolding{Layers: layerRange(24+w, 25+w), State: Serving,
				Slots: MaxSlots, Free: MaxSlots, Token: MaxToken, Batched: MaxToken})
		}
		a.Models = append(a.Models, m)
	}
	for i := range MaxHoldings {
		l, e := i%49, i/49*18
		a.Models[0].Holdings = append(a.Models[0].Holdings, Holding{slice(l, l+1, e, e+17), Loading, MaxLease})
	}
	for l := range 49 {
		d := LayerDemand{Layer: l, Pairs: maxPairs}
		for e := range maxHotAll / 49 {
			d.Hot = append(d.Hot, HotExpert{255 - maxHotAll/49 + e, 700})
		}
		a.Models[0].Demand = append(a.Models[0].Demand, d)
	}
	for i := range MaxNear {
		a.Near = append(a.Near, Neighbour{strings.Repeat("p", maxPeer-1) + string(rune('a'+i)), maxRTT})
	}
	a.Machine = &Machine{MaxHint, maxCores, MaxHint, MaxHint, maxLayer, MaxHint, MaxHint, maxRTT}
	t.Logf("%d bytes of %d", len(encode(t, a)), MaxBody)
}

func TestRefusedWindows(t *testing.T) {
	windows := func(w ...WindowHolding) func(*Announcement) {
		return func(a *Announcement) { a.Models[0].Windows = w }
	}
	room := func(r Footprint) func(*Announcement) { return func(a *Announcement) { a.Models[0].Room = r } }
	near := func(n ...Neighbour) func(*Announcement) { return func(a *Announcement) { a.Near = n } }
	w := func(begin, end int, s State) WindowHolding {
		return WindowHolding{Layers: layerRange(begin, end), State: s}
	}
	claim := func(begin, end int) WindowHolding {
		return WindowHolding{Layers: layerRange(begin, end), State: Claimed, Lease: time.Minute}
	}
	loaded := func(f func(*WindowHolding)) func(*Announcement) {
		return func(a *Announcement) { f(&a.Models[0].Windows[0]) }
	}
	var crowd, many []WindowHolding
	for i := range MaxWindows + 1 {
		crowd = append(crowd, w(i, i+1, Serving))
	}
	for i := range MaxWindows {
		many = append(many, w(i, i+1, Serving))
	}
	var street []Neighbour
	for i := range MaxNear + 1 {
		street = append(street, Neighbour{string(rune('a' + i)), time.Second})
	}
	for _, tt := range []struct {
		name   string
		change func(*Announcement)
		want   Reason
	}{
		{"many windows of a model", func(a *Announcement) { a.Models[0].Shape.Layers, a.Models[0].Windows = 16, crowd }, TooMany},
		{"many windows in all", func(a *Announcement) {
			a.Models = nil
			for i := range MaxWindowsAll/MaxWindows + 1 {
				a.Models = append(a.Models, ModelNews{ID: gguf.ModelID{byte(i)}, Shape: dense, Windows: many})
			}
		}, TooMany},
		{"window beyond the model", windows(w(4, 9, Serving)), NoSuch},
		{"negative layer", windows(w(-1, 4, Serving)), NoSuch},
		{"empty window", windows(w(4, 4, Serving)), NoSuch},
		{"backward window", windows(w(5, 4, Serving)), NoSuch},
		{"windows that compute overlap", windows(w(0, 4, Serving), w(3, 6, Leaving)), Overlap},
		{"windows that are wanted overlap", windows(claim(0, 4), claim(3, 6)), Overlap},
		{"no state", windows(w(0, 4, 0)), BadState},
		{"unknown state", windows(w(0, 4, 5)), BadState},
		{"claim without lease", windows(w(0, 4, Claimed)), BadLease},
		{"lease too long", windows(WindowHolding{Layers: layerRange(0, 4), State: Loading, Lease: MaxLease + time.Second}), BadLease},
		{"lease of what is served", windows(WindowHolding{Layers: layerRange(0, 4), State: Serving, Lease: time.Second}), BadLease},
		{"more free than there are", loaded(func(w *WindowHolding) { w.Free = 17 }), BadWindow},
		{"negative slots", loaded(func(w *WindowHolding) { w.Slots, w.Free = -2, -2 }), BadWindow},
		{"slots of a planet", loaded(func(w *WindowHolding) { w.Slots = MaxSlots + 1 }), BadWindow},
		{"token before its time", loaded(func(w *WindowHolding) { w.Token = -time.Second }), BadWindow},
		{"token of two minutes", loaded(func(w *WindowHolding) { w.Token = 2 * time.Minute }), BadWindow},
		{"batch of two minutes", loaded(func(w *WindowHolding) { w.Batched = 2 * time.Minute }), BadWindow},
		{"batch before its time", loaded(func(w *WindowHolding) { w.Batched = -time.Second }), BadWindow},
		{"claim that has slots", loaded(func(w *WindowHolding) { w.State, w.Lease, w.Token, w.Batched = Claimed, time.Minute, 0, 0 }), BadWindow},
		{"claim that computes", loaded(func(w *WindowHolding) { w.State, w.Lease, w.Slots, w.Free = Claimed, time.Minute, 0, 0 }), BadWindow},
		{"negative room", room(Footprint{Disk: -1}), BadHint},
		{"room of a planet", room(Footprint{Memory: 1 << 60}), BadHint},
		{"many neighbours", near(street...), TooMany},
		{"nameless neighbour", near(Neighbour{"", time.Second}), BadNear},
		{"long name", near(Neighbour{strings.Repeat("x", maxPeer+1), time.Second}), BadNear},
		{"a neighbour twice", near(Neighbour{"a", 1}, Neighbour{"a", 2}), BadNear},
		{"neighbours backwards", near(Neighbour{"b", 1}, Neighbour{"a", 2}), BadNear},
		{"no round trip", near(Neighbour{"a", 0}), BadNear},
		{"negative round trip", near(Neighbour{"a", -time.Second}), BadNear},
		{"round trip to the moon and back and again", near(Neighbour{"a", 2 * time.Minute}), BadNear},
		{"away with neighbours", func(a *Announcement) { a.Away, a.Models = true, nil }, AwayHolds},
		{"experts in no layer", func(a *Announcement) { a.Models[0].Shape.Experts = 4 }, BadShape},
		{"no experts in a layer", func(a *Announcement) { a.Models[0].Shape.MoE = []gguf.Range{layerRange(0, 1)} }, BadShape},
		{"holding of a dense model", func(a *Announcement) { a.Models[0].Holdings = serving(slice(0, 1, 0, 1)) }, NoSuch},
	} {
		a := ringSample()
		tt.change(a)
		checkReason(t, tt.name+", encoded", a.check(), tt.want)
		checkReason(t, tt.name+", decoded", decodeRaw(t, a), tt.want)
	}
	x := newTable(t, Policy{}, modelA, dense)
	_, err := x.Update(Record{"a", 1, t0, time.Minute, encode(t, ringSample())}, t0)
	checkReason(t, "its own neighbour", err, BadNear)
}

// decodeRaw decodes what Encode would refuse to write.
func decodeRaw(t *testing.T, a *Announcement) error {
	t.Helper()
	w := wireAnnouncement{Version: wireVersion, Away: a.Away}
	for i := range a.Models {
		w.Models = append(w.Models, a.Models[i].wire())
	}
	for _, n := range a.Near {
		w.Near = append(w.Near, wireNear{Peer: n.Peer, RTT: int64(n.RTT / time.Microsecond)})
	}
	for i, m := range w.Models { // wire rounds up, also what is negative
		for j := range m.Windows {
			m.Windows[j].Token = int64(a.Models[i].Windows[j].Token / time.Microsecond)
			m.Windows[j].Batched = int64(a.Models[i].Windows[j].Batched / time.Microsecond)
		}
	}
	if len(a.Near) > 1 && a.Near[0].RTT < time.Microsecond { // of the tests of order
		for i := range w.Near {
			w.Near[i].RTT = 1
		}
	}
	b, err := encMode.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Decode(b)
	return err
}

func TestRefusedWindowBytes(t *testing.T) {
	good := encode(t, ringSample())
	for _, tt := range []struct{ name, old, new string }{
		{"window of seven", "880408040000000000", "8704080400000000"},
		{"window of nine", "880408040000000000", "89040804000000000000"},
		{"time that is a float", "88020401183c00000000", "88020401183c0000f90000" + "00"},
		{"time beyond 63 bits", "826162194e20", "8261621bffffffffffffffff"},
		{"room of three", "0882192328191f40", "0883192328191f4000"},
		{"no windows, told", "0784880004030010031907d019012c88040804000000000088020401183c000000008804060219025800000000", "0780"},
		{"null for no MoE layer", "0383080080", "03830800f6"},
		{"neighbour of three", "82616118fa", "83616118fa00"},
		{"neighbour by number", "82616118fa", "820118fa"},
	} {
		old, _ := hex.DecodeString(tt.old)
		fresh, err := hex.DecodeString(tt.new)
		if err != nil || bytes.Count(good, old) != 1 {
			t.Fatalf("%s: %v, %d times in the sample", tt.name, err, bytes.Count(good, old))
		}
		_, err = Decode(bytes.Replace(good, old, fresh, 1))
		checkReason(t, tt.name, err, Malformed)
	}
}

// TestWindowsOfTable: only what counts is listed, as of now.
func TestWindowsOfTable(t *testing.T) {
	x := newTable(t, Policy{}, modelA, dense)
	win := func(begin, end int, s State, lease time.Duration) WindowHolding {
		return WindowHolding{Layers: layerRange(begin, end), State: s, Lease: lease}
	}
	say := func(from string, seq uint64, near []Neighbour, w ...WindowHolding) {
		t.Helper()
		a := &Announcement{Models: []ModelNews{{ID: modelA, Shape: dense, Windows: w}}, Near: near}
		if _, err := x.Update(Record{from, seq, t0, 90 * time.Second, encode(t, a)}, t0); err != nil {
			t.Fatal(err)
		}
	}
	list := func(now time.Time) (s string) {
		for _, w := range x.Windows(modelA, now) {
			s += w.Peer + " " + w.State.String() + " " + w.Layers.String() + "; "
		}
		return s
	}
	want := func(what, want string, now time.Time) {
		t.Helper()
		if got := list(now); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	say("b", 1, []Neighbour{{"a", 3 * time.Millisecond}}, win(0, 4, Serving, 0), win(2, 6, Claimed, 30*time.Second))
	say("a", 1, []Neighbour{{"b", 2 * time.Millisecond}, {"c", time.Millisecond}}, win(4, 8, Leaving, 0))
	all := "a leaving 4:8; b serving 0:4; b claimed 2:6; "
	want("all", all, t0)
	v := x.Version(t0)
	want("a claim that ran out", "a leaving 4:8; b serving 0:4; ", t0.Add(30*time.Second))
	if x.Version(t0.Add(30*time.Second)) == v {
		t.Error("the version is the same after a claim ran out")
	}
	x.Lost("a", t0)
	want("a lost", "b serving 0:4; ", t0.Add(31*time.Second))
	if _, ok := x.RTT("a", "c", t0.Add(31*time.Second)); ok {
		t.Error("a round trip told by who is lost")
	}
	x.Met("a", t0.Add(32*time.Second))
	want("a met", "a leaving 4:8; b serving 0:4; ", t0.Add(32*time.Second))
	for _, tt := range []struct {
		a, b string
		want time.Duration
	}{{"a", "b", 3 * time.Millisecond}, {"b", "a", 3 * time.Millisecond}, {"c", "a", time.Millisecond}, {"b", "c", 0}, {"x", "y", 0}} {
		if d, ok := x.RTT(tt.a, tt.b, t0.Add(32*time.Second)); d != tt.want || ok != (tt.want > 0) {
			t.Errorf("%s to %s: %v, want %v", tt.a, tt.b, d, tt.want)
		}
	}
	want("all expired", "", t0.Add(2*time.Minute))

	x = newTable(t, Policy{}, modelA, dense)
	say("a", 1, nil, WindowHolding{Layers: layerRange(0, 4), State: Serving, Slots: 4, Free: 4})
	v = x.Version(t0)
	say("a", 2, nil, WindowHolding{Layers: layerRange(0, 4), State: Serving, Slots: 4, Free: 1})
	if x.Version(t0) != v || x.Windows(modelA, t0)[0].Free != 1 {
		t.Error("slots that were taken change the coverage, or are not told")
	}
	say("a", 3, nil, win(0, 4, Leaving, 0))
	if x.Version(t0) == v {
		t.Error("the version is the same after a window is left")
	}
}

// TestEndlessWindowClaims: who claims a window for ever and never serves stops to count.
func TestEndlessWindowClaims(t *testing.T) {
	x := newTable(t, Policy{}, modelA, dense)
	for i := range 62 {
		at := t0.Add(time.Duration(i) * time.Minute)
		tell(t, x, "liar", uint64(i+1), at, ModelNews{ID: modelA, Shape: dense, Windows: []WindowHolding{
			{Layers: layerRange(0, 8), State: Loading, Lease: MaxLease}}})
		if got, want := len(x.Windows(modelA, at)) == 1, at.Before(t0.Add(patience)); got != want {
			t.Errorf("after %d minutes it counts: %v", i, got)
		}
	}
}

// TestDenseModel: a model without experts has windows and no cells.
func TestDenseModel(t *testing.T) {
	x := newTable(t, Policy{}, modelA, dense)
	tell(t, x, "a", 1, t0, ModelNews{ID: modelA, Shape: dense, Full: true})
	if c := coverage(t, x, modelA, t0); c.Cells != 0 || c.Sources != 1 || len(c.Layers) != 0 {
		t.Errorf("coverage %+v", c)
	}
	if c, ok := x.Assign(Want{Models: x.Verified(), MaxExperts: 4}, t0); ok {
		t.Errorf("experts %+v of a dense model", c)
	}
	v, err := NewVolunteer("me", Policy{}, sized(1))
	if err != nil {
		t.Fatal(err)
	}
	v.Decide(x, Budget{Disk: 100, Memory: 100}, t0)
	if h := v.Holdings(); len(h) != 0 {
		t.Errorf("volunteers for %v", h)
	}
	_, err = NewMeter(dense)
	checkReason(t, "a meter of no experts", err, BadShape)
}

func FuzzDecodeWindows(f *testing.F) {
	for _, a := range []*Announcement{ringSample(), sample()} {
		b, err := a.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := Decode(b)
		if err != nil {
			return
		}
		if again, err := a.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x is read, and written as %x, %v", b, again, err)
		}
		x := newTable(t, Policy{}, modelB, odd)
		if _, err := x.Update(Record{"peer", 1, t0, time.Minute, b}, t0); err != nil {
			return
		}
		for _, id := range x.Models(t0) {
			for _, w := range x.Windows(id, t0) {
				shape, _, _ := x.shapeLocked(id)
				if w.Layers.Len() < 1 || w.Layers.Begin < 0 || w.Layers.End > shape.Layers || w.Free > w.Slots {
					t.Fatalf("window %+v", w)
				}
			}
		}
	})
}
