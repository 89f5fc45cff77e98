package sim

import (
	"fmt"
	"math"

	"kvasird/market"
	"kvasird/settle"
)

const (
	wallets      = 6           // of consumers, with a sixth of their demand each
	whaleWallet  = wallets     // one that is as large as the scenario says
	bothWallet   = wallets + 1 // of those who earn what they spend
	buyers       = wallets + 2
	tokensAnHour = 1000 * 3600 // through a capacity of 1
	milliRate    = 1000 * 1000 // of a capacity of 1, in thousandths of a token per second
	rawUnit      = market.Price(1_000_000_000_000)
	payPart      = 0.85 // of a price, in balance: what the fee leaves
	firstRef     = settle.Amount(1_000_000_000)
)

// Mutation is rules that a market is run without, to show what they are for. The zero value is our
// rules.
type Mutation struct {
	CountAnnounced  bool    // capacity that nobody demonstrated counts
	CountSelfRouted bool    // work whose node the payer chose counts
	TokenBand       bool    // the band is fixed in the token, not in fiat units
	Unbounded       bool    // parameters may be what governance refuses
	Pot             float64 // emission in an hour whatever was done, in payments of an hour in balance
}

// Sample is an hour of the market.
type Sample struct {
	Hour        int
	Price       float64 // that a consumer pays, in fiat units of that hour
	Raw         market.Price
	Supply      float64
	Utilisation float64 // of the supply, by those who pay
	Served      float64
	Rejected    float64 // part of the demand
	Rewards     float64 // of the nodes in the hour, in fiat units
	Emission    float64 // of it
	Pool        float64 // of the insurance, in fiat units
	Claims      float64 // paid in the hour, in fiat units
	Treasury    float64 // all so far, in fiat units of each hour
}

// Market is a running market.
type Market struct {
	Agents   Agents
	Mutation Mutation
	Params   settle.Params

	demand float64 // at a price of 1
	whale  float64 // of one wallet more
	fake   float64 // capacity that is announced and not there, as a part of what is
	token  float64 // worth of the token in fiat units, 1 at first
	refLag int     // hours that the reference is old; negative: it is governed
	volume float64 // of wash traders, for each capacity of 1
	pot    bool    // the emission of Mutation.Pot runs

	kinds []*nodes
	usage *market.Usage
	state market.PriceState
	seen  float64 // price that consumers see
	earns float64 // of the nodes, in fiat units of the last hour

	tokens  []float64 // worth of the token in each hour
	refs    []market.Reference
	reserve settle.Reserve
	pool    settle.Amount
	premium map[settle.Wallet]settle.Premiums
	washed  float64 // what wash traders lost in fees, in fiat units
	samples []Sample
}

// newMarket is a market in balance.
func newMarket(s *Scenario) (*Market, error) {
	p := s.Params
	if err := p.Validate(false); err != nil && !s.Mutation.Unbounded {
		return nil, err
	}
	if p.EpochSeconds != settle.Hour {
		return nil, fmt.Errorf("sim: an epoch of %d s: only hours are simulated", p.EpochSeconds)
	}
	m := &Market{Agents: s.Agents, Mutation: s.Mutation, Params: p, demand: 1, token: 1, refLag: s.RefLag,
		usage: market.NewUsage(0), seen: 1, premium: map[settle.Wallet]settle.Premiums{},
		reserve: settle.NewReserve(settle.Amount(p.EmissionTotal)), refs: []market.Reference{{PerFiat: firstRef, Set: 0}}}
	m.state = market.RulesOf(p).Start(0, rawUnit)
	m.kinds = []*nodes{newNodes("volunteer", m.Agents, m.target())}
	m.earns = payPart * m.target() * tokensAnHour / 1e6
	return m, nil
}

func (m *Market) target() float64 { return float64(m.Params.TargetPPB) / settle.PPB }

func (m *Market) supply() (sum float64) {
	for _, k := range m.kinds {
		sum += k.all()
	}
	return sum
}

