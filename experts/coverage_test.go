package experts

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// TestCovered: what nobody computes is named as soon as it is known, without a call, and
// is not any more once somebody is back.
func TestCovered(t *testing.T) {
	layers := []int{0, 1}
	w := newSwarm(t)
	left := newFFN(testWidth, testHidden, layerSlice(0, 40))
	w.start("left", left, nil)
	right := w.start("right", newFFN(testWidth, testHidden, layerSlice(32, testExperts)), nil)
	d := w.dispatcher(hasty)
	waitFor(t, d, "connected", connected)
	if err := d.Covered(layers, testExperts); err != nil {
		t.Errorf("before any call: %v", err)
	}
	for seed := range uint64(2) {
		if err := d.Compute(t.Context(), testCall(seed, 5, false)); err != nil {
			t.Fatal(err)
		}
	}
	covered := func() bool { return d.Covered(layers, testExperts) == nil }
	within(t, 5*time.Second, "all is covered", covered)
	if err := d.Covered(layers, testExperts+1); err == nil || !strings.Contains(err.Error(), "experts 64 of layers 0-1") {
		t.Errorf("one expert more: %v", err)
	}
	for name, strike := range map[string]func() (mend func()){
		"killed": func() func() {
			right.kill()
			return func() { right = w.start("right", newFFN(testWidth, testHidden, layerSlice(32, testExperts)), nil) }
		},
		"frozen": func() func() { right.freeze(true); return func() { right.freeze(false) } },
	} {
		mend := strike()
		within(t, 10*time.Second, name+": its experts are missed", func() bool { return !covered() })
		var e *CoverageError
		if err := d.Covered(layers, testExperts); !errors.As(err, &e) || len(e.Gaps) != 1 || len(e.Gaps[0].Layers) != 2 ||
			len(e.Gaps[0].Experts) != testExperts-40 || !strings.Contains(err.Error(), "no worker for experts 40-63 of layers 0-1: ") {
			t.Errorf("%s: %v", name, err)
		}
		mend()
		within(t, 10*time.Second, name+": it is back", covered)
	}
}

// TestCoveredByOwnCopy: the own copy counts until it turns out to be of no use.
func TestCoveredByOwnCopy(t *testing.T) {
	layers := []int{0, 1}
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	own := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	d := w.dispatcher(func(c *Config) {
		hasty(c)
		c.Local = &Local{Kernel: own, Slices: own.slices}
	})
	waitFor(t, d, "connected", connected)
	for seed := range uint64(2) {
		if err := d.Compute(t.Context(), testCall(seed, 5, false)); err != nil {
			t.Fatal(err)
		}
	}
	a.kill()
	within(t, 5*time.Second, "it is gone", func() bool { return !d.Peers()[0].Connected })
	if err := d.Covered(layers, testExperts); err != nil {
		t.Errorf("with a copy of its own: %v", err)
	}
}
