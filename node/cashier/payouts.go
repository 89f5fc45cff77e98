package cashier

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// Vault signs payouts and says what became of them, as solana.Client does with its keys.
type Vault interface {
	Sign(ctx context.Context, p solana.Payout) (solana.Signed, error)
	Send(ctx context.Context, s solana.Signed) error
	Resolve(ctx context.Context, s solana.Signed) (solana.Outcome, error)
}

// Payout is a claim of an owner's balance, or of the treasury, on its way to a wallet, or
// what is burnt.
type Payout struct {
	ID       settle.Hash   // of the claim: one claim is paid once
	Owner    settle.Wallet // who is paid
	Amount   settle.Amount
	Treasury bool // it is the treasury's, and not of the owner's balance
	Burn     bool // it is of the fees that are to be burnt, and Owner is zero
	Signed   solana.Signed
	Outcome  solana.Outcome
}

// Refusals of a claim.
var (
	ErrOtherClaim = errors.New("the id is of another claim")
	ErrNothing    = errors.New("a claim of nothing")
	ErrUnderWay   = errors.New("a payout is under way: claim again when it has ended")
)

const payoutMemo = "kvp1:"

// cut is called between the steps of a payout by tests, which end the process there.
var cut = func(step string) {}

func payoutKey(id settle.Hash) []byte { return append([]byte{'p'}, id[:]...) }

func openKey(id settle.Hash) []byte { return append([]byte{'o'}, id[:]...) }

// Claim pays an amount of a wallet's balance to that wallet, by a transaction that is
// written down before it is sent. It does not wait for the chain: Resolve does. The same
// claim again is the same payout. Errors: ErrOtherClaim, ErrNothing, ErrUnderWay,
// settle.ErrFunds, and why none can be signed now.
func (b *Books) Claim(ctx context.Context, v Vault, id settle.Hash, owner settle.Wallet, amount settle.Amount) (Payout, error) {
	return b.payOut(ctx, v, Payout{ID: id, Owner: owner, Amount: amount})
}

// Withdraw pays an amount of the treasury to a wallet, as Claim does.
func (b *Books) Withdraw(ctx context.Context, v Vault, id settle.Hash, to settle.Wallet, amount settle.Amount) (Payout, error) {
	return b.payOut(ctx, v, Payout{ID: id, Owner: to, Amount: amount, Treasury: true})
}

// Burn destroys an amount of the fees that are to be burnt, as Claim pays.
func (b *Books) Burn(ctx context.Context, v Vault, id settle.Hash, amount settle.Amount) (Payout, error) {
	return b.payOut(ctx, v, Payout{ID: id, Amount: amount, Burn: true})
}

// source is the account that a payout is of.
func (p Payout) source() settle.Account {
	switch {
	case p.Treasury:
		return settle.Account{Kind: settle.Treasury}
	case p.Burn:
		return settle.Account{Kind: settle.Burnt}
	}
	return settle.Account{Kind: settle.Balance, ID: p.Owner}
}

func (b *Books) payOut(ctx context.Context, v Vault, want Payout) (Payout, error) {
	if want.Amount == 0 {
		return Payout{}, ErrNothing
	}
	old, ok, err := b.Payout(want.ID)
	if err != nil || ok {
		return old, errors.Join(err, want.same(old, ok))
	}
	if err := b.store.View(func(tx *kv.Tx) error { return page{tx}.covers(want) }); err != nil {
		if old, ok, again := b.Payout(want.ID); again == nil && ok { // another call of it took the money since
			return old, want.same(old, ok)
		}
		return Payout{}, err
	}
	if want.Signed, err = v.Sign(ctx, solana.Payout{To: want.Owner, Burn: want.Burn, Amount: want.Amount, Memo: fmt.Sprintf("%s%x", payoutMemo, want.ID)}); err != nil {
		return Payout{}, err
	}
	cut("signed")
	kept, mine, err := b.intend(want)
	if err != nil || !mine {
		return kept, err
	}
	cut("written")
	if err := v.Send(ctx, kept.Signed); err != nil { // it may have landed all the same
		return kept, nil
	}
	cut("sent")
	return kept, nil
}

// covers refuses a payout that is more than there is, and a second one of an account at a
// time: so many may be open as there are owners. Errors: ErrUnderWay,
// settle.ErrFunds.
func (p page) covers(o Payout) error {
	from := o.source()
	if open, err := p.underWay(o); err != nil || open {
		return cmp.Or(err, ErrUnderWay)
	}
	has, err := p.Balance(from)
	if err == nil && has < o.Amount {
		err = fmt.Errorf("%w: %s has %d, %d is claimed", settle.ErrFunds, from, has, o.Amount)
	}
	return err
}

// underWay says whether the account that pays o has a payout that is open. What is of no
// owner is taken only when it has left.
func (p page) underWay(o Payout) (bool, error) {
	if o.owned() {
		leaving, err := p.Balance(settle.Account{Kind: settle.Leaving, ID: o.Owner})
		return leaving > 0, err
	}
	open, err := p.open()
	return slices.ContainsFunc(open, func(of Payout) bool { return of.source() == o.source() }), err
}

