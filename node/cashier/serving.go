package cashier

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"kvasird/market"
	"kvasird/node/kv"
	"kvasird/settle"
)

// Limits of what ends a request: with all workers' bonds they fit one update of the books.
const (
	maxReports    = 512 << 10 // bytes
	maxReason     = 200       // bytes, of why it failed
	shownRequests = 16        // of a node in two days, from which on its rate bounds it
)

// Run is part of Service.
func (t *Teller) Run(_ context.Context, id settle.QuoteID) (Started, error) {
	r, err := t.mine(id)
	if err != nil {
		return Started{}, err
	}
	if r.State == settle.Paid {
		if err := t.keepParts(r.Quote.Model, t.node); err != nil {
			return Started{}, err
		}
	}
	counted, err := t.begin(r) // before it runs: many may be started at a time
	if err != nil {
		return Started{}, err
	}
	now := t.cfg.Books.seconds()
	asked := r
	r, err = t.cfg.Books.Run(id, now+runsFor(r.Quote), t.moment().Epoch)
	if err != nil && !counted && !errors.Is(err, settle.ErrRunning) {
		t.over(asked)
	}
	if errors.Is(err, settle.ErrRunning) {
		return Started{}, &Refusal{Code: CodeState, Field: "quote", Text: err.Error(), Retry: r.Lease - min(r.Lease, now)}
	}
	if err != nil {
		return Started{}, explained("quote", err)
	}
	cut("runs")
	pass, err := t.pass(r)
	return Started{r, t.seed(r), pass}, err
}

// seed is what replicas are drawn by: the same for a request whenever it is asked for.
func (d *Desk) seed(r settle.Request) settle.Hash {
	return sha256.Sum256(slices.Concat([]byte("kvasir draw seed 1\n"), d.secret[:], r.Quote.ID[:], r.Message[:]))
}

// End is part of Service.
func (t *Teller) End(_ context.Context, e Ended) (Settled, error) {
	r, err := t.mine(e.ID)
	if err != nil {
		return Settled{}, err
	}
	if old, ok, err := t.cfg.Books.kept(e.ID); err != nil || ok {
		return old.again(e), errors.Join(err, old.same(e))
	}
	if r.State != settle.Running && r.State != settle.Paid {
		return Settled{}, refusal(CodeState, "quote", "the request is %s: only what runs can end", r.State)
	}
	if err := checkEnded(e); err != nil {
		return Settled{}, err
	}
	work, err := t.credit(r, e)
	if err != nil {
		return Settled{}, err
	}
	cut("ends")
	out, err := t.conclude(e, work)
	cut("ended")
	if err == nil && out.Used > 0 {
		if err := t.issue(r.Quote.Model); err != nil {
			t.cfg.Logger.Error("the price of a model that was paid for is not written down, and will be when it is asked for", "model", r.Quote.Model, "error", err)
		}
	}
	if errors.Is(err, ErrSettled) { // another call was faster
		if old, ok, err := t.cfg.Books.kept(e.ID); err != nil || ok {
			return old.again(e), errors.Join(err, old.same(e))
		}
	}
	return out, explained("quote", err)
}

func checkEnded(e Ended) error {
	size := len(e.Receipt)
	for _, s := range e.Statements {
		size += len(s)
	}
	switch {
	case len(e.Failed) > maxReason:
		return refusal(CodeBad, "failed", "a reason of %d bytes, at most %d", len(e.Failed), maxReason)
	case len(e.Statements) > settle.MaxWorkers:
		return refusal(CodeBad, "statements", "%d statements, at most %d", len(e.Statements), settle.MaxWorkers)
	case size > maxReports:
		return refusal(CodeBad, "statements", "reports of %d bytes, at most %d", size, maxReports)
	case e.Tokens > 0 && len(e.Receipt) == 0:
		return refusal(CodeBad, "receipt", "%d tokens without a receipt: one of no tokens needs none", e.Tokens)
	case len(e.Receipt) == 0 && len(e.Statements) > 0:
		return refusal(CodeBad, "statements", "%d statements without a receipt: nothing can be paid by them", len(e.Statements))
	case e.Tokens == 0 && e.Failed == "":
		return refusal(CodeBad, "tokens", "no tokens were delivered, and nothing failed")
	}
	return nil
}

// credited is the work of a request that is paid.
type credited struct {
	work       []settle.Work
	parts      []settle.Part // of its model
	statements [][]byte      // that work was credited by
}

