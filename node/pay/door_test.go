package pay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

// Who brings no payment gets a quote in both forms.
func TestUnpaid(t *testing.T) {
	s := newShop(t, words{})
	a := s.post(body)
	a.is(t, "no payment", 402, "payment_required")
	o := a.offer(t)
	want := Offer{Quote: o.Quote, Model: "d1", PromptTokens: 5, AnswerTokens: 10, Amount: quoted, Decimals: 6, Mint: keyOf("mint"), Program: keyOf("program"),
		Vault: keyOf("vault"), VaultOwner: keyOf("vault owner"), Cluster: keyOf("cluster"), Memo: o.Quote.Memo(), RequestHash: o.RequestHash,
		PriceRecord: settle.Hash(keyOf("price")), ExpiresAt: 1_800_000_120, ClaimSecret: o.ClaimSecret}
	if o != want {
		t.Errorf("got %+v\nwant %+v", o, want)
	}
	r := of[required](t, a, headerRequired)
	network := "solana:" + keyOf("cluster").String()[:32]
	if len(r.Accepts) != 1 || r.Accepts[0] != (accept{"exact", network, "15000", keyOf("mint").String(), keyOf("vault owner").String(), 120,
		extra{keyOf("fee payer").String(), o.Quote.Memo()}}) || r.Version != 2 || r.Resource.URL != s.url+"/v1/completions" {
		t.Errorf("got %+v", r)
	}
	if n := s.booth.called("Run"); n != 0 || s.state(o.Quote) != settle.Open {
		t.Errorf("ran %d times, the quote is %s", n, s.state(o.Quote))
	}
	s.booth.terms.FeePayer = settle.Wallet{}
	s.booth.advance(termsFor)
	if a := s.post(body); a.status != 402 || a.header.Get(headerRequired) != "" {
		t.Errorf("x402 without a fee payer: %d %v", a.status, a.header)
	}
}

// A linked wallet pays for what was delivered, and the worker has its part.
func TestDebit(t *testing.T) {
	s := newShop(t, words{})
	payer := keyOf("payer")
	s.booth.deposit(payer, 100_000)
	a := s.post(body)
	if a.status != 200 || !strings.Contains(a.body, `"text":"xxxx"`) || a.header.Get(headerResponse) != "" {
		t.Errorf("%d %s %v", a.status, a.body, a.header)
	}
	end := s.reported(1)
	if end.Tokens != 9 || end.Failed != "" || end.ID.String() != a.header.Get(headerQuote) {
		t.Errorf("got %+v", end)
	}
	if got := s.booth.balance(payer); got != 100_000-used {
		t.Errorf("the payer has %d, want %d", got, 100_000-used)
	}
	if got := s.booth.account(settle.Held, s.worker) + s.booth.account(settle.Bonded, s.worker); got != used*85/100 {
		t.Errorf("the worker has %d, want %d", got, used*85/100)
	}
	s.booth.deposit(keyOf("poor"), 14_999)
	poor := s.post(body)
	poor.is(t, "a balance that does not reach", 402, "payment_required")
	if !strings.Contains(poor.body, "`kvasir wallet deposit AMOUNT`") {
		t.Errorf("it does not say what to do: %s", poor.body)
	}
}

// The balance is not that of every client of the gateway.
func TestDebitNeedsTheRight(t *testing.T) {
	s := newShop(t, words{})
	s.booth.deposit(keyOf("payer"), 100_000)
	r := httptest.NewRequest("POST", "/v1/completions", nil)
	_, err := s.door.Charge(r, http.Header{}, gateway.Cost{Model: "d1", Name: "m", Prompt: 5, Answers: 10, Body: [32]byte{1}})
	var e *gateway.PaymentError
	if !errors.As(err, &e) || e.Status != 402 || e.Payment == nil {
		t.Errorf("got %+v", err)
	}
	if n, has := s.booth.called("Debit"), s.booth.balance(keyOf("payer")); n != 0 || has != 100_000 {
		t.Errorf("%d were debited, %d is left", n, has)
	}
}

