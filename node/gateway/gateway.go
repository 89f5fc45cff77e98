// Package gateway is the HTTP door for people's programs: the OpenAI API over
// any Engine. It checks and bounds what clients send, renders the model's own
// chat template (node/gateway/jinja), cuts the answer at stop strings, streams
// it as whole UTF-8, and reports every failure in OpenAI's error shape.
//
// It knows no model, peer or library: tokens and generation are the Engine's.
// It has no accounts and no CORS. What guards it is where it listens (loopback
// by default) and that it refuses foreign Host and Origin headers, so that a web
// page cannot reach it by DNS rebinding.
//
// Invariants: the deltas of a stream, joined, are the answer that the same
// request gets unstreamed; a stream never ends silently: it ends with a
// finish_reason and [DONE], or with an error event; a client that goes away ends
// its generation.
//
// A Gateway is safe for concurrent use; every request runs in net/http's
// goroutine and starts no other.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"kvasird/node/gateway/jinja"
)

// DefaultAddr is where a gateway listens when nothing else is asked for.
const DefaultAddr = "127.0.0.1:19000"

// Limits on what a client may send and how long it may take.
const (
	maxBody       = 4 << 20 // bytes of a request body
	maxHeader     = 32 << 10
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	renderTimeout = 5 * time.Second // of a chat template
	shutdownGrace = 5 * time.Second
	maxRequests   = 128 // chats at once; more get 429
	maxPreparing  = 4   // decoded and rendered at once, which bounds memory
)

// waits are the times that a client is given.
type waits struct {
	body   time.Duration // to send its body
	write  time.Duration // to take one event, else it loses its slot
	header time.Duration // an early failure may still choose a stream's HTTP status
	ping   time.Duration // silence after which a stream is kept alive: clients and proxies give up
}

var defaultWaits = waits{body: 30 * time.Second, write: 30 * time.Second, header: 800 * time.Millisecond, ping: 10 * time.Second}

// Engine generates tokens for one model. It is safe for concurrent use.
//
// Errors that have one of these methods are the client's to act on: RetryAfter()
// time.Duration, the queue is full (429); ContextLength() (prompt, limit int),
// the prompt does not fit (400). Every other error is a 503 whose reason is the
// error's text.
type Engine interface {
	// Ready is nil once a token went through every part that serves the
	// model, else it says what is missing.
	Ready() error
	// Tokenize splits a rendered prompt, special tokens included.
	Tokenize(prompt string) ([]int32, error)
	// Start queues a request. The end of ctx ends it and frees what it holds.
	Start(ctx context.Context, req Request) (Stream, error)
}

// Stream is a running generation, read by one goroutine.
type Stream interface {
	// Next waits for the next token, the end token included, and returns its
	// bytes, which may be part of a rune or none and are the caller's. io.EOF
	// ends a complete answer. When ctx ends first, its error is returned and
	// Next may be called again. The engine may be ahead of what was read.
	Next(ctx context.Context) ([]byte, error)
	// Finish says why the answer is complete: "stop" or "length".
	Finish() string
}

// Request is one generation.
type Request struct {
	Prompt           []int32
	MaxTokens        int     // 0: as many as fit the context; more than fit are clipped
	Temperature      float32 // 0: greedy
	TopK             int     // 0: off
	TopP             float32 // 1: off
	MinP             float32 // 0: off
	Seed             uint32
	RepeatPenalty    float32 // 1: off
	FrequencyPenalty float32
	PresencePenalty  float32
	LogitBias        map[int32]float32
}

// Model is a model that is served.
type Model struct {
	ID           string // as clients name it
	Created      time.Time
	ChatTemplate string // from the model's own metadata
	BOS, EOS     string // text of these tokens, for the template
	VocabSize    int    // bound on token ids in logit_bias
	Engine       Engine
}

// Config is what a gateway needs.
type Config struct {
	Models []Model                 // none: every model is unknown here
	Routes map[string]http.Handler // further routes, by http.ServeMux pattern, under the same guard
	Hosts  []string                // names, beside loopback, by which clients may call it
	Logger *slog.Logger
	Now    func() time.Time // nil: the clock
	Random func() uint64    // nil: of the process; for ids and seeds
}

func (c *Config) fillDefaults() {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Random == nil {
		c.Random = rand.Uint64
	}
}

