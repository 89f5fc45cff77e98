package draft

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// rate is the tokens per ns that k guesses of each sequence bring.
func (c Costs) rate(guesses []Guess, k []int) float64 {
	tokens, took, passes := float64(len(k)), c.Base+c.Row*float64(len(k)), 0
	for i, g := range guesses {
		for j := range k[i] {
			tokens += math.Pow(g.Accept, float64(j+1))
			took += c.Row
		}
		if g.Passes {
			passes = max(passes, k[i])
		}
	}
	return tokens / (took + c.Pass*float64(passes))
}

// best tries everything, up to most guesses of each of two sequences.
func (c Costs) best(guesses []Guess, most int) float64 {
	rate := 0.0
	for a := range min(most, guesses[0].Most) + 1 {
		for b := range min(most, guesses[1].Most) + 1 {
			rate = max(rate, c.rate(guesses, []int{a, b}))
		}
	}
	return rate
}

// TestPlan: what is chosen is what brings the most tokens per time, within what is allowed.
func TestPlan(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	drafted := 0
	for range 300 {
		c := Costs{Base: 1e6, Row: 1e6 * math.Pow(10, -3*r.Float64()), Pass: 1e6 * math.Pow(10, -3*r.Float64())}
		var guesses []Guess
		for range 2 {
			guesses = append(guesses, Guess{Accept: 0.05 + 0.9*r.Float64(), Most: r.IntN(Most + 4), Passes: r.IntN(2) == 0})
		}
		k := []int{99, 99}
		c.Plan(guesses, k)
		for i := range k {
			if k[i] < 0 || k[i] > min(Most, guesses[i].Most) {
				t.Fatalf("%d guesses of %+v", k[i], guesses[i])
			}
			drafted += k[i]
		}
		none, best, got := c.rate(guesses, []int{0, 0}), c.best(guesses, Most), c.rate(guesses, k)
		if best < worthwhile*none {
			best = none
		}
		if got < best*(1-1e-4) {
			t.Errorf("%+v, %+v: %v guesses bring %g, the best %g, none %g", c, guesses, k, got, best, none)
		}
	}
	if drafted == 0 {
		t.Error("nothing was drafted")
	}
}

func TestPlanOfNothing(t *testing.T) {
	for _, c := range []Costs{{}, {Row: 1}, {Base: math.NaN()}, {Base: -5, Row: 1}} {
		k := []int{3}
		if c.Plan([]Guess{{Accept: 0.9, Most: 9}}, k); k[0] != 0 {
			t.Errorf("%+v: %d guesses", c, k[0])
		}
	}
	c := Costs{Base: 1}
	c.Plan(nil, nil)
}

// TestCosts: the costs of rounds are found, also when they change, and from rounds that vary little.
func TestCosts(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	var c Costs
	for _, is := range []Costs{{Base: 80e6, Row: 1e6}, {Base: 2e6, Row: 0.5e6}, {Base: 300e6, Row: 10e6}} {
		for range 200 {
			rows := 1 + r.IntN(16)
			c.Round(rows, time.Duration((is.Base+is.Row*float64(rows))*(0.95+0.1*r.Float64())))
		}
		for _, rows := range []int{1, 8, 16} {
			if got, want := float64(c.Time(rows)), is.Base+is.Row*float64(rows); math.Abs(got/want-1) > 0.15 {
				t.Errorf("%d rows: %v, want %v", rows, got, want)
			}
		}
	}
	for range 100 {
		c.Drafted(time.Millisecond)
	}
	if math.Abs(c.Pass/1e6-1) > 0.01 {
		t.Errorf("a pass takes %g ns, want 1e6", c.Pass)
	}
}

// TestCostsOnceSlow: guesses that seemed too costly once are tried again.
func TestCostsOnceSlow(t *testing.T) {
	guesses, k := []Guess{{Accept: 0.7, Most: Most, Passes: true}}, []int{0}
	c := Costs{Base: 1e6, Row: 2e6, Pass: 2e6}
	for i := range 1000 {
		if c.Plan(guesses, k); k[0] > 0 {
			if i < 10 {
				t.Errorf("tried again after %d rounds", i)
			}
			return
		}
		c.Round(1, 3*time.Millisecond)
		c.Forget(1. / 256)
	}
	t.Errorf("never tried again: %+v", c)
}

func TestShare(t *testing.T) {
	var s Share
	if s.Get() != first {
		t.Errorf("%v of nothing", s.Get())
	}
	for range 100 {
		s.Observe(8, 0, learn)
	}
	if s.Get() > 0.02 {
		t.Errorf("%v, all were wrong", s.Get())
	}
	for range 500 {
		s.Forget(forget)
	}
	if math.Abs(s.Get()-first) > 0.01 {
		t.Errorf("%v long after", s.Get())
	}
	for range 100 {
		s.Observe(8, 8, learn)
	}
	if s.Get() < 0.98 {
		t.Errorf("%v, all were right", s.Get())
	}
}

func TestFollow(t *testing.T) {
	got := Follow([]int32{9, 9}, []int32{1, 2, 3, 4}, 2, 5)
	if want := []int32{9, 9, 3, 4, 3, 4, 3}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSpare(t *testing.T) {
	for _, tt := range []struct{ tokens, wrong, want int }{{0, 0, 0}, {3, 0, 0}, {8, 0, 2}, {8, 2, 0}, {8, 5, 0}, {400, 30, 70}} {
		if got := Spare(tt.tokens, tt.wrong); got != tt.want {
			t.Errorf("%d tokens, %d wrong guesses: %d are left, want %d", tt.tokens, tt.wrong, got, tt.want)
		}
	}
}
