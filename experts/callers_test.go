package experts

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// busyCallers compute all the time, check every row and note the longest call.
type busyCallers struct {
	t       *testing.T
	d       *Dispatcher
	stop    chan struct{}
	once    sync.Once // closes stop
	wg      sync.WaitGroup
	calls   atomic.Int64
	longest atomic.Int64
}

func startBusy(t *testing.T, d *Dispatcher, n int) *busyCallers {
	t.Helper()
	c := &busyCallers{t: t, d: d, stop: make(chan struct{})}
	for i := range n {
		call := testCall(uint64(i), 1+20*i, i%2 == 0)
		want := alone(t, wholeLayer(), call)
		if d.cfg.Sums == SumsOn {
			weighted(call)
		}
		c.wg.Go(func() { c.run(call, want) })
	}
	t.Cleanup(func() { c.end() })
	return c
}

func (c *busyCallers) run(call *Call, want []float32) {
	for {
		select {
		case <-c.stop:
			return
		default:
		}
		poison(call)
		began := time.Now()
		if err := c.d.Compute(context.Background(), call); err != nil {
			c.t.Errorf("call %d: %v", c.calls.Load(), err)
			return
		}
		if took := int64(time.Since(began)); took > c.longest.Load() {
			c.longest.Store(took)
		}
		if diff := off(call, want); diff != 0 && (c.d.cfg.Precision == F32 || diff > 0.05) {
			c.t.Errorf("maximum difference %g", diff)
			return
		}
		c.calls.Add(1)
	}
}

// more waits for n further answers.
func (c *busyCallers) more(n int64) {
	c.t.Helper()
	to := c.calls.Load() + n
	within(c.t, patient, "calls are answered", func() bool { return c.calls.Load() >= to || c.t.Failed() })
}

// end stops them and returns how many calls were answered.
func (c *busyCallers) end() int64 {
	c.once.Do(func() { close(c.stop) })
	c.wg.Wait()
	return c.calls.Load()
}

// callers are busy until the returned function is called, which says how many calls were
// answered.
func callers(t *testing.T, d *Dispatcher, n int) (stop func() (answers int64)) {
	t.Helper()
	return startBusy(t, d, n).end
}

// ended says whether a channel is closed.
func ended(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}
