package cashier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/govern"
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
	p, err := g.Propose(now, c.Epoch, c.Valid, c.Values)
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

// Activate is part of Service.
func (t *Teller) Activate(_ context.Context, a Activation) (Activated, error) {
	p, err := govern.ParseProposal(a.Proposal)
	if err != nil {
		return Activated{}, refusal(CodeBad, "proposal", "%v", err)
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
