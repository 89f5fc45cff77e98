//go:build svm

package cashier

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pquerna/otp/totp"

	"kvasird/market"
	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/settletest"
	"kvasird/settle/solana"
)

// TestServed: a quote, a payment, an answer, and where the money is after it.
func TestServed(t *testing.T) {
	s := newShop(t)
	offer := must[Offer](t)(s.teller().Quote(t.Context(), s.ask()))
	q := offer.Quote
	if !q.Opens(offer.Secret) || q.Opens(offer.Secret[1:]) || len(offer.Secret) != secretBytes {
		t.Error("the secret does not open the quote, or too much does")
	}
	if q.Entry != s.entry.Key || q.Amount != 400_000 || q.Expires-q.Created != quoteSeconds || q.CreatedSlot == 0 || q.CreatedSlot > s.Slot()-32 {
		t.Errorf("%+v", q)
	}
	sig := s.pay(q.Amount+7, q.ID.Memo())
	proof := Proof{q.ID, sig, s.alice.Key}
	_, err := s.teller().Pay(t.Context(), proof)
	refused(t, "before it is final", err, CodeNotYet, "signature")
	s.Advance(40)
	for range 2 { // again is the same
		if r := must[settle.Request](t)(s.teller().Pay(t.Context(), proof)); r.State != settle.Paid || r.Payer != s.alice.Key {
			t.Errorf("%+v", r)
		}
	}
	started := must[Started](t)(s.teller().Run(t.Context(), q.ID))
	_, err = s.teller().Run(t.Context(), q.ID)
	refused(t, "run twice", err, CodeState, "quote")
	s.at.Add(3)
	e := s.ended(q.ID, 1500, "", s.work(1500))
	first := must[Settled](t)(s.teller().End(t.Context(), e))
	if again := must[Settled](t)(s.teller().End(t.Context(), e)); again != first {
		t.Errorf("%+v, before %+v", again, first)
	}
	// 1500 of 2000 tokens, a fee of 15 %, and all of the work was shown.
	if want := (Settled{Used: 300_000, Refund: 100_000, Fee: 45_000, Paid: 255_000}); first != want {
		t.Errorf("%+v, want %+v", first, want)
	}
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, 100_007)
	s.holds(400_007)
	if started.Seed == (settle.Hash{}) || started.Seed != s.seed(started.Request) {
		t.Error("the seed is not the request's")
	}
	s.restart()
	if started.Seed != s.seed(started.Request) {
		t.Error("the seed is another after a restart")
	}
	if again := must[Settled](t)(s.teller().End(t.Context(), e)); again != first {
		t.Errorf("after a restart %+v, before %+v", again, first)
	}
	_, err = s.teller().End(t.Context(), s.ended(q.ID, 1400, "", s.work(1400)))
	refused(t, "another end", err, CodeState, "tokens")
}

// TestNotServed: what delivers nothing costs nothing, whoever is to blame.
func TestNotServed(t *testing.T) {
	s := newShop(t)
	never, lost, failed := s.paid(), s.paid(), s.paid()
	in := never.Paid + lost.Paid + failed.Paid
	must[Started](t)(s.teller().Run(t.Context(), lost.Quote.ID))
	must[Started](t)(s.teller().Run(t.Context(), failed.Quote.ID))
	if out := must[Settled](t)(s.teller().End(t.Context(), Ended{ID: failed.Quote.ID, Failed: "no node has the layer"})); out != (Settled{Refund: failed.Paid}) {
		t.Errorf("%+v", out)
	}
	must[int](t)(0, s.Tick(t.Context()))
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, failed.Paid)
	s.restart() // what is due is on the disk
	s.at.Add(int64(runsFor(lost.Quote)))
	must[int](t)(0, s.Tick(t.Context()))
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, failed.Paid+lost.Paid)
	s.at.Add(keptPaid)
	must[int](t)(0, s.Tick(t.Context()))
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, in)
	for _, r := range []settle.Request{never, lost, failed} {
		if got := must[settle.Request](t)(s.cfg.Books.Request(r.Quote.ID)); got.State != settle.Credit || got.Reason == "" {
			t.Errorf("%s: %q", got.State, got.Reason)
		}
	}
	_, err := s.teller().End(t.Context(), s.ended(lost.Quote.ID, 10, "", s.work(10)))
	refused(t, "ended after it was given up", err, CodeState, "tokens")
	_, err = s.teller().Run(t.Context(), never.Quote.ID)
	refused(t, "run after it was given up", err, CodeState, "quote")
	s.holds(in)
	if left := must[[]due](t)(s.cfg.Books.dueBy(1 << 62)); len(left) > 3 {
		t.Errorf("%d are still due", len(left))
	}
}

