package gateway

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

// guard refuses foreign Host and Origin headers, and logs each request with its
// status.
func (g *Gateway) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := g.cfg.Now()
		sw := &statusWriter{ResponseWriter: w}
		defer func() { g.log(sw, r, g.cfg.Now().Sub(start)) }()
		if e := g.foreign(r); e != nil {
			writeError(sw, e)
			return
		}
		next.ServeHTTP(sw, r)
	})
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
