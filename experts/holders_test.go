package experts

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"
)

var wholeModel = layerSlice(0, testExperts)

// TestSetHolders keeps sessions to who is announced, to all of few and to those needed of many.
func TestSetHolders(t *testing.T) {
	w := newSwarm(t)
	d := w.dispatcher(func(c *Config) { c.MostPeers, c.Replicas = 4, 1 })
	is := func(want ...string) {
		t.Helper()
		if got := d.PeerIDs(); !slices.Equal(got, want) {
			t.Errorf("sessions to %v, want %v", got, want)
		}
	}
	d.AddPeer("pinned")
	holder := func(id string, ms int, s Slice) Holder {
		return Holder{Peer: id, Slices: []Slice{s}, RTT: time.Duration(ms) * time.Millisecond}
	}
	left, right := layerSlice(0, 32), layerSlice(32, 64)
	d.SetHolders(wholeModel, []Holder{holder("a", 5, left), holder("b", 9, right), holder("pinned", 1, left)})
	is("a", "b", "pinned")
	d.SetHolders(wholeModel, []Holder{holder("b", 9, right)})
	is("b", "pinned")
	var many []Holder
	for i := range 20 {
		many = append(many, holder(fmt.Sprintf("n%02d", i), 10+i, left))
	}
	huge := Slice{EndLayer: math.MaxInt32, EndExpert: math.MaxInt32} // of a liar: it is far
	many = append(many, holder("far", 900, right), holder("huge", 950, huge), holder("invalid", 1, Slice{FirstExpert: 9}))
	d.SetHolders(wholeModel, many)
	if got := d.PeerIDs(); len(got) != 5 || !slices.Contains(got, "far") || !slices.Contains(got, "n00") || slices.Contains(got, "huge") {
		t.Errorf("sessions to %v, want the nearest, and far, which alone is no liar", got)
	}
	d.SetHolders(wholeModel, nil)
	is("pinned")
	d.RemovePeer("pinned")
	is()
	d.Close()
	d.SetHolders(wholeModel, many)
	is()
}

// TestHoldersStay does not leave a peer that serves for one that is not much nearer.
func TestHoldersStay(t *testing.T) {
	w := newSwarm(t)
	w.start("serving", wholeLayer(), nil)
	d, err := NewDispatcher(Config{Model: testModel, Dialer: w, MostPeers: 1, Replicas: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	list := []Holder{{Peer: "serving", Slices: []Slice{wholeModel}, RTT: 30 * time.Millisecond}}
	d.SetHolders(wholeModel, list)
	waitFor(t, d, "connected", connected)
	list = append(list, Holder{Peer: "other", Slices: []Slice{wholeModel}, RTT: 20 * time.Millisecond})
	d.SetHolders(wholeModel, list)
	if got := d.PeerIDs(); !slices.Equal(got, []string{"serving"}) {
		t.Errorf("sessions to %v", got)
	}
	list[1].RTT = 10 * time.Millisecond
	d.SetHolders(wholeModel, list)
	if got := d.PeerIDs(); !slices.Equal(got, []string{"other"}) {
		t.Errorf("sessions to %v, want the one that is three times as near", got)
	}
}

// TestDemand counts what the router chose, whoever computed it, and no canaries.
func TestDemand(t *testing.T) {
	w := newSwarm(t)
	w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 40)), nil)
	own := newFFN(testWidth, testHidden, layerSlice(40, testExperts))
	d := w.dispatcher(func(c *Config) {
		c.Local = &Local{Kernel: own, Slices: own.slices}
	})
	waitFor(t, d, "connected", connected)
	if got := d.Demand(); len(got) != 0 {
		t.Errorf("before any call: %v", got)
	}
	want := [2][testExperts]uint64{}
	var wg sync.WaitGroup
	for seed := range uint64(4) {
		call := testCall(seed, 5, false)
		for _, id := range call.IDs {
			want[call.Layer][id] += 10
		}
		wg.Go(func() {
			for range 10 {
				if err := d.Compute(t.Context(), call); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	got := d.Demand()
	if len(got) != 2 {
		t.Fatalf("%d layers", len(got))
	}
	for l := range want {
		for e, n := range want[l] {
			if e < len(got[l]) && got[l][e] != n || e >= len(got[l]) && n != 0 {
				t.Errorf("layer %d, expert %d: want %d, got %v", l, e, n, got[l])
			}
		}
	}
	p := &program{}
	if n := testing.AllocsPerRun(100, func() { p.count(d, []int32{3, 63}) }); n != 0 {
		t.Errorf("%v allocations per count", n)
	}
	p.count(d, []int32{200})
	if table := *p.demand.Load(); len(table) != 256 || table[3].Load() == 0 || table[200].Load() != 1 {
		t.Errorf("after it grew: %d experts, %d and %d", len(table), table[3].Load(), table[200].Load())
	}
}