func TestQuoteRefuses(t *testing.T) {
	s := newShop(t)
	for _, tt := range []struct {
		name   string
		change func(*Ask)
		code   Code
		field  string
	}{
		{"no model", func(a *Ask) { a.Model = "" }, CodeNotFound, "model"},
		{"an upper-case model", func(a *Ask) { a.Model = "AA" + a.Model[2:] }, CodeNotFound, "model"},
		{"another model", func(a *Ask) { a.Model = "bb" + a.Model[2:] }, CodeNotFound, "model"},
		{"a long prompt", func(a *Ask) { a.PromptTokens = settle.MaxTokens + 1 }, CodeBad, "prompt_tokens"},
		{"a long answer", func(a *Ask) { a.AnswerTokens = ^uint64(0) }, CodeBad, "answer_tokens"},
		{"no tokens", func(a *Ask) { a.PromptTokens, a.AnswerTokens = 0, 0 }, CodeBad, "prompt_tokens"},
		{"no body", func(a *Ask) { a.RequestHash = settle.Hash{} }, CodeBad, "request_hash"},
		{"a small key", func(a *Ask) { a.Owner = settle.Key{1} }, CodeBad, "owner"},
		{"the vault's owner", func(a *Ask) { a.Owner = s.operator.Key }, CodeRights, "owner"},
		{"another operator", func(a *Ask) { a.Owner = settletest.NewWallet("operator 2").Key }, CodeRights, "owner"},
	} {
		a := s.ask()
		tt.change(&a)
		_, err := s.teller().Quote(t.Context(), a)
		refused(t, tt.name, err, tt.code, tt.field)
	}
	s.at.Add(int64(slotFresh/time.Second) + 1)
	s.Fault(settletest.Fault{Drop: true})
	_, err := s.teller().Quote(t.Context(), s.ask())
	refused(t, "no chain", err, CodeNotYet, "")
	s.ClearFaults()
	s.at.Add(settle.RefRefuseAfter)
	_, err = s.teller().Quote(t.Context(), s.ask())
	refused(t, "an old reference", err, CodeState, "")
}

// TestOpenQuotes: a node has so many unpaid quotes at a time, and another has its own.
func TestOpenQuotes(t *testing.T) {
	s := newShop(t)
	first := s.quote()
	for range maxOpen - 1 {
		s.quote()
	}
	_, err := s.teller().Quote(t.Context(), s.ask())
	refused(t, "one more", err, CodeBusy, "")
	must[Offer](t)(s.As(s.worker.Key).Quote(t.Context(), s.ask()))
	sig := s.pay(first.Amount, first.ID.Memo())
	s.Advance(40)
	must[settle.Request](t)(s.teller().Pay(t.Context(), Proof{first.ID, sig, s.alice.Key}))
	s.quote() // a paid one makes room
	s.at.Add(quoteSeconds + 1)
	s.quote() // and so do those that are over
	s.at.Add(keptQuote)
	for range 3 {
		must[int](t)(0, s.Tick(t.Context()))
	}
	if _, err := s.cfg.Books.Request(first.ID); err != nil {
		t.Errorf("a paid one was forgotten: %v", err)
	}
	s.at.Add(keptQuote)
	n := 0
	for range 3 {
		must[int](t)(0, s.Tick(t.Context()))
	}
	for _, d := range must[[]due](t)(s.cfg.Books.dueBy(1 << 62)) {
		if d.state == settle.Open {
			n++
		}
	}
	if n > 0 || len(s.Desk.open) > 0 {
		t.Errorf("%d unpaid quotes are kept, and those of %d nodes", n, len(s.Desk.open))
	}
}

