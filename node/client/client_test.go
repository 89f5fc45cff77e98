package client

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
)

// serve answers every request on a unix socket with h.
func serve(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
	return New(socket)
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		w.Write([]byte(body))
	}
}

func wantError(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want one with %q", err, want)
	}
}

func TestStatusRefuses(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"not JSON", 200, "hello", "read the answer"},
		{"too long", 200, `{"peer_id":"` + strings.Repeat("a", api.MaxStatus) + `"}`, "longer than"},
		{"failure in words", 503, `{"error":{"code":"not_ready","message":"no model yet"}}`, "no model yet"},
		{"failure without words", 500, "oops", "the daemon answered 500"},
		{"failure of null", 500, `{"error":null}`, "the daemon answered 500"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := serve(t, answer(tt.status, tt.body)).Status(t.Context())
			wantError(t, err, tt.want)
		})
	}
}

func TestAskRefuses(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		want   string
	}{
		{"ends half-way", 200, "{\"text\":\"a\"}\n", "ended the answer half-way"},
		{"not JSON", 200, "{\"text\":\"a\"}\nhello\n", "read the answer"},
		{"line too long", 200, `{"text":"` + strings.Repeat("a", api.MaxEvent) + "\"}\n", "read the answer"},
		{"failed later", 200, "{\"text\":\"a\"}\n{\"error\":{\"code\":\"coverage\",\"message\":\"layer 2\"}}\n", "layer 2"},
		{"refused", 400, `{"error":{"code":"bad_request","message":"empty prompt"}}`, "empty prompt"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := serve(t, answer(tt.status, tt.body))
			_, err := c.Ask(t.Context(), api.AskRequest{}, func(api.AskEvent) error { return nil })
			wantError(t, err, tt.want)
		})
	}
}

func TestAskErrorKeepsItsCode(t *testing.T) {
	c := serve(t, answer(200, `{"error":{"code":"coverage","message":"m"}}`))
	_, err := c.Ask(t.Context(), api.AskRequest{}, nil)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodeCoverage {
		t.Errorf("error %v, want code %s", err, api.CodeCoverage)
	}
}

// TestAskSilence: a daemon that sends a part and then hangs does not hang the
// caller, and neither does one that never answers.
func TestAskSilence(t *testing.T) {
	for _, first := range []string{"", "{\"text\":\"a\"}\n"} {
		c := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if first != "" {
				w.Write([]byte(first))
				http.NewResponseController(w).Flush()
			}
			<-r.Context().Done()
		})
		c.silence = 50 * time.Millisecond
		_, err := c.Ask(t.Context(), api.AskRequest{}, func(api.AskEvent) error { return nil })
		wantError(t, err, "has not answered for 50ms")
	}
}

func TestAskStops(t *testing.T) {
	gone := make(chan struct{})
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // only then does net/http watch the connection
		w.Write([]byte("{\"text\":\"a\"}\n"))
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := c.Ask(ctx, api.AskRequest{}, func(api.AskEvent) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	select {
	case <-gone:
	case <-time.After(5 * time.Second):
		t.Error("the daemon was not told that the caller is gone")
	}
}

func TestNoDaemon(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct{ name, socket, want string }{
		{"none", filepath.Join(dir, "none"), "is `kvasird run` started?"},
		{"stale", stale, "is `kvasird run` started?"},
		{"a file", file, "is `kvasird run` started?"},
		{"too long", filepath.Join(dir, strings.Repeat("a", 200)), "too long for a socket path"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(tt.socket).Status(t.Context())
			if !errors.Is(err, ErrNoDaemon) {
				t.Errorf("error %v, want ErrNoDaemon", err)
			}
			wantError(t, err, tt.want)
		})
	}
}