// worth is the fiat value of base units in this hour.
func (m *Market) worth(a settle.Amount) float64 { return float64(a) / float64(firstRef) * m.token }

// reference is base units per fiat unit that quotes go by in this hour.
func (m *Market) reference() settle.Amount {
	hour := len(m.tokens) - 1
	switch {
	case m.Mutation.TokenBand:
		return firstRef
	case m.refLag >= 0:
		return settle.Amount(float64(firstRef) / m.tokens[max(0, hour-m.refLag)])
	}
	// Governed: signed once a day, as far as the rules let it.
	last := m.refs[len(m.refs)-1]
	if hour%24 == 0 && hour > 0 {
		want := settle.Amount(float64(firstRef) / m.token)
		next := market.Reference{PerFiat: min(max(want, last.PerFiat/2+1), last.PerFiat*2), Set: uint64(hour) * settle.Hour}
		if next.PerFiat != last.PerFiat && market.Follow(m.refs, next) == nil {
			m.refs, last = append(m.refs, next), next
		}
	}
	return last.PerFiat
}

// hour lets one hour pass.
func (m *Market) hour() error {
	m.tokens = append(m.tokens, m.token)
	ref, supply, target := m.reference(), m.supply(), m.target()
	price := float64(m.state.Price) / float64(rawUnit) * m.worth(ref)
	m.seen += (price - m.seen) / m.Agents.PriceLag
	asks, asked := m.asks(price)
	s := Sample{Hour: len(m.samples), Price: price, Raw: m.state.Price, Supply: supply, Served: min(asked, supply)}
	if s.Served > 0 {
		s.Rejected, s.Utilisation = 1-s.Served/asked, s.Served/supply
	} else if asked > 0 {
		s.Rejected = 1
	}
	for i := range asks {
		asks[i] *= 1 - s.Rejected
	}
	pay, err := m.settle(&s, asks, ref)
	if err != nil {
		return err
	}
	s.Rewards = m.worth(pay)
	if m.pot {
		pot := m.Mutation.Pot * target * tokensAnHour / 1e6
		s.Rewards += pot
		s.Emission += pot
	}
	m.earns = s.Rewards
	s.Pool = m.worth(m.pool)
	income := 0.0
	if supply > 0 {
		income = s.Rewards/(tokensAnHour/1e6)/supply - m.Agents.Marginal*s.Utilisation
	}
	for _, k := range m.kinds {
		k.decide(income)
	}
	if err := m.reprice(asks); err != nil {
		return err
	}
	m.samples = append(m.samples, s)
	return nil
}

// asks is what each wallet would have computed in this hour, in capacity.
func (m *Market) asks(price float64) (by [buyers]float64, sum float64) {
	unit := m.target() * m.Agents.demand(m.seen)
	for i := range wallets {
		by[i] = m.demand * (1 - payPart*m.Agents.Both) * unit / wallets
	}
	by[whaleWallet] = m.whale * unit
	by[bothWallet] = m.Agents.Both * m.earns / price / (tokensAnHour / 1e6)
	for _, x := range by {
		sum += x
	}
	return by, sum
}

func wallet(n int) settle.Wallet { return settle.Wallet{1, byte(n)} }

// settle pays for what was served, by the rules, and returns what the nodes got.
func (m *Market) settle(s *Sample, bought [buyers]float64, ref settle.Amount) (pay settle.Amount, err error) {
	var fees settle.Amount
	var claims []settle.Amount
	var by []settle.Wallet
	day := uint64(s.Hour / 24)
	for i, part := range bought {
		tokens := uint64(part * tokensAnHour)
		if tokens == 0 {
			continue
		}
		split, emitted, err := m.request(tokens, ref)
		if err != nil {
			return 0, err
		}
		pay += split.Pay[0] + emitted
		fees += split.Fee
		s.Emission += m.worth(emitted)
		s.Treasury += m.worth(split.Treasury)
		m.pool += split.Insurance + split.Dust
		w := wallet(i)
		if m.premium[w], err = m.premium[w].Pay(day, split.Insurance); err != nil {
			return 0, err
		}
		left, err := m.premium[w].Left(day, m.Params.ClaimsPPM)
		if err != nil {
			return 0, err
		}
		claims = append(claims, min(left, settle.Amount(float64(split.Pay[0])*m.Agents.Failed)))
		by = append(by, w)
	}
	if err := m.claim(s, day, by, claims); err != nil {
		return 0, err
	}
	if n := len(m.samples); n > 0 {
		s.Treasury += m.samples[n-1].Treasury
	}
	m.wash(ref)
	m.reserve, err = m.Params.EndEpoch(m.reserve, fees)
	return pay, err
}

