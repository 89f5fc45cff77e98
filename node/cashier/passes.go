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
	// unbondedRequests may run all the same where that many tokens cost less than the least quotes do.
	unbondedRequests = 16
	runRetry         = 5 // seconds
)

// pass is the word of this desk that a request which runs is paid.
func (d *Desk) pass(r settle.Request) ([]byte, error) {
	q := r.Quote
	return settle.Pass{Network: d.cfg.Network, Request: q.ID, Signer: d.node, Entry: q.Entry, Model: q.Model,
		Tokens: q.PromptTokens + q.AnswerTokens, Expires: r.Lease}.Sign(d.cfg.Key)
}

// free is what requests of an entry without a bond may use at a time, and more what its bond adds
// to that. Error: a Refusal.
func (d *Desk) free(q settle.Quote) (free, bond settle.Amount, err error) {
	if free, err = settle.Charge(unbondedTokens, q.PriceRaw, q.Ref); err != nil {
		return 0, 0, explained("quote", err)
	}
	bond, err = d.cfg.Books.Balance(settle.Account{Kind: settle.Bonded, ID: q.Entry})
	return max(free, unbondedRequests*settle.MinQuote), bond, err
}

// mayEverRun refuses a quote that its entry's bond does not answer for when nothing else runs.
func (d *Desk) mayEverRun(q settle.Quote) error {
	free, bond, err := d.free(q)
	if err != nil {
		return err
	}
	err = settle.CheckReporter(0, q.Amount-min(q.Amount, free), bond)
	if errors.Is(err, settle.ErrReporterBond) {
		return refusal(CodeBad, "answer_tokens", "%v: this node could never run it: ask for less, or stake", err)
	}
	return err
}

// begin counts a request among those that run, and refuses it where that is more than the entry's bond
// answers for. What runs already counts once: counted says that it did before.
func (d *Desk) begin(r settle.Request) (counted bool, err error) {
	q := r.Quote
	free, bond, err := d.free(q)
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var runs settle.Amount
	for id, a := range d.runs[q.Entry] {
		if id != q.ID {
			runs += a // far below 2^64: each was paid
		}
	}
	err = settle.CheckReporter(runs-min(runs, free), q.Amount-min(q.Amount, free-min(runs, free)), bond)
	if errors.Is(err, settle.ErrReporterBond) {
		return false, &Refusal{Code: CodeBusy, Field: "quote", Text: err.Error() + ": wait for answers that run, or stake", Retry: runRetry}
	}
	if err != nil {
		return false, err
	}
	if d.runs[q.Entry] == nil {
		d.runs[q.Entry] = map[settle.QuoteID]settle.Amount{}
	}
	_, counted = d.runs[q.Entry][q.ID]
	d.runs[q.Entry][q.ID] = q.Amount
	return counted, nil
}

func (d *Desk) over(r settle.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.runs[r.Quote.Entry], r.Quote.ID)
	if len(d.runs[r.Quote.Entry]) == 0 {
		delete(d.runs, r.Quote.Entry)
	}
}

// shared is what was credited of a request that was settled. It is kept apart from its reports, which
// may be long, since whoever has been shown a request asks about it.
type shared struct {
	Tokens uint64
	Shares []settle.WorkShare // of those who are paid
}

func sharedKey(id settle.QuoteID) []byte { return append([]byte{'S'}, id[:]...) }

// Credits is part of Service.
func (t *Teller) Credits(_ context.Context, ids []settle.QuoteID) ([]WorkerCredit, error) {
	if len(ids) > MaxCredits {
		return nil, refusal(CodeBad, "ids", "%d requests, at most %d at a time", len(ids), MaxCredits)
	}
	asked := map[settle.QuoteID]bool{}
	for _, id := range ids {
		if asked[id] {
			return nil, refusal(CodeBad, "ids", "%s is there twice", id)
		}
		asked[id] = true
	}
	out := make([]WorkerCredit, len(ids))
	err := t.cfg.Books.store.View(func(tx *kv.Tx) error {
		for i, id := range ids {
			var c shared
			ok, err := page{tx}.load(sharedKey(id), &c)
			if err != nil {
				return err
			}
			out[i].Settled = ok
			for _, s := range c.Shares {
				if s.Worker == t.node {
					out[i].Tokens = uint64(s.Share) * c.Tokens // both are bounded: below 2^55
				}
			}
		}
		return nil
	})
	return out, err
}
