package experts

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"
)

// weighted gives a call the router's weights.
func weighted(c *Call) *Call {
	rng := rand.New(rand.NewPCG(uint64(len(c.IDs)), 5))
	c.Weights, c.Sum = make([]float32, len(c.IDs)), make([]float32, len(c.IDs)/c.Used*c.OutWidth)
	for i := range c.Weights {
		c.Weights[i] = rng.Float32() - 0.3
	}
	return c
}

// sumsOf is what a backbone's graph makes of rows.
func sumsOf(c *Call, rows []float32) []float32 {
	sums := make([]float32, len(c.Sum))
	for p, weight := range c.Weights {
		for i := range c.OutWidth {
			product := rows[p*c.OutWidth+i] * weight
			if p%c.Used == 0 {
				sums[p/c.Used*c.OutWidth+i] = product
			} else {
				sums[p/c.Used*c.OutWidth+i] += product
			}
		}
	}
	return sums
}

// off is how far an answer lies from the layer's rows, or from their sums.
func off(c *Call, want []float32) float64 {
	if c.Summed {
		return maxDiff(c.Sum, sumsOf(c, want))
	}
	return maxDiff(c.Out, want)
}

// TestSumsOfWhole: sums of all of a token's experts are, bit for bit, those of the rows; in calls
// that are computed at once, that wait and are computed together, and that travel in pieces.
func TestSumsOfWhole(t *testing.T) { bothReaders(t, sumsOfWholes) }

func sumsOfWholes(t *testing.T, noLead bool) {
	w := newSwarm(t)
	w.start("a", wholeLayer(), func(c *WorkerConfig) { c.MaxPairs = 27 })
	served := newLedger()
	d := w.dispatcher(func(c *Config) { c.Sums, c.NoLead, c.Served = SumsOn, noLead, served.add })
	waitFor(t, d, "connected", connected)
	var wg sync.WaitGroup
	var pairs int
	for seed := range uint64(8) {
		call := weighted(testCall(seed, 1+int(seed)*5, seed%4 == 3))
		want := alone(t, wholeLayer(), call)
		pairs += 10 * len(call.IDs)
		wg.Go(func() {
			for range 10 {
				poison(call)
				if err := d.Compute(t.Context(), call); err != nil {
					t.Error(err)
					return
				}
				if diff := off(call, want); diff != 0 || call.Summed != (seed%4 != 3) {
					t.Errorf("call %d: maximum difference %g, summed: %v", seed, diff, call.Summed)
					return
				}
			}
		})
	}
	wg.Wait()
	if served.of("a") != pairs {
		t.Errorf("told of %d pairs, want %d", served.of("a"), pairs)
	}
}

// TestSumsOfParts: where rows are exact only whole sums are asked for, and these are; where they are
// not, of a token's experts at several workers and here each sends its sum.
func TestSumsOfParts(t *testing.T) {
	for _, p := range precisions {
		t.Run(p.String(), func(t *testing.T) {
			w := newSwarm(t)
			w.start("a", newFFN(testWidth, testHidden, layerSlice(0, 40)), nil)
			w.start("b", newFFN(testWidth, testHidden, layerSlice(30, testExperts)), nil)
			d := w.dispatcher(func(c *Config) {
				c.Sums, c.Precision = SumsOn, p
				c.Local = &Local{Kernel: wholeLayer(), Slices: []Slice{layerSlice(0, 8)}, First: true}
			})
			waitFor(t, d, "connected", connected)
			call := weighted(testCall(2, 30, false))
			for i := range 8 { // one token is whole at a worker
				call.IDs[8+i] = int32(50 + i)
			}
			want := alone(t, wholeLayer(), call)
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			if !call.Summed {
				t.Fatal("no sum")
			}
			if diff := off(call, want); p == F32 && diff != 0 {
				t.Errorf("maximum difference %g", diff)
			}
			if !near(call.Sum, sumsOf(call, want)) {
				t.Errorf("maximum difference %g", off(call, want))
			}
		})
	}
}