func TestPayRefuses(t *testing.T) {
	s := newShop(t)
	q, other := s.quote(), s.quote()
	a := s.ask()
	a.Owner = settletest.NewWallet("bob").Key
	bobs := must[Offer](t)(s.teller().Quote(t.Context(), a)).Quote
	sig, short := s.pay(q.Amount, q.ID.Memo()), s.pay(other.Amount-1, other.ID.Memo())
	wrong := s.pay(q.Amount, "kvr1:something else")
	s.Advance(40)
	pay := func(node settle.Node, p Proof) error {
		_, err := s.As(node).Pay(t.Context(), p)
		return err
	}
	refused(t, "no quote", pay(s.entry.Key, Proof{settle.QuoteID{1}, sig, s.alice.Key}), CodeNotFound, "quote")
	refused(t, "another node's", pay(s.worker.Key, Proof{q.ID, sig, s.alice.Key}), CodeRights, "quote")
	refused(t, "no payer", pay(s.entry.Key, Proof{ID: q.ID, Signature: sig}), CodeRights, "payer")
	refused(t, "another owner", pay(s.entry.Key, Proof{bobs.ID, sig, s.alice.Key}), CodeRights, "payer")
	refused(t, "no signature", pay(s.entry.Key, Proof{ID: q.ID, Payer: s.alice.Key}), CodeState, "signature")
	refused(t, "another memo", pay(s.entry.Key, Proof{q.ID, wrong, s.alice.Key}), CodeInvalid, "signature")
	refused(t, "Eve says that she paid", pay(s.entry.Key, Proof{q.ID, sig, settletest.NewWallet("eve").Key}), CodeInvalid, "signature")
	refused(t, "another quote's payment", pay(s.entry.Key, Proof{other.ID, sig, s.alice.Key}), CodeInvalid, "signature")
	for range 2 {
		refused(t, "too little", pay(s.entry.Key, Proof{other.ID, short, s.alice.Key}), CodeInvalid, "signature")
	}
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, other.Amount-1) // it is not lost
	s.Fault(settletest.Fault{Path: "/b", Drop: true})
	refused(t, "a provider is down", pay(s.entry.Key, Proof{q.ID, sig, s.alice.Key}), CodeNotYet, "signature")
	refused(t, "another signature meanwhile", pay(s.entry.Key, Proof{q.ID, wrong, s.alice.Key}), CodeState, "signature")
	refused(t, "another quote's, that is looked at", pay(s.entry.Key, Proof{s.quote().ID, sig, s.alice.Key}), CodeNotYet, "signature")
	s.ClearFaults()
	if err := pay(s.entry.Key, Proof{q.ID, sig, s.alice.Key}); err != nil {
		t.Error(err)
	}
	refused(t, "used", pay(s.entry.Key, Proof{s.quote().ID, sig, s.alice.Key}), CodeInvalid, "signature")
	late := s.quote()
	lateSig := s.pay(late.Amount, late.ID.Memo())
	s.at.Add(quoteSeconds + 1)
	refused(t, "after the quote's end", pay(s.entry.Key, Proof{late.ID, lateSig, s.alice.Key}), CodeState, "signature")
	s.cfg.Books.verified(t)
}

// TestPaidOnce: of many calls at once with one signature, for one quote and for others,
// one request is paid.
func TestPaidOnce(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	sig := s.pay(q.Amount, q.ID.Memo())
	s.Advance(40)
	var paid atomic.Int64
	var all sync.WaitGroup
	for i := range 50 {
		id := q.ID
		if i%2 == 1 {
			id = s.quote().ID
		}
		all.Go(func() {
			r, err := s.teller().Pay(t.Context(), Proof{id, sig, s.alice.Key})
			var refusal *Refusal
			switch {
			case err == nil && id == q.ID && r.State == settle.Paid:
				paid.Add(1)
			case err == nil:
				t.Errorf("another quote is %s", r.State)
			case !errors.As(err, &refusal) || refusal.Code != CodeNotYet && refusal.Code != CodeInvalid:
				t.Error(err)
			}
		})
	}
	all.Wait()
	for range 20 { // the others let go of it
		must[int](t)(0, s.Tick(t.Context()))
		if _, err := s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key}); err == nil {
			paid.Add(1)
			break
		}
		s.at.Add(askAgain)
	}
	if paid.Load() == 0 {
		t.Error("nothing is paid")
	}
	s.holds(q.Amount)
}

