package settle

import (
	"errors"
	"fmt"
)

// revenueSpan is how far back the revenue that tapers the emission is averaged.
const revenueSpan = 30 * Day

// Reserve is the pre-minted emission of a network: what was put aside, what is left, and
// the taper, which only falls. Always what was emitted + Remaining ≤ Total.
type Reserve struct {
	Total, Remaining Amount
	TaperPPM         uint64
	Revenue          Amount // average fees of an epoch
}

// ErrReserve refuses a reserve that would grow or go below zero.
var ErrReserve = errors.New("the emission reserve only falls")

// NewReserve is a reserve of which nothing was emitted.
func NewReserve(total Amount) Reserve { return Reserve{Total: total, Remaining: total, TaperPPM: PPM} }

// EndEpoch takes the fees of one epoch into the average and lowers the taper to
// TaperRevenue / average when that is less.
func (p Params) EndEpoch(r Reserve, fees Amount) (Reserve, error) {
	span := max(uint64(revenueSpan), p.EpochSeconds)
	gone, err := part(r.Revenue, p.EpochSeconds, span, down)
	if err != nil {
		return r, err
	}
	come, err := part(fees, p.EpochSeconds, span, up)
	if err != nil {
		return r, err
	}
	if r.Revenue, err = (r.Revenue - gone).Add(come); err != nil {
		return r, err
	}
	if uint64(r.Revenue) > p.TaperRevenue {
		t, _, err := mulDiv(p.TaperRevenue, PPM, uint64(r.Revenue))
		if err != nil {
			return r, err
		}
		r.TaperPPM = min(r.TaperPPM, t)
	}
	return r, nil
}

// Emission is what a request with that fee may add to the pay of its workers, rounded
// down at every step: below the fee, and never more than what is left.
func (p Params) Emission(r Reserve, fee Amount) (Amount, error) {
	if r.Total == 0 {
		return 0, nil
	}
	e, err := part(fee, p.EmissionPPM, PPM, down)
	if err != nil {
		return 0, err
	}
	if e, err = part(e, r.TaperPPM, PPM, down); err != nil {
		return 0, err
	}
	if e, err = part(e, uint64(r.Remaining), uint64(r.Total), down); err != nil {
		return 0, err
	}
	return min(e, r.Remaining), nil
}

// Pay takes what was really emitted out of the reserve. Error: ErrReserve.
func (r Reserve) Pay(sum Amount) (Reserve, error) {
	if sum > r.Remaining {
		return r, fmt.Errorf("%w: %d of %d", ErrReserve, sum, r.Remaining)
	}
	r.Remaining -= sum
	return r, nil
}

// Lower sets a smaller total, as governance may: what is left falls by the difference,
// at most to nothing. Error: ErrReserve.
func (r Reserve) Lower(total Amount) (Reserve, error) {
	if total > r.Total {
		return r, fmt.Errorf("%w: a total of %d after %d", ErrReserve, total, r.Total)
	}
	r.Remaining -= min(r.Remaining, r.Total-total)
	r.Total = total
	return r, nil
}