// credit joins the reports. Nothing in them says more than both sides signed, nor more
// than the nodes have shown that they can do.
func (t *Teller) credit(r settle.Request, e Ended) (credited, error) {
	if len(e.Receipt) == 0 {
		return credited{}, nil
	}
	parts, err := t.parts(r.Quote.Model, t.node)
	if err != nil {
		return credited{}, fmt.Errorf("model %s cannot be settled: %w", r.Quote.Model, err)
	}
	c := credited{parts: parts}
	receipt, err := settle.ParseReport(e.Receipt)
	if err != nil {
		return c, explained("receipt", err)
	}
	if receipt.Tokens != e.Tokens {
		return c, refusal(CodeBad, "receipt", "it says %d tokens, and %d were delivered", receipt.Tokens, e.Tokens)
	}
	if e.Tokens == 0 && len(receipt.Work) > 0 {
		return c, refusal(CodeBad, "receipt", "it has work, and no tokens")
	}
	statements, err := stated(receipt, e.Statements)
	if err != nil {
		return c, err
	}
	job := settle.Job{Network: t.cfg.Network, Request: r, Parts: c.parts, Seconds: t.ran(r)}
	if job.Rates, err = t.rates(r.Quote.Model, receipt.Work); err != nil {
		return c, err
	}
	if receipt.Work, err = bounded(job, receipt.Work); err != nil {
		return c, explained("receipt", err)
	}
	c.work, err = job.Credit(receipt, statements)
	c.statements = proofs(c.work, receipt, statements, e.Statements)
	return c, explained("receipt", err)
}

// stated reads the statements of a receipt's workers, of each one at most. Error: a Refusal.
func stated(receipt settle.Report, raw [][]byte) (all []settle.Report, err error) {
	missing := map[settle.Node]bool{}
	for _, w := range receipt.Work {
		missing[w.Worker] = true
	}
	for i, b := range raw {
		s, err := settle.ParseReport(b)
		switch {
		case err != nil:
			return nil, explained("statements", fmt.Errorf("statement %d: %w", i, err))
		case s.Role != settle.Statement:
			return nil, refusal(CodeBad, "statements", "statement %d is a %s", i, s.Role)
		case !missing[s.Signer]:
			return nil, refusal(CodeBad, "statements", "statement %d: %s is no worker of the receipt, or has stated already", i, s.Signer)
		}
		delete(missing, s.Signer)
		all = append(all, s)
	}
	return all, nil
}

// proofs are the statements that work was credited by, and that say no more parts than
// the receipt does, whose size its tokens bound.
func proofs(work []settle.Work, receipt settle.Report, statements []settle.Report, raw [][]byte) (all [][]byte) {
	lines := map[settle.Node]int{}
	for _, w := range receipt.Work {
		lines[w.Worker] = len(w.Lines)
	}
	paid := map[settle.Node]bool{}
	for _, w := range work {
		paid[w.Worker] = true
	}
	for i, s := range statements {
		if paid[s.Signer] && len(s.Work[0].Lines) <= lines[s.Signer] {
			all = append(all, raw[i])
		}
	}
	return all
}

// ran is for how many seconds a request has been running: its lease was given at the start.
func (t *Teller) ran(r settle.Request) uint64 {
	began := r.Lease - min(r.Lease, runsFor(r.Quote))
	return t.cfg.Books.seconds() - min(began, t.cfg.Books.seconds())
}

// Rates of nodes: tokens in 1000 s that pass a part of theirs. A node's bounds it once it
// was paid for some requests: the first ones say too little, since a prompt passes much
// faster than an answer. What is beyond the bound is not paid, and shows 1.25 times the
// rate of before, so that a node which became faster is soon paid in full.
type shown struct {
	Day          uint64
	Best, Before uint64 // of that day, and of the one before
	Count        uint64 // requests of both, at most
}

const unbounded = math.MaxUint64 / 4 // so that 1.25 times as much fits

func (s shown) at(day uint64) shown {
	switch {
	case day == s.Day+1:
		return shown{Day: day, Before: s.Best, Count: s.Count}
	case day > s.Day:
		return shown{Day: day}
	}
	return s
}

func shownKey(model settle.Hash, n settle.Node) []byte {
	return slices.Concat([]byte{'h'}, model[:], n[:])
}

