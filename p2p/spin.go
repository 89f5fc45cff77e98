package p2p

import "time"

const (
	// spinGain is the least share of the wait that spinning must save, as 1/spinGain.
	spinGain = 8
	// spinProbe is how often the way that seems worse is tried again: one read in so many.
	spinProbe = 32
	// spinTrials is how many reads try both ways in turn at first.
	spinTrials = 32
	// medianStep is how fast a running median moves, as 1/medianStep of itself.
	medianStep = 8
)

// spinChoice decides by measurement whether a read that finds nothing should spin or park.
// It compares the median waits: on idle cores spinning saves the wake-up; where the other
// side needs this core, or data comes late, it saves nothing, and then reads park. The zero
// value is ready.
type spinChoice struct {
	reads      uint
	spun, rest time.Duration // running medians of the wait of reads that spun, that parked
}

// spins decides on the next read.
func (c *spinChoice) spins() bool {
	c.reads++
	if c.reads <= spinTrials {
		return c.reads%2 == 0
	}
	better := c.spun < c.rest-c.rest/spinGain
	if c.reads%spinProbe == 0 {
		return !better
	}
	return better
}

// learn takes in how long a read waited.
func (c *spinChoice) learn(spun bool, wait time.Duration) {
	m := &c.rest
	if spun {
		m = &c.spun
	}
	switch {
	case *m == 0:
		*m = wait
	case wait > *m:
		*m += *m/medianStep + 1
	case wait < *m:
		*m -= *m / medianStep
	}
}
