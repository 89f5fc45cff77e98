package pay

import (
	"encoding/hex"
	"fmt"
	"net/http"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

// Offer is a quote with what its payer has to know, as clients of HTTP get it.
type Offer struct {
	Quote        settle.QuoteID `json:"quote"`
	Model        string         `json:"model"` // id
	PromptTokens uint64         `json:"prompt_tokens"`
	AnswerTokens uint64         `json:"max_tokens"`
	Amount       settle.Amount  `json:"amount"` // base units; what is not used goes back
	Decimals     uint8          `json:"decimals"`
	Mint         settle.Key     `json:"mint"`
	Program      settle.Key     `json:"token_program"`
	Vault        settle.Key     `json:"vault"`
	VaultOwner   settle.Wallet  `json:"vault_owner"`
	Cluster      settle.Key     `json:"cluster"`
	Memo         string         `json:"memo"`
	Owner        *settle.Wallet `json:"owner,omitempty"` // who must pay; none: anybody
	RequestHash  settle.Hash    `json:"request_hash"`
	PriceRecord  settle.Hash    `json:"price_record_hash"`
	CreatedSlot  uint64         `json:"created_slot"`
	ExpiresAt    uint64         `json:"expires_at"` // Unix seconds
	ClaimSecret  string         `json:"claim_secret"`
}

func offerOf(t cashier.Terms, o cashier.Offer) Offer {
	q := o.Quote
	out := Offer{
		Quote: q.ID, Model: q.Model, PromptTokens: q.PromptTokens, AnswerTokens: q.AnswerTokens, Amount: q.Amount, Decimals: t.Decimals,
		Mint: t.Mint, Program: t.Program, Vault: t.Vault, VaultOwner: t.Owner, Cluster: t.Cluster, Memo: q.ID.Memo(), RequestHash: q.RequestHash,
		PriceRecord: q.PriceRecord, CreatedSlot: q.CreatedSlot, ExpiresAt: q.Expires, ClaimSecret: hex.EncodeToString(o.Secret),
	}
	if q.Owner != (settle.Wallet{}) {
		out.Owner = &q.Owner
	}
	return out
}

// Quote is part of gateway.Payments: POST /v1/quotes.
func (d *Door) Quote(r *http.Request, cost gateway.Cost) (any, error) {
	c := &call{d: d, r: r, cost: cost}
	var owner settle.Wallet
	if cost.Owner != "" {
		var err error
		if owner, err = settle.ParseKey(cost.Owner); err != nil {
			return nil, &gateway.PaymentError{Status: http.StatusBadRequest, Code: "invalid_value", Param: "owner", Message: "owner: " + err.Error()}
		}
	}
	if err := c.mayAsk(); err != nil {
		return nil, err
	}
	terms, err := d.termsOf(r.Context())
	if err != nil {
		return nil, refused(err)
	}
	offer, err := c.quote(owner)
	if err != nil {
		return nil, err
	}
	d.unsettled(c.address(), offer.Quote)
	return offerOf(terms, offer), nil
}

// due is the refusal of a request that has to be paid: 402 with a quote.
func (c *call) due(offer cashier.Offer, reason string) error {
	terms, err := c.d.termsOf(c.r.Context())
	if err != nil {
		return refused(err)
	}
	c.d.unsettled(c.address(), offer.Quote)
	q := offer.Quote
	message := fmt.Sprintf("this answer costs up to %s base units of the token %s; pay quote %s within %d s", q.Amount, terms.Mint, q.ID, q.Expires-q.Created)
	if reason != "" {
		message = reason + "; " + message
	}
	if a, ok := acceptOf(terms, q); ok {
		setHeader(c.h, headerRequired, required{Version: x402Version, Error: message, Accepts: []accept{a}, Resource: resource{
			URL: url(c.r), Description: fmt.Sprintf("up to %d tokens of %s", q.PromptTokens+q.AnswerTokens, c.cost.Name), MimeType: "application/json"}})
	}
	return &gateway.PaymentError{Status: http.StatusPaymentRequired, Code: "payment_required", Message: message, Payment: offerOf(terms, offer)}
}

// dueAgain is due with a new quote, after a payment that was none.
func (c *call) dueAgain(reason string) error {
	if err := c.mayAsk(); err != nil {
		return err
	}
	offer, err := c.quote(settle.Wallet{})
	if err != nil {
		return err
	}
	return c.due(offer, reason)
}