// TestLookedAtLater: a payment whose caller went away is booked all the same, and the
// signature of one that no chain has is let go.
func TestLookedAtLater(t *testing.T) {
	s := newShop(t)
	q, nothing := s.quote(), s.quote()
	sig := s.pay(q.Amount, q.ID.Memo())
	_, err := s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key})
	refused(t, "before it is final", err, CodeNotYet, "signature")
	_, err = s.teller().Pay(t.Context(), Proof{nothing.ID, settle.Signature{1}, s.alice.Key})
	refused(t, "unknown", err, CodeNotYet, "signature")
	s.Advance(40)
	s.restart()
	s.at.Add(2 * askAgain)
	must[int](t)(0, s.Tick(t.Context()))
	if r := must[settle.Request](t)(s.cfg.Books.Request(q.ID)); r.State != settle.Paid {
		t.Errorf("it is %s", r.State)
	}
	for range 3 {
		s.at.Add(keptReserved)
		must[int](t)(0, s.Tick(t.Context()))
	}
	if r, err := s.cfg.Books.Request(nothing.ID); err == nil && (r.State != settle.Open || r.Reason == "") {
		t.Errorf("the other is %s, %q", r.State, r.Reason)
	}
	s.holds(q.Amount)
}

func TestDebit(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	_, err := s.teller().Debit(t.Context(), q.ID)
	refused(t, "no link", err, CodeRights, "quote")
	s.link(s.entry.Key, s.alice)
	_, err = s.teller().Debit(t.Context(), q.ID)
	refused(t, "no money", err, CodeFunds, "quote")
	sig := s.pay(q.Amount, "")
	s.Advance(40)
	must[Ledger](t)(s.teller().Deposit(t.Context(), Deposit{Signature: sig, Owner: s.alice.Key, Amount: q.Amount}))
	_, err = s.As(s.worker.Key).Debit(t.Context(), q.ID)
	refused(t, "another node", err, CodeRights, "quote")
	for range 2 {
		if r := must[settle.Request](t)(s.teller().Debit(t.Context(), q.ID)); r.State != settle.Paid || r.Payer != s.alice.Key {
			t.Errorf("%+v", r)
		}
	}
	must[Started](t)(s.teller().Run(t.Context(), q.ID))
	out := must[Settled](t)(s.teller().End(t.Context(), s.ended(q.ID, 100, "the client went away", s.work(100))))
	if out.Used != 20_000 || out.Refund != q.Amount-20_000 {
		t.Errorf("%+v", out)
	}
	s.at.Add(1)
	no := s.linkOf(s.entry.Key, Link{Wallet: s.alice.Key, Since: uint64(s.at.Load()), Format: "raw"}, s.alice)
	must[Linked](t)(s.teller().Link(t.Context(), no))
	_, err = s.teller().Debit(t.Context(), s.quote().ID)
	refused(t, "the node may not spend", err, CodeRights, "quote")
	s.holds(q.Amount)
}

func TestX402(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	raw := s.x402(q, q.Amount)
	short, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := s.teller().PayX402(short, Partial{q.ID, raw})
	refused(t, "before it is final", err, CodeNotYet, "signature")
	_, err = s.teller().PayX402(t.Context(), Partial{q.ID, s.x402(q, q.Amount+1)})
	refused(t, "another transaction meanwhile", err, CodeState, "quote")
	s.ticking()
	for range 2 { // the same call goes on, and again is the same
		if r := must[settle.Request](t)(s.teller().PayX402(t.Context(), Partial{q.ID, raw})); r.State != settle.Paid || r.Payer != s.alice.Key || r.Paid != q.Amount {
			t.Errorf("%+v", r)
		}
	}
	must[Started](t)(s.teller().Run(t.Context(), q.ID))
	must[Settled](t)(s.teller().End(t.Context(), s.ended(q.ID, 2000, "", s.work(2000))))
	if r := must[settle.Request](t)(s.teller().PayX402(t.Context(), Partial{q.ID, raw})); r.State != settle.Done {
		t.Errorf("afterwards it is %s", r.State)
	}
	s.holds(q.Amount)
}

