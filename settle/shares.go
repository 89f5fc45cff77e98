package settle

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// Node is the ed25519 public key of a node: what it signs with, and is paid as. A
// wallet is linked to it elsewhere.
type Node = Key

// Limits of a model's manifest.
const (
	MaxParts    = 4096 // embedding, head, and two for each layer
	MaxPerToken = 1024 // experts used per token
)

// Part is one thing that computes of a model, from its manifest and never from a node:
// the embedding, the dense part or the experts of a layer, the head. The parts of a
// model have one order, that of the computation.
type Part struct {
	Weight   uint64 // parameters active per token
	PerToken uint64 // units per token at most: 1, or the experts used per token
}

// Line is the units of one part: rows served, computed or from the node's cache, or (row,
// expert) pairs accepted into the combine. Hedged losers, retries and drafts that were
// not accepted are none.
type Line struct {
	Part  uint32 `cbor:"1,keyasint"`
	Units uint64 `cbor:"2,keyasint"`
}

// Work is what one node did of a request, lines in the order of parts.
type Work struct {
	Worker Node   `cbor:"1,keyasint"`
	Lines  []Line `cbor:"2,keyasint"`
}

// WorkShare is what a node did of the whole.
type WorkShare struct {
	Worker Node
	Share  Share
}

// Refusals of parts and of work.
var (
	ErrParts       = errors.New("the manifest's parts are not usable")
	ErrLines       = errors.New("the lines of work are not in order")
	ErrTooMuchWork = errors.New("more work than the delivered tokens need")
)

// PartShares divides one request over the parts of its model, by cumulative rounding:
// they sum to Whole exactly, and a window of parts has the same share however it is cut.
// Error: ErrParts.
func PartShares(parts []Part) ([]Share, error) {
	if len(parts) == 0 || len(parts) > MaxParts {
		return nil, fmt.Errorf("%w: %d parts, 1 to %d", ErrParts, len(parts), MaxParts)
	}
	var total uint64
	for i, p := range parts {
		var carry uint64
		if total, carry = bits.Add64(total, p.Weight, 0); carry != 0 {
			return nil, fmt.Errorf("%w: the weights do not fit 64 bits", ErrParts)
		}
		if p.PerToken == 0 || p.PerToken > MaxPerToken {
			return nil, fmt.Errorf("%w: part %d has %d units per token, 1 to %d", ErrParts, i, p.PerToken, MaxPerToken)
		}
	}
	if total == 0 {
		return nil, fmt.Errorf("%w: no part weighs anything", ErrParts)
	}
	shares := make([]Share, len(parts))
	var sum, before uint64
	for i, p := range parts {
		sum += p.Weight
		to, _, err := mulDiv(uint64(Whole), sum, total)
		if err != nil {
			return nil, err
		}
		shares[i], before = Share(to-before), to
	}
	return shares, nil
}

// Shares divides a request of so many tokens over who did it: of each part, the units of
// a node of all the units that the tokens need, rounded down. So nobody gains by
// splitting itself into many, or by another's work that is not shown. What is not shown
// and what rounding leaves is rest: it goes to the pool. The shares and rest sum to
// Whole. Errors: ErrParts, ErrLines, ErrTooMuchWork.
func Shares(parts []Part, tokens uint64, work []Work) (shares []WorkShare, rest Share, err error) {
	whole, err := PartShares(parts)
	if err != nil {
		return nil, 0, err
	}
	if err := checkWork(parts, tokens, work); err != nil {
		return nil, 0, err
	}
	rest = Whole
	for _, w := range work {
		var sum Share
		for _, l := range w.Lines {
			s, _, err := mulDiv(uint64(whole[l.Part]), l.Units, tokens*parts[l.Part].PerToken)
			if err != nil {
				return nil, 0, err
			}
			sum += Share(s)
		}
		rest -= sum
		shares = append(shares, WorkShare{w.Worker, sum})
	}
	slices.SortFunc(shares, func(a, b WorkShare) int { return bytes.Compare(a.Worker[:], b.Worker[:]) })
	return shares, rest, nil
}

// checkWork refuses more units of a part than the tokens need.
func checkWork(parts []Part, tokens uint64, work []Work) error {
	if tokens > 2*MaxTokens {
		return fmt.Errorf("%w: %d tokens, at most %d", ErrTooMuchWork, tokens, 2*MaxTokens)
	}
	units := make([]uint64, len(parts))
	for _, w := range work {
		if err := checkLines(w.Lines, len(parts)); err != nil {
			return fmt.Errorf("node %s: %w", w.Worker, err)
		}
		for _, l := range w.Lines {
			most := tokens * parts[l.Part].PerToken // below 2³⁶
			if l.Units > most-units[l.Part] {
				return fmt.Errorf("%w: %d and %d units of part %d, %d tokens need %d", ErrTooMuchWork, units[l.Part], l.Units, l.Part, tokens, most)
			}
			units[l.Part] += l.Units
		}
	}
	return nil
}

// checkLines refuses parts that do not exist, twice the same, out of order, or no units.
func checkLines(lines []Line, parts int) error {
	for i, l := range lines {
		switch {
		case int64(l.Part) >= int64(parts):
			return fmt.Errorf("%w: part %d of %d", ErrLines, l.Part, parts)
		case i > 0 && l.Part <= lines[i-1].Part:
			return fmt.Errorf("%w: part %d after part %d", ErrLines, l.Part, lines[i-1].Part)
		case l.Units == 0:
			return fmt.Errorf("%w: part %d has no units: leave it out", ErrLines, l.Part)
		}
	}
	return nil
}
