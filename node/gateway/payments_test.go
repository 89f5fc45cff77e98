package gateway

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
)

// till is Payments that judges its caller: every charge is ended, once.
type till struct {
	t      *testing.T
	refuse error

	mu    sync.Mutex // guards what follows
	costs []Cost
	open  int
	ends  []tillEnd
}

type tillEnd struct {
	tokens, computed int
	failed           error
}

type tillKey struct{}

func (p *till) Charge(r *http.Request, h http.Header, c Cost) (Charge, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.costs = append(p.costs, c)
	h.Set("Payment-Response", "yes")
	if p.refuse != nil {
		return nil, p.refuse
	}
	p.open++
	return &tillCharge{p: p}, nil
}

func (p *till) Quote(r *http.Request, c Cost) (any, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.costs = append(p.costs, c)
	return map[string]string{"quote": "1"}, p.refuse
}

type tillCharge struct {
	p     *till
	ended bool
}

func (c *tillCharge) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, tillKey{}, "paid")
}

func (c *tillCharge) End(o Outcome) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.ended {
		c.p.t.Error("a charge was ended twice")
	}
	c.ended = true
	c.p.open--
	c.p.ends = append(c.p.ends, tillEnd{o.Delivered, o.Computed, o.Failed})
}

// end waits for the one charge's end.
func (p *till) end() tillEnd {
	p.t.Helper()
	waitFor(p.t, "the charge is ended", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.open == 0 && len(p.ends) == 1
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ends) != 1 {
		p.t.FailNow()
	}
	return p.ends[0]
}

// paidEngine sees the charge's context.
type paidEngine struct {
	*scriptEngine
	seen chan any
}

func (e *paidEngine) Start(ctx context.Context, req Request) (Stream, error) {
	e.seen <- ctx.Value(tillKey{})
	return e.scriptEngine.Start(ctx, req)
}

func servePaid(t *testing.T, e Engine, p *till, change func(*Gateway)) string {
	t.Helper()
	g, err := New(Config{Payments: p, Models: []Model{{ID: "m", Digest: "0123456789abcdef", ChatTemplate: chatML, VocabSize: 1000, Engine: e}}})
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(g)
	}
	srv := httptest.NewServer(g.Handler())
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		srv.Close()
	})
	return srv.URL
}

