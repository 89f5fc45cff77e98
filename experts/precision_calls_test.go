package experts

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"
)

// through is the answer to a call whose rows and answer were encoded once each.
func through(t *testing.T, p Precision, whole *ffn, call *Call) []float32 {
	t.Helper()
	c := *call
	c.Rows = roundTrip(t, p, call.Rows, call.RowWidth)
	return roundTrip(t, p, alone(t, whole, &c), call.OutWidth)
}

// TestCallsInPrecisions: in every precision the answer is, bit for bit, that of the layer for
// the rows as they were encoded, encoded again; in calls that are computed at once, that wait and
// are computed together, and that travel in pieces.
func TestCallsInPrecisions(t *testing.T) {
	whole := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	for _, p := range precisions {
		t.Run(p.String(), func(t *testing.T) {
			w := newSwarm(t)
			w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 40)), nil)
			w.start("b", newFFN(testWidth, testHidden, layerSlice(20, testExperts)), func(c *WorkerConfig) { c.MaxPairs = 10 })
			d := w.dispatcher(func(c *Config) { c.Precision = p })
			waitFor(t, d, "connected", connected)
			var wg sync.WaitGroup
			for seed := range uint64(12) {
				call := testCall(seed, 1+int(seed)*5, seed%3 == 0)
				want := through(t, p, whole, call)
				wg.Go(func() {
					for range 10 {
						poison(call)
						if err := d.Compute(t.Context(), call); err != nil {
							t.Error(err)
							return
						}
						if diff := maxDiff(call.Out, want); diff != 0 {
							t.Errorf("call %d: maximum difference %g", seed, diff)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestRowsThatDoNotFit: rows that the precision cannot hold travel in f32, and so does an
// answer that it cannot hold, to rows that it can.
func TestRowsThatDoNotFit(t *testing.T) {
	const great, big = 70000, 600 // beyond f16; whose product with itself is
	for _, test := range []struct {
		name  string
		scale float32
		rows  Precision
	}{{"rows", great, F32}, {"answer", big, F16}} {
		t.Run(test.name, func(t *testing.T) {
			w := newSwarm(t)
			k := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
			w.start("a", k, nil)
			d := w.dispatcher(func(c *Config) { c.Precision = F16 })
			waitFor(t, d, "connected", connected)
			call := testCall(2, 2, false)
			for i := range call.Rows {
				call.Rows[i] *= test.scale
			}
			in := *call
			in.Rows = roundTrip(t, test.rows, call.Rows, call.RowWidth)
			want := alone(t, newFFN(testWidth, testHidden, layerSlice(0, testExperts)), &in)
			if F16.fits(want) {
				t.Fatalf("the answer, at most %g, fits", math.Float32frombits(maxAbs(want)))
			}
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			if diff := maxDiff(call.Out, want); diff != 0 {
				t.Errorf("maximum difference %g", diff)
			}
		})
	}
}

// TestWorkerWithF32Only: a worker that offers no other precision gets none.
func TestWorkerWithF32Only(t *testing.T) {
	for _, offered := range [][]Precision{{F32}, {F32, F16}} {
		w := newSwarm(t)
		o := offer{Version: wireVersion, Model: testModel, Slices: []Slice{layerSlice(0, testExperts)},
			MaxRows: 64, MaxPairs: 64, Queue: 8, Precisions: offered}
		var mu sync.Mutex
		var words []uint32
		var wanted Precision
		w.answering("old", o, func(s *script, f p2p.Frame) {
			switch f.Type {
			case frameWant:
				got, err := decodeWant(f.Payload)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				wanted = got.Precision
				mu.Unlock()
			case frameProgram:
				s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
			case frameCall:
				mu.Lock()
				words = append(words, binary.LittleEndian.Uint32(f.Payload[4:]))
				mu.Unlock()
				pairs := binary.LittleEndian.Uint32(f.Payload[16:])
				s.send(frameReply, f.ID, make([]byte, 4*pairs*testWidth))
			}
		})
		d := w.dispatcher(func(c *Config) { c.Precision = Q8 })
		waitFor(t, d, "connected", connected)
		if err := d.Compute(t.Context(), testCall(0, 2, false)); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		if wanted != F32 || len(words) == 0 || slices.ContainsFunc(words, func(p uint32) bool { return p != uint32(F32) }) {
			t.Errorf("offered %v: %v is wanted, calls in %v", offered, wanted, words)
		}
		mu.Unlock()
	}
}

// TestLyingInPrecisions has an answer that is not finite, and of a wrong length, in each.
func TestLyingInPrecisions(t *testing.T) {
	for _, p := range []Precision{F16, BF16, Q8} {
		for _, lie := range []string{"not finite", "bytes, want"} {
			t.Run(p.String()+" "+lie, func(t *testing.T) {
				w := newSwarm(t)
				o := offer{Version: wireVersion, Model: testModel, Slices: []Slice{layerSlice(0, testExperts)},
					MaxRows: 64, MaxPairs: 64, Queue: 8, Precisions: precisions}
				w.answering("liar", o, func(s *script, f p2p.Frame) {
					switch f.Type {
					case frameProgram:
						s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
					case frameCall:
						pairs := int(binary.LittleEndian.Uint32(f.Payload[16:]))
						b := make([]byte, p.size(pairs, testWidth))
						copy(b, []byte{0xc0, 0xff})
						if lie != "not finite" {
							b = b[1:]
						}
						s.send(frameReply, f.ID, b)
					}
				})
				d := w.dispatcher(func(c *Config) { c.Precision = p })
				waitFor(t, d, "connected", connected)
				if err := d.Compute(t.Context(), testCall(0, 2, false)); err == nil || !strings.Contains(err.Error(), lie) {
					t.Errorf("got %v, want an error with %q", err, lie)
				}
			})
		}
	}
}

// TestCallThatWasNotAgreed: a call in a precision that the session did not agree on ends it.
func TestCallThatWasNotAgreed(t *testing.T) {
	w := newSwarm(t)
	p := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 8)), nil)
	s := greeted(t, w, "a") // agrees on f32
	s.send(frameProgram, 1, putProgram(nil, 0, 0, programFor(testWidth, testHidden)))
	s.must(frameResult)
	b := make([]byte, callSize(F16, 1, 1, testWidth, false))
	layCall(b, callFrame{deadline: 100, precision: F16, rows: 1, width: testWidth}, 1)
	s.send(frameCall, 2, b)
	e, err := decodeError(s.must(frameError).Payload)
	if err != nil || e.Code != CodeProtocol || !strings.Contains(e.Text, "precision word 0x2") {
		t.Errorf("got %v, %v", e, err)
	}
	if err := <-p.errs; err == nil || !strings.Contains(err.Error(), "precision word") {
		t.Errorf("the session ended with %v", err)
	}
}

// TestCallsDoNotAllocate counts both sides, which share this process, in every precision.
func TestCallsDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for i, p := range slices.Concat(precisions, precisions) {
		sums := SumsOff - Sums(i/len(precisions)) // off, then on
		t.Run(p.String()+", sums "+sums.String(), func(t *testing.T) {
			w := newSwarm(t)
			for _, id := range []string{"a", "b"} {
				first := map[string]int{"a": 0, "b": 32}[id]
				worker, err := NewWorker(WorkerConfig{
					Model: testModel, Kernel: mirror{testWidth}, Slices: []Slice{layerSlice(first, first+32)},
				})
				if err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				t.Cleanup(func() { worker.Close(); wg.Wait() })
				w.listen(id, func(c net.Conn) { worker.Serve(context.Background(), c) }, &wg)
			}
			d := w.dispatcher(func(c *Config) { c.Heartbeat, c.Precision, c.Sums = time.Minute, p, sums })
			waitFor(t, d, "connected", connected)
			call := weighted(testCall(0, 4, false))
			for i := range call.Used { // of one worker
				call.IDs[i] = int32(i)
			}
			compute := func() {
				if err := d.Compute(t.Context(), call); err != nil {
					t.Fatal(err)
				}
			}
			for range 100 {
				compute()
			}
			if n := testing.AllocsPerRun(500, compute); n != 0 {
				t.Errorf("%v allocations per call", n)
			}
		})
	}
}