// request settles one request for tokens that were all delivered.
func (m *Market) request(tokens uint64, ref settle.Amount) (s settle.Split, emitted settle.Amount, err error) {
	paid, err := m.state.Price.Amount(tokens, ref)
	if err != nil {
		return s, 0, err
	}
	if s, err = m.Params.Split(paid, paid, []settle.Share{settle.Whole}); err != nil {
		return s, 0, err
	}
	if emitted, err = m.Params.Emission(m.reserve, s.Fee); err != nil {
		return s, 0, err
	}
	m.reserve, err = m.reserve.Pay(emitted)
	return s, emitted, err
}

func (m *Market) claim(s *Sample, day uint64, by []settle.Wallet, claims []settle.Amount) error {
	paid, err := m.Params.PayClaims(m.pool, claims)
	if err != nil {
		return err
	}
	for i, a := range paid {
		if m.premium[by[i]], err = m.premium[by[i]].Claim(day, m.Params.ClaimsPPM, a); err != nil {
			return err
		}
		m.pool -= a
		s.Claims += m.worth(a)
	}
	return nil
}

// wash has the wash traders buy from themselves: all comes back to them but the fee.
func (m *Market) wash(ref settle.Amount) {
	paid, err := m.state.Price.Amount(uint64(m.volume*tokensAnHour), ref)
	if err != nil || m.volume == 0 {
		return
	}
	if split, err := m.Params.Split(paid, paid, []settle.Share{settle.Whole}); err == nil {
		m.washed += m.worth(split.Fee)
	}
}

// reprice reports the hour as nodes and receipts do, and applies the epoch.
func (m *Market) reprice(bought [buyers]float64) error {
	epoch := m.state.Epoch + 1
	announced := map[string]uint64{}
	for _, kind := range m.kinds {
		for i, node := range kind.names {
			rate := kind.capacity(i) * milliRate
			announced[node] = uint64(rate * (1 + m.fake))
			if m.Mutation.CountAnnounced {
				rate *= 1 + m.fake
			}
			if err := m.usage.Show(epoch, node, uint64(rate)); err != nil {
				return err
			}
		}
	}
	count := func(payer settle.Wallet, part float64, among int) error {
		return m.usage.Count(epoch, market.Work{Payer: payer, Tokens: uint64(part * tokensAnHour), Share: settle.PPB, Among: among})
	}
	for i, part := range bought {
		if err := count(wallet(i), part, market.MinDraw); err != nil {
			return err
		}
	}
	among := 0
	if m.Mutation.CountSelfRouted {
		among = market.MinDraw
	}
	for i := range 10 { // enough wallets that none is held to its part
		if err := count(settle.Wallet{2, byte(i)}, m.volume/10, among); err != nil {
			return err
		}
	}
	rules := market.RulesOf(m.Params)
	load, err := m.usage.Close(epoch, rules, announced)
	if err != nil {
		return err
	}
	m.state, err = rules.Next(m.state, epoch, load)
	return err
}

// swing is max − min of ln p over the last days.
func swing(samples []Sample, days int) float64 {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, s := range samples[max(0, len(samples)-24*days):] {
		lo, hi = min(lo, math.Log(s.Price)), max(hi, math.Log(s.Price))
	}
	return hi - lo
}
