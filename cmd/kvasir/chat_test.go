package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/node/api"
)

// gatewayServer answers as a gateway does. answers are taken in turn.
type gatewayServer struct {
	*httptest.Server
	mu      sync.Mutex // guards what is below
	asked   []chatRequest
	keys    []string
	answers []http.HandlerFunc
}

// newGatewayServer serves the models m-one and m-two; "one" is an alias.
func newGatewayServer(t *testing.T, answers ...http.HandlerFunc) *gatewayServer {
	t.Helper()
	g := &gatewayServer{answers: answers}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"m-one","object":"model"},{"id":"m-two"}]}`)
	})
	mux.HandleFunc("GET /v1/models/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") != "one" {
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"error":{"message":"no such model","code":"model_not_found"}}`)
			return
		}
		io.WriteString(w, `{"id":"m-one"}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		var req chatRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			t.Error(err)
		}
		g.mu.Lock()
		g.asked, g.keys = append(g.asked, req), append(g.keys, r.Header.Get("Authorization"))
		if len(g.answers) == 0 {
			t.Errorf("request %d was not expected", len(g.asked))
			g.mu.Unlock()
			return
		}
		answer := g.answers[0]
		g.answers = g.answers[1:]
		g.mu.Unlock()
		answer(w, r)
	})
	g.Server = httptest.NewServer(mux)
	t.Cleanup(g.Close)
	return g
}

// says streams pieces; one that begins with "~" is reasoning.
func says(pieces ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for _, p := range pieces {
			delta := map[string]string{"content": p}
			if thought, ok := strings.CutPrefix(p, "~"); ok {
				delta = map[string]string{"reasoning_content": thought}
			}
			data, _ := json.Marshal(map[string]any{"choices": []any{map[string]any{"delta": delta, "finish_reason": nil}}, "usage": nil})
			fmt.Fprintf(w, "data: %s\n\n: keep-alive\n", data)
		}
		io.WriteString(w, `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}

data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":7}}}

data: [DONE]

