package settle

import (
	"errors"
	"fmt"
)

// Job is what the settlement itself knows about a request: nothing in it comes from who
// reports.
type Job struct {
	Network Hash
	Request Request
	Parts   []Part          // of the model's manifest
	Seconds uint64          // since it ran
	Rates   map[Node]uint64 // best demonstrated tokens per 1000 s, canaries included
}

// Refusals of what a reporter claims.
var (
	ErrUnpaid       = errors.New("the request is not paid")
	ErrForeignEntry = errors.New("the receipt is neither by the quote's entry node nor by its payer")
	ErrOtherJob     = errors.New("the report is about another request or network")
	ErrOtherTokens  = errors.New("the request ended with another number of tokens")
	ErrTooFast      = errors.New("more work than the worker has shown it can do in that time")
	ErrReporterBond = errors.New("the reporter's unsettled claims are above its bond")
)

// Credit joins the receipt with the statements of its workers, by worker: of each line
// the lesser of the two counts, and a worker without a statement has nothing. Errors:
// ErrUnpaid, ErrOtherJob, ErrForeignEntry, ErrTooMany, ErrOtherTokens, ErrTooMuchWork,
// ErrTooFast, ErrParts, ErrLines.
func (j Job) Credit(receipt Report, statements []Report) ([]Work, error) {
	if err := j.checkReceipt(receipt); err != nil {
		return nil, err
	}
	stated := map[unitKey]uint64{}
	for _, s := range statements {
		if s.Role != Statement || s.Request != receipt.Request || s.Network != j.Network {
			return nil, fmt.Errorf("%w: a %s of %s", ErrOtherJob, s.Role, s.Signer)
		}
		for k, u := range s.units() {
			stated[k] = max(stated[k], u)
		}
	}
	var work []Work
	for _, w := range receipt.Work {
		credit := Work{Worker: w.Worker}
		for _, l := range w.Lines {
			if u := min(l.Units, stated[unitKey{w.Worker, l.Part}]); u > 0 {
				credit.Lines = append(credit.Lines, Line{l.Part, u})
			}
		}
		if len(credit.Lines) > 0 {
			work = append(work, credit)
		}
	}
	return work, nil
}

func (j Job) checkReceipt(r Report) error {
	q := j.Request.Quote
	switch {
	case j.Request.State < Paid || j.Request.State == Credit:
		return fmt.Errorf("%w: it is %s", ErrUnpaid, j.Request.State)
	case r.Role != Receipt || r.Request != q.ID || r.Network != j.Network:
		return fmt.Errorf("%w: a %s about %s", ErrOtherJob, r.Role, r.Request)
	case r.Signer != q.Entry && r.Signer != j.Request.Payer:
		return fmt.Errorf("%w: by %s", ErrForeignEntry, r.Signer)
	case r.Tokens > q.PromptTokens+q.AnswerTokens:
		return fmt.Errorf("%w: %d, at most %d", ErrTooMany, r.Tokens, q.PromptTokens+q.AnswerTokens)
	case j.Request.State > Running && r.Tokens != j.Request.Tokens:
		return fmt.Errorf("%w: %d, the receipt says %d", ErrOtherTokens, j.Request.Tokens, r.Tokens)
	}
	if _, err := PartShares(j.Parts); err != nil {
		return err
	}
	if err := checkWork(j.Parts, r.Tokens, r.Work); err != nil {
		return err
	}
	for _, w := range r.Work {
		for _, l := range w.Lines {
			if err := j.checkRate(w.Worker, l.Units, j.Parts[l.Part].PerToken); err != nil {
				return err
			}
		}
	}
	return nil
}

// MostUnits is how many units of a part a worker can have done in Seconds, at 1.25 times the
// rate that it has shown. Error: that does not fit 64 bits.
func (j Job) MostUnits(worker Node, perToken uint64) (uint64, error) {
	shown, _, err := mulDiv(j.Rates[worker], ReporterRatePPM, PPM)
	if err != nil {
		return 0, err
	}
	most, _, err := mulDiv(shown, max(j.Seconds, 1)*perToken, 1000)
	if err != nil { // so fast that it does not fit: no limit
		return ^uint64(0), nil
	}
	return most, nil
}

func (j Job) checkRate(worker Node, units, perToken uint64) error {
	most, err := j.MostUnits(worker, perToken)
	if err == nil && units > most {
		err = fmt.Errorf("%w: %s, %d units, at most %d in %d s", ErrTooFast, worker, units, most, j.Seconds)
	}
	return err
}

// CheckReporter refuses another claim of a reporter whose unsettled ones, in base units,
// would be above ten times its bond: so much a stolen key can take at most. Error:
// ErrReporterBond.
func CheckReporter(unsettled, claim, bond Amount) error {
	sum, err := unsettled.Add(claim)
	most, _, tooMuch := mulDiv(uint64(bond), ReporterBonds, 1)
	if err != nil || tooMuch == nil && sum > Amount(most) {
		return fmt.Errorf("%w: %d + %d, at most %d", ErrReporterBond, unsettled, claim, most)
	}
	return nil
}

// Timing is when a receipt came.
type Timing uint8

// The timings. On time: paid, counted and emitted. Late: paid from the escrow, neither
// counted nor emitted. Too late: the escrow goes back to the payer.
const (
	OnTime Timing = iota + 1
	Late
	TooLate
)

// Timing says when a receipt comes for a request that ran in an epoch. Error: ErrPast.
func (p Params) Timing(ran, now uint64) (Timing, error) {
	switch {
	case now < ran:
		return 0, fmt.Errorf("%w: epoch %d, the request ran in %d", ErrPast, now, ran)
	case now-ran <= p.OnTimeEpochs:
		return OnTime, nil
	case now-ran <= p.LateEpochs:
		return Late, nil
	}
	return TooLate, nil
}

// Window is how many tokens are computed for somebody who has not shown that they are paid, by how
// many of its requests were settled: the most that it can take for nothing.
func (p Params) Window(settled uint64) uint64 {
	if settled < NewWalletRequests {
		return p.VoucherWindowNew
	}
	return p.VoucherWindow
}
