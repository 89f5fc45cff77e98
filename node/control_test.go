package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
	"kvasird/node/client"
)

// daemonFunc answers with fixed values; ask may be replaced.
type daemonFunc struct {
	status *api.Status
	err    error
	list   []byte // that Revoke was given
	purse  *Purse
	ask    func(context.Context, api.AskRequest, func(api.AskEvent) error) (api.AskDone, error)
}

func (d *daemonFunc) Status(context.Context) (*api.Status, error) { return d.status, d.err }

func (d *daemonFunc) Revoke(_ context.Context, list []byte) (api.RevokeResult, error) {
	d.list = list
	return api.RevokeResult{Peers: 3}, d.err
}

func (d *daemonFunc) Ask(ctx context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error) {
	return d.ask(ctx, req, emit)
}

func (d *daemonFunc) Coverage(context.Context) ([]api.CoverageMap, error) {
	return []api.CoverageMap{{Model: "m", Layers: []api.LayerMap{{Layer: 3, Replicas: []int{1, 0}}}}}, d.err
}

func (d *daemonFunc) Pause(_ context.Context, paused bool) (api.PauseResult, error) {
	return api.PauseResult{Paused: paused}, d.err
}

func (d *daemonFunc) Keys(context.Context) ([]api.Key, error) { return nil, d.err }

func (d *daemonFunc) AddKey(context.Context, api.NewKey) (api.CreatedKey, error) {
	return api.CreatedKey{}, d.err
}

func (d *daemonFunc) RevokeKey(context.Context, string) (api.RevokedKey, error) {
	return api.RevokedKey{}, d.err
}

func (d *daemonFunc) Model(_ context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	if d.err != nil {
		return d.err
	}
	if err := emit(api.ModelEvent{Progress: &api.Progress{What: string(req.Action), Done: 1, Total: 2}}); err != nil {
		return err
	}
	return emit(api.ModelEvent{Models: []api.StoredModel{{ID: req.Model}}, Done: true})
}

func (d *daemonFunc) Plan(_ context.Context, req api.PlanRequest) (*api.PlanResult, error) {
	return &api.PlanResult{Text: req.Model, Plan: json.RawMessage(fmt.Sprintf("[%d,%d]", req.Context, req.Sequences))}, d.err
}

func (d *daemonFunc) Purse() (*Purse, error) { return d.purse, d.err }

// TestControlSwarm: what is asked of the swarm part arrives, and so do its answers and errors.
func TestControlSwarm(t *testing.T) {
	d := &daemonFunc{}
	c := client.New(openControl(t, d))
	maps, err := c.Coverage(t.Context())
	if err != nil || len(maps) != 1 || maps[0].Layers[0].Layer != 3 {
		t.Errorf("coverage %+v, %v", maps, err)
	}
	for _, paused := range []bool{true, false} {
		if got, err := c.Pause(t.Context(), paused); err != nil || got.Paused != paused {
			t.Errorf("pause %v: %+v, %v", paused, got, err)
		}
	}
	var events []api.ModelEvent
	err = c.Model(t.Context(), api.ModelRequest{Action: api.ModelVerify, Model: "abc"}, func(ev api.ModelEvent) error {
		if ev.Progress != nil || ev.Done {
			events = append(events, ev)
		}
		return nil
	})
	if err != nil || len(events) != 2 || events[0].Progress.What != "verify" || events[1].Models[0].ID != "abc" {
		t.Errorf("model: %+v, %v", events, err)
	}
	plan, err := c.Plan(t.Context(), api.PlanRequest{Model: "abc", Context: 3, Sequences: 2})
	if err != nil || plan.Text != "abc" || string(plan.Plan) != "[3,2]" {
		t.Errorf("plan: %+v, %v", plan, err)
	}
	d.err = &api.Error{Code: api.CodeNotFound, Message: "no model abc"}
	_, planErr := c.Plan(t.Context(), api.PlanRequest{})
	_, covErr := c.Coverage(t.Context())
	_, pauseErr := c.Pause(t.Context(), true)
	modelErr := c.Model(t.Context(), api.ModelRequest{Action: api.ModelPin}, func(api.ModelEvent) error { return nil })
	for _, err := range []error{covErr, pauseErr, modelErr, planErr} {
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.CodeNotFound {
			t.Errorf("error %v, want %v", err, d.err)
		}
	}
}

func openControl(t *testing.T, d Daemon) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c")
	c, err := OpenControl(path, d, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := errors.Join(c.Close(ctx), c.Close(ctx)); err != nil {
			t.Errorf("close twice: %v", err)
		}
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("Close left the socket: %v", err)
		}
	})
	return path
}

func TestControlStatus(t *testing.T) {
	want := &api.Status{PeerID: "12D3", State: api.StateBlocked, Reason: "no worker", Roles: []string{"backbone"},
		Coverage: []api.Coverage{{Layer: 1, Experts: 32, Held: 16, Missing: "16:32"}},
		Peers:    []api.Peer{{ID: "x", State: api.PeerRefused, Reason: "other runtime pack", Rows: []api.Rows{{Layer: 1, Rows: 7}}}}}
	d := &daemonFunc{status: want}
	path := openControl(t, d)
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket mode %v, %v, want 0600", info.Mode(), err)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".s*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left beside the socket: %v, %v", left, err)
	}
	got, err := client.New(path).Status(t.Context())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	d.err = &api.Error{Code: api.CodeNotReady, Message: "still loading"}
	_, err = client.New(path).Status(t.Context())
	var e *api.Error
	if !errors.As(err, &e) || *e != *d.err.(*api.Error) {
		t.Errorf("error %v, want %v", err, d.err)
	}
}

