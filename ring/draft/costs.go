package draft

import (
	"math"
	"time"
)

// worthwhile are the tokens per time that drafting must bring, as multiples of none.
const worthwhile = 1.05

// Costs is what a round takes, in ns: Base, Row for each of its rows, and Pass for each pass that
// guesses one more token of every sequence. Base 0: nothing was measured yet.
type Costs struct{ Base, Row, Pass float64 }

// Time of a round without passes.
func (c *Costs) Time(rows int) time.Duration { return time.Duration(c.Base + c.Row*float64(rows)) }

// Guess is what a sequence may draft.
type Guess struct {
	Accept float64 // share of the guesses that are right where those before them are
	Most   int
	Passes bool // each guess takes a pass, which other sequences share
}

// Plan sets k[i] to how many tokens the i-th sequence drafts in the next round: as many as bring
// the most tokens per time of all together.
func (c *Costs) Plan(guesses []Guess, k []int) {
	clear(k)
	n := float64(len(guesses))
	least := c.Base + c.Row*n
	if c.Base == 0 || n == 0 || !(least > 0) {
		return
	}
	// The best ratio of tokens to time is the limit of: with the price of a ns that the ratio of
	// before is, take whatever brings more than it costs.
	price := n / least
	none := price
	for range 16 {
		tokens, took := c.take(guesses, k, price)
		next := (n + tokens) / (least + took)
		if next <= price*(1+1e-6) {
			break
		}
		price = next
	}
	if price < worthwhile*none {
		clear(k)
	}
}

// take chooses the guesses that are worth more than they cost, and says what these bring and take.
func (c *Costs) take(guesses []Guess, k []int, price float64) (tokens, took float64) {
	clear(k)
	row := price * c.Row
	for i, g := range guesses {
		if g.Passes {
			continue
		}
		for p := g.Accept; k[i] < min(g.Most, Most) && p > row; p *= g.Accept {
			k[i]++
			tokens, took = tokens+p, took+c.Row
		}
	}
	for depth := 1; depth <= Most; depth++ {
		gain, rows := 0.0, 0
		for _, g := range guesses {
			if p := g.at(depth); p > row {
				gain += p
				rows++
			}
		}
		if spent := c.Row*float64(rows) + c.Pass; gain > price*spent {
			tokens, took = tokens+gain, took+spent
		} else {
			break
		}
		for i, g := range guesses {
			if g.at(depth) > row {
				k[i] = depth
			}
		}
	}
	return tokens, took
}

// at is how likely the guess of a pass is right with all before it; 0: it is not made.
func (g Guess) at(depth int) float64 {
	if !g.Passes || depth > g.Most {
		return 0
	}
	return math.Pow(g.Accept, float64(depth))
}

const (
	// firstPass is what a pass takes as long as none was measured, of Base.
	firstPass = 1 / 8.
	// rowScale makes a usual number of rows weigh as much as the base in what is learned.
	rowScale = 8
)

// Round learns from a round of some rows (normalised least mean squares): from rounds of as many
// rows each, the time of rows between is only a guess.
func (c *Costs) Round(rows int, took time.Duration) {
	x := float64(rows) / rowScale
	wrong := float64(took) - c.Base - c.Row*float64(rows)
	step := learn * wrong / (1 + x*x)
	if c.Base == 0 {
		step = wrong / (1 + x*x)
	}
	c.Base = max(c.Base+step, 1)
	c.Row = max(c.Row+step*x/rowScale, 0)
	if c.Pass == 0 {
		c.Pass = c.Base * firstPass
	}
}

// Drafted learns from a pass.
func (c *Costs) Drafted(took time.Duration) { c.Pass += (max(float64(took), 1) - c.Pass) * learn }

// Share is a share of guesses that are right, as measured. The zero value is of nothing yet.
type Share float64

// first is the share of guesses of which nothing is known.
const first = 0.6

// Get returns the share.
func (s Share) Get() float64 {
	if s == 0 {
		return first
	}
	return float64(s)
}

// Observe learns that of some guesses so many were right, up to the first wrong one, with a weight of
// each.
func (s *Share) Observe(guesses, right int, weight float64) {
	a := s.Get()
	for i := range min(right+1, guesses) {
		hit := 0.01 // never 0, which means not known
		if i < right {
			hit = 0.99
		}
		a += (hit - a) * weight
	}
	*s = Share(a)
}

// Forget moves the share towards one of nothing, so that guesses are tried again.
func (s *Share) Forget(weight float64) { *s = Share(s.Get() + (first-s.Get())*weight) }
