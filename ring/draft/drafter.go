package draft

import "time"

// A Drafter guesses the next tokens of a sequence from the sequence itself (prompt look-up): it
// finds where its last tokens stood before and drafts what followed there. How many it drafts is
// what would have brought the most tokens per time so far, so none where drafts are not accepted
// or where computing them costs as much as they bring. The zero value is ready.
//
// A round takes base + extra·k with k drafts, and brings 1 + a + a² + … + a^k tokens where a is
// the share of accepted drafts. Both are measured; a is kept for each length of match, since
// longer ones are more often right. While nothing is drafted a drifts back to where it began, so
// that drafting is tried again now and then.
type Drafter struct {
	base, extra float64 // ns; 0: not measured
	accept      [Matches]Share
	match       int // length class of the draft that runs
	list        []int32
}

const (
	firstExtra = 1 / 8. // of base, for each draft of which nothing is known
	learn      = 1 / 4. // weight of a round
	forget     = 1 / 64.
)

// Draft returns the tokens to try behind those of a sequence, at most most. The result is valid
// until the next call.
func (d *Drafter) Draft(tokens []int32, most int) []int32 {
	d.list = d.list[:0]
	most = min(most, Most)
	if d.base == 0 || most < 1 {
		return d.list // the first round measures what one without drafts takes
	}
	at, n := LookUp(tokens)
	if n == 0 {
		return d.list
	}
	d.match = n - ShortestMatch
	k := min(d.best(d.accept[d.match].Get()), most)
	d.list = Follow(d.list, tokens, at, k)
	if k == 0 {
		d.accept[d.match].Forget(forget)
	}
	return d.list
}

// best is the number of drafts that brings the most tokens per time.
func (d *Drafter) best(accept float64) int {
	extra := d.extra
	if extra == 0 {
		extra = d.base * firstExtra
	}
	costs := Costs{Base: d.base - extra, Row: extra}
	var k [1]int
	costs.Plan([]Guess{{Accept: accept, Most: Most}}, k[:])
	return k[0]
}

// Observe learns from a round: how many tokens were drafted, how many of these accepted, and how
// long it took.
func (d *Drafter) Observe(drafted, accepted int, took time.Duration) {
	t := max(float64(took), 1)
	if drafted == 0 {
		d.base = blend(d.base, t)
		return
	}
	d.extra = blend(d.extra, max((t-d.base)/float64(drafted), 1))
	d.accept[d.match].Observe(drafted, accepted, learn)
}

func blend(average, value float64) float64 {
	if average == 0 {
		return value
	}
	return average + (value-average)*learn
}
