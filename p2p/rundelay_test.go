package p2p

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// With many who want the only thread, each waits for its turn.
func TestRunDelay(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const hogs = 60 // with slices of 10 ms
	d := newRunDelay()
	end := time.Now().Add(1500 * time.Millisecond)
	var wg sync.WaitGroup
	for range hogs {
		wg.Go(func() {
			for time.Now().Before(end) {
			}
		})
	}
	wg.Wait()
	if got := d.since(); got <= heartLate {
		t.Errorf("waits of %v, want over %v", got, heartLate)
	}
	// What was told once is not told again.
	time.Sleep(10 * time.Millisecond)
	var most time.Duration
	eventually(t, "calm again", func() bool {
		most = d.since()
		return most <= heartLate
	})
}

// Ticks that come on time prove nothing while others wait for a thread.
func TestStarvedProcessBlamesNobody(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	p := hello(t, a, b)
	p.stay.watch()
	const ticks = 100 * int(heartSilence/heartTick)
	hs := newHearts(a)
	var waited time.Duration
	hs.waited = func() time.Duration { return waited }
	now := time.Now()
	tick := func() {
		now = now.Add(heartTick)
		hs.tick(now)
	}
	hs.last = now
	for _, waited = range []time.Duration{heartLate + 1, heartGap + 1} {
		for range ticks {
			tick()
		}
	}
	if a.Peer(b.ID()) == nil || a.Faults()[Unresponsive] != 0 {
		t.Fatal("blamed by a process that did not run")
	}
	waited = 0
	for range ticks {
		tick()
	}
	if a.Faults()[Unresponsive] == 0 {
		t.Error("not blamed by one that ran")
	}
}
