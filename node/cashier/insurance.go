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

// claimsAtOnce is how many claims on the pool are paid in one update.
const claimsAtOnce = 32

// insured is a settled request with its claim on the pool. A request that was not
// delivered has none: all of its money went back.
type insured struct {
	settle.Insured
	Epoch     uint64        // in which its workers were paid
	Asked     settle.Amount // of the pool, when it is Claimed
	Due       uint64        // from when the claim is paid, Unix seconds
	Over      bool          // the pool has paid Recovered for it
	Recovered settle.Amount
}

// workerPay is what one worker was paid for a request, emission included.
type workerPay struct {
	Worker settle.Node
	Amount settle.Amount
}

// round is the claims of an epoch, which are paid in several updates.
type round struct {
	Epoch, Due uint64 // those that are due before
	Open       bool
	settle.ClaimRound
}

func insuredKey(id settle.QuoteID) []byte { return append([]byte{'q'}, id[:]...) }

func paidKey(id settle.QuoteID) []byte { return append([]byte{'P'}, id[:]...) }

func claimKey(at uint64, id settle.QuoteID) []byte {
	return append(binary.BigEndian.AppendUint64([]byte{'C'}, at), id[:]...)
}

// insure keeps what a claim or a verdict about a settled request starts from.
func (b *Books) insure(p page, r settle.Request, out settle.Outcome, epoch uint64) error {
	used := min(r.Paid, r.Quote.Amount) - out.Split.Refund
	if used == 0 {
		return nil
	}
	var pays []workerPay
	for _, w := range out.Workers {
		pays = append(pays, workerPay{w.Worker, w.Pay + w.Emission})
	}
	in := insured{Insured: settle.Insured{Payer: r.Payer, Used: used, Fee: out.Split.Fee, SettledAt: b.seconds(), Delivered: true}, Epoch: epoch}
	return errors.Join(p.save(insuredKey(r.Quote.ID), in), p.save(paidKey(r.Quote.ID), pays))
}

func (p page) insured(id settle.QuoteID) (in insured, err error) {
	ok, err := p.load(insuredKey(id), &in)
	if err == nil && !ok {
		err = fmt.Errorf("%w: %s was not, or all of it went back", settle.ErrClaimState, id)
	}
	return in, err
}

// Complain claims an amount of the pool for a request, once, for the wallet that paid it.
// The same claim again changes nothing. Errors: those of settle.Params.CheckClaim,
// settle.ErrPremiumCap.
func (b *Books) Complain(p settle.Params, id settle.QuoteID, wallet settle.Wallet, amount settle.Amount) error {
	return b.store.Update(func(tx *kv.Tx) error {
		pg, now := page{tx}, b.seconds()
		in, err := pg.insured(id)
		if err != nil || in.Claimed && in.Payer == wallet && in.Asked == amount {
			return err
		}
		if err := p.CheckClaim(in.Insured, wallet, amount, now); err != nil {
			return err
		}
		in.Asked, in.Due = amount, max(p.ClaimDue(in.Insured), now)
		return pg.claim(p, id, in, now)
	})
}

// claim files a claim that was checked, within the premiums of its wallet.
func (p page) claim(params settle.Params, id settle.QuoteID, in insured, now uint64) error {
	premiums, day, err := p.premiums(in.Payer, now)
	if err == nil {
		premiums, err = premiums.Claim(day, params.ClaimsPPM, in.Asked)
	}
	if err != nil {
		return err
	}
	in.Claimed = true
	return errors.Join(p.save(premiumsKey(in.Payer), premiums), p.save(insuredKey(id), in),
		p.putAmount(claimKey(in.Due, id), in.Asked))
}

// premiums is what a wallet paid into the pool, and the day that it is. A clock that was
// set back stays at the newest day that there was.
func (p page) premiums(w settle.Wallet, now uint64) (premiums settle.Premiums, day uint64, err error) {
	_, err = p.load(premiumsKey(w), &premiums)
	return premiums, max(now/settle.Day, premiums.Day), err
}

func (b *Books) insured(id settle.QuoteID) (in insured, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		in, err = page{tx}.insured(id)
		return err
	})
	return in, err
}

// PayClaims pays what was due before the epoch that runs, of all such claims what the
// pool gives in one epoch. There is one round in an epoch, which a crash does not end.
func (b *Books) PayClaims(p settle.Params, m govern.Moment) error {
	r, err := b.openRound(p, m)
	for err == nil && r.Open {
		cut("claims")
		r, err = b.payRound(r)
	}
	return err
}

// openRound is the round that goes on, or a new one when something is due.
func (b *Books) openRound(p settle.Params, m govern.Moment) (r round, err error) {
	due := false
	err = b.store.View(func(tx *kv.Tx) error {
		had, err := page{tx}.load([]byte{'R'}, &r)
		if err != nil || r.Open || had && r.Epoch >= m.Epoch {
			return err
		}
		return ignore(page{tx}.eachDue(m.Began, func(settle.QuoteID, settle.Amount) error { due = true; return errEnough }), errEnough)
	})
	if err != nil || !due {
		return r, err
	}
	err = b.store.Update(func(tx *kv.Tx) error {
		var asked settle.Amount
		pg := page{tx}
		err := pg.eachDue(m.Began, func(_ settle.QuoteID, claim settle.Amount) (err error) {
			asked, err = asked.Add(claim)
			return err
		})
		if err != nil {
			return err
		}
		pool, err := pg.Balance(settle.Account{Kind: settle.Pool})
		if err != nil {
			return err
		}
		r = round{Epoch: m.Epoch, Due: m.Began, Open: true}
		if r.ClaimRound, err = p.ClaimRound(pool, asked); err != nil {
			return err
		}
		return pg.save([]byte{'R'}, r)
	})
	return r, err
}

