package market

import (
	"errors"
	"time"

	"kvasird/ggml/gguf"
)

// Policy is what a network agreed on. The zero value is the default.
type Policy struct {
	Target   int // replicas wanted of every cell; 0 is 2
	MaxBonus int // most replicas more for a hot expert; 0 is 3, negative none
	// Ceiling is how many replicas spare budget may build where Target is met; hot experts have
	// a ceiling higher in proportion to their target. Beyond it budget stays free: the disk is
	// somebody's, and copies that nobody asks for help nobody. 0 is twice Target.
	Ceiling int
	Models  []gguf.ModelID // what the network runs, nothing else is volunteered for; empty: any

	Settle time.Duration // how long a claim is told before its download begins, a third of it among up to 16 peers; 0 is 6 s
	Dwell  time.Duration // how long a move must look worth it, see Volunteer; 0 is 2 min
	Margin float64       // by how much more scarce it must be where one moves; 0 is 0.25
	// Piece is the time that one claimed piece takes to download at the budget's bandwidth, so
	// that a slow node claims little at once; 0 is 4 min, at most MaxLease/2.
	Piece time.Duration
}

const (
	claimLease = time.Minute // of a claim that has not begun to download
	// patience is how long an author's claims are counted while nothing of it comes to serve.
	patience   = time.Hour
	maxTarget  = 1 << 12
	backoffMin = 15 * time.Second
	backoffMax = 15 * time.Minute
)

func (p *Policy) validate() error {
	setDefault(&p.Target, 2)
	setDefault(&p.MaxBonus, 3)
	setDefault(&p.Ceiling, 2*p.Target)
	setDefault(&p.Settle, 6*time.Second)
	setDefault(&p.Dwell, 2*time.Minute)
	setDefault(&p.Margin, 0.25)
	setDefault(&p.Piece, 4*time.Minute)
	switch {
	case p.Target < 1 || p.Target > maxTarget || p.MaxBonus > maxTarget:
		return errors.New("market: policy: target and bonus are at most 4096 replicas, target at least 1")
	case p.Ceiling < p.Target || p.Ceiling > maxTarget:
		return errors.New("market: policy: ceiling is below the target or above 4096")
	case p.Settle < 0 || p.Settle > claimLease/2:
		return errors.New("market: policy: settle must be at most 30s, half the lease of a claim")
	case p.Dwell < 0 || p.Margin < 0 || p.Margin > 1:
		return errors.New("market: policy: dwell is negative, or margin is not from 0 to 1")
	case p.Piece < 0 || p.Piece > MaxLease/2:
		return errors.New("market: policy: piece must be at most 5m, half of the longest lease")
	}
	p.MaxBonus = max(p.MaxBonus, 0)
	return nil
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// ceiling is the most replicas that a cell with this target may get.
func (p *Policy) ceiling(target int) int { return target * p.Ceiling / p.Target }
