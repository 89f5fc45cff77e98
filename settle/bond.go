package settle

import (
	"errors"
	"fmt"
	"slices"
)

// Limits of what one node has pending.
const (
	MaxVesting   = 1024 // epochs whose audits are open; newer ones join the last
	MaxUnbonding = 64
)

// Bond is what a node has at stake: no deposit is asked, part of its pay is held until
// the target is full, and all of it can be taken until its audits are over. Its zero
// value is a node that never earned.
//
// Everything that is here is the node's: Bonded, the sum of Vesting and the sum of
// Unbonding equal its accounts of the ledger.
type Bond struct {
	Bonded    Amount
	Vesting   []Pending // by epoch, oldest first: pay until its audit window ends
	Unbonding []Pending // leaving, oldest first; can be taken until it is out
	Recent    Amount    // gross pay of BondEpochs epochs: the target
	Epoch     uint64    // to which Recent is decayed
}

// Pending is an amount, when it is free, in Unix seconds, and the epoch of its begin.
type Pending struct {
	Amount      Amount
	Free, Epoch uint64
}

// Refusals of a bond.
var (
	ErrBonded       = errors.New("the bond does not hold so much")
	ErrTooManyLeave = errors.New("too many withdrawals are under way")
)

// Target is what the node's bond is to reach: its gross pay of BondEpochs epochs.
func (b Bond) Target() Amount { return b.Recent }

// AtEpoch decays the target to an epoch. Error: ErrPast.
func (p Params) AtEpoch(b Bond, epoch uint64) (Bond, error) {
	if epoch < b.Epoch {
		return b, fmt.Errorf("%w: epoch %d after %d", ErrPast, epoch, b.Epoch)
	}
	for range epoch - b.Epoch {
		gone := b.Recent / Amount(p.BondEpochs)
		if gone == 0 {
			break
		}
		b.Recent -= gone
	}
	b.Epoch = epoch
	return b, nil
}

// Earn adds the pay of a request at a time and its epoch. Until the target is full the
// held part goes to the bond; the rest vests after the audit window. bonded + vesting =
// pay.
func (p Params) Earn(b Bond, pay Amount, now, epoch uint64) (next Bond, bonded, vesting Amount, err error) {
	if b, err = p.AtEpoch(b, epoch); err != nil {
		return b, 0, 0, err
	}
	if b.Recent, err = b.Recent.Add(pay); err != nil {
		return b, 0, 0, err
	}
	if bonded, err = part(pay, p.HeldPPM, PPM, up); err != nil {
		return b, 0, 0, err
	}
	bonded = min(bonded, b.Recent-min(b.Recent, b.Bonded))
	vesting = pay - bonded
	if b.Bonded, err = b.Bonded.Add(bonded); err != nil {
		return b, 0, 0, err
	}
	if vesting > 0 {
		b.Vesting, err = pend(b.Vesting, Pending{vesting, now + p.AuditSeconds, epoch}, MaxVesting)
	}
	return b, bonded, vesting, err
}

// pend appends to a copy. What has the epoch of the last, or is one more than most, joins
// the last, and is free when both are.
func pend(list []Pending, add Pending, most int) ([]Pending, error) {
	list = append([]Pending(nil), list...)
	n := len(list)
	if n == 0 || n < most && list[n-1].Epoch != add.Epoch {
		return append(list, add), nil
	}
	last := &list[n-1]
	sum, err := last.Amount.Add(add.Amount)
	*last = Pending{sum, max(last.Free, add.Free), add.Epoch}
	return list, err
}

// Vest moves the pays whose audits are over out of b: vested is the node's own.
func (b Bond) Vest(now uint64) (next Bond, vested Amount) {
	b.Vesting, vested = mature(b.Vesting, now)
	return b, vested
}

// Stake adds to the bond what the chain proves was paid in for it.
func (b Bond) Stake(amount Amount) (_ Bond, err error) {
	b.Bonded, err = b.Bonded.Add(amount)
	return b, err
}

