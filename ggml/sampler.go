//go:build cgo

package ggml

/*
#include "llama.h"
*/
import "C"

import (
	"cmp"
	"errors"
	"fmt"
)

// Sampler draws tokens for one sequence and remembers them for penalties and grammar.
type Sampler struct {
	c       *C.struct_llama_sampler // the chain
	grammar *grammar                // nil: the answer is free
	tokens  *candidates             // with a grammar
	release func() bool
}

// NewSampler builds the chain: bias, penalties, then top-k, top-p, min-p, temperature
// and the draw, or the largest logit. The grammar is no part of it: to test one token
// is quick, to test all is not.
func (m *Model) NewSampler(cfg SamplerConfig) (*Sampler, error) {
	chain, err := m.newChain(cfg)
	if err != nil {
		return nil, err
	}
	s := &Sampler{c: chain}
	if cfg.Grammar != "" {
		if s.grammar, err = m.newGrammar(cfg); err != nil {
			C.llama_sampler_free(chain)
			return nil, err
		}
		s.tokens = newCandidates(m.VocabSize())
	}
	if cfg.Temperature > 0 {
		C.llama_sampler_chain_add(chain, C.llama_sampler_init_dist(C.uint32_t(cfg.Seed)))
	}
	s.release = track(s, "sampler", m.log)
	return s, nil
}

// newChain builds the chain without the draw.
func (m *Model) newChain(cfg SamplerConfig) (*C.struct_llama_sampler, error) {
	chain := C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
	add := func(s *C.struct_llama_sampler) { C.llama_sampler_chain_add(chain, s) }
	if err := m.addConstraints(cfg, add); err != nil {
		C.llama_sampler_free(chain)
		return nil, err
	}
	cfg.addChoice(add)
	return chain, nil
}

// addChoice adds what chooses the candidates of a draw, or the largest logit.
func (cfg SamplerConfig) addChoice(add func(*C.struct_llama_sampler)) {
	if cfg.Temperature <= 0 {
		add(C.llama_sampler_init_greedy())
		return
	}
	if cfg.TopK > 0 {
		add(C.llama_sampler_init_top_k(C.int32_t(cfg.TopK)))
	}
	if cfg.TopP > 0 && cfg.TopP < 1 {
		add(C.llama_sampler_init_top_p(C.float(cfg.TopP), 1))
	}
	if cfg.MinP > 0 {
		add(C.llama_sampler_init_min_p(C.float(cfg.MinP), 1))
	}
	add(C.llama_sampler_init_temp(C.float(cfg.Temperature)))
}

func (m *Model) addConstraints(cfg SamplerConfig, add func(*C.struct_llama_sampler)) error {
	if n := len(cfg.LogitBias); n > 0 {
		bias := make([]C.llama_logit_bias, 0, n)
		for t, b := range cfg.LogitBias {
			if !m.valid(t) {
				return fmt.Errorf("logit bias for token %d of a vocabulary of %d", t, m.VocabSize())
			}
			bias = append(bias, C.llama_logit_bias{token: C.llama_token(t), bias: C.float(b)})
		}
		add(C.llama_sampler_init_logit_bias(C.int32_t(m.VocabSize()), C.int32_t(n), &bias[0]))
	}
	if cfg.RepeatPenalty < 0 {
		return fmt.Errorf("repeat penalty %g", cfg.RepeatPenalty)
	}
	if cfg.penalises() {
		add(C.llama_sampler_init_penalties(C.int32_t(m.VocabSize()), C.int32_t(cfg.penaltyLast()),
			C.float(cmp.Or(cfg.RepeatPenalty, 1)), C.float(cfg.FrequencyPenalty), C.float(cfg.PresencePenalty)))
	}
	return nil
}

// Sample draws from the logits of the i-th token of c's last batch and accepts
// the token. That token must have been added with output. The error is ErrNoToken,
// or says what is wrong with the logits.
func (s *Sampler) Sample(c *Context, i int) (Token, error) {
	if c.guesses.last {
		return 0, errDraftLogits
	}
	if s.grammar == nil {
		return Token(C.llama_sampler_sample(s.c, c.c, C.int32_t(i))), nil
	}
	if !s.grammar.holds {
		t := Token(C.llama_sampler_sample(s.c, c.c, C.int32_t(i)))
		s.grammar.watch(t)
		return t, nil
	}
	t, err := s.grammar.hold(func(masked bool) (Token, error) { return s.choose(c, i, masked) })
	if err != nil {
		return 0, err
	}
	C.llama_sampler_accept(s.c, C.llama_token(t))
	s.grammar.accept(t)
	return t, nil
}

func (s *Sampler) choose(c *Context, i int, masked bool) (Token, error) {
	if err := s.tokens.fill(c, i); err != nil {
		return 0, err
	}
	if masked && !s.grammar.mask(s.tokens) {
		return 0, ErrNoToken
	}
	C.llama_sampler_apply(s.c, s.tokens.array)
	t, ok := s.tokens.selected()
	if !ok {
		return 0, errors.New("no token was chosen: the logits are not numbers")
	}
	return t, nil
}

// Close frees what it has. It may be called again.
func (s *Sampler) Close() {
	if !s.release() {
		return
	}
	C.llama_sampler_free(s.c)
	if s.grammar != nil {
		s.grammar.free()
		s.tokens.free()
	}
}
