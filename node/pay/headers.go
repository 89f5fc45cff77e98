package pay

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"kvasird/settle"
)

// The headers of payments, as RFC 9110 tells names apart: in any case.
const (
	headerRequired  = "PAYMENT-REQUIRED"  // of x402: what may be paid
	headerSignature = "PAYMENT-SIGNATURE" // of x402: the payment
	headerResponse  = "PAYMENT-RESPONSE"  // of x402: what became of it
	headerQuote     = "X-Kvasir-Quote"    // its id; of the answer too
	headerPayment   = "X-Kvasir-Payment"  // signature of the transfer, base58
	headerSecret    = "X-Kvasir-Secret"   // claim secret, hexadecimal digits
	headerPayer     = "X-Kvasir-Payer"    // wallet that sent the transfer, base58
)

const maxSecret = 64 // bytes

var errNoID = errors.New("it is all zero")

// sent is how a request is paid; all nil: not by itself.
type sent struct {
	x402     *signed
	transfer *transfer
}

// id is the quote that is paid, and how; zero: none is.
func (s sent) id() (settle.QuoteID, func(*call) error) {
	switch {
	case s.x402 != nil:
		return s.x402.quote, func(c *call) error { return c.x402(*s.x402) }
	case s.transfer != nil:
		return s.transfer.quote, func(c *call) error { return c.transfer(*s.transfer) }
	}
	return settle.QuoteID{}, nil
}

// transfer is a payment by the client's own transaction.
type transfer struct {
	quote   settle.QuoteID
	payment settle.Signature
	secret  []byte
	payer   settle.Wallet // zero: the quote's owner
}

// readSent reads the headers of a payment, of which there is one of each at most.
func readSent(h http.Header) (s sent, err error) {
	for _, name := range []string{headerSignature, headerQuote, headerPayment, headerSecret, headerPayer} {
		if len(h.Values(name)) > 1 {
			return s, bad(name, "is there more than once")
		}
	}
	own := h.Get(headerQuote) != "" || h.Get(headerPayment) != "" || h.Get(headerSecret) != "" || h.Get(headerPayer) != ""
	switch text := h.Get(headerSignature); {
	case text != "" && own:
		return s, bad(headerSignature, "and the headers of a transfer are both there: pay in one way")
	case text != "":
		p, err := readSigned(text)
		if err != nil {
			return s, bad(headerSignature, "%v", err)
		}
		return sent{x402: &p}, nil
	case own:
		t, err := readTransfer(h)
		return sent{transfer: &t}, err
	}
	return s, nil
}

func readTransfer(h http.Header) (t transfer, err error) {
	if t.quote, err = settle.ParseQuoteID(h.Get(headerQuote)); err == nil && t.quote == (settle.QuoteID{}) {
		err = errNoID
	}
	if err != nil {
		return t, bad(headerQuote, "is wrong: %v", err)
	}
	if t.payment, err = settle.ParseSignature(h.Get(headerPayment)); err != nil {
		return t, bad(headerPayment, "is wrong: %v", err)
	}
	secret := h.Get(headerSecret)
	t.secret, err = hex.DecodeString(secret)
	if err != nil || len(t.secret) == 0 || len(t.secret) > maxSecret || strings.ToLower(secret) != secret {
		return t, bad(headerSecret, "is not the claim secret: hexadecimal digits in lower case, up to %d bytes", maxSecret)
	}
	if payer := h.Get(headerPayer); payer != "" {
		if t.payer, err = settle.ParseKey(payer); err != nil {
			return t, bad(headerPayer, "is wrong: %v", err)
		}
	}
	return t, nil
}

// setHeader writes a header of x402: base64 of JSON.
func setHeader(h http.Header, name string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", name, err)) // texts and numbers: it cannot fail
	}
	h.Set(name, base64.StdEncoding.EncodeToString(b))
}
