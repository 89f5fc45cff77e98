//go:build svm

package cashier

import (
	"crypto/ed25519"
	"fmt"
	"testing"

	"github.com/pquerna/otp/totp"

	"kvasird/market"
	"kvasird/node/kv"
	"kvasird/settle"
)

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

// TestMaxPriced: made-up models that nobody pays for leave nothing in the books, are told to nobody,
// and keep no other from its price. Only what is paid for takes one of the places.
func TestMaxPriced(t *testing.T) {
	published := 0
	s := newShop(t, func(cfg *DeskConfig) {
		cfg.Models = func(string, settle.Node) (Model, error) { return Model{Name: "m", Parts: shopParts}, nil }
		cfg.Publish = func([]byte) { published++ }
	})
	ask := func(i int) (settle.Quote, error) {
		a := s.ask()
		a.Model = fmt.Sprintf("%064x", i)
		o, err := s.As(keyOf(fmt.Sprint("entry ", i%64))).Quote(t.Context(), a)
		return o.Quote, err
	}
	mine := s.quote()
	for i := range 2 * maxPriced {
		must[settle.Quote](t)(ask(i))
	}
	if n, of := len(s.fresh), s.freshOf(); n != maxFresh || of > maxFreshOf || published != 0 || len(s.chains) != 0 {
		t.Errorf("%d models nobody paid for, %d of one node, %d records were told, %d chains", n, of, published, len(s.chains))
	}
	if q := s.quote(); q.PriceRaw != mine.PriceRaw {
		t.Errorf("a price of %d, before %d", q.PriceRaw, mine.PriceRaw)
	}
	terms := must[Terms](t)(s.Terms(t.Context()))
	var back Terms
	if raw := encodeDone(terms); len(raw) > maxDone || len(terms.Prices) != maxPriced || decodeDone(raw, &back) != nil {
		t.Errorf("the terms of %d models take %d bytes, or are not read", len(terms.Prices), len(raw))
	}
	s.served(100)
	if len(s.chains) != 1 || published != 1 {
		t.Errorf("%d chains, %d records were told, of one model that was paid for", len(s.chains), published)
	}
	s.restart()
	if got := must[Terms](t)(s.Terms(t.Context())).Prices; len(got) != 1 || got[0].Model != s.model {
		t.Errorf("after a restart: %+v", got)
	}
	last, _ := s.chains[must[settle.Hash](t)(modelOf(s.model))].Last()
	for i := range maxPriced - 1 {
		s.payFor(settle.Hash{1, byte(i)}, *last)
	}
	s.restart()
	_, err := ask(1)
	refused(t, "one more than can be paid for", err, CodeBusy, "model")
}

// payFor has a model be one that was paid for just now, with one record.
func (s *shop) payFor(model settle.Hash, first market.PriceRecord) {
	s.T.Helper()
	first.Model = [32]byte(model)
	must[int](s.T)(0, s.cfg.Books.keepPrice(model, first.State.Epoch, must[[]byte](s.T)(first.Sign(s.cfg.Key)), 0))
	must[int](s.T)(0, s.cfg.Books.store.Update(func(tx *kv.Tx) error { return page{tx}.putAmount(lastPaidKey(model), settle.Amount(s.at.Load())) }))
}

// TestIdleModels: a model that nobody pays for any more gives its place to another, and its price
// goes on when it is asked for again, from the books.
func TestIdleModels(t *testing.T) {
	s := newShop(t, func(cfg *DeskConfig) {
		cfg.Models = func(string, settle.Node) (Model, error) { return Model{Name: "m", Parts: shopParts}, nil }
	})
	s.served(100)
	mine := must[settle.Hash](t)(modelOf(s.model))
	first, _ := s.chains[mine].Last()
	for i := range maxPriced - 1 {
		s.payFor(settle.Hash{1, byte(i)}, *first)
	}
	s.restart()
	ask := func(model string) error {
		a := s.ask()
		a.Model = model
		_, err := s.teller().Quote(t.Context(), a)
		return err
	}
	other := fmt.Sprintf("%064x", 7)
	s.at.Add(idleFor - 1)
	refused(t, "before one is idle", ask(other), CodeBusy, "model")
	for i := range maxPriced - 1 { // all but one are paid for again
		s.payFor(settle.Hash{1, byte(i)}, *first)
	}
	s.at.Add(1)
	must[int](t)(0, ask(other))
	if s.chains[mine] != nil || len(s.chains) != maxPriced-1 || s.fresh[must[settle.Hash](t)(modelOf(other))] == nil {
		t.Errorf("%d models are followed, that of the idle one: %v", len(s.chains), s.chains[mine])
	}
	must[int](t)(0, ask(s.model)) // there is a place as long as nobody pays for the other
	last, _ := s.chains[mine].Last()
	if last.State.Epoch != s.moment().Epoch || last.Previous == (settle.Hash{}) || len(s.chains) != maxPriced {
		t.Errorf("its price begins anew: %+v", last)
	}
	s.payFor(must[settle.Hash](t)(modelOf(fmt.Sprintf("%064x", 8))), *first) // one more than there are places
	s.restart()
	if len(s.chains) != maxPriced || s.chains[mine] != nil {
		t.Errorf("%d models are followed after a restart, the idle one: %v", len(s.chains), s.chains[mine])
	}
}

