package fetch

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// busyShare is the part of the upload that is left while the node computes.
	busyShare = 1.0 / 8
	// busyUnknown, in bytes/s, is taken for the measured rate before anything was measured,
	// and busyLeast is what is left at the least.
	busyUnknown = 8 << 20
	busyLeast   = 64 << 10

	// A step is what one session sends in its turn under a limit: a sixteenth of a second of
	// the whole, so that a reader sees bytes often, but not less than leastStep.
	stepsPerSecond = 16
	leastStep      = 4 << 10

	measureWindow = time.Second
)

// pacer shares the upload among sessions. Under a limit they take turns of one step.
type pacer struct {
	limit int64       // bytes/s, 0: none
	busy  func() bool // nil: never

	mu          sync.Mutex // guards what follows
	bucket      *rate.Limiter
	now         float64 // limit of bucket
	measured    float64 // bytes/s while neither limit nor busyness held back
	windowStart time.Time
	windowBytes int64
}

func newPacer(limit int64, busy func() bool) *pacer {
	return &pacer{limit: limit, busy: busy, bucket: rate.NewLimiter(0, 0), measured: busyUnknown}
}

// take waits until the caller may send and says how many bytes, 1 to want.
func (p *pacer) take(ctx context.Context, want int) (int, error) {
	busy := p.busy != nil && p.busy()
	n, wait := p.reserve(time.Now(), want, busy)
	if wait <= 0 {
		return n, ctx.Err()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return n, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func (p *pacer) reserve(now time.Time, want int, busy bool) (int, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	limit := float64(p.limit)
	switch {
	case busy && p.limit > 0:
		limit *= busyShare
	case busy:
		limit = max(p.measured*busyShare, busyLeast)
	case p.limit == 0:
		p.measureLocked(now, want)
		return want, 0
	}
	step := max(int(limit/stepsPerSecond), leastStep)
	if limit != p.now {
		p.bucket.SetLimitAt(now, rate.Limit(limit))
		p.bucket.SetBurstAt(now, step)
		p.now = limit
	}
	n := min(want, step)
	return n, p.bucket.ReserveN(now, n).DelayFrom(now)
}

// measureLocked keeps the best rate of a window, decaying.
func (p *pacer) measureLocked(now time.Time, n int) {
	if took := now.Sub(p.windowStart); took >= measureWindow {
		if took < 2*measureWindow { // else there was a pause in it
			seen := float64(p.windowBytes) / took.Seconds()
			p.measured = max(seen, 0.75*p.measured)
		}
		p.windowStart, p.windowBytes = now, 0
	}
	p.windowBytes += int64(n)
}
