//go:build cgo

package ggml

import (
	"bytes"
	"errors"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func newSampler(t *testing.T, m *Model, cfg SamplerConfig) *Sampler {
	t.Helper()
	s, err := m.NewSampler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// force makes tok by far the likeliest and draws.
func force(t *testing.T, c *Context, s *Sampler, tok Token) Token {
	t.Helper()
	logits := c.Logits(4)
	was := logits[tok]
	logits[tok] = 1e6
	got, err := s.Sample(c, 4)
	logits[tok] = was
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// write forces a text token by token, as far as it comes.
func write(t *testing.T, m *Model, c *Context, s *Sampler, text string) (written string) {
	t.Helper()
	tokens, err := m.Tokenize(text, false, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, tok := range tokens {
		if got := force(t, c, s, tok); got != tok {
			return written
		}
		written += string(m.Piece(tok, false))
	}
	return written
}

// word is a token whose text has this.
func word(t *testing.T, m *Model, has func(text string) bool) Token {
	t.Helper()
	for tok := range Token(m.VocabSize()) {
		if !m.IsEOG(tok) && has(string(m.Piece(tok, true))) {
			return tok
		}
	}
	t.Fatal("the vocabulary of the shipped model has changed")
	return 0
}

// TestGrammarHolds: at a temperature at which nearly every choice of the chain is
// refused, the answers match, and end where the grammar does.
func TestGrammarHolds(t *testing.T) {
	m, c := oneDecode(t)
	want := regexp.MustCompile(`^([a-z]{1,9} ){3}é\.$`)
	answers := map[string]bool{}
	for seed := range uint32(30) {
		s := newSampler(t, m, SamplerConfig{Temperature: 3, TopK: 40, TopP: 0.9, MinP: 0.01, RepeatPenalty: 1.1, Seed: seed,
			Grammar: "root ::= word word word \"é.\"\nword ::= [a-z]{1,9} \" \""})
		var answer []byte
		for {
			tok, err := s.Sample(c, 4)
			if err != nil {
				t.Fatal(err)
			}
			if m.IsEOG(tok) {
				break
			}
			answer = append(answer, m.Piece(tok, false)...)
		}
		if !want.Match(answer) {
			t.Errorf("seed %d: %q", seed, answer)
		}
		answers[string(answer)] = true
	}
	if len(answers) < 20 {
		t.Errorf("30 seeds gave %d answers", len(answers))
	}
}

// TestGrammarRefuses: the likeliest token is taken where the grammar allows it, and
// the likeliest of the others where not; a complete answer can only end.
func TestGrammarRefuses(t *testing.T) {
	m, c := oneDecode(t)
	s := newSampler(t, m, SamplerConfig{Grammar: `root ::= "yes" | "no"`})
	if got := write(t, m, c, s, "maybe"); got != "" {
		t.Fatalf("%q was taken", got)
	}
	s = newSampler(t, m, SamplerConfig{Grammar: `root ::= "yes" | "no"`})
	if got := write(t, m, c, s, "no"); got != "no" {
		t.Fatalf("of no, %q was taken", got)
	}
	for range 2 {
		if tok, err := s.Sample(c, 4); err != nil || !m.IsEOG(tok) {
			t.Errorf("after the end: token %d, %v", tok, err)
		}
	}
	if tok, err := s.Sample(c, 0); err == nil {
		t.Errorf("an entry without output gave %d", tok)
	}
	s = newSampler(t, m, SamplerConfig{Temperature: 1, Grammar: `root ::= "\x00"`})
	if tok, err := s.Sample(c, 4); !errors.Is(err, ErrNoToken) {
		t.Errorf("where no token may come: %d, %v", tok, err)
	}
}

func TestGrammarIsChecked(t *testing.T) {
	m, _ := oneDecode(t)
	for _, tt := range []struct {
		cfg  SamplerConfig
		want string
	}{
		{SamplerConfig{Grammar: "root ::= ("}, "cannot be parsed"},
		{SamplerConfig{Grammar: `other ::= "a"`}, "cannot be parsed"},
		{SamplerConfig{Grammar: `root ::= root "a"`}, "cannot be parsed"},
		{SamplerConfig{Grammar: "root ::= \"a\"\x00"}, "zero byte"},
		{SamplerConfig{Grammar: `root ::= "a"`, Triggers: []string{"a", ""}}, "trigger of the grammar is empty"},
	} {
		if s, err := m.NewSampler(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, %v", tt.cfg.Grammar, s, err)
		}
	}
}

// TestGrammarTokens: tokens whose text in the answer is not what the grammar sees
// never come: those with a zero byte, and control tokens unless they have text in
// the answer and the grammar writes it.
func TestGrammarTokens(t *testing.T) {
	m, c := oneDecode(t)
	control := word(t, m, func(text string) bool { return text == "<|im_start|>" })
	null := word(t, m, func(text string) bool { return text == "\x00" })
	if len(m.Piece(control, false)) > 0 {
		t.Fatal("<|im_start|> is no control token")
	}
	for _, tt := range []struct {
		grammar string
		text    bool
		want    bool
	}{
		{`root ::= [^"]+`, false, false},
		{`root ::= [^"]+`, true, false},
		{`root ::= "<|im_start|>"`, false, false},
		{`root ::= "<|im_start|>"`, true, true},
		{"root ::= [^\"]+\n# up to <|im_start|>\n", true, true},
	} {
		s := newSampler(t, m, SamplerConfig{Grammar: tt.grammar, ControlText: tt.text})
		if got := force(t, c, s, control); (got == control) != tt.want {
			t.Errorf("%s, text of control tokens %v: %q", tt.grammar, tt.text, m.Piece(got, true))
		}
	}
	s := newSampler(t, m, SamplerConfig{Grammar: `root ::= [^"]+`})
	if got := force(t, c, s, null); got == null {
		t.Error("the zero byte was taken")
	}
}

// TestTriggers: an answer is free until a trigger, wherever its tokens begin, and then
// held; where what comes with the trigger is not in the grammar, it stays free.
func TestTriggers(t *testing.T) {
	m, c := oneDecode(t)
	inside := word(t, m, func(text string) bool { return len(text) > 4 && text[0] == ' ' && text[1] >= 'A' && text[1] <= 'Z' })
	name := string(m.Piece(inside, false))
	late := name[1:] // begins within the token
	control := word(t, m, func(text string) bool { return text == "<|im_start|>" })
	for _, tt := range []struct {
		name     string
		triggers []string
		grammar  string
		text     string // that is written
		want     string // of it
	}{
		{"none", []string{"<call>"}, `root ::= "<call>7"`, "Call <calls>x", "Call <calls>x"},
		{"after text", []string{"<call>"}, `root ::= "<call>7"`, "Well, <call>7", "Well, <call>7"},
		{"held", []string{"<call>"}, `root ::= "<call>7"`, "Well, <call>x", "Well, <call>"},
		{"at once", []string{"<call>"}, `root ::= "<call>7"`, "<call>x", "<call>"},
		{"one of two", []string{"[x]", "<call>"}, `root ::= "<call>7"`, "<call>x", "<call>"},
		{"the wrong one", []string{"[x]", "<call>"}, `root ::= "<call>7"`, "[x]<call>x", "[x]<call>"},
		{"within a token", []string{late}, `root ::= "` + late + `7"`, name + "x", name},
		{"refused, then taken", []string{late[:1], late[1:2]}, `root ::= "` + late[:1] + `7"`, name + " 1 " + name[1:2] + "8", name + " 1 " + name[1:2]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSampler(t, m, SamplerConfig{Grammar: tt.grammar, Triggers: tt.triggers})
			if got := write(t, m, c, s, tt.text); got != tt.want {
				t.Errorf("of %q came %q, want %q", tt.text, got, tt.want)
			}
		})
	}
	for _, shown := range []bool{true, false} {
		s := newSampler(t, m, SamplerConfig{Grammar: `root ::= "<|im_start|>7"`, Triggers: []string{"<|im_start|>"}, ControlText: shown})
		force(t, c, s, control)
		if got := write(t, m, c, s, "x"); (got == "") != shown {
			t.Errorf("control tokens shown %v: after one that triggers came %q", shown, got)
		}
	}
}

// TestGrammarDistribution: among what the grammar takes, the draws have the
// distribution of the logits: a chi-square test as that of PositionSampler.
func TestGrammarDistribution(t *testing.T) {
	m, c := oneDecode(t)
	const draws = 4000
	letters := "abcdefgh"
	var tokens []Token
	sum := 0.0
	for tok := range Token(m.VocabSize()) {
		if text := m.Piece(tok, false); len(text) == 1 && bytes.ContainsAny(text, letters) {
			tokens = append(tokens, tok)
			sum += math.Exp(float64(c.Logits(4)[tok]) / 3)
		}
	}
	counts := map[Token]float64{}
	for seed := range uint32(draws) {
		s, err := m.NewSampler(SamplerConfig{Temperature: 3, Seed: seed, Grammar: `root ::= [a-h]`})
		if err != nil {
			t.Fatal(err)
		}
		tok, err := s.Sample(c, 4)
		if err != nil || !slices.Contains(tokens, tok) {
			t.Fatalf("token %d, %v", tok, err)
		}
		counts[tok]++
		s.Close()
	}
	chi := 0.0
	for _, tok := range tokens {
		want := draws * math.Exp(float64(c.Logits(4)[tok])/3) / sum
		if want < 5 {
			t.Fatalf("%q is expected %g times, too few for the test", m.Piece(tok, false), want)
		}
		chi += (counts[tok] - want) * (counts[tok] - want) / want
	}
	if len(tokens) != len(letters) || chi > 42 { // 7 degrees of freedom
		t.Errorf("%d tokens, chi-square %g", len(tokens), chi)
	}
}
