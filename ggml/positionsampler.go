//go:build cgo

package ggml

/*
#include "llama.h"
*/
import "C"

import (
	"errors"
	"math"
)

// PositionSampler draws tokens whose randomness belongs to their position: a draw
// depends on the logits, the tokens before it, the seed and the position, and on no
// draw before. So a position that is computed again, elsewhere or after a rollback,
// gives the same token. It is used by one goroutine at a time.
type PositionSampler struct {
	chain   *C.struct_llama_sampler // without the draw
	tokens  *candidates
	seed    uint64
	greedy  bool
	last    int // tokens that the penalties look back on; 0: no penalties
	release func() bool
}

// NewPositionSampler builds the same chain as NewSampler. A grammar, whose state is
// that of one sequence, is refused.
func (m *Model) NewPositionSampler(cfg SamplerConfig) (*PositionSampler, error) {
	if cfg.Grammar != "" {
		return nil, errors.New("a grammar cannot be combined with draws by position")
	}
	chain, err := m.newChain(cfg)
	if err != nil {
		return nil, err
	}
	s := &PositionSampler{chain: chain, tokens: newCandidates(m.VocabSize()), seed: uint64(cfg.Seed), greedy: cfg.Temperature <= 0}
	if cfg.penalises() {
		s.last = cfg.penaltyLast()
	}
	s.release = track(s, "sampler", m.log)
	return s, nil
}

// Sample draws from the logits of the i-th entry of c's last batch, which must have
// been added with output. history is the answer before it, for the penalties.
func (s *PositionSampler) Sample(c *Context, i, pos int, history []Token) (Token, error) {
	if err := s.tokens.fill(c, i); err != nil {
		return 0, err
	}
	if s.last > 0 {
		C.llama_sampler_reset(s.chain)
		for _, t := range history[max(len(history)-s.last, 0):] {
			C.llama_sampler_accept(s.chain, C.llama_token(t))
		}
	}
	C.llama_sampler_apply(s.chain, s.tokens.array)
	if s.greedy {
		t, ok := s.tokens.selected()
		if !ok {
			return 0, errors.New("no token was chosen: the logits are not numbers")
		}
		return t, nil
	}
	return draw(s.tokens.left(), uniform(s.seed, pos))
}

// draw picks the candidate in whose share of the whole u falls, for u in [0, 1).
func draw(left []C.llama_token_data, u float64) (Token, error) {
	top := math.Inf(-1)
	for _, c := range left {
		top = max(top, float64(c.logit))
	}
	sum := 0.0
	for _, c := range left {
		sum += math.Exp(float64(c.logit) - top)
	}
	if !(sum > 0) || math.IsInf(top, 0) {
		return 0, errors.New("no token can be drawn: the logits are not numbers")
	}
	rest := u * sum
	for _, c := range left {
		if rest -= math.Exp(float64(c.logit) - top); rest < 0 {
			return Token(c.id), nil
		}
	}
	return Token(left[len(left)-1].id), nil // the sum was rounded
}

// uniform is a number in [0, 1) of a seed and a position.
func uniform(seed uint64, pos int) float64 {
	return float64(splitmix64(splitmix64(seed)^uint64(pos))>>11) * 0x1p-53
}

// Close frees the chain. It may be called again.
func (s *PositionSampler) Close() {
	if s.release() {
		C.llama_sampler_free(s.chain)
		s.tokens.free()
	}
}
