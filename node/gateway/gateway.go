// Package gateway is the HTTP door for people's programs: the APIs of OpenAI
// (chat completions, completions, responses, embeddings) and of Anthropic
// (messages) over any Engine. It checks and bounds what clients send, decodes
// all of it into one form of a conversation, renders the model's own chat
// template (node/gateway/jinja), reads reasoning and tool calls out of the
// answer (node/gateway/toolcall), holds it to a form (node/gateway/grammar),
// cuts it at stop strings, and sends it as whole UTF-8, in the shape of the API
// that was asked, errors too.
//
// It knows no model, peer or library: tokens and generation are the Engine's,
// keys and their limits are behind Keys, stored responses behind Store, and where
// answers are paid, that is behind Payments. It refuses foreign Host and Origin
// headers, so that a web page cannot reach it by DNS rebinding.
//
// Invariants: the deltas of a stream, joined, are the answer that the same
// request gets unstreamed; a stream never ends silently: it ends with the API's
// last event, or with an error event; a client that goes away ends its
// generation; what a field asks for is done, or refused by the field's name, or
// documented as ignored.
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
	"strings"
	"sync/atomic"
	"time"

	"kvasird/node/gateway/jinja"
	"kvasird/node/gateway/toolcall"
)

// DefaultAddr is where a gateway listens when nothing else is asked for.
const DefaultAddr = "127.0.0.1:19000"

// Limits on what a client may send and how long it may take.
const (
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

// Model is a model that is served.
type Model struct {
	ID           string   // as clients name it
	Aliases      []string // other names; one may end in *
	Digest       string   // of its weights, small hexadecimal digits; 8 of them or more, from the first, are a name too
	Created      time.Time
	ChatTemplate string // from the model's own metadata
	BOS, EOS     string // text of these tokens, for the template
	VocabSize    int    // bound on token ids in logit_bias
	Engine       Engine
	NoText       bool // it makes embeddings only: Engine.Start is never called
}

// Config is what a gateway needs.
type Config struct {
	Models []Model                 // none: every model is unknown here
	Routes map[string]http.Handler // further routes, by http.ServeMux pattern, under the same guard
	Hosts  []string                // names, beside loopback, by which clients may call it
	// Origins are the web origins whose pages may use the gateway (CORS), as
	// scheme://host:port, or "*" for all. None by default.
	Origins  []string
	Keys     Keys     // nil: no key is asked for
	Payments Payments // nil: answers are free
	Store    Store    // of responses; nil: those of the last hour, up to 64 MB in memory
	// Limit is how long a request may take, from when it is queued; 0: 10 minutes.
	Limit  time.Duration
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
	if c.Limit == 0 {
		c.Limit = 10 * time.Minute
	}
	if c.Store == nil {
		c.Store = newMemory(c.Now)
	}
}

// servedModel is a Model with its parsed template, or why there is none.
type servedModel struct {
	Model
	template    chatTemplate
	templateErr error
	family      toolcall.Family
	knowsTools  bool // the template writes tools in the syntax of family
	reasons     bool // the template has words for reasoning
}

// Gateway serves HTTP.
type Gateway struct {
	cfg       Config
	models    atomic.Pointer[[]*servedModel] // the list is never changed, only replaced
	hosts     map[string]bool
	requests  chan struct{} // held by each chat request
	preparing chan struct{} // held while a body is decoded and rendered
	large     chan struct{} // held with a large body
	origins   map[string]bool
	mux       *http.ServeMux
	waits     waits
}

// New checks the configuration. A model whose template does not parse is
// served, but its chat route answers why it cannot be used.
func New(cfg Config) (*Gateway, error) {
	cfg.fillDefaults()
	g := &Gateway{
		cfg: cfg, hosts: map[string]bool{}, mux: http.NewServeMux(),
		requests: make(chan struct{}, maxRequests), preparing: make(chan struct{}, maxPreparing), large: make(chan struct{}, maxLarge),
		origins: map[string]bool{}, waits: defaultWaits,
	}
	for _, h := range cfg.Hosts {
		g.hosts[lower(h)] = true
	}
	for _, o := range cfg.Origins {
		g.origins[lower(o)] = true
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
			s.family, s.knowsTools, s.reasons = old.family, old.knowsTools, old.reasons
			return s
		}
	}
	s.template.Template, s.templateErr = jinja.Parse(m.ChatTemplate)
	s.family = toolcall.Detect(m.ChatTemplate)
	s.knowsTools = s.family != toolcall.None && strings.Contains(m.ChatTemplate, "tools")
	words := lower(m.ChatTemplate)
	s.reasons = strings.Contains(words, "think") || strings.Contains(words, "thought") || strings.Contains(words, "reasoning")
	if m.ChatTemplate == "" {
		s.templateErr = errors.New("it has none")
	}
	if s.templateErr != nil && !m.NoText {
		g.cfg.Logger.Warn("chat template cannot be used", "model", m.ID, "error", s.templateErr)
	}
	return s
}

func (g *Gateway) routes() {
	g.mux.HandleFunc("/healthz", only(http.MethodGet, g.healthz))
	g.mux.HandleFunc("/readyz", only(http.MethodGet, g.readyz))
	g.mux.HandleFunc("HEAD /{$}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }) // a client's probe
	g.mux.HandleFunc("/v1/models", only(http.MethodGet, g.listModels))
	g.mux.HandleFunc("/v1/models/{id...}", only(http.MethodGet, g.getModel))
	g.mux.HandleFunc("/v1/chat/completions", only(http.MethodPost, g.chat))
	g.mux.HandleFunc("/v1/completions", only(http.MethodPost, g.completions))
	g.mux.HandleFunc("/v1/embeddings", only(http.MethodPost, g.embeddings))
	g.mux.HandleFunc("/v1/responses", only(http.MethodPost, g.responses))
	g.mux.HandleFunc("/v1/responses/{id}", g.storedResponse)
	g.mux.HandleFunc("/anthropic/v1/models", only(http.MethodGet, g.listModels))
	g.mux.HandleFunc("/anthropic/v1/models/{id...}", only(http.MethodGet, g.getModel))
	for _, prefix := range []string{"/v1", "/anthropic/v1"} {
		g.mux.HandleFunc(prefix+"/messages", only(http.MethodPost, g.messages))
		g.mux.HandleFunc(prefix+"/messages/count_tokens", only(http.MethodPost, g.countTokens))
	}
	if g.cfg.Payments != nil {
		g.mux.HandleFunc("/v1/quotes", only(http.MethodPost, g.quotes))
	}
	for pattern, h := range g.cfg.Routes {
		g.mux.Handle(pattern, h)
	}
	g.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, r, &apiError{status: http.StatusNotFound, code: "unknown_url",
			message: fmt.Sprintf("no route %s %s; there are /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, "+
				"/anthropic/v1/messages, /healthz and /readyz", r.Method, clip(r.URL.Path))})
	})
}

// only answers 405 to every other method.
func only(method string, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method && (method != http.MethodGet || r.Method != http.MethodHead) {
			wrongMethod(w, r, method)
			return
		}
		h(w, r)
	}
}

func wrongMethod(w http.ResponseWriter, r *http.Request, allowed string) {
	w.Header().Set("Allow", allowed)
	writeError(w, r, &apiError{status: http.StatusMethodNotAllowed, code: "method_not_allowed",
		message: fmt.Sprintf("%s takes %s, not %s", clip(r.URL.Path), allowed, clip(r.Method))})
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
