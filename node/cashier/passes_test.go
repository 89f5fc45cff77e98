//go:build svm

package cashier

import (
	"errors"
	"sync"
	"testing"

	"kvasird/node/kv"
	"kvasird/settle"
)

// TestPass: who runs a request gets the settlement's word on it, and those who computed it learn
// what it credited to them.
func TestPass(t *testing.T) {
	s := newShop(t)
	r := s.paid()
	id := r.Quote.ID
	started := must[Started](t)(s.teller().Run(t.Context(), id))
	p := must[settle.Pass](t)(settle.ParsePass(started.Pass))
	want := settle.Pass{Network: s.cfg.Network, Request: id, Signer: s.node, Entry: s.entry.Key, Model: s.model, Tokens: 2000, Expires: started.Request.Lease}
	if p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
	ids := []settle.QuoteID{id, {9}}
	credits := func(node settle.Node) []WorkerCredit {
		t.Helper()
		return must[[]WorkerCredit](t)(s.As(node).Credits(t.Context(), ids))
	}
	if got := credits(s.worker.Key); got[0].Settled || got[1].Settled {
		t.Errorf("while it runs: %+v", got)
	}
	s.at.Add(2)
	must[Settled](t)(s.teller().End(t.Context(), s.ended(id, 100, "", s.work(100))))
	// Of 100 tokens the worker has half of the dense part's 30 %, and all experts.
	if got := credits(s.worker.Key); !got[0].Settled || got[0].Tokens != 85*uint64(settle.Whole) || got[1].Settled {
		t.Errorf("the worker: %+v", got)
	}
	if got := credits(s.alice.Key); !got[0].Settled || got[0].Tokens != 0 {
		t.Errorf("a stranger: %+v", got)
	}
	if must[int](t)(0, s.cfg.Books.store.Update(func(tx *kv.Tx) error { return tx.Delete(keptKey(id)) })); !credits(s.worker.Key)[0].Settled {
		t.Error("the reports are read for it, which may be long")
	}
	_, err := s.teller().Credits(t.Context(), make([]settle.QuoteID, MaxCredits+1))
	refused(t, "too many", err, CodeBad, "ids")
	_, err = s.teller().Credits(t.Context(), []settle.QuoteID{id, {9}, id})
	refused(t, "one twice", err, CodeBad, "ids")
}

// TestRunsAreBonded: an entry without a bond has requests of so many tokens running, one with a
// bond ten times that more, and those that end make room.
func TestRunsAreBonded(t *testing.T) {
	s := newShop(t)
	r := s.paid()
	entry := r.Quote.Entry
	free := must[settle.Amount](t)(settle.Charge(unbondedTokens, r.Quote.PriceRaw, r.Quote.Ref))
	may := func(running, claim, bond settle.Amount) bool {
		t.Helper()
		if bond > 0 {
			e := must[settle.Entry](t)(settle.NewEntry(settle.ActStake, hashOf(string(rune(bond))), 1,
				settle.Transfer{From: settle.Account{Kind: settle.Inflow}, To: settle.Account{Kind: settle.Bonded, ID: entry}, Amount: bond}))
			must[bool](t)(s.cfg.Books.Post(e))
		}
		other := r
		other.Quote.ID = settle.QuoteID{1}
		s.runs[entry] = map[settle.QuoteID]settle.Amount{other.Quote.ID: running}
		defer s.over(other)
		one := r
		one.Quote.Amount = claim
		_, err := s.begin(one)
		if err != nil {
			refused(t, "too much", err, CodeBusy, "quote")
		}
		s.over(one)
		return err == nil
	}
	for _, tt := range []struct {
		running, claim, bond settle.Amount
		ok                   bool
	}{
		{0, free, 0, true},
		{0, free + 1, 0, false},
		{free - 5, 5, 0, true},
		{free - 5, 6, 0, false},
		{free, 1000, 100, true}, // from here on there is a bond of 100
		{free, 1001, 0, false},
		{free + 1, 1000, 0, false},
		{free + 400, 600, 0, true},
	} {
		if got := may(tt.running, tt.claim, tt.bond); got != tt.ok {
			t.Errorf("%d run, %d more: %v", tt.running, tt.claim, got)
		}
	}
	must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
	if counted, err := s.begin(r); err != nil || !counted || len(s.runs[entry]) != 1 {
		t.Errorf("it counts twice: %v", err)
	}
	_, err := s.teller().Run(t.Context(), r.Quote.ID)
	refused(t, "again", err, CodeState, "quote")
	if len(s.runs[entry]) != 1 {
		t.Error("what was refused counts for what runs no more")
	}
	must[Settled](t)(s.teller().End(t.Context(), Ended{ID: r.Quote.ID, Failed: "it failed"}))
	if len(s.runs) != 0 {
		t.Errorf("after its end: %v", s.runs)
	}
}

// TestRunsAtOnce: of requests that are started at the same moment no more run than one after the
// other, what could never run is not even quoted, and what did not start does not count.
func TestRunsAtOnce(t *testing.T) {
	s := newShop(t)
	half := Ask{Model: s.model, PromptTokens: unbondedTokens/2 + 1, RequestHash: hashOf("body")}
	var all []settle.QuoteID
	for range 4 {
		q := must[Offer](t)(s.teller().Quote(t.Context(), half)).Quote
		all = append(all, q.ID)
		must[bool](t)(s.cfg.Books.Post(must[settle.Entry](t)(settle.NewEntry(settle.ActDeposit, hashOf(string(q.ID[:])), 1,
			settle.Transfer{From: settle.Account{Kind: settle.Inflow}, To: settle.Account{Kind: settle.Balance, ID: s.alice.Key}, Amount: q.Amount}))))
		if len(all) < 4 {
			must[settle.Request](t)(s.cfg.Books.Debit(q.ID, s.alice.Key))
		}
	}
	if _, err := s.teller().Run(t.Context(), all[3]); err == nil || len(s.runs) != 0 {
		t.Errorf("an unpaid one: %v, %d count", err, len(s.runs))
	}
	var mu sync.Mutex
	var ran, refusals int
	var wait sync.WaitGroup
	for _, id := range all[:3] {
		wait.Go(func() {
			_, err := s.teller().Run(t.Context(), id)
			mu.Lock()
			defer mu.Unlock()
			var r *Refusal
			switch {
			case err == nil:
				ran++
			case errors.As(err, &r) && r.Code == CodeBusy:
				refusals++
			}
		})
	}
	wait.Wait()
	if ran != 1 || refusals != 2 {
		t.Errorf("%d run, %d are refused", ran, refusals)
	}
	_, err := s.teller().Quote(t.Context(), Ask{Model: s.model, PromptTokens: unbondedTokens + 1, RequestHash: hashOf("body")})
	refused(t, "what could never run", err, CodeBad, "answer_tokens")
}

// TestCheapRuns: where so many tokens cost less than the least quotes, some requests run all the same.
func TestCheapRuns(t *testing.T) {
	s := newShop(t)
	r := settle.Request{Quote: s.quote()}
	r.Quote.PriceRaw, r.Quote.Amount = 1, settle.MinQuote
	for i := range unbondedRequests + 1 {
		r.Quote.ID[0] = byte(i)
		if _, err := s.begin(r); (err == nil) != (i < unbondedRequests) {
			t.Errorf("request %d: %v", i, err)
		}
	}
}
