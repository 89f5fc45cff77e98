package pay

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

// Charge is part of gateway.Payments.
func (d *Door) Charge(r *http.Request, h http.Header, cost gateway.Cost) (gateway.Charge, error) {
	sent, err := readSent(r.Header)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), d.cfg.Wait+tryTime)
	defer cancel()
	c := &call{d: d, r: r.WithContext(ctx), h: h, cost: cost}
	id, pay := sent.id()
	if id == (settle.QuoteID{}) {
		offer, err := c.ask()
		if err != nil {
			return nil, err
		}
		id, pay = offer.Quote.ID, func(c *call) error { return c.debit(offer) }
	}
	return c.charge(id, pay)
}

// Spend is Charge for who asks without HTTP, by the name of an address: the wallet that this node
// is linked to pays. Where it does not, the error says why, and how it would.
func (d *Door) Spend(ctx context.Context, address string, cost gateway.Cost) (gateway.Charge, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Wait+tryTime)
	defer cancel()
	c := &call{d: d, r: (&http.Request{RemoteAddr: address}).WithContext(ctx), h: http.Header{}, cost: cost}
	offer, err := c.ask()
	if err != nil {
		return nil, err
	}
	return c.charge(offer.Quote.ID, func(c *call) error {
		why, err := c.spend(offer)
		if why != "" {
			d.unsettled(c.address(), offer.Quote)
			return &gateway.PaymentError{Status: http.StatusPaymentRequired, Code: "payment_required",
				Message: fmt.Sprintf("this answer costs up to %s base units: %s", offer.Quote.Amount, why)}
		}
		return err
	})
}

// charge pays a request and starts it.
func (c *call) charge(id settle.QuoteID, pay func(*call) error) (gateway.Charge, error) {
	started, err := c.start(id, pay)
	switch {
	case err == nil:
		return &charge{c.d, started}, nil
	case c.debited, c.lost: // nobody will come back for it, or could have it run
		c.d.ended <- ended{quote: settle.Quote{ID: id}, failed: err}
	case c.taken:
		c.d.leave(id)
	}
	return nil, err
}

// start pays and runs a request.
func (c *call) start(id settle.QuoteID, pay func(*call) error) (cashier.Started, error) {
	if err := pay(c); err != nil {
		return cashier.Started{}, err
	}
	return c.run(id)
}

// call is one request on its way to being paid.
type call struct {
	d       *Door
	r       *http.Request
	h       http.Header // of the answer
	cost    gateway.Cost
	taken   bool // the request is open at the door
	debited bool // or may be: no answer came
	lost    bool // it may run at the settlement, and does not here
}

// take opens the request at the door, once it is known that this client may have its
// answer: who only knows its id does not keep that client away. Error: the same call
// runs, or is being paid.
func (c *call) take(id settle.QuoteID) error {
	if err := c.d.take(id); err != nil {
		return again(err, settle.Request{})
	}
	c.taken = true
	return nil
}

// quote asks for a price.
func (c *call) quote(owner settle.Wallet) (cashier.Offer, error) {
	offer, err := c.d.cfg.Settlement.Quote(c.r.Context(), cashier.Ask{
		Model: c.cost.Model, PromptTokens: uint64(c.cost.Prompt), AnswerTokens: uint64(c.cost.Answers),
		RequestHash: c.cost.Body, Owner: owner,
	})
	if err != nil {
		return offer, refused(err)
	}
	return offer, nil
}

// ask is a quote for a request that came without a payment.
func (c *call) ask() (cashier.Offer, error) {
	if err := c.mayAsk(); err != nil {
		return cashier.Offer{}, err
	}
	return c.quote(settle.Wallet{})
}

// debit pays from the balance of the wallet that this node is linked to, for a client that
// may have that, or asks for another payment.
func (c *call) debit(offer cashier.Offer) error {
	if !c.cost.Spend {
		return c.due(offer, "")
	}
	why, err := c.spend(offer)
	if why != "" {
		return c.due(offer, why)
	}
	return err
}

// spend has the settlement debit the linked wallet. Where that does not pay, why says so, and how
// it would.
func (c *call) spend(offer cashier.Offer) (why string, err error) {
	if err := c.take(offer.Quote.ID); err != nil {
		return "", err
	}
	_, err = c.d.cfg.Settlement.Debit(c.r.Context(), offer.Quote.ID)
	switch code(err) {
	case cashier.CodeRights, cashier.CodeNotFound:
		return err.Error() + "; `kvasir wallet link --spend` has a wallet pay", nil
	case cashier.CodeFunds:
		return err.Error() + "; transfer to the vault and have it counted: `kvasir wallet deposit AMOUNT` says how", nil
	}
	c.debited = passing(err)
	return "", refused(err)
}

