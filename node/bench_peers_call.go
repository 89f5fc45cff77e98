package node

import (
	"errors"
	"fmt"
	"runtime"
	"time"
)

const (
	callsCounted = 2000
	idleTime     = 10 * time.Second

	// This process allocates for its heartbeats too, and a daemon at rest sends some: what
	// is less than an object for each call, and half a percent of a core, counts as nothing.
	noBytes = 8
	noCPU   = 0.5
)

// callCost measures what one call costs on loopback beyond its compute, in time and in
// memory of this side, and what a daemon costs that does nothing.
func (b *bench) callCost() error {
	path, err := b.tinyModel()
	if err != nil {
		return err
	}
	local, far, err := b.dispatchTimes(path)
	if err != nil {
		return err
	}
	perCall, idle, err := b.callBytes(path)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n### A call on loopback, and a daemon at rest: shipped, one token, f32\n\nCompute of a call: %.0f µs (p50).\n\n", micros(median(local)))
	t := newTable(b.out, "what", "measured", "wanted", "")
	half, slow := micros(median(far)-median(local)), micros(quantile(far, 0.99)-median(local))
	t.row(append([]string{"beyond compute, p50, µs", fmt.Sprintf("%.0f", half)}, atMost(half, 80)...)...)
	t.row(append([]string{"beyond compute, p99, µs", fmt.Sprintf("%.0f", slow)}, atMost(slow, 300)...)...)
	t.row(append([]string{"allocated by the dispatcher's process, bytes per call", fmt.Sprintf("%.1f", perCall)}, atMost(perCall, noBytes)...)...)
	t.row(append([]string{fmt.Sprintf("CPU of a worker's daemon without calls for %v, %% of a core", idleTime), fmt.Sprintf("%.1f", 100*idle)}, atMost(100*idle, noCPU)...)...)
	return t.Flush()
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// callBytes counts what this process allocates for a call, all of it, and the share of
// a core that a worker uses while nobody asks it anything.
func (b *bench) callBytes(path string) (perCall, idle float64, err error) {
	r, err := b.openRemote(path)
	if err != nil {
		return 0, 0, err
	}
	defer r.Close()
	call, err := b.aCall(path, r.compute)
	if err != nil {
		return 0, 0, err
	}
	var before, after runtime.MemStats
	for i := range 2 * callsCounted {
		if i == callsCounted { // what is made at first use is made
			runtime.ReadMemStats(&before)
		}
		if err := r.Compute(b.ctx, &call); err != nil {
			return 0, 0, err
		}
	}
	runtime.ReadMemStats(&after)
	perCall = float64(after.TotalAlloc-before.TotalAlloc) / callsCounted
	pid := r.workers[0].cmd.Process.Pid
	began, err := cpuOf(pid)
	if err != nil {
		return 0, 0, err
	}
	select {
	case <-b.ctx.Done():
	case <-time.After(idleTime):
	}
	ended, err := cpuOf(pid)
	return perCall, (ended - began).Seconds() / idleTime.Seconds(), errors.Join(err, b.ctx.Err())
}
