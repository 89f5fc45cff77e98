package experts

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"

	"kvasird/p2p"
)

// TestCanary tries every peer, also those that no call reached, and finds the one that is
// wrong. What each did is counted.
func TestCanary(t *testing.T) {
	w := newSwarm(t)
	honest := newFFN(testWidth, testHidden, layerSlice(0, 32), layerSlice(32, testExperts))
	w.start("honest", honest, nil)
	spare := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	w.start("spare", spare, nil)
	d := w.dispatcher(nil)
	connectedTo := func(d *Dispatcher, n int) {
		within(t, patient, "connected", func() bool {
			count := 0
			for _, p := range d.Peers() {
				if p.Connected {
					count++
				}
			}
			return count == n
		})
	}
	connectedTo(d, 2)
	if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
		t.Fatal(err)
	}
	before := [2]int64{honest.calls.Load(), spare.calls.Load()}
	if err := d.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	if honest.calls.Load() == before[0] || spare.calls.Load() == before[1] {
		t.Errorf("calls went from %v to %d, %d: not every worker was tried", before, honest.calls.Load(), spare.calls.Load())
	}
	w.lie("liar", func(s *script, f p2p.Frame, pairs int) {
		b := make([]byte, 4*pairs*testWidth)
		binary.LittleEndian.PutUint32(b, math.Float32bits(float32(math.NaN())))
		s.send(frameReply, f.ID, b)
	})
	d = w.dispatcher(nil) // ends before the liar does
	connectedTo(d, 3)
	if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil {
		t.Fatal(err)
	}
	err := d.Canary(t.Context())
	if err == nil || !strings.Contains(err.Error(), "peer liar") || strings.Contains(err.Error(), "peer honest") {
		t.Errorf("got %v, want an error about the liar alone", err)
	}
	for _, p := range d.Peers() {
		rows := uint64(0)
		for _, r := range p.Rows {
			rows += r.Rows
		}
		if liar := p.ID == "liar"; liar != p.Suspect || liar != (rows == 0) || liar != (p.Failed > 0) {
			t.Errorf("%s: suspect %v, %d rows, %d failed", p.ID, p.Suspect, rows, p.Failed)
		}
	}
}

// TestCanaryGate has workers whose rows are wrong join a worker that serves: they are given
// canaries and never a call.
func TestCanaryGate(t *testing.T) { bothReaders(t, canaryGate) }

func canaryGate(t *testing.T, noLead bool) {
	for _, local := range []bool{false, true} {
		t.Run(fmt.Sprintf("own copy=%v", local), func(t *testing.T) {
			w := newSwarm(t)
			liar := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
			liar.lies.Store(true)
			honest := w.start("honest", wholeLayer(), nil)
			var faults atomic.Int64
			d := w.dispatcher(func(c *Config) {
				c.NoLead = noLead
				c.Fault = func(string, error) { faults.Add(1) }
				if local {
					own := wholeLayer()
					c.Local = &Local{Kernel: own, Slices: own.slices}
				}
			})
			waitFor(t, d, "connected", connected)
			if err := d.Compute(t.Context(), testCall(0, 1, false)); err != nil { // honest serves
				t.Fatal(err)
			}
			stop := callers(t, d, 3)
			w.start("liar", liar, nil)
			d.AddPeer("liar")
			caught := func(p PeerStatus) bool {
				return p.ID == "honest" && p.Trouble == "" || p.ID == "liar" && p.Connected && local == (p.Failed > 0) &&
					strings.Contains(p.Trouble, "canary: its row of layer")
			}
			waitFor(t, d, "caught", caught)
			before := honest.kernel.calls.Load()
			within(t, patient, "more answers", func() bool { return honest.kernel.calls.Load() > before+100 })
			if stop() == 0 || local != (faults.Load() > 0) { // one against one is no proof
				t.Errorf("no answers, or %d faults", faults.Load())
			}
			if local { // there is no doubt who is right
				honest.kill()
				call := testCall(0, 3, false)
				poison(call)
				if err := d.Compute(t.Context(), call); err != nil || maxDiff(call.Out, alone(t, wholeLayer(), call)) != 0 {
					t.Errorf("without the honest worker: %v, or wrong rows", err)
				}
			}
		})
	}
}

// TestCanaryOutvoted has a worker whose rows are wrong serve alone, until two others agree that
// they are.
func TestCanaryOutvoted(t *testing.T) {
	w := newSwarm(t)
	liar := wholeLayer()
	liar.lies.Store(true)
	w.start("liar", liar, nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	call := testCall(0, 1, false)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err) // there is nobody to compare with
	}
	for _, id := range []string{"one", "two"} {
		w.start(id, wholeLayer(), nil)
		d.AddPeer(id)
	}
	waitFor(t, d, "outvoted", func(p PeerStatus) bool {
		return p.Connected && (p.ID == "liar") == strings.Contains(p.Trouble, "not that of 2 other workers")
	})
	for range 50 {
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil || maxDiff(call.Out, alone(t, wholeLayer(), call)) != 0 {
			t.Fatalf("%v, or wrong rows", err)
		}
	}
}

// TestCanaryHeals takes a worker in once its rows are right.
func TestCanaryHeals(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", wholeLayer(), nil)
	p.kernel.fail.Store(true)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	if err := d.Compute(t.Context(), testCall(0, 1, false)); err == nil || !strings.Contains(err.Error(), "device lost") {
		t.Errorf("got %v, want the reason", err)
	}
	p.kernel.fail.Store(false)
	within(t, patient, "computed", func() bool { return d.Compute(context.Background(), testCall(0, 1, false)) == nil })
	waitFor(t, d, "no trouble", func(p PeerStatus) bool { return p.Trouble == "" })
}

func TestNear(t *testing.T) {
	a := []float32{1, -2, 3, 0}
	for _, test := range []struct {
		b    []float32
		want bool
	}{
		{[]float32{1, -2, 3, 0}, true}, {[]float32{1.001, -2, 3, 0.002}, true},
		{[]float32{-1, 2, -3, 0}, false}, {[]float32{3, 0, 1, -2}, false}, {[]float32{0, 0, 0, 0}, false}, {[]float32{1.2, -2, 3, 0}, false},
	} {
		if near(a, test.b) != test.want || near(test.b, a) != test.want {
			t.Errorf("near to %v: %v, want %v", test.b, !test.want, test.want)
		}
	}
	if !near(make([]float32, 3), make([]float32, 3)) {
		t.Error("two zero rows differ")
	}
}
