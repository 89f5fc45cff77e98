package experts

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvasird/experts/place"
)

// byRank orders the ids of peers as a draw of a layer does.
func byRank(seed place.Seed, layer int, ids []string) []string {
	return slices.SortedFunc(slices.Values(ids), func(a, b string) int {
		if place.Rank(&seed, int32(layer), a) > place.Rank(&seed, int32(layer), b) {
			return -1
		}
		return 1
	})
}

// TestDrawn has calls go to the worker that the seed says, to the next one when that is gone, and
// have the rows that they have without a draw.
func TestDrawn(t *testing.T) {
	w := newSwarm(t)
	ids := []string{"a", "b", "c", "d"}
	peers := map[string]*peer{}
	for _, id := range ids {
		peers[id] = w.start(id, wholeLayer(), nil)
	}
	d := w.dispatcher(func(c *Config) { c.NoHedge, c.MinDeadline = true, 10*time.Second })
	waitFor(t, d, "connected", connected)
	calls := []*Call{testCall(0, 3, false), testCall(1, 3, false)} // a layer each
	for _, call := range calls {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	within(t, patient, "all proved", func() bool {
		for _, call := range calls {
			if len(d.known(call).routes.Load().sessions) != len(ids) {
				return false
			}
		}
		return true
	})
	computes := func(seed place.Seed, ids []string) {
		t.Helper()
		for _, call := range calls {
			want := byRank(seed, call.Layer, ids)[0]
			before := peers[want].kernel.calls.Load()
			others := total(peers) - before
			poison(call)
			if err := d.Compute(t.Context(), call); err != nil {
				t.Fatal(err)
			}
			if n := peers[want].kernel.calls.Load() - before; n != 1 || total(peers)-peers[want].kernel.calls.Load() != others {
				t.Errorf("layer %d: %s computed %d calls, others %d, want it alone", call.Layer, want, n,
					total(peers)-peers[want].kernel.calls.Load()-others)
			}
			if diff := maxDiff(call.Out, alone(t, wholeLayer(), call)); diff != 0 {
				t.Errorf("maximum difference %g", diff)
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 3))
	var seed, second, both place.Seed
	for range 20 {
		for i := range seed {
			seed[i], second[i] = byte(rng.Uint32()), byte(rng.Uint32())
			both[i] = seed[i] ^ second[i]
		}
		end := d.Draw(seed)
		if !d.Drawn() {
			t.Fatal("a seed is not set")
		}
		computes(seed, ids)
		endSecond := d.Draw(second)
		computes(both, ids)
		end()
		end() // again changes nothing
		computes(second, ids)
		endSecond()
		if d.Drawn() {
			t.Fatal("a seed is left")
		}
	}
	defer d.Draw(seed)()
	order := byRank(seed, 0, ids)
	peers[order[0]].kill()
	within(t, patient, "the loss is seen", func() bool { return len(d.known(calls[0]).routes.Load().sessions) == len(ids)-1 })
	computes(seed, order[1:])
}

func total(peers map[string]*peer) (n int64) {
	for _, p := range peers {
		n += p.kernel.calls.Load()
	}
	return n
}

// TestDrawnIsHedged has the drawn worker stop in the middle of a call: another one answers.
func TestDrawnIsHedged(t *testing.T) {
	w := newSwarm(t)
	a, b := w.start("a", wholeLayer(), nil), w.start("b", wholeLayer(), nil)
	d := w.dispatcher(nil)
	waitFor(t, d, "connected", connected)
	call := testCall(0, 1, false)
	for range 10 {
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
	}
	defer d.Draw(place.Seed{7})()
	d.hedges.credit.Store(mostCredit)
	before := d.Hedges()
	_, _, open, done := stuck(t, d, call, a, b)
	defer open()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if after := d.Hedges(); after.Won == before.Won {
		t.Errorf("before %+v, after %+v: no hedge won", before, after)
	}
	if diff := maxDiff(call.Out, alone(t, wholeLayer(), call)); diff != 0 {
		t.Errorf("maximum difference %g", diff)
	}
}
