//go:build cgo && linux

package node

import (
	"io"
	"math"
	"slices"
	"testing"

	"kvasird/node/gateway"
	"kvasird/ring"
)

// TestRingHoldsToGrammar: under a grammar, from the beginning or from a trigger on, with
// drafts and without, a ring answers as the unsplit model does.
func TestRingHoldsToGrammar(t *testing.T) {
	m := tinyLocal(t)
	other := 0
	m.off = 1 // an answer that is not what it would say is less sure
	r := m.ring(3)
	defer r.close()
	for _, s := range []ring.Sampling{
		{Grammar: `root ::= [A-Za-z ]+ "."`},
		{Grammar: `root ::= [A-Za-z0-9 ]+ "is" [A-Za-z0-9 ]+ ("." | "!")`, Special: true},
		{Grammar: `root ::= "is " [a-z ]+ "."`, Triggers: []string{"is "}},
	} {
		list := m.sure(m.prompts, s, m.most)
		for _, a := range list {
			if !slices.Equal(a.want, m.answer(ring.Request{Tokens: a.req.Tokens, MaxTokens: m.most})) {
				other++
			}
		}
		if len(list) < 4 {
			t.Errorf("%s: the model is sure of %d answers", s.Grammar, len(list))
		}
		for _, a := range list {
			r.same(a, nil, nil)
			a.req.NoDraft = true
			r.same(a, nil, nil)
		}
	}
	if other == 0 {
		t.Error("no answer is another one than without a grammar")
	}
	if st := r.stages[r.chain[0].Peer].Stats(); st.Accepted == 0 {
		t.Errorf("none of %d drafts was accepted", st.Drafted)
	}
}

// TestRingTellsLogprobs: they are those of the unsplit model, one for each token, with
// drafts and without.
func TestRingTellsLogprobs(t *testing.T) {
	eachLocal(t, func(t *testing.T, m *localModel) {
		r := m.ring(3)
		defer r.close()
		s := ring.Sampling{Logprobs: true, Top: 5}
		list := m.sure(m.prompts, s, m.most)
		if len(list) == 0 {
			t.Fatal("the model is sure of no answer")
		}
		for _, a := range list[:min(len(list), 8)] {
			for _, a.req.NoDraft = range []bool{false, true} {
				r.sameLikely(a)
			}
		}
	})
}

// sameLikely asks a ring and the whole model, and compares the tokens with their
// log-probabilities.
func (r *localRing) sameLikely(a answered) {
	r.t.Helper()
	s, err := r.entry.Open(r.t.Context(), r.chain, a.req, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	defer s.Close()
	ask, extra := requestOf(a.req.Sampling)
	ask.Prompt, ask.MaxTokens = a.req.Tokens, a.req.MaxTokens
	g, err := r.eng.StartExtra(r.t.Context(), ask, extra)
	if err != nil {
		r.t.Fatal(err)
	}
	const off = 0.3 // in another batch or window sums are rounded otherwise
	n := 0
	for {
		list, err := s.Next(r.t.Context())
		if err == io.EOF {
			break
		}
		if err != nil || len(s.Probs()) != len(list) {
			r.t.Fatalf("%d tokens, %d log-probabilities, %v", len(list), len(s.Probs()), err)
		}
		for i, p := range s.Probs() {
			token, _, err := g.NextToken(r.t.Context())
			if err != nil || int32(token) != list[i] {
				r.t.Fatalf("token %d is %d, want %d, %v", n, list[i], token, err)
			}
			of, top := g.Prob()
			if math.Abs(float64(p.Logprob-of.Logprob)) > off || len(p.Top) != len(top) || math.Abs(float64(p.Top[0].Logprob-top[0].Logprob)) > off {
				r.t.Errorf("token %d: %+v, want %+v beside %+v", n, p, of, top)
			}
			n++
		}
	}
	if n != len(a.want) {
		r.t.Errorf("%d tokens, want %d", n, len(a.want))
	}
}

// TestGrammarsOfPeers: what llama.cpp could not walk comes neither to a stage's sampler
// nor to the engine, whoever asks.
func TestGrammarsOfPeers(t *testing.T) {
	for _, gbnf := range []string{
		"root ::= root \"a\" | \"b\"", "root ::= e root \"a\" | \"b\"\ne ::= f\nf ::= \"\"", "root ::= (\"a\"?)*", "root ::= a",
	} {
		if _, err := (&stageCompute{}).NewSampler(ring.Sampling{Grammar: gbnf}); err == nil {
			t.Errorf("a stage takes %q", gbnf)
		}
		if _, err := (ownAnswers{}).Start(t.Context(), gateway.Request{Prompt: []int32{1}}, gateway.Extra{Grammar: gbnf}); err == nil {
			t.Errorf("an engine takes %q", gbnf)
		}
	}
}