func TestX402Refuses(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	a := s.ask()
	a.Owner = settletest.NewWallet("bob").Key
	bobs := must[Offer](t)(s.teller().Quote(t.Context(), a)).Quote
	dear := s.ask()
	dear.PromptTokens, dear.AnswerTokens = settle.MaxTokens, settle.MaxTokens
	poor := must[Offer](t)(s.teller().Quote(t.Context(), dear)).Quote
	pay := func(node settle.Node, id settle.QuoteID, raw []byte) error {
		_, err := s.As(node).PayX402(t.Context(), Partial{id, raw})
		return err
	}
	refused(t, "no quote", pay(s.entry.Key, settle.QuoteID{1}, nil), CodeNotFound, "quote")
	refused(t, "another node's", pay(s.worker.Key, q.ID, s.x402(q, q.Amount)), CodeRights, "quote")
	refused(t, "nothing", pay(s.entry.Key, q.ID, nil), CodeInvalid, "transaction")
	refused(t, "too little", pay(s.entry.Key, q.ID, s.x402(q, q.Amount-1)), CodeInvalid, "transaction")
	refused(t, "another quote's", pay(s.entry.Key, q.ID, s.x402(bobs, q.Amount)), CodeInvalid, "transaction")
	refused(t, "another owner", pay(s.entry.Key, bobs.ID, s.x402(bobs, bobs.Amount)), CodeRights, "transaction")
	refused(t, "more than Alice has", pay(s.entry.Key, poor.ID, s.x402(poor, poor.Amount)), CodeInvalid, "transaction")
	if r := must[settle.Request](t)(s.cfg.Books.Request(poor.ID)); r.State != settle.Open || r.Signature != (settle.Signature{}) {
		t.Errorf("after that it is %s", r.State)
	}
	none := newShop(t, func(cfg *DeskConfig) { cfg.Fee = nil })
	_, err := none.teller().PayX402(t.Context(), Partial{none.quote().ID, []byte{1}})
	refused(t, "no fee key", err, CodeBad, "transaction")
	if terms := must[Terms](t)(none.Terms(t.Context())); terms.FeePayer != (settle.Wallet{}) {
		t.Errorf("it says that %s pays fees", terms.FeePayer)
	}
	s.holds(0)
}

// TestX402SentLater: a transaction that could not be sent is sent by Tick, and one that
// can never land any more is given up.
func TestX402SentLater(t *testing.T) {
	s := newShop(t)
	try := func(q settle.Quote) {
		t.Helper()
		s.Fault(settletest.Fault{Method: "sendTransaction", Drop: true})
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := s.teller().PayX402(ctx, Partial{q.ID, s.x402(q, q.Amount)})
		refused(t, "not sent", err, CodeNotYet, "signature")
	}
	q := s.quote()
	try(q)
	s.ClearFaults()
	for range 3 {
		s.at.Add(2 * askAgain)
		must[int](t)(0, s.Tick(t.Context()))
		s.Advance(40)
	}
	if r := must[settle.Request](t)(s.cfg.Books.Request(q.ID)); r.State != settle.Paid {
		t.Errorf("it is %s", r.State)
	}
	lost := s.quote()
	try(lost)
	s.Advance(600)
	s.at.Add(2 * askAgain)
	must[int](t)(0, s.Tick(t.Context()))
	if r := must[settle.Request](t)(s.cfg.Books.Request(lost.ID)); r.State != settle.Open || r.Reason == "" {
		t.Errorf("the other is %s, %q", r.State, r.Reason)
	}
	s.holds(q.Amount)
}

