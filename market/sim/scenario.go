package sim

import (
	"fmt"
	"math"
	"slices"

	"kvasird/settle"
)

// Event changes a market at the beginning of an hour.
type Event struct {
	Hour int
	Do   func(*Market)
}

// Scenario is a market in balance and what happens to it.
type Scenario struct {
	Name, About string
	Days        int
	Agents      Agents
	Params      settle.Params // an epoch is an hour
	Mutation    Mutation
	RefLag      int // hours that the reference is old; negative: governed, signed once a day
	Events      []Event
}

// shock is when something happens in every scenario: until then there is balance.
const shock = 24

// UsualParams are the defaults of a network with a band of about a third to three times the price
// in balance.
func UsualParams() settle.Params {
	p := settle.DefaultParams()
	p.FloorRaw, p.CeilingRaw = uint64(rawUnit)*325/1000, uint64(rawUnit)*32/10
	return p
}

func usual(name, about string, days int, events ...Event) Scenario {
	return Scenario{Name: name, About: about, Days: days, Agents: Usual(), Params: UsualParams(), RefLag: 6, Events: events}
}

func (s Scenario) with(change func(*Scenario)) Scenario {
	change(&s)
	return s
}

func slowExit(s *Scenario) { s.Agents.Exit = 168 }

func at(hour int, do func(*Market)) Event { return Event{hour, do} }

func demand(times float64) Event {
	return at(shock, func(m *Market) { m.demand *= times })
}

func supply(times float64) Event {
	return at(shock, func(m *Market) { m.kinds[0].potential *= times })
}

func crash(to float64) Event { return at(shock, func(m *Market) { m.token = to }) }

func mercenaries(m *Market) { m.kinds = append(m.kinds, newMercenaries(m.Agents, m.target())) }

// reserve puts aside an emission that ten years do not use up.
func reserve(s *Scenario) { s.Params.EmissionTotal = 1e15 }

// whale has a wallet come and go, every so many hours, with as much demand as all the others.
func whale(hours, days int) (events []Event) {
	for h, on := shock, true; h < days*24; h, on = h+hours, !on {
		size := 0.0
		if on {
			size = 1
		}
		events = append(events, at(h, func(m *Market) { m.whale = size }))
	}
	return events
}

// Scenarios are those that there is something to learn from.
func Scenarios() []Scenario {
	return []Scenario{
		usual("balance", "nothing happens", 60),
		usual("supply-x10", "ten times the nodes, of the same kinds", 180, supply(10)).with(slowExit),
		usual("demand-x3", "three times the demand", 180, demand(3)).with(slowExit),
		usual("demand-x10", "ten times the demand, at once", 240, demand(10)).with(slowExit),
		usual("demand-down-90", "nine tenths of the demand leave", 180, demand(0.1)).with(slowExit),
		usual("demand-down-50", "half of the demand leaves", 180, demand(0.5)).with(slowExit),
		usual("whale", "a wallet that is half of the demand comes and goes every 72 hours", 120, whale(72, 120)...).with(slowExit),
		usual("crash", "the token loses 80 %, the reference is 6 hours old", 180, crash(0.2)),
		usual("crash-governed", "the token loses 80 %, the reference is signed once a day, at most twice or half", 180, crash(0.2)).with(
			func(s *Scenario) { s.RefLag = -1 }),
		usual("crash-token-band", "mutation: the token loses 80 %, and the band is fixed in the token", 180, crash(0.2)).with(
			func(s *Scenario) { s.Mutation.TokenBand = true }),
		usual("mercenaries", "nodes that come for the emission, which is a part of each fee", 180, at(shock, mercenaries)).with(reserve),
		usual("mercenaries-pot", "mutation: an emission of three times the payments, whatever is done, for 30 days", 180,
			at(shock, func(m *Market) { m.pot = true; mercenaries(m) }), at(shock+30*24, func(m *Market) { m.pot = false })).with(
			func(s *Scenario) { s.Mutation.Pot = 3 }),
		usual("boasters", "ten times the capacity is announced, and not there", 120, at(shock, func(m *Market) { m.fake = 10 })),
		usual("boasters-counted", "mutation: announced capacity counts, and twice of what is there is announced", 180,
			at(shock, func(m *Market) { m.fake = 1 })).with(func(s *Scenario) { s.Mutation.CountAnnounced = true }),
		usual("wash", "wash traders buy from themselves, a third of the capacity", 120, at(shock, func(m *Market) { m.volume = 0.3 })),
		usual("wash-counted", "mutation: work counts whose node the payer chose; wash traders push the price", 120,
			at(shock, func(m *Market) { m.volume = 0.3 })).with(func(s *Scenario) { s.Mutation.CountSelfRouted = true }),
	}
}

// Find returns the scenario of a name.
func Find(name string) (Scenario, error) {
	var names []string
	for _, s := range Scenarios() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Scenario{}, fmt.Errorf("sim: no scenario %.40q: there are %q", name, names)
}

// Result is what came of a scenario.
type Result struct {
	Scenario     Scenario
	Samples      []Sample
	Price        float64 // in the end: mean of the last ten days
	Supply       float64 // likewise
	Utilisation  float64 // likewise
	Served       float64 // likewise, 1 in balance
	SupplyMin    float64
	Swing        float64 // max − min of ln p in the last 20 days
	Settled      float64 // days from the shock until the price stays within 5 % of the end
	Rejecting    float64 // days with more than 5 % rejected
	RejectedPeak float64
	Washed       float64 // what wash traders lost, in fiat units
	Dead         bool    // next to nothing is served in the end
}

// Run plays a scenario.
func Run(s Scenario) (*Result, error) {
	m, err := newMarket(&s)
	if err != nil {
		return nil, err
	}
	events := slices.Clone(s.Events)
	slices.SortStableFunc(events, func(a, b Event) int { return a.Hour - b.Hour })
	for h := range s.Days * 24 {
		for len(events) > 0 && events[0].Hour <= h {
			events[0].Do(m)
			events = events[1:]
		}
		if err := m.hour(); err != nil {
			return nil, fmt.Errorf("sim: %s, hour %d: %w", s.Name, h, err)
		}
	}
	return summary(s, m), nil
}

func summary(s Scenario, m *Market) *Result {
	r := &Result{Scenario: s, Samples: m.samples, SupplyMin: math.Inf(1), Swing: swing(m.samples, 20), Washed: m.washed}
	last := m.samples[max(0, len(m.samples)-240):]
	for _, x := range last {
		n := float64(len(last))
		r.Price += x.Price / n
		r.Supply += x.Supply / n
		r.Utilisation += x.Utilisation / n
		r.Served += x.Served / n / m.target()
	}
	for _, x := range m.samples[min(shock, len(m.samples)):] {
		r.SupplyMin = min(r.SupplyMin, x.Supply)
		r.RejectedPeak = max(r.RejectedPeak, x.Rejected)
		if x.Rejected > 0.05 {
			r.Rejecting += 1.0 / 24
		}
		if math.Abs(math.Log(x.Price/r.Price)) > 0.05 {
			r.Settled = float64(x.Hour-shock) / 24
		}
	}
	r.Dead = r.Supply < 0.01
	return r
}
