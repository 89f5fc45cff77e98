package experts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"kvasird/experts/place"
)

// Shelf is where a Cache has experts from. One call is made at a time.
type Shelf interface {
	// Fetch has the weights of some experts of a layer at hand, for Put, and verified. It takes
	// its time. It returns those that are, in the same order, and why not all when nobody has the
	// others now.
	Fetch(ctx context.Context, layer int, experts []int32) (got []int32, err error)
	// Put makes some experts of a layer, whose weights are at hand, what the kernel of
	// Config.Local holds of it. Nobody has the layer computed meanwhile. After an error the
	// kernel holds none of it.
	Put(ctx context.Context, layer int, experts []int32) error
}

// CacheConfig configures a Cache. The first three fields are needed.
type CacheConfig struct {
	Dispatcher *Dispatcher // with a Config.Local of no slices, whose First is set
	Shelf      Shelf
	Room       place.Room
	Known      [][]int32     // experts whose weights are at hand from before, by layer: taken until use says more
	Every      time.Duration // between looks at what the router chose: 5 s
	Logger     *slog.Logger  // nil: none
}

// Cache keeps those experts on the backbone that its router really chooses, within a budget: by
// how often each was chosen, of late more than before. It changes one layer at a time, while
// calls run: what is on its way here or out of here is computed by workers.
type Cache struct {
	cfg     CacheConfig
	counted [][]uint64 // pairs by layer and expert, as the dispatcher counts; of Run
	last    [2]uint64  // pairs here and in all, likewise

	mu    sync.Mutex // guards the rest; use and held are written by Run only
	use   [][]float64
	held  [][]int32
	stats CacheStats
}

// CacheStats is how a Cache does.
type CacheStats struct {
	Budget, Bytes int64
	Experts       int     // that are kept
	Fetched       uint64  // experts that came here since the start
	Hits          float64 // share of the pairs that was computed here, when last any were
	Trouble       string  // why something that is wanted is not here; empty: all is
}

// halfLife is after how many pairs of a layer, for each of its experts, what was chosen counts
// half. Use decays by use, not by time, so that a night without requests changes nothing.
const halfLife = 64

// NewCache returns a cache that keeps nothing yet.
func NewCache(cfg CacheConfig) (*Cache, error) {
	d := cfg.Dispatcher
	if d == nil || d.cfg.Local == nil || !d.cfg.Local.First || len(d.cfg.Local.Slices) > 0 || cfg.Shelf == nil {
		return nil, errors.New("experts: a cache needs a shelf, and a dispatcher with an empty local copy that goes first")
	}
	if cfg.Room.Budget <= 0 || len(cfg.Room.Sizes) == 0 {
		return nil, errors.New("experts: a cache without room")
	}
	defaults(&cfg.Every, 5*time.Second)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	layers := len(cfg.Room.Sizes)
	c := &Cache{
		cfg: cfg, counted: make([][]uint64, layers), use: make([][]float64, layers), held: make([][]int32, layers),
		stats: CacheStats{Budget: cfg.Room.Budget},
	}
	for l, ids := range cfg.Known[:min(len(cfg.Known), layers)] {
		for _, e := range ids {
			c.use[l] = reach(c.use[l], int(e))
			c.use[l][e] = 1
		}
	}
	return c, nil
}

// reach makes a row long enough for an expert.
func reach[T any](row []T, expert int) []T {
	if n := expert + 1 - len(row); n > 0 {
		row = append(row, make([]T, n)...)
	}
	return row
}

// Stats is safe for concurrent use.
func (c *Cache) Stats() CacheStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Run keeps the cache until ctx ends, which is no error.
func (c *Cache) Run(ctx context.Context) error {
	tick := time.NewTicker(c.cfg.Every)
	defer tick.Stop()
	c.arrange(ctx) // what is at hand
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if c.learn() || c.Stats().Trouble != "" {
				c.arrange(ctx)
			}
		}
	}
}