func TestEndRefuses(t *testing.T) {
	s := newShop(t)
	r := s.paid()
	id := r.Quote.ID
	good := func() Ended { return s.ended(id, 100, "", s.work(100)) }
	end := func(node settle.Node, e Ended) error {
		_, err := s.As(node).End(t.Context(), e)
		return err
	}
	refused(t, "before it runs", end(s.entry.Key, good()), CodeState, "quote")
	refused(t, "run by another node", func() error { _, err := s.As(s.worker.Key).Run(t.Context(), id); return err }(), CodeRights, "quote")
	must[Started](t)(s.teller().Run(t.Context(), id))
	s.at.Add(2)
	refused(t, "ended by another node", end(s.worker.Key, good()), CodeRights, "quote")
	foreign := settle.Report{Role: settle.Receipt, Network: s.cfg.Network, Request: id, Signer: s.worker.Key, Seq: 1, Tokens: 100, Work: s.work(100)}
	for _, tt := range []struct {
		name  string
		e     func() Ended
		field string
	}{
		{"a long reason", func() Ended { e := good(); e.Failed = string(make([]byte, maxReason+1)); return e }, "failed"},
		{"many statements", func() Ended { e := good(); e.Statements = make([][]byte, settle.MaxWorkers+1); return e }, "statements"},
		{"much", func() Ended { e := good(); e.Statements = [][]byte{make([]byte, maxReports)}; return e }, "statements"},
		{"no receipt", func() Ended { e := good(); e.Receipt = nil; return e }, "receipt"},
		{"nothing at all", func() Ended { return Ended{ID: id} }, "tokens"},
		{"bytes", func() Ended { e := good(); e.Receipt[20] ^= 1; return e }, "receipt"},
		{"bytes of a statement", func() Ended { e := good(); e.Statements[0][90] ^= 1; return e }, "statements"},
		{"a statement as the receipt", func() Ended { e := good(); e.Receipt = e.Statements[0]; return e }, "receipt"},
		{"the receipt as a statement", func() Ended { e := good(); e.Statements[0] = e.Receipt; return e }, "receipt"},
		{"other tokens", func() Ended { e := good(); e.Tokens = 99; return e }, "receipt"},
		{"work for nothing", func() Ended { e := s.ended(id, 0, "it failed", s.work(100)); return e }, "receipt"},
		{"more than was quoted", func() Ended { return s.ended(id, 2001, "", s.work(2001)) }, "receipt"},
		{"more work than tokens", func() Ended { return s.ended(id, 100, "", s.work(101)) }, "receipt"},
		{"another request", func() Ended { e := s.ended(settle.QuoteID{9}, 100, "", s.work(100)); e.ID = id; return e }, "receipt"},
		{"another signer", func() Ended { e := good(); e.Receipt = must[[]byte](t)(foreign.Sign(s.worker.Private)); return e }, "receipt"},
		{"a part that is none", func() Ended {
			return s.ended(id, 100, "", []settle.Work{{Worker: s.worker.Key, Lines: []settle.Line{{Part: 2, Units: 1}}}})
		}, "receipt"},
	} {
		refused(t, tt.name, end(s.entry.Key, tt.e()), CodeBad, tt.field)
	}
	if got := must[settle.Request](t)(s.cfg.Books.Request(id)); got.State != settle.Running {
		t.Errorf("after refusals it is %s", got.State)
	}
	// The lesser of both counts: the worker says less than the receipt does, and another says nothing.
	work := s.work(100)
	e := s.ended(id, 100, "", work)
	for i, w := range work {
		if w.Worker == s.entry.Key {
			e.Statements = append(e.Statements[:i], e.Statements[i+1:]...)
		}
	}
	out := must[Settled](t)(s.teller().End(t.Context(), e))
	// Of 17,000 for workers the entry's 15 % go to the pool.
	if out.Used != 20_000 || out.Paid != 14_450 {
		t.Errorf("%+v", out)
	}
	s.holds(r.Paid)
}

// TestRates: once a node has shown what it can do, more than 1.25 times as much in the
// same time is not paid.
func TestRates(t *testing.T) {
	s := newShop(t)
	end := func(tokens uint64, seconds int64) Settled {
		r := s.paid()
		must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
		s.at.Add(seconds)
		return must[Settled](t)(s.teller().End(t.Context(), s.ended(r.Quote.ID, tokens, "", s.work(tokens))))
	}
	for range shownRequests { // 100 tokens a second
		if out := end(1000, 10); out.Paid != 170_000 {
			t.Fatalf("%+v", out)
		}
	}
	if out := end(1250, 10); out.Paid != 212_500 {
		t.Errorf("a quarter faster: %+v", out)
	}
	if out := end(2000, 10); out.Paid >= 340_000 || out.Paid < 260_000 {
		t.Errorf("much faster: %+v", out)
	}
	s.at.Add(3 * settle.Day)
	s.restart()
	if out := end(2000, 10); out.Paid != 340_000 {
		t.Errorf("what was shown days ago bounds nobody: %+v", out)
	}
	s.cfg.Books.verified(t)
}

