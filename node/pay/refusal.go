package pay

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

var errFull = errors.New("too many paid requests are not settled yet")

// soon is when to ask again where nobody says.
const soon = 2 * time.Second

// code is a refusal's code; empty for no error.
func code(err error) cashier.Code {
	var r *cashier.Refusal
	switch {
	case err == nil:
		return ""
	case errors.As(err, &r):
		return r.Code
	}
	return "unreachable"
}

// refused is the settlement's refusal, as a client of HTTP gets it; nil for no error.
func refused(err error) error {
	var r *cashier.Refusal
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &r):
		return &gateway.PaymentError{Status: http.StatusServiceUnavailable, Code: "settlement_unreachable", RetryAfter: soon,
			Message: fmt.Sprintf("the network's settlement does not answer: %v", err)}
	}
	e := &gateway.PaymentError{Status: http.StatusBadRequest, Code: string(r.Code), Param: r.Field, Message: r.Text, RetryAfter: time.Duration(r.Retry) * time.Second}
	switch r.Code {
	case cashier.CodeRights:
		e.Status = http.StatusForbidden
	case cashier.CodeNotFound:
		e.Status = http.StatusNotFound
	case cashier.CodeInvalid, cashier.CodeFunds:
		e.Status = http.StatusPaymentRequired
	case cashier.CodeNotYet, cashier.CodeBusy:
		e.Status, e.RetryAfter = http.StatusServiceUnavailable, max(e.RetryAfter, soon)
	case cashier.CodeState:
		e.Status = http.StatusConflict
		if e.RetryAfter > 0 { // it runs
			e.Status = http.StatusServiceUnavailable
		}
	}
	return e
}

// again says what the same call gets that cannot go on now.
func again(err error, r settle.Request) error {
	switch {
	case errors.Is(err, settle.ErrNotClaimed):
		return &gateway.PaymentError{Status: http.StatusForbidden, Code: "not_claimed", Param: headerSecret, Message: err.Error()}
	case errors.Is(err, errFull):
		return &gateway.PaymentError{Status: http.StatusServiceUnavailable, Code: "busy", RetryAfter: soon, Message: err.Error()}
	case errors.Is(err, settle.ErrRunning):
		return &gateway.PaymentError{Status: http.StatusServiceUnavailable, Code: "running", RetryAfter: soon, Message: err.Error()}
	case r.State > settle.Running:
		return answered(r)
	case errors.Is(err, settle.ErrOtherRequest):
		return conflict("other_request", "%v", err)
	}
	return conflict("other_payment", "%v", err)
}

func answered(r settle.Request) error {
	why := ""
	if r.Reason != "" {
		why = " (" + r.Reason + ")"
	}
	return conflict("already_answered", "quote %s was used: %d tokens were delivered%s, and what they did not cost is in the payer's balance; answers are not kept",
		r.Quote.ID, r.Tokens, why)
}

func conflict(code, format string, args ...any) error {
	return &gateway.PaymentError{Status: http.StatusConflict, Code: code, Message: fmt.Sprintf(format, args...)}
}

// bad refuses a header.
func bad(header, format string, args ...any) error {
	return &gateway.PaymentError{Status: http.StatusBadRequest, Code: "invalid_value", Param: header, Message: header + " " + fmt.Sprintf(format, args...)}
}