`)
	}
}

// raw answers with a status, a body and headers.
func raw(status int, body string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// roles is a request's conversation, a message a line.
func roles(req chatRequest) string {
	var b strings.Builder
	for _, m := range req.Messages {
		fmt.Fprintf(&b, "%s: %s\n", m.Role, m.Content)
	}
	return b.String()
}

func TestChatScript(t *testing.T) {
	saved := filepath.Join(t.TempDir(), "saved.md")
	g := newGatewayServer(t, says("Hel", "lo", "\x1b[2J\r\n"), says("~hm", "Two."), says("Again."), says("Other"), says("A"))
	script := strings.Join([]string{
		"Hi there", `And \`, "two?", "", "/retry", `"""`, "/no command", `"quoted"`, `"""`,
		"/system Be brief.", "/system", "/model m-two", "/model", "/save " + saved, "/stats", "/clear", `"""one line"""`, "/quit", "not asked",
	}, "\n")
	status, out, errs := kvasir(t, script, "chat", "one", "--url", g.URL+"/v1/", "--key", "sk-1", "--seed", "7", "--max-tokens", "50")
	if status != exitOK {
		t.Fatalf("status %d, %q, %q", status, out, errs)
	}
	for _, want := range []string{"Hello\ufffd[2J\n", "\nTwo.\nAgain.\nOther\nBe brief.\n  m-one\n* m-two\n", "\nA\n",
		"last  4 tokens, ", "prompt 9 tokens, 7 of them cached; ended by stop\nall   4 answers, 16 tokens, ", "prompts 36 tokens, 28 of them cached\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q lacks %q", out, want)
		}
	}
	if want := "(the model thinks first)\n(going on with m-two)\n(saved to " + saved + ")\n(forgotten)\n"; errs != want {
		t.Errorf("stderr %q, want %q", errs, want)
	}
	hi := "user: Hi there\nassistant: Hello\x1b[2J\r\n\n"
	for i, want := range []string{
		"user: Hi there\n", hi + "user: And \ntwo?\n", hi + "user: And \ntwo?\n",
		hi + "user: And \ntwo?\nassistant: Again.\nuser: /no command\n\"quoted\"\n",
		"system: Be brief.\nuser: one line\n",
	} {
		if got := roles(g.asked[i]); got != want {
			t.Errorf("request %d: %q, want %q", i, got, want)
		}
	}
	first := g.asked[0]
	if !first.Stream || !first.Options.Usage || *first.Seed != 7 || *first.MaxTokens != 50 || first.Temperature != nil || first.TopP != nil ||
		first.Model != "m-one" || g.asked[4].Model != "m-two" || g.keys[0] != "Bearer sk-1" {
		t.Errorf("request %+v with %q, then for %q", first, g.keys[0], g.asked[4].Model)
	}
	text, err := os.ReadFile(saved)
	if st, e := os.Stat(saved); err != nil || e != nil || st.Mode().Perm() != 0o600 ||
		!strings.HasPrefix(string(text), "# Conversation with m-two\n\n## System\n\nBe brief.\n\n## Question\n\nHi there\n\n## Answer\n\n") {
		t.Errorf("saved %q, %v, %v", text, err, e)
	}
}

// TestChatFails: each way to fail ends a script with status 1 and a reason.
func TestChatFails(t *testing.T) {
	taken := filepath.Join(t.TempDir(), "taken")
	if err := os.WriteFile(taken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	begun := `data: {"choices":[{"delta":{"content":"par"}}]}` + "\n\n"
	tests := []struct {
		name, script string
		answer       http.HandlerFunc
		want         string
	}{
		{"no coverage", "x\n", raw(503, `{"error":{"message":"nobody holds layer 1 experts 16:32","code":"engine_failed"}}`), "nobody holds layer 1 experts 16:32"},
		{"key", "x\n", raw(401, `{"error":{"message":"no such key","code":"invalid_api_key"}}`), "no such key. Give a key with --key or KVASIR_API_KEY"},
		{"too long", "x\n", raw(400, `{"error":{"message":"9 tokens, 8 fit","code":"context_length_exceeded"}}`), "9 tokens, 8 fit"},
		{"no gateway", "x\n", raw(502, "<html>"), "answers 502 Bad Gateway: is that the address of a gateway?"},
		{"sent on", "x\n", raw(307, "", "Location", "http://127.0.0.1:1/"), "it sends on to http://127.0.0.1:1/: give that address"},
		{"error in the stream", "x\n", raw(200, begun+`data: {"error":{"message":"the worker is gone"}}`+"\n\ndata: [DONE]\n\n"), "the worker is gone"},
		{"number for a code", "x\n", raw(500, `{"error":{"message":"odd","code":500}}`), "odd"},
		{"broken off", "x\n", raw(200, begun), "the answer broke off"},
		{"no JSON", "x\n", raw(200, "data: {\n\n"), "has an event that is not understood"},
		{"long line", "x\n", raw(200, "data: "+strings.Repeat("x", maxEventLine)), "an event of the answer is too long"},
		{"long answer", "x\n", raw(200, strings.Repeat(`data: {"choices":[{"delta":{"content":"`+strings.Repeat("x", 1<<19)+`"}}]}`+"\n\n", maxAnswer>>19+1)), "the answer is longer than"},
		{"busy for long", "x\n", raw(429, `{"error":{"message":"the queue is full"}}`, "Retry-After", "86400"), "the queue is full. It says to come back in 24h0m0s"},
		{"busy until a date", "x\n", raw(429, `{"error":{"message":"full"}}`, "Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)), "It says to come back in"},
		{"command", "/modle\n", nil, "no command /modle: did you mean /model?"},
		{"unlike any command", "/zzzzzzzz\n", nil, "no command /zzzzzzzz: /help lists them"},
		{"model", "/model m-onne\n", nil, `no model "m-onne": did you mean "m-one"?`},
		{"unlike any model", "/model x\n", nil, `no model "x": there are m-one, m-two`},
		{"needs a file", "/save\n", nil, "/save takes a FILE"},
		{"file is there", "/save " + taken + "\n", nil, "is there already: name another file"},
		{"takes nothing", "/quit now\n", nil, `/quit takes nothing, got "now"`},
		{"nothing to ask again", "/retry\n", nil, "nothing was asked yet"},
		{"open message", "\"\"\"\nx\n", nil, `the input ends before the """`},
		{"open line", "x\\\n", nil, `the input ends after a line that ends with \`},
		{"long input line", strings.Repeat("x", api.MaxRequest+1), nil, "a line is longer than"},
		{"long message", strings.Repeat(strings.Repeat("x", 1<<20)+"\\\n", 5), nil, "the message is too long"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g := newGatewayServer(t)
			if tt.answer != nil {
				g.answers = []http.HandlerFunc{tt.answer}
			}
			if !strings.HasSuffix(tt.script, "\\\n") {
				tt.script += "not asked\n"
			}
			status, _, errs := kvasir(t, tt.script, "chat", "--url", strings.TrimPrefix(g.URL, "http://"))
			if status != exitFail || !strings.Contains(errs, tt.want) || len(g.answers) > 0 {
				t.Errorf("status %d, %.300q, want %q", status, errs, tt.want)
			}
		})
	}
}

// TestChatBusy: a full queue is waited for, and said.
func TestChatBusy(t *testing.T) {
	busy := raw(429, `{"error":{"message":"the queue is full"}}`, "Retry-After", "1")
	g := newGatewayServer(t, busy, busy, says("Yes."))
	began := time.Now()
	status, out, errs := kvasir(t, "x\n", "chat", "--url", g.URL, "--stats")
	want := strings.Repeat("(the queue is full. Asking again in 1s)\n", 2) + "(4 tokens, "
	if took := time.Since(began); status != exitOK || out != "Yes.\n" || !strings.HasPrefix(errs, want) || took < 2*time.Second {
		t.Errorf("status %d after %v, %q, %q", status, took, out, errs)
	}
}

// TestChatStart: what stands in the way of a chat is said before anything is asked.
func TestChatStart(t *testing.T) {
	none := newGatewayServer(t)
	none.Config.Handler = raw(200, `{"data":[]}`)
	page := newGatewayServer(t)
	page.Config.Handler = raw(200, "<html>")
	dir := t.TempDir()
	off := daemon(t, func(w http.ResponseWriter, _ *http.Request) { json.NewEncoder(w).Encode(&api.Status{}) })
	loading := daemon(t, func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(&api.Status{Reason: "no worker yet", HTTP: strings.TrimPrefix(none.URL, "http://")})
	})
	tests := []struct {
		name   string
		args   []string
		status int
		want   string
	}{
		{"no daemon", []string{"--data", dir}, exitFail, "is `kvasird run` started? Or name the gateway of another node with --url"},
		{"no HTTP", []string{"--data", off}, exitFail, "the daemon answers nothing over HTTP"},
		{"no model yet", []string{"--data", loading}, exitFail, "no model answers yet: no worker yet"},
		{"no model", []string{"--url", none.URL}, exitFail, "serves no model now"},
		{"no such model", []string{"m", "--url", none.URL}, exitFail, `no model "m"`},
		{"a page", []string{"--url", page.URL}, exitFail, "does not answer as a gateway does: is that its address?"},
		{"nobody there", []string{"--url", "127.0.0.1:1"}, exitFail, "cannot reach the gateway at http://127.0.0.1:1"},
		{"no URL", []string{"--url", "ftp://x"}, exitUsage, `"ftp://x" is no address of a gateway`},
		{"key in two lines", []string{"--url", none.URL, "--key", "a\nb"}, exitUsage, "the API key has a space"},
		{"two models", []string{"a", "b"}, exitUsage, "takes one MODEL, got 2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := kvasir(t, "x\n", append([]string{"chat"}, tt.args...)...)
			if status != tt.status || out != "" || !strings.Contains(errs, tt.want) {
				t.Errorf("status %d, %q, %q, want %d and %q", status, out, errs, tt.status, tt.want)
			}
		})
	}
}

func TestGatewayOf(t *testing.T) {
	for _, tt := range []struct{ http, want string }{
		{"127.0.0.1:19000", "127.0.0.1:19000"}, {"0.0.0.0:80", "127.0.0.1:80"}, {"[::]:80", "127.0.0.1:80"}, {"[::1]:80", "[::1]:80"}, {"host", ""},
	} {
		if got, err := gatewayOf(&api.Status{HTTP: tt.http}); got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%q: %q, %v, want %q", tt.http, got, err, tt.want)
		}
	}
}

// TestChatSilence: a gateway that says nothing more is given up; keep-alives count.
func TestChatSilence(t *testing.T) {
	hang := func(w http.ResponseWriter, r *http.Request) {
		for range 5 {
			io.WriteString(w, ": keep-alive\n")
			w.(http.Flusher).Flush()
			time.Sleep(60 * time.Millisecond)
		}
		<-r.Context().Done()
	}
	srv := newGatewayServer(t, hang)
	g, err := newGateway(srv.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	g.silence = 200 * time.Millisecond
	began := time.Now()
	_, err = g.stream(t.Context(), chatRequest{}, func(string, string) error { return nil })
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "has said nothing for 200ms") || took < 400*time.Millisecond {
		t.Errorf("%v after %v", err, took)
	}
}

// What Tab writes goes to the terminal as it is, so no name that could steer it is offered.
func TestChatCompletes(t *testing.T) {
	c := chat{known: []string{"a\x1b[2Jb", "two\nlines", "tab\tbed", "turned\u202eround", "good model"}}
	var models []string
	for _, line := range c.complete() {
		if name, ok := strings.CutPrefix(line, "/model "); ok {
			models = append(models, name)
		}
	}
	if len(models) != 1 || models[0] != "good model" {
		t.Errorf("offered %q", models)
	}
}
