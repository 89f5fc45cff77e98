package cashier

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"kvasird/market"
	"kvasird/node/kv"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// manyEpochs is so many that their numbers are long ones.
const manyEpochs = 70_000

// fullBond is one of as many parts as there can be, of long numbers.
func fullBond() (b settle.Bond) {
	const large = 1 << 33
	b = settle.Bond{Bonded: large, Recent: 1000 * large, Epoch: manyEpochs - 1}
	for i := range uint64(settle.MaxVesting) {
		b.Vesting = append(b.Vesting, settle.Pending{Amount: large, Free: testNow + 1000*i, Epoch: manyEpochs - settle.MaxVesting + i})
	}
	for i := range uint64(settle.MaxUnbonding) {
		b.Unbonding = append(b.Unbonding, settle.Pending{Amount: large, Free: testNow + i})
	}
	return b
}

// fullRequest is one that runs, of as many workers as there can be, whose bonds are full.
func (o *office) fullRequest() (q settle.Quote, work []settle.Work) {
	o.Helper()
	q = quoteOf(1, keyOf("payer"))
	q.Model, q.PromptTokens, q.PriceRaw = hexModel, settle.MaxTokens, 1e17
	q = must[settle.Quote](o.T)(settle.NewQuote(q, 0))
	work = []settle.Work{{Worker: q.Entry}}
	for i := range settle.MaxWorkers - 1 {
		work = append(work, settle.Work{Worker: keyOf(fmt.Sprint("worker ", i))})
	}
	slices.SortFunc(work, func(a, b settle.Work) int { return bytes.Compare(a.Worker[:], b.Worker[:]) })
	const atOnce = 128
	for some := range slices.Chunk(work, atOnce) {
		must[int](o.T)(0, o.cfg.Books.store.Update(func(tx *kv.Tx) error {
			for i := range some {
				some[i].Lines = []settle.Line{{Part: 0, Units: settle.MaxTokens / settle.MaxWorkers}}
				if err := (page{tx}).saveBond(some[i].Worker, fullBond()); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	deposit(o.T, o.cfg.Books, q.Owner, q.Amount)
	must[int](o.T)(0, o.cfg.Books.Quote(q))
	must[settle.Request](o.T)(o.cfg.Books.Debit(q.ID, q.Owner))
	must[settle.Request](o.T)(o.cfg.Books.Run(q.ID, uint64(o.at.Load())+10, manyEpochs))
	return q, work
}

const hexModel = "00000000000000000000000000000000000000000000000000000000000000ab"

// TestMostWorkers settles a request of as many workers as there can be, all of them drawn,
// with the longest reports and full bonds: it is one update of the books.
func TestMostWorkers(t *testing.T) {
	o := newOffice(t, nil, nil)
	o.cfg.Among = func(string, settle.Hash, settle.Node) int { return market.MinDraw }
	o.cfg.Began = time.Unix(testNow-manyEpochs*int64(o.params.EpochSeconds), 0)
	o.reopen()
	b := o.cfg.Books
	const fund = 1 << 45
	must[int](t)(0, b.Deposit(solana.Payment{Message: hashOf("fund"), Signature: settle.Signature{1}, Amount: fund, Memo: fundEmission},
		Credit{Owner: keyOf("boss"), Action: settle.ActFund, Amount: fund}))
	must[int](t)(0, b.KeepReserve(fund))
	q, work := o.fullRequest()
	e := Ended{ID: q.ID, Tokens: settle.MaxTokens, Receipt: make([]byte, maxReports/2)}
	c := credited{work: work, parts: testParts, statements: [][]byte{make([]byte, maxReports/2)}}
	out := must[Settled](t)(o.conclude(e, c))
	if out.Emitted == 0 || out.Paid < out.Used*8/10 {
		t.Fatalf("%+v: not all that can be was paid", out)
	}
	var pays []workerPay
	must[int](t)(0, b.store.View(func(tx *kv.Tx) error { _, err := page{tx}.load(paidKey(q.ID), &pays); return err }))
	var paid, held settle.Amount
	for _, w := range pays {
		paid += w.Amount
		held += b.has(t, settle.Held, w.Worker) + b.has(t, settle.Bonded, w.Worker)
	}
	if len(pays) != settle.MaxWorkers || paid != out.Paid || held != out.Paid {
		t.Errorf("%d workers have %d, %d were paid", len(pays), held, out.Paid)
	}
	if k, ok, err := b.kept(q.ID); err != nil || !ok || len(k.Ended.Statements) != 1 {
		t.Errorf("its reports are not kept: %v", err)
	}
	o.reopen()
	if l := must[Ledger](t)(o.As(q.Entry).Ledger(t.Context(), q.Entry)); len(l.Vesting) != settle.MaxVesting || l.Requests != 1 {
		t.Errorf("%d parts, %d requests", len(l.Vesting), l.Requests)
	}
}
