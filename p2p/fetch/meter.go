package fetch

import (
	"sync"
	"time"
)

const (
	meterStep   = 200 * time.Millisecond // between updates of the mean
	meterFirst  = 20 * time.Millisecond  // before anything is said
	meterWeight = 0.3                    // of the newest step
)

// meter measures how fast a source gives. Its clock runs only while bytes are awaited, so
// that a source is not blamed for what this machine is slow in.
type meter struct {
	mu      sync.Mutex // guards what follows
	bytes   int64
	active  time.Duration // without what runs since
	since   time.Time     // of the run; zero: stopped
	last    time.Time     // of the last byte, or the start of the run
	mean    float64       // bytes/s, 0: unknown
	step    mark          // where mean was updated
	watched mark          // where the window of Window began
}

type mark struct {
	bytes  int64
	active time.Duration
}

func (m *meter) run(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.since, m.last = now, now
}

func (m *meter) stop(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.active = m.activeLocked(now)
	m.since = time.Time{}
	m.updateLocked(m.active)
}

func (m *meter) add(n int, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes += int64(n)
	m.last = now
}

func (m *meter) activeLocked(now time.Time) time.Duration {
	if m.since.IsZero() {
		return m.active
	}
	return m.active + now.Sub(m.since)
}

func (m *meter) updateLocked(active time.Duration) {
	took := active - m.step.active
	if took < meterStep {
		return
	}
	seen := float64(m.bytes-m.step.bytes) / took.Seconds()
	if m.mean == 0 {
		m.mean = seen
	} else {
		m.mean += meterWeight * (seen - m.mean)
	}
	m.step = mark{m.bytes, active}
}

// rate is the mean in bytes/s, 0 while it is not known, and how long a byte has been awaited.
func (m *meter) rate(now time.Time) (perSecond float64, silence time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	active := m.activeLocked(now)
	m.updateLocked(active)
	if !m.since.IsZero() {
		silence = now.Sub(m.last)
	}
	if m.mean == 0 && active >= meterFirst {
		return float64(m.bytes) / active.Seconds(), silence
	}
	return m.mean, silence
}

// window returns the bytes/s of the last window of running time, once for each.
func (m *meter) window(now time.Time, length time.Duration) (perSecond float64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	active := m.activeLocked(now)
	took := active - m.watched.active
	if took < length {
		return 0, false
	}
	perSecond = float64(m.bytes-m.watched.bytes) / took.Seconds()
	m.watched = mark{m.bytes, active}
	return perSecond, true
}

func (m *meter) total() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bytes
}
