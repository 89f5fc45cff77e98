package pay

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"kvasird/node/cashier"
	"kvasird/settle"
)

// Times of a report.
const (
	statementTime = 20 * time.Second // for workers to sign, and those who carried to ask theirs
	tryTime       = 20 * time.Second // for the settlement to answer
	firstPause    = time.Second      // then twice that, up to lastPause
	lastPause     = 30 * time.Second
	reportTime    = 10 * time.Minute // then the settlement's lease refunds the payer
	grace         = 10 * time.Second // for open requests when the door closes
	lookEvery     = 20 * time.Millisecond
	maxReason     = 200 // bytes of why a request failed
)

// ended is a request that nothing more is sent of.
type ended struct {
	quote    settle.Quote
	tokens   uint64 // delivered
	computed uint64 // at least tokens
	failed   error
}

// Run reports requests that ended until ctx ends, then for a short while those that are
// open still: the gateway may end after ctx, and the way to the settlement has to.
func (d *Door) Run(ctx context.Context) error {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var reports sync.WaitGroup
	start := func(e ended) {
		reports.Go(func() {
			defer d.leave(e.quote.ID)
			d.report(work, e)
		})
	}
	for ctx.Err() == nil {
		select {
		case e := <-d.ended:
			start(e)
		case <-ctx.Done():
		}
	}
	last, look := time.After(grace), time.NewTicker(lookEvery)
	defer look.Stop()
	for d.opened() > 0 {
		select {
		case e := <-d.ended:
			start(e)
		case <-look.C:
		case <-last:
			cancel()
			reports.Wait()
			return nil
		}
	}
	reports.Wait()
	return nil
}

// report tells the settlement how a request ended, until it has heard it.
func (d *Door) report(ctx context.Context, e ended) {
	ctx, cancel := context.WithTimeout(ctx, reportTime)
	defer cancel()
	end, err := d.evidence(ctx, e)
	for pause := firstPause; err == nil; pause = min(2*pause, lastPause) {
		if err = d.tell(ctx, end); err == nil {
			return
		}
		if !passing(err) {
			break
		}
		select {
		case <-time.After(pause):
			err = nil
		case <-ctx.Done():
		}
	}
	d.cfg.Logger.Error("a paid request could not be reported: its payer is refunded, nobody is paid for it", "quote", e.quote.ID.String(), "error", err)
}

func (d *Door) tell(ctx context.Context, end cashier.Ended) error {
	ctx, cancel := context.WithTimeout(ctx, tryTime)
	defer cancel()
	_, err := d.cfg.Settlement.End(ctx, end)
	return err
}

// passing says whether the settlement may hear the same later.
func passing(err error) bool {
	var r *cashier.Refusal
	return !errors.As(err, &r) || r.Code == cashier.CodeNotYet || r.Code == cashier.CodeBusy
}

// evidence is the end of a request with the receipt of this node and the statements of
// those who worked for it. Nothing delivered needs none.
func (d *Door) evidence(ctx context.Context, e ended) (cashier.Ended, error) {
	end := cashier.Ended{ID: e.quote.ID, Tokens: min(e.tokens, e.quote.PromptTokens+e.quote.AnswerTokens)}
	if e.failed != nil {
		end.Failed = e.failed.Error()
		end.Failed = strings.ToValidUTF8(end.Failed[:min(len(end.Failed), maxReason)], "") // a cut may part a character
	}
	if d.cfg.Meter != nil && e.computed > end.Tokens {
		d.cfg.Meter.Drop(e.quote.Model, e.computed-end.Tokens) // which pays no other request
	}
	if end.Tokens == 0 {
		if end.Failed == "" {
			end.Failed = "nothing was delivered"
		}
		return end, nil
	}
	terms, err := d.termsOf(ctx)
	if err != nil {
		return end, err
	}
	receipt := settle.Report{Role: settle.Receipt, Network: terms.Network, Request: e.quote.ID, Signer: d.node, Seq: 1, Tokens: end.Tokens}
	if d.cfg.Meter != nil {
		asking, cancel := context.WithTimeout(ctx, statementTime)
		receipt.Work, end.Statements = d.cfg.Meter.Report(asking, e.quote.Model, e.quote.ID, end.Tokens)
		cancel()
	}
	end.Receipt, err = receipt.Sign(d.cfg.Key)
	return end, err
}
