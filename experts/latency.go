package experts

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// latency learns how soon a peer answers: base + perPair·pairs, and how far above that the
// slowest hundredth and twentieth of answers lie. The zero value knows nothing yet.
type latency struct {
	base, perPair atomic.Uint32 // float32 bits, ns; read by every plan
	perByte       atomic.Uint32 // likewise: what a byte of an answer takes to come

	mu      sync.Mutex // guards the rest
	samples int
	tail    float64 // 99th percentile of answer time / expected time
	late    float64 // 95th percentile of that
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
	// fadePerByte has what a byte takes forgotten where answers say nothing of it any more, until
	// they are rows again, which do.
	fadePerByte = 0.99
	// leastSaved is what sums must save to be worth their adding up.
	leastSaved = 100 * time.Microsecond
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

// heard takes in what a byte of an answer took to come; 0: it came too fast, or was too little.
func (l *latency) heard(perByte float64) {
	if perByte > 0 {
		smooth(&l.perByte, perByte)
	} else {
		l.perByte.Store(math.Float32bits(float32(load(&l.perByte) * fadePerByte)))
	}
}

// narrow says whether so many bytes take long to come: longer than a quarter of the round trip.
func (l *latency) narrow(bytes int) bool {
	return load(&l.perByte)*float64(bytes) > max(float64(leastSaved), load(&l.base)/4)
}

// missed takes in a call that was given up after d.
func (l *latency) missed(d time.Duration, ahead, pairs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tailLocked(d, float64(ahead+pairs))
}

// outrun takes in a call that another worker answered after d, before this one did.
func (l *latency) outrun(d time.Duration, ahead, pairs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	work := float64(ahead + pairs)
	if float64(d) <= load(&l.base)+load(&l.perPair)*work {
		return
	}
	l.tailLocked(d, work)
	smooth(&l.perPair, max(1, (float64(d)-load(&l.base))/work))
	l.idle = false
}

// tailLocked moves tail up 99 times as far as down, and late 19 times, so that they rest at the
// percentiles.
func (l *latency) tailLocked(d time.Duration, work float64) {
	expected := load(&l.base) + load(&l.perPair)*work
	if expected <= 0 || l.samples == 0 {
		return
	}
	ratio := float64(d) / expected
	l.tail = quantile(l.tail, ratio, 0.99)
	l.late = quantile(l.late, ratio, 0.95)
}

// quantile moves an estimate of a quantile of ratios by one sample; it is at least 1.
func quantile(estimate, ratio, q float64) float64 {
	if ratio > estimate {
		estimate += q * tailStep * max(1, ratio-estimate)
	} else {
		estimate -= (1 - q) * tailStep
	}
	return max(1, estimate)
}

// limits is when a call with so many pairs to compute, those ahead of it too, is later than
// nineteen of twenty are, and how long to wait for it: 8 times what the slowest hundredth takes.
func (l *latency) limits(pairs int) (late, deadline time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	perPair := load(&l.perPair)
	if l.samples < triedAfter {
		perPair = max(perPair, float64(untried))
	}
	expected := load(&l.base) + perPair*float64(pairs)
	return time.Duration(max(1, l.late) * expected), time.Duration(8 * max(1, l.tail) * expected)
}
