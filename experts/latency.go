package experts

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// latency learns how soon a peer answers: base + perPair·pairs, and how far above that the
// slowest hundredth of answers lies. The zero value knows nothing yet.
type latency struct {
	base, perPair atomic.Uint32 // float32 bits, ns; read by every plan

	mu      sync.Mutex // guards the rest
	samples int
	tail    float64 // 99th percentile of answer time / expected time
	idle    bool    // no answer since the last heartbeat's
}

const (
	smoothing = 0.1 // weight of a new sample
	tailStep  = 0.05
	idleDecay = 0.9 // of perPair, per heartbeat
	// untried is the time per pair that a deadline allows a peer whose speed is not known
	// after fewer than triedAfter answers.
	untried    = 5 * time.Millisecond
	triedAfter = 8
)

func load(v *atomic.Uint32) float64 { return float64(math.Float32frombits(v.Load())) }

func smooth(v *atomic.Uint32, sample float64) {
	old := load(v)
	if old == 0 {
		old = sample
	}
	v.Store(math.Float32bits(float32(old + smoothing*(sample-old))))
}

// pong takes in the round trip of a heartbeat. One that was not quiet may have waited for a
// call to be computed, and any may have waited for a processor: taken for the time of a call
// without work it would hide the work. So base follows a shorter round trip at once.
func (l *latency) pong(rtt time.Duration, quiet bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch base := load(&l.base); {
	case base == 0, float64(rtt) < base:
		l.base.Store(math.Float32bits(float32(rtt)))
	case quiet:
		smooth(&l.base, float64(rtt))
	}
	if l.idle { // slowness of long ago must not keep a peer idle for ever
		l.perPair.Store(math.Float32bits(float32(load(&l.perPair) * idleDecay)))
	}
	l.idle = true
}

// answered takes in a call that took d with ahead pairs before it and pairs of its own.
func (l *latency) answered(d time.Duration, ahead, pairs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	work := float64(ahead + pairs)
	l.tailLocked(d, work)
	smooth(&l.perPair, max(1, (float64(d)-load(&l.base))/work))
	l.samples++
	l.idle = false
}

// missed takes in a call that was given up after d.
func (l *latency) missed(d time.Duration, ahead, pairs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tailLocked(d, float64(ahead+pairs))
}

// tailLocked moves tail up 99 times as far as down, so that it rests at the percentile.
func (l *latency) tailLocked(d time.Duration, work float64) {
	expected := load(&l.base) + load(&l.perPair)*work
	if expected <= 0 || l.samples == 0 {
		return
	}
	if ratio := float64(d) / expected; ratio > l.tail {
		l.tail += 0.99 * tailStep * max(1, ratio-l.tail)
	} else {
		l.tail -= 0.01 * tailStep
	}
	l.tail = max(1, l.tail)
}

// deadline is how long to wait for a call: 8 times what the slowest hundredth takes, at least
// lowest, at most highest.
func (l *latency) deadline(ahead, pairs int, lowest, highest time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	perPair := load(&l.perPair)
	if l.samples < triedAfter {
		perPair = max(perPair, float64(untried))
	}
	expected := load(&l.base) + perPair*float64(ahead+pairs)
	return max(lowest, min(highest, time.Duration(8*max(1, l.tail)*expected)))
}
