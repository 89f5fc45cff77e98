package p2p

import (
	"runtime/metrics"
	"time"
)

// runDelay tells how long goroutines of this process had to wait until they ran. On a
// machine that is too busy, or while the process is stopped again and again, timers still
// fire about on time, but whoever reads what peers say runs seconds later.
type runDelay struct {
	sample [1]metrics.Sample
	before []uint64
}

func newRunDelay() *runDelay {
	d := &runDelay{}
	d.sample[0].Name = "/sched/latencies:seconds"
	d.since()
	return d
}

// since returns what one wait in a hundred since the latest call exceeded.
func (d *runDelay) since() time.Duration {
	metrics.Read(d.sample[:])
	if d.sample[0].Value.Kind() != metrics.KindFloat64Histogram {
		return 0
	}
	h := d.sample[0].Value.Float64Histogram()
	if len(d.before) != len(h.Counts) {
		d.before = make([]uint64, len(h.Counts))
	}
	var all, longer uint64
	for i, n := range h.Counts {
		all += n - d.before[i]
	}
	at := 0
	for i := len(h.Counts) - 1; i >= 0; i-- {
		longer += h.Counts[i] - d.before[i]
		if longer*100 > all {
			at = i
			break
		}
	}
	copy(d.before, h.Counts)
	// The first bucket begins at minus infinity.
	return time.Duration(max(h.Buckets[at], 0) * float64(time.Second))
}
