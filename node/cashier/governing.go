package cashier

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
	"kvasird/settle/solana"
)

// signTime is how long wallets have to sign a change that is to hold as soon as can be,
// in seconds.
const signTime = 600

// GovernStore keeps the records of governance with the books.
func (b *Books) GovernStore() govern.Store { return governStore{b.store} }

type governStore struct{ store *kv.Store }

func governKey(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{'g'}, n) }

// Append is part of govern.Store.
func (s governStore) Append(n uint64, record []byte) error {
	return s.store.Update(func(tx *kv.Tx) error {
		for at, want := range map[uint64]bool{n: false, n - 1: n > 0} {
			if _, has, err := tx.Get(governKey(at)); err != nil || has != want {
				return errors.Join(err, fmt.Errorf("%w: record %d of governance is not the next", ErrBooks, n))
			}
		}
		return tx.Put(governKey(n), record)
	})
}

// Replay is part of govern.Store.
func (s governStore) Replay(fn func(record []byte) error) error {
	var next uint64
	return s.store.View(func(tx *kv.Tx) error {
		return tx.Each([]byte{'g'}, func(k, v []byte) error {
			if n, err := number(k[1:]); err != nil || n != next {
				return errors.Join(err, fmt.Errorf("%w: record %d of governance is where %d should be", ErrBooks, n, next))
			}
			next++
			return fn(append([]byte(nil), v...))
		})
	})
}

// moment is now, and the epoch that runs. Epochs that are over do not change, since
// governance moves those to come only.
func (d *Desk) moment() govern.Moment {
	return d.cfg.Governor.At(uint64(d.cfg.Began.Unix()), d.cfg.Books.seconds())
}

// Propose is part of Service.
func (t *Teller) Propose(_ context.Context, c Change) (Proposed, error) {
	g, now := t.cfg.Governor, t.moment()
	if c.Valid == 0 {
		c.Valid = settle.Day
	}
	if c.Epoch == 0 {
		c.Epoch = g.Soonest(now, c.Values, signTime)
	}
	p, err := t.proposal(now, c)
	if err != nil {
		return Proposed{}, governRefusal(err)
	}
	out := Proposed{Texts: map[string]string{}}
	for _, w := range g.Wallets() {
		if _, err := p.Message(w, govern.Raw); err != nil {
			return Proposed{}, governRefusal(err)
		}
		out.Texts[w.String()] = p.Text(w)
	}
	out.Proposal, err = p.Encode()
	return out, err
}

func (t *Teller) proposal(now govern.Moment, c Change) (*govern.Proposal, error) {
	if c.Withdraw == 0 && c.To == (settle.Wallet{}) {
		return t.cfg.Governor.Propose(now, c.Epoch, c.Valid, c.Values)
	}
	v := t.cfg.Chain.Vault()
	switch {
	case len(c.Values) > 0:
		return nil, refusal(CodeBad, "values", "a proposal changes parameters or withdraws: make two")
	case c.Withdraw < settle.MinQuote:
		return nil, refusal(CodeBad, "withdraw", "an amount of %d, at least %d", c.Withdraw, settle.MinQuote)
	case c.To == v.Owner || c.To == v.Account || settle.CheckKey(c.To) != nil:
		return nil, refusal(CodeBad, "to", "%s is the vault, or no wallet", c.To)
	}
	if err := t.treasuryHas(c.Withdraw); err != nil {
		return nil, err
	}
	return t.cfg.Governor.ProposeWithdrawal(now, c.Epoch, c.Valid, govern.Withdrawal{To: c.To, Amount: c.Withdraw})
}

// withdrawalID is the payout of a withdrawal: of the proposal, so that it is paid once.
func (d *Desk) withdrawalID(g govern.Granted) settle.Hash {
	return sha256.Sum256(fmt.Appendf(nil, "kvasir withdrawal 1\n%x %d", d.cfg.Network, g.Sequence))
}

// withdrawalWaits is for how many epochs after its own a withdrawal may begin to be paid. After them it
// has lapsed: what cannot be sent keeps nothing of the treasury.
const withdrawalWaits = 24

func lapsed(g govern.Granted, epoch uint64) bool { return epoch > g.Epoch+withdrawalWaits }

// treasuryHas refuses more than what the treasury has, less what is to be paid of it yet.
func (d *Desk) treasuryHas(amount settle.Amount) error {
	has, err := d.cfg.Books.Balance(settle.Account{Kind: settle.Treasury})
	if err != nil {
		return err
	}
	epoch := d.moment().Epoch
	for _, g := range d.cfg.Governor.Withdrawals() {
		p, begun, err := d.cfg.Books.Payout(d.withdrawalID(g))
		if err != nil {
			return err
		}
		if !begun && !lapsed(g, epoch) || begun && p.Outcome == solana.Pending {
			has -= min(g.Amount, has)
		}
	}
	if amount > has {
		return refusal(CodeFunds, "withdraw", "the treasury has %d that are not withdrawn already, %d is asked", has, amount)
	}
	return nil
}

