package pay

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvasird/settle"
)

// payload is a PAYMENT-SIGNATURE as clients make it.
type payload struct {
	Version  int            `json:"x402Version"`
	Resource resource       `json:"resource"`
	Accepted accept         `json:"accepted"`
	Payload  map[string]any `json:"payload"`
}

func packed(v any) string {
	return base64.StdEncoding.EncodeToString(must(json.Marshal(v)))
}

func transactionOf(text string) map[string]any {
	return map[string]any{"transaction": base64.StdEncoding.EncodeToString([]byte(text))}
}

// signedBy pays what a 402 asks for.
func signedBy(t *testing.T, a *answer, transaction string) payload {
	t.Helper()
	r := of[required](t, a, headerRequired)
	return payload{2, r.Resource, r.Accepts[0], transactionOf(transaction)}
}

// A partly signed transaction pays, once.
func TestX402(t *testing.T) {
	s := newShop(t, words{})
	unpaid := s.post(body)
	o, p := unpaid.offer(t), signedBy(t, unpaid, "one transaction")
	s.post(`{"model":"m","prompt":"other","max_tokens":10}`, headerSignature, packed(p)).is(t, "another body", 409, "other_request")
	a := s.post(body, headerSignature, packed(p))
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	r := of[response](t, a, headerResponse)
	if sig, err := settle.ParseSignature(r.Transaction); err != nil || string(sig[:15]) != "one transaction" || !r.Success ||
		r.Payer != keyOf("x402 payer").String() || r.Network != chainName(s.booth.terms) || a.header.Get(headerQuote) != o.Quote.String() {
		t.Errorf("got %+v", r)
	}
	s.reported(1)
	s.post(body, headerSignature, packed(p)).is(t, "again", 409, "already_answered")
	if got := s.booth.balance(keyOf("x402 payer")); got != quoted-used {
		t.Errorf("the payer has %d back, want %d", got, quoted-used)
	}
}

// What was not offered is not taken, and a new offer comes with every no.
func TestX402Refused(t *testing.T) {
	s := newShop(t, words{})
	tests := []struct {
		name   string
		change func(*payload)
		reason string
	}{
		{"network", func(p *payload) { p.Accepted.Network += "x" }, "accepted"},
		{"amount", func(p *payload) { p.Accepted.Amount = "1" }, "accepted"},
		{"amount, another way", func(p *payload) { p.Accepted.Amount = "015000" }, "accepted"},
		{"asset", func(p *payload) { p.Accepted.Asset = keyOf("other").String() }, "accepted"},
		{"payTo", func(p *payload) { p.Accepted.PayTo = keyOf("other").String() }, "accepted"},
		{"timeout", func(p *payload) { p.Accepted.Timeout++ }, "accepted"},
		{"fee payer", func(p *payload) { p.Accepted.Extra.FeePayer = keyOf("other").String() }, "accepted"},
		{"scheme", func(p *payload) { p.Accepted.Scheme = "upto" }, "accepted"},
		{"transaction", func(p *payload) { p.Payload = transactionOf("bad") }, "it pays somebody else"},
	}
	for _, tt := range tests {
		unpaid := s.post(body)
		p := signedBy(t, unpaid, "t "+tt.name)
		tt.change(&p)
		a := s.post(body, headerSignature, packed(p))
		if again := a.offer(t); again.Quote == unpaid.offer(t).Quote {
			t.Errorf("%s: the same quote again", tt.name)
		}
		if r := of[response](t, a, headerResponse); r.Success || !strings.Contains(r.ErrorReason, tt.reason) || r.Transaction != "" {
			t.Errorf("%s: got %+v", tt.name, r)
		}
		if r := of[required](t, a, headerRequired); len(r.Accepts) != 1 || !strings.Contains(r.Error, tt.reason) {
			t.Errorf("%s: got %+v", tt.name, r)
		}
	}
	if n := s.booth.called("PayX402"); n != 1 {
		t.Errorf("the settlement was asked %d times, want once", n)
	}
	late := signedBy(t, s.post(body), "late")
	s.booth.advance(121 * time.Second)
	if r := of[response](t, s.post(body, headerSignature, packed(late)), headerResponse); !strings.Contains(r.ErrorReason, "expired") {
		t.Errorf("got %+v", r)
	}
	strange := signedBy(t, s.post(body), "strange")
	strange.Accepted.Extra.Memo = settle.QuoteID{1, 2, 3}.Memo()
	s.post(body, headerSignature, packed(strange)).is(t, "a quote of nobody", 404, "not_found")
}

