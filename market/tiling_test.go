package market

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kvasird/ggml/gguf"
)

func windowsOf(bounds ...int) (list []gguf.Range) {
	for i := 0; i < len(bounds); i += 2 {
		list = append(list, layerRange(bounds[i], bounds[i+1]))
	}
	return list
}

func TestTiled(t *testing.T) {
	for _, tt := range []struct {
		name    string
		windows []gguf.Range
		missing string
		chains  int
	}{
		{"nothing", nil, "[0:48]", 0},
		{"the whole", windowsOf(0, 48), "[]", 1},
		{"two and two", windowsOf(0, 24, 24, 48, 0, 16, 16, 48), "[]", 2},
		{"a gap", windowsOf(0, 16, 32, 48), "[16:32]", 0},
		{"two gaps", windowsOf(4, 16, 32, 44), "[0:4 16:32 44:48]", 0},
		{"covered, but the bounds do not meet", windowsOf(0, 24, 16, 48), "[0:16]", 0},
		{"twice the same half", windowsOf(0, 24, 0, 24), "[24:48]", 0},
		{"one gap rather than two", windowsOf(0, 12, 20, 24, 28, 48, 20, 28), "[12:20]", 0},
		{"a shared end", windowsOf(0, 24, 0, 24, 24, 48), "[]", 1},
		{"one chain would block two", windowsOf(0, 8, 8, 16, 16, 48, 0, 16, 8, 48), "[]", 2},
		{"nonsense", windowsOf(-4, 48, 0, 49, 5, 5, 9, 3), "[0:48]", 0},
	} {
		ok, missing := Tiled(tt.windows, 48)
		if fmt.Sprint(missing) != tt.missing || ok != (len(missing) == 0) {
			t.Errorf("%s: %v %v, want %s", tt.name, ok, missing, tt.missing)
		}
		if n := Chains(tt.windows, 48, MaxChains); n != tt.chains {
			t.Errorf("%s: %d chains, want %d", tt.name, n, tt.chains)
		}
	}
	if ok, missing := Tiled(nil, 0); ok || missing != nil {
		t.Errorf("no layers: %v %v", ok, missing)
	}
	if n := Chains(windowsOf(0, 4, 0, 4, 0, 4), 4, 2); n != 2 {
		t.Errorf("%d chains where two are asked for", n)
	}
}

// TestMissingIsLeast compares what Tiled finds with all subsets of layers of a small model.
func TestMissingIsLeast(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	const layers = 8
	for range 500 {
		var windows []gguf.Range
		for range r.IntN(6) {
			b := r.IntN(layers)
			windows = append(windows, layerRange(b, b+1+r.IntN(layers-b)))
		}
		ok, missing := Tiled(windows, layers)
		got := 0
		for _, m := range missing {
			got += m.Len()
		}
		least := layers
		for set := range 1 << layers {
			lacks, with := 0, windows
			for l := range layers {
				if set>>l&1 == 1 {
					lacks++
					with = append(with[:len(with):len(with)], layerRange(l, l+1))
				}
			}
			if chained(with, 0, layers) {
				least = min(least, lacks)
			}
		}
		if got != least || ok != (least == 0) || !chained(append(missing, windows...), 0, layers) {
			t.Fatalf("%v: lacks %v, want %d layers", windows, missing, least)
		}
	}
}

// chained reports whether windows tile what is from a layer on.
func chained(windows []gguf.Range, at, layers int) bool {
	if at == layers {
		return true
	}
	for _, w := range windows {
		if w.Begin == at && chained(windows, w.End, layers) {
			return true
		}
	}
	return false
}

func TestWindowCoverage(t *testing.T) {
	x := newTable(t, Policy{}, modelA, dense)
	w := func(begin, end int, s State) WindowHolding {
		h := WindowHolding{Layers: layerRange(begin, end), State: s}
		if h.wanted() {
			h.Lease = MaxLease
		}
		return h
	}
	say := func(from string, list ...WindowHolding) {
		tell(t, x, from, 1, t0, ModelNews{ID: modelA, Shape: dense, Windows: list})
	}
	if _, ok := x.WindowCoverage(modelB, t0); ok {
		t.Error("coverage of a model that nobody knows")
	}
	say("a", w(0, 4, Serving))
	say("b", w(2, 6, Serving))
	say("c", w(4, 8, Claimed))
	say("d", w(6, 8, Leaving), w(0, 1, Loading))
	c, ok := x.WindowCoverage(modelA, t0)
	if got, want := fmt.Sprintf("%+v %v", c, ok), fmt.Sprintf("{Model:%v Layers:8 Holders:2 Whole:0 "+
		"Segments:[{Layers:0:1 Serving:1 Claimed:1} {Layers:1:2 Serving:1 Claimed:0} {Layers:2:4 Serving:2 Claimed:0} "+
		"{Layers:4:6 Serving:1 Claimed:1} {Layers:6:8 Serving:0 Claimed:1}] Uncovered:[6:8] Chains:0 Missing:[4:8]} true", modelA); got != want {
		t.Errorf("coverage %s\nwant %s", got, want)
	}
	say("e", w(0, 8, Serving))
	say("f", w(4, 8, Serving))
	if c, _ := x.WindowCoverage(modelA, t0); c.Chains != 2 || c.Whole != 1 || c.Holders != 4 || c.Missing != nil || c.Uncovered != nil {
		t.Errorf("coverage of two chains %+v", c)
	}
}
