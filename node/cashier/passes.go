package cashier

import (
	"context"
	"errors"

	"kvasird/node/kv"
	"kvasird/settle"
)

const (
	// MaxCredits is of how many requests one call of Credits asks.
	MaxCredits = 256
	// unbondedTokens is what requests of an entry without a bond may use at a time. An entry
	// gets a pass for what runs, and may say that nothing was delivered: what others computed by
	// then is the most that it, or a thief of its key, has for nothing before they know.
	unbondedTokens = 1 << 20
	runRetry       = 5 // seconds
)

// pass is the word of this desk that a request which runs is paid.
func (d *Desk) pass(r settle.Request) ([]byte, error) {
	q := r.Quote
	return settle.Pass{Network: d.cfg.Network, Request: q.ID, Signer: d.node, Entry: q.Entry, Model: q.Model,
		Tokens: q.PromptTokens + q.AnswerTokens, Expires: r.Lease}.Sign(d.cfg.Key)
}

// mayRun refuses to start more than the entry's bond answers for. A request that runs already
// counts once.
func (d *Desk) mayRun(r settle.Request) error {
	q := r.Quote
	bond, err := d.cfg.Books.Balance(settle.Account{Kind: settle.Bonded, ID: q.Entry})
	if err != nil {
		return err
	}
	free, err := settle.Charge(unbondedTokens, q.PriceRaw, q.Ref)
	if err != nil {
		return explained("quote", err)
	}
	var runs settle.Amount
	d.mu.Lock()
	for id, a := range d.runs[q.Entry] {
		if id != q.ID {
			runs += a // far below 2^64: each was paid
		}
	}
	d.mu.Unlock()
	err = settle.CheckReporter(runs-min(runs, free), q.Amount-min(q.Amount, free-min(runs, free)), bond)
	if errors.Is(err, settle.ErrReporterBond) {
		return &Refusal{Code: CodeBusy, Field: "quote", Text: err.Error() + ": wait for answers that run, or stake", Retry: runRetry}
	}
	return err
}

func (d *Desk) begun(r settle.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.runs[r.Quote.Entry] == nil {
		d.runs[r.Quote.Entry] = map[settle.QuoteID]settle.Amount{}
	}
	d.runs[r.Quote.Entry][r.Quote.ID] = r.Quote.Amount
}

func (d *Desk) over(r settle.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.runs[r.Quote.Entry], r.Quote.ID)
	if len(d.runs[r.Quote.Entry]) == 0 {
		delete(d.runs, r.Quote.Entry)
	}
}

// Credits is part of Service.
func (t *Teller) Credits(_ context.Context, ids []settle.QuoteID) ([]WorkerCredit, error) {
	if len(ids) > MaxCredits {
		return nil, refusal(CodeBad, "ids", "%d requests, at most %d at a time", len(ids), MaxCredits)
	}
	out := make([]WorkerCredit, len(ids))
	err := t.cfg.Books.store.View(func(tx *kv.Tx) error {
		for i, id := range ids {
			var k kept
			ok, err := page{tx}.load(keptKey(id), &k)
			if err != nil {
				return err
			}
			out[i].Settled = ok
			for _, s := range k.Shares {
				if s.Worker == t.node {
					out[i].Tokens = uint64(s.Share) * k.Ended.Tokens // both are bounded: below 2^55
				}
			}
		}
		return nil
	})
	return out, err
}