// TestFreshRecords: the signed record of a model that nobody has paid for is nobody's to show, since
// another one of its epoch is signed after a restart. It has so many at most, whoever asks.
func TestFreshRecords(t *testing.T) {
	s := newShop(t)
	terms := func() []ModelPrice { t.Helper(); return must[Terms](t)(s.Terms(t.Context())).Prices }
	first := s.quote()
	if got := terms(); len(got) != 1 || got[0].Hash != first.PriceRecord || got[0].Record != nil {
		t.Errorf("%+v", got)
	}
	s.at.Add(60)
	s.restart()
	if q := s.quote(); q.PriceRecord == first.PriceRecord {
		t.Error("the record of before the restart is made again: this test shows nothing")
	}
	for range 2 * maxFreshRecords {
		s.at.Add(settle.Hour)
		terms()
		for _, f := range s.fresh {
			if len(f.records) > maxFreshRecords {
				t.Fatalf("%d records, at most %d", len(f.records), maxFreshRecords)
			}
		}
	}
	s.served(100)
	if got := terms(); len(got) != 1 || len(got[0].Record) == 0 {
		t.Errorf("once it was paid for: %+v", got)
	}
}

// freshOf is the most that one node was the first to ask for.
func (s *shop) freshOf() (most int) {
	count := map[settle.Node]int{}
	for _, f := range s.fresh {
		count[f.by]++
		most = max(most, count[f.by])
	}
	return most
}

// TestCrowdedNode: who asks for many models loses his own place, and nobody else's.
func TestCrowdedNode(t *testing.T) {
	s := newShop(t, func(cfg *DeskConfig) {
		cfg.Models = func(string, settle.Node) (Model, error) { return Model{Name: "m", Parts: shopParts}, nil }
	})
	mine := s.quote()
	for i := range 2 * maxFresh {
		a := s.ask()
		a.Model = fmt.Sprintf("%064x", i)
		// Each of its quotes is forgotten, so that it may ask for more.
		o := must[Offer](t)(s.As(keyOf("crowd")).Quote(t.Context(), a))
		s.closeQuote(o.Quote)
	}
	if q := s.quote(); q.PriceRecord != mine.PriceRecord || len(s.fresh) != maxFreshOf+1 {
		t.Errorf("another record, of %d", len(s.fresh))
	}
}

// TestPriceAfterCrash: a model that was paid for whose record was not written down has one issued
// when it is asked for.
func TestPriceAfterCrash(t *testing.T) {
	s := newShop(t, func(cfg *DeskConfig) {
		cfg.Among = func(string, settle.Hash, settle.Node) int { return market.MinDraw }
	})
	s.served(100)
	model := must[settle.Hash](t)(modelOf(s.model))
	must[int](t)(0, s.cfg.Books.store.Update(func(tx *kv.Tx) error { return tx.Delete(modelKey('v', model, 0)) }))
	s.restart()
	if len(s.chains) != 0 {
		t.Fatalf("%d chains", len(s.chains))
	}
	q := s.quote()
	s.at.Add(60)
	s.restart()
	if again := s.quote(); len(s.chains) != 1 || again.PriceRecord != q.PriceRecord {
		t.Errorf("%d chains, a quote by %x, before %x", len(s.chains), again.PriceRecord, q.PriceRecord)
	}
}
