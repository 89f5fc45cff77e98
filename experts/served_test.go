package experts

import (
	"errors"
	"sync"
	"testing"
	"time"
)

// ledger notes what Served and Computed tell.
type ledger struct {
	mu     sync.Mutex
	pairs  map[string]int
	total  int
	layers map[int]bool
}

func newLedger() *ledger { return &ledger{pairs: map[string]int{}, layers: map[int]bool{}} }

func (l *ledger) add(peer string, layer, pairs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pairs[peer] += pairs
	l.total += pairs
	l.layers[layer] = true
}

func (l *ledger) sum() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.total
}

func (l *ledger) of(peer string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pairs[peer]
}

// TestServed: every pair of a call that was answered is told once, with who computed it, and
// nothing of canaries, of hedged losers and of calls that failed.
func TestServed(t *testing.T) { bothReaders(t, servedOnce) }

func servedOnce(t *testing.T, noLead bool) {
	w := newSwarm(t)
	served, computed := newLedger(), newLedger()
	counts := func(c *WorkerConfig) { c.Computed = computed.add }
	a, b := w.start("a", wholeLayer(), counts), w.start("b", wholeLayer(), counts)
	d := w.dispatcher(func(c *Config) { c.NoLead, c.Served = noLead, served.add })
	waitFor(t, d, "connected", connected)
	call := testCall(0, 3, false)
	for range 10 {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	want := 10 * len(call.IDs)
	if served.sum() != want || len(served.layers) != 1 || !served.layers[call.Layer] {
		t.Fatalf("%d pairs of layers %v were told, want %d of layer %d", served.sum(), served.layers, want, call.Layer)
	}
	if computed.sum() <= want { // with canaries
		t.Errorf("workers told of %d pairs, fewer than were asked for", computed.sum())
	}
	for range 3 {
		d.hedges.credit.Store(mostCredit)
		held, other, open, done := stuck(t, d, call, a, b)
		before, its := served.of(held.id), served.of(other.id)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		want += len(call.IDs)
		if served.sum() != want || served.of(held.id)+served.of(other.id)-before-its != len(call.IDs) {
			t.Errorf("%d pairs were told, want %d", served.sum(), want)
		}
		open()
		within(t, patient, "trusted again", func() bool {
			for _, p := range d.Peers() {
				if p.ID == held.id {
					return !p.Suspect
				}
			}
			return false
		})
	}
	a.kill()
	b.kill()
	within(t, patient, "both are gone", func() bool { return len((*d.programs.Load())[0][0].routes.Load().sessions) == 0 })
	if err := d.Compute(t.Context(), call); !errors.As(err, new(*MissingError)) {
		t.Fatal(err)
	}
	if served.sum() != want {
		t.Errorf("%d pairs were told after a call that failed, want %d", served.sum(), want)
	}
}

// TestServedInPart: of a call whose worker dies, and which others complete, each has what it
// computed; the backbone's own copy is told as "".
func TestServedInPart(t *testing.T) {
	w := newSwarm(t)
	served := newLedger()
	half := w.start("half", newFFN(testWidth, testHidden, layerSlice(0, testExperts/2)), nil)
	own := wholeLayer()
	d := w.dispatcher(func(c *Config) {
		c.Served, c.Local, c.CoverageWait = served.add, &Local{Kernel: own, Slices: []Slice{layerSlice(0, testExperts)}}, time.Second
	})
	waitFor(t, d, "connected", connected)
	call := testCall(0, 8, true)
	low := 0
	for _, id := range call.IDs {
		if id < testExperts/2 {
			low++
		}
	}
	if err := d.Compute(t.Context(), call); err != nil {
		t.Fatal(err)
	}
	if served.of("half") != low || served.of("") != len(call.IDs)-low {
		t.Errorf("told %v, want %d of %d pairs for the worker", served.pairs, low, len(call.IDs))
	}
	half.kill()
	for range 3 {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	if served.sum() != 4*len(call.IDs) {
		t.Errorf("%d pairs were told of %d", served.sum(), 4*len(call.IDs))
	}
}
