package cashier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// proveFor is how long PayX402 waits for a transaction to be final, at most, and
// proveEvery how often it asks.
const (
	proveFor   = time.Minute
	proveEvery = time.Second
)

// intent is how the payment of a reserved quote is proved. Signed is that of a
// transaction which this desk sends, and empty of one that its payer sent.
type intent struct {
	Payer  settle.Wallet
	Signed solana.Signed
}

func intentKey(id settle.QuoteID) []byte { return append([]byte{'x'}, id[:]...) }

// keepIntent writes an intent down. Of two of one signature whose transaction is sent by
// the desk the first stays: it may have landed since.
func (p page) keepIntent(id settle.QuoteID, sig settle.Signature, how intent) error {
	var old intent
	ok, err := p.load(intentKey(id), &old)
	if err != nil || ok && old.Signed.Raw != nil && old.Signed.Signature == sig {
		return err
	}
	return p.save(intentKey(id), how)
}

func (b *Books) intent(id settle.QuoteID) (how intent, ok bool, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		ok, err = page{tx}.load(intentKey(id), &how)
		return err
	})
	return how, ok, err
}

// mine is a request of this node's.
func (t *Teller) mine(id settle.QuoteID) (settle.Request, error) {
	r, err := t.cfg.Books.Request(id)
	if err == nil && r.Quote.Entry != t.node {
		err = refusal(CodeRights, "quote", "the quote %s is for another node to answer", id)
	}
	return r, explained("quote", err)
}

// Pay is part of Service.
func (t *Teller) Pay(ctx context.Context, p Proof) (settle.Request, error) {
	r, err := t.mine(p.ID)
	if err != nil {
		return r, err
	}
	if r.State > settle.Reserved && p.Signature != (settle.Signature{}) && r.Signature == p.Signature {
		return r, explained("signature", lateOf(r))
	}
	if q := r.Quote; p.Payer == (settle.Wallet{}) || q.Owner != (settle.Wallet{}) && p.Payer != q.Owner {
		return r, refusal(CodeRights, "payer", "%s is not who the quote is for", p.Payer)
	}
	if !t.take(p.ID) {
		return r, &Refusal{Code: CodeNotYet, Field: "quote", Text: "a payment of the quote is being looked at", Retry: askAgain}
	}
	defer t.release(p.ID)
	r, err = t.reserve(r, p.Signature, intent{Payer: p.Payer})
	if errors.Is(err, errClaimed) {
		return t.contest(ctx, r, p)
	}
	if err != nil {
		return r, err
	}
	cut("reserved")
	return t.prove(ctx, r, p.Payer)
}

// lateOf refuses what was paid too late or too little: it is credit.
func lateOf(r settle.Request) error {
	if r.State == settle.Credit && r.Started == 0 && r.Tokens == 0 {
		return refusal(CodeInvalid, "signature", "%s: what was paid is in the balance of %s", r.Reason, r.Payer)
	}
	return nil
}

// take makes the caller the only one to prove a payment of the quote.
func (d *Desk) take(id settle.QuoteID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.busy[id] {
		return false
	}
	d.busy[id] = true
	return true
}

func (d *Desk) release(id settle.QuoteID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.busy, id)
}

// errClaimed refuses a signature that another quote has reserved: it is found out later
// whether it pays that one.
var errClaimed error = &Refusal{Code: CodeNotYet, Field: "signature", Text: "another quote claims the signature, which is being looked at", Retry: askAgain}

// reserve binds a signature to the request before anybody is asked about it. Who is the
// only one to prove it needs no lease.
func (d *Desk) reserve(r settle.Request, sig settle.Signature, how intent) (settle.Request, error) {
	got, err := d.cfg.Books.reserve(r.Quote.ID, sig, d.cfg.Books.seconds(), &how)
	if errors.Is(err, ErrUsed) && d.undecided(sig) {
		err = errClaimed
	}
	if err != nil {
		return r, explained("signature", err)
	}
	d.nameQuote(r.Quote)
	return got, nil
}

// undecided says whether the quote that has a signature is only reserved.
func (d *Desk) undecided(sig settle.Signature) bool {
	var r settle.Request
	err := d.cfg.Books.store.View(func(tx *kv.Tx) error {
		v, ok, err := tx.Get(signatureKey(sig))
		if err != nil || !ok || len(v) != len(r.Quote.ID) {
			return err
		}
		return page{tx}.request(settle.QuoteID(v), &r)
	})
	return err == nil && r.State == settle.Reserved
}