// TestSumsThatDoNotFit: weights that are not finite have the rows sent, and nobody is blamed.
func TestSumsThatDoNotFit(t *testing.T) {
	w := newSwarm(t)
	w.start("a", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) {
		c.Sums, c.Fault = SumsOn, func(peer string, err error) { t.Errorf("%s: %v", peer, err) }
	})
	waitFor(t, d, "connected", connected)
	call := weighted(testCall(2, 3, false))
	call.Weights[5] = float32(math.Inf(1))
	poison(call)
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	if diff := off(call, alone(t, wholeLayer(), call)); diff != 0 || call.Summed {
		t.Errorf("maximum difference %g, summed: %v", diff, call.Summed)
	}
}

// TestLyingSums has sums that are not finite, and rows where sums were asked for.
func TestLyingSums(t *testing.T) {
	for _, lie := range []string{"not finite", "bytes, want"} {
		t.Run(lie, func(t *testing.T) {
			w := newSwarm(t)
			o := offer{Version: wireVersion, Model: testModel, Slices: []Slice{layerSlice(0, testExperts)},
				MaxRows: 64, MaxPairs: 64, Queue: 8, Precisions: []Precision{F32}}
			w.answering("liar", o, func(s *script, f p2p.Frame) {
				switch f.Type {
				case frameProgram:
					s.send(frameResult, f.ID, putResult(nil, testWidth, testWidth))
				case frameCall:
					n := int(binary.LittleEndian.Uint32(f.Payload[16:])) // pairs
					if sums := f.Payload[5] == 1; sums && lie == "not finite" {
						n = int(binary.LittleEndian.Uint32(f.Payload[12:]))
					}
					b := make([]byte, F32.size(n, testWidth))
					if f.Payload[5] == 1 {
						copy(b, []byte{0, 0, 0xc0, 0x7f})
					}
					s.send(frameReply, f.ID, b)
				}
			})
			d := w.dispatcher(func(c *Config) { c.Sums = SumsOn })
			waitFor(t, d, "connected", connected)
			if err := d.Compute(t.Context(), weighted(testCall(0, 2, false))); err == nil || !strings.Contains(err.Error(), lie) {
				t.Errorf("got %v, want an error with %q", err, lie)
			}
		})
	}
}

// TestRacesOfSums hedges nearly every call, so that sums and rows of the same pairs meet.
func TestRacesOfSums(t *testing.T) {
	for _, p := range []Precision{F32, BF16} {
		t.Run(p.String(), func(t *testing.T) {
			bothReaders(t, func(t *testing.T, noLead bool) {
				races(t, func(c *Config) { c.NoLead, c.Sums, c.Precision = noLead, SumsOn, p })
			})
		})
	}
}

// TestClaims: a sum is taken with what was filled of it before, or not at all.
func TestClaims(t *testing.T) {
	r := &run{call: &Call{OutWidth: 1, Used: 4, RowsPerToken: 1, Out: make([]float32, 4), Weights: []float32{1, 2, 3, 4}, Sum: make([]float32, 1)}, has: make([]uint8, 4)}
	r.race.begin(4, nil, nil)
	answer := func(sums bool, pairs []int32, values ...float32) int {
		p := &part{run: r, hedged: true, sums: sums, pairs: pairs, rows: 1, as: F32}
		b := make([]byte, 4*len(values))
		F32.put(b, values, 1)
		if err := p.fill(b); err != nil {
			t.Fatal(err)
		}
		return p.filled
	}
	for i, step := range []struct {
		sums        bool
		pairs       []int32
		values      []float32
		filled, sum int
	}{
		{false, []int32{1}, []float32{10}, 1, 20},
		{true, []int32{1, 2}, []float32{500}, 1, 500},                // over the row of a pair in it
		{false, []int32{0, 1}, []float32{1, 10}, 1, 501},             // of a pair that it has, not
		{true, []int32{0, 1, 2, 3}, []float32{7000}, 1, 7000},        // over the smaller one
		{true, []int32{2, 3}, []float32{9}, 0, 7000},                 // in the larger one, not
		{false, []int32{0, 1, 2, 3}, []float32{1, 1, 1, 1}, 0, 7000}, // nor its rows
	} {
		filled := answer(step.sums, step.pairs, step.values...)
		r.addUp()
		if filled != step.filled || int(r.call.Sum[0]) != step.sum {
			t.Errorf("step %d: %d filled and the sum %v, want %d and %d", i, filled, r.call.Sum, step.filled, step.sum)
		}
	}
}