// transfer pays with a transfer of the client's own.
func (c *call) transfer(t transfer) error {
	r, err := c.find(t.quote)
	if err != nil {
		return err
	}
	if err := r.Again(t.payment, c.cost.Body, r.Quote.Opens(t.secret), uint64(c.d.cfg.Now().Unix())); err != nil {
		return again(err, r)
	}
	if err := c.fits(r); err != nil {
		return err
	}
	if err := c.take(t.quote); err != nil || r.State == settle.Paid || r.State == settle.Running {
		return err
	}
	if t.payer == (settle.Wallet{}) {
		t.payer = r.Quote.Owner
	}
	if t.payer == (settle.Wallet{}) {
		return bad(headerPayer, "is missing: the wallet that sent the transfer, since the quote names none")
	}
	r, err = c.d.cfg.Settlement.Pay(c.r.Context(), cashier.Proof{ID: t.quote, Signature: t.payment, Payer: t.payer})
	return c.paid(t.quote, r, err)
}

// find is a quote as it stands, whose answer was not given yet.
func (c *call) find(id settle.QuoteID) (settle.Request, error) {
	r, err := c.d.cfg.Settlement.Request(c.r.Context(), id)
	if err != nil {
		return r, refused(err)
	}
	return r, nil
}

// fits refuses a request that was answered, and one that asks for more than its quote
// has.
func (c *call) fits(r settle.Request) error {
	q := r.Quote
	switch {
	case r.State > settle.Running:
		return answered(r)
	case q.Model != c.cost.Model:
		return conflict("other_request", "quote %s is for model %s, this request for %s", q.ID, q.Model, c.cost.Model)
	case uint64(c.cost.Prompt) > q.PromptTokens:
		return conflict("quote_exceeded", "the prompt has %d tokens, quote %s is for %d: ask for one with prompt_tokens of that", c.cost.Prompt, q.ID, q.PromptTokens)
	case uint64(c.cost.Answers) > q.AnswerTokens:
		return conflict("quote_exceeded", "answers of %d tokens, quote %s is for %d: set the request's limit of tokens", c.cost.Answers, q.ID, q.AnswerTokens)
	}
	return nil
}

// paid looks at what became of a payment of a quote.
func (c *call) paid(id settle.QuoteID, r settle.Request, err error) error {
	switch code(err) {
	case "":
		c.d.settled(id)
	case cashier.CodeNotYet:
		c.d.named(c.address(), id)
	case cashier.CodeInvalid:
		c.d.unnamed(id)
	}
	switch {
	case code(err) == cashier.CodeInvalid || code(err) == cashier.CodeFunds:
		return c.dueAgain(err.Error())
	case err != nil:
		return refused(err)
	case r.State == settle.Credit && r.Signature != (settle.Signature{}) && r.Tokens == 0:
		return c.dueAgain("the payment came too late or was too small: all of it is in the payer's balance")
	}
	return c.fits(r)
}

// run starts a request that is paid.
func (c *call) run(id settle.QuoteID) (cashier.Started, error) {
	ctx := c.r.Context()
	if ctx.Err() != nil { // it can be run when the client calls again
		return cashier.Started{}, refused(ctx.Err())
	}
	terms, err := c.d.termsOf(ctx) // the receipt names the network
	if err != nil {
		return cashier.Started{}, refused(err)
	}
	started, err := c.d.cfg.Settlement.Run(ctx, id)
	if err != nil {
		c.lost = mayRun(err)
		return started, refused(err)
	}
	c.d.settled(id)
	c.h.Set(headerQuote, id.String())
	if r := started.Request; r.Signature != (settle.Signature{}) {
		setHeader(c.h, headerResponse, response{Success: true, Transaction: r.Signature.String(), Network: chainName(terms), Payer: r.Payer.String()})
	}
	return started, nil
}

// mayRun says whether a request may run after an error of Run: when the settlement may
// have been asked, and did not clearly refuse.
func mayRun(err error) bool {
	var r *cashier.Refusal
	if errors.As(err, &r) {
		return r.Code == cashier.CodeNotYet // the settlement gave up waiting
	}
	return !errors.Is(err, cashier.ErrAway) || errors.Is(err, cashier.ErrLost)
}

// charge is a request that runs.
type charge struct {
	d       *Door
	started cashier.Started
}

// Context is part of gateway.Charge.
func (c *charge) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, paidKey{}, Paid{c.started.Request.Quote.ID, c.started.Seed})
}

// End is part of gateway.Charge.
func (c *charge) End(o gateway.Outcome) {
	c.d.ended <- ended{c.started.Request.Quote, uint64(max(o.Delivered, 0)), uint64(max(o.Computed, o.Delivered, 0)), o.Failed}
}
