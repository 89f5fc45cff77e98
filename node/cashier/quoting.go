package cashier

import (
	"context"
	"maps"
	"time"

	"kvasird/settle"
)

// NamedSeconds is for how long after a quote's end a payment of it is looked for that was named,
// at most.
const NamedSeconds = 2 * keptReserved

// Limits of quotes.
const (
	quoteSeconds = 120  // for which an unpaid one is open
	maxOpen      = 256  // unpaid quotes of one node
	maxNamed     = 1024 // and those whose payment is named and not proved: no more quotes then
	maxAskers    = 1 << 14
	secretBytes  = 32
	slotFresh    = 5 * time.Second
)

// Quote is part of Service.
func (t *Teller) Quote(ctx context.Context, ask Ask) (Offer, error) {
	if err := t.checkAsk(ask); err != nil {
		return Offer{}, err
	}
	price, err := t.price(ask.Model, t.node)
	if err != nil {
		return Offer{}, explained("model", err)
	}
	now := t.seconds()
	if _, err := price.record.Ref.At(now); err != nil {
		return Offer{}, explained("", err)
	}
	slot, err := t.finalized(ctx)
	if err != nil {
		return Offer{}, explained("", err)
	}
	secret := make([]byte, secretBytes)
	t.cfg.Random(secret)
	q := settle.Quote{Model: ask.Model, PromptTokens: ask.PromptTokens, AnswerTokens: ask.AnswerTokens, RequestHash: ask.RequestHash,
		PriceRecord: price.hash, PriceRaw: uint64(price.record.State.Price), Ref: uint64(price.record.Ref.PerFiat), Entry: t.node, Owner: ask.Owner,
		CreatedSlot: slot, Created: now, Expires: now + quoteSeconds, ClaimHash: settle.HashSecret(secret)}
	t.cfg.Random(q.ID[:])
	if q, err = settle.NewQuote(q, now-price.record.Ref.Set); err != nil {
		return Offer{}, explained("", err)
	}
	if err := t.mayEverRun(q); err != nil {
		return Offer{}, err
	}
	if err := t.openQuote(q); err != nil {
		return Offer{}, err
	}
	if err := t.cfg.Books.Quote(q); err != nil {
		t.closeQuote(q)
		return Offer{}, err
	}
	return Offer{q, secret}, nil
}

func (t *Teller) checkAsk(ask Ask) error {
	switch {
	case ask.PromptTokens > settle.MaxTokens:
		return refusal(CodeBad, "prompt_tokens", "%d tokens, at most %d", ask.PromptTokens, settle.MaxTokens)
	case ask.AnswerTokens > settle.MaxTokens:
		return refusal(CodeBad, "answer_tokens", "%d tokens, at most %d", ask.AnswerTokens, settle.MaxTokens)
	case ask.PromptTokens+ask.AnswerTokens == 0:
		return refusal(CodeBad, "prompt_tokens", "a request of no tokens")
	case ask.RequestHash == settle.Hash{}:
		return refusal(CodeBad, "request_hash", "it is the SHA-256 of the request's body, not zero")
	case ask.Owner == settle.Wallet{}:
		return nil
	case settle.CheckKey(ask.Owner) != nil:
		return refusal(CodeBad, "owner", "%s is no wallet that can sign", ask.Owner)
	case t.operator(ask.Owner):
		return refusal(CodeRights, "owner", "%s is the network's own: it comes back to it what it pays", ask.Owner)
	}
	return nil
}

// finalized is a slot that is final on the chain. It may be some seconds old: an older
// one than need be is no harm.
func (d *Desk) finalized(ctx context.Context) (uint64, error) {
	d.mu.Lock()
	slot, asked := d.slot, d.asked
	d.mu.Unlock()
	if now := d.cfg.Now(); slot > 0 && now.Sub(asked) < slotFresh && !now.Before(asked) {
		return slot, nil
	}
	slot, err := d.cfg.Chain.Slot(ctx)
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.slot, d.asked = slot, d.cfg.Now()
	return slot, nil
}

// seats are quotes that count among those of their node, with until when.
type seats map[settle.Node]map[settle.QuoteID]uint64

func (s seats) take(q settle.Quote, until uint64) {
	if s[q.Entry] == nil {
		s[q.Entry] = map[settle.QuoteID]uint64{}
	}
	s[q.Entry][q.ID] = until
}

func (s seats) leave(q settle.Quote) { delete(s[q.Entry], q.ID) }

// forget lets those go whose time is over.
func (s seats) forget(now uint64) {
	for node, of := range s {
		maps.DeleteFunc(of, func(_ settle.QuoteID, until uint64) bool { return until < now })
		if len(of) == 0 {
			delete(s, node)
		}
	}
}

// openQuote counts a quote among the unpaid ones of its node. Error: a Refusal.
func (d *Desk) openQuote(q settle.Quote) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[q.Entry] == nil && len(d.open) >= maxAskers {
		return &Refusal{Code: CodeBusy, Text: "too many nodes have unpaid quotes", Retry: quoteSeconds}
	}
	if of := d.open[q.Entry]; len(of) >= maxOpen {
		maps.DeleteFunc(of, func(_ settle.QuoteID, until uint64) bool { return until < q.Created })
	}
	if len(d.open[q.Entry]) >= maxOpen {
		return &Refusal{Code: CodeBusy, Text: "this node has too many unpaid quotes", Retry: quoteSeconds}
	}
	if len(d.named[q.Entry]) >= maxNamed {
		return &Refusal{Code: CodeBusy, Text: "too many payments of this node are named that no chain has", Retry: quoteSeconds}
	}
	d.open.take(q, q.Expires)
	return nil
}

// nameQuote counts a quote among those whose payment is named and not proved: naming one
// costs nothing. It stays so until the request is paid, or refused, or its signature let go.
func (d *Desk) nameQuote(q settle.Quote) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open.leave(q)
	d.named.take(q, q.Expires+NamedSeconds)
}

// reopenQuote takes back nameQuote.
func (d *Desk) reopenQuote(q settle.Quote) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.named.leave(q)
	d.open.take(q, q.Expires)
}

// closeQuote counts a quote no longer.
func (d *Desk) closeQuote(q settle.Quote) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open.leave(q)
	d.named.leave(q)
}

// forgetQuotes forgets which quotes counted that do not any more.
func (d *Desk) forgetQuotes() {
	now := d.seconds()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open.forget(now)
	d.named.forget(now)
}
