package p2p

import (
	"slices"
	"time"
)

const (
	// spinTrial is how many waits in a row try one way. Trials are long, since a change
	// makes the system move threads between cores, which disturbs the waits that follow.
	spinTrial = 128
	// spinSettle is how many of them are not counted for that reason.
	spinSettle = 32
	// spinGain is the least share of the median wait that spinning must save, 1/spinGain.
	spinGain = 8
	// Waits between two comparisons: as many as the first at first, doubling up to the
	// last while spinning loses.
	minSpinRun = 16 * spinTrial
	maxSpinRun = 64 * minSpinRun
)

// spinChoice decides by measurement whether reads that find nothing spin or park. It tries
// parking, then spinning, keeps to the better for a while, and begins again. On idle cores
// spinning saves the wake-up; where the other side needs this core, or data comes late, it
// saves nothing and reads park. The zero value is ready.
type spinChoice struct {
	phase  int // 0: trial of parking, 1: trial of spinning, 2: run of the better
	waits  int // in this phase
	run    int // length of phase 2
	better bool
	parked time.Duration // median of the trial
	sample [spinTrial - spinSettle]time.Duration
}

// spins says whether the next read spins.
func (c *spinChoice) spins() bool { return c.phase == 1 || c.phase == 2 && c.better }

// learn takes in how long the read waited.
func (c *spinChoice) learn(wait time.Duration) {
	c.waits++
	if c.phase == 2 {
		if c.waits >= c.run {
			c.phase, c.waits = 0, 0
		}
		return
	}
	if c.waits > spinSettle {
		c.sample[c.waits-spinSettle-1] = wait
	}
	if c.waits < spinTrial {
		return
	}
	slices.Sort(c.sample[:])
	median := c.sample[len(c.sample)/2]
	if c.phase == 0 {
		c.parked = median
	} else {
		c.decide(median)
	}
	c.phase, c.waits = c.phase+1, 0
}

func (c *spinChoice) decide(spun time.Duration) {
	c.better = spun < c.parked-c.parked/spinGain
	if c.better {
		c.run = minSpinRun
	} else {
		c.run = min(max(2*c.run, minSpinRun), maxSpinRun)
	}
}