// contest pays with a signature that another quote has reserved, if the chain says that it
// pays this one: anybody may have seen it there, and named it first.
func (d *Desk) contest(ctx context.Context, r settle.Request, p Proof) (settle.Request, error) {
	now := d.cfg.Books.seconds()
	if _, err := r.Reserve(p.Signature, now, now); err != nil {
		return r, explained("signature", err)
	}
	paid, err := d.proof(ctx, r.Quote, p.Signature, p.Payer)
	if err != nil {
		return r, errClaimed
	}
	got, from, err := d.cfg.Books.contest(r.Quote.ID, p.Signature, intent{Payer: p.Payer})
	if err != nil {
		return r, explained("signature", err)
	}
	d.nameQuote(r.Quote)
	if from.State == settle.Open {
		d.reopenQuote(from.Quote)
	}
	cut("contested")
	return d.book(got, paid)
}

// prove asks the chain whether the signature of a reserved request pays it. All of what it
// proves is booked: what is late or too little as a balance.
func (d *Desk) prove(ctx context.Context, r settle.Request, payer settle.Wallet) (settle.Request, error) {
	paid, err := d.proof(ctx, r.Quote, r.Signature, payer)
	if errors.Is(err, solana.ErrInvalid) {
		return d.refuse(r, err)
	}
	if err != nil {
		return r, explained("signature", err)
	}
	cut("proved")
	return d.book(r, paid)
}

// proof is what the chain proves of a signature as the payment of a quote.
func (d *Desk) proof(ctx context.Context, q settle.Quote, sig settle.Signature, payer settle.Wallet) (settle.Payment, error) {
	got, err := d.cfg.Chain.Payment(ctx, solana.Claim{Signature: sig, Owner: payer, Amount: 1, Memo: q.ID.Memo(),
		NotBefore: q.CreatedSlot, Sponsor: d.feePayer()})
	if err == nil && got.Time <= 0 {
		err = fmt.Errorf("%w: no time of the block", solana.ErrUnverifiable)
	}
	if err != nil {
		return settle.Payment{}, err
	}
	return settle.Payment{Signature: got.Signature, Message: got.Message, Memo: q.ID.Memo(),
		Payer: got.Owner, Amount: got.Amount, Slot: got.Slot, Time: uint64(got.Time)}, nil
}

// book books what the chain proved of a reserved request.
func (d *Desk) book(r settle.Request, paid settle.Payment) (settle.Request, error) {
	got, err := d.cfg.Books.Pay(r.Quote.ID, paid)
	cut("paid")
	if errors.Is(err, settle.ErrKeyReused) {
		return d.refuse(r, err)
	}
	if err != nil {
		return r, explained("signature", err)
	}
	d.closeQuote(r.Quote)
	return got, lateOf(got)
}

// refuse opens a request again whose payment is none, as why says.
func (d *Desk) refuse(r settle.Request, why error) (settle.Request, error) {
	opened, err := d.cfg.Books.Refuse(r.Quote.ID, why.Error())
	if errors.Is(err, settle.ErrState) { // whom it pays has taken it
		return r, explained("signature", why)
	}
	if err != nil {
		return r, err
	}
	d.reopenQuote(r.Quote)
	return opened, explained("signature", why)
}

// PayX402 is part of Service.
func (t *Teller) PayX402(ctx context.Context, p Partial) (settle.Request, error) {
	r, err := t.mine(p.ID)
	if err != nil {
		return r, err
	}
	if t.cfg.Fee == nil {
		return r, refusal(CodeBad, "transaction", "no transactions are co-signed here: pay from a wallet of your own, and name the signature")
	}
	how, known, err := t.cfg.Books.intent(p.ID)
	if err != nil {
		return r, err
	}
	known = known && how.completes(p.Transaction)
	if known && r.State > settle.Reserved {
		return r, lateOf(r)
	}
	if !t.take(p.ID) {
		return r, &Refusal{Code: CodeNotYet, Field: "quote", Text: "a payment of the quote is being looked at", Retry: askAgain}
	}
	defer t.release(p.ID)
	if !known || r.State != settle.Reserved {
		if err := t.sponsors(t.node); err != nil {
			return r, err
		}
		if r, how, err = t.coSign(ctx, r, p.Transaction); err != nil {
			return r, err
		}
	} else {
		t.send(ctx, how.Signed) // who was to do so may have been stopped before
	}
	return t.waitFor(ctx, r, how)
}

// completes says whether s is the partial transaction with its first signature.
func (i intent) completes(partial []byte) bool {
	return len(partial) > 65 && len(i.Signed.Raw) > 65 && bytes.Equal(i.Signed.Raw[65:], partial[65:])
}

