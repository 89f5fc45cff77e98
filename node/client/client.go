// Package client calls the local control API (node/api) of a running daemon.
// It opens one connection per call, so a Client may be used from several
// goroutines and needs no Close. It does not start a daemon.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"syscall"
	"time"

	"kvasird/node/api"
)

// ErrNoDaemon means that nobody answers at the socket.
var ErrNoDaemon = errors.New("cannot reach the daemon")

// Longest waits. An answer may take long, but a living daemon says something
// every api.HeartbeatSeconds.
const (
	dialTimeout   = 2 * time.Second
	statusTimeout = 10 * time.Second
	silence       = 6 * api.HeartbeatSeconds * time.Second
)

// Client calls one daemon. The zero value is not usable: see New.
type Client struct {
	socket  string
	http    *http.Client
	silence time.Duration
}

// New returns a client of the daemon whose control socket is at that path. It
// does no I/O.
func New(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout}
		return d.DialContext(ctx, "unix", socket)
	}
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true, DisableCompression: true}
	return &Client{socket: socket, http: &http.Client{Transport: transport}, silence: silence}
}

// Status asks the daemon for its state.
func (c *Client) Status(ctx context.Context) (*api.Status, error) {
	st := new(api.Status)
	if err := c.call(ctx, http.MethodGet, api.PathStatus, nil, st); err != nil {
		return nil, err
	}
	return st, nil
}

// Coverage asks who holds what of each model.
func (c *Client) Coverage(ctx context.Context) ([]api.CoverageMap, error) {
	var maps []api.CoverageMap
	err := c.call(ctx, http.MethodGet, api.PathCoverage, nil, &maps)
	return maps, err
}

// Pause starts or ends a pause.
func (c *Client) Pause(ctx context.Context, paused bool) (api.PauseResult, error) {
	var result api.PauseResult
	err := c.call(ctx, http.MethodPost, api.PathPause, api.PauseRequest{Paused: paused}, &result)
	return result, err
}

// Revoke gives the daemon a revocation list of its network.
func (c *Client) Revoke(ctx context.Context, list []byte) (api.RevokeResult, error) {
	var result api.RevokeResult
	err := c.call(ctx, http.MethodPost, api.PathRevocations, api.RevokeRequest{List: list}, &result)
	return result, err
}

// Keys lists the keys of the gateway.
func (c *Client) Keys(ctx context.Context) ([]api.Key, error) {
	var keys []api.Key
	err := c.call(ctx, http.MethodGet, api.PathKeys, nil, &keys)
	return keys, err
}

// AddKey makes a key. Its answer is the only one that has the key in it.
func (c *Client) AddKey(ctx context.Context, req api.NewKey) (api.CreatedKey, error) {
	var made api.CreatedKey
	err := c.call(ctx, http.MethodPost, api.PathKeys, req, &made)
	return made, err
}

// RevokeKey ends a key.
func (c *Client) RevokeKey(ctx context.Context, name string) (api.RevokedKey, error) {
	var revoked api.RevokedKey
	err := c.call(ctx, http.MethodPost, api.PathRevokedKey, api.RevokeKey{Name: name}, &revoked)
	return revoked, err
}

// call is callWithin the time of a status.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	return c.callWithin(ctx, statusTimeout, method, path, in, out)
}

// callWithin sends in, unless it is nil, and decodes the answer into out.
func (c *Client) callWithin(ctx context.Context, limit time.Duration, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, c.hangs(limit))
	defer cancel()
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := decode(resp.Body, api.MaxStatus, out); err != nil {
		return because(ctx, fmt.Errorf("read the answer: %w", err))
	}
	return nil
}

// Ask sends a request and calls emit for every event but the last, on the
// caller's goroutine; an error of emit ends the call and the answer. An error
// that the daemon reports is an *api.Error.
func (c *Client) Ask(ctx context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error) {
	var done *api.AskDone
	err := events(ctx, c, api.PathAsk, req, func(ev api.AskEvent) (bool, error) {
		switch {
		case ev.Error != nil:
			return true, ev.Error
		case ev.Done != nil:
			done = ev.Done
			return true, nil
		}
		return false, emit(ev)
	})
	if err != nil {
		return api.AskDone{}, err
	}
	return *done, nil
}

// Model sends a request on the model store and calls emit for every event, the
// last one included, like Ask.
func (c *Client) Model(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error {
	return events(ctx, c, api.PathModels, req, func(ev api.ModelEvent) (bool, error) {
		if ev.Error != nil {
			return true, ev.Error
		}
		return ev.Done, emit(ev)
	})
}

// Plan asks in which ways a model could run. It may take as long as fetching the header
// of the model does.
func (c *Client) Plan(ctx context.Context, req api.PlanRequest) (*api.PlanResult, error) {
	var done *api.PlanResult
	err := events(ctx, c, api.PathPlan, req, func(ev api.PlanEvent) (bool, error) {
		if ev.Error != nil {
			return true, ev.Error
		}
		done = ev.Done
		return done != nil, nil
	})
	return done, err
}

// events sends a request and calls take for every line of the answer until it
// says that this was the last.
func events[E any](ctx context.Context, c *Client, path string, req any, take func(E) (last bool, err error)) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(c.silence, func() { cancel(c.hangs(c.silence)) })
	defer watch.Stop()
	resp, err := c.do(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, api.MaxEvent)
	for lines.Scan() {
		watch.Reset(c.silence)
		var ev E
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
			return fmt.Errorf("read the answer: %w", err)
		}
		if last, err := take(ev); last || err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return because(ctx, fmt.Errorf("read the answer: %w", err))
	}
	return because(ctx, errors.New("the daemon ended the answer half-way: see its log"))
}

// do sends a request; an answer other than 200 comes back as an error.
func (c *Client) do(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://kvasird"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, because(ctx, c.explain(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	var f api.Failure
	if err := decode(resp.Body, api.MaxEvent, &f); err != nil || f.Error == nil {
		return nil, fmt.Errorf("the daemon answered %s", resp.Status)
	}
	return nil, f.Error
}

// explain puts a dial error in words with the next step.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w at %s: is `kvasird run` started?", ErrNoDaemon, c.socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w at %s: it belongs to another user; run this as the user that runs kvasird", ErrNoDaemon, c.socket)
	case errors.Is(err, syscall.EINVAL):
		return fmt.Errorf("%w: %s is too long for a socket path (at most 107 bytes)", ErrNoDaemon, c.socket)
	}
	return fmt.Errorf("%w at %s: %v", ErrNoDaemon, c.socket, err)
}

func (c *Client) hangs(after time.Duration) error {
	return fmt.Errorf("the daemon at %s has not answered for %v: it hangs or the machine is overloaded", c.socket, after)
}

// because prefers the reason for which ctx ended.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// decode reads one JSON value of at most limit bytes.
func decode(r io.Reader, limit int64, v any) error {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return err
	}
	if int64(len(data)) > limit {
		return fmt.Errorf("longer than %d bytes", limit)
	}
	return json.Unmarshal(data, v)
}
