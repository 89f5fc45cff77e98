package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestModels(t *testing.T) {
	url, _ := serve(t, &scriptEngine{}, nil)
	status, body := get(t, url+"/v1/models")
	var list struct {
		Object string
		Data   []modelObject
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != 200 || list.Object != "list" || len(list.Data) != 3 {
		t.Fatalf("status %d %s", status, body)
	}
	if want := (modelObject{"kvasir-tiny", "model", 1, "kvasir"}); list.Data[0] != want {
		t.Errorf("got %+v, want %+v", list.Data[0], want)
	}
	if status, body := get(t, url+"/v1/models/org/big:q4"); status != 200 || !strings.Contains(body, `"id":"org/big:q4"`) {
		t.Errorf("model with slash and colon: %d %s", status, body)
	}
	status, body = get(t, url+"/v1/models/kvasir-tinny")
	e := decodeError(t, body)
	if status != 404 || *e.Error.Code != "model_not_found" || *e.Error.Param != "model" || !strings.Contains(e.Error.Message, `nearest is "kvasir-tiny"`) {
		t.Errorf("unknown model: %d %s", status, body)
	}
	status, _, body = post(t, url, `{"model":"org/bg","messages":[{"role":"user","content":"x"}]}`)
	if e := decodeError(t, body); status != 404 || !strings.Contains(e.Error.Message, `nearest is "org/big:q4"`) {
		t.Errorf("chat with unknown model: %d %s", status, body)
	}
}

// Models come and go while the gateway serves.
func TestSetModels(t *testing.T) {
	var g *Gateway
	url, _ := serve(t, &scriptEngine{}, func(made *Gateway) { g = made })
	if err := g.SetModels([]Model{{ID: "new", Engine: &scriptEngine{}}}); err != nil {
		t.Fatal(err)
	}
	if status, body := get(t, url+"/v1/models/new"); status != 200 {
		t.Errorf("new model: %d %s", status, body)
	}
	if status, body := get(t, url+"/v1/models/kvasir-tiny"); status != 404 || !strings.Contains(body, `nearest is \"new\"`) {
		t.Errorf("model that is gone: %d %s", status, body)
	}
	for _, list := range [][]Model{{{ID: "a"}}, {{Engine: &scriptEngine{}}}, {{ID: "a", Engine: &scriptEngine{}}, {ID: "a", Engine: &scriptEngine{}}}} {
		if err := g.SetModels(list); err == nil {
			t.Errorf("%+v was taken", list)
		}
	}
	if status, _ := get(t, url+"/v1/models/new"); status != 200 {
		t.Error("a list that was refused replaced the other")
	}
}

func TestHealth(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serve(t, e, nil)
	if status, body := get(t, url+"/readyz"); status != 200 {
		t.Errorf("ready: %d %s", status, body)
	}
	e.notReady = errors.New("layer 2: experts 0-7 are nowhere")
	if status, body := get(t, url+"/readyz"); status != 503 || !strings.Contains(body, `"reason":"layer 2: experts 0-7 are nowhere"`) {
		t.Errorf("not ready: %d %s", status, body)
	}
	if status, _ := get(t, url+"/healthz"); status != 200 {
		t.Errorf("alive: %d", status)
	}
}

func TestForeignHostsAndOrigins(t *testing.T) {
	tests := []struct {
		host, origin string
		want         int
	}{
		{"localhost:80", "", 200},
		{"LOCALHOST.", "", 200},
		{"127.0.0.1", "", 200},
		{"127.8.9.1:1", "", 200},
		{"[::1]:8617", "", 200},
		{"swarm.example:443", "", 200},
		{"localhost", "http://localhost:3000", 200},
		{"localhost", "https://swarm.example", 200},
		{"evil.example", "", 403},
		{"localhost.evil.example", "", 403},
		{"127.0.0.1.evil.example", "", 403},
		{"10.0.0.1", "", 403},
		{"", "", 403},
		{"localhost", "https://evil.example", 403},
		{"localhost", "null", 403},
		{"localhost", "file://", 403},
		{"localhost", "http://localhost@evil.example", 403},
	}
	g, err := New(Config{Models: []Model{{ID: "m", Engine: &scriptEngine{}}}, Hosts: []string{"swarm.example"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		r := httptest.NewRequest(http.MethodGet, "/v1/models", nil)
		r.Host = tt.host
		if tt.origin != "" {
			r.Header.Set("Origin", tt.origin)
		}
		w := httptest.NewRecorder()
		g.Handler().ServeHTTP(w, r)
		if w.Code != tt.want {
			t.Errorf("host %q, origin %q: status %d, want %d", tt.host, tt.origin, w.Code, tt.want)
		}
		if w.Code == 403 {
			decodeError(t, w.Body.String())
		}
		if cors := w.Header().Get("Access-Control-Allow-Origin"); cors != "" {
			t.Errorf("CORS header %q", cors)
		}
	}
}

// TestOwnAddress: the address that a connection came in on is a fair Host.
func TestOwnAddress(t *testing.T) {
	g, err := New(Config{Models: []Model{{ID: "m", Engine: &scriptEngine{}}}})
	if err != nil {
		t.Fatal(err)
	}
	local := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 8617}
	ctx := context.WithValue(t.Context(), http.LocalAddrContextKey, local)
	if !g.allowed(ctx, "192.0.2.1:8617") || g.allowed(ctx, "192.0.2.2:8617") || g.allowed(ctx, "rebound.example") {
		t.Error("only the connection's own address is allowed")
	}
}

// TestRefusals: every refused body is a 400 that names the field.
func TestRefusals(t *testing.T) {
	user := `"messages":[{"role":"user","content":"x"}]`
	tests := []struct{ body, param, reason string }{
		{``, "", "EOF"},
		{`{"model":`, "", "EOF"},
		{`[]`, "", "must be a JSON object, not an array"},
		{`{"a":1,"a":2}`, "", "twice"},
		{strings.Repeat("[", 100), "", "nested deeper"},
		{`{` + user + `}`, "model", "is required"},
		{`{"model":1,` + user + `}`, "model", "must be a string"},
		{`{"model":"kvasir-tiny"}`, "messages", "array of 1"},
		{`{"model":"kvasir-tiny","messages":[]}`, "messages", "array of 1"},
		{`{"model":"kvasir-tiny","messages":"x"}`, "messages", "array"},
		{`{"model":"kvasir-tiny","messages":[1]}`, "messages[0]", "must be an object"},
		{`{"model":"kvasir-tiny","messages":[{"role":"boss","content":"x"}]}`, "messages[0].role", `"boss" is none of`},
		{`{"model":"kvasir-tiny","messages":[{"role":"function","content":"x"}]}`, "messages[0].role", "use tools"},
		{`{"model":"kvasir-tiny","messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}`, "messages[0].tool_calls[0].function", "is required"},
		{`{"model":"kvasir-tiny","messages":[{"role":"assistant","function_call":{"name":"f"}}]}`, "messages[0].function_call", "not supported"},
		{`{"model":"kvasir-tiny","messages":[{"role":"user"}]}`, "messages[0].content", "is required"},
		{`{"model":"kvasir-tiny","messages":[{"role":"user","content":1}]}`, "messages[0].content", "must be a string"},
		{`{"model":"kvasir-tiny","messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, "messages[0].content[0].type", `not "image_url"`},
		{`{"model":"kvasir-tiny","messages":[{"role":"user","content":[{"type":"text"}]}]}`, "messages[0].content[0].text", "must be a string"},
		{`{"model":"kvasir-tiny","messages":[{"role":"user","content":["x"]}]}`, "messages[0].content[0]", "must be an object"},
		{`{"model":"kvasir-tiny","messages":[{"role":"user","content":"untokenizable"}]}`, "messages", "no such bytes"},
		{`{"model":"org/big:q4",` + user + `}`, "messages", "roles must alternate"},
		{`{"model":"broken",` + user + `}`, "model", `statement "include" is not supported`},
		{chatBody(`"tools":[{"type":"function"}]`), "tools[0].function", "is required"},
		{chatBody(`"tools":[{"type":"custom"}]`), "tools[0].type", "only"},
		{chatBody(`"tools":[{"type":"function","function":{"name":"a b"}}]`), "tools[0].function.name", "without spaces"},
		{chatBody(`"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"f"}}]`), "tools[1].function.name", "two tools"},
		{chatBody(`"tools":{}`), "tools", "must be an array"},
		{chatBody(`"functions":[{}]`), "functions", "not supported"},
		{chatBody(`"tool_choice":"required",` + weatherTool), "tool_choice", "cannot force a call yet"},
		{chatBody(`"tool_choice":"perhaps",` + weatherTool), "tool_choice", "none of none, auto, required"},
		{chatBody(`"tool_choice":1,` + weatherTool), "tool_choice", "must be a string or an object"},
		{chatBody(`"tool_choice":{"type":"allowed_tools"},` + weatherTool), "tool_choice.type", "only"},
		{chatBody(`"response_format":{"type":"json_object"}`), "response_format", "cannot hold an answer to a form yet"},
		{chatBody(`"response_format":{"type":"xml"}`), "response_format", "none of text"},
		{chatBody(`"response_format":{"type":"json_schema"}`), "response_format", "has no json_schema"},
		{chatBody(`"response_format":{"type":"json_schema","json_schema":{}}`), "response_format.json_schema.schema", "is required"},
		{chatBody(`"response_format":{"type":"json_object"},` + weatherTool), "response_format", "cannot be combined with tools"},
		{chatBody(`"response_format":"json"`), "response_format", "must be an object"},
		{chatBody(`"logprobs":true`), "logprobs", "does not report them yet"},
		{chatBody(`"logprobs":true,"top_logprobs":21`), "top_logprobs", "not between"},
		{chatBody(`"n":9`), "n", "not between 1 and 8"},
		{chatBody(`"n":0`), "n", "not between"},
		{chatBody(`"modalities":["text","audio"]`), "modalities", "only"},
		{chatBody(`"grammar":"root ::= x"`), "grammar", "not supported"},
		{chatBody(`"temperature":3`), "temperature", "3 is not between 0 and 2"},
		{chatBody(`"temperature":"hot"`), "temperature", "must be a number"},
		{chatBody(`"top_p":1.1`), "top_p", "not between"},
		{chatBody(`"min_p":-1`), "min_p", "not between"},
		{chatBody(`"top_k":1.5`), "top_k", "whole number"},
		{chatBody(`"seed":"x"`), "seed", "whole number"},
		{chatBody(`"max_tokens":0`), "max_tokens", "not between"},
		{chatBody(`"max_completion_tokens":-1`), "max_completion_tokens", "not between"},
		{chatBody(`"presence_penalty":2.1`), "presence_penalty", "not between"},
		{chatBody(`"repetition_penalty":0`), "repetition_penalty", "not between"},
		{chatBody(`"stop":[""]`), "stop", "1 to"},
		{chatBody(`"stop":7`), "stop", "string"},
		{chatBody(`"stop":[` + strings.Repeat(`"a",`, 16) + `"a"]`), "stop", "at most 16"},
		{chatBody(`"logit_bias":{"x":1}`), "logit_bias", `"x" must be a token id`},
		{chatBody(`"logit_bias":{"1":101}`), "logit_bias", "between -100 and 100"},
		{chatBody(`"logit_bias":{"100":1}`), "logit_bias", "vocabulary of 100"},
		{chatBody(`"logit_bias":[1]`), "logit_bias", "must be an object"},
		{chatBody(`"stream":"yes"`), "stream", "true or false"},
		{chatBody(`"stream_options":{"include_usage":true}`), "stream_options", "only for stream"},
		{chatBody(`"stream":true,"stream_options":{"include_usage":1}`), "stream_options.include_usage", "true or false"},
		{chatBody(`"chat_template_kwargs":[]`), "chat_template_kwargs", "must be an object"},
	}
	e := &scriptEngine{pieces: []string{"x"}}
	url, _ := serve(t, e, nil)
	for _, tt := range tests {
		status, _, body := post(t, url, tt.body)
		got := decodeError(t, body)
		param := ""
		if got.Error.Param != nil {
			param = *got.Error.Param
		}
		if status != 400 || param != tt.param || got.Error.Type != "invalid_request_error" || !strings.Contains(got.Error.Message, tt.reason) {
			t.Errorf("%.90s\n status %d, param %q, want %q; message %q, want %q", tt.body, status, param, tt.param, got.Error.Message, tt.reason)
		}
	}
}

func TestTransportLimits(t *testing.T) {
	url, _ := serve(t, &scriptEngine{}, nil)
	send := func(change func(*http.Request)) (int, string) {
		req, err := http.NewRequest(http.MethodPost, url+"/v1/chat/completions", strings.NewReader(chatBody("")))
		if err != nil {
			t.Fatal(err)
		}
		change(req)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	tests := []struct {
		name   string
		change func(*http.Request)
		want   int
	}{
		{"large body", func(r *http.Request) {
			r.Body = io.NopCloser(bytes.NewReader(make([]byte, maxBody+1)))
			r.ContentLength = -1
		}, 413},
		{"wrong method", func(r *http.Request) { r.Method = http.MethodPut }, 405},
		{"wrong path", func(r *http.Request) { r.URL.Path = "/v1/nothing" }, 404},
	}
	for _, tt := range tests {
		status, body := send(tt.change)
		if status != tt.want {
			t.Errorf("%s: status %d, want %d: %s", tt.name, status, tt.want, body)
		}
		decodeError(t, body)
	}
}

// TestSlowBody: a body that stops arriving is given up.
func TestSlowBody(t *testing.T) {
	url, _ := serve(t, &scriptEngine{}, func(g *Gateway) { g.waits.body = 100 * time.Millisecond })
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") {
		t.Errorf("answer %q, %v; want 408", answer, err)
	}
}

func TestTooManyRequests(t *testing.T) {
	e := &scriptEngine{}
	url, _ := serve(t, e, func(g *Gateway) {
		g.requests = make(chan struct{}, 1)
		g.requests <- struct{}{}
	})
	status, header, body := post(t, url, chatBody(""))
	if decodeError(t, body); status != 429 || header.Get("Retry-After") != "1" {
		t.Errorf("status %d, retry after %q", status, header.Get("Retry-After"))
	}
	if status, _ := get(t, url+"/healthz"); status != 200 {
		t.Errorf("health is %d while chats are refused", status)
	}
}

// TestRun: the server on a listener of ours, its header limits, its end.
func TestRun(t *testing.T) {
	g, err := New(Config{Models: []Model{{ID: "m", Engine: &scriptEngine{}}}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(l.Addr().String()); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("second Listen: %v, want an error that names the address", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx, l) }()
	req, err := http.NewRequest(http.MethodGet, "http://"+l.Addr().String()+"/healthz", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Big", strings.Repeat("x", 2*maxHeader))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("large header: status %d, want 431", resp.StatusCode)
	}
	if status, _ := get(t, "http://"+l.Addr().String()+"/healthz"); status != 200 {
		t.Errorf("status %d", status)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func TestConfigRefuses(t *testing.T) {
	e := &scriptEngine{}
	for _, models := range [][]Model{{{ID: "", Engine: e}}, {{ID: "a"}}, {{ID: "a", Engine: e}, {ID: "a", Engine: e}}} {
		if _, err := New(Config{Models: models}); err == nil {
			t.Errorf("New accepts models %+v", models)
		}
	}
}

// TestNoModel: a gateway without a model says so, and serves its other routes.
func TestNoModel(t *testing.T) {
	g, err := New(Config{Routes: map[string]http.Handler{
		"GET /api/there": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "here") }),
	}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(g.Handler())
	defer srv.Close()
	for path, want := range map[string]string{
		"/v1/models": `"data":[]`, "/v1/models/x": "no model is served here", "/readyz": "no model is served here",
		"/api/there": "here", "/api/other": "no route",
	} {
		if _, body := get(t, srv.URL+path); !strings.Contains(body, want) {
			t.Errorf("%s: %s, want %s", path, body, want)
		}
	}
	resp, err := http.Post(srv.URL+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"x","messages":[{"role":"user","content":"x"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("chat: status %d, want 404", resp.StatusCode)
	}
}
