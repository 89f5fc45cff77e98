package gateway

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestLimit: a request that takes too long ends with an error that says so and that
// it is of no use to ask again: a status, or an event of a stream that began.
func TestLimit(t *testing.T) {
	const chat, message = `"messages":[{"role":"user","content":"x"}],"max_tokens":9`, "took longer than 300ms"
	tests := []struct{ path, body, last string }{
		{"/v1/chat/completions", chat, `"deadline_exceeded"`},
		{"/v1/completions", `"prompt":"x"`, `"deadline_exceeded"`},
		{"/v1/messages", chat, "event: error"},
		{"/v1/responses", `"input":"x"`, `"response.failed"`},
	}
	for _, tt := range tests {
		for _, stream := range []bool{false, true} {
			e := &scriptEngine{pieces: []string{"alpha", "beta"}, block: true}
			url, _ := serve(t, e, func(g *Gateway) {
				g.cfg.Limit = 300 * time.Millisecond
				g.waits.header = 10 * time.Millisecond
			})
			body := `{"model":"kvasir-tiny",` + tt.body + `,"stream":false}`
			if stream {
				body = strings.Replace(body, "false", "true", 1)
			}
			started := time.Now()
			resp, err := http.Post(url+tt.path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if took := time.Since(started); err != nil || took < 300*time.Millisecond || took > 10*time.Second {
				t.Errorf("%s: %v after %v", body, err, took)
			}
			got := string(data)
			if !strings.Contains(got, message) {
				t.Errorf("%s %s: %s", tt.path, body, got)
			}
			switch {
			case stream && (resp.StatusCode != http.StatusOK || !strings.Contains(got, tt.last) || !strings.Contains(got, "alpha")):
				t.Errorf("%s %s: status %d, %s; want it to end with %s", tt.path, body, resp.StatusCode, got, tt.last)
			case !stream && (resp.StatusCode != http.StatusGatewayTimeout || resp.Header.Get("X-Should-Retry") != "false"):
				t.Errorf("%s %s: status %d, X-Should-Retry %q: %s", tt.path, body, resp.StatusCode, resp.Header.Get("X-Should-Retry"), got)
			}
		}
	}
}

// TestLimitWhileQueued: the engine may notice first that the time is over.
func TestLimitWhileQueued(t *testing.T) {
	e := &scriptEngine{block: true}
	url, _ := serve(t, e, func(g *Gateway) { g.cfg.Limit = time.Nanosecond })
	status, _, body := post(t, url, `{"model":"kvasir-tiny","messages":[{"role":"user","content":"x"}]}`)
	if got := decodeError(t, body); status != http.StatusGatewayTimeout || got.Error.Code == nil || *got.Error.Code != codeTooSlow {
		t.Errorf("status %d: %s", status, body)
	}
}

// TestOwner: engines are told who asks: the key's name, else the address.
func TestOwner(t *testing.T) {
	for _, tt := range []struct{ remote, key, want string }{
		{"192.0.2.1:4711", "", "192.0.2.1"},
		{"[::ffff:192.0.2.1]:4711", "", "192.0.2.1"},
		{"[2001:db8::1]:80", "", "2001:db8::1"},
		{"pipe", "", ""},
		{"192.0.2.1:4711", "sesame", "anna"},
	} {
		for path, body := range map[string]string{
			"/v1/chat/completions": `{"model":"kvasir-tiny","messages":[{"role":"user","content":"x"}]}`,
			"/v1/completions":      `{"model":"kvasir-tiny","prompt":"x"}`,
		} {
			e := &scriptEngine{pieces: []string{"a"}}
			cfg := Config{Models: []Model{{ID: "kvasir-tiny", ChatTemplate: chatML, Engine: e}}}
			if tt.key != "" {
				cfg.Keys = NewKeyRing([]Key{{Name: "anna", Hash: HashKey(tt.key)}}, time.Now)
			}
			g, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			r := httptest.NewRequest(http.MethodPost, "http://localhost"+path, strings.NewReader(body))
			r.RemoteAddr = tt.remote
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Authorization", "Bearer "+tt.key)
			w := httptest.NewRecorder()
			g.Handler().ServeHTTP(w, r)
			if got := e.request().Owner; w.Code != http.StatusOK || got != tt.want {
				t.Errorf("%s from %s: status %d, owner %q, want %q: %s", path, tt.remote, w.Code, got, tt.want, w.Body)
			}
		}
	}
}
