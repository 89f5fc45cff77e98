package market

import (
	"errors"
	"fmt"
	"math/bits"

	"kvasird/settle"
)

// Price is what a model costs: fiat micro-units · 10⁶ per 10⁶ tokens, so that 10¹² is one
// fiat unit for a million tokens.
type Price uint64

const (
	// MinFloor is the least floor of a price: below it, steps would be lost to rounding.
	MinFloor Price = 1_000_000
	// MaxPrice bounds every price, so that one step more still fits 64 bits.
	MaxPrice Price = 1 << 62

	ppb         = settle.PPB
	smoothBits  = 16       // more fraction bits of the smoothed utilisation
	maxStep     = ppb / 20 // the cubic of expPPB is exact enough up to there
	maxDuration = 1 << 31  // seconds, of an epoch and of a mean
)

// Errors of prices.
var (
	ErrPriceRules = errors.New("price rules contradict themselves")
	ErrPriceState = errors.New("price state that no rules lead to")
	ErrEpochOrder = errors.New("epoch was applied already")
)

// Amount is what so many tokens cost, rounded up, where ref is base units per fiat unit: see
// settle.Charge. It is computed once for a quote, and kept in it.
func (p Price) Amount(tokens uint64, ref settle.Amount) (settle.Amount, error) {
	return settle.Charge(tokens, uint64(p), uint64(ref))
}

// PriceRules are the governed numbers of the thermostat. All but the band are the same for every
// model. ppb is parts in 10⁹.
type PriceRules struct {
	EpochSeconds uint64
	EMASeconds   uint64 // over which the utilisation is smoothed; not at all within an epoch
	GainPPB      uint64 // of ln p in an epoch, for a utilisation of 1 too much
	StepPPB      uint64 // of ln p in an epoch at most; not less than the gain
	TargetPPB    uint64 // utilisation at which the price stands still
	Floor        Price  // not less than MinFloor
	Ceiling      Price
}

// RulesOf are the rules among the parameters of a network.
func RulesOf(p settle.Params) PriceRules {
	return PriceRules{EpochSeconds: p.EpochSeconds, EMASeconds: p.EMASeconds, GainPPB: p.GainPPB, StepPPB: p.StepPPB,
		TargetPPB: p.TargetPPB, Floor: Price(p.FloorRaw), Ceiling: Price(p.CeilingRaw)}
}

// Check refuses rules that the arithmetic is not made for. The bounds of governance are narrower.
func (r PriceRules) Check() error {
	switch {
	case r.EpochSeconds == 0 || r.EMASeconds == 0 || r.EpochSeconds >= maxDuration || r.EMASeconds >= maxDuration:
		return fmt.Errorf("market: %w: an epoch of %d s, smoothed over %d s", ErrPriceRules, r.EpochSeconds, r.EMASeconds)
	case r.GainPPB > r.StepPPB || r.StepPPB > maxStep:
		return fmt.Errorf("market: %w: gain %d, step %d: gain ≤ step ≤ %d", ErrPriceRules, r.GainPPB, r.StepPPB, uint64(maxStep))
	case r.TargetPPB > ppb:
		return fmt.Errorf("market: %w: a target of %d, more than %d", ErrPriceRules, r.TargetPPB, uint64(ppb))
	case r.Floor < MinFloor || r.Ceiling < r.Floor || r.Ceiling > MaxPrice:
		return fmt.Errorf("market: %w: a band from %d to %d: %d ≤ floor ≤ ceiling ≤ %d", ErrPriceRules, r.Floor, r.Ceiling, MinFloor, MaxPrice)
	}
	return nil
}

// Load is what an epoch showed of a model, in thousandths of a token that went through the whole
// model. See Usage.
type Load struct {
	Counted  uint64 // work that moves the price
	Capacity uint64 // what the nodes demonstrated that they can do in an epoch
	Heard    bool   // anything was reported at all, if only by canaries
}

