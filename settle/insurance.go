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
	ErrClaimAmount = errors.New("the claim is above what the request paid its workers, less what came back already")
)

// Insured is what the ledger knows of a settled request.
type Insured struct {
	Payer     Wallet
	Used, Fee Amount
	SettledAt uint64 // Unix seconds
	Claimed   bool
	Delivered bool
	Back      Amount // that verdicts and the pool gave back to the payer
}

// Loss is what may still come back to the payer: never more than it paid workers.
func (in Insured) Loss() Amount {
	most := in.Used - min(in.Fee, in.Used)
	return most - min(in.Back, most)
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
	case amount == 0 || amount > in.Loss():
		return fmt.Errorf("%w: %d, 1 to %d", ErrClaimAmount, amount, in.Loss())
	case now < in.SettledAt:
		return ErrPast
	case now-in.SettledAt > p.ClaimSeconds:
		return fmt.Errorf("%w: %d s after the request, within %d s", ErrClaimLate, now-in.SettledAt, p.ClaimSeconds)
	}
	return nil
}

// ClaimDue is from when an accepted claim is paid, in Unix seconds: when the audits of its
// request are over.
func (p Params) ClaimDue(in Insured) uint64 { return in.SettledAt + p.AuditSeconds }

// ClaimRound divides what the pool gives in one epoch over the claims of the epoch.
type ClaimRound struct {
	Avail, Asked Amount // in all
}

// ClaimRound is what a pool gives in an epoch in which so much is asked of it.
func (p Params) ClaimRound(pool, asked Amount) (ClaimRound, error) {
	avail, err := part(pool, p.PoolEpochPPM, PPM, down)
	return ClaimRound{avail, asked}, err
}

// Part is what a claim of the round is paid: all of it, or its part of what there is,
// rounded down.
func (r ClaimRound) Part(claim Amount) (Amount, error) {
	if r.Asked <= r.Avail {
		return claim, nil
	}
	return part(claim, uint64(r.Avail), uint64(r.Asked), down)
}

// PayClaims is the parts of all claims of one epoch.
func (p Params) PayClaims(pool Amount, claims []Amount) (paid []Amount, err error) {
	var asked Amount
	for _, c := range claims {
		if asked, err = asked.Add(c); err != nil {
			return nil, err
		}
	}
	r, err := p.ClaimRound(pool, asked)
	if err != nil {
		return nil, err
	}
	paid = make([]Amount, len(claims))
	for i, c := range claims {
		if paid[i], err = r.Part(c); err != nil {
			return nil, err
		}
	}
	return paid, nil
}