// Who asks without HTTP has the linked wallet pay, or is told how it would.
func TestSpend(t *testing.T) {
	s := newShop(t, words{})
	cost := gateway.Cost{Model: "d1", Name: "m", Prompt: 5, Answers: 10, Body: [32]byte{1}}
	refused := func(name string, status int, part string) {
		t.Helper()
		_, err := s.door.Spend(t.Context(), "127.0.0.1", cost)
		var e *gateway.PaymentError
		if !errors.As(err, &e) || e.Status != status || !strings.Contains(e.Message, part) || e.Payment != nil {
			t.Errorf("%s: got %+v, want %d with %q", name, err, status, part)
		}
	}
	refused("no wallet", 402, "15000 base units: no wallet lets this node spend; `kvasir wallet link --spend`")
	s.booth.deposit(keyOf("poor"), 14_999)
	refused("a balance that does not reach", 402, "`kvasir wallet deposit AMOUNT`")
	s.booth.failing("Debit", &cashier.Refusal{Code: cashier.CodeBusy, Text: "busy now"})
	refused("a settlement that is busy", 503, "busy now")
	s.booth.deposit(keyOf("payer"), 100_000)
	charge, err := s.door.Spend(t.Context(), "127.0.0.1", cost)
	if err != nil {
		t.Fatal(err)
	}
	if paid, ok := From(charge.Context(t.Context())); !ok || paid.Seed == (settle.Hash{}) || s.state(paid.Request) != settle.Running {
		t.Errorf("runs as %+v", paid)
	}
	charge.End(gateway.Outcome{Delivered: 9, Computed: 9})
	if end := s.reported(1); end.Tokens != 9 || end.Failed != "" {
		t.Errorf("got %+v", end)
	}
	if got := s.booth.balance(keyOf("payer")); got != 100_000-used {
		t.Errorf("the payer has %d, want %d", got, 100_000-used)
	}
	s.booth.link(settle.Wallet{})
	for range maxUnpaid - 2 {
		refused("again", 402, "link --spend")
	}
	refused("one too many", 429, "quotes were asked for and not paid")
}

// The client's own transfer pays, once, for one body, to who has the secret.
func TestTransfer(t *testing.T) {
	s := newShop(t, words{})
	payer := keyOf("payer")
	o := s.post(body).offer(t)
	var unknown settle.Signature
	copy(unknown[:], "not on the chain yet")
	sig := s.booth.transfer(o.Quote, payer, quoted)
	paid := byTransfer(o, sig, payer)
	stolen := byTransfer(o, sig, payer)
	stolen[5] = strings.Repeat("ab", 32)
	other := `{"model":"m","prompt":"other","max_tokens":10}`

	s.post(body, stolen...).is(t, "without the secret", 403, "not_claimed")
	if err := s.door.take(o.Quote); err != nil {
		t.Fatal(err)
	}
	s.post(body, stolen...).is(t, "without the secret, while it is paid", 403, "not_claimed")
	s.post(body, paid...).is(t, "while it is paid", 503, "running")
	s.door.leave(o.Quote)
	s.post(other, paid...).is(t, "another body", 409, "other_request")
	s.post(body, paid[:6]...).is(t, "no payer", 400, "invalid_value")
	if n := s.booth.called("Pay"); n != 0 {
		t.Errorf("the settlement was asked %d times", n)
	}
	s.post(body, byTransfer(o, sig, keyOf("Eve"))...).is(t, "another payer", 402, "payment_required")
	if s.state(o.Quote) != settle.Open {
		t.Errorf("after a definite no the quote is %s", s.state(o.Quote))
	}
	if a := s.post(body, paid...); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	} else if r := of[response](t, a, headerResponse); r != (response{true, "", sig.String(), chainName(s.booth.terms), payer.String()}) {
		t.Errorf("got %+v", r)
	}
	s.reported(1)
	s.post(body, paid...).is(t, "again", 409, "already_answered")
	s.post(other, paid...).is(t, "again with another body", 409, "already_answered")
	s.post(body, byTransfer(o, unknown, payer)...).is(t, "again with another payment", 409, "already_answered")
	if got := s.booth.balance(payer); got != quoted-used {
		t.Errorf("the payer has %d back, want %d", got, quoted-used)
	}

	o = s.post(body).offer(t)
	a := s.post(body, byTransfer(o, unknown, payer)...)
	if a.is(t, "not final", 503, "not_yet"); a.header.Get("Retry-After") != "7" {
		t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
	}
	s.post(body, byTransfer(o, sig, payer)...).is(t, "another signature meanwhile", 409, "other_payment")
}

// Money that came too late, or is too little, is the payer's, who gets a new quote.
func TestLateTransfer(t *testing.T) {
	s := newShop(t, words{})
	payer := keyOf("payer")
	o := s.post(body).offer(t)
	sig := s.booth.transfer(o.Quote, payer, quoted-1)
	a := s.post(body, byTransfer(o, sig, payer)...)
	if again := a.offer(t); again.Quote == o.Quote || s.booth.balance(payer) != quoted-1 {
		t.Errorf("%+v, balance %d", again, s.booth.balance(payer))
	}
	s.post(body, byTransfer(o, sig, payer)...).is(t, "again", 409, "already_answered")
}