// A payment that is not final in time is booked when it is: the same call goes on, and a
// client that hung up finds it paid.
func TestX402Waits(t *testing.T) {
	s := newShop(t, words{})
	hold := make(chan struct{})
	s.booth.hold = hold
	unpaid := s.post(body)
	p := packed(signedBy(t, unpaid, "slow"))
	s.post(body, headerSignature, p).is(t, "not final", 503, "not_yet")

	gone := &http.Client{Timeout: 200 * time.Millisecond}
	req, err := http.NewRequest("POST", s.url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(headerSignature, p)
	if _, err := gone.Do(req); err == nil {
		t.Error("an answer without a payment")
	}
	s.post(body, headerSignature, p).is(t, "while the first waits", 503, "running")
	close(hold)
	id := unpaid.offer(t).Quote
	for i := 0; s.state(id) != settle.Paid; i++ {
		if i == 1000 {
			t.Fatalf("the quote is %s", s.state(id))
		}
		time.Sleep(5 * time.Millisecond)
	}
	if n := s.booth.called("Run"); n != 0 {
		t.Errorf("it ran %d times for nobody", n)
	}
	var a *answer
	for range 100 { // until the first has left
		if a = s.post(body, headerSignature, p); a.status != 503 {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	s.reported(1)
}

// Malformed payments are refused with the header's name, and the settlement hears of
// none.
func TestMalformedPayment(t *testing.T) {
	s := newShop(t, words{})
	unpaid := s.post(body)
	o, good := unpaid.offer(t), signedBy(t, unpaid, "t")
	change := func(fn func(m map[string]any)) string {
		var m map[string]any
		if err := json.Unmarshal(must(json.Marshal(good)), &m); err != nil {
			t.Fatal(err)
		}
		fn(m)
		return packed(m)
	}
	transfer := byTransfer(o, settle.Signature{1}, keyOf("payer"))
	with := func(name, value string) []string {
		out := append([]string(nil), transfer...)
		for i := 0; i < len(out); i += 2 {
			if out[i] == name {
				out[i+1] = value
			}
		}
		return out
	}
	tests := []struct {
		name, param string
		header      []string
	}{
		{"not base64", headerSignature, []string{headerSignature, "%"}},
		{"base64 without padding", headerSignature, []string{headerSignature, strings.TrimRight(packed(good), "=") + "A"}},
		{"not JSON", headerSignature, []string{headerSignature, base64.StdEncoding.EncodeToString([]byte("{"))}},
		{"two objects", headerSignature, []string{headerSignature, base64.StdEncoding.EncodeToString([]byte("{}{}"))}},
		{"version 1", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["x402Version"] = 1 })}},
		{"nothing accepted", headerSignature, []string{headerSignature, change(func(m map[string]any) { delete(m, "accepted") })}},
		{"more accepted", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["accepted"].(map[string]any)["tip"] = "1" })}},
		{"an amount that is a number", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["accepted"].(map[string]any)["amount"] = 15000 })}},
		{"no memo", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["accepted"].(map[string]any)["extra"] = map[string]any{} })}},
		{"memo of zero", headerSignature, []string{headerSignature, change(func(m map[string]any) {
			m["accepted"].(map[string]any)["extra"] = map[string]any{"memo": settle.QuoteID{}.Memo()}
		})}},
		{"no transaction", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["payload"] = map[string]any{} })}},
		{"transaction not base64", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["payload"] = map[string]any{"transaction": "*"} })}},
		{"long transaction", headerSignature, []string{headerSignature, change(func(m map[string]any) { m["payload"] = transactionOf(strings.Repeat("x", maxTransaction+1)) })}},
		{"long header", headerSignature, []string{headerSignature, strings.Repeat("A", maxSigned+4)}},
		{"both ways", headerSignature, append([]string{headerSignature, packed(good)}, transfer...)},
		{"no quote", headerQuote, with(headerQuote, "")},
		{"quote in capitals", headerQuote, with(headerQuote, strings.ToUpper("abcdef"+o.Quote.String()[6:]))},
		{"quote of zero", headerQuote, with(headerQuote, settle.QuoteID{}.String())},
		{"no payment", headerPayment, with(headerPayment, "")},
		{"payment with a space inside", headerPayment, with(headerPayment, "1 1")},
		{"63 bytes", headerPayment, with(headerPayment, strings.Repeat("1", 63))},
		{"65 bytes", headerPayment, with(headerPayment, strings.Repeat("1", 65))},
		{"no secret", headerSecret, with(headerSecret, "")},
		{"secret in capitals", headerSecret, with(headerSecret, "AB")},
		{"secret of half a byte", headerSecret, with(headerSecret, "abc")},
		{"long secret", headerSecret, with(headerSecret, strings.Repeat("ab", maxSecret+1))},
		{"malformed payer", headerPayer, with(headerPayer, "0OIl")},
	}
	before := s.booth.called("Request") + s.booth.called("Quote")
	for _, tt := range tests {
		a := s.post(body, tt.header...)
		var e struct{ Error struct{ Param string } }
		if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.status != 400 || e.Error.Param != tt.param {
			t.Errorf("%s: %d %s, want 400 and %s", tt.name, a.status, a.body, tt.param)
		}
	}
	if n := s.booth.called("Request") + s.booth.called("Quote") - before; n > 0 {
		t.Errorf("the settlement was asked %d times", n)
	}
	h := http.Header{}
	h.Add(headerQuote, o.Quote.String())
	h.Add(headerQuote, o.Quote.String())
	if _, err := readSent(h); err == nil {
		t.Error("a header was taken twice")
	}
}