func sendPaid(t *testing.T, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest("POST", url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(data)
}

const paidTurn = `"messages":[{"role":"user","content":"hi"}]`

// turnTokens is the prompt of paidTurn: a token for each byte.
var turnTokens = len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

// What a request costs is asked before anything is queued, and what was delivered is
// said once it is over, in every API.
func TestChargePerAPI(t *testing.T) {
	tests := []struct {
		name, path, body string
		want             Cost
		delivered        int
	}{
		{"chat", "/v1/chat/completions", `{"model":"m","max_tokens":9,` + paidTurn + `}`, Cost{Prompt: turnTokens, Answers: 9}, turnTokens + 2},
		{"chat without a limit", "/v1/chat/completions", `{"model":"m",` + paidTurn + `}`, Cost{Prompt: turnTokens, Answers: PaidAnswer}, turnTokens + 2},
		{"chat, streamed", "/v1/chat/completions", `{"model":"m","max_tokens":9,"stream":true,` + paidTurn + `}`, Cost{Prompt: turnTokens, Answers: 9}, turnTokens + 2},
		{"three answers", "/v1/chat/completions", `{"model":"m","max_tokens":9,"n":3,` + paidTurn + `}`, Cost{Prompt: turnTokens, Answers: 27}, turnTokens + 6},
		{"completions", "/v1/completions", `{"model":"m","max_tokens":9,"n":2,"prompt":["ab","cde"]}`, Cost{Prompt: 5, Answers: 36}, 5 + 8},
		{"completions without a limit", "/v1/completions", `{"model":"m","prompt":"ab"}`, Cost{Prompt: 2, Answers: 16}, 4},
		{"completions, streamed", "/v1/completions", `{"model":"m","max_tokens":9,"stream":true,"prompt":["ab","cde"]}`, Cost{Prompt: 5, Answers: 18}, 5 + 4},
		{"messages", "/v1/messages", `{"model":"m","max_tokens":9,` + paidTurn + `}`, Cost{Prompt: turnTokens, Answers: 9}, turnTokens + 2},
		{"responses", "/v1/responses", `{"model":"m","max_output_tokens":16,"input":"hi"}`, Cost{Prompt: turnTokens, Answers: 16}, turnTokens + 2},
		{"responses, streamed", "/v1/responses", `{"model":"m","max_output_tokens":16,"stream":true,"input":"hi"}`, Cost{Prompt: turnTokens, Answers: 16}, turnTokens + 2},
		{"embeddings", "/v1/embeddings", `{"model":"m","input":["ab","cde"]}`, Cost{Prompt: 5}, 5},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &till{t: t}
			e := &scriptEngine{pieces: []string{"a", "b"}, able: &Abilities{}, vectors: func(prompts [][]int32) ([][]float32, error) {
				return make([][]float32, len(prompts)), nil
			}}
			url := servePaid(t, e.engine(), p, nil)
			resp, body := sendPaid(t, url+tt.path, tt.body)
			if resp.StatusCode != 200 || resp.Header.Get("Payment-Response") != "yes" {
				t.Errorf("%d %s %v", resp.StatusCode, body, resp.Header)
			}
			if got := p.end(); got.tokens != tt.delivered || got.failed != nil {
				t.Errorf("got %d tokens, %v; want %d", got.tokens, got.failed, tt.delivered)
			}
			tt.want.Model, tt.want.Name, tt.want.Body = "0123456789abcdef", "m", sha256.Sum256([]byte(tt.body))
			tt.want.Spend = true // nobody is asked for a key, and the client is on this machine
			if !reflect.DeepEqual(p.costs, []Cost{tt.want}) {
				t.Errorf("got %+v, want %+v", p.costs, tt.want)
			}
		})
	}
}

// Whom the node may pay for: where keys are asked for the key says it, else the address.
func TestWhoMaySpend(t *testing.T) {
	ring := NewKeyRing([]Key{{Name: "spender", Hash: HashKey("s"), Spend: true}, {Name: "user", Hash: HashKey("u")}}, time.Now)
	for _, tt := range []struct {
		name, key, from string
		keys            Keys
		want            bool
	}{
		{"a key with the right", "s", "192.0.2.1:7", ring, true},
		{"a key without", "u", "192.0.2.1:7", ring, false},
		{"a key without, on this machine", "u", "127.0.0.1:7", ring, false},
		{"no keys, on this machine", "", "127.0.0.1:7", nil, true},
		{"no keys, on this machine, by IPv6", "", "[::1]:7", nil, true},
		{"no keys, mapped", "", "[::ffff:127.0.0.1]:7", nil, true},
		{"no keys, another machine", "", "192.0.2.1:7", nil, false},
		{"no keys, a key all the same", "s", "192.0.2.1:7", nil, false},
		{"no keys, no address", "", "@", nil, false},
	} {
		p := &till{t: t, refuse: &PaymentError{Status: 402}}
		g, err := New(Config{Keys: tt.keys, Payments: p, Models: []Model{{ID: "m", VocabSize: 1000, Engine: (&scriptEngine{pieces: []string{"a"}}).engine()}}})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest("POST", "/v1/completions", strings.NewReader(`{"model":"m","prompt":"ab"}`))
		r.Host, r.RemoteAddr = "localhost", tt.from
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Api-Key", tt.key)
		w := httptest.NewRecorder()
		g.Handler().ServeHTTP(w, r)
		if len(p.costs) != 1 || p.costs[0].Spend != tt.want {
			t.Errorf("%s: %d %s, %+v, want %v", tt.name, w.Code, w.Body, p.costs, tt.want)
		}
	}
}