// eachDue calls fn for the claims that were due before a time, the first first.
func (p page) eachDue(before uint64, fn func(settle.QuoteID, settle.Amount) error) error {
	return ignore(p.Each([]byte{'C'}, func(k, v []byte) error {
		if len(k) != 1+8+len(settle.QuoteID{}) {
			return fmt.Errorf("%w: key %x", ErrBooks, k)
		}
		if binary.BigEndian.Uint64(k[1:]) >= before {
			return errBeyond
		}
		claim, err := number(v)
		if err != nil {
			return err
		}
		return fn(settle.QuoteID(k[9:]), settle.Amount(claim))
	}), errBeyond)
}

var errBeyond = errors.New("what follows is not due")

// payRound pays some claims of a round, and closes it when there are no more.
func (b *Books) payRound(r round) (round, error) {
	err := b.store.Update(func(tx *kv.Tx) error {
		pg := page{tx}
		var ids []settle.QuoteID
		err := ignore(pg.eachDue(r.Due, func(id settle.QuoteID, _ settle.Amount) error {
			if len(ids) == claimsAtOnce {
				return errEnough
			}
			ids = append(ids, id)
			return nil
		}), errEnough)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := b.payClaim(pg, r, id); err != nil {
				return err
			}
		}
		if r.Open = len(ids) == claimsAtOnce; !r.Open {
			return pg.save([]byte{'R'}, r)
		}
		return nil
	})
	return r, err
}

// payClaim pays one claim, with no more than what did not come back since, nor than the
// pool has.
func (b *Books) payClaim(p page, r round, id settle.QuoteID) error {
	in, err := p.insured(id)
	if err != nil {
		return err
	}
	pool := settle.Account{Kind: settle.Pool}
	has, err := p.Balance(pool)
	if err != nil {
		return err
	}
	amount, err := r.Part(in.Asked)
	if err != nil {
		return err
	}
	amount = min(amount, in.Loss(), has)
	in.Over, in.Recovered, in.Back = true, amount, in.Back+amount
	if amount > 0 {
		err = p.transfer(settle.ActClaim, settle.RequestKey(id), b.seconds(), pool, settle.Account{Kind: settle.Balance, ID: in.Payer}, amount)
	}
	return errors.Join(err, p.Delete(claimKey(in.Due, id)), p.save(insuredKey(id), in))
}

// ComplaintText is what the payer of a request signs, wrapped by govern.Wrap under the
// network as its domain, to claim an amount of the pool.
func ComplaintText(network settle.Hash, c Complaint, payer settle.Wallet) string {
	return fmt.Sprintf("kvasir insurance claim v1\nnetwork: %x\nrequest: %s\nclaim: %d\nwallet: %s\n", network, c.ID, c.Amount, payer)
}

// Complain is part of Service. What is claimed is the payer's, whoever asks in his name.
func (t *Teller) Complain(_ context.Context, c Complaint) (Complained, error) {
	r, err := t.cfg.Books.Request(c.ID)
	if err != nil {
		return Complained{}, explained("request", err)
	}
	if err := t.complains(c, r.Payer); err != nil {
		return Complained{}, err
	}
	_, p := t.current()
	if err := t.cfg.Books.Complain(p, c.ID, r.Payer, c.Amount); err != nil {
		return Complained{}, complaintRefusal(err)
	}
	in, err := t.cfg.Books.insured(c.ID)
	return Complained{Asked: in.Asked, Due: in.Due, Over: in.Over, Recovered: in.Recovered}, err
}

// complains refuses who is neither the payer of a request nor a node linked to it.
func (t *Teller) complains(c Complaint, payer settle.Wallet) error {
	if payer == (settle.Wallet{}) {
		return refusal(CodeState, "request", "nobody has paid for the request")
	}
	if c.Signature != (settle.Signature{}) {
		return verifyText(t.cfg.Network, payer, c.Format, c.Signature, ComplaintText(t.cfg.Network, c, payer))
	}
	l, err := t.cfg.Books.Linked(t.node)
	if err == nil && l.Wallet != payer {
		err = refusal(CodeRights, "signature", "this node is not linked to %s, which paid for the request: have that sign the claim", payer)
	}
	return err
}

// complaintRefusal says what a caller can do about a claim that is refused.
func complaintRefusal(err error) error {
	for _, c := range []struct {
		err   error
		code  Code
		field string
	}{
		{settle.ErrClaimState, CodeState, "request"}, {settle.ErrClaimTwice, CodeState, "request"}, {settle.ErrClaimLate, CodeState, "request"},
		{settle.ErrClaimAmount, CodeBad, "amount"}, {settle.ErrPremiumCap, CodeFunds, "amount"},
	} {
		if errors.Is(err, c.err) {
			return refusal(c.code, c.field, "%v", err)
		}
	}
	return err
}