// PriceState is where the thermostat of one model stands after an epoch.
type PriceState struct {
	Epoch  uint64
	Price  Price
	Smooth uint64 // utilisation, smoothed, in 2⁻¹⁶ ppb
	NoData bool   // the epoch showed nothing, and the price was held
}

// Start is the state before the first epoch: as if the market had been in balance.
func (r PriceRules) Start(epoch uint64, p Price) PriceState {
	return PriceState{Epoch: epoch, Price: min(max(p, r.Floor), r.Ceiling), Smooth: r.TargetPPB << smoothBits}
}

// Next applies an epoch. Each is applied once, in order; epochs that are left out hold the price
// and are not made up for. An epoch without data, or without capacity, holds the price too, while
// one in which canaries ran and nobody paid is a utilisation of 0: otherwise a price that is too
// high for everybody would stay. A price outside the band, because that has moved, comes back by
// at most a step per epoch.
func (r PriceRules) Next(s PriceState, epoch uint64, l Load) (PriceState, error) {
	if err := r.Check(); err != nil {
		return s, err
	}
	if s.Price < MinFloor || s.Price > MaxPrice || s.Smooth > ppb<<smoothBits {
		return s, fmt.Errorf("market: %w: price %d, utilisation %d", ErrPriceState, s.Price, s.Smooth)
	}
	if epoch <= s.Epoch {
		return s, fmt.Errorf("market: epoch %d: %w: the last was %d", epoch, ErrEpochOrder, s.Epoch)
	}
	next := PriceState{Epoch: epoch, Smooth: s.Smooth, NoData: !l.Heard || l.Capacity == 0}
	var y int64
	if !next.NoData {
		next.Smooth = r.smooth(s.Smooth, utilisation(l))
		excess := int64(next.Smooth>>smoothBits) - int64(r.TargetPPB)
		y = int64(r.GainPPB) * excess / ppb
		y = min(max(y, -int64(r.StepPPB)), int64(r.StepPPB))
	}
	p := min(max(s.Price.moved(y), r.Floor), r.Ceiling)
	step := int64(r.StepPPB)
	next.Price = min(max(p, s.Price.moved(-step)), s.Price.moved(step))
	return next, nil
}

// utilisation is in ppb, at most 1.
func utilisation(l Load) uint64 {
	if l.Counted >= l.Capacity {
		return ppb
	}
	hi, lo := bits.Mul64(l.Counted, ppb)
	u, _ := bits.Div64(hi, lo, l.Capacity)
	return u
}

// smooth moves the mean by (u − mean) · epoch / EMA, the fraction rounded towards the mean.
func (r PriceRules) smooth(mean, u uint64) uint64 {
	a := min(r.EpochSeconds<<32/r.EMASeconds, 1<<32)
	part := func(d uint64) uint64 {
		hi, lo := bits.Mul64(d, a)
		return hi<<32 | lo>>32
	}
	if u <<= smoothBits; u < mean {
		return mean - part(mean-u)
	}
	return mean + part(u-mean)
}

// moved is p · e^y, y in ppb, rounded away from p: so that every step moves, whatever p is.
func (p Price) moved(y int64) Price {
	if y == 0 {
		return p
	}
	hi, lo := bits.Mul64(uint64(p), expPPB(y))
	q, rest := bits.Div64(hi, lo, ppb)
	if y > 0 && rest != 0 {
		q++
	}
	return Price(q)
}

// expPPB is e^y in ppb for |y| ≤ maxStep, by the first four terms: at most 300 ppb off. Integers
// only, since processors differ in how they round products of floats.
func expPPB(y int64) uint64 {
	m := uint64(max(y, -y))
	hi, lo := bits.Mul64(m*m, m)
	cubic, _ := bits.Div64(hi, lo, 6*ppb*ppb)
	if y < 0 {
		return ppb - m + m*m/(2*ppb) - cubic
	}
	return ppb + m + m*m/(2*ppb) + cubic
}
