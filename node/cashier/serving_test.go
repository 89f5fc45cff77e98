//go:build svm

package cashier

import (
	"testing"

	"kvasird/settle"
)

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
	stranger := settle.Report{Role: settle.Statement, Network: s.cfg.Network, Request: id, Signer: s.alice.Key, Seq: 1,
		Work: []settle.Work{{Worker: s.alice.Key, Lines: []settle.Line{{Part: 0, Units: 1}}}}}
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
		{"the receipt as a statement", func() Ended { e := good(); e.Statements[0] = e.Receipt; return e }, "statements"},
		{"a stranger's statement", func() Ended {
			e := good()
			e.Statements = append(e.Statements, must[[]byte](t)(stranger.Sign(s.alice.Private)))
			return e
		}, "statements"},
		{"a statement twice", func() Ended { e := good(); e.Statements = append(e.Statements, e.Statements[0]); return e }, "statements"},
		{"statements alone", func() Ended {
			e := good()
			e.Receipt, e.Tokens, e.Failed = nil, 0, "it failed"
			return e
		}, "statements"},
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

// TestKept: of the reports stays what work was credited by, and of the others a hash.
func TestKept(t *testing.T) {
	s := newShop(t)
	end := func(change func(*Ended, []settle.Work)) kept {
		t.Helper()
		r, work := s.paid(), s.work(100)
		must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
		s.at.Add(2)
		e := s.ended(r.Quote.ID, 100, "", work)
		change(&e, work)
		must[Settled](t)(s.teller().End(t.Context(), e))
		k, ok, err := s.cfg.Books.kept(r.Quote.ID)
		if err != nil || !ok || k.Reports == (settle.Hash{}) {
			t.Fatalf("%+v, %v", k, err)
		}
		return k
	}
	// byWorker changes what the worker states.
	byWorker := func(lines ...settle.Line) func(*Ended, []settle.Work) {
		return func(e *Ended, work []settle.Work) {
			for i, w := range work {
				if w.Worker != s.worker.Key {
					continue
				}
				r := settle.Report{Role: settle.Statement, Network: s.cfg.Network, Request: e.ID, Signer: w.Worker, Seq: 1, Work: []settle.Work{{Worker: w.Worker, Lines: lines}}}
				e.Statements[i] = must[[]byte](t)(r.Sign(s.worker.Private))
			}
		}
	}
	for _, tt := range []struct {
		name       string
		change     func(*Ended, []settle.Work)
		receipt    bool
		statements int
	}{
		{"all credited", func(*Ended, []settle.Work) {}, true, 2},
		{"one states another part", byWorker(settle.Line{Part: 7, Units: 9}), true, 1},
		{"one states many parts", byWorker(settle.Line{Part: 0, Units: 50}, settle.Line{Part: 1, Units: 200}, settle.Line{Part: 7, Units: 9}), true, 1},
		{"nobody states anything", func(e *Ended, _ []settle.Work) { e.Statements = nil }, false, 0},
	} {
		k := end(tt.change)
		if (len(k.Ended.Receipt) > 0) != tt.receipt || len(k.Ended.Statements) != tt.statements {
			t.Errorf("%s: a receipt of %d bytes and %d statements are kept", tt.name, len(k.Ended.Receipt), len(k.Ended.Statements))
		}
	}
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

// TestKnownParts: what runs is settled, and its model asked for again, when nobody serves it any more,
// also after a restart.
func TestKnownParts(t *testing.T) {
	s := newShop(t)
	r := s.paid()
	must[Started](t)(s.teller().Run(t.Context(), r.Quote.ID))
	s.at.Add(2)
	s.cfg.Models = func(string, settle.Node) (Model, error) {
		return Model{}, &Refusal{Code: CodeNotYet, Text: "nobody serves it", Retry: 2}
	}
	s.restart()
	if out := must[Settled](t)(s.teller().End(t.Context(), s.ended(r.Quote.ID, 100, "", s.work(100)))); out.Paid != 17_000 {
		t.Errorf("%+v", out)
	}
	s.quote()
	a := s.ask()
	a.Model = "bb" + a.Model[2:]
	_, err := s.teller().Quote(t.Context(), a)
	refused(t, "a model that nobody paid for", err, CodeNotYet, "")
}