// withdraw begins to pay the withdrawals whose epoch has come, one after the other. One that
// the chain did not take, or that lapsed, moved nothing, and needs a new proposal.
func (d *Desk) withdraw(ctx context.Context, epoch uint64) error {
	var errs []error
	for _, g := range d.cfg.Governor.Withdrawals() {
		if g.Epoch > epoch || lapsed(g, epoch) {
			continue
		}
		_, err := d.cfg.Books.Withdraw(ctx, d.cfg.Vault, d.withdrawalID(g), g.To, g.Amount)
		if err != nil && !errors.Is(err, ErrUnderWay) {
			errs = append(errs, fmt.Errorf("withdrawal %d, of %d to %s: %w", g.Sequence, g.Amount, g.To, err))
		}
	}
	return errors.Join(errs...)
}

// Activate is part of Service.
func (t *Teller) Activate(_ context.Context, a Activation) (Activated, error) {
	p, err := govern.ParseProposal(a.Proposal)
	if err != nil {
		return Activated{}, refusal(CodeBad, "proposal", "%v", err)
	}
	if p.Withdrawal != (govern.Withdrawal{}) {
		if err := t.treasuryHas(p.Withdrawal.Amount); err != nil {
			return Activated{}, err
		}
	}
	if len(a.Signatures) > govern.MaxWallets {
		return Activated{}, refusal(CodeBad, "signatures", "%d signatures, at most %d", len(a.Signatures), govern.MaxWallets)
	}
	var signatures []govern.Signature
	for _, s := range a.Signatures {
		f, err := govern.ParseFormat(s.Format)
		if err != nil {
			return Activated{}, refusal(CodeBad, "signatures", "%v", err)
		}
		m, err := p.Message(s.Wallet, f)
		if err != nil {
			return Activated{}, governRefusal(err)
		}
		signatures = append(signatures, govern.Signature{Wallet: s.Wallet, Format: f, Signed: m, Bytes: s.Signature})
	}
	r, err := t.cfg.Governor.Activate(t.moment(), p, signatures, a.Code)
	if err != nil {
		return Activated{}, governRefusal(err)
	}
	return Activated{Sequence: r.Proposal.Sequence, Epoch: r.Proposal.Epoch}, nil
}

// governRefusals say what a caller can do, the first that fits.
var governRefusals = []struct {
	err   error
	code  Code
	field string
}{
	{govern.ErrStore, "", ""}, {ErrBooks, "", ""}, // the operator's
	{govern.ErrLocked, CodeBusy, "code"}, {govern.ErrCode, CodeRights, "code"}, {govern.ErrCodeUsed, CodeRights, "code"},
	{govern.ErrSigner, CodeRights, "signatures"}, {govern.ErrTwice, CodeRights, "signatures"}, {govern.ErrThreshold, CodeRights, "signatures"},
	{govern.ErrSignature, CodeRights, "signatures"}, {settle.ErrWeakKey, CodeRights, "signatures"},
	{govern.ErrSequence, CodeState, "proposal"}, {govern.ErrOldValue, CodeState, "proposal"}, {govern.ErrExpired, CodeState, "proposal"},
	{govern.ErrClock, CodeState, ""}, {govern.ErrNetwork, CodeBad, "proposal"},
	{govern.ErrEpoch, CodeBad, "epoch"}, {govern.ErrNotice, CodeBad, "epoch"},
	{govern.ErrProposal, CodeBad, "values"}, {govern.ErrNoChange, CodeBad, "values"}, {settle.ErrUnknownField, CodeBad, "values"}, {settle.ErrMove, CodeBad, "values"},
	{settle.ErrBounds, CodeBad, "values"}, {settle.ErrUnstable, CodeBad, "values"}, {settle.ErrStep, CodeBad, "values"}, {settle.ErrEMA, CodeBad, "values"},
	{settle.ErrBand, CodeBad, "values"}, {settle.ErrFeeSplit, CodeBad, "values"}, {settle.ErrCoalition, CodeBad, "values"}, {settle.ErrPenalty, CodeBad, "values"},
	{settle.ErrUnbonding, CodeBad, "values"}, {settle.ErrReceiptSpan, CodeBad, "values"}, {settle.ErrVoucher, CodeBad, "values"},
}

func governRefusal(err error) error {
	for _, r := range governRefusals {
		if !errors.Is(err, r.err) {
			continue
		}
		if r.code == "" {
			return err
		}
		return refusal(r.code, r.field, "%v", err)
	}
	return err
}
