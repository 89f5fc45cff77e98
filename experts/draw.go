package experts

import (
	"crypto/subtle"
	"sync"
	"sync/atomic"

	"kvasird/experts/place"
)

// draws are the seeds of what runs.
type draws struct {
	now atomic.Pointer[place.Seed] // of all that run together; nil: there are none

	mu    sync.Mutex // guards count, and writing now
	count int
}

// Draw has replicas drawn by a seed until end is called, see place.Planner.Draw: of the
// Config.MostDrawn workers that would answer first, the seed says which one computes. A worker
// that is lost or late is replaced by the next one of the draw. Requests run in batches, so with
// several seeds at once all is drawn by what they have in common, their exclusive or: it is as
// hard to know before as each of them. Without a seed nothing is drawn.
func (d *Dispatcher) Draw(seed place.Seed) (end func()) {
	d.draws.change(seed, 1)
	return sync.OnceFunc(func() { d.draws.change(seed, -1) })
}

// Drawn says whether replicas are drawn now.
func (d *Dispatcher) Drawn() bool { return d.draws.now.Load() != nil }

// change adds a seed or takes it away, which is the same.
func (w *draws) change(seed place.Seed, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count += by
	if w.count == 0 {
		w.now.Store(nil)
		return
	}
	if old := w.now.Load(); old != nil {
		subtle.XORBytes(seed[:], seed[:], old[:])
	}
	w.now.Store(&seed)
}