func TestControlAsk(t *testing.T) {
	done := api.AskDone{Finish: "stop", PromptTokens: 3, Tokens: 2, FirstTokenSec: 0.1, Seconds: 0.2}
	fails := error(nil)
	d := &daemonFunc{ask: func(_ context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error) {
		for i, s := range []string{" Par", "is\n"} {
			if err := emit(api.AskEvent{Text: req.Prompt + s, IDs: []int32{int32(i)}}); err != nil {
				return api.AskDone{}, err
			}
		}
		return done, fails
	}}
	c := client.New(openControl(t, d))
	ask := func() (text string, got api.AskDone, err error) {
		got, err = c.Ask(t.Context(), api.AskRequest{Prompt: "x"}, func(ev api.AskEvent) error { text += ev.Text; return nil })
		return text, got, err
	}
	if text, got, err := ask(); text != "x Parxis\n" || got != done || err != nil {
		t.Errorf("answer %q, %+v, %v", text, got, err)
	}
	fails = fmt.Errorf("layer 3: %w", &api.Error{Code: api.CodeCoverage, Message: "layer 3, experts 16:32: no worker"})
	var e *api.Error
	if text, _, err := ask(); text != "x Parxis\n" || !errors.As(err, &e) || e.Code != api.CodeCoverage {
		t.Errorf("answer %q, error %v, want code %s", text, err, api.CodeCoverage)
	}
	fails = errors.New("boom")
	if _, _, err := ask(); !errors.As(err, &e) || e.Code != api.CodeInternal || e.Message != "boom" {
		t.Errorf("error %v, want boom", err)
	}
}

// TestControlAskIsCancelled: the daemon learns that the caller is gone while it
// computes, before it has anything to say.
func TestControlAskIsCancelled(t *testing.T) {
	began, ended := make(chan struct{}), make(chan struct{})
	d := &daemonFunc{ask: func(ctx context.Context, _ api.AskRequest, _ func(api.AskEvent) error) (api.AskDone, error) {
		close(began)
		<-ctx.Done()
		close(ended)
		return api.AskDone{}, ctx.Err()
	}}
	c := client.New(openControl(t, d))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	if _, err := c.Ask(ctx, api.AskRequest{Prompt: "x"}, func(api.AskEvent) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("the daemon went on")
	}
}

func TestControlRefuses(t *testing.T) {
	d := &daemonFunc{ask: func(context.Context, api.AskRequest, func(api.AskEvent) error) (api.AskDone, error) {
		t.Error("a bad request reached the daemon")
		return api.AskDone{}, nil
	}}
	path := openControl(t, d)
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
	tests := []struct {
		name, method, path, body string
		status                   int
		want                     string
	}{
		{"empty prompt", "POST", api.PathAsk, `{}`, 400, "prompt is empty"},
		{"not JSON", "POST", api.PathAsk, `hello`, 400, "cannot read the request"},
		{"unknown field", "POST", api.PathAsk, `{"prompt":"a","temprature":1}`, 400, "temprature"},
		{"no body", "POST", api.PathAsk, ``, 400, "cannot read the request"},
		{"body too long", "POST", api.PathAsk, `{"prompt":"` + strings.Repeat("a", api.MaxRequest) + `"}`, 400, "too large"},
		{"raw with system", "POST", api.PathAsk, `{"prompt":"a","raw":true,"system":"b"}`, 400, "no place for a system message"},
		{"negative tokens", "POST", api.PathAsk, `{"prompt":"a","max_tokens":-1}`, 400, "max_tokens = -1"},
		{"hot", "POST", api.PathAsk, `{"prompt":"a","temperature":11}`, 400, "temperature = 11"},
		{"top_p", "POST", api.PathAsk, `{"prompt":"a","top_p":-1}`, 400, "top_p = -1"},
		{"stops", "POST", api.PathAsk, `{"prompt":"a","stop":[` + strings.Repeat(`"a",`, 16) + `"a"]}`, 400, "17 stop texts"},
		{"unknown field of a plan", "POST", api.PathPlan, `{"modle":"a"}`, 400, "modle"},
		{"unknown path", "GET", "/v9/x", ``, 404, "does not know GET /v9/x"},
		{"wrong method", "DELETE", api.PathStatus, ``, 404, "does not know DELETE"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), tt.method, "http://x"+tt.path, strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := hc.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != tt.status || !strings.Contains(string(body), tt.want) {
				t.Errorf("%d %s, %v, want %d with %q", resp.StatusCode, body, err, tt.status, tt.want)
			}
		})
	}
}

func TestListenControl(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	old.Close()
	l, err := listenControl(stale)
	if err != nil {
		t.Fatalf("a stale socket is not replaced: %v", err)
	}
	defer l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		stale: "another kvasird answers at " + stale,
		file:  file + " is there and is no socket",
		filepath.Join(dir, strings.Repeat("a", 150)): "too long for a socket",
		filepath.Join(dir, "none", "c"):              "no such file",
	} {
		if l, err := listenControl(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want an error with %q", path, l, err, want)
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Error("the file is gone")
	}
}
