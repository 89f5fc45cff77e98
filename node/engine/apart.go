package engine

import "time"

// apart is what is known of whether two contexts are faster than one, from rounds with several requests.
//
// A round of one context computes for a time C and waits for experts elsewhere for W. Two, each with half of the
// rows, take no longer than max(W+C/2, C) if the time goes by rows, and max(W+C, 2C) if rows cost nothing: so with
// W >= C nothing is lost, and with W far above C nothing is gained. They are used where W is between 1 and 4 times C:
// all together are then 1.33 to 1.11 times as fast at most. In a quick round what comes with every decode counts for
// more than either (docs/performance.md).
type apart struct {
	rounds          int
	compute, waited float64 // seconds of a round, were it of one context; smoothed
}

const (
	leastApart      = 2                     // requests that run already, for another one to go elsewhere
	apartRounds     = 32                    // that are looked at first
	apartWeight     = 1 / 32.               // of a round
	apartRound      = 10 * time.Millisecond // quicker ones are left alone
	apartLeastWaits = 1                     // of the time that is computed
	apartMostWaits  = 4
)

// observe takes in a round of a context, beside which others compute what belongs to it.
func (a *apart) observe(use *turnUse, lanes int) {
	weight := max(apartWeight, 1/float64(a.rounds+1))
	a.rounds++
	a.compute += weight * (use.computed.Seconds()*float64(lanes) - a.compute)
	a.waited += weight * (use.waited.Seconds() - a.waited)
}

func (a *apart) pays() bool {
	return a.rounds >= apartRounds && a.compute+a.waited >= apartRound.Seconds() &&
		a.waited >= apartLeastWaits*a.compute && a.waited <= apartMostWaits*a.compute
}