func (t *Teller) rates(model string, work []settle.Work) (map[settle.Node]uint64, error) {
	id, err := modelOf(model)
	if err != nil {
		return nil, err
	}
	rates, day := map[settle.Node]uint64{}, t.cfg.Books.seconds()/settle.Day
	err = t.cfg.Books.store.View(func(tx *kv.Tx) error {
		for _, w := range work {
			var s shown
			if _, err := (page{tx}).load(shownKey(id, w.Worker), &s); err != nil {
				return err
			}
			rates[w.Worker] = unbounded
			if s = s.at(day); s.Count >= shownRequests {
				rates[w.Worker] = max(s.Best, s.Before)
			}
		}
		return nil
	})
	return rates, err
}

// bounded cuts work to what its nodes can do, as settle.Job.Credit has it, which refuses
// all where one line is beyond. Error: settle.ErrLines.
func bounded(j settle.Job, work []settle.Work) (all []settle.Work, err error) {
	for _, w := range work {
		cut := settle.Work{Worker: w.Worker}
		for _, l := range w.Lines {
			if int64(l.Part) >= int64(len(j.Parts)) {
				return nil, fmt.Errorf("%w: part %d of %d", settle.ErrLines, l.Part, len(j.Parts))
			}
			most, err := j.MostUnits(w.Worker, j.Parts[l.Part].PerToken)
			if err != nil {
				return nil, err
			}
			if l.Units = min(l.Units, most); l.Units > 0 {
				cut.Lines = append(cut.Lines, l)
			}
		}
		all = append(all, cut)
	}
	return all, nil
}

// kept is what stays of a request that was settled: of its reports those by which work
// was credited, and the hash of all.
type kept struct {
	Ended   Ended
	Reports settle.Hash
	Settled Settled
}

func keptOf(e Ended, c credited, s Settled) kept {
	h := sha256.New()
	for _, b := range slices.Concat([][]byte{e.Receipt}, e.Statements) {
		fmt.Fprintf(h, "%d:", len(b))
		h.Write(b)
	}
	e.Statements = c.statements
	if len(c.work) == 0 {
		e.Receipt, e.Statements = nil, nil
	}
	return kept{e, settle.Hash(h.Sum(nil)), s}
}

func keptKey(id settle.QuoteID) []byte { return append([]byte{'k'}, id[:]...) }

func (b *Books) kept(id settle.QuoteID) (k kept, ok bool, err error) {
	err = b.store.View(func(tx *kv.Tx) (err error) {
		ok, err = page{tx}.load(keptKey(id), &k)
		return err
	})
	return k, ok, err
}

// same refuses another end than the one that was settled.
func (k kept) same(e Ended) error {
	if k.Ended.Tokens != e.Tokens {
		return refusal(CodeState, "tokens", "the request was settled with %d tokens: %s", k.Ended.Tokens, k.Ended.Failed)
	}
	return nil
}

func (k kept) again(e Ended) Settled {
	if k.Ended.Tokens != e.Tokens {
		return Settled{}
	}
	return k.Settled
}

// conclude ends a request and settles it in one update, with all that is kept of it.
// Errors: ErrSettled, settle.ErrState, and those of settle.Params.SettleRequest.
func (d *Desk) conclude(e Ended, c credited) (Settled, error) {
	m := d.moment()
	if len(c.work) == 0 { // then nothing is divided, and no model is needed
		c.parts = []settle.Part{{Weight: 1, PerToken: 1}}
	}
	var out Settled
	r, err := d.cfg.Books.step(e.ID, func(pg page, r settle.Request) (settle.Request, []settle.Entry, error) {
		if err := pg.unsettled(e.ID); err != nil {
			return r, nil, err
		}
		p, _, _ := d.cfg.Governor.Params(r.Started)
		timing, err := p.Timing(r.Started, max(m.Epoch, r.Started))
		if err != nil {
			return r, nil, err
		}
		seconds := d.cfg.Books.seconds() - min(d.cfg.Books.seconds(), r.Lease-min(r.Lease, runsFor(r.Quote)))
		if e.Failed == "" {
			r, err = r.Finish(e.Tokens)
		} else {
			r, err = r.Fail(e.Tokens, e.Failed)
		}
		if err != nil {
			return r, nil, err
		}
		among := d.among(r, c.work)
		s := settle.Settling{Job: settle.Job{Parts: c.parts}, Work: c.work, Timing: timing, Epoch: m.Epoch, Drawn: map[settle.Node]bool{}}
		for i, w := range c.work {
			s.Drawn[w.Worker] = among[i] >= market.MinDraw
			s.Counted = s.Counted || s.Drawn[w.Worker]
		}
		next, entries, o, err := d.cfg.Books.settle(pg, r, p, s)
		if err != nil {
			return r, nil, err
		}
		out = settledOf(r, o)
		return next, entries, pg.keep(keeping{e, out, r, c, among, seconds, m.Epoch, timing, d.cfg.Among != nil}, d.cfg.Books.seconds())
	})
	if err == nil {
		d.over(r)
	}
	return out, err
}

