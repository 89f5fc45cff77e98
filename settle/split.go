package settle

import (
	"errors"
	"fmt"
	"math/big"
)

// Whole is the sum of the shares of one request, in Shares.
const Whole Share = PPB

// Share is a part of a request's work, in 10⁻⁹.
type Share uint64

// Refusals of a split.
var (
	ErrAboveEscrow = errors.New("more was used than was paid")
	ErrShares      = errors.New("the shares of a request sum to more than one")
	ErrCharge      = errors.New("no charge can be made")
)

// priceScale turns tokens · raw price · reference into base units: the raw price is in
// 10⁻⁶·10⁻⁶ fiat units per 10⁶ tokens.
const priceScale = 1_000_000_000_000_000_000

// Charge is the price of so many tokens at a raw price and a reference, rounded up: at
// least 1 when there is a token. Error: ErrCharge when the price or the reference is 0
// or the amount does not fit.
func Charge(tokens, raw, ref uint64) (Amount, error) {
	if raw == 0 || ref == 0 {
		return 0, fmt.Errorf("%w: price %d, reference %d", ErrCharge, raw, ref)
	}
	n := new(big.Int).SetUint64(tokens)
	n.Mul(n, new(big.Int).SetUint64(raw)).Mul(n, new(big.Int).SetUint64(ref))
	n.Add(n, big.NewInt(priceScale-1)).Quo(n, big.NewInt(priceScale))
	if !n.IsUint64() || n.Uint64() > noMax {
		return 0, fmt.Errorf("%w: %d tokens at price %d and reference %d: %w", ErrCharge, tokens, raw, ref, errOverflow)
	}
	return Amount(n.Uint64()), nil
}

// Split says where the escrow of one request goes. Always
// Refund + ΣPay + Dust + Insurance + Burn + Treasury = the escrow.
type Split struct {
	Refund, Fee               Amount
	Insurance, Burn, Treasury Amount // the parts of the fee
	Pay                       []Amount
	Dust                      Amount // what no payee got: to the pool, but not a premium
}

// Split divides the escrow of a request of which used was delivered. The fee rounds up;
// the insurance part, a premium, and every pay round down; the burnt part, which nobody
// receives, rounds up; the treasury has what is left of the fee. Errors: ErrAboveEscrow,
// ErrShares.
func (p Params) Split(escrow, used Amount, shares []Share) (s Split, err error) {
	if used > escrow {
		return Split{}, fmt.Errorf("%w: %d of %d", ErrAboveEscrow, used, escrow)
	}
	s.Refund = escrow - used
	if s.Fee, err = part(used, p.FeePPM, PPM, up); err != nil {
		return Split{}, err
	}
	if s.Insurance, err = part(s.Fee, p.InsurancePPM, PPM, down); err != nil {
		return Split{}, err
	}
	if s.Burn, err = part(s.Fee, p.BurnPPM, PPM, up); err != nil {
		return Split{}, err
	}
	if s.Fee > used || s.Insurance+s.Burn > s.Fee {
		return Split{}, fmt.Errorf("%w: fee %d ppm", ErrFeeSplit, p.FeePPM)
	}
	s.Treasury = s.Fee - s.Insurance - s.Burn
	s.Pay, s.Dust, err = Divide(used-s.Fee, shares)
	if err != nil {
		return Split{}, err
	}
	return s, nil
}

// Divide pays an amount by shares, each rounded down, and returns what is left. Error:
// ErrShares.
func Divide(total Amount, shares []Share) (pay []Amount, rest Amount, err error) {
	var sum Share
	pay, rest = make([]Amount, len(shares)), total
	for i, share := range shares {
		if share > Whole-sum {
			return nil, 0, fmt.Errorf("%w: share %d is %d·10⁻⁹, %d are left", ErrShares, i, share, Whole-sum)
		}
		sum += share
		if pay[i], err = part(total, uint64(share), uint64(Whole), down); err != nil {
			return nil, 0, err
		}
		rest -= pay[i]
	}
	return pay, rest, nil
}

type rounding bool

const down, up rounding = false, true

// part returns a·b/c, rounded.
func part(a Amount, b, c uint64, r rounding) (Amount, error) {
	q, rest, err := mulDiv(uint64(a), b, c)
	if err == nil && rest && r == up {
		return Amount(q).Add(1)
	}
	return Amount(q), err
}
