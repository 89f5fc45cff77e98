package experts

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/experts/place"
)

// rack is a Shelf that judges: its kernel fails a call for an expert that it does not hold.
type rack struct {
	t      *testing.T
	kernel *ffn
	atHand map[[2]int]bool
	held   map[int][]int32
	lacks  []int32 // nobody has them
	broken int     // Puts that fail
	puts   int
}

func newRack(t *testing.T) *rack {
	r := &rack{t: t, kernel: wholeLayer(), atHand: map[[2]int]bool{}, held: map[int][]int32{}}
	r.tell()
	return r
}

// tell has the kernel refuse what is not held.
func (r *rack) tell() {
	var gone []Slice
	for layer := range 2 {
		for e := range int32(testExperts) {
			if !slices.Contains(r.held[layer], e) {
				gone = append(gone, Slice{FirstLayer: layer, EndLayer: layer + 1, FirstExpert: int(e), EndExpert: int(e) + 1})
			}
		}
	}
	r.kernel.gone.Store(&gone)
}

func (r *rack) Fetch(_ context.Context, layer int, experts []int32) (got []int32, err error) {
	for _, e := range experts {
		if slices.Contains(r.lacks, e) {
			err = errors.New("nobody has it")
			continue
		}
		r.atHand[[2]int{layer, int(e)}] = true
		got = append(got, e)
	}
	return got, err
}

func (r *rack) Put(_ context.Context, layer int, experts []int32) error {
	r.puts++
	for _, e := range experts {
		if !r.atHand[[2]int{layer, int(e)}] {
			r.t.Errorf("layer %d, expert %d was not fetched", layer, e)
		}
	}
	r.held[layer] = nil
	r.tell()
	if r.broken > 0 {
		r.broken--
		return errors.New("no memory")
	}
	r.held[layer] = slices.Clone(experts)
	r.tell()
	return nil
}

// skewed is a call whose router prefers some experts: the one after first by most, the next by
// less, as Zipf's law has it.
func skewed(rng *rand.Rand, layer, tokens, first int) *Call {
	c := layerCall(rng, layer, testWidth, testHidden, testExperts, 8, tokens, false)
	for t := range tokens {
		var key [testExperts]float64 // the largest 8 are a draw without replacement, by weight
		for i := range key {
			key[i] = math.Log(rng.Float64()) * float64(i+1)
		}
		ids := make([]int32, testExperts)
		for i := range ids {
			ids[i] = int32(i)
		}
		slices.SortFunc(ids, func(a, b int32) int {
			if key[a] > key[b] {
				return -1
			}
			return 1
		})
		for k := range 8 {
			c.IDs[t*8+k] = (ids[k] + int32(first)) % testExperts
		}
	}
	return c
}

