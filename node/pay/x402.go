package pay

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"kvasird/node/cashier"
	"kvasird/settle"
)

// x402 version 2 over HTTP, scheme "exact" on Solana: each header is standard base64 of
// one JSON object.
//
//	PAYMENT-REQUIRED   {x402Version: 2, error, resource, accepts: [accept]}
//	PAYMENT-SIGNATURE  {x402Version: 2, resource, accepted: accept, payload: {transaction}}
//	PAYMENT-RESPONSE   {success, transaction, network, payer, errorReason}
//
// transaction is base64 of the wire form, all but the fee payer's signature in it. Other
// fields of the client's are not looked at, except in accepted, which has to be what was
// offered.
const (
	x402Version    = 2
	scheme         = "exact"
	maxSigned      = 24 << 10 // characters of PAYMENT-SIGNATURE
	maxTransaction = 4096     // bytes: the largest that the chain takes
)

type required struct {
	Version  int      `json:"x402Version"`
	Error    string   `json:"error"`
	Resource resource `json:"resource"`
	Accepts  []accept `json:"accepts"`
}

type resource struct {
	URL         string `json:"url"`
	Description string `json:"description"`
	MimeType    string `json:"mimeType"`
}

type accept struct {
	Scheme  string `json:"scheme"`
	Network string `json:"network"`
	Amount  string `json:"amount"` // base units
	Asset   string `json:"asset"`  // mint
	PayTo   string `json:"payTo"`  // owner of the vault, whose account is derived
	Timeout uint64 `json:"maxTimeoutSeconds"`
	Extra   extra  `json:"extra"`
}

type extra struct {
	FeePayer string `json:"feePayer"`
	Memo     string `json:"memo"`
}

type response struct {
	Success     bool   `json:"success"`
	ErrorReason string `json:"errorReason,omitempty"`
	Transaction string `json:"transaction"`
	Network     string `json:"network"`
	Payer       string `json:"payer,omitempty"`
}

// signed is what a client pays with.
type signed struct {
	accepted    accept
	quote       settle.QuoteID
	transaction []byte
}

// chainName is a network's name in x402: CAIP-2 of the chain.
func chainName(t cashier.Terms) string {
	const digits = 32
	name := t.Cluster.String()
	return "solana:" + name[:min(len(name), digits)]
}

// acceptOf is what pays a quote; ok is false where x402 is not taken.
func acceptOf(t cashier.Terms, q settle.Quote) (a accept, ok bool) {
	if t.FeePayer == (settle.Wallet{}) {
		return a, false
	}
	return accept{
		Scheme: scheme, Network: chainName(t), Amount: q.Amount.String(), Asset: t.Mint.String(), PayTo: t.Owner.String(),
		Timeout: q.Expires - q.Created, Extra: extra{FeePayer: t.FeePayer.String(), Memo: q.ID.Memo()},
	}, true
}

// readSigned reads PAYMENT-SIGNATURE.
func readSigned(text string) (s signed, err error) {
	if len(text) > maxSigned {
		return s, fmt.Errorf("has %d characters, at most %d", len(text), maxSigned)
	}
	data, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil {
		return s, fmt.Errorf("is not base64: %v", err)
	}
	var p struct {
		Version  int             `json:"x402Version"`
		Accepted json.RawMessage `json:"accepted"`
		Payload  struct {
			Transaction string `json:"transaction"`
		} `json:"payload"`
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return s, fmt.Errorf("is not the JSON of a payment: %v", err)
	}
	if p.Version != x402Version {
		return s, fmt.Errorf("has x402Version %d, taken is %d", p.Version, x402Version)
	}
	dec := json.NewDecoder(bytes.NewReader(p.Accepted))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s.accepted); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("it is missing")
		}
		return s, fmt.Errorf("has an accepted that was never offered: %v", err)
	}
	if s.quote, err = settle.ParseMemo(s.accepted.Extra.Memo); err == nil && s.quote == (settle.QuoteID{}) {
		err = errNoID
	}
	if err != nil {
		return s, fmt.Errorf("has an accepted that was never offered: %v", err)
	}
	if base64.StdEncoding.DecodedLen(len(p.Payload.Transaction)) > maxTransaction+2 {
		return s, fmt.Errorf("has a transaction of more than %d bytes", maxTransaction)
	}
	s.transaction, err = base64.StdEncoding.Strict().DecodeString(p.Payload.Transaction)
	switch {
	case err != nil:
		return s, fmt.Errorf("has a transaction that is not base64: %v", err)
	case len(s.transaction) == 0 || len(s.transaction) > maxTransaction:
		return s, fmt.Errorf("has a transaction of %d bytes, 1 to %d", len(s.transaction), maxTransaction)
	}
	return s, nil
}

// x402 pays with a transaction that waits for its fee payer. A client that hangs up does
// not stop it: what may be on the chain already has to be booked.
func (c *call) x402(s signed) error {
	r, err := c.find(s.quote)
	if err != nil {
		return err
	}
	// Who has the transaction before it is sent is its payer; whoever reads it on the
	// chain later does not have the body. Which signature it gets, the fee payer decides.
	now := uint64(c.d.cfg.Now().Unix())
	if err := r.Again(r.Signature, c.cost.Body, true, now); err != nil {
		return again(err, r)
	}
	if err := c.fits(r); err != nil {
		return err
	}
	if err := c.take(s.quote); err != nil {
		return err
	}
	terms, err := c.d.termsOf(c.r.Context())
	if err != nil {
		return refused(err)
	}
	if offered, ok := acceptOf(terms, r.Quote); !ok || s.accepted != offered {
		return c.failed(terms, "accepted is not what was offered for the quote")
	}
	if r.State == settle.Open && now > r.Quote.Expires {
		return c.failed(terms, settle.ErrExpired.Error())
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.r.Context()), c.d.cfg.Wait)
	defer cancel()
	paid, err := c.d.cfg.Settlement.PayX402(ctx, cashier.Partial{ID: s.quote, Transaction: s.transaction})
	switch code(err) {
	case cashier.CodeInvalid, cashier.CodeBad, cashier.CodeFunds:
		return c.failed(terms, err.Error())
	}
	return c.paid(s.quote, paid, err)
}

// failed is a payment that will never be one: with a new quote to pay.
func (c *call) failed(t cashier.Terms, reason string) error {
	setHeader(c.h, headerResponse, response{ErrorReason: reason, Network: chainName(t)})
	return c.dueAgain(reason)
}

// url is how the client called.
func url(r *http.Request) string {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return scheme + "://" + r.Host + r.URL.Path
}
