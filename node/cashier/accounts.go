package cashier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// newestPayouts is how many payouts a Ledger lists.
const newestPayouts = 16

// resolveFor is how long one Tick asks the chain about payouts, at most.
const resolveFor = 30 * time.Second

func refusal(code Code, field, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Field: field, Text: fmt.Sprintf(format, args...)}
}

// current is the epoch that runs, and its parameters.
func (d *Desk) current() (epoch uint64, p settle.Params) {
	epoch = d.moment().Epoch
	p, _, _ = d.cfg.Governor.Params(epoch)
	return epoch, p
}

// check refuses a move that cannot be.
func (m Move) check(least settle.Amount) error {
	if m.ID == (settle.Hash{}) {
		return refusal(CodeBad, "id", "the id is missing: choose one at random, and give it again when you ask again")
	}
	if m.Amount < least {
		return refusal(CodeBad, "amount", "an amount of %d, at least %d", m.Amount, least)
	}
	return nil
}

// Unstake is part of Service.
func (t *Teller) Unstake(ctx context.Context, m Move) (Ledger, error) {
	if err := m.check(1); err != nil {
		return Ledger{}, err
	}
	_, p := t.current()
	switch err := t.cfg.Books.Unstake(p, t.node, idOf("unstake", t.node, m.ID), m.Amount); {
	case errors.Is(err, settle.ErrBonded):
		return Ledger{}, refusal(CodeFunds, "amount", "%v", err)
	case errors.Is(err, settle.ErrTooManyLeave):
		return Ledger{}, refusal(CodeBusy, "", "%v", err)
	case errors.Is(err, settle.ErrKeyReused):
		return Ledger{}, refusal(CodeBad, "id", "the id was of another amount")
	case err != nil:
		return Ledger{}, err
	}
	return t.Ledger(ctx, t.node)
}

// Claim is part of Service. The payout's id follows from the node and the claim's. Less
// than settle.MinQuote is not worth a transaction.
func (t *Teller) Claim(ctx context.Context, m Move) (Payout, error) {
	if err := m.check(settle.MinQuote); err != nil {
		return Payout{}, err
	}
	b := t.cfg.Books
	l, err := b.Linked(t.node)
	if err != nil {
		return Payout{}, err
	}
	if l.Wallet == (settle.Wallet{}) {
		return Payout{}, refusal(CodeRights, "", "no wallet is linked to this node: link the one that is to be paid")
	}
	if _, err := b.Mature(); err != nil {
		return Payout{}, err
	}
	p, err := b.Claim(ctx, t.cfg.Vault, idOf("claim", t.node, m.ID), l.Wallet, m.Amount)
	switch {
	case errors.Is(err, settle.ErrFunds):
		return Payout{}, refusal(CodeFunds, "amount", "%v", err)
	case errors.Is(err, ErrUnderWay):
		return Payout{}, &Refusal{Code: CodeBusy, Text: err.Error(), Retry: askAgain}
	case errors.Is(err, ErrOtherClaim):
		return Payout{}, refusal(CodeBad, "id", "%v", err)
	case errors.Is(err, solana.ErrPayout):
		return Payout{}, refusal(CodeBad, "", "%v", err)
	}
	if err != nil {
		return Payout{}, explained("", err)
	}
	return p, nil
}

// Withdraw pays an amount of the treasury to a wallet, once for an id. It is for who runs
// this machine, and so no part of Service. Errors: ErrNothing, ErrOtherClaim,
// ErrUnderWay, settle.ErrFunds, and why none can be signed now.
func (d *Desk) Withdraw(ctx context.Context, id settle.Hash, to settle.Wallet, amount settle.Amount) (Payout, error) {
	return d.cfg.Books.Withdraw(ctx, d.cfg.Vault, idOf("withdraw", d.node, id), to, amount)
}

// Ledger is part of Service. The balance and the payouts of a node are those of the
// wallet that it is linked to.
func (t *Teller) Ledger(_ context.Context, owner settle.Key) (Ledger, error) {
	epoch, p := t.current()
	return t.cfg.Books.Ledger(owner, p, epoch)
}

