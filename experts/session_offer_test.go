package experts

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/p2p"
)

// changing is a worker that greets honestly, computes zeros, and says what it is told to say
// once the dispatcher asks about a program.
func (w *swarm) changing(id string, change func(s *script, o offer)) {
	o := offer{wireVersion, testModel, []Slice{layerSlice(0, 8)}, 4096, 4096, 64, []Precision{F32}, serving}
	w.answering(id, o, func(s *script, f p2p.Frame) {
		switch f.Type {
		case frameProgram:
			s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
			change(s, o)
		case frameCall:
			s.send(frameReply, f.ID, make([]byte, 4*testWidth*binary.LittleEndian.Uint32(f.Payload[16:])))
		}
	})
}

// TestHostileOffers has workers change what they offer in ways that end the session.
func TestHostileOffers(t *testing.T) {
	send := func(s *script, id uint64, o offer) { s.send(frameOffer, id, encodeControl(o)) }
	with := func(o offer, change func(*offer)) offer {
		change(&o)
		return o
	}
	tests := []struct {
		name   string
		change func(s *script, o offer)
		text   string
	}{
		{"number 0", func(s *script, o offer) { send(s, 0, o) }, "offer 0 after offer 0"},
		{"flood", func(s *script, o offer) { send(s, 1, o); s.send(frameOffer, 2, nil); send(s, 3, o) }, "offer"},
		{"garbled", func(s *script, _ offer) { s.send(frameOffer, 1, []byte{0xff}) }, "offer:"},
		{"too many", func(s *script, o offer) {
			send(s, 1, with(o, func(o *offer) { o.Slices = make([]Slice, maxSlices+1) }))
		}, "max number of elements"},
		{"overlap", func(s *script, o offer) {
			send(s, 1, with(o, func(o *offer) { o.Slices = []Slice{layerSlice(0, 4), layerSlice(3, 9)} }))
		}, "overlap"},
		{"empty slice", func(s *script, o offer) {
			send(s, 1, with(o, func(o *offer) { o.Slices = []Slice{layerSlice(4, 4)} }))
		}, "empty or out of bounds"},
		{"other model", func(s *script, o offer) { send(s, 1, with(o, func(o *offer) { o.Model = "blake3:x" })) }, "blake3:x"},
		{"other limits", func(s *script, o offer) { send(s, 1, with(o, func(o *offer) { o.MaxPairs = 1 })) }, "other limits"},
		{"other precisions", func(s *script, o offer) {
			send(s, 1, with(o, func(o *offer) { o.Precisions = append(slices.Clone(o.Precisions), BF16) }))
		}, "other limits"},
		{"unknown state", func(s *script, o offer) { send(s, 1, with(o, func(o *offer) { o.State = 9 })) }, "state 9"},
		{"frame of the other side", func(s *script, _ offer) { s.send(frameTaken, 0, []byte{0}) }, "type 12"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newSwarm(t)
			var faults atomic.Int64
			w.changing("liar", test.change)
			d := w.dispatcher(func(c *Config) {
				c.Fault = func(peer string, reason error) {
					if peer != "liar" || !errors.Is(reason, ErrProtocol) {
						t.Errorf("fault of %s: %v", peer, reason)
					}
					faults.Add(1)
				}
			})
			waitFor(t, d, "connected", connected)
			d.Compute(t.Context(), testCall(0, 1, false))
			waitFor(t, d, "the session ends", func(p PeerStatus) bool { return strings.Contains(p.Trouble, test.text) })
			within(t, patient, "the fault is told", func() bool { return faults.Load() > 0 })
		})
	}
}

// TestOffersAreBounded has a worker change its offer as soon as it may, for a while: the
// dispatcher takes so many between two heartbeats, and serves others meanwhile.
func TestOffersAreBounded(t *testing.T) {
	w := newSwarm(t)
	var taken atomic.Int64
	var began atomic.Bool
	o := offer{wireVersion, testModel, []Slice{layerSlice(0, 8)}, 4096, 4096, 64, []Precision{F32}, serving}
	w.answering("restless", o, func(s *script, f p2p.Frame) {
		switch f.Type {
		case frameProgram:
			s.send(frameError, f.ID, putError(nil, CodeProgram, "no"))
			if !began.Swap(true) {
				s.send(frameOffer, 1, encodeControl(o))
			}
		case frameTaken:
			taken.Add(1)
			s.send(frameOffer, f.ID+1, encodeControl(o))
		}
	})
	w.start("honest", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { c.Heartbeat = time.Hour })
	waitFor(t, d, "connected", connected)
	stop := callers(t, d, 2)
	within(t, patient, "as many as are taken", func() bool { return taken.Load() == offersPerBeat })
	time.Sleep(100 * time.Millisecond)
	if n := taken.Load(); n != offersPerBeat || stop() == 0 {
		t.Errorf("%d offers were taken, want %d until the next heartbeat", n, offersPerBeat)
	}
}

// TestLateRefusal does not hold against a worker that it refuses what it said it does not offer.
func TestLateRefusal(t *testing.T) {
	w := newSwarm(t)
	var tried atomic.Bool
	o := offer{wireVersion, testModel, []Slice{layerSlice(0, testExperts)}, 4096, 4096, 64, []Precision{F32}, serving}
	w.answering("a", o, func(s *script, f p2p.Frame) {
		switch {
		case f.Type == frameProgram:
			s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
		case f.Type == frameCall && tried.Swap(true):
			less := o
			less.Slices = nil
			s.send(frameOffer, 1, encodeControl(less))
			s.send(frameError, f.ID, putError(nil, CodeExpert, "not here any more"))
		case f.Type == frameCall:
			s.send(frameReply, f.ID, make([]byte, 4*testWidth*binary.LittleEndian.Uint32(f.Payload[16:])))
		}
	})
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	var missing *MissingError
	if err := d.Compute(t.Context(), testCall(0, 1, false)); !errors.As(err, &missing) {
		t.Errorf("got %v", err)
	}
	if p := d.Peers()[0]; p.Suspect || p.Failed != 0 || len(p.Slices) != 0 {
		t.Errorf("got %+v, want no suspicion and no slices", p)
	}
}
