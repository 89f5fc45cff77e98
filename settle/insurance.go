package settle

import (
	"errors"
	"fmt"
)

// premiumDays is PremiumSpan in the days that Premiums keeps.
const premiumDays = PremiumSpan / Day

// Premiums is what one wallet paid into the pool and was paid out of it, by day. Its
// zero value is a wallet that did neither.
//
// Over any time claims ≤ ρ · premiums: at each claim it holds for the last 30 days, and
// before them it held at the claim before them.
type Premiums struct {
	Day           uint64 // of the newest slot
	Paid, Claimed [premiumDays]Amount
}

// at returns p with day as its newest slot, or an error when the day is past.
func (p Premiums) at(day uint64) (Premiums, error) {
	if day < p.Day {
		return p, fmt.Errorf("%w: day %d after day %d", ErrPast, day, p.Day)
	}
	for i := range min(day-p.Day, premiumDays) {
		slot := (p.Day + 1 + i) % premiumDays
		p.Paid[slot], p.Claimed[slot] = 0, 0
	}
	p.Day = day
	return p, nil
}

// Pay adds a premium, on a day since the epoch of Unix. Error: ErrPast.
func (p Premiums) Pay(day uint64, premium Amount) (Premiums, error) {
	p, err := p.at(day)
	if err != nil {
		return p, err
	}
	slot := &p.Paid[day%premiumDays]
	*slot, err = slot.Add(premium)
	return p, err
}

// Left is what the wallet may still be paid: ρ · premiums − claims of 30 days.
func (p Premiums) Left(day, claimsPPM uint64) (Amount, error) {
	p, err := p.at(day)
	if err != nil {
		return 0, err
	}
	var paid, claimed Amount
	for i := range p.Paid {
		if paid, err = paid.Add(p.Paid[i]); err != nil {
			return 0, err
		}
		if claimed, err = claimed.Add(p.Claimed[i]); err != nil {
			return 0, err
		}
	}
	most, err := part(paid, claimsPPM, PPM, down)
	return most - min(most, claimed), err
}

// Claim takes out of what is left. Errors: ErrPast, ErrPremiumCap.
func (p Premiums) Claim(day, claimsPPM uint64, amount Amount) (Premiums, error) {
	left, err := p.Left(day, claimsPPM)
	if err != nil {
		return p, err
	}
	if amount > left {
		return p, fmt.Errorf("%w: %d, %d is left", ErrPremiumCap, amount, left)
	}
	p, err = p.at(day)
	p.Claimed[day%premiumDays] += amount
	return p, err
}

// Refusals of a claim.
var (
	ErrPast        = errors.New("the time is before what was recorded")
	ErrPremiumCap  = errors.New("the claim is above the wallet's share of its premiums")
	ErrClaimLate   = errors.New("the claim window has closed")
	ErrClaimTwice  = errors.New("the request has had its claim")
	ErrClaimWallet = errors.New("the wallet did not pay for the request")
	ErrClaimState  = errors.New("only a delivered request can be claimed")
	ErrClaimAmount = errors.New("the claim is above what the request paid its workers")
	ErrClaimEarly  = errors.New("the audit window of the request is open")
)

// Insured is what the ledger knows of a settled request.
type Insured struct {
	Payer     Wallet
	Used, Fee Amount
	SettledAt uint64 // Unix seconds
	Claimed   bool
	Delivered bool
}

// CheckClaim refuses a claim of a wallet on a request at a time in Unix seconds.
// Errors: ErrClaimState, ErrClaimWallet, ErrClaimTwice, ErrClaimAmount, ErrPast,
// ErrClaimLate.
func (p Params) CheckClaim(in Insured, wallet Wallet, amount Amount, now uint64) error {
	switch {
	case !in.Delivered:
		return ErrClaimState
	case wallet != in.Payer:
		return fmt.Errorf("%w: %s", ErrClaimWallet, wallet)
	case in.Claimed:
		return ErrClaimTwice
	case amount == 0 || in.Fee > in.Used || amount > in.Used-in.Fee:
		return fmt.Errorf("%w: %d, 1 to %d", ErrClaimAmount, amount, in.Used-min(in.Fee, in.Used))
	case now < in.SettledAt:
		return ErrPast
	case now-in.SettledAt > p.ClaimSeconds:
		return fmt.Errorf("%w: %d s after the request, within %d s", ErrClaimLate, now-in.SettledAt, p.ClaimSeconds)
	}
	return nil
}

// CheckClaimPayable refuses to pay an accepted claim before the audits of its request
// are over. Error: ErrClaimEarly.
func (p Params) CheckClaimPayable(in Insured, now uint64) error {
	if over := in.SettledAt + p.AuditSeconds; over < in.SettledAt || now < over {
		return fmt.Errorf("%w for %d s", ErrClaimEarly, over-now)
	}
	return nil
}

// Cover says who bears a loss that an audit attributes: first what the culprit was to
// have for that request, then its bond, then the pool, as far as they reach.
func Cover(loss, held, bond, pool Amount) (fromHeld, fromBond, fromPool Amount) {
	fromHeld = min(loss, held)
	fromBond = min(loss-fromHeld, bond)
	fromPool = min(loss-fromHeld-fromBond, pool)
	return fromHeld, fromBond, fromPool
}

// PayClaims divides what the pool gives in one epoch over the claims of the epoch: all,
// or each its part of what there is, rounded down.
func (p Params) PayClaims(pool Amount, claims []Amount) (paid []Amount, err error) {
	avail, err := part(pool, p.PoolEpochPPM, PPM, down)
	if err != nil {
		return nil, err
	}
	var sum Amount
	for _, c := range claims {
		if sum, err = sum.Add(c); err != nil {
			return nil, err
		}
	}
	paid = append(paid, claims...)
	if sum <= avail {
		return paid, nil
	}
	for i, c := range claims {
		if paid[i], err = part(c, uint64(avail), uint64(sum), down); err != nil {
			return nil, err
		}
	}
	return paid, nil
}