// narrowConn has a rate.
type narrowConn struct{ net.Conn }

func (c narrowConn) Read(b []byte) (int, error) {
	time.Sleep(time.Millisecond)
	return c.Conn.Read(b[:min(len(b), 2<<10)])
}

type narrowSwarm struct{ *swarm }

func (w narrowSwarm) Dial(ctx context.Context, id string) (net.Conn, error) {
	c, err := w.swarm.Dial(ctx, id)
	if err != nil {
		return nil, err
	}
	return narrowConn{c}, nil
}

// TestSumsWhereBytesTakeLong: rows that come slowly have sums asked for.
func TestSumsWhereBytesTakeLong(t *testing.T) {
	w := newSwarm(t)
	w.start("a", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { c.Dialer = narrowSwarm{w} })
	waitFor(t, d, "connected", connected)
	call := weighted(testCall(2, 32, false))
	want := alone(t, wholeLayer(), call)
	for !call.Summed && !t.Failed() {
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		if diff := off(call, want); diff != 0 {
			t.Errorf("maximum difference %g", diff)
		}
	}
}

func TestNarrow(t *testing.T) {
	const mbit = 8000. // ns of a byte at 1 Mbit/s
	tests := []struct {
		perByte float64
		base    time.Duration
		bytes   int
		want    bool
	}{
		{0, time.Millisecond, 1 << 20, false}, // nothing is known
		{mbit / 20, time.Millisecond, 7 * 4 * 3072, true},
		{mbit / 1000, time.Millisecond, 7 * 4 * 3072, true},
		{mbit / 20, 20 * time.Millisecond, 3 * 4 * 256, false},
		{mbit / 20, time.Millisecond, 3 * 4 * 256, true},
		{0.5, 60 * time.Microsecond, 7 * 4 * 3072, false}, // loopback
	}
	for _, test := range tests {
		var l latency
		l.heard(test.perByte)
		l.pong(test.base, true)
		if got := l.narrow(test.bytes); got != test.want {
			t.Errorf("%d bytes of %g ns over %v: narrow is %v", test.bytes, test.perByte, test.base, got)
		}
	}
	var l latency
	l.heard(mbit)
	calls := 0
	for ; l.narrow(1000); calls++ {
		l.heard(0)
	}
	if calls < 100 || calls > 1000 {
		t.Errorf("what bytes take is forgotten after %d calls that say nothing of it", calls)
	}
}

func TestParseSums(t *testing.T) {
	for _, s := range []Sums{SumsAuto, SumsOn, SumsOff} {
		if got, err := ParseSums(s.String()); err != nil || got != s {
			t.Errorf("%v: got %v, %v", s, got, err)
		}
	}
	if _, err := ParseSums("yes"); err == nil || !strings.Contains(err.Error(), "want auto, on or off") {
		t.Errorf("got %v", err)
	}
}

// BenchmarkSums is what adding up costs: the rows of 8 experts, 3072 wide.
func BenchmarkSums(b *testing.B) {
	c := &callFrame{rows: 1, row: make([]int32, benchUsed), weight: slices.Repeat([]float32{0.5}, benchUsed)}
	out := make([]float32, benchUsed*benchWidth)
	b.SetBytes(int64(4 * len(out)))
	for b.Loop() {
		c.sumRows(out, benchWidth)
	}
}
