package cashier

import (
	"errors"
	"fmt"

	"kvasird/node/kv"
	"kvasird/settle"
)

// Refusals of a request.
var (
	ErrNoQuote = errors.New("there is no such quote: ask for one")
	ErrUsed    = errors.New("the signature pays another request")
	ErrSettled = errors.New("the request is settled")
)

func requestKey(id settle.QuoteID) []byte { return append([]byte{'r'}, id[:]...) }

func signatureKey(s settle.Signature) []byte { return append([]byte{'s'}, s[:]...) }

func bondKey(n settle.Node) []byte { return append([]byte{'b'}, n[:]...) }

// Quote writes a quote down, which is open then. Error: settle.ErrQuote.
func (b *Books) Quote(q settle.Quote) error {
	r, err := settle.NewRequest(q)
	if err != nil {
		return err
	}
	return b.store.Update(func(tx *kv.Tx) error {
		var old settle.Request
		if ok, err := (page{tx}).load(requestKey(q.ID), &old); err != nil || ok {
			return errors.Join(err, fmt.Errorf("%w: %s is taken", settle.ErrQuote, q.ID))
		}
		return errors.Join(page{tx}.save(requestKey(q.ID), r), page{tx}.watch(r, b.seconds()))
	})
}

// Request is a request as it stands. Error: ErrNoQuote.
func (b *Books) Request(id settle.QuoteID) (r settle.Request, err error) {
	err = b.store.View(func(tx *kv.Tx) error { return page{tx}.request(id, &r) })
	return r, err
}

func (p page) request(id settle.QuoteID, r *settle.Request) error {
	ok, err := p.load(requestKey(id), r)
	if err == nil && !ok {
		err = fmt.Errorf("%w: %s", ErrNoQuote, id)
	}
	return err
}

// step takes a request to its next record, and books what belongs to that.
func (b *Books) step(id settle.QuoteID, next func(page, settle.Request) (settle.Request, []settle.Entry, error)) (r settle.Request, err error) {
	err = b.store.Update(func(tx *kv.Tx) error {
		p := page{tx}
		if err := p.request(id, &r); err != nil {
			return err
		}
		var entries []settle.Entry
		if r, entries, err = next(p, r); err != nil {
			return err
		}
		for _, e := range entries {
			if _, err := p.post(e); err != nil {
				return err
			}
		}
		return errors.Join(p.save(requestKey(id), r), p.watch(r, b.seconds()))
	})
	return r, err
}

// Reserve binds a signature to a request, before the chain is asked about it; lease is
// until when its caller asks, in Unix seconds. Errors: ErrNoQuote, ErrUsed, those of
// settle.Request.Reserve.
func (b *Books) Reserve(id settle.QuoteID, sig settle.Signature, lease uint64) (settle.Request, error) {
	return b.reserve(id, sig, lease, nil)
}

// reserve also keeps how the payment is proved, unless there is something of the same
// signature already.
func (b *Books) reserve(id settle.QuoteID, sig settle.Signature, lease uint64, how *intent) (settle.Request, error) {
	return b.step(id, func(p page, r settle.Request) (settle.Request, []settle.Entry, error) {
		r, err := b.bind(p, r, sig, lease, how)
		return r, nil, err
	})
}

func (b *Books) bind(p page, r settle.Request, sig settle.Signature, lease uint64, how *intent) (settle.Request, error) {
	id := r.Quote.ID
	v, ok, err := p.Get(signatureKey(sig))
	if err != nil {
		return r, err
	}
	if ok && settle.QuoteID(v) != id {
		return r, ErrUsed
	}
	if r, err = r.Reserve(sig, b.seconds(), lease); err != nil {
		return r, err
	}
	if how != nil {
		if err := p.keepIntent(id, sig, *how); err != nil {
			return r, err
		}
	}
	return r, p.Put(signatureKey(sig), id[:])
}

// contest is reserve for a request that the chain says a signature pays. Who reserved it
// for another quote loses it: from is that one's request then. Errors: those of Reserve.
func (b *Books) contest(id settle.QuoteID, sig settle.Signature, how intent) (r, from settle.Request, err error) {
	r, err = b.step(id, func(p page, r settle.Request) (_ settle.Request, _ []settle.Entry, err error) {
		if from, err = b.wrest(p, sig, "the transfer pays another quote"); err != nil {
			return r, nil, err
		}
		r, err = b.bind(p, r, sig, b.seconds(), &how)
		return r, nil, err
	})
	return r, from, err
}

// wrest takes a signature from the quote that it is reserved for, if there is one, and
// gives that one's request. Error: ErrUsed when it is more than reserved.
func (b *Books) wrest(p page, sig settle.Signature, reason string) (from settle.Request, err error) {
	v, ok, err := p.Get(signatureKey(sig))
	if err != nil || !ok || settle.QuoteID(v) == (settle.QuoteID{}) {
		return from, err
	}
	id := settle.QuoteID(v)
	if err := p.request(id, &from); err != nil {
		return from, err
	}
	if from.State != settle.Reserved {
		return from, fmt.Errorf("%w: %s", ErrUsed, id)
	}
	if from, err = p.letGo(from, reason); err != nil {
		return from, err
	}
	return from, errors.Join(p.save(requestKey(id), from), p.watch(from, b.seconds()))
}

// letGo opens a request again, and forgets its payment.
func (p page) letGo(r settle.Request, reason string) (settle.Request, error) {
	sig := r.Signature
	r, err := r.Refuse(reason)
	if err != nil {
		return r, err
	}
	return r, errors.Join(p.Delete(signatureKey(sig)), p.Delete(intentKey(r.Quote.ID)))
}