// A request does not ask for more than its quote has.
func TestQuoteBounds(t *testing.T) {
	s := newShop(t, words{})
	hash := s.post(body).offer(t).RequestHash
	tests := []struct {
		prompt, answer, want string
		code                 string
	}{
		{"5", "10", "fits", ""},
		{"4", "10", "a longer prompt", "quote_exceeded"},
		{"5", "9", "longer answers", "quote_exceeded"},
	}
	for _, tt := range tests {
		a := s.postTo("/v1/quotes", `{"model":"m","prompt_tokens":`+tt.prompt+`,"max_tokens":`+tt.answer+`,"owner":"`+keyOf("payer").String()+
			`","request_hash":"`+string(must(hash.MarshalText()))+`"}`)
		var o Offer
		if err := json.Unmarshal([]byte(a.body), &o); err != nil || a.status != 200 || o.Owner == nil || *o.Owner != keyOf("payer") {
			t.Fatalf("%d %s", a.status, a.body)
		}
		paid := byTransfer(o, s.booth.transfer(o.Quote, keyOf("payer"), o.Amount), keyOf("payer"))[:6] // the quote names its payer
		if got := s.post(body, paid...); tt.code != "" {
			got.is(t, tt.want, 409, tt.code)
		} else if got.status != 200 {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	offer, err := s.booth.Quote(t.Context(), cashier.Ask{Model: "d0", PromptTokens: 5, AnswerTokens: 10, RequestHash: hash, Owner: keyOf("payer")})
	if err != nil {
		t.Fatal(err)
	}
	was := offerOf(s.booth.terms, offer)
	s.post(body, byTransfer(was, s.booth.transfer(was.Quote, keyOf("payer"), was.Amount), keyOf("payer"))...).is(t, "another model under the name", 409, "other_request")
	bad := s.postTo("/v1/quotes", `{"model":"m","prompt_tokens":5,"owner":"0","request_hash":"`+string(must(hash.MarshalText()))+`"}`)
	bad.is(t, "a malformed owner", 400, "invalid_value")
}

// A failed inference costs nothing.
func TestFailedInference(t *testing.T) {
	s := newShop(t, words{err: errors.New("layer 3 is gone")})
	payer := keyOf("payer")
	s.booth.deposit(payer, 100_000)
	if a := s.post(body); a.status != 503 {
		t.Errorf("%d %s", a.status, a.body)
	}
	if end := s.reported(1); end.Tokens != 0 || end.Failed != "layer 3 is gone" || end.Receipt != nil {
		t.Errorf("got %+v", end)
	}
	if got := s.booth.balance(payer); got != 100_000 || s.drawn.Load() != 7 {
		t.Errorf("the payer has %d, %d tokens were drawn", got, s.drawn.Load())
	}
}

// Of one paid call made 50 times at once, one is answered.
func TestSameCallAtOnce(t *testing.T) {
	gate := make(chan struct{})
	s := newShop(t, words{gate: gate})
	o := s.post(body).offer(t)
	paid := byTransfer(o, s.booth.transfer(o.Quote, keyOf("payer"), quoted), keyOf("payer"))
	const calls = 50
	got := make(chan *answer, calls)
	for range calls {
		go func() { got <- s.post(body, paid...) }()
	}
	for range calls - 1 {
		a := <-got
		if a.is(t, "while it runs", 503, "running"); a.header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
	}
	close(gate)
	if a := <-got; a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	s.reported(1)
	if n := s.booth.called("Run"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
}

// The settlement may be away for a while when a request ends.
func TestReportAgain(t *testing.T) {
	s := newShop(t, words{})
	s.booth.deposit(keyOf("payer"), 100_000)
	s.booth.failing("End", errors.New("no route"), &cashier.Refusal{Code: cashier.CodeBusy, Text: "later"})
	if a := s.post(body); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	s.reported(1)
	if n := s.booth.called("End"); n != 3 {
		t.Errorf("it was told %d times", n)
	}
	s.booth.failing("End", &cashier.Refusal{Code: cashier.CodeBad, Text: "never"})
	s.post(body)
	s.close() // waits for what ended
	if n := s.booth.called("End"); n != 4 || len(s.booth.reported()) != 1 {
		t.Errorf("it was told %d times, %d were taken", n, len(s.booth.reported()))
	}
}

// A door that closes waits for requests that run, and reports them.
func TestCloseWhileRunning(t *testing.T) {
	gate := make(chan struct{})
	s := newShop(t, words{gate: gate})
	s.booth.deposit(keyOf("payer"), 100_000)
	got := make(chan *answer, 1)
	go func() { got <- s.post(body) }()
	for s.booth.called("Run") == 0 {
		time.Sleep(time.Millisecond)
	}
	time.AfterFunc(100*time.Millisecond, func() { close(gate) })
	s.close()
	if ends := s.booth.reported(); len(ends) != 1 || ends[0].Tokens != 9 {
		t.Errorf("got %+v", ends)
	}
	if a := <-got; a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// What fails between the payment and the answer is given back at once; nobody is told
// that something is paid that is not.
func TestSettlementFails(t *testing.T) {
	down := errors.New("no route")
	tests := []struct {
		method string
		err    error
		status int
		code   string
		ends   int
	}{
		{"Terms", down, 503, "settlement_unreachable", 1},
		{"Quote", down, 503, "settlement_unreachable", 0},
		{"Quote", &cashier.Refusal{Code: cashier.CodeBusy, Text: "many", Retry: 9}, 503, "busy", 0},
		{"Quote", &cashier.Refusal{Code: cashier.CodeNotFound, Field: "model", Text: "no such model"}, 404, "not_found", 0},
		{"Quote", &cashier.Refusal{Code: cashier.CodeBad, Text: "too many tokens"}, 400, "bad_request", 0},
		{"Debit", &cashier.Refusal{Code: cashier.CodeState, Text: "expired"}, 409, "wrong_state", 0},
		{"Run", down, 503, "settlement_unreachable", 1},
		{"Run", &cashier.Refusal{Code: cashier.CodeState, Text: "it runs", Retry: 4}, 503, "wrong_state", 1},
	}
	for _, tt := range tests {
		s := newShop(t, words{})
		payer := keyOf("payer")
		s.booth.deposit(payer, 100_000)
		s.booth.failing(tt.method, tt.err)
		s.post(body).is(t, tt.method, tt.status, tt.code)
		if s.close(); len(s.booth.reported()) != tt.ends || s.booth.balance(payer) != 100_000 {
			t.Errorf("%s: %d ends, balance %d", tt.method, len(s.booth.reported()), s.booth.balance(payer))
		}
	}
}

// What may run at the settlement, and does not here, is given back at once; what it
// refused clearly, or never heard of, can be run when the client calls again.
func TestRunLost(t *testing.T) {
	tests := []struct {
		what   string
		method string // Ran: after it runs
		err    error
		code   string
		ends   int
	}{
		{"no answer", "Ran", fmt.Errorf("%w: %w: reset", cashier.ErrAway, cashier.ErrLost), "settlement_unreachable", 1},
		{"it was not taken", "Run", fmt.Errorf("%w: %w: reset", cashier.ErrAway, cashier.ErrLost), "settlement_unreachable", 1},
		{"failed", "Ran", cashier.ErrFailed, "settlement_unreachable", 1},
		{"the client hung up", "Ran", context.Canceled, "settlement_unreachable", 1},
		{"it takes longer", "Ran", &cashier.Refusal{Code: cashier.CodeNotYet, Text: "later"}, "not_yet", 1},
		{"never asked", "Run", fmt.Errorf("%w: no route", cashier.ErrAway), "settlement_unreachable", 0},
		{"busy", "Run", &cashier.Refusal{Code: cashier.CodeBusy, Text: "many"}, "busy", 0},
	}
	for _, tt := range tests {
		s := newShop(t, words{})
		payer := keyOf("payer")
		o := s.post(body).offer(t)
		paid := byTransfer(o, s.booth.transfer(o.Quote, payer, quoted), payer)
		s.booth.failing(tt.method, tt.err)
		s.post(body, paid...).is(t, tt.what, 503, tt.code)
		if tt.ends == 0 {
			if a := s.post(body, paid...); a.status != 200 {
				t.Errorf("%s: again %d %s", tt.what, a.status, a.body)
			}
			continue
		}
		if s.reported(1); s.booth.balance(payer) != quoted || s.state(o.Quote) != settle.Credit {
			t.Errorf("%s: %s, the payer has %d back", tt.what, s.state(o.Quote), s.booth.balance(payer))
		}
		s.post(body, paid...).is(t, tt.what+", again", 409, "already_answered")
	}
}

// A reason is cut between characters, or the settlement could not read the report.
func TestLongReason(t *testing.T) {
	s := newShop(t, words{})
	d := s.door
	end, err := d.evidence(t.Context(), ended{failed: errors.New("a" + strings.Repeat("é", maxReason))})
	if err != nil || !utf8.ValidString(end.Failed) || len(end.Failed) != maxReason-1 {
		t.Errorf("%d bytes, valid: %v, %v", len(end.Failed), utf8.ValidString(end.Failed), err)
	}
}

// A client that leaves pays for what it got, and its request is reported.
func TestGoneClient(t *testing.T) {
	gate := make(chan struct{}, 4)
	s := newShop(t, words{gate: gate})
	s.booth.deposit(keyOf("payer"), 100_000)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/completions", bytes.NewReader([]byte(`{"model":"m","prompt":"hello","max_tokens":10,"stream":true}`)))
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if end := s.reported(1); end.Tokens != 6 || end.Failed == "" {
		t.Errorf("got %+v", end)
	}
	if got := s.booth.balance(keyOf("payer")); got != 100_000-6000 {
		t.Errorf("the payer has %d", got)
	}
}