// Unbond starts a withdrawal from the bond. Errors: ErrBonded, ErrTooManyLeave.
func (p Params) Unbond(b Bond, amount Amount, now uint64) (Bond, error) {
	if amount == 0 || amount > b.Bonded {
		return b, fmt.Errorf("%w: %d of %d", ErrBonded, amount, b.Bonded)
	}
	if len(b.Unbonding) >= MaxUnbonding {
		return b, fmt.Errorf("%w: %d, wait for the first", ErrTooManyLeave, len(b.Unbonding))
	}
	b.Bonded -= amount
	b.Unbonding = append(append([]Pending(nil), b.Unbonding...), Pending{Amount: amount, Free: now + p.UnbondingSeconds})
	return b, nil
}

// Unbonded takes out what has left the bond.
func (b Bond) Unbonded(now uint64) (next Bond, out Amount) {
	b.Unbonding, out = mature(b.Unbonding, now)
	return b, out
}

func mature(list []Pending, now uint64) (rest []Pending, sum Amount) {
	if !slices.ContainsFunc(list, func(p Pending) bool { return p.Free <= now }) {
		return list, 0
	}
	for _, p := range list {
		if p.Free <= now {
			sum += p.Amount
		} else {
			rest = append(rest, p)
		}
	}
	return rest, sum
}

// Slash is what was taken from a node, by where it was.
type Slash struct{ FromVesting, FromBonded, FromUnbonding Amount }

// Total is what was taken in all.
func (s Slash) Total() Amount { return s.FromVesting + s.FromBonded + s.FromUnbonding }

// Slash takes up to amount for a request that was paid in an epoch: first the pay of that
// epoch, then the bond, then what is leaving, then the other pay whose audits are open.
func (b Bond) Slash(epoch uint64, amount Amount) (next Bond, s Slash) {
	b.Vesting, s.FromVesting = take(b.Vesting, amount, func(p Pending) bool { return p.Epoch == epoch })
	s.FromBonded = min(b.Bonded, amount-s.FromVesting)
	b.Bonded -= s.FromBonded
	b.Unbonding, s.FromUnbonding = take(b.Unbonding, amount-s.Total(), func(Pending) bool { return true })
	var other Amount
	b.Vesting, other = take(b.Vesting, amount-s.Total(), func(Pending) bool { return true })
	s.FromVesting += other
	return b, s
}

func take(list []Pending, amount Amount, which func(Pending) bool) (rest []Pending, taken Amount) {
	for _, p := range list {
		if which(p) {
			a := min(p.Amount, amount-taken)
			taken += a
			p.Amount -= a
		}
		if p.Amount > 0 {
			rest = append(rest, p)
		}
	}
	return rest, taken
}

// PenaltyOf is what a failed request costs who was paid reward for it.
func (p Params) PenaltyOf(reward Amount) Amount {
	most := ^Amount(0)
	if q, _, err := mulDiv(uint64(reward), p.Penalty, 1); err == nil {
		return Amount(q)
	}
	return most
}

// Penalise takes from a bond for a request that was paid in an epoch, of which the node
// had reward: the penalty, or the payer's loss when that is more, as far as it reaches.
func (p Params) Penalise(b Bond, epoch uint64, reward, loss Amount) (Bond, Slash) {
	return b.Slash(epoch, max(p.PenaltyOf(reward), loss))
}

// SplitSlash divides what was taken: to the injured payer up to the price it paid, to
// the reporter at most a tenth of the whole, the rest to the pool.
func SplitSlash(taken, price Amount) (payer, reporter, pool Amount) {
	payer = min(taken, price)
	tenth, _ := part(taken, ReporterRewardPPM, PPM, down) // a part below one fits
	reporter = min(tenth, taken-payer)
	return payer, reporter, taken - payer - reporter
}