// among says of how many replicas each worker was drawn: an entry draws for its own backbone
// alone, and that does the model's first part.
func (d *Desk) among(r settle.Request, work []settle.Work) []int {
	all := make([]int, len(work))
	draws := slices.ContainsFunc(work, func(w settle.Work) bool { return w.Worker == r.Quote.Entry && w.Lines[0].Part == 0 })
	for i, w := range work {
		if d.cfg.Among != nil && draws {
			all[i] = d.cfg.Among(r.Quote.Model, d.seed(r), w.Worker)
		}
	}
	return all
}

func settledOf(r settle.Request, o settle.Outcome) Settled {
	s := Settled{Refund: o.Split.Refund, Fee: o.Split.Fee, Emitted: o.Emitted}
	s.Used = min(r.Paid, r.Quote.Amount) - o.Split.Refund
	for _, w := range o.Workers {
		s.Paid += w.Pay + w.Emission
	}
	return s
}

// keeping is what page.keep writes down.
type keeping struct {
	ended   Ended
	settled Settled
	request settle.Request
	credited
	among   []int
	seconds uint64
	epoch   uint64
	timing  settle.Timing
	drawn   bool // it is known whether workers were drawn
}

// keep writes down what a settlement leaves for the next ones: reports, fees, rates, and
// what moves the price.
func (p page) keep(k keeping, now uint64) error {
	fees, err := p.amount(feesKey(k.epoch))
	if err != nil {
		return err
	}
	if fees, err = fees.Add(k.settled.Fee); err != nil {
		return err
	}
	credits := shared{Tokens: k.ended.Tokens}
	if len(k.work) > 0 {
		if credits.Shares, _, err = settle.Shares(k.parts, k.request.Tokens, k.work); err != nil {
			return err
		}
	}
	errs := []error{p.save(keptKey(k.ended.ID), keptOf(k.ended, k.credited, k.settled)), p.save(sharedKey(k.ended.ID), credits), p.putAmount(feesKey(k.epoch), fees)}
	if len(k.work) == 0 {
		return errors.Join(errs...)
	}
	model, err := modelOf(k.request.Quote.Model)
	if err != nil {
		return err
	}
	errs = append(errs, p.putAmount(lastPaidKey(model), settle.Amount(now)))
	for _, w := range k.work {
		errs = append(errs, p.show(model, w, k.parts, k.seconds, now/settle.Day))
	}
	if k.drawn && k.timing == settle.OnTime {
		errs = append(errs, p.done(model, k, credits.Shares))
	}
	return errors.Join(errs...)
}

// show notes the rate of a node.
func (p page) show(model settle.Hash, w settle.Work, parts []settle.Part, seconds, day uint64) error {
	var s shown
	if _, err := p.load(shownKey(model, w.Worker), &s); err != nil {
		return err
	}
	s = s.at(day)
	for _, l := range w.Lines {
		s.Best = max(s.Best, mulDiv(l.Units, 1000, max(seconds, 1)*parts[l.Part].PerToken))
	}
	s.Count++
	return p.save(shownKey(model, w.Worker), s)
}

// done notes what moves the price of the next epoch.
func (p page) done(model settle.Hash, k keeping, shares []settle.WorkShare) error {
	w := done{Payer: k.request.Payer, Tokens: k.request.Tokens, Seconds: k.seconds}
	for _, s := range shares {
		i := slices.IndexFunc(k.work, func(w settle.Work) bool { return w.Worker == s.Worker })
		w.Workers = append(w.Workers, doneBy{s.Worker, uint64(s.Share), k.among[i]})
	}
	return p.save(append(modelKey('u', model, k.epoch+1), k.ended.ID[:]...), w)
}

// mulDiv is a·b/c, or the greatest number where that does not fit.
func mulDiv(a, b, c uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi >= c {
		return math.MaxUint64
	}
	q, _ := bits.Div64(hi, lo, c)
	return q
}