func FuzzReadSent(f *testing.F) {
	a := accept{Scheme: "exact", Network: "solana:x", Amount: "1", Asset: "a", PayTo: "b", Timeout: 9, Extra: extra{"f", settle.QuoteID{1}.Memo()}}
	f.Add(packed(payload{2, resource{}, a, transactionOf("t")}), "", "", "", "")
	f.Add("", settle.QuoteID{1}.String(), settle.Signature{1}.String(), "ab", settle.Key{1}.String())
	f.Fuzz(func(t *testing.T, signature, quote, payment, secret, payer string) {
		h := http.Header{}
		for name, v := range map[string]string{headerSignature: signature, headerQuote: quote, headerPayment: payment, headerSecret: secret, headerPayer: payer} {
			h.Set(name, v)
		}
		s, err := readSent(h)
		switch {
		case err != nil:
		case s.x402 != nil && (len(s.x402.transaction) == 0 || len(s.x402.transaction) > maxTransaction || s.x402.quote.Memo() != s.x402.accepted.Extra.Memo):
			t.Errorf("%q was read as %+v", signature, s.x402)
		case s.transfer != nil && (s.transfer.quote.String() != quote || s.transfer.payment.String() != payment || len(s.transfer.secret) == 0):
			t.Errorf("%q %q %q were read as %+v", quote, payment, secret, s.transfer)
		case s.x402 == nil && s.transfer == nil && signature+quote+payment+secret+payer != "":
			t.Errorf("a payment was read as none")
		}
	})
}

// The receipt is of what was quoted at most, and of nothing when nothing was delivered.
func TestEvidence(t *testing.T) {
	s := newShop(t, words{})
	q := settle.Quote{ID: settle.QuoteID{1}, PromptTokens: 5, AnswerTokens: 10}
	for tokens, want := range map[uint64]uint64{0: 0, 1: 1, 15: 15, 16: 15, 1 << 63: 15} {
		end, err := s.door.evidence(t.Context(), ended{quote: q, tokens: tokens})
		if err != nil || end.Tokens != want || (end.Receipt == nil) != (want == 0) || (end.Failed != "") != (want == 0) {
			t.Errorf("%d tokens: %+v, %v", tokens, end, err)
		}
		if want > 0 {
			if r, err := settle.ParseReport(end.Receipt); err != nil || r.Tokens != want || len(r.Work) != 1 {
				t.Errorf("%d tokens: %+v, %v", tokens, r, err)
			}
		}
	}
}

// No more requests are taken than can be reported.
func TestDoorFull(t *testing.T) {
	s := newShop(t, words{})
	for i := range maxOpen {
		if err := s.door.take(settle.QuoteID{byte(i), byte(i >> 8), 1}); err != nil {
			t.Fatal(err)
		}
	}
	s.booth.deposit(keyOf("payer"), 100_000)
	s.post(body).is(t, "a full door", 503, "busy")
	if n := s.booth.called("Debit"); n != 0 {
		t.Errorf("%d were debited", n)
	}
	clear(s.door.open)
}

var _ Settlement = (*booth)(nil)
