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
	grammar *grammar                // nil: the answer is free
	tokens  *candidates
	seed    uint64
	greedy  bool
	last    int // tokens that the penalties look back on; 0: no penalties
	release func() bool
}

// NewPositionSampler builds the same chain as NewSampler.
func (m *Model) NewPositionSampler(cfg SamplerConfig) (*PositionSampler, error) {
	chain, err := m.newChain(cfg)
	if err != nil {
		return nil, err
	}
	s := &PositionSampler{chain: chain, seed: uint64(cfg.Seed), greedy: cfg.Temperature <= 0}
	if cfg.Grammar != "" {
		if s.grammar, err = m.newGrammar(cfg); err != nil {
			C.llama_sampler_free(chain)
			return nil, err
		}
	}
	s.tokens = newCandidates(m.VocabSize())
	if cfg.penalises() {
		s.last = cfg.penaltyLast()
	}
	s.release = track(s, "sampler", m.log)
	return s, nil
}

// Sample draws from the logits of the i-th entry of c's last batch, which must have
// been added with output. history is the answer before it, all of it where there is a
// grammar or are penalties. The error is ErrNoToken, or says what is wrong with the
// logits or the history.
func (s *PositionSampler) Sample(c *Context, i, pos int, history []Token) (Token, error) {
	if c.guesses.last {
		return 0, errDraftLogits
	}
	choose := func(masked bool) (Token, error) { return s.choose(c, i, pos, history, masked) }
	if s.grammar == nil {
		return choose(false)
	}
	if err := s.grammar.reach(history); err != nil {
		return 0, err
	}
	if !s.grammar.holds {
		return choose(false)
	}
	return s.grammar.hold(choose)
}

func (s *PositionSampler) choose(c *Context, i, pos int, history []Token, masked bool) (Token, error) {
	if err := s.tokens.fill(c, i); err != nil {
		return 0, err
	}
	if masked && !s.grammar.mask(s.tokens) {
		return 0, ErrNoToken
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
	seed := s.seed
	if masked { // what the first draw was refused for must not decide this one
		seed = ^seed
	}
	return draw(s.tokens.left(), uniform(seed, pos))
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
	rest, last := u*sum, Token(0)
	for _, c := range left {
		if possible(c) {
			last = Token(c.id)
		}
		if rest -= math.Exp(float64(c.logit) - top); rest < 0 {
			return Token(c.id), nil
		}
	}
	return last, nil // the sum was rounded
}

// uniform is a number in [0, 1) of a seed and a position.
func uniform(seed uint64, pos int) float64 {
	return float64(splitmix64(splitmix64(seed)^uint64(pos))>>11) * 0x1p-53
}

// Close frees the chain. It may be called again.
func (s *PositionSampler) Close() {
	if !s.release() {
		return
	}
	C.llama_sampler_free(s.chain)
	s.tokens.free()
	if s.grammar != nil {
		s.grammar.free()
	}
}
