package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"kvasird/node/api"
)

// Daemon is what the control API shows and drives. Its methods are called
// concurrently. An error that is an *api.Error reaches the caller as it is; any
// other is logged by nobody and reaches the caller as its text.
type Daemon interface {
	Status(ctx context.Context) (*api.Status, error)
	// Revoke takes a revocation list of the node's network.
	Revoke(ctx context.Context, list []byte) (api.RevokeResult, error)
	// Ask answers a checked request. It calls emit, on one goroutine, for every
	// piece of the answer, and stops when emit fails or ctx ends: the caller is
	// gone. It keeps nothing of what it gives to emit.
	Ask(ctx context.Context, req api.AskRequest, emit func(api.AskEvent) error) (api.AskDone, error)
	// Coverage says who holds what of every model that is known.
	Coverage(ctx context.Context) ([]api.CoverageMap, error)
	// Pause starts a pause, and returns once what is computed for others is done, or
	// ends it.
	Pause(ctx context.Context, paused bool) (api.PauseResult, error)
	// Keys, AddKey and RevokeKey look after the keys of the gateway.
	Keys(ctx context.Context) ([]api.Key, error)
	AddKey(ctx context.Context, req api.NewKey) (api.CreatedKey, error)
	RevokeKey(ctx context.Context, name string) (api.RevokedKey, error)
	// Model carries out a request on the model store. It calls emit like Ask, the
	// last time with Done.
	Model(ctx context.Context, req api.ModelRequest, emit func(api.ModelEvent) error) error
	// Plan says in which ways a model could run on this node and its peers.
	Plan(ctx context.Context, req api.PlanRequest) (*api.PlanResult, error)
	// Purse is the node's money. Error: the network has no token.
	Purse() (*Purse, error)
}

// Limits of the control API.
const (
	maxSocketPath  = 107 // bytes, the kernel's sun_path
	controlTimeout = 10 * time.Second
	maxAskTokens   = 1 << 20
	maxAskStops    = 16
)

// Control serves the control API on a unix socket.
type Control struct {
	path   string
	daemon Daemon
	log    *slog.Logger
	server *http.Server
	served chan struct{} // closed when the server returned
}

// OpenControl listens at path, mode 0600, and serves until Close. A socket that
// a dead daemon left is replaced; a living one, or a file, is an error.
func OpenControl(path string, d Daemon, log *slog.Logger) (*Control, error) {
	l, err := listenControl(path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	c := &Control{path: path, daemon: d, log: log, served: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathStatus, c.status)
	mux.HandleFunc("POST "+api.PathRevocations, c.revoke)
	mux.HandleFunc("POST "+api.PathAsk, c.ask)
	mux.HandleFunc("GET "+api.PathCoverage, c.coverage)
	mux.HandleFunc("POST "+api.PathPause, c.pause)
	mux.HandleFunc("POST "+api.PathModels, c.model)
	mux.HandleFunc("POST "+api.PathPlan, c.plan)
	mux.HandleFunc("GET "+api.PathKeys, c.keys)
	mux.HandleFunc("POST "+api.PathKeys, c.addKey)
	mux.HandleFunc("POST "+api.PathRevokedKey, c.revokeKey)
	c.moneyRoutes(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		c.fail(w, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("this daemon does not know %s %s: is it older than the program that asks?", r.Method, r.URL.Path)})
	})
	c.server = &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: controlTimeout,
		ReadTimeout:       controlTimeout,
		IdleTimeout:       controlTimeout,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	go func() {
		defer close(c.served)
		if err := c.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket failed", "err", err)
		}
	}()
	return c, nil
}

// Close stops listening and waits for running calls until ctx ends; then it
// breaks them off.
func (c *Control) Close(ctx context.Context) error {
	os.Remove(c.path)
	err := c.server.Shutdown(ctx)
	if err != nil {
		err = c.server.Close()
	}
	<-c.served
	return err
}

// listenControl binds in a private folder beside path and moves the socket into
// place once its mode is right, so that it is never open to others. Closing the
// listener removes nothing: its name moved.
func listenControl(path string) (net.Listener, error) {
	if err := freeControl(path); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".s")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	name := filepath.Join(dir, "s")
	if n := max(len(name), len(path)); n > maxSocketPath {
		return nil, fmt.Errorf("%s is too long for a socket by %d bytes: choose a shorter one with --control", path, n-maxSocketPath)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(name, 0o600), os.Rename(name, path)); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// freeControl says whether path may be taken.
func freeControl(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%s is there and is no socket: move it away, or choose another path with --control", path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		conn.Close()
		return fmt.Errorf("another kvasird answers at %s: stop it, or choose another path with --control", path)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil // nobody listens: the rename replaces it
	}
	return fmt.Errorf("another kvasird may be at %s: %w", path, err)
}

func (c *Control) status(w http.ResponseWriter, r *http.Request) {
	st, err := c.daemon.Status(r.Context())
	c.answer(w, st, err)
}

func (c *Control) ask(w http.ResponseWriter, r *http.Request) {
	var req api.AskRequest
	if !c.read(w, r, &req) {
		return
	}
	if err := checkAsk(&req); err != nil {
		c.fail(w, &api.Error{Code: api.CodeBadRequest, Message: err.Error()})
		return
	}
	stream(w, r, func(ctx context.Context, emit func(api.AskEvent) error) error {
		done, err := c.daemon.Ask(ctx, req, emit)
		if err != nil {
			return emit(api.AskEvent{Error: apiError(err)})
		}
		return emit(api.AskEvent{Done: &done})
	})
}

