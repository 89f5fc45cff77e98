package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// guard refuses foreign Host and Origin headers and unknown keys, answers what
// browsers ask beforehand, and logs each request with its status.
func (g *Gateway) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := g.cfg.Now()
		sw := &statusWriter{ResponseWriter: w}
		defer func() { g.log(sw, r, g.cfg.Now().Sub(start)) }()
		id := g.newID("req_")
		sw.Header().Set("Request-Id", id)
		sw.Header().Set("X-Request-Id", id)
		if e := g.foreign(r); e != nil {
			writeError(sw, r, e)
			return
		}
		if g.cors(sw, r) {
			return
		}
		g.admit(sw, r, next)
	})
}

// cors lets pages of listed origins read answers. It reports true when the
// request was only a browser's question, which is answered.
func (g *Gateway) cors(w http.ResponseWriter, r *http.Request) bool {
	origin := r.Header.Get("Origin")
	named := g.origins[lower(origin)]
	if origin == "" || !named && !g.origins["*"] {
		return false
	}
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", origin)
	h.Add("Vary", "Origin")
	h.Set("Access-Control-Expose-Headers", "Request-Id, X-Request-Id, Retry-After, Payment-Required, Payment-Response, X-Kvasir-Quote")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		return false
	}
	h.Set("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS")
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		h.Set("Access-Control-Allow-Headers", asked)
	}
	if named && r.Header.Get("Access-Control-Request-Private-Network") == "true" {
		h.Set("Access-Control-Allow-Private-Network", "true")
	}
	h.Set("Access-Control-Max-Age", "600")
	w.WriteHeader(http.StatusNoContent)
	return true
}

// account is what a request may and did use.
type account struct {
	owner  string
	spend  bool // see Key
	tokens int
}

type accountKey struct{}

// countTokens adds to what the request used.
func countTokens(r *http.Request, n int) {
	if a, ok := r.Context().Value(accountKey{}).(*account); ok {
		a.tokens += n
	}
}

// owner is the name of the request's key, "" where none is asked for.
func owner(r *http.Request) string {
	if a, ok := r.Context().Value(accountKey{}).(*account); ok {
		return a.owner
	}
	return ""
}

// maySpend says whether what the request costs may be the node's own debt: where keys are
// asked for the key says so, else a client on this machine may.
func maySpend(r *http.Request) bool {
	if a, ok := r.Context().Value(accountKey{}).(*account); ok {
		return a.spend
	}
	addr, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && addr.Addr().Unmap().IsLoopback()
}

// asker tells those who wait for answers apart: by key, where keys are asked for,
// else by address.
func asker(r *http.Request) string {
	if name := owner(r); name != "" {
		return name
	}
	if addr, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		return addr.Addr().Unmap().String()
	}
	return ""
}

// admit checks the request's key, where keys are asked for.
func (g *Gateway) admit(w http.ResponseWriter, r *http.Request, next http.Handler) {
	probe := r.URL.Path == "/healthz" || r.URL.Path == "/readyz" || r.Method == http.MethodHead && r.URL.Path == "/"
	if g.cfg.Keys == nil || probe {
		next.ServeHTTP(w, r)
		return
	}
	grant, err := g.cfg.Keys.Admit(sentKey(r))
	if err != nil {
		writeError(w, r, keyError(err))
		return
	}
	a := &account{owner: grant.Owner, spend: grant.Spend}
	defer func() { grant.Done(a.tokens) }()
	next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), accountKey{}, a)))
}

// sentKey is the key of a request, in either of the headers that clients use.
func sentKey(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if strings.EqualFold(scheme, "Bearer") && strings.TrimSpace(token) != "" {
		return strings.TrimSpace(token)
	}
	return r.Header.Get("X-Api-Key")
}

func keyError(err error) *apiError {
	var key *KeyError
	if errors.As(err, &key) {
		return &apiError{status: http.StatusUnauthorized, code: "invalid_api_key", message: err.Error()}
	}
	e := engineError(err)
	if e.status == http.StatusTooManyRequests { // this client's doing, not the node's
		e.busy, e.code = false, "rate_limit_exceeded"
	}
	return e
}

func (g *Gateway) log(w *statusWriter, r *http.Request, took time.Duration) {
	status := w.status
	if r.Context().Err() != nil {
		status = statusClientClosed
	}
	level := g.cfg.Logger.Debug
	if status >= 400 {
		level = g.cfg.Logger.Warn
	}
	level("http request", "method", clip(r.Method), "path", clip(r.URL.Path), "status", status, "duration_ms", took.Milliseconds())
}

// foreign says why a request may come from a web page of another site.
func (g *Gateway) foreign(r *http.Request) *apiError {
	if !g.allowed(r.Context(), r.Host) {
		return &apiError{status: http.StatusForbidden, code: "foreign_host", message: fmt.Sprintf(
			"the Host header %q is not a name of this gateway; use a loopback address or list the name in its configuration", clip(r.Host))}
	}
	for _, origin := range r.Header.Values("Origin") {
		if g.origins[lower(origin)] || g.origins["*"] {
			continue
		}
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || !g.allowed(r.Context(), u.Host) {
			return &apiError{status: http.StatusForbidden, code: "foreign_origin", message: fmt.Sprintf(
				"requests from the web origin %q are refused", clip(origin))}
		}
	}
	return nil
}

// allowed says whether host (perhaps with a port) is loopback, a configured
// name, or the very address that the connection came in on. A name that merely
// resolves to us is what DNS rebinding uses, so it is not enough.
func (g *Gateway) allowed(ctx context.Context, host string) bool {
	name := lower(host)
	if h, _, err := net.SplitHostPort(name); err == nil {
		name = h
	}
	name = strings.TrimSuffix(name, ".")
	if name == "localhost" || g.hosts[name] {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(name, "[]"))
	if err != nil {
		return false
	}
	if ip.Unmap().IsLoopback() {
		return true
	}
	local, ok := ctx.Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && local.AddrPort().Addr().Unmap() == ip.Unmap()
}

// statusWriter remembers the status for the log.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach deadlines and flushing.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