// learn takes in what the router chose since the last time, and says whether that was anything.
func (c *Cache) learn() (news bool) {
	d := c.cfg.Dispatcher
	here, all := d.LocalPairs(), d.Pairs()
	demand := d.Demand()
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := all - c.last[1]; n > 0 {
		c.stats.Hits = min(1, float64(here-c.last[0])/float64(n))
		c.last = [2]uint64{here, all}
	}
	for l, row := range demand[:min(len(demand), len(c.use))] {
		var sum uint64
		for e, n := range row {
			c.counted[l] = reach(c.counted[l], e)
			sum += n - c.counted[l][e]
		}
		if sum == 0 {
			continue
		}
		news = true
		keep := math.Exp2(-float64(sum) / float64(halfLife*len(row)))
		for e := range c.use[l] {
			c.use[l][e] *= keep
		}
		for e, n := range row {
			c.use[l] = reach(c.use[l], e)
			c.use[l][e] += float64(n - c.counted[l][e])
			c.counted[l][e] = n
		}
	}
	return news
}

// arrange brings what is kept nearer to what is chosen, layers that shrink first.
func (c *Cache) arrange(ctx context.Context) {
	next := c.cfg.Room.Keep(c.use, c.held)
	var layers []int
	for l := range next {
		if !slices.Equal(next[l], c.held[l]) {
			layers = append(layers, l)
		}
	}
	slices.SortStableFunc(layers, func(a, b int) int {
		return len(next[a]) - len(c.held[a]) - (len(next[b]) - len(c.held[b]))
	})
	var trouble error
	for _, l := range layers {
		err := c.change(ctx, l, next[l])
		if ctx.Err() != nil {
			return
		}
		if err != nil && trouble == nil {
			trouble = fmt.Errorf("experts of layer %d: %w", l, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	text := ""
	if trouble != nil {
		text = trouble.Error()
	}
	if text != c.stats.Trouble {
		c.cfg.Logger.Info("hot experts", "experts", c.stats.Experts, "bytes", c.stats.Bytes, "trouble", text)
	}
	c.stats.Trouble = text
}

// change replaces what is kept of a layer, unless that would be more than the budget because
// another layer could not give up enough.
func (c *Cache) change(ctx context.Context, layer int, next []int32) error {
	after := slices.Clone(c.held)
	if after[layer] = next; c.cfg.Room.Bytes(after) > c.cfg.Room.Budget {
		return nil
	}
	var failed error
	if len(next) > 0 {
		var got []int32 // of what is held too, since that is loaded anew
		got, failed = c.cfg.Shelf.Fetch(ctx, layer, next)
		if next = c.instead(layer, next, got); next == nil {
			return failed
		}
	}
	if slices.Equal(next, c.held[layer]) {
		return failed
	}
	come := 0
	for _, e := range next {
		if _, has := slices.BinarySearch(c.held[layer], e); !has {
			come++
		}
	}
	c.set(layer, nil)
	if err := c.cfg.Shelf.Put(ctx, layer, next); err != nil {
		return err
	}
	c.mu.Lock()
	c.stats.Fetched += uint64(come)
	c.mu.Unlock()
	c.set(layer, next)
	return failed
}

// instead is what a layer is to hold when not all that was wanted is at hand: what is held takes
// the places of what is not. It is nil when something is not at hand any more that is held and
// wanted: then all stays.
func (c *Cache) instead(layer int, want, got []int32) []int32 {
	places := len(want) - len(got)
	next := slices.Clone(got)
	for _, e := range c.held[layer] {
		switch {
		case slices.Contains(got, e):
		case slices.Contains(want, e):
			return nil
		case places > 0:
			next = append(next, e)
			places--
		}
	}
	slices.Sort(next)
	return next
}

// set has calls use some experts of a layer.
func (c *Cache) set(layer int, experts []int32) {
	c.mu.Lock()
	c.held[layer] = experts
	c.stats.Bytes, c.stats.Experts = c.cfg.Room.Bytes(c.held), 0
	var list []Slice
	for l, ids := range c.held {
		c.stats.Experts += len(ids)
		for _, e := range ids {
			if n := len(list) - 1; n >= 0 && list[n].FirstLayer == l && list[n].EndExpert == int(e) {
				list[n].EndExpert++
				continue
			}
			list = append(list, Slice{FirstLayer: l, EndLayer: l + 1, FirstExpert: int(e), EndExpert: int(e) + 1})
		}
	}
	c.mu.Unlock()
	c.cfg.Dispatcher.SetLocal(list)
}
