package pay

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"kvasird/node/gateway"
	"kvasird/settle"
)

// Who asks for quotes and pays none has to wait, and nobody else does.
func TestUnpaidQuotesBounded(t *testing.T) {
	s := newShop(t, words{})
	for range maxUnpaid {
		s.post(body).is(t, "a quote", 402, "payment_required")
	}
	a := s.post(body)
	if a.is(t, "one too many", 429, "too_many_quotes"); a.header.Get("Retry-After") != "120" {
		t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
	}
	s.booth.advance(unpaidFor)
	o := s.post(body).offer(t)
	for range maxUnpaid - 1 {
		s.post(body)
	}
	paid := byTransfer(o, s.booth.transfer(o.Quote, keyOf("payer"), quoted), keyOf("payer"))
	if a := s.post(body, paid...); a.status != 200 {
		t.Errorf("a payment at the bound: %d %s", a.status, a.body)
	}
	s.post(body).is(t, "after a payment", 402, "payment_required")
}

// Payments that the chain does not have count for who asked for their quotes, whoever names them,
// until they are proved, or found to be none, or not looked for any more.
func TestNamedPaymentsBounded(t *testing.T) {
	s := newShop(t, words{})
	var offers []Offer
	var sigs []settle.Signature
	for i := range maxNamed {
		o := s.post(body).offer(t)
		offers, sigs = append(offers, o), append(sigs, settle.Signature{byte(i), 1})
		for range 2 { // asking again is no second one
			s.post(body, byTransfer(o, sigs[i], keyOf("payer"))...).is(t, "not final", 503, "not_yet")
		}
	}
	s.post(body).is(t, "one too many", 429, "too_many_quotes")
	s.booth.advance(unpaidFor)
	s.post(body).is(t, "they are looked for still", 429, "too_many_quotes")

	other := httptest.NewRequest("POST", "/v1/completions", nil)
	other.RemoteAddr = "192.0.2.1:7"
	cost := gateway.Cost{Model: "d1", Name: "m", Prompt: 5, Answers: 10, Body: [32]byte{1}}
	_, err := s.door.Charge(other, http.Header{}, cost)
	var e *gateway.PaymentError
	if !errors.As(err, &e) || e.Status != 402 {
		t.Errorf("another address: %v", err)
	}

	s.booth.mu.Lock()
	s.booth.now = s.booth.now.Add(-unpaidFor)
	s.booth.final[sigs[0]] = settle.Payment{Signature: sigs[0], Message: settle.Hash{1}, Memo: offers[0].Memo, Payer: keyOf("payer"), Amount: quoted, Time: uint64(s.booth.now.Unix())}
	s.booth.final[sigs[1]] = settle.Payment{Signature: sigs[1], Message: settle.Hash{2}, Memo: offers[1].Memo, Payer: keyOf("eve"), Amount: quoted}
	s.booth.mu.Unlock()
	if a := s.post(body, byTransfer(offers[0], sigs[0], keyOf("payer"))...); a.status != 200 {
		t.Errorf("a payment at the bound: %d %s", a.status, a.body)
	}
	s.post(body).is(t, "after a proof", 402, "payment_required")
	s.door.named("127.0.0.1", settle.QuoteID{1})
	s.post(body).is(t, "at the bound again", 429, "too_many_quotes")
	s.post(body, byTransfer(offers[1], sigs[1], keyOf("payer"))...).is(t, "what is no payment, which leaves a place for a quote", 402, "payment_required")
	s.door.named("127.0.0.1", settle.QuoteID{2})
	s.booth.advance(namedFor)
	s.post(body).is(t, "when nobody looks for them", 402, "payment_required")
}

// A host has many addresses of IPv6, and counts once.
func TestAddress(t *testing.T) {
	for from, want := range map[string]string{
		"192.0.2.1:7": "192.0.2.1", "[::ffff:192.0.2.1]:7": "192.0.2.1", "127.0.0.1": "127.0.0.1", "@": "@",
		"[2001:db8:1:2:3::4]:7": "2001:db8:1:2::/64", "[2001:db8:1:2:ffff::5%eth0]:9": "2001:db8:1:2::/64",
	} {
		if got := (&call{r: &http.Request{RemoteAddr: from}}).address(); got != want {
			t.Errorf("%s: got %s, want %s", from, got, want)
		}
	}
}