func (c *Control) coverage(w http.ResponseWriter, r *http.Request) {
	maps, err := c.daemon.Coverage(r.Context())
	c.answer(w, maps, err)
}

func (c *Control) pause(w http.ResponseWriter, r *http.Request) {
	var req api.PauseRequest
	if c.read(w, r, &req) {
		result, err := c.daemon.Pause(r.Context(), req.Paused)
		c.answer(w, result, err)
	}
}

func (c *Control) keys(w http.ResponseWriter, r *http.Request) {
	keys, err := c.daemon.Keys(r.Context())
	c.answer(w, keys, err)
}

func (c *Control) addKey(w http.ResponseWriter, r *http.Request) {
	var req api.NewKey
	if c.read(w, r, &req) {
		made, err := c.daemon.AddKey(r.Context(), req)
		c.answer(w, made, err)
	}
}

func (c *Control) revokeKey(w http.ResponseWriter, r *http.Request) {
	var req api.RevokeKey
	if c.read(w, r, &req) {
		revoked, err := c.daemon.RevokeKey(r.Context(), req.Name)
		c.answer(w, revoked, err)
	}
}

func (c *Control) model(w http.ResponseWriter, r *http.Request) {
	var req api.ModelRequest
	if !c.read(w, r, &req) {
		return
	}
	stream(w, r, func(ctx context.Context, emit func(api.ModelEvent) error) error {
		if err := c.daemon.Model(ctx, req, emit); err != nil {
			return emit(api.ModelEvent{Error: apiError(err)})
		}
		return nil
	})
}

func (c *Control) plan(w http.ResponseWriter, r *http.Request) {
	var req api.PlanRequest
	if !c.read(w, r, &req) {
		return
	}
	stream(w, r, func(ctx context.Context, emit func(api.PlanEvent) error) error {
		done, err := c.daemon.Plan(ctx, req)
		if err != nil {
			return emit(api.PlanEvent{Error: apiError(err)})
		}
		return emit(api.PlanEvent{Done: done})
	})
}

// read decodes a request strictly. When it fails, the caller was told.
func (c *Control) read(w http.ResponseWriter, r *http.Request, req any) bool {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, api.MaxRequest))
	dec.DisallowUnknownFields()
	if err := dec.Decode(req); err != nil {
		c.fail(w, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("cannot read the request: %v", err)})
		return false
	}
	return true
}

// answer sends v, or why there is none.
func (c *Control) answer(w http.ResponseWriter, v any, err error) {
	if err != nil {
		c.fail(w, err)
		return
	}
	c.write(w, http.StatusOK, v)
}

func checkAsk(req *api.AskRequest) error {
	switch {
	case req.Prompt == "":
		return errors.New("the prompt is empty")
	case req.Raw && req.System != "":
		return errors.New("raw takes the prompt as it is, so there is no place for a system message")
	case req.MaxTokens < 0 || req.MaxTokens > maxAskTokens:
		return fmt.Errorf("max_tokens = %d: want 0 to %d", req.MaxTokens, maxAskTokens)
	case !(req.Temperature >= 0 && req.Temperature <= 10):
		return fmt.Errorf("temperature = %v: want 0 to 10", req.Temperature)
	case !(req.TopP >= 0 && req.TopP <= 1):
		return fmt.Errorf("top_p = %v: want 0 to 1", req.TopP)
	case len(req.Stop) > maxAskStops:
		return fmt.Errorf("%d stop texts: at most %d", len(req.Stop), maxAskStops)
	}
	return nil
}

// stream has produce emit the lines of an answer, of type E, and sends empty
// ones while it is silent. The context that produce gets ends when the caller is
// gone.
func stream[E any](w http.ResponseWriter, r *http.Request, produce func(ctx context.Context, emit func(E) error) error) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	s := &lineStream{w: w, rc: http.NewResponseController(w), cancel: cancel}
	s.rc.SetReadDeadline(time.Time{}) // the request is in; from now on only watch for the caller to leave
	stop := s.heartbeat(api.HeartbeatSeconds*time.Second, *new(E))
	defer stop()
	produce(ctx, func(ev E) error { return s.send(ev) })
}

// lineStream writes the lines of an answer.
type lineStream struct {
	rc     *http.ResponseController
	cancel context.CancelFunc // ends the answer when the caller is gone

	mu sync.Mutex // guards w and err: pieces and heartbeats interleave
	w  http.ResponseWriter
	// err is the first failed write; none follows it.
	err error
}

func (s *lineStream) send(ev any) error {
	line, err := json.Marshal(ev)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.rc.SetWriteDeadline(time.Now().Add(controlTimeout))
	if _, s.err = s.w.Write(append(line, '\n')); s.err == nil {
		s.err = s.rc.Flush()
	}
	if s.err != nil {
		s.cancel()
	}
	return s.err
}

// heartbeat sends empty events, the first at once, until stop is called.
func (s *lineStream) heartbeat(every time.Duration, empty any) (stop func()) {
	quit, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for s.send(empty) == nil {
			select {
			case <-tick.C:
			case <-quit:
				return
			}
		}
	}()
	return func() { close(quit); <-stopped }
}

func apiError(err error) *api.Error {
	var e *api.Error
	if errors.As(err, &e) {
		return e
	}
	return &api.Error{Code: api.CodeInternal, Message: err.Error()}
}

func (c *Control) fail(w http.ResponseWriter, err error) {
	e := apiError(err)
	c.write(w, e.Code.HTTPStatus(), api.Failure{Error: e})
}

func (c *Control) write(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(controlTimeout))
	if err := json.NewEncoder(w).Encode(v); err != nil {
		c.log.Debug("control answer not delivered", "err", err)
	}
}
