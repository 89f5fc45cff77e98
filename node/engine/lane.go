package engine

import (
	"context"
	"time"

	"kvasird/ggml"
)

// lane is one context of the model with the requests that run in it. One goroutine, its loop, owns
// what is not guarded.
type lane struct {
	*Engine
	ctx    *ggml.Context
	batch  *ggml.Batch
	slots  []slot        // a free one has no request
	canary *slot         // that of canaries, which is none of slots; nil: another lane has it
	wake   chan struct{} // 1 deep: something waits

	released uint64        // requests that left their cells
	took     time.Duration // by the latest decode
	drafting drafting
	asked    bool // Config.Spare was, by the first lane

	// Guarded by Engine.mu.
	given   []*Generation      // requests that wait for the loop to put them into a slot
	load    int                // requests that are given or run; 0 <= load <= len(slots)
	abort   context.CancelFunc // ends the decode in progress, nil before the first
	inBatch int                // requests of that decode that are not gone
}

// openLane makes the context of a lane, with its share of the cells.
func (e *Engine) openLane(sequences int, canaries bool) (*lane, error) {
	cfg := ggml.ContextConfig{
		// One pool of cells: the rows of all sequences then travel through the
		// layers together, whatever their lengths.
		Tokens: max(e.cfg.Context, e.cfg.Cells*sequences/e.cfg.Sequences), Batch: e.cfg.Batch, Sequences: sequences,
		Threads: e.cfg.Threads, UnifiedKV: true,
	}
	l := &lane{Engine: e, batch: ggml.NewBatch(e.cfg.Batch), slots: make([]slot, sequences), wake: make(chan struct{}, 1)}
	for i := range l.slots {
		l.slots[i].seq = i
	}
	if canaries {
		l.canary = &slot{seq: sequences}
		cfg.Sequences++
	}
	if e.cfg.Drafts != nil && whyNoDrafts(e.cfg.Model) == "" {
		l.drafting.Drafts, l.drafting.all.sure = e.cfg.Drafts, firstSure
	}
	var err error
	l.ctx, err = e.cfg.Model.NewContext(cfg)
	return l, err
}

func (l *lane) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// assignLocked gives those whose turn it is to lanes that have room.
func (e *Engine) assignLocked() {
	for e.waiting.n > 0 && e.running < e.cfg.Sequences {
		g := e.waiting.pop()
		l := e.laneFor(g)
		g.lane = l
		l.given = append(l.given, g)
		l.load++
		e.running++
		l.wakeUp()
	}
}

// laneFor is the lane with room that keeps most of a prompt, of equal ones that which has the fewest
// requests. There is one as long as running < Sequences. Engine.mu is held.
func (e *Engine) laneFor(g *Generation) (best *lane) {
	lanes := e.lanes
	if e.cfg.Spare != nil && (e.running < leastApart || !e.apart.pays()) {
		lanes = lanes[:1]
	}
	if len(lanes) == 1 {
		return lanes[0]
	}
	most := 0
	for _, l := range lanes {
		if l.load == len(l.slots) {
			continue
		}
		kept := l.keptOf(g)
		if best == nil || kept > most || kept == most && l.load < best.load {
			best, most = l, kept
		}
	}
	return best
}

// keptOf is how much of a prompt a lane keeps from requests that are over. Engine.mu is held.
func (l *lane) keptOf(g *Generation) (most int) {
	for i := range l.slots {
		if s := &l.slots[i]; s.owner == g.owner {
			n := commonPrefix(s.kept, g.tokens[:g.prompt-1])
			if n >= leastReuse && (n == len(s.kept) || l.cfg.Model.CanTruncate()) {
				most = max(most, n)
			}
		}
	}
	return most
}

// leftLocked takes in that a request of the lane is over.
func (l *lane) leftLocked() {
	l.load--
	l.running--
}

// busyLanesLocked counts those that have requests.
func (e *Engine) busyLanesLocked() (n int) {
	for _, l := range e.lanes {
		if l.load > 0 {
			n++
		}
	}
	return n
}

// addLane has the first lane make the second one once that pays.
func (l *lane) addLane(ctx context.Context) {
	if l.cfg.Spare == nil || l.canary == nil || l.asked {
		return
	}
	l.mu.Lock()
	pays := l.apart.pays() && l.running >= leastApart
	l.mu.Unlock()
	if !pays {
		return
	}
	l.asked = true
	if !l.cfg.Spare() {
		return
	}
	second, err := l.openLane(l.cfg.Sequences/2, false)
	if err != nil {
		l.cfg.Logger.Warn("a second context would make answers faster, but cannot be made", "error", err)
		return
	}
	l.mu.Lock()
	l.lanes = append(l.lanes, second)
	l.mu.Unlock()
	l.loops.Go(func() { second.loop(ctx) })
}

// admit drops requests whose callers are gone, then fills free sequences from
// the queue.
func (l *lane) admit() {
	for i := range l.slots {
		l.dropGone(&l.slots[i])
	}
	if l.canary != nil {
		l.dropGone(l.canary)
	}
	l.mu.Lock()
	gone := func(g *Generation) bool {
		cause := g.isGone()
		if cause != nil {
			g.close(cause, "")
			l.stats.Cancelled++
		}
		return cause != nil
	}
	l.waiting.drop(gone)
	l.canaries.drop(gone)
	if s := l.canary; s != nil && s.g == nil {
		s.g = l.canaries.pop()
	}
	l.assignLocked()
	given := l.given
	l.given = nil
	l.mu.Unlock()
	for _, g := range given {
		l.place(g)
	}
}

// dropGone frees a sequence whose caller is gone.
func (l *lane) dropGone(s *slot) {
	if s.g == nil {
		return
	}
	if cause := s.g.isGone(); cause != nil {
		l.release(s, cause, "")
	}
}

// begin notes that the lane begins a round.
func (l *lane) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.passedLocked()
	l.active++
}

// passedLocked books the time since active changed.
func (e *Engine) passedLocked() {
	now := e.cfg.Now()
	if e.active > 0 {
		e.unpaced += now.Sub(e.since)
	}
	e.since = now
}
