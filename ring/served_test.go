package ring

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// ledger notes what Served tells by layer and stage, and what Computed tells by stage.
type ledger struct {
	mu       sync.Mutex
	layers   [testLayers]int
	served   map[string]int
	computed map[string]int
	entries  map[string]bool
}

func newLedger() *ledger {
	return &ledger{served: map[string]int{}, computed: map[string]int{}, entries: map[string]bool{}}
}

func (l *ledger) take(chain Chain, rows int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range chain {
		l.served[h.Peer] += rows
		for i := h.Layers.Begin; i < h.Layers.End; i++ {
			l.layers[i] += rows
		}
	}
}

func (l *ledger) counts(c *StageConfig, _ *double) {
	name := c.Peer
	c.Computed = func(entry string, rows int) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.computed[name] += rows
		l.entries[entry] = true
	}
}

// TestServed: each row of an answer is told once for each layer, whatever drafts and losses there
// are, and no stage is told of more rows than it computed for that entry.
func TestServed(t *testing.T) {
	for name, lose := range losses {
		for seed := range uint64(3) {
			t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { servedOnce(t, seed, lose) }) })
		}
	}
	t.Run("nothing is lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { servedOnce(t, 9, func(*fleet, Chain, int) {}) })
	})
}

func servedOnce(t *testing.T, seed uint64, lose func(f *fleet, chain Chain, at int)) {
	f, l := newFleet(t), newLedger()
	change := func(c *StageConfig, d *double) { d.delay = time.Millisecond; l.counts(c, d) }
	chain := f.ring(3, change)
	replan := f.spares(chain, change)
	e := f.entry(func(c *EntryConfig) { c.Served = l.take })
	var wg sync.WaitGroup
	var mu sync.Mutex
	want := 0
	for i := range 4 {
		wg.Go(func() {
			req := request(rand.New(rand.NewPCG(seed, uint64(i))))
			req.MaxTokens += 40
			if err := ask(t, e, chain, req, replan); err != nil {
				t.Error(err)
			}
			answer, _, _ := oracle(t, req)
			mu.Lock()
			defer mu.Unlock()
			want += len(req.Tokens) + len(answer) - 1
		})
	}
	time.Sleep(time.Duration(20+7*seed) * time.Millisecond)
	lose(f, chain, int(seed)%3)
	wg.Wait()
	f.free()
	f.close(e)
	for layer, n := range l.layers {
		if n != want {
			t.Errorf("%d rows of layer %d were told, want %d", n, layer, want)
		}
	}
	for peer, n := range l.served {
		if n > l.computed[peer] {
			t.Errorf("stage %s is told of %d rows, and computed %d", peer, n, l.computed[peer])
		}
	}
	if len(l.entries) != 1 || !l.entries["entry"] {
		t.Errorf("rows were computed for %v", l.entries)
	}
}
