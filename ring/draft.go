package ring

import "time"

// A drafter guesses the next tokens of a sequence from the sequence itself (prompt look-up): it
// finds where its last tokens stood before and drafts what followed there. How many it drafts is
// what would have brought the most tokens per time so far, so none where drafts are not accepted
// or where computing them costs as much as they bring.
//
// A round takes base + extra·k with k drafts, and brings 1 + a + a² + … + a^k tokens where a is
// the share of accepted drafts. Both are measured; a is kept for each length of match, since
// longer ones are more often right. While nothing is drafted a drifts back to where it began, so
// that drafting is tried again now and then.
type drafter struct {
	base, extra float64 // ns; 0: not measured
	accept      [matchLengths]float64
	match       int // length class of the draft that runs
	list        []int32
}

const (
	// A match has shortestMatch to longestMatch tokens.
	shortestMatch = 2
	longestMatch  = 5
	matchLengths  = longestMatch - shortestMatch + 1
	// lookBack bounds the tokens that are searched.
	lookBack = 1 << 14

	firstAccept = 0.6    // of drafts of which nothing is known
	firstExtra  = 1 / 8. // of base, for each draft, likewise
	learn       = 1 / 4. // weight of a round
	forget      = 1 / 64.
	worthwhile  = 1.05 // tokens per time that drafting must bring, as multiples of none
)

// draft returns the tokens to try behind those of a sequence, at most most. The result is valid
// until the next call.
func (d *drafter) draft(tokens []int32, most int) []int32 {
	d.list = d.list[:0]
	most = min(most, MaxDraft)
	if d.base == 0 || most < 1 {
		return d.list // the first round measures what one without drafts takes
	}
	at, n := lookUp(tokens)
	if n == 0 {
		return d.list
	}
	d.match = n - shortestMatch
	k := min(d.best(d.acceptance(d.match)), most)
	for i := at; i < at+k; i++ {
		if i < len(tokens) { // else the text repeats itself with a period of len(tokens)-at
			d.list = append(d.list, tokens[i])
		} else {
			d.list = append(d.list, d.list[i-len(tokens)])
		}
	}
	if k == 0 {
		d.accept[d.match] += (firstAccept - d.accept[d.match]) * forget
	}
	return d.list
}

func (d *drafter) acceptance(class int) float64 {
	if d.accept[class] == 0 {
		d.accept[class] = firstAccept
	}
	return d.accept[class]
}

// best is the number of drafts that brings the most tokens per time.
func (d *drafter) best(accept float64) int {
	extra := d.extra
	if extra == 0 {
		extra = d.base * firstExtra
	}
	k, rate := 0, worthwhile/d.base
	tokens, power := 1.0, 1.0
	for n := 1; n <= MaxDraft; n++ {
		power *= accept
		tokens += power
		if r := tokens / (d.base + extra*float64(n)); r > rate {
			k, rate = n, r
		}
	}
	return k
}

// observe learns from a round: how many tokens were drafted, how many of these accepted, and how
// long it took.
func (d *drafter) observe(drafted, accepted int, took time.Duration) {
	t := max(float64(took), 1)
	if drafted == 0 {
		d.base = blend(d.base, t)
		return
	}
	d.extra = blend(d.extra, max((t-d.base)/float64(drafted), 1))
	// Of the drafts that were compared, the last one was rejected unless all were accepted.
	compared := min(accepted+1, drafted)
	a := d.acceptance(d.match)
	for i := range compared {
		hit := 0.01 // never 0, which means not known
		if i < accepted {
			hit = 0.99
		}
		a += (hit - a) * learn
	}
	d.accept[d.match] = a
}

func blend(average, value float64) float64 {
	if average == 0 {
		return value
	}
	return average + (value-average)*learn
}

// lookUp finds the latest earlier place where the last tokens stood, the longest match first, and
// returns the position behind it and the tokens that match; 0, 0 if there is none.
func lookUp(tokens []int32) (at, length int) {
	end := len(tokens)
	for i := end - 1; i >= shortestMatch && i >= end-lookBack; i-- { // the match ends before i
		n := 0
		for n < longestMatch && n < i && tokens[i-1-n] == tokens[end-1-n] {
			n++
		}
		if n >= shortestMatch && n > length {
			at, length = i, n
			if n == longestMatch {
				break
			}
		}
	}
	return at, length
}