// open are the payouts that nobody knows the outcome of.
func (p page) open() (all []Payout, err error) {
	err = p.Each([]byte{'o'}, func(k, _ []byte) error {
		var o Payout
		ok, err := p.load(payoutKey(settle.Hash(k[1:])), &o)
		if err == nil && !ok {
			err = fmt.Errorf("%w: no payout %x", ErrBooks, k[1:])
		}
		all = append(all, o)
		return err
	})
	return all, err
}

func (p Payout) same(old Payout, ok bool) error {
	if ok && (old.source() != p.source() || old.Owner != p.Owner || old.Amount != p.Amount) {
		return fmt.Errorf("%w: %d to %s", ErrOtherClaim, old.Amount, old.Owner)
	}
	return nil
}

// intend writes a payout down, and takes its amount from the balance. mine is false when
// another call was first, whose transaction is the one to send.
func (b *Books) intend(want Payout) (kept Payout, mine bool, err error) {
	err = b.store.Update(func(tx *kv.Tx) error {
		p := page{tx}
		ok, err := p.load(payoutKey(want.ID), &kept)
		if err != nil || ok {
			return errors.Join(err, want.same(kept, ok))
		}
		if err = p.covers(want); err == nil && want.owned() {
			err = p.move(settle.ActPayout, want, want.source(), want.leaving(), b.seconds())
		}
		if err != nil {
			return err
		}
		kept, mine = want, true
		err = errors.Join(p.save(payoutKey(want.ID), want), p.Put(openKey(want.ID), []byte{1}))
		if err == nil && !want.Burn { // that is nobody's
			err = p.list(want)
		}
		return err
	})
	return kept, mine && err == nil, err
}

// owned says whether a payout is of an owner's balance, who may have several in all.
func (p Payout) owned() bool { return p.source().Kind == settle.Balance }

// leaving is where an owner's payout is while it is under way.
func (p Payout) leaving() settle.Account { return settle.Account{Kind: settle.Leaving, ID: p.Owner} }

func (p page) move(a settle.Action, o Payout, from, to settle.Account, now uint64) error {
	e, err := settle.NewEntry(a, o.ID, now, settle.Transfer{From: from, To: to, Amount: o.Amount})
	if err == nil {
		_, err = p.post(e)
	}
	return err
}

// Payout is a claim's payout, if it has one.
func (b *Books) Payout(id settle.Hash) (p Payout, ok bool, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		ok, err = page{tx}.load(payoutKey(id), &p)
		return err
	})
	return p, ok, err
}

// Resolve asks the chain about open payouts until ctx ends: what landed is paid, what
// failed or expired is the owner's balance, or the treasury's, again, and the rest is sent
// once more. It returns how many stay open, and what kept it from asking about some. It is
// called at the start and from time to time, and goes on behind the one that it asked
// about last, so that none waits for ever.
func (b *Books) Resolve(ctx context.Context, v Vault) (open int, err error) {
	var all []Payout
	err = b.store.View(func(tx *kv.Tx) (err error) {
		all, err = page{tx}.open()
		return err
	})
	if err != nil {
		return 0, err
	}
	last := b.resolved.Load()
	from := slices.IndexFunc(all, func(p Payout) bool { return last != nil && bytes.Compare(p.ID[:], last[:]) > 0 })
	if from > 0 {
		all = slices.Concat(all[from:], all[:from])
	}
	var errs []error
	for i, p := range all {
		if ctx.Err() != nil {
			return open + len(all) - i, errors.Join(append(errs, fmt.Errorf("%d payouts were not asked about: %w", len(all)-i, ctx.Err()))...)
		}
		b.resolved.Store(&p.ID)
		o, err := v.Resolve(ctx, p.Signed)
		cut("resolved")
		switch {
		case err != nil:
		case o == solana.Pending:
			err = v.Send(ctx, p.Signed)
		default:
			if err = b.finish(p, o); err == nil {
				cut("finished")
				continue
			}
		}
		open++
		errs = append(errs, err)
	}
	return open, errors.Join(errs...)
}

// finish books what became of a payout.
func (b *Books) finish(p Payout, o solana.Outcome) error {
	p.Outcome = o
	return b.store.Update(func(tx *kv.Tx) error {
		pg := page{tx}
		action, from, to := settle.ActPayoutDone, p.leaving(), settle.Account{Kind: settle.PaidOut}
		switch {
		case !p.owned():
			action, from = settle.ActWithdraw, p.source()
		case o != solana.Landed:
			action, to = settle.ActPayoutFailed, p.source()
		}
		if o == solana.Landed || p.owned() { // else nothing was taken yet
			if err := pg.move(action, p, from, to, b.seconds()); err != nil {
				return err
			}
		}
		return errors.Join(pg.save(payoutKey(p.ID), p), pg.Delete(openKey(p.ID)))
	})
}
