//go:build cgo

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"kvasird/ggml"
)

// judge reads whole conversations at once in a context of its own, and says how
// far the tokens of an answer are from the likeliest.
type judge struct {
	t        testing.TB
	ctx      *ggml.Context
	batch    *ggml.Batch
	rounding float32 // two logits may differ by it
}

const judged = 1024 // tokens at most

func newJudge(t testing.TB, m *ggml.Model) *judge {
	t.Helper()
	c, err := m.NewContext(ggml.ContextConfig{Tokens: judged, Batch: judged, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &judge{t, c, ggml.NewBatch(judged), 2 * 0.3}
}

// distance is by how much the logit of some token of the answer is below the
// largest one, at most. Greedy answers have 0 but for rounding.
func (j *judge) distance(prompt, answer []int32) (most float32) {
	j.t.Helper()
	j.ctx.SeqRemove(0, -1, -1)
	j.batch.Reset()
	all := slices.Concat(prompt, answer)
	for i, tok := range all[:len(all)-1] {
		j.batch.Add(ggml.Token(tok), i, 0, i >= len(prompt)-1)
	}
	if err := j.ctx.Decode(context.Background(), j.batch); err != nil {
		j.t.Fatal(err)
	}
	for i, tok := range answer {
		logits := j.ctx.Logits(len(prompt) - 1 + i)
		most = max(most, slices.Max(logits)-logits[tok])
	}
	return most
}

// answerOf reads a generation to its end.
func answerOf(t testing.TB, g *Generation) (answer []int32) {
	t.Helper()
	for {
		tok, _, err := g.NextToken(t.Context())
		if errors.Is(err, io.EOF) {
			return answer
		}
		if err != nil {
			t.Fatal(err)
		}
		answer = append(answer, int32(tok))
	}
}

// talk is a conversation, in tokens.
type talk struct {
	owner  string
	tokens []int32 // all so far
	held   int     // of them are in the cells after the last turn
}

// turn adds a question, has it answered by at most 12 tokens, and reports how many
// tokens of the prompt were cached.
func (k *talk) turn(e *Engine, j *judge, question []int32) (cached int) {
	j.t.Helper()
	k.tokens = append(k.tokens, question...)
	prompt := slices.Clone(k.tokens)
	before := e.Stats()
	g := start(j.t, j.t.Context(), e, Request{Prompt: prompt, MaxTokens: 12, Owner: k.owner})
	answer := answerOf(j.t, g)
	if d := j.distance(prompt, answer); d > j.rounding {
		j.t.Errorf("owner %q, prompt of %d tokens, %d cached: an answer's token is %.2g below the likeliest, want at most %.2g",
			k.owner, len(prompt), g.Cached(), d, j.rounding)
	}
	st := e.Stats()
	if read, saved := int(st.Prompt-before.Prompt), int(st.Cached-before.Cached); saved != g.Cached() || read+saved != len(prompt) {
		j.t.Errorf("%d tokens: %d read and %d cached (%d by the engine's count)", len(prompt), read, g.Cached(), saved)
	}
	k.tokens = append(k.tokens, answer...)
	k.held = len(k.tokens) - 1 // the last token was drawn, not read
	return g.Cached()
}

// tools stands in front of conversations, as agents send it.
const tools = "<|im_start|>system\nYou have tools. To call one, write its name and its arguments as JSON.\n" +
	`{"name":"weather","description":"the weather of a city","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}` + "\n" +
	`{"name":"clock","description":"the time of a city","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}` +
	"<|im_end|>\n"

func tokensOf(t testing.TB, text string) []int32 {
	t.Helper()
	tokens, err := Tokenize(tiny, text)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// TestTenTurns: each turn of a conversation computes what is new in it, and no more.
func TestTenTurns(t *testing.T) {
	e, j := open(t, Config{Sequences: 2, Context: judged}), newJudge(t, tiny)
	system := tokensOf(t, tools)
	k := &talk{tokens: slices.Clone(system)}
	for turn := range 10 {
		question := tokensOf(t, "<|im_end|>\n"+chat("What is 6 plus 7?"))
		length := len(k.tokens)
		cached := k.turn(e, j, question)
		want := 0
		if turn > 0 {
			want = length - 1 // all but the last token drawn
		}
		if cached != want {
			t.Errorf("turn %d: %d tokens cached, want %d", turn+1, cached, want)
		}
	}
	other := &talk{owner: "other", tokens: system}
	if cached := other.turn(e, j, tokensOf(t, questions[1])); cached != 0 {
		t.Errorf("another owner's request has %d tokens cached", cached)
	}
	// The judge must see a wrong prefix.
	if d := j.distance(tokensOf(t, questions[1]), tokensOf(t, " Paris.")); d < 4*j.rounding {
		t.Errorf("a wrong answer is only %.2g below the likeliest", d)
	}
}

// TestAskedAgain: the same prompt again computes one token, and an edited one what
// follows the edit.
func TestAskedAgain(t *testing.T) {
	e, j := open(t, Config{Sequences: 1, Context: judged}), newJudge(t, tiny)
	system := tokensOf(t, tools)
	for i, tt := range []struct {
		question string
		want     func(prompt int) int
	}{
		{questions[0], func(int) int { return 0 }},
		{questions[0], func(prompt int) int { return prompt - 1 }},
		{questions[1], func(int) int { return len(system) + shared(t, questions[0], questions[1]) }},
		{questions[1], func(prompt int) int { return prompt - 1 }},
	} {
		k := &talk{tokens: slices.Clone(system)}
		question := tokensOf(t, tt.question)
		if got, want := k.turn(e, j, question), tt.want(len(system)+len(question)); got != want {
			t.Errorf("request %d: %d tokens cached, want %d", i, got, want)
		}
	}
}

// shared is how many tokens two texts begin with alike.
func shared(t *testing.T, a, b string) int {
	x, y := tokensOf(t, a), tokensOf(t, b)
	n := 0
	for n < min(len(x), len(y)) && x[n] == y[n] {
		n++
	}
	return n
}

// TestInterleaved: conversations that begin alike keep a slot each while there are
// enough; with fewer, the one that was used least recently loses its own part, and
// what all have in common is still not computed again.
func TestInterleaved(t *testing.T) {
	e, j := open(t, Config{Sequences: 3, Context: judged}), newJudge(t, tiny)
	system := tokensOf(t, tools)
	talks := map[byte]*talk{}
	// Each letter is a turn of that conversation; * says that all of it was kept.
	for _, turn := range []string{"A", "B", "A*", "B*", "C", "A*", "B*", "C*", "D", "B*", "C*", "D*", "A", "C*", "D*", "A*", "B"} {
		name := turn[0]
		k := talks[name]
		first := k == nil
		if first {
			k = &talk{tokens: slices.Clone(system)}
			talks[name] = k
		}
		held, question := k.held, tokensOf(t, "\n"+string(name)+chat("What is 6 plus 7?"))
		cached := k.turn(e, j, question)
		switch {
		case len(turn) == 2 && cached != held:
			t.Errorf("%s: %d tokens cached, want %d", turn, cached, held)
		case len(turn) == 1 && len(talks) == 1 && cached != 0:
			t.Errorf("%s: %d tokens cached of nothing", turn, cached)
		case len(turn) == 1 && len(talks) > 1 && (cached < len(system) || cached > len(system)+2):
			t.Errorf("%s: %d tokens cached, want the %d that all have in common", turn, cached, len(system))
		}
	}
}

// TestSharedWhileRunning: a prompt begins with the cells of an answer that runs,
// and both go on.
func TestSharedWhileRunning(t *testing.T) {
	e, j := open(t, Config{Sequences: 2, Context: judged}), newJudge(t, tiny)
	long := endless(t, e, tools+questions[0], 100)
	g := start(t, t.Context(), e, long)
	if _, err := g.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	k := &talk{tokens: tokensOf(t, tools)}
	system := len(k.tokens)
	if cached := k.turn(e, j, tokensOf(t, questions[1])); cached != system+shared(t, questions[0], questions[1]) {
		t.Errorf("%d tokens cached, want %d of the tools and what the questions have in common", cached, system)
	}
	answerOf(t, g)
	if g.Generated() != 100 {
		t.Errorf("the other answer has %d tokens", g.Generated())
	}
	again := &talk{tokens: tokensOf(t, tools)}
	if cached, want := again.turn(e, j, tokensOf(t, questions[0])), len(long.Prompt)-1; cached != want {
		t.Errorf("%d tokens cached of the answer that ran, want %d", cached, want)
	}
}

// TestCancelKeepsCells: who leaves midway and asks again does not pay twice.
func TestCancelKeepsCells(t *testing.T) {
	e, j := open(t, Config{Sequences: 1, Context: judged}), newJudge(t, tiny)
	ctx, cancel := context.WithCancel(t.Context())
	req := endless(t, e, tools+questions[1], 0)
	g := start(t, ctx, e, req)
	for range 3 {
		if _, err := g.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	waitFor(t, "the slot is free", func() bool { return e.Stats().Running == 0 })
	k := &talk{tokens: tokensOf(t, tools)}
	if cached := k.turn(e, j, tokensOf(t, questions[1])); cached != len(req.Prompt)-1 {
		t.Errorf("%d tokens cached, want all of the prompt's %d but the last", cached, len(req.Prompt))
	}
}

// TestNothingKept: canaries and failures leave no cells.
func TestNothingKept(t *testing.T) {
	e, s := openSwarm(t, 2)
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	req := endless(t, e, tools, 5)
	req.Prompt = req.Prompt[:200]
	s.set(func() { s.failAt = e.cfg.Model.Layers() + 1 }) // the second batch
	g := start(t, t.Context(), e, req)
	var missing *missingError
	if _, err := read(t.Context(), g); !errors.As(err, &missing) || g.Generated() != 1 {
		t.Fatalf("%v after %d tokens, want the expert call's error after one", err, g.Generated())
	}
	again := start(t, t.Context(), e, req)
	if _, err := read(t.Context(), again); err != nil || again.Cached() != 0 {
		t.Errorf("after a failure: %v, %d tokens cached", err, again.Cached())
	}
	third := start(t, t.Context(), e, req)
	if _, err := read(t.Context(), third); err != nil || third.Cached() != 199 {
		t.Errorf("after an answer: %v, %d tokens cached, want 199", err, third.Cached())
	}
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for i := range e.lanes[0].slots {
		kept += len(e.lanes[0].slots[i].kept)
	}
	if kept != 204 {
		t.Errorf("%d tokens are kept, want 204 of the last answer", kept)
	}
}

// TestMakesRoom: what is kept is dropped for a request that needs the cells, first
// what was used least recently; running requests are not, and are not to blame.
func TestMakesRoom(t *testing.T) {
	e, j := open(t, Config{Sequences: 3, Context: 512, Cells: 512}), newJudge(t, tiny)
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	text := tokensOf(t, tools)
	for _, tt := range []struct {
		owner string
		want  int
	}{{"a", 0}, {"b", 0}, {"a", len(text) - 1}, {"c", 0}, {"a", len(text) - 1}, {"b", 0}, {"c", 0}, {"b", len(text) - 1}} {
		k := &talk{owner: tt.owner}
		if cached := k.turn(e, j, text); cached != tt.want {
			t.Errorf("owner %s: %d tokens cached, want %d", tt.owner, cached, tt.want)
		}
	}
	var running []*Generation
	for _, owner := range []string{"x", "y"} {
		req := endless(t, e, tools, 0)
		req.Owner = owner
		running = append(running, start(t, t.Context(), e, req))
	}
	full, long := 0, 0
	for _, g := range running {
		_, err := read(t.Context(), g)
		switch {
		case errors.Is(err, ggml.ErrNoRoom):
			full++
		case err == nil && g.Finish() == "length":
			long++
		default:
			t.Errorf("%v", err)
		}
	}
	if full != 1 || long != 1 {
		t.Errorf("of two answers that do not fit beside each other %d found no room and %d were completed", full, long)
	}
	if err := e.Ready(); err != nil {
		t.Errorf("a full cache is no failure of the model: %v", err)
	}
}

// generated makes a model of F32 random weights. All its experts are used: which ones
// are chosen may hang on the last bit.
func generated(t *testing.T, arch string) *ggml.Model {
	t.Helper()
	path := filepath.Join(t.TempDir(), "model.gguf")
	cfg := ggml.GenerateConfig{Arch: arch, Seed: 11}
	if slices.Contains(ggml.GenerateArchitectures(), arch) {
		cfg.Experts, cfg.ExpertsUsed = 4, 4
	}
	if err := runtime.GenerateModel(path, cfg); err != nil {
		t.Fatal(err)
	}
	m, err := runtime.LoadModel(ggml.ModelConfig{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// exact is the rounding of generated models.
const exact = 0.03

// random draws tokens.
func random(rng *rand.Rand, m *ggml.Model, n int) (out []int32) {
	for range n {
		out = append(out, int32(rng.IntN(m.VocabSize())))
	}
	return out
}

// TestMemories: with every kind of memory that llama.cpp has, an answer after a
// cached prefix is the one without, whatever of it is reused.
func TestMemories(t *testing.T) {
	const part, none = "part", "none"
	for _, tt := range []struct {
		arch   string
		edited string // what an edited prompt reuses
	}{
		{"qwen35moe", none}, {"qwen3next", none}, {"mamba2", none}, {"jamba", none}, {"falcon-h1", none},
		{"qwen3", part}, {"gemma3", part}, {"gpt-oss", part}, {"llama4", part}, {"deepseek2", part}, {"deepseek4", none},
	} {
		t.Run(tt.arch, func(t *testing.T) {
			m := generated(t, tt.arch)
			e, j := open(t, Config{Model: m, Sequences: 3, Context: judged}), newJudge(t, m)
			j.rounding = exact
			rng := rand.New(rand.NewPCG(1, 2))
			check := func(what string, cached, want int) {
				t.Helper()
				if cached != want {
					t.Errorf("%s: %d tokens cached, want %d", what, cached, want)
				}
			}
			k := &talk{}
			check("first turn", k.turn(e, j, random(rng, m, 100)), 0)
			check("second turn", k.turn(e, j, random(rng, m, 20)), 111)
			check("third turn", k.turn(e, j, random(rng, m, 20)), 143)
			again, edited := 0, 111 // what is kept of the first question, asked again
			if tt.edited == part {
				again, edited = 99, 130
			}
			check("asked again", (&talk{}).turn(e, j, k.tokens[:100]), again)
			branch := &talk{tokens: slices.Clone(k.tokens[:130])}
			check("edited", branch.turn(e, j, random(rng, m, 20)), edited)
			check("edited, next turn", branch.turn(e, j, random(rng, m, 20)), 161)
			check("not edited, next turn", k.turn(e, j, random(rng, m, 20)), 175)
			check("another", (&talk{}).turn(e, j, random(rng, m, 300)), 0)
		})
	}
}

// TestWindowIsGone: cells that a sliding window has passed are overwritten for others.
// A conversation goes on without them; a prompt that needs them is read from its start.
func TestWindowIsGone(t *testing.T) {
	m := generated(t, "gemma3")
	e, j := open(t, Config{Model: m, Sequences: 2, Context: 256}), newJudge(t, m)
	j.rounding = exact
	rng := rand.New(rand.NewPCG(3, 4))
	k := &talk{}
	k.turn(e, j, random(rng, m, 150))
	for range 3 {
		(&talk{owner: "other"}).turn(e, j, random(rng, m, 240))
		held := k.held
		if cached := k.turn(e, j, random(rng, m, 5)); cached != held {
			t.Errorf("the conversation goes on with %d tokens cached, want %d", cached, held)
		}
	}
	edited := &talk{tokens: slices.Clone(k.tokens[:100])}
	if cached := edited.turn(e, j, random(rng, m, 20)); cached != 0 {
		t.Errorf("%d tokens cached, though their cells are gone", cached)
	}
}

// BenchmarkTenthTurn: the time to the first token of a conversation's tenth turn
// without what was cached, over that with it.
func BenchmarkTenthTurn(b *testing.B) {
	e := open(b, Config{Sequences: 2, Context: judged})
	tokens := tokensOf(b, tools)
	for range 9 {
		tokens = append(tokens, tokensOf(b, questions[1]+"6 plus 7 is 13.<|im_end|>\n")...)
	}
	question := tokensOf(b, questions[1])
	first := func(req Request) time.Duration {
		started := time.Now()
		g := start(b, b.Context(), e, req)
		if _, err := g.Next(b.Context()); err != nil {
			b.Fatal(err)
		}
		took := time.Since(started)
		answerOf(b, g)
		return took
	}
	var with, without []time.Duration
	for i := 0; b.Loop(); i++ {
		owner := fmt.Sprint(i)
		first(Request{Prompt: tokens, MaxTokens: 1, Owner: owner})
		tenth := slices.Concat(tokens, question)
		with = append(with, first(Request{Prompt: tenth, MaxTokens: 1, Owner: owner}))
		without = append(without, first(Request{Prompt: tenth, MaxTokens: 1, Owner: owner + "'"}))
	}
	median := func(d []time.Duration) float64 { slices.Sort(d); return d[len(d)/2].Seconds() }
	b.ReportMetric(float64(len(tokens)+len(question)), "tokens")
	b.ReportMetric(1000*median(with), "ms-with")
	b.ReportMetric(1000*median(without), "ms-without")
	b.ReportMetric(median(without)/median(with), "ratio")
}
