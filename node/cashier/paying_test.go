//go:build svm

package cashier

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

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
	s.at.Add(quoteSeconds + lateSeconds + 1)
	refused(t, "long after the quote's end", pay(s.entry.Key, Proof{late.ID, lateSig, s.alice.Key}), CodeState, "signature")
	_, err := s.teller().PayX402(t.Context(), Partial{late.ID, s.x402(late, late.Amount)})
	refused(t, "a transaction after the quote's end", err, CodeState, "quote")
	s.cfg.Books.verified(t)
}

// TestNamedLate: who paid in time may say so after the quote's end, and runs the request;
// a payment that was late is a balance. Until then it is no deposit.
func TestNamedLate(t *testing.T) {
	s := newShop(t)
	q, lost := s.quote(), s.quote()
	sig := s.pay(q.Amount, q.ID.Memo())
	s.Advance(40)
	s.at.Add(quoteSeconds + 5)
	_, err := s.teller().Deposit(t.Context(), Deposit{Signature: sig, Owner: s.alice.Key, Amount: q.Amount})
	refused(t, "it pays the quote", err, CodeState, "signature")
	if r := must[settle.Request](t)(s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key})); r.State != settle.Paid {
		t.Errorf("it is %s", r.State)
	}
	must[Started](t)(s.teller().Run(t.Context(), q.ID))
	s.at.Add(lateSeconds - 5) // the last moment
	_, err = s.teller().Pay(t.Context(), Proof{lost.ID, settle.Signature{1}, s.alice.Key})
	refused(t, "unknown", err, CodeNotYet, "signature")
	s.at.Add(lateSeconds / 2)
	must[int](t)(0, s.Tick(t.Context()))
	if r := must[settle.Request](t)(s.cfg.Books.Request(lost.ID)); r.State != settle.Reserved {
		t.Errorf("the one that was named last is %s, before anybody could know it", r.State)
	}
	s.holds(q.Amount)
}

// TestContested: who names another's payment for a quote of its own keeps nobody from it.
func TestContested(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	eves := must[Offer](t)(s.As(s.worker.Key).Quote(t.Context(), s.ask())).Quote
	sig := s.pay(q.Amount, q.ID.Memo())
	eve := func() error {
		_, err := s.As(s.worker.Key).Pay(t.Context(), Proof{eves.ID, sig, s.alice.Key})
		return err
	}
	refused(t, "Eve names it first", eve(), CodeNotYet, "signature")
	_, err := s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key})
	refused(t, "before it is final", err, CodeNotYet, "signature")
	if r := must[settle.Request](t)(s.cfg.Books.Request(eves.ID)); r.State != settle.Reserved {
		t.Errorf("without a proof Eve's is %s", r.State)
	}
	s.Advance(40)
	_, err = s.teller().Pay(t.Context(), Proof{s.quote().ID, sig, s.alice.Key})
	refused(t, "a third quote that it does not pay", err, CodeNotYet, "signature")
	if r := must[settle.Request](t)(s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key})); r.State != settle.Paid || r.Payer != s.alice.Key {
		t.Errorf("Alice's is %s of %s", r.State, r.Payer)
	}
	if r := must[settle.Request](t)(s.cfg.Books.Request(eves.ID)); r.State != settle.Open || r.Signature != (settle.Signature{}) || r.Reason == "" {
		t.Errorf("Eve's is %s, %q", r.State, r.Reason)
	}
	refused(t, "Eve again", eve(), CodeInvalid, "signature")
	s.holds(q.Amount)
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
	dear.PromptTokens, dear.AnswerTokens = unbondedTokens, 0
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

// TestX402ForNothing: an entry node whose x402 payments all go back has the fee payer pay
// for that a while, and no longer. Others are not kept from it.
func TestX402ForNothing(t *testing.T) {
	s := newShop(t)
	s.ticking()
	q := s.quote()
	must[settle.Request](t)(s.teller().PayX402(t.Context(), Partial{q.ID, s.x402(q, q.Amount)}))
	must[Settled](t)(s.teller().End(t.Context(), Ended{ID: q.ID, Failed: "nothing"}))
	// lost is one as the first, but for the chain.
	lost := func(i int) {
		q := s.quote()
		sig := settle.Signature{1, byte(i)}
		must[settle.Request](t)(s.cfg.Books.reserve(q.ID, sig, s.cfg.Books.seconds(), &intent{Payer: s.alice.Key}))
		s.sponsored(q)
		must[settle.Request](t)(s.cfg.Books.Pay(q.ID, settle.Payment{Signature: sig, Message: hashOf("message", i), Memo: q.ID.Memo(),
			Payer: s.alice.Key, Amount: q.Amount, Slot: q.CreatedSlot + 1, Time: q.Created}))
		must[Settled](t)(s.teller().End(t.Context(), Ended{ID: q.ID, Failed: "nothing"}))
	}
	// tries sends a transaction that is none: that is found out after the count.
	tries := func(node settle.Node) error {
		o := must[Offer](t)(s.As(node).Quote(t.Context(), s.ask()))
		_, err := s.As(node).PayX402(t.Context(), Partial{ID: o.Quote.ID})
		return err
	}
	for i := range maxWasted - 2 {
		lost(i)
	}
	refused(t, "one before the last", tries(s.entry.Key), CodeInvalid, "transaction")
	lost(maxWasted)
	err := tries(s.entry.Key)
	var r *Refusal
	if refused(t, "the last", err, CodeBusy, "transaction"); !errors.As(err, &r) || r.Retry == 0 || r.Retry > wastedFor {
		t.Errorf("it may ask again after %+v", r)
	}
	refused(t, "another node", tries(s.worker.Key), CodeInvalid, "transaction")
	s.at.Add(wastedFor)
	refused(t, "an hour later", tries(s.entry.Key), CodeInvalid, "transaction")
}