// Refuse opens a request again after the chain's definite no, and lets go of the
// signature, which may be another request's. Errors: ErrNoQuote, settle.ErrState.
func (b *Books) Refuse(id settle.QuoteID, reason string) (settle.Request, error) {
	return b.step(id, func(p page, r settle.Request) (settle.Request, []settle.Entry, error) {
		r, err := p.letGo(r, reason)
		return r, nil, err
	})
}

// Pay books what the chain proved of a reserved request: the request is paid, or all of
// it is the payer's balance when it came too late or is too little. Errors: ErrNoQuote,
// settle.ErrKeyReused when the payment was booked for something else, those of
// settle.Request.Pay.
func (b *Books) Pay(id settle.QuoteID, proof settle.Payment) (settle.Request, error) {
	return b.step(id, func(_ page, r settle.Request) (settle.Request, []settle.Entry, error) {
		if r.State > settle.Reserved && r.Signature == proof.Signature && r.Message == proof.Message {
			return r, nil, nil // it was booked, whatever became of the request since
		}
		paid, err := r.Pay(proof)
		if errors.Is(err, settle.ErrExpired) || errors.Is(err, settle.ErrTooLittle) {
			paid, err = r.Late(proof)
		}
		if err != nil {
			return r, nil, err
		}
		e, err := settle.PaymentEntry(paid, b.seconds())
		return paid, []settle.Entry{e}, err
	})
}

// Debit pays a request from a prepaid balance. Errors: ErrNoQuote, settle.ErrFunds, those
// of settle.Request.Debit.
func (b *Books) Debit(id settle.QuoteID, owner settle.Wallet) (settle.Request, error) {
	return b.step(id, func(_ page, r settle.Request) (settle.Request, []settle.Entry, error) {
		r, err := r.Debit(owner, b.seconds())
		if err != nil {
			return r, nil, err
		}
		e, err := settle.DebitEntry(r, b.seconds())
		return r, []settle.Entry{e}, err
	})
}

// Run starts a paid request in an epoch, for one caller until lease. Errors: ErrNoQuote,
// those of settle.Request.Run.
func (b *Books) Run(id settle.QuoteID, lease, epoch uint64) (settle.Request, error) {
	return b.step(id, func(_ page, r settle.Request) (settle.Request, []settle.Entry, error) {
		r, err := r.Run(b.seconds(), lease, epoch)
		return r, nil, err
	})
}

// End ends a request that delivered so many tokens, prompt included; failed says why it
// did not deliver all, or is empty. Errors: ErrNoQuote, those of settle.Request.Finish.
func (b *Books) End(id settle.QuoteID, tokens uint64, failed string) (settle.Request, error) {
	return b.step(id, func(_ page, r settle.Request) (settle.Request, []settle.Entry, error) {
		var err error
		if failed == "" {
			r, err = r.Finish(tokens)
		} else {
			r, err = r.Fail(tokens, failed)
		}
		return r, nil, err
	})
}

// Settle divides what a request that ended has in escrow. The request, the bonds and the
// emission reserve are those of the books, whatever s has. Errors: ErrNoQuote,
// ErrSettled, those of settle.Params.SettleRequest.
func (b *Books) Settle(p settle.Params, s settle.Settling) (out settle.Outcome, err error) {
	_, err = b.step(s.Job.Request.Quote.ID, func(pg page, r settle.Request) (settle.Request, []settle.Entry, error) {
		if err := pg.unsettled(r.Quote.ID); err != nil {
			return r, nil, err
		}
		var entries []settle.Entry
		r, entries, out, err = b.settle(pg, r, p, s)
		return r, entries, err
	})
	return out, err
}

// unsettled refuses what is settled. Error: ErrSettled.
func (p page) unsettled(id settle.QuoteID) error {
	_, done, err := p.Entry(settle.EntryKey{Once: settle.ActSettle, ID: settle.RequestKey(id)})
	if err == nil && done {
		err = ErrSettled
	}
	return err
}

func (b *Books) settle(pg page, r settle.Request, p settle.Params, s settle.Settling) (next settle.Request, entries []settle.Entry, out settle.Outcome, err error) {
	s.Job.Request, s.Bonds, s.Now, s.Reserve = r, map[settle.Node]settle.Bond{}, b.seconds(), settle.Reserve{}
	if _, err := pg.load([]byte{'m'}, &s.Reserve); err != nil {
		return r, nil, out, err
	}
	for _, w := range s.Work {
		var bond settle.Bond
		if _, err := pg.load(bondKey(w.Worker), &bond); err != nil {
			return r, nil, out, err
		}
		s.Bonds[w.Worker] = bond
	}
	if out, err = p.SettleRequest(s); err != nil {
		return r, nil, out, err
	}
	next, entries, err = b.settled(pg, r, out, s.Epoch)
	return next, entries, out, err
}

// settled keeps what a settlement changed beside the ledger.
func (b *Books) settled(p page, r settle.Request, out settle.Outcome, epoch uint64) (settle.Request, []settle.Entry, error) {
	if err := errors.Join(b.pay(p, r, out), b.insure(p, r, out, epoch)); err != nil {
		return r, nil, err
	}
	if out.Reserve.Total > 0 {
		if err := p.save([]byte{'m'}, out.Reserve); err != nil {
			return r, nil, err
		}
	}
	if r.State == settle.Failed {
		var err error
		if r, err = r.Credited(); err != nil {
			return r, nil, err
		}
	}
	return r, out.Entries, nil
}