// coSign signs a transaction, writes it down, and sends it when it would not fail.
func (d *Desk) coSign(ctx context.Context, r settle.Request, partial []byte) (settle.Request, intent, error) {
	if r.State != settle.Open {
		return r, intent{}, refusal(CodeState, "quote", "the quote is paid by another transaction: it is %s", r.State)
	}
	if d.cfg.Books.seconds() > r.Quote.Expires { // it would be late for sure
		return r, intent{}, explained("quote", settle.ErrExpired)
	}
	signed, err := d.cfg.Chain.CoSign(ctx, d.cfg.Fee, partial, solana.Due{Amount: r.Quote.Amount, Memo: r.Quote.ID.Memo()})
	if err != nil {
		return r, intent{}, explained("transaction", err)
	}
	if owner := r.Quote.Owner; owner != (settle.Wallet{}) && signed.Payer != owner {
		return r, intent{}, refusal(CodeRights, "transaction", "%s is not who the quote is for", signed.Payer)
	}
	how := intent{Payer: signed.Payer, Signed: signed.Signed}
	if r, err = d.reserve(r, signed.Signature, how); err != nil {
		return r, how, err
	}
	d.sponsored(r.Quote)
	cut("intended")
	if err := d.cfg.Chain.Try(ctx, how.Signed); errors.Is(err, solana.ErrInvalid) {
		// It was not sent. Should somebody else send it all the same, its payer can name it.
		if opened, err := d.cfg.Books.Refuse(r.Quote.ID, err.Error()); err != nil {
			return opened, how, err
		}
		d.reopenQuote(r.Quote)
		return r, how, explained("transaction", err)
	}
	d.send(ctx, how.Signed)
	cut("sent")
	return r, how, nil
}

// send gives a transaction to the chain. Whether that took it is asked later.
func (d *Desk) send(ctx context.Context, s solana.Signed) {
	if err := d.cfg.Chain.Send(ctx, s); err != nil {
		d.cfg.Logger.Info("a payment could not be sent, and will be again", "signature", s.Signature, "err", err)
	}
}

// waitFor asks until the chain has the transaction, or ctx ends.
func (d *Desk) waitFor(ctx context.Context, r settle.Request, how intent) (settle.Request, error) {
	ctx, cancel := context.WithTimeout(ctx, proveFor)
	defer cancel()
	for {
		got, err := d.prove(ctx, r, how.Payer)
		var refused *Refusal
		if !errors.As(err, &refused) || refused.Code != CodeNotYet {
			return got, err
		}
		select {
		case <-ctx.Done():
			return got, err
		case <-time.After(proveEvery):
		}
	}
}

// recheck looks again at a payment whose caller may be gone.
func (d *Desk) recheck(ctx context.Context, r settle.Request, now uint64) error {
	if !d.take(r.Quote.ID) {
		return d.cfg.Books.rewatch(r)
	}
	defer d.release(r.Quote.ID)
	how, ok, err := d.cfg.Books.intent(r.Quote.ID)
	if err != nil || !ok {
		return errors.Join(err, d.cfg.Books.rewatch(r))
	}
	_, err = d.prove(ctx, r, how.Payer)
	var refused *Refusal
	if !errors.As(err, &refused) || refused.Code != CodeNotYet {
		if refused != nil {
			return nil // it is decided
		}
		return err
	}
	gone := now > r.Quote.Expires+keptReserved
	if how.Signed.Raw != nil {
		outcome, err := d.cfg.Chain.Resolve(ctx, how.Signed)
		if err == nil && outcome == solana.Pending {
			d.send(ctx, how.Signed)
		}
		gone = err == nil && (outcome == solana.Expired || outcome == solana.Failed)
	}
	if gone {
		if _, err := d.cfg.Books.Refuse(r.Quote.ID, "no chain has the transaction"); err != nil {
			return err
		}
		d.reopenQuote(r.Quote)
		return nil
	}
	return d.cfg.Books.rewatch(r)
}

// rewatch writes down when a request is looked at again.
func (b *Books) rewatch(r settle.Request) error {
	return b.store.Update(func(tx *kv.Tx) error { return page{tx}.watch(r, b.seconds()) })
}

// Debit is part of Service.
func (t *Teller) Debit(_ context.Context, id settle.QuoteID) (settle.Request, error) {
	r, err := t.mine(id)
	if err != nil {
		return r, err
	}
	l, err := t.cfg.Books.Linked(t.node)
	if err != nil {
		return r, err
	}
	if l.Wallet == (settle.Wallet{}) || !l.Spend {
		return r, refusal(CodeRights, "quote", "no wallet lets this node spend from its balance")
	}
	if t.operator(l.Wallet) {
		return r, refusal(CodeRights, "quote", "%s is the network's own: it comes back to it what it pays", l.Wallet)
	}
	paid, err := t.cfg.Books.Debit(id, l.Wallet)
	if err != nil {
		return r, explained("quote", err)
	}
	t.closeQuote(r.Quote)
	return paid, nil
}
