package market

import (
	"errors"
	"fmt"

	"kvasird/settle"
)

// Errors of references.
var (
	ErrRefMissing = errors.New("no reference of the token in fiat units")
	ErrRefStale   = errors.New("the reference of the token in fiat units is too old to quote by")
	ErrRefFuture  = errors.New("the reference of the token in fiat units is of the future")
	ErrRefOrder   = errors.New("the reference of the token in fiat units is not newer than the last")
	ErrRefJump    = errors.New("the reference of the token in fiat units moves by more than a factor of 2 in 24 hours")
)

// Reference says what the token is worth. It is governed: there is no oracle.
type Reference struct {
	PerFiat settle.Amount // base units of the token for one fiat unit
	Set     uint64        // unix seconds from which it holds
}

// At says whether quotes may go by the reference at a time in unix seconds: warn is true from an
// age of 7 days, and from 30 days the error is ErrRefStale.
func (r Reference) At(now uint64) (warn bool, err error) {
	switch {
	case r.PerFiat == 0:
		return true, fmt.Errorf("market: %w: set one by governance", ErrRefMissing)
	case r.Set > now:
		return true, fmt.Errorf("market: %w: it holds in %d s", ErrRefFuture, r.Set-now)
	case now-r.Set >= settle.RefRefuseAfter:
		return true, fmt.Errorf("market: %w: %d days, at most 30: set it again by governance", ErrRefStale, (now-r.Set)/settle.Day)
	}
	return now-r.Set >= settle.RefWarnAfter, nil
}

// Follow says whether next may follow the references so far, oldest first. It compares with every
// value that held in the 24 hours before, so that many small changes gain nothing.
func Follow(history []Reference, next Reference) error {
	if next.PerFiat == 0 {
		return fmt.Errorf("market: %w: it may not be 0", ErrRefMissing)
	}
	for i := len(history) - 1; i >= 0; i-- {
		h := history[i]
		if i == len(history)-1 && next.Set <= h.Set {
			return fmt.Errorf("market: %w: set at %d, the last at %d", ErrRefOrder, next.Set, h.Set)
		}
		if lo, hi := min(h.PerFiat, next.PerFiat), max(h.PerFiat, next.PerFiat); hi-lo > lo {
			return fmt.Errorf("market: %w: from %s to %s base units: go there in several days", ErrRefJump, h.PerFiat, next.PerFiat)
		}
		if next.Set-h.Set >= settle.Day { // what held before it had ended by then
			break
		}
	}
	return nil
}
