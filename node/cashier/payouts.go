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

// Payout is a claim of an owner's balance, or of the treasury, on its way to a wallet.
type Payout struct {
	ID       settle.Hash   // of the claim: one claim is paid once
	Owner    settle.Wallet // who is paid
	Amount   settle.Amount
	Treasury bool // it is the treasury's, and not of the owner's balance
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
	if want.Signed, err = v.Sign(ctx, solana.Payout{To: want.Owner, Amount: want.Amount, Memo: fmt.Sprintf("%s%x", payoutMemo, want.ID)}); err != nil {
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

// covers refuses a payout that is more than there is, and a second one of an owner, or of
// the treasury, at a time: so many may be open as there are owners. Errors: ErrUnderWay,
// settle.ErrFunds.
func (p page) covers(o Payout) error {
	from := settle.Account{Kind: settle.Balance, ID: o.Owner}
	if o.Treasury {
		from = settle.Account{Kind: settle.Treasury}
	}
	if open, err := p.underWay(o); err != nil || open {
		return cmp.Or(err, ErrUnderWay)
	}
	has, err := p.Balance(from)
	if err == nil && has < o.Amount {
		err = fmt.Errorf("%w: %s has %d, %d is claimed", settle.ErrFunds, from, has, o.Amount)
	}
	return err
}

// underWay says whether whoever pays o has a payout that is open. What leaves the treasury
// is taken from it only when it has left.
func (p page) underWay(o Payout) (bool, error) {
	if !o.Treasury {
		leaving, err := p.Balance(settle.Account{Kind: settle.Leaving, ID: o.Owner})
		return leaving > 0, err
	}
	open, err := p.open()
	return slices.ContainsFunc(open, func(o Payout) bool { return o.Treasury }), err
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
	if ok && (old.Owner != p.Owner || old.Amount != p.Amount || old.Treasury != p.Treasury) {
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
		if err = p.covers(want); err == nil && !want.Treasury {
			err = p.move(settle.ActPayout, want, settle.Balance, settle.Leaving, b.seconds())
		}
		if err != nil {
			return err
		}
		kept, mine = want, true
		return errors.Join(p.save(payoutKey(want.ID), want), p.Put(openKey(want.ID), []byte{1}), p.list(want))
	})
	return kept, mine && err == nil, err
}

func (p page) move(a settle.Action, o Payout, from, to settle.Kind, now uint64) error {
	account := func(k settle.Kind) settle.Account {
		if k == settle.PaidOut || k == settle.Treasury {
			return settle.Account{Kind: k}
		}
		return settle.Account{Kind: k, ID: o.Owner}
	}
	e, err := settle.NewEntry(a, o.ID, now, settle.Transfer{From: account(from), To: account(to), Amount: o.Amount})
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
		action, from, to := settle.ActPayoutDone, settle.Leaving, settle.PaidOut
		switch {
		case p.Treasury:
			action, from = settle.ActWithdraw, settle.Treasury
		case o != solana.Landed:
			action, to = settle.ActPayoutFailed, settle.Balance
		}
		if o == solana.Landed || !p.Treasury { // a withdrawal that failed moved nothing
			if err := pg.move(action, p, from, to, b.seconds()); err != nil {
				return err
			}
		}
		return errors.Join(pg.save(payoutKey(p.ID), p), pg.Delete(openKey(p.ID)))
	})
}
