//go:build cgo

package engine

import (
	"errors"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"

	"kvasird/ggml"
)

func startExtra(t testing.TB, e *Engine, req Request, extra Extra) *Generation {
	t.Helper()
	g, err := e.StartExtra(t.Context(), req, extra)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestGrammarsTogether: of several sequences in one batch each holds to its own
// grammar, those without say what they say alone, and one whose grammar leaves no
// token fails alone.
func TestGrammarsTogether(t *testing.T) {
	want, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, Config{Sequences: 4, Queue: 12})
	grammars := []struct{ gbnf, want string }{
		{`root ::= "{" [a-z]{1,5} "}"`, `^\{[a-z]{1,5}\}$`},
		{`root ::= ([0-9] ",")* "."`, `^([0-9],)*\.$`},
		{`root ::= "yes" | "no"`, `^(yes|no)$`},
		{`root ::= "a" "\x00"`, ""},
	}
	var free, held []*Generation
	for i, gr := range grammars {
		free = append(free, start(t, t.Context(), e, greedy(t, e, questions[i], 48)))
		for seed := range uint32(2) {
			req := greedy(t, e, questions[i], 0)
			req.Temperature, req.Seed = 1, seed
			held = append(held, startExtra(t, e, req, Extra{Grammar: gr.gbnf}))
		}
	}
	for i, g := range free {
		if got, err := read(t.Context(), g); err != nil || got != want[i] {
			t.Errorf("free beside grammars: %q, %v; want %q", got, err, want[i])
		}
	}
	for i, g := range held {
		got, err := read(t.Context(), g)
		gr := grammars[i/2]
		switch {
		case gr.want == "" && (got != "a" || !errors.Is(err, ggml.ErrNoToken)):
			t.Errorf("where no token may come: %q, %v", got, err)
		case gr.want != "" && (err != nil || g.Finish() == "stop" && !regexp.MustCompile(gr.want).MatchString(got)):
			t.Errorf("%s: %q, %v", gr.gbnf, got, err)
		}
	}
	if st := e.Stats(); st.Failed != 2 || st.Completed != 10 || st.Running != 0 {
		t.Errorf("%+v, want 2 failed and 10 completed", st)
	}
}

// TestGrammarFromTrigger: an answer is free until it has the trigger.
func TestGrammarFromTrigger(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	req := greedy(t, e, questions[1], 40)
	g := startExtra(t, e, req, Extra{Grammar: `root ::= "plus 8."`, Triggers: []string{"plus"}})
	if got, err := read(t.Context(), g); err != nil || got != "6 plus 8." || g.Finish() != "stop" {
		t.Errorf("%q, %v, finish %q", got, err, g.Finish())
	}
	g = startExtra(t, e, req, Extra{Grammar: `root ::= "plus 8."`, Triggers: []string{"minus"}})
	if got, err := read(t.Context(), g); err != nil || got != "6 plus 7 is 13." {
		t.Errorf("without the trigger: %q, %v", got, err)
	}
}

// TestLogprobs: the answer is that without them; every token comes with its own, the
// likeliest first, and the chosen one is the first where the choice is greedy.
func TestLogprobs(t *testing.T) {
	want, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, Config{Sequences: 1})
	vocab := e.cfg.Model.VocabSize()
	g := startExtra(t, e, greedy(t, e, questions[0], 48), Extra{Logprobs: true, Top: 5})
	text := ""
	for {
		id, bytes, err := g.NextToken(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text += string(bytes)
		chosen, top := g.Prob()
		if chosen.ID != int32(id) || string(chosen.Bytes) != string(bytes) || len(top) != 5 || top[0].ID != chosen.ID || top[0].Logprob != chosen.Logprob {
			t.Errorf("token %d %q: %+v, %+v", id, bytes, chosen, top)
		}
		sum := 0.0
		for i, p := range top {
			sum += math.Exp(float64(p.Logprob))
			if p.Logprob > 0 || i > 0 && p.Logprob > top[i-1].Logprob || string(p.Bytes) != string(e.cfg.Model.Piece(ggml.Token(p.ID), false)) {
				t.Errorf("alternative %d: %+v", i, top)
			}
		}
		if sum > 1+1e-6 {
			t.Errorf("the likeliest have %g together", sum)
		}
	}
	if text != want[0] {
		t.Errorf("%q, want %q", text, want[0])
	}
	logits := make([]float32, vocab)
	for i := range logits {
		logits[i] = float32(i*7919%vocab) / 300
	}
	sum := 0.0
	for i := range logits {
		p, _ := e.probs(logits, ggml.Token(i), 0)
		sum += math.Exp(float64(p.Logprob))
	}
	if math.Abs(sum-1) > 1e-4 {
		t.Errorf("all probabilities have %g together", sum)
	}
}