// A failed inference costs nothing, whatever went out of it; nothing is paid for a model
// that cannot answer.
func TestFailureCostsNothing(t *testing.T) {
	broken := errors.New("layer 3 is gone")
	tests := []struct {
		name     string
		engine   *scriptEngine
		body     string
		status   int
		charged  bool
		computed int
	}{
		{"does not start", &scriptEngine{startErr: broken}, `{"model":"m",` + paidTurn + `}`, 503, true, 0},
		{"queue is full", &scriptEngine{startErr: queueFull{}}, `{"model":"m",` + paidTurn + `}`, 429, true, 0},
		{"prompt is too long", &scriptEngine{startErr: tooLong{}}, `{"model":"m",` + paidTurn + `}`, 400, true, 0},
		{"stops in the middle", &scriptEngine{pieces: []string{"a", "b"}, nextErr: broken}, `{"model":"m",` + paidTurn + `}`, 503, true, turnTokens + 2},
		{"stops in the middle of a stream", &scriptEngine{pieces: []string{"a", "b"}, nextErr: broken}, `{"model":"m","stream":true,` + paidTurn + `}`, 200, true, turnTokens + 2},
		{"second answer stops", &scriptEngine{pieces: []string{"a", "b"}, nextErr: broken}, `{"model":"m","n":2,` + paidTurn + `}`, 503, true, turnTokens + 2},
		{"is not ready", &scriptEngine{notReady: broken}, `{"model":"m",` + paidTurn + `}`, 503, false, 0},
		{"asks for what is not there", &scriptEngine{}, `{"model":"m","logprobs":true,` + paidTurn + `}`, 400, false, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &till{t: t}
			url := servePaid(t, tt.engine, p, nil)
			resp, body := sendPaid(t, url+"/v1/chat/completions", tt.body)
			if resp.StatusCode != tt.status {
				t.Errorf("%d %s, want %d", resp.StatusCode, body, tt.status)
			}
			if !tt.charged {
				if len(p.costs) != 0 {
					t.Errorf("charged %+v", p.costs)
				}
				return
			}
			if got := p.end(); got.tokens != 0 || got.computed != tt.computed || got.failed == nil {
				t.Errorf("got %+v; want no tokens, %d computed, and why", got, tt.computed)
			}
		})
	}
}

// Who hangs up pays for what was produced until then.
func TestGoneClientPays(t *testing.T) {
	for _, tt := range []struct {
		stream bool
		pieces []string
		want   int
	}{{true, []string{"a", "b", "c"}, turnTokens + 3}, {false, []string{"a", "b", "c"}, turnTokens + 3}, {true, nil, 0}, {false, nil, 0}} {
		p := &till{t: t}
		e := &scriptEngine{pieces: tt.pieces, block: true}
		url := servePaid(t, e, p, nil)
		ctx, cancel := context.WithCancel(context.Background())
		body := `{"model":"m","stream":` + map[bool]string{true: "true", false: "false"}[tt.stream] + `,` + paidTurn + `}`
		req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(300*time.Millisecond, cancel)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		if got := p.end(); got.tokens != tt.want || got.failed == nil {
			t.Errorf("%+v: got %d tokens, %v, and why not all", tt, got.tokens, got.failed)
		}
		cancel()
	}
}

// The time that a request may take is no way to an answer that costs nothing: what was
// streamed is paid, what was never sent is not.
func TestLateAnswer(t *testing.T) {
	for stream, want := range map[bool]int{true: turnTokens + 3, false: 0} {
		p := &till{t: t}
		e := &scriptEngine{pieces: []string{"a", "b", "c"}, block: true}
		url := servePaid(t, e, p, func(g *Gateway) { g.cfg.Limit = 200 * time.Millisecond })
		sendPaid(t, url+"/v1/chat/completions", `{"model":"m","stream":`+map[bool]string{true: "true", false: "false"}[stream]+`,`+paidTurn+`}`)
		if got := p.end(); got.tokens != want || got.failed == nil {
			t.Errorf("stream %v: got %d tokens, %v; want %d, and why not all", stream, got.tokens, got.failed, want)
		}
	}
}

