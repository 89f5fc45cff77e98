//go:build cgo

package ggml

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
)

// oneDecode is a context of the shipped model with the logits of one prompt.
func oneDecode(t *testing.T) (*Model, *Context) {
	t.Helper()
	m := loadModel(t, openRuntime(t), ModelConfig{Path: tinyPath})
	c, err := m.NewContext(ContextConfig{Tokens: 64, Batch: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	b := NewBatch(16)
	for i, tok := range testTokens(5, m.VocabSize()) {
		b.Add(tok, i, 0, i == 4)
	}
	if err := c.Decode(context.Background(), b); err != nil {
		t.Fatal(err)
	}
	return m, c
}

func positionSampler(t *testing.T, m *Model, cfg SamplerConfig) *PositionSampler {
	t.Helper()
	s, err := m.NewPositionSampler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestPositionSamplerRepeatsItself(t *testing.T) {
	m, c := oneDecode(t)
	cfg := SamplerConfig{Temperature: 1.5, Seed: 7, RepeatPenalty: 1.3, TopP: 0.95}
	a, b := positionSampler(t, m, cfg), positionSampler(t, m, cfg)
	history := testTokens(20, m.VocabSize())
	first := make([]Token, 200)
	for pos := range first {
		tok, err := a.Sample(c, 4, pos, history[:pos%20])
		if err != nil {
			t.Fatal(err)
		}
		first[pos] = tok
	}
	distinct := map[Token]bool{}
	for pos := len(first) - 1; pos >= 0; pos-- { // in another order, by another sampler
		tok, err := b.Sample(c, 4, pos, history[:pos%20])
		if err != nil || tok != first[pos] {
			t.Fatalf("position %d: token %d, %v, before it was %d", pos, tok, err, first[pos])
		}
		distinct[tok] = true
	}
	if len(distinct) < 10 {
		t.Errorf("%d different tokens in 200 draws at temperature 1.5", len(distinct))
	}
	other := positionSampler(t, m, SamplerConfig{Temperature: 1.5, Seed: 8, RepeatPenalty: 1.3, TopP: 0.95})
	same := 0
	for pos := range first {
		if tok, _ := other.Sample(c, 4, pos, history[:pos%20]); tok == first[pos] {
			same++
		}
	}
	if same == len(first) {
		t.Error("another seed drew the same tokens")
	}
}

// The draws of many positions must have the distribution of the candidates: a
// chi-square test, with a fixed seed and a bound that chance passes once in 10^6.
func TestPositionSamplerDistribution(t *testing.T) {
	m, c := oneDecode(t)
	const k, draws = 8, 20000
	s := positionSampler(t, m, SamplerConfig{Temperature: 2, TopK: k, Seed: 1})
	counts := map[Token]int{}
	for pos := range draws {
		tok, err := s.Sample(c, 4, pos, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts[tok]++
	}
	sum := 0.0
	logits := c.Logits(4)
	for tok := range counts {
		sum += math.Exp(float64(logits[tok]) / 2)
	}
	chi := 0.0
	for tok, n := range counts {
		want := draws * math.Exp(float64(logits[tok])/2) / sum
		if want < 5 {
			t.Fatalf("token %d is expected %g times, too few for the test", tok, want)
		}
		chi += (float64(n) - want) * (float64(n) - want) / want
	}
	if len(counts) != k || chi > 42 { // 7 degrees of freedom
		t.Errorf("%d tokens of %d, chi-square %g", len(counts), k, chi)
	}
}

func TestPositionSamplerGreedy(t *testing.T) {
	m, c := oneDecode(t)
	cfg := SamplerConfig{Temperature: 0, LogitBias: map[Token]float32{3: 1}}
	s := positionSampler(t, m, cfg)
	plain, err := m.NewSampler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	want, err := plain.Sample(c, 4)
	if err != nil {
		t.Fatal(err)
	}
	for pos := range 3 {
		if tok, err := s.Sample(c, 4, pos, nil); tok != want || err != nil {
			t.Errorf("position %d: token %d, %v, want %d", pos, tok, err, want)
		}
	}
}

func TestPositionSamplerRefuses(t *testing.T) {
	m, c := oneDecode(t)
	if _, err := m.NewPositionSampler(SamplerConfig{Grammar: `root ::= "`}); err == nil || !strings.Contains(err.Error(), "grammar") {
		t.Errorf("a grammar: %v", err)
	}
	if _, err := m.NewPositionSampler(SamplerConfig{LogitBias: map[Token]float32{1 << 30: 1}}); err == nil {
		t.Error("a bias for no token was taken")
	}
	s := positionSampler(t, m, SamplerConfig{})
	if _, err := s.Sample(c, 0, 0, nil); err == nil {
		t.Error("an entry without output was sampled")
	}
	held := positionSampler(t, m, SamplerConfig{Grammar: `root ::= "a" [b-z]* "!"`})
	free := positionSampler(t, m, SamplerConfig{Grammar: `root ::= "a"`, Triggers: []string{"a"}})
	a, q := oneToken(t, m, "a"), oneToken(t, m, "q")
	for _, tt := range []struct {
		name    string
		s       *PositionSampler
		history []Token
		want    string
	}{
		{"a history that the grammar refuses", held, []Token{q}, "not in the grammar"},
		{"a history that it refuses in the end", held, []Token{a, a}, "not in the grammar"},
		{"a token beyond the vocabulary", held, []Token{a, Token(m.VocabSize())}, "of a vocabulary"},
		{"a negative token", held, []Token{-1}, "of a vocabulary"},
		{"a token beyond the vocabulary before a trigger", free, []Token{1 << 30}, "of a vocabulary"},
		{"one that it takes", held, []Token{a, q}, ""},
	} {
		if _, err := tt.s.Sample(c, 4, len(tt.history), tt.history); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	if _, err := positionSampler(t, m, SamplerConfig{Grammar: `root ::= "\x00"`}).Sample(c, 4, 0, nil); !errors.Is(err, ErrNoToken) {
		t.Errorf("a grammar that takes no token: %v", err)
	}
}

// oneToken is the token of a text that is one.
func oneToken(t *testing.T, m *Model, text string) Token {
	t.Helper()
	for token := range Token(m.VocabSize()) {
		if string(m.Piece(token, false)) == text {
			return token
		}
	}
	t.Fatalf("no token is %q", text)
	return 0
}

// TestPositionSamplerGrammar: under a grammar, with a trigger or from the beginning, the
// draws depend on nothing but what is before them, and those of the likeliest tokens are
// those of a Sampler.
func TestPositionSamplerGrammar(t *testing.T) {
	m, c := oneDecode(t)
	for _, cfg := range []SamplerConfig{
		{Grammar: `root ::= ([a-z] [a-z]? " ")+`},
		{Grammar: `root ::= ([a-z] [a-z]? " ")+`, Temperature: 1.5, Seed: 3, RepeatPenalty: 1.3},
		{Grammar: `root ::= "e" [0-9]+ "."`, Triggers: []string{"e"}, Temperature: 2, Seed: 4, RepeatPenalty: 1.1},
	} {
		one := positionSampler(t, m, cfg)
		var answer []Token
		for pos := range 60 {
			tok, err := one.Sample(c, 4, pos, answer)
			if err != nil {
				t.Fatalf("position %d: %v", pos, err)
			}
			answer = append(answer, tok)
		}
		other := positionSampler(t, m, cfg)
		for _, pos := range []int{59, 3, 4, 58, 0, 30} {
			if tok, err := other.Sample(c, 4, pos, answer[:pos]); err != nil || tok != answer[pos] {
				t.Errorf("%+v: position %d is %d, %v, before it was %d", cfg, pos, tok, err, answer[pos])
			}
		}
		if cfg.Temperature > 0 {
			continue
		}
		plain, err := m.NewSampler(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer plain.Close()
		for pos := range answer {
			if tok, err := plain.Sample(c, 4); err != nil || tok != answer[pos] {
				t.Fatalf("position %d is %d, %v, a Sampler draws %d", pos, answer[pos], err, tok)
			}
		}
	}
}

// TestPositionSamplerGrammarDistribution: the draws of what a grammar leaves have the
// distribution of that, though each is made in two steps. As in the test without one.
func TestPositionSamplerGrammarDistribution(t *testing.T) {
	m, c := oneDecode(t)
	const draws = 20000
	s := positionSampler(t, m, SamplerConfig{Temperature: 4, Seed: 1, Grammar: `root ::= [a-h]`})
	counts := map[Token]int{}
	for pos := range draws {
		tok, err := s.Sample(c, 4, pos, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts[tok]++
	}
	sum := 0.0
	logits := c.Logits(4)
	for tok := range counts {
		sum += math.Exp(float64(logits[tok]) / 4)
	}
	chi := 0.0
	for tok, n := range counts {
		want := draws * math.Exp(float64(logits[tok])/4) / sum
		if want < 5 {
			t.Fatalf("token %d is expected %g times, too few for the test", tok, want)
		}
		chi += (float64(n) - want) * (float64(n) - want) / want
	}
	if len(counts) != 8 || chi > 42 { // 7 degrees of freedom
		t.Errorf("%d tokens of 8, chi-square %g", len(counts), chi)
	}
}