// cached is a dispatcher with a worker for everything, and a cache of so many experts of each of
// two layers.
func cached(t *testing.T, places int, r *rack) (*Dispatcher, *Cache) {
	t.Helper()
	w := newSwarm(t)
	w.start("a", wholeLayer(), nil)
	d := w.dispatcher(func(c *Config) { c.Local = &Local{Kernel: r.kernel, First: true} })
	waitFor(t, d, "connected", connected)
	c, err := NewCache(CacheConfig{
		Dispatcher: d, Shelf: r, Room: place.Room{Sizes: []int64{1, 1}, Budget: int64(2 * places)}, Every: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	return d, c
}

// routed computes skewed calls and checks them.
func routed(t *testing.T, d *Dispatcher, rng *rand.Rand, calls, first int) {
	t.Helper()
	whole := wholeLayer()
	for i := range calls {
		call := skewed(rng, i%2, 16, first)
		want := alone(t, whole, call)
		poison(call)
		if err := d.Compute(t.Context(), call); err != nil {
			t.Fatal(err)
		}
		if diff := maxDiff(call.Out, want); diff != 0 {
			t.Fatalf("maximum difference %g", diff)
		}
	}
}

// TestCacheHits: under skewed routing an eighth, a quarter and half of the experts are asked for
// about as often as with the best choice there is, and again after the router moved on.
func TestCacheHits(t *testing.T) {
	if raceEnabled {
		t.Skip("much arithmetic and one goroutine: TestCacheRuns is for the race detector")
	}
	for _, places := range []int{testExperts / 8, testExperts / 4, testExperts / 2} {
		r := newRack(t)
		d, c := cached(t, places, r)
		rng := rand.New(rand.NewPCG(7, uint64(places)))
		var best float64 // share of the pairs that the most used experts have
		for range 2000 {
			for _, e := range skewed(rng, 0, 1, 0).IDs {
				if int(e) < places {
					best += 1. / 8 / 2000
				}
			}
		}
		for _, first := range []int{0, 37} {
			for range 32 {
				routed(t, d, rng, 10, first)
				c.learn()
				c.arrange(t.Context())
			}
			routed(t, d, rng, 40, first)
			c.learn()
			st := c.Stats()
			t.Logf("%d of %d experts: %.0f%% of the pairs computed here, %.0f%% at best, %d fetched", st.Experts/2, testExperts, 100*st.Hits, 100*best, st.Fetched)
			if st.Hits < 0.93*best || st.Trouble != "" || st.Bytes > st.Budget {
				t.Errorf("%+v, best hit rate %.2f", st, best)
			}
		}
		if n := r.kernel.misused.Load(); n > 0 {
			t.Errorf("%d calls for experts that are not held", n)
		}
	}
}

// TestCacheLacks: an expert that nobody has is told and keeps out no other; a failed Put leaves the
// layer to the workers until one succeeds.
func TestCacheLacks(t *testing.T) {
	r := newRack(t)
	d, c := cached(t, 8, r)
	rng := rand.New(rand.NewPCG(8, 9))
	r.lacks = []int32{0}
	turn := func() CacheStats {
		routed(t, d, rng, 20, 0)
		c.learn()
		c.arrange(t.Context())
		return c.Stats()
	}
	if st := turn(); st.Experts != 14 || !strings.Contains(st.Trouble, "nobody has it") {
		t.Errorf("%+v, want all but one expert of 2 layers, and why", st)
	}
	r.lacks, r.broken = nil, 1
	if st := turn(); (r.held[0] == nil) == (r.held[1] == nil) || !strings.Contains(st.Trouble, "no memory") {
		t.Errorf("%+v, holds %v, want one layer only", st, r.held)
	}
	if st := turn(); st.Experts != 16 || st.Trouble != "" {
		t.Errorf("%+v, want all", st)
	}
	for e := range int32(testExperts) {
		r.lacks = append(r.lacks, e)
	}
	before := [2][]int32{r.held[0], r.held[1]}
	routed(t, d, rng, 200, 32)
	c.learn()
	c.arrange(t.Context())
	for l, was := range before { // the layers may share the room otherwise
		if st := c.Stats(); st.Trouble == "" || len(r.held[l]) < len(was)-2 || slices.ContainsFunc(r.held[l], func(e int32) bool { return !slices.Contains(was, e) }) {
			t.Errorf("%+v, layer %d holds %v, want what it held: %v", st, l, r.held[l], was)
		}
	}
	r.lacks = nil
	c.arrange(t.Context())
	if slices.Equal(before[0], r.held[0]) || slices.Equal(before[1], r.held[1]) {
		t.Errorf("holds %v, want what the router moved on to", r.held)
	}
	puts := r.puts
	c.arrange(t.Context())
	if r.puts != puts {
		t.Errorf("%d layers loaded anew though nothing changed", r.puts-puts)
	}
	if n := r.kernel.misused.Load(); n > 0 {
		t.Errorf("%d calls for experts that are not held", n)
	}
}

// TestCacheRuns: the router moves on again and again while several batches run and the cache
// follows it.
func TestCacheRuns(t *testing.T) {
	r := newRack(t)
	d, c := cached(t, 16, r)
	ctx, stop := context.WithCancel(t.Context())
	var cache, batches sync.WaitGroup
	cache.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	for i := range 3 {
		batches.Go(func() {
			rng := rand.New(rand.NewPCG(10, uint64(i)))
			for turn := range 4 {
				routed(t, d, rng, 20, 16*turn)
			}
		})
	}
	batches.Wait()
	stop()
	cache.Wait()
	if st := c.Stats(); st.Fetched < 40 || d.LocalPairs() == 0 || st.Bytes > st.Budget {
		t.Errorf("%+v, %d pairs here: want it to have followed", st, d.LocalPairs())
	}
	if n := r.kernel.misused.Load(); n > 0 {
		t.Errorf("%d calls for experts that are not held", n)
	}
}

// TestCacheKnown: what is at hand is taken before anything was chosen.
func TestCacheKnown(t *testing.T) {
	r := newRack(t)
	d, _ := cached(t, 4, r)
	c, err := NewCache(CacheConfig{
		Dispatcher: d, Shelf: r, Room: place.Room{Sizes: []int64{1, 1}, Budget: 8}, Known: [][]int32{{3, 5}, {1, 2, 9}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c.arrange(t.Context())
	if !slices.Equal(r.held[0], []int32{3, 5}) || !slices.Equal(r.held[1], []int32{1, 2, 9}) {
		t.Errorf("holds %v", r.held)
	}
}

func TestCacheConfig(t *testing.T) {
	w := newSwarm(t)
	shelf, room := newRack(t), place.Room{Sizes: []int64{1}, Budget: 1}
	with := func(l *Local) *Dispatcher { return w.dispatcher(func(c *Config) { c.Local = l }) }
	for name, cfg := range map[string]CacheConfig{
		"no dispatcher":     {Shelf: shelf, Room: room},
		"no local copy":     {Dispatcher: with(nil), Shelf: shelf, Room: room},
		"a last resort":     {Dispatcher: with(&Local{Kernel: wholeLayer()}), Shelf: shelf, Room: room},
		"slices of before":  {Dispatcher: with(&Local{Kernel: wholeLayer(), First: true, Slices: []Slice{block(0)}}), Shelf: shelf, Room: room},
		"no shelf":          {Dispatcher: with(&Local{Kernel: wholeLayer(), First: true}), Room: room},
		"no budget":         {Dispatcher: with(&Local{Kernel: wholeLayer(), First: true}), Shelf: shelf, Room: place.Room{Sizes: []int64{1}}},
		"no layers to keep": {Dispatcher: with(&Local{Kernel: wholeLayer(), First: true}), Shelf: shelf, Room: place.Room{Budget: 1}},
	} {
		if _, err := NewCache(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