// TestPrices: an epoch's record follows from what was settled in it, also over a restart;
// quotes are by it, and the records prove themselves to whoever has the first.
func TestPrices(t *testing.T) {
	var published [][]byte
	among := market.MinDraw
	s := newShop(t, func(cfg *DeskConfig) {
		cfg.Among = func(string, settle.Hash, settle.Node) int { return among }
		cfg.Publish = func(r []byte) { published = append(published, r) }
	})
	terms := func() ModelPrice {
		t.Helper()
		all := must[Terms](t)(s.Terms(t.Context()))
		if len(all.Prices) != 1 || all.Prices[0].Model != s.model || all.Node != s.node || all.Params["fee"] != 150_000 || all.Vault != s.mint.ATA(s.operator.Key) {
			t.Fatalf("%+v", all)
		}
		return all.Prices[0]
	}
	if got := must[Terms](t)(s.Terms(t.Context())); len(got.Prices) != 0 || got.FeePayer != s.fee.Key {
		t.Errorf("%+v", got)
	}
	first := s.quote()
	if p := terms(); p.Raw != first.PriceRaw || p.Hash != first.PriceRecord {
		t.Errorf("%+v, the quote is by %d", p, first.PriceRaw)
	}
	serve := func() {
		t.Helper()
		r := s.paid()
		must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
		s.at.Add(100)
		must[Settled](t)(s.teller().End(t.Context(), s.ended(r.Quote.ID, 2000, "", s.work(2000))))
	}
	serve()
	s.restart()
	serve()
	s.at.Add(settle.Hour)
	must[int](t)(0, s.Tick(t.Context()))
	s.quote()
	last, _ := s.chains[must[settle.Hash](t)(modelOf(s.model))].Last()
	// 2000 tokens in 100 s: two nodes can do 20 a second in an hour, and one wallet counts as a fifth of that.
	if want := (market.Load{Counted: 4_000_000, Capacity: 20_000 * settle.Hour, Heard: true}); last.State.Epoch != 1 || last.Load != want {
		t.Errorf("epoch %d: %+v, want %+v", last.State.Epoch, last.Load, want)
	}
	if last.State.Price >= market.Price(first.PriceRaw) {
		t.Errorf("a price of %d, after %d: it does not fall", last.State.Price, first.PriceRaw)
	}
	s.at.Add(5 * settle.Hour) // a long gap
	s.restart()
	must[int](t)(0, s.Tick(t.Context()))
	if q := s.quote(); q.PriceRecord == first.PriceRecord || q.PriceRecord != terms().Hash || len(published) != 3 {
		t.Errorf("a quote by %x, %d records", q.PriceRecord, len(published))
	}
	chain := market.NewPriceChain(s.cfg.Network, [32]byte(must[settle.Hash](t)(modelOf(s.model))), s.node)
	for i, r := range published {
		if err := chain.Append(r); err != nil {
			t.Errorf("record %d: %v", i, err)
		}
	}
	if _, hash := chain.Last(); hash != terms().Hash {
		t.Error("the last record is another")
	}
}

// TestPriceStays where it is not known whether workers were drawn.
func TestPriceStays(t *testing.T) {
	s := newShop(t)
	before := s.quote().PriceRaw
	s.at.Add(settle.Hour)
	s.served(2000)
	s.at.Add(settle.Hour)
	if after := s.quote(); after.PriceRaw != before {
		t.Errorf("%d, before %d", after.PriceRaw, before)
	}
}

// TestGovernedPrice: quotes are by the reference that governance set, from its epoch on,
// also when it was set twice while nobody asked.
func TestGovernedPrice(t *testing.T) {
	s := newShop(t)
	first := s.quote()
	set := func(ref, epoch uint64) {
		t.Helper()
		s.at.Add(60) // a code of the authenticator counts once
		p := must[Proposed](t)(s.teller().Propose(t.Context(), Change{Values: map[string]uint64{"reference": ref}, Epoch: epoch}))
		sig := settle.Signature(ed25519.Sign(genesisWallet.Private, []byte(p.Texts[genesisWallet.Key.String()])))
		code := must[string](t)(totp.GenerateCode(s.secret, s.now()))
		must[Activated](t)(s.teller().Activate(t.Context(), Activation{p.Proposal, []Signature{{genesisWallet.Key, "raw", sig}}, code}))
	}
	set(2_000_000_000, 1)
	if q := s.quote(); q.Ref != first.Ref {
		t.Errorf("before its epoch quotes are by %d", q.Ref)
	}
	s.at.Add(settle.Hour)
	if q := s.quote(); q.Ref != 2_000_000_000 || q.Amount != 2*first.Amount || q.PriceRaw != first.PriceRaw {
		t.Errorf("in its epoch: %+v", q)
	}
	set(4_000_000_000, 26)
	set(8_000_000_000, 51)
	s.at.Add(100 * settle.Hour)
	s.restart()
	if q := s.quote(); q.Ref != 8_000_000_000 {
		t.Errorf("after two changes: %+v", q)
	}
	s.restart()
	s.quote()
}