// servedModel is a Model with its parsed template, or why there is none.
type servedModel struct {
	Model
	template    *jinja.Template
	templateErr error
}

// Gateway serves HTTP.
type Gateway struct {
	cfg       Config
	models    atomic.Pointer[[]*servedModel] // the list is never changed, only replaced
	hosts     map[string]bool
	requests  chan struct{} // held by each chat request
	preparing chan struct{} // held while a body is decoded and rendered
	mux       *http.ServeMux
	waits     waits
}

// New checks the configuration. A model whose template does not parse is
// served, but its chat route answers why it cannot be used.
func New(cfg Config) (*Gateway, error) {
	cfg.fillDefaults()
	g := &Gateway{
		cfg: cfg, hosts: map[string]bool{}, mux: http.NewServeMux(),
		requests: make(chan struct{}, maxRequests), preparing: make(chan struct{}, maxPreparing),
		waits: defaultWaits,
	}
	for _, h := range cfg.Hosts {
		g.hosts[lower(h)] = true
	}
	g.models.Store(&[]*servedModel{})
	if err := g.SetModels(cfg.Models); err != nil {
		return nil, err
	}
	g.routes()
	return g, nil
}

// SetModels replaces what is served. Answers that run go on. It is called by one
// goroutine at a time.
func (g *Gateway) SetModels(list []Model) error {
	models := make([]*servedModel, 0, len(list))
	for _, m := range list {
		if m.ID == "" || m.Engine == nil || slices.ContainsFunc(models, func(o *servedModel) bool { return o.ID == m.ID }) {
			return fmt.Errorf("gateway: model %q needs an id of its own and an engine", m.ID)
		}
		models = append(models, g.served(m))
	}
	g.models.Store(&models)
	return nil
}

// served adds a model's template, parsed once.
func (g *Gateway) served(m Model) *servedModel {
	s := &servedModel{Model: m}
	for _, old := range *g.models.Load() {
		if old.ID == m.ID && old.ChatTemplate == m.ChatTemplate {
			s.template, s.templateErr = old.template, old.templateErr
			return s
		}
	}
	s.template, s.templateErr = jinja.Parse(m.ChatTemplate)
	if m.ChatTemplate == "" {
		s.templateErr = errors.New("it has none")
	}
	if s.templateErr != nil {
		g.cfg.Logger.Warn("chat template cannot be used", "model", m.ID, "error", s.templateErr)
	}
	return s
}

func (g *Gateway) routes() {
	g.mux.HandleFunc("/healthz", only(http.MethodGet, g.healthz))
	g.mux.HandleFunc("/readyz", only(http.MethodGet, g.readyz))
	g.mux.HandleFunc("/v1/models", only(http.MethodGet, g.listModels))
	g.mux.HandleFunc("/v1/models/{id...}", only(http.MethodGet, g.getModel))
	g.mux.HandleFunc("/v1/chat/completions", only(http.MethodPost, g.chat))
	for pattern, h := range g.cfg.Routes {
		g.mux.Handle(pattern, h)
	}
	g.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, &apiError{status: http.StatusNotFound, code: "unknown_url",
			message: fmt.Sprintf("no route %s %s; there are /v1/models, /v1/chat/completions, /healthz and /readyz", r.Method, clip(r.URL.Path))})
	})
}

// only answers 405 to every other method.
func only(method string, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method && (method != http.MethodGet || r.Method != http.MethodHead) {
			w.Header().Set("Allow", method)
			writeError(w, &apiError{status: http.StatusMethodNotAllowed, code: "method_not_allowed",
				message: fmt.Sprintf("%s takes %s, not %s", clip(r.URL.Path), method, clip(r.Method))})
			return
		}
		h(w, r)
	}
}

// Handler is the gateway without a listener.
func (g *Gateway) Handler() http.Handler { return g.guard(g.mux) }

// Listen opens addr, or DefaultAddr when it is empty.
func Listen(addr string) (net.Listener, error) {
	if addr == "" {
		addr = DefaultAddr
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("gateway: cannot listen on %s: %w", addr, err)
	}
	return l, nil
}

// Run serves on l until ctx ends, then lets running answers finish for a short
// while. It closes l.
func (g *Gateway) Run(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler: g.Handler(), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(g.cfg.Logger.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("gateway: %w", err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	err := srv.Shutdown(grace)
	if err != nil { // answers were still running: end them
		err = srv.Close()
	}
	<-failed
	return err
}
