package sim

import (
	"fmt"
	"math"
)

// Agents are the people of a market.
type Agents struct {
	Elasticity float64 // of the demand by price
	Outside    float64 // price at which everybody buys elsewhere
	PriceLag   float64 // hours until consumers see a price

	Potential float64 // capacity that might come, for a capacity of 1 that serves in balance
	Spread    float64 // of the logarithm of the nodes' costs
	Marginal  float64 // cost of computing, as a part of the price in balance

	Delay float64 // hours until a price becomes a decision
	Entry float64 // hours in which most of those come who decided to
	Exit  float64 // hours in which most of those leave who decided to

	Both   float64 // part of the nodes' owners who spend on answers what they earn
	Failed float64 // part of the answers for which a consumer claims
}

// Usual are the agents of a region: of the figures, only the orders of magnitude are known.
func Usual() Agents {
	return Agents{Elasticity: 0.9, Outside: 4, PriceLag: 6, Potential: 2.4, Spread: 0.5, Marginal: 0.25,
		Delay: 24, Entry: 72, Exit: 24, Both: 0.1, Failed: 0.01}
}

// demand is what consumers ask for at a price, 1 at a price of 1.
func (a *Agents) demand(price float64) float64 {
	stay := func(p float64) float64 { return max(0, 1-math.Pow(p/a.Outside, 12)) }
	return math.Pow(price, -a.Elasticity) * stay(price) / stay(1)
}

// normal is the part of a normal distribution below x, and its inverse.
func normal(x float64) float64        { return 0.5 * math.Erfc(-x/math.Sqrt2) }
func normalInverse(p float64) float64 { return math.Sqrt2 * math.Erfinv(2*p-1) }

// cohorts is into how many groups of like costs the nodes of a kind are divided.
const cohorts = 20

// nodes are volunteers of one kind: cohorts by cost, the cheapest first.
type nodes struct {
	names       [cohorts]string
	potential   float64 // capacity of all of them
	median      float64 // cost of an hour of capacity that earns nothing
	spread      float64
	delay       int // hours
	entry, exit float64
	here        [cohorts]float64 // part of each cohort that serves
	income      float64          // of an hour of capacity, smoothed over a day
	remembered  []float64        // of the hours of the delay, the oldest first
	fixed       bool             // nobody comes or leaves
}

// newNodes makes the volunteers of a market in balance: a capacity of 1 serves.
func newNodes(name string, a Agents, target float64) *nodes {
	net := (payPart - a.Marginal) * target
	at := 1 / a.Potential
	n := &nodes{potential: a.Potential, median: net * math.Exp(-a.Spread*normalInverse(at)), spread: a.Spread,
		delay: int(a.Delay), entry: a.Entry, exit: a.Exit, income: net}
	for i := range n.here {
		n.names[i] = fmt.Sprint(name, " ", i)
		n.here[i] = min(max(at*cohorts-float64(i), 0), 1)
	}
	for range n.delay {
		n.remembered = append(n.remembered, net)
	}
	return n
}

// newMercenaries are twice as much capacity as all volunteers', away in balance: their costs are a
// fifth above what balance pays. They come fast for whatever is paid beyond the work.
func newMercenaries(a Agents, target float64) *nodes {
	a.Entry, a.Delay = 24, 0
	n := newNodes("mercenary", a, target)
	n.potential, n.median, n.spread = 2*a.Potential, 1.2*n.income, 0.08
	n.here = [cohorts]float64{}
	return n
}

func (n *nodes) capacity(cohort int) float64 { return n.potential / cohorts * n.here[cohort] }

func (n *nodes) all() (sum float64) {
	for i := range n.here {
		sum += n.capacity(i)
	}
	return sum
}

// decide lets an hour pass in which an hour of capacity earned so much: whoever's costs are below
// what it earned a delay ago comes, the others leave.
func (n *nodes) decide(income float64) {
	n.income += (income - n.income) / 24
	n.remembered = append(n.remembered, n.income)
	seen := n.remembered[0]
	n.remembered = n.remembered[1:]
	if n.fixed {
		return
	}
	var part float64
	if seen > 0 {
		part = normal(math.Log(seen/n.median) / n.spread)
	}
	for i := range n.here {
		want := min(max(part*cohorts-float64(i), 0), 1)
		if want > n.here[i] {
			n.here[i] += (want - n.here[i]) / n.entry
		} else {
			n.here[i] += (want - n.here[i]) / n.exit
		}
	}
}
