package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// scriptEngine plays a script and judges its caller: every generation that was
// started must be ended by its context before the test is over.
type scriptEngine struct {
	pieces   []string // the answer's tokens
	finish   string   // "" = "stop"
	startErr error
	nextErr  error         // after the pieces; nil = the answer ends
	block    bool          // after the pieces: wait for ever
	delay    time.Duration // before each piece
	notReady error
	cached   int         // tokens of the prompt
	able     *Abilities  // nil: an Engine and no more
	lacks    Abilities   // of able, which shows when it starts
	probs    []TokenProb // alternatives of each token
	vectors  func(prompts [][]int32) ([][]float32, error)

	mu      sync.Mutex // guards what follows
	last    Request
	extra   Extra
	prompts []string
	seeds   []uint32
	live    int
}

// engine is the engine as the gateway sees it: with only what it is able to do.
func (e *scriptEngine) engine() Engine {
	if e.able == nil {
		return e
	}
	return &ableEngine{e}
}

// ableEngine serves more than Engine asks. Its log-probabilities are −n for the
// n-th token.
type ableEngine struct{ *scriptEngine }

func (e *ableEngine) Abilities() Abilities { return *e.able }

func (e *ableEngine) StartExtra(ctx context.Context, req Request, extra Extra) (Stream, error) {
	if extra.Grammar != "" && !e.able.Grammar || extra.Special && !e.able.Special || extra.Logprobs && !e.able.Logprobs {
		return nil, errors.New("asked for more than it said it can")
	}
	if l := e.lacks; extra.Grammar != "" && l.Grammar || extra.Special && l.Special || extra.Logprobs && l.Logprobs {
		return nil, lackingError{l}
	}
	s, err := e.Start(ctx, req)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.extra = extra
	if err != nil || !extra.Logprobs {
		return s, err
	}
	return probStream{s.(*scriptStream)}, nil
}

func (e *ableEngine) Embed(ctx context.Context, owner string, prompts [][]int32) ([][]float32, error) {
	e.mu.Lock()
	e.last.Owner = owner
	e.mu.Unlock()
	if e.block {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return e.vectors(prompts)
}

type lackingError struct{ lacks Abilities }

func (lackingError) Error() string      { return "it turned out to lack something" }
func (e lackingError) Lacks() Abilities { return e.lacks }

type probStream struct{ *scriptStream }

func (s probStream) Prob() (TokenProb, []TokenProb) {
	return TokenProb{ID: int32(s.n), Bytes: []byte(s.e.pieces[s.n-1]), Logprob: -float32(s.n)}, s.e.probs
}

func (e *scriptEngine) Ready() error { return e.notReady }

// Tokenize makes one token of each byte.
func (e *scriptEngine) Tokenize(prompt string) ([]int32, error) {
	if strings.Contains(prompt, "untokenizable") {
		return nil, errors.New("no such bytes")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.prompts = append(e.prompts, prompt)
	return make([]int32, len(prompt)), nil
}

func (e *scriptEngine) Start(ctx context.Context, req Request) (Stream, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last = req
	e.seeds = append(e.seeds, req.Seed)
	if e.startErr != nil {
		return nil, e.startErr
	}
	e.live++
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.live--
	})
	return &scriptStream{e: e, ctx: ctx}, nil
}

func (e *scriptEngine) running() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.live
}

func (e *scriptEngine) prompt() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.prompts) == 0 {
		return ""
	}
	return e.prompts[len(e.prompts)-1]
}

func (e *scriptEngine) request() Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

type scriptStream struct {
	e   *scriptEngine
	ctx context.Context
	n   int
	due <-chan time.Time // of the next piece
}

func (s *scriptStream) Next(ctx context.Context) ([]byte, error) {
	if s.e.delay > 0 {
		if s.due == nil {
			s.due = time.After(s.e.delay)
		}
		select {
		case <-s.due:
			s.due = nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if s.n < len(s.e.pieces) {
		s.n++
		return []byte(s.e.pieces[s.n-1]), nil
	}
	if s.e.nextErr != nil {
		return nil, s.e.nextErr
	}
	if s.e.block {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return nil, io.EOF
}

func (s *scriptStream) Cached() int { return s.e.cached }

func (s *scriptStream) Finish() string {
	if s.e.finish == "" {
		return "stop"
	}
	return s.e.finish
}

type queueFull struct{}

func (queueFull) Error() string             { return "the queue is full: 8 requests wait" }
func (queueFull) RetryAfter() time.Duration { return 1500 * time.Millisecond }

type tooLong struct{}

func (tooLong) Error() string             { return "the prompt has 900 tokens, the context holds 512" }
func (tooLong) ContextLength() (int, int) { return 900, 512 }

const chatML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" +
	"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

// logLines collects what is logged.
type logLines struct {
	mu sync.Mutex // guards b
	b  strings.Builder
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// serve starts a gateway on loopback. When the test ends no generation may be
// left running.
func serve(t testing.TB, e *scriptEngine, change func(*Gateway)) (url string, logged *logLines) {
	t.Helper()
	logged = &logLines{}
	g, err := New(Config{
		Models: []Model{
			{ID: "kvasir-tiny", Created: time.Unix(1, 0), ChatTemplate: chatML, VocabSize: 100, Engine: e},
			{ID: "org/big:q4", Created: time.Unix(2, 0), ChatTemplate: "{{ raise_exception('roles must alternate') }}", VocabSize: 100, Engine: e},
			{ID: "broken", ChatTemplate: "{% include 'x' %}", Engine: e},
		},
		Hosts:  []string{"Swarm.Example"},
		Logger: slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Now:    func() time.Time { return time.Unix(1700000000, 0) },
		Random: func() uint64 { return 7 },
	})
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(g)
	}
	srv := httptest.NewServer(g.Handler())
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections() // else Close waits for those that were never used
		srv.Close()
		waitFor(t, "every generation ends", func() bool { return e.running() == 0 })
	})
	return srv.URL, logged
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for range 500 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("after 5 s: not so: %s", what)
}

func post(t testing.TB, url, body string) (int, http.Header, string) {
	t.Helper()
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(data)
}

type errorBody struct {
	Error struct {
		Message, Type string
		Param, Code   *string
	}
}

func decodeError(t testing.TB, body string) errorBody {
	t.Helper()
	var e errorBody
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Fatalf("not an error in OpenAI's shape: %q (%v)", body, err)
	}
	return e
}

// chatBody is a request with more fields, given as JSON without braces.
func chatBody(more string) string {
	if more != "" {
		more = "," + more
	}
	return `{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]` + more + `}`
}

// TestShippedTemplate checks that the tests use the template of the shipped model.
func TestShippedTemplate(t *testing.T) {
	model, err := os.ReadFile("../../ggml/tiny/kvasir-tiny-q4_k_m.gguf")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(model), chatML) {
		t.Error("the shipped model's chat template is not the one that is tested here")
	}
}

// weatherTool is a field of a request in OpenAI's chat API.
const weatherTool = `"tools":[{"type":"function","function":{"name":"get_weather","description":"of a <city>","parameters":{"type":"object",` +
	`"properties":{"unit":{"type":"string"},"city":{"type":"string"}},"required":["city"],"additionalProperties":false}}}]`