// TestLogprobsAreRaw: bias, penalties, temperature and grammar do not change them.
func TestLogprobsAreRaw(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	first := func(change func(*Request, *Extra)) (TokenProb, []TokenProb) {
		req, extra := greedy(t, e, questions[0], 1), Extra{Logprobs: true, Top: 3}
		change(&req, &extra)
		g := startExtra(t, e, req, extra)
		if _, err := g.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		return g.Prob()
	}
	chosen, top := first(func(*Request, *Extra) {})
	for name, change := range map[string]func(*Request, *Extra){
		"bias":        func(r *Request, _ *Extra) { r.LogitBias = map[int32]float32{chosen.ID: -100} },
		"temperature": func(r *Request, _ *Extra) { r.Temperature, r.TopK = 2, 40 },
		"grammar":     func(_ *Request, x *Extra) { x.Grammar = `root ::= "zz"` },
	} {
		other, same := first(change)
		if len(same) != 3 || same[0].ID != top[0].ID || same[0].Logprob != top[0].Logprob || same[2].Logprob != top[2].Logprob {
			t.Errorf("%s: %+v, want %+v", name, same, top)
		}
		if name != "temperature" && (other.ID == chosen.ID || other.Logprob >= chosen.Logprob) {
			t.Errorf("%s: chosen %+v", name, other)
		}
	}
	g := startExtra(t, e, greedy(t, e, questions[0], 1), Extra{})
	if _, err := g.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, list := g.Prob(); c.Bytes != nil || list != nil {
		t.Errorf("not asked for, but there: %+v, %+v", c, list)
	}
}

// TestSpecial: control tokens have text where that is asked for, but the end token.
func TestSpecial(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	var control int32 = -1
	for i := range ggml.Token(e.cfg.Model.VocabSize()) {
		if string(e.cfg.Model.Piece(i, true)) == "<|im_start|>" {
			control = int32(i)
		}
	}
	for _, tt := range []struct {
		special bool
		want    string
	}{{true, "<|im_start|><|im_start|>"}, {false, ""}} {
		req := endless(t, e, questions[0], 2)
		req.LogitBias[control] = 100
		if got, err := read(t.Context(), startExtra(t, e, req, Extra{Special: tt.special})); err != nil || got != tt.want {
			t.Errorf("special %v: %q, %v", tt.special, got, err)
		}
	}
	g := startExtra(t, e, greedy(t, e, questions[1], 48), Extra{Special: true})
	if got, err := read(t.Context(), g); err != nil || got != "6 plus 7 is 13." {
		t.Errorf("with the end token: %q, %v", got, err)
	}
}

func TestExtraRefuses(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	for _, tt := range []struct {
		extra Extra
		want  string
	}{
		{Extra{Grammar: "root ::= ("}, "grammar cannot be parsed"},
		{Extra{Grammar: `root ::= "a"`, Triggers: []string{""}}, "trigger"},
		{Extra{Logprobs: true, Top: -1}, "0 to 128"},
		{Extra{Logprobs: true, Top: 129}, "0 to 128"},
	} {
		if _, err := e.StartExtra(t.Context(), greedy(t, e, "a", 4), tt.extra); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v", tt.extra, err)
		}
	}
}