// TestEmission: who was drawn among enough replicas has of the emission, which is below
// the fee; who serves the client was not drawn.
func TestEmission(t *testing.T) {
	for among, emits := range map[int]bool{market.MinDraw: true, market.MinDraw - 1: false} {
		s := newShop(t)
		s.cfg.Among = func(_ string, _ settle.Hash, n settle.Node) int {
			if n == s.entry.Key {
				return 0
			}
			return among
		}
		s.start()
		sig := s.pay(5000, fundEmission)
		s.Advance(40)
		must[Ledger](t)(s.teller().Deposit(t.Context(), Deposit{Signature: sig, Owner: s.alice.Key, Amount: 5000}))
		must[int](t)(0, s.Tick(t.Context()))
		earned := func(n settle.Node) settle.Amount { return must[Ledger](t)(s.teller().Ledger(t.Context(), n)).Earned }
		_, out := s.served(1000)
		// Of 170,000 for work the entry's half of the dense part is 15 %.
		if out.Emitted > 0 != emits || out.Emitted >= out.Fee || earned(s.entry.Key) != 25_500 || earned(s.worker.Key) != 144_500+out.Emitted {
			t.Errorf("among %d: %+v, the entry has %d, the worker %d", among, out, earned(s.entry.Key), earned(s.worker.Key))
		}
		reserve := func() (r settle.Reserve) { must[int](t)(0, s.cfg.Books.read([]byte{'m'}, &r)); return r }
		s.at.Add(settle.Hour)
		must[int](t)(0, s.Tick(t.Context()))
		first := reserve()
		if first.Revenue == 0 || first.Remaining != 5000-out.Emitted {
			t.Errorf("among %d: %+v", among, first)
		}
		must[int](t)(0, s.Tick(t.Context()))
		if again := reserve(); again != first {
			t.Errorf("an epoch ended twice: %+v, %+v", again, first)
		}
		r := s.paid() // it is carried: the entry does nothing
		must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
		all := []settle.Work{{Worker: s.worker.Key, Lines: []settle.Line{{Part: 0, Units: 100}, {Part: 1, Units: 200}}}}
		if out := must[Settled](t)(s.teller().End(t.Context(), s.ended(r.Quote.ID, 100, "", all))); out.Emitted != 0 || out.Paid == 0 {
			t.Errorf("carried: %+v", out)
		}
	}
}

// TestRun: the loop does what is due, and ends with its context.
func TestRun(t *testing.T) {
	s := newShop(t)
	r := s.paid()
	s.at.Add(keptPaid)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Desk.Run(ctx) }()
	for range 500 {
		if got := must[settle.Request](t)(s.cfg.Books.Request(r.Quote.ID)); got.State == settle.Credit {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	s.cfg.Books.mustHave(t, settle.Balance, s.alice.Key, r.Paid)
}

func TestOpenDeskRefuses(t *testing.T) {
	s := newShop(t)
	for what, change := range map[string]func(*DeskConfig){
		"network": func(c *DeskConfig) { c.Network = settle.Hash{} }, "key": func(c *DeskConfig) { c.Key = nil },
		"books": func(c *DeskConfig) { c.Books = nil }, "chain": func(c *DeskConfig) { c.Chain = nil },
		"vault": func(c *DeskConfig) { c.Vault = nil }, "governor": func(c *DeskConfig) { c.Governor = nil },
		"price": func(c *DeskConfig) { c.FirstRaw = 0 }, "began": func(c *DeskConfig) { c.Began = time.Time{} },
		"models": func(c *DeskConfig) { c.Models = nil }, "fee": func(c *DeskConfig) { c.Fee = c.Fee[:5] },
	} {
		cfg := s.cfg
		change(&cfg)
		if _, err := OpenDesk(cfg); err == nil {
			t.Errorf("opened without a good %s", what)
		}
	}
	s.quote()
	other := s.cfg
	other.Key = settletest.NewWallet("somebody else").Private
	if _, err := OpenDesk(other); !errors.Is(err, ErrBooks) {
		t.Errorf("opened with another's prices: %v", err)
	}
}

var _ Chain = (*solana.Client)(nil)

func (b *Books) read(key []byte, record any) error {
	return b.store.View(func(tx *kv.Tx) error {
		ok, err := page{tx}.load(key, record)
		if err == nil && !ok {
			err = fmt.Errorf("no record %x", key)
		}
		return err
	})
}
