//go:build svm

package cashier

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

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

// TestNamedQuotes: whose payments are named and not proved has no more quotes than so many,
// also after those expire. What they wait for keeps nobody's money, and nothing of them stays.
func TestNamedQuotes(t *testing.T) {
	s := newShop(t)
	q := s.quote()
	for i := range maxNamed {
		r := must[settle.Request](t)(s.cfg.Books.Request(s.quote().ID))
		must[settle.Request](t)(s.reserve(r, settle.Signature{1, byte(i), byte(i >> 8)}, intent{Payer: s.alice.Key}))
	}
	_, err := s.teller().Quote(t.Context(), s.ask())
	refused(t, "one more", err, CodeBusy, "")
	must[Offer](t)(s.As(s.worker.Key).Quote(t.Context(), s.ask()))
	sig := s.pay(q.Amount, q.ID.Memo())
	s.Advance(40)
	must[settle.Request](t)(s.teller().Pay(t.Context(), Proof{q.ID, sig, s.alice.Key}))
	s.at.Add(quoteSeconds + 1)
	s.forgetQuotes()
	_, err = s.teller().Quote(t.Context(), s.ask())
	refused(t, "when they are over", err, CodeBusy, "")

	s.at.Add(keptPaid)
	s.Fault(settletest.Fault{Drop: true})
	must[int](t)(0, s.Tick(t.Context()))
	if r := must[settle.Request](t)(s.cfg.Books.Request(q.ID)); r.State != settle.Credit {
		t.Errorf("the paid one, that nobody started, is %s", r.State)
	}
	for range 2 * maxNamed / maxDue {
		must[int](t)(0, s.Tick(t.Context()))
	}
	s.ClearFaults()
	s.quote()
	for letter, want := range map[byte]int{'r': 2, 'x': 1} { // of the paid one, and the last quote
		n := 0
		must[int](t)(0, s.cfg.Books.store.View(func(tx *kv.Tx) error {
			return tx.Each([]byte{letter}, func(_, _ []byte) error { n++; return nil })
		}))
		if n != want {
			t.Errorf("%d records %c are left, want %d", n, letter, want)
		}
	}
	s.holds(q.Amount)
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
	s.served(100) // which issues a price
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