// Ledger is what an owner has, its bond's target as it is in an epoch.
func (b *Books) Ledger(owner settle.Key, p settle.Params, epoch uint64) (l Ledger, err error) {
	err = b.store.View(func(tx *kv.Tx) error {
		pg := page{tx}
		link, err := pg.linked(owner)
		if err != nil {
			return err
		}
		l = Ledger{Owner: owner, Wallet: link.Wallet}
		bond, err := pg.bond(owner)
		if err != nil {
			return err
		}
		if at, err := p.AtEpoch(bond, epoch); err == nil { // else it has earned in a later one
			bond = at
		}
		l.Held, l.Bonded, l.Unbonding, l.Target, l.Vesting = sum(bond.Vesting), bond.Bonded, sum(bond.Unbonding), bond.Target(), bond.Vesting
		var t totals
		if _, err := pg.load(totalsKey(owner), &t); err != nil {
			return err
		}
		l.Earned, l.Requests = t.Earned, t.Requests
		return pg.purse(&l)
	})
	return l, err
}

// purse adds what a wallet has.
func (p page) purse(l *Ledger) (err error) {
	wallet := l.Wallet
	if wallet == (settle.Wallet{}) {
		wallet = l.Owner
	}
	if l.Balance, err = p.Balance(settle.Account{Kind: settle.Balance, ID: wallet}); err != nil {
		return err
	}
	if l.Leaving, err = p.Balance(settle.Account{Kind: settle.Leaving, ID: wallet}); err != nil {
		return err
	}
	var ids []settle.Hash
	if _, err := p.load(newestKey(wallet), &ids); err != nil {
		return err
	}
	for _, id := range ids {
		var o Payout
		if _, err := p.load(payoutKey(id), &o); err != nil {
			return err
		}
		l.Payouts = append(l.Payouts, o)
	}
	return nil
}

func newestKey(w settle.Wallet) []byte { return append([]byte{'y'}, w[:]...) }

// list puts a payout before the others of its owner.
func (p page) list(o Payout) error {
	var ids []settle.Hash
	if _, err := p.load(newestKey(o.Owner), &ids); err != nil {
		return err
	}
	ids = append([]settle.Hash{o.ID}, ids[:min(len(ids), newestPayouts-1)]...)
	return p.save(newestKey(o.Owner), ids)
}

// Mature does what time brings: pay whose audits are over and stakes that have left are
// the wallets', the emission reserve begins or is lowered, claims on the pool that are due are paid, fees that are to be burnt are,
// and every payout that is open is asked about, as far as there is time for. It is called
// at the start and from time to time.
func (d *Desk) Mature(ctx context.Context) error {
	m := d.moment()
	p, _, _ := d.cfg.Governor.Params(m.Epoch)
	_, err := d.cfg.Books.Mature()
	err = errors.Join(err, d.cfg.Books.PayClaims(p, m), d.cfg.Books.KeepReserve(settle.Amount(p.EmissionTotal)))
	ctx, cancel := context.WithTimeout(ctx, resolveFor)
	defer cancel()
	err = errors.Join(err, d.burn(ctx, m.Epoch))
	_, open := d.cfg.Books.Resolve(ctx, d.cfg.Vault)
	return errors.Join(err, open)
}

// burn destroys what fees are to be burnt, once in an epoch, so that the chain's fees for
// it stay small. What fails or expires is burnt in a later one.
func (d *Desk) burn(ctx context.Context, epoch uint64) error {
	amount, err := d.cfg.Books.Balance(settle.Account{Kind: settle.Burnt})
	d.mu.Lock()
	begun := d.burnt > epoch
	d.mu.Unlock()
	if err != nil || amount < settle.MinQuote || begun {
		return err
	}
	var id settle.Hash
	d.cfg.Random(id[:])
	if _, err = d.cfg.Books.Burn(ctx, d.cfg.Vault, id, amount); err != nil {
		return ignore(err, ErrUnderWay)
	}
	d.mu.Lock()
	d.burnt = epoch + 1
	d.mu.Unlock()
	return nil
}
