package node

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strings"
)

// load reads the certificate files; nil when none are named.
func (c *TLSConfig) load() (*tls.Config, error) {
	if c.Cert == "" && c.CA == "" {
		return nil, nil
	}
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", c.Cert, c.Key, err)
		}
		out.Certificates = []tls.Certificate{pair}
	}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, fmt.Errorf("tls.ca: %w", err)
		}
		out.RootCAs, err = x509.SystemCertPool()
		if err != nil {
			out.RootCAs = x509.NewCertPool()
		}
		if !out.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls.ca: %s holds no certificate in PEM", c.CA)
		}
	}
	return out, nil
}

// publicPage answers browsers and monitors that come to a websocket listener: the
// port is for peers, and clients have their own door.
func (n *Node) publicPage(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/" && r.URL.Path != "/healthz" {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	fmt.Fprintf(w, "kvasird, a node of network %s. Peers connect here.\n", n.cfg.NetworkID())
}

// listensOnWeb reports whether an address is a websocket's.
func listensOnWeb(listen []string) bool {
	for _, a := range listen {
		if strings.HasSuffix(a, "/ws") || strings.HasSuffix(a, "/wss") {
			return true
		}
	}
	return false
}