// The engine sees whose payment it works for.
func TestChargeContext(t *testing.T) {
	p := &till{t: t}
	e := &paidEngine{&scriptEngine{pieces: []string{"a"}}, make(chan any, 1)}
	sendPaid(t, servePaid(t, e, p, nil)+"/v1/chat/completions", `{"model":"m",`+paidTurn+`}`)
	if got := <-e.seen; got != "paid" {
		t.Errorf("got %v", got)
	}
}

// A refusal has the shape of the API, with what to pay beside it.
func TestPaymentRefusal(t *testing.T) {
	refusal := &PaymentError{Status: 402, Code: "payment_required", Param: "X-Pay", Message: "pay 5", Payment: map[string]int{"amount": 5}}
	tests := []struct {
		name, path, body string
		refuse           error
		status           int
		want             string
	}{
		{"openai", "/v1/chat/completions", `{"model":"m",` + paidTurn + `}`, refusal, 402,
			`{"error":{"code":"payment_required","message":"pay 5","param":"X-Pay","type":"insufficient_quota"},"payment":{"amount":5}}`},
		{"anthropic", "/v1/messages", `{"model":"m","max_tokens":9,` + paidTurn + `}`, refusal, 402,
			`{"type":"error","error":{"type":"billing_error","message":"pay 5"},"request_id":"ID","payment":{"amount":5}}`},
		{"embeddings", "/v1/embeddings", `{"model":"m","input":"ab"}`, refusal, 402,
			`{"error":{"code":"payment_required","message":"pay 5","param":"X-Pay","type":"insufficient_quota"},"payment":{"amount":5}}`},
		{"to ask again", "/v1/chat/completions", `{"model":"m",` + paidTurn + `}`, &PaymentError{Status: 503, Code: "running", Message: "it runs", RetryAfter: 1500 * time.Millisecond}, 503,
			`{"error":{"code":"running","message":"it runs","param":null,"type":"server_error"}}`},
		{"no status", "/v1/chat/completions", `{"model":"m",` + paidTurn + `}`, &PaymentError{Status: 200, Message: "odd"}, 500,
			`{"error":{"code":null,"message":"a refusal with status 200: odd","param":null,"type":"server_error"}}`},
		{"any other error", "/v1/chat/completions", `{"model":"m",` + paidTurn + `}`, errors.New("cable"), 503,
			`{"error":{"code":"engine_failed","message":"cable","param":null,"type":"server_error"}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := &scriptEngine{able: &Abilities{}}
			resp, body := sendPaid(t, servePaid(t, e.engine(), &till{t: t, refuse: tt.refuse}, nil)+tt.path, tt.body)
			body = strings.ReplaceAll(strings.TrimSpace(body), resp.Header.Get("Request-Id"), "ID")
			if resp.StatusCode != tt.status || body != tt.want {
				t.Errorf("%d %s\nwant %d %s", resp.StatusCode, body, tt.status, tt.want)
			}
			if tt.status == 503 && tt.name == "to ask again" && resp.Header.Get("Retry-After") != "2" {
				t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
			}
			if e.prompt() != "" && e.request().MaxTokens != 0 {
				t.Error("the engine was asked")
			}
		})
	}
}

// A body is paid for as it is meant, however it was packed.
func TestChargeOfPackedBody(t *testing.T) {
	p := &till{t: t}
	body := `{"model":"m",` + paidTurn + `}`
	var packed bytes.Buffer
	writePacked(t, &packed, body)
	resp, answer := sendPaid(t, servePaid(t, &scriptEngine{pieces: []string{"a"}}, p, nil)+"/v1/chat/completions", packed.String(), "Content-Encoding", "gzip")
	if resp.StatusCode != 200 || p.costs[0].Body != sha256.Sum256([]byte(body)) {
		t.Errorf("%d %s", resp.StatusCode, answer)
	}
}

// Quotes are asked for with exact fields.
func TestQuotes(t *testing.T) {
	sum := sha256.Sum256([]byte("x"))
	hash := `"request_hash":"` + hex.EncodeToString(sum[:]) + `"`
	tests := []struct {
		body   string
		status int
		param  string
		want   Cost
	}{
		{`{"model":"m","prompt_tokens":7,"max_tokens":5,"owner":"W",` + hash + `}`, 200, "", Cost{Prompt: 7, Answers: 5, Owner: "W"}},
		{`{"model":"m","prompt_tokens":7,` + hash + `}`, 200, "", Cost{Prompt: 7, Answers: PaidAnswer}},
		{`{"prompt_tokens":7,` + hash + `}`, 400, "model", Cost{}},
		{`{"model":"other","prompt_tokens":7,` + hash + `}`, 404, "model", Cost{}},
		{`{"model":"m",` + hash + `}`, 400, "prompt_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":1e3,` + hash + `}`, 400, "prompt_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":"7",` + hash + `}`, 400, "prompt_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":-1,` + hash + `}`, 400, "prompt_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":7,"max_tokens":16777217,` + hash + `}`, 400, "max_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":7,"max_tokens":18446744073709551616,` + hash + `}`, 400, "max_tokens", Cost{}},
		{`{"model":"m","prompt_tokens":7}`, 400, "request_hash", Cost{}},
		{`{"model":"m","prompt_tokens":7,"request_hash":"ab"}`, 400, "request_hash", Cost{}},
		{`{"model":"m","prompt_tokens":7,"request_hash":"` + strings.Repeat("AB", 32) + `"}`, 400, "request_hash", Cost{}},
		{`{"model":"m","prompt_tokens":7,"owner":7,` + hash + `}`, 400, "owner", Cost{}},
		{`{"model":"m","prompt_tokens":7,"amount":1,` + hash + `}`, 400, "amount", Cost{}},
		{`{"model":"m","prompt_tokens":+1,` + hash + `}`, 400, "", Cost{}},
		{`{"model":"m","prompt_tokens":01,` + hash + `}`, 400, "", Cost{}},
	}
	for _, tt := range tests {
		p := &till{t: t}
		resp, body := sendPaid(t, servePaid(t, &scriptEngine{}, p, nil)+"/v1/quotes", tt.body)
		if resp.StatusCode != tt.status {
			t.Errorf("%s: %d %s, want %d", tt.body, resp.StatusCode, body, tt.status)
			continue
		}
		if tt.status == 200 {
			tt.want.Model, tt.want.Name, tt.want.Body = "0123456789abcdef", "m", sum
			if len(p.costs) != 1 || p.costs[0] != tt.want {
				t.Errorf("%s: got %+v, want %+v", tt.body, p.costs, tt.want)
			}
			continue
		}
		if len(p.costs) > 0 {
			t.Errorf("%s was quoted", tt.body)
		}
		var e errorBody
		if err := json.Unmarshal([]byte(body), &e); err != nil || tt.param != "" && (e.Error.Param == nil || *e.Error.Param != tt.param) {
			t.Errorf("%s: %s, want the field %s", tt.body, body, tt.param)
		}
	}
}

// Without payments there are no quotes, and bodies are not hashed.
func TestFreeGateway(t *testing.T) {
	url, _ := serve(t, &scriptEngine{}, nil)
	if resp, body := sendPaid(t, url+"/v1/quotes", `{}`); resp.StatusCode != 404 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func writePacked(t *testing.T, to io.Writer, text string) {
	t.Helper()
	w := gzip.NewWriter(to)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}
