package market

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"kvasird/settle"
)

const (
	// MinDraw is the fewest replicas among which the hash of a payment draws one so that the work
	// counts: a payer who can tell who works for it could push the price for everybody.
	MinDraw = 3
	// MaxShown and MaxPayers bound what a Usage remembers.
	MaxShown  = 1 << 16
	MaxPayers = 1 << 20

	showSeconds     = settle.Day // a demonstrated rate counts for so long
	milliPerShare   = 1_000_000  // token · share in ppb, in thousandths of a token
	maxFutureEpochs = 1 << 10
)

// Errors of a Usage.
var (
	ErrUsageClosed = errors.New("epoch is closed")
	ErrUsageFull   = errors.New("more than a load can hold")
	ErrWork        = errors.New("work that no request asks for")
)

// Work is what one settled receipt credits to one node.
type Work struct {
	Payer  settle.Wallet
	Tokens uint64
	Share  uint64 // of the model that the node computed, in 1/10⁹
	Among  int    // replicas that the hash of the payment drew from; 0: the payer chose
}

// Usage collects, for one model, what the load of an epoch is made of. Only settled receipts and
// canaries go in, in any order: the load does not depend on it. What a node announces can lower
// its capacity and never raise it. Not safe for concurrent use.
type Usage struct {
	closed uint64                              // the last epoch that was closed
	work   map[uint64]map[settle.Wallet]uint64 // by epoch, thousandths of a token
	payers int
	shown  map[string]map[uint64]uint64 // node, epoch: best rate, in thousandths of a token per second
	heard  map[uint64]bool
}

// NewUsage starts after an epoch.
func NewUsage(after uint64) *Usage {
	return &Usage{closed: after, work: map[uint64]map[settle.Wallet]uint64{},
		shown: map[string]map[uint64]uint64{}, heard: map[uint64]bool{}}
}

func (u *Usage) open(epoch uint64) error {
	if epoch <= u.closed {
		return fmt.Errorf("market: epoch %d: %w: %d was the last; late work is paid, and moves no price", epoch, ErrUsageClosed, u.closed)
	}
	if epoch-u.closed > maxFutureEpochs {
		return fmt.Errorf("market: epoch %d: %w: %d was the last that was closed", epoch, ErrUsageFull, u.closed)
	}
	return nil
}

// Show notes the rate, in thousandths of a token per second through the whole model, that a node
// demonstrated in an epoch: by receipts, or by a canary.
func (u *Usage) Show(epoch uint64, node string, rate uint64) error {
	if err := u.open(epoch); err != nil {
		return err
	}
	rates := u.shown[node]
	if rates == nil {
		if len(u.shown) >= MaxShown {
			return fmt.Errorf("market: %w: %d nodes", ErrUsageFull, MaxShown)
		}
		rates = map[uint64]uint64{}
		u.shown[node] = rates
	}
	rates[epoch] = max(rates[epoch], rate)
	u.heard[epoch] = true
	return nil
}

// Count notes work of an epoch. Work whose node the payer chose is no error, and does not count.
func (u *Usage) Count(epoch uint64, w Work) error {
	if err := u.open(epoch); err != nil {
		return err
	}
	hi, lo := bits.Mul64(w.Tokens, w.Share)
	if w.Share > ppb || hi >= milliPerShare {
		return fmt.Errorf("market: %w: %d tokens, a share of %d in 1/10⁹", ErrWork, w.Tokens, w.Share)
	}
	u.heard[epoch] = true
	if w.Among < MinDraw {
		return nil
	}
	milli, _ := bits.Div64(hi, lo, milliPerShare)
	of := u.work[epoch]
	if of == nil {
		of = map[settle.Wallet]uint64{}
		u.work[epoch] = of
	}
	if _, known := of[w.Payer]; !known {
		if u.payers >= MaxPayers {
			return fmt.Errorf("market: %w: %d payers", ErrUsageFull, MaxPayers)
		}
		u.payers++
	}
	of[w.Payer] = addSat(of[w.Payer], milli)
	return nil
}

// Close ends an epoch, and those before it that were not closed, and returns its load. A node
// counts with the best rate that it demonstrated in the last 24 hours, or with what it announces
// now (in the same unit), if that is less; one that announces nothing has left.
func (u *Usage) Close(epoch uint64, r PriceRules, announced map[string]uint64) (Load, error) {
	if err := r.Check(); err != nil {
		return Load{}, err
	}
	if err := u.open(epoch); err != nil {
		return Load{}, err
	}
	span := (showSeconds + r.EpochSeconds - 1) / r.EpochSeconds
	l := Load{Heard: u.heard[epoch]}
	for node, rates := range u.shown {
		var best uint64
		for e, rate := range rates {
			switch {
			case e > epoch:
			case epoch-e >= span:
				delete(rates, e)
			default:
				best = max(best, rate)
			}
		}
		if len(rates) == 0 {
			delete(u.shown, node)
		}
		l.Capacity = addSat(l.Capacity, mulSat(min(best, announced[node]), r.EpochSeconds))
	}
	limit := portion(l.Capacity, settle.WalletCountedPPM)
	for _, milli := range u.work[epoch] {
		l.Counted = addSat(l.Counted, min(milli, limit))
	}
	for e, of := range u.work {
		if e <= epoch {
			u.payers -= len(of)
			delete(u.work, e)
		}
	}
	for e := range u.heard {
		if e <= epoch {
			delete(u.heard, e)
		}
	}
	u.closed = epoch
	return l, nil
}

// addSat and mulSat stay at the largest number, so that sums do not depend on their order.
func addSat(a, b uint64) uint64 {
	if sum, carry := bits.Add64(a, b, 0); carry == 0 {
		return sum
	}
	return math.MaxUint64
}

func mulSat(a, b uint64) uint64 {
	if hi, lo := bits.Mul64(a, b); hi == 0 {
		return lo
	}
	return math.MaxUint64
}

// portion is ⌊n · part / 10⁶⌋, part at most 10⁶.
func portion(n, part uint64) uint64 {
	hi, lo := bits.Mul64(n, part)
	q, _ := bits.Div64(hi, lo, settle.PPM)
	return q
}
