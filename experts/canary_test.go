package experts

import (
	"encoding/binary"
	"math"
	"strings"
	"testing"
	"time"

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
		within(t, 5*time.Second, "connected", func() bool {
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
