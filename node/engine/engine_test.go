//go:build cgo

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/ggml"
)

const tinyPath = "../../ggml/tiny/kvasir-tiny-q4_k_m.gguf"

var (
	runtime *ggml.Runtime // of the process
	tiny    *ggml.Model   // with its own experts
)

// TestMain loads the shipped model once; at the end no C object may be left.
func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if left := ggml.Live(); len(left) > 0 && code == 0 {
		fmt.Fprintln(os.Stderr, "not closed:\n"+strings.Join(left, "\n"))
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	if runtime, err = ggml.Open(ggml.Config{}); err != nil {
		return 1, err
	}
	if tiny, err = runtime.LoadModel(ggml.ModelConfig{Path: tinyPath}); err != nil {
		return 1, err
	}
	code = m.Run()
	return code, tiny.Close()
}

// open makes an engine of one thread.
func open(t testing.TB, cfg Config) *Engine {
	t.Helper()
	if cfg.Model == nil {
		cfg.Model = tiny
	}
	if cfg.Context == 0 {
		cfg.Context = 256
	}
	cfg.Threads = 1
	e, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// greedy is a request for the likeliest tokens after a text.
func greedy(t testing.TB, e *Engine, text string, max int) Request {
	t.Helper()
	tokens, err := e.Tokenize(text)
	if err != nil {
		t.Fatal(err)
	}
	return Request{Prompt: tokens, MaxTokens: max}
}

// endless bans the tokens that end an answer.
func endless(t testing.TB, e *Engine, text string, max int) Request {
	t.Helper()
	req := greedy(t, e, text, max)
	req.LogitBias = map[int32]float32{}
	for i := range e.cfg.Model.VocabSize() {
		if e.cfg.Model.IsEOG(ggml.Token(i)) {
			req.LogitBias[int32(i)] = -1e9
		}
	}
	return req
}

func start(t testing.TB, ctx context.Context, e *Engine, req Request) *Generation {
	t.Helper()
	g, err := e.Start(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// read returns everything that a generation says, and how it ended.
func read(ctx context.Context, g *Generation) (text string, err error) {
	for {
		piece, err := g.Next(ctx)
		if errors.Is(err, io.EOF) {
			return text, nil
		}
		if err != nil {
			return text, err
		}
		text += string(piece)
	}
}

func chat(question string) string {
	return "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n"
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 1000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("after 5 s: not so: %s", what)
}

var questions = []string{
	chat("What is the capital of France?"),
	chat("What is 6 plus 7?"),
	chat("What does a worker hold?"),
	"The capital of France is",
	chat("What sound does a cow make?"),
	"The chemical symbol of gold is",
	chat("What colour is the sky?"),
	"The day after Monday is",
}

func TestAnswers(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	tests := []struct{ prompt, want string }{
		{"The capital of France is", " Paris."},
		{chat("What is 6 plus 7?"), "6 plus 7 is 13."},
		{chat("What does a worker hold?"), "A worker holds a slice of the experts of some layers, and nothing else."},
	}
	for _, tt := range tests {
		g := start(t, t.Context(), e, greedy(t, e, tt.prompt, 40))
		got, err := read(t.Context(), g)
		if err != nil || !strings.HasPrefix(got, tt.want) {
			t.Errorf("%q: %q, %v; want %q", tt.prompt, got, err, tt.want)
		}
	}
	g := start(t, t.Context(), e, greedy(t, e, chat("What is 6 plus 7?"), 40))
	if got, err := read(t.Context(), g); err != nil || got != "6 plus 7 is 13." || g.Finish() != "stop" || g.Generated() < 2 {
		t.Errorf("%q, %v, finish %q, %d tokens", got, err, g.Finish(), g.Generated())
	}
	g = start(t, t.Context(), e, greedy(t, e, chat("What is 6 plus 7?"), 2))
	if _, err := read(t.Context(), g); err != nil || g.Finish() != "length" || g.Generated() != 2 {
		t.Errorf("2 tokens at most: %v, finish %q, %d tokens", err, g.Finish(), g.Generated())
	}
}

// alone are the answers that one sequence at a time gives.
var alone = sync.OnceValues(func() ([]string, error) {
	e, err := Open(Config{Model: tiny, Context: 256, Sequences: 1, Threads: 1})
	if err != nil {
		return nil, err
	}
	defer e.Close()
	var answers []string
	for _, q := range questions {
		tokens, err := e.Tokenize(q)
		if err != nil {
			return nil, err
		}
		g, err := e.Start(context.Background(), Request{Prompt: tokens, MaxTokens: 48})
		if err != nil {
			return nil, err
		}
		text, err := read(context.Background(), g)
		if err != nil {
			return nil, err
		}
		answers = append(answers, text)
	}
	return answers, nil
})

// TestTogether: several sequences in one batch say what each says alone, also
// when prompts are read in small pieces beside running answers.
func TestTogether(t *testing.T) {
	want, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 4, 8} {
		e := open(t, Config{Sequences: n, Queue: len(questions), Chunk: 5})
		var running []*Generation
		for _, q := range questions {
			running = append(running, start(t, t.Context(), e, greedy(t, e, q, 48)))
		}
		for i, g := range running {
			got, err := read(t.Context(), g)
			if err != nil || got != want[i] || got == "" {
				t.Errorf("%d sequences, %q:\n got %q, %v\nwant %q", n, questions[i], got, err, want[i])
			}
		}
		st := e.Stats()
		if st.Completed != int64(len(questions)) || st.Running != 0 || st.Waiting != 0 || st.Prompt == 0 || st.TokensPerSecond <= 0 {
			t.Errorf("%d sequences: %+v", n, st)
		}
		if n == 8 && st.Decodes >= st.Generated {
			t.Errorf("%d decodes for %d tokens: nothing was batched", st.Decodes, st.Generated)
		}
	}
}

// TestJoinAndLeave: requests come and go while another answers. (Only answers
// that the model knows are compared: beside others its logits round differently,
// by about 1e-5, which decides nothing but the babble after them.)
func TestJoinAndLeave(t *testing.T) {
	want, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	e := open(t, Config{Sequences: 3, Chunk: 4, Context: 1024})
	ctx, cancel := context.WithCancel(t.Context())
	leaver := start(t, ctx, e, endless(t, e, questions[0], 0))
	if _, err := leaver.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	long := start(t, t.Context(), e, greedy(t, e, questions[2], 48))
	first, err := long.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	joiner := start(t, t.Context(), e, greedy(t, e, questions[1], 48))
	joined, err := joiner.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if got, err := read(t.Context(), joiner); err != nil || string(joined)+got != want[1] {
		t.Errorf("joiner: %q, %v; want %q", string(joined)+got, err, want[1])
	}
	if got, err := read(t.Context(), long); err != nil || string(first)+got != want[2] {
		t.Errorf("long answer: %q, %v; want %q", string(first)+got, err, want[2])
	}
	if _, err := read(t.Context(), leaver); !errors.Is(err, context.Canceled) {
		t.Errorf("leaver ends with %v", err)
	}
	if st := e.Stats(); st.Decodes >= st.Generated {
		t.Errorf("%d decodes for %d tokens: nothing was batched", st.Decodes, st.Generated)
	}
	if got, err := read(t.Context(), start(t, t.Context(), e, greedy(t, e, questions[1], 48))); err != nil || got != want[1] {
		t.Errorf("in the leaver's sequence: %q, %v; want %q", got, err, want[1])
	}
}

// TestCancel: a cancelled request, running or waiting, frees its place within
// one token.
func TestCancel(t *testing.T) {
	e := open(t, Config{Sequences: 2, Queue: 3, Context: 2048})
	ctx, cancel := context.WithCancel(t.Context())
	var running []*Generation
	for i := range 4 {
		running = append(running, start(t, ctx, e, endless(t, e, questions[i], 0)))
	}
	for _, g := range running[:2] {
		if _, err := g.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if st := e.Stats(); st.Running != 2 || st.Waiting != 2 {
		t.Fatalf("%+v, want 2 running and 2 waiting", st)
	}
	cancel()
	for _, g := range running { // by now, not when the runtime gets to it
		e.leave(g, context.Canceled)
	}
	before := e.Stats().Decodes
	waitFor(t, "all places are free", func() bool { st := e.Stats(); return st.Running == 0 && st.Waiting == 0 })
	st := e.Stats()
	if st.Decodes-before > 1 || st.Cancelled != 4 {
		t.Errorf("%d more decodes, %d cancelled; want at most 1, and 4", st.Decodes-before, st.Cancelled)
	}
	for _, g := range running {
		if _, err := read(t.Context(), g); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled request ends with %v", err)
		}
	}
	want, err := alone()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := read(t.Context(), start(t, t.Context(), e, greedy(t, e, questions[1], 48))); err != nil || got != want[1] {
		t.Errorf("after the cancel: %q, %v", got, err)
	}
}

func TestQueueFull(t *testing.T) {
	e := open(t, Config{Sequences: 1, Queue: 1, Context: 2048})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 2 {
		start(t, ctx, e, endless(t, e, questions[0], 0))
	}
	_, err := e.Start(t.Context(), greedy(t, e, questions[1], 4))
	var full *QueueFullError
	if !errors.Is(err, ErrQueueFull) || !errors.As(err, &full) || full.Running+full.Waiting != 2 || full.RetryAfter() < time.Second {
		t.Fatalf("third request: %v (%+v)", err, full)
	}
	cancel()
	waitFor(t, "the queue empties", func() bool { return e.Stats().Waiting+e.Stats().Running == 0 })
	if got, err := read(t.Context(), start(t, t.Context(), e, greedy(t, e, questions[1], 48))); err != nil || got == "" {
		t.Errorf("after the queue was full: %q, %v", got, err)
	}
}

func TestStartRefuses(t *testing.T) {
	e := open(t, Config{Sequences: 1, Context: 16})
	vocab := tiny.VocabSize()
	tests := []struct {
		name string
		req  Request
		want string
	}{
		{"empty prompt", Request{}, "prompt is empty"},
		{"long prompt", Request{Prompt: make([]int32, 16)}, "the prompt has 16 tokens; the context holds 16"},
		{"negative token", Request{Prompt: []int32{1, -1}}, "prompt token 1 is -1"},
		{"token outside", Request{Prompt: []int32{int32(vocab)}}, fmt.Sprintf("the vocabulary has %d", vocab)},
		{"bias outside", Request{Prompt: []int32{1}, LogitBias: map[int32]float32{int32(vocab): 1}}, "logit bias"},
	}
	for _, tt := range tests {
		if _, err := e.Start(t.Context(), tt.req); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	var long *ContextError
	_, err := e.Start(t.Context(), Request{Prompt: make([]int32, 40)})
	if !errors.As(err, &long) || long.Prompt != 40 || long.Limit != 16 {
		t.Errorf("long prompt: %v", err)
	}
	g := start(t, t.Context(), e, Request{Prompt: []int32{5, 6, 7}, LogitBias: endless(t, e, "a", 0).LogitBias})
	if _, err := read(t.Context(), g); err != nil || g.Generated() != 13 || g.Finish() != "length" {
		t.Errorf("a full context: %v, %d tokens, finish %q; want 13, length", err, g.Generated(), g.Finish())
	}
}

func TestConfigRefuses(t *testing.T) {
	for _, cfg := range []Config{
		{}, {Model: tiny, Context: 1}, {Model: tiny, Sequences: -1}, {Model: tiny, Queue: -1},
		{Model: tiny, Sequences: 8, Batch: 8}, {Model: tiny, Chunk: -1}, {Model: tiny, Threads: -1},
	} {
		if e, err := Open(cfg); err == nil {
			e.Close()
			t.Errorf("Open accepts %+v", cfg)
		}
	}
}

func TestCanaryAndReady(t *testing.T) {
	e := open(t, Config{Sequences: 1})
	if err := e.Ready(); !errors.Is(err, errNoCanary) {
		t.Errorf("before a canary: %v", err)
	}
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := e.Ready(); err != nil {
		t.Errorf("after the canary: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Canary(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled canary: %v", err)
	}
	if err := e.Ready(); err != nil {
		t.Errorf("a cancelled canary is no failure: %v", err)
	}
}

// Canaries beside an answer leave it as it is alone, to the bit.
func TestCanaryBesideAnswers(t *testing.T) {
	for _, q := range questions[:2] {
		e := open(t, Config{Sequences: 2, Context: 1024})
		want, err := read(t.Context(), start(t, t.Context(), e, endless(t, e, q, 200)))
		if err != nil {
			t.Fatal(err)
		}
		e = open(t, Config{Sequences: 2, Context: 1024}) // whose cells are empty, too
		g := start(t, t.Context(), e, endless(t, e, q, 200))
		sent, done := 0, make(chan struct{})
		stop := make(chan struct{})
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := e.Canary(t.Context()); err != nil {
					t.Error(err)
					return
				}
				sent++
			}
		}()
		got, err := read(t.Context(), g)
		close(stop)
		<-done
		if err != nil || got != want {
			t.Errorf("%v; beside %d canaries:\n got %q\nwant %q", err, sent, got, want)
		}
		if sent < 2 {
			t.Errorf("%d canaries were beside the answer", sent)
		}
	}
}

func TestClose(t *testing.T) {
	e := open(t, Config{Sequences: 1, Context: 2048})
	running := start(t, t.Context(), e, endless(t, e, questions[0], 0))
	waiting := start(t, t.Context(), e, endless(t, e, questions[1], 0))
	if _, err := running.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, g := range []*Generation{running, waiting} {
		if _, err := read(t.Context(), g); !errors.Is(err, ErrClosed) {
			t.Errorf("a request of a closed engine ends with %v", err)
		}
	}
	if _, err := e.Start(t.Context(), Request{Prompt: []int32{1}}); !errors.Is(err, ErrClosed) {
		t.Errorf("Start after Close: %v", err)
	}
	if err := e.Ready(); !errors.Is(err, ErrClosed) {
		t.Errorf("Ready after Close: %v", err)
	}
}

// TestSampled: the seed decides, not the neighbours.
func TestSampled(t *testing.T) {
	e := open(t, Config{Sequences: 4})
	req := greedy(t, e, "The", 24)
	req.Temperature, req.TopP, req.Seed = 1.5, 0.95, 42
	first, err := read(t.Context(), start(t, t.Context(), e, req))
	if err != nil {
		t.Fatal(err)
	}
	other := req
	other.Seed = 43
	gs := []*Generation{start(t, t.Context(), e, req), start(t, t.Context(), e, other), start(t, t.Context(), e, req)}
	var texts []string
	for _, g := range gs {
		text, err := read(t.Context(), g)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, text)
	}
	if texts[0] != first || texts[2] != first {
		t.Errorf("seed 42 gives %q alone, %q and %q beside others", first, texts[0], texts[2])
	}
	if texts[1] == first {
		t.Errorf("seeds 42 and 43 both give %q", first)
	}
	if slices.Contains(texts, "") {
		t.Errorf("empty answer in %q", texts)
	}
}
