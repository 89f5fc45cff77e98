package cashier

import (
	"errors"

	"kvasird/market"
	"kvasird/settle"
	"kvasird/settle/solana"
)

// askAgain is after how many seconds what the chain does not say yet is asked again.
const askAgain = 3

// refusals says what a caller can do about an error. An error of none of them is this
// machine's own.
var refusals = []struct {
	code Code
	errs []error
}{
	{CodeNotFound, []error{ErrNoQuote}},
	{CodeNotYet, []error{solana.ErrNotYet, solana.ErrUnknown, settle.ErrLease}},
	{CodeInvalid, []error{solana.ErrInvalid, ErrUsed, ErrMeant, settle.ErrKeyReused}},
	{CodeFunds, []error{settle.ErrFunds}},
	{CodeRights, []error{settle.ErrWrongPayer}},
	{CodeState, []error{settle.ErrState, ErrPaysQuote, settle.ErrExpired, settle.ErrOtherPayment, settle.ErrRunning, ErrSettled, settle.ErrStaleRef, market.ErrRefStale, market.ErrRefFuture}},
	{CodeBad, []error{settle.ErrQuote, settle.ErrCharge, settle.ErrRecord, settle.ErrReport, settle.ErrSignature, settle.ErrWeakKey, settle.ErrOtherJob,
		settle.ErrForeignEntry, settle.ErrOtherTokens, settle.ErrTooMany, settle.ErrTooMuchWork, settle.ErrLines}},
}

// explained makes an error one of a Service, if it is one.
func explained(field string, err error) error {
	var r *Refusal
	if err == nil || errors.As(err, &r) {
		return err
	}
	for _, c := range refusals {
		for _, e := range c.errs {
			if errors.Is(err, e) {
				r := &Refusal{Code: c.code, Field: field, Text: err.Error()}
				if c.code == CodeNotYet {
					r.Retry = askAgain
				}
				return r
			}
		}
	}
	return err
}
