//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/node/api"
)

// network is a swarm that forms itself: a network file and nodes that are only
// started.
type network struct {
	*swarm
	file string
	said bytes.Buffer // what was said when it was created
}

func newNetwork(t *testing.T, opts NewNetwork) *network {
	t.Helper()
	n := &network{swarm: newSwarm(t)}
	n.file = filepath.Join(n.dir, "home.toml")
	opts.Name, opts.Out = "home", n.file
	if err := CreateNetwork(opts, &n.said); err != nil {
		t.Fatal(err)
	}
	named := filepath.Join(n.dir, "backbone.gguf") // as chat asks for it
	if err := os.Link(n.whole, named); err != nil {
		t.Fatal(err)
	}
	n.whole = named
	return n
}

// join starts a node of the network on this machine.
func (n *network) join(name string, args ...string) *child {
	n.t.Helper()
	return n.start(name, append([]string{"--network", n.file, "--listen", "/ip4/127.0.0.1/tcp/0", "--http", "127.0.0.1:0"}, args...)...)
}

// covered waits until every expert is served by so many volunteers, as c sees it.
func (n *network) covered(c *child, replicas int) {
	n.t.Helper()
	for {
		maps, err := c.client().Coverage(n.ctx)
		if err == nil && len(maps) == 0 {
			err = errors.New("no model is known")
		}
		if err == nil {
			err = leastCovered(maps[0], replicas)
		}
		if err == nil {
			return
		}
		select {
		case <-n.ctx.Done():
			n.t.Fatal(err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func leastCovered(m api.CoverageMap, replicas int) error {
	if len(m.Layers) == 0 {
		return fmt.Errorf("no layer of %s is known", m.Model)
	}
	for _, l := range m.Layers {
		for e, got := range l.Replicas {
			if got < replicas {
				return fmt.Errorf("layer %d expert %d: %d replicas, want %d", l.Layer, e, got, replicas)
			}
		}
	}
	return nil
}

// TestSwarmFormsItself: one node has the model, three have nothing but the network
// file and room for half of the experts each.
func TestSwarmFormsItself(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 1})
	began := time.Now()
	n.backbone = n.join("backbone", "--model", n.whole, "--experts", "remote", "--wait", "60")
	var volunteers []*child
	for _, name := range []string{"v1", "v2", "v3"} {
		volunteers = append(volunteers, n.join(name, "--memory", "8MB", "--disk", "1GB"))
	}
	st, err := n.backbone.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	n.http = st.HTTP
	got, _, err := askTokens(n.ctx, n.backbone.client(), api.AskRequest{Prompt: questions[0], MaxTokens: 64}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("from nothing to %d tokens of an answer: %v", len(got), time.Since(began).Round(time.Millisecond))
	n.sameAsAlone(questions[0], nil)
	n.covered(n.backbone, 1)
	var rows uint64
	for _, v := range volunteers {
		st, err := v.client().Status(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range st.Rows {
			rows += r.Rows
		}
		t.Logf("%s serves %v", v.name, st.Slices)
	}
	if rows == 0 {
		t.Error("the volunteers computed nothing")
	}
}

// TestFetchedBackbone: a node that has nothing of a model but its id fetches what the
// backbone needs, and answers without whoever had all of it.
func TestFetchedBackbone(t *testing.T) {
	t.Parallel()
	n, at := newJoining(t, NewNetwork{Replicas: 1}, "--experts", "remote")
	for _, name := range []string{"v1", "v2"} {
		n.join(name, "--peer", at, "--memory", "16MB")
	}
	st := n.sees(n.backbone, serving)
	n.covered(n.backbone, 1)
	b := n.join("fetched", "--peer", at, "--model", st.Model.ID, "--role", "backbone,entry", "--wait", "60")
	fetched := n.sees(b, serving)
	if got := fetched.Model; got == nil || got.ID != st.Model.ID || got.Name != st.Model.Name {
		t.Errorf("it runs %+v, want %+v", got, st.Model)
	}
	stored := n.models(b)
	if len(stored) != 1 || stored[0].Held >= stored[0].Total/2 {
		t.Errorf("it holds %+v, want the dense part alone", stored)
	}
	if err := n.backbone.stop(); err != nil {
		t.Fatal(err)
	}
	n.backbone, n.http = b, fetched.HTTP
	n.sameAsAlone(questions[0], nil)
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	again := n.join("fetched", "--model", st.Model.ID, "--role", "backbone,entry", "--wait", "60")
	n.http, n.backbone = n.sees(again, serving).HTTP, again
	n.sameAsAlone(questions[1], nil)
}

// models lists what is in a node's store.
func (n *network) models(c *child) []api.StoredModel {
	n.t.Helper()
	var list []api.StoredModel
	err := c.client().Model(n.ctx, api.ModelRequest{Action: api.ModelList}, func(ev api.ModelEvent) error {
		list = append(list, ev.Models...)
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

// TestMarketHTTP: what the market says over HTTP is what the swarm is.
func TestMarketHTTP(t *testing.T) {
	n := newNetwork(t, NewNetwork{Replicas: 2})
	n.backbone = n.join("backbone", "--model", n.whole)
	st, err := n.backbone.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	n.http = st.HTTP
	post := func(path, body string) (int, map[string]any) {
		t.Helper()
		resp, err := http.Post("http://"+n.http+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var reply map[string]any
		if err := json.NewDecoder(resp.Body).Decode(&reply); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, reply
	}
	if status, reply := post("/api/expert-coverage", `{"worker":"a","holdings":[{"layer":0,"experts":[0,16]}]}`); status != 200 {
		t.Fatalf("heartbeat: %d %v", status, reply)
	}
	status, reply := post("/api/expert-volunteer", `{"max_experts":8}`)
	if status != 200 || reply["scarcity"] != 1.0 || reply["target"] != 2.0 {
		t.Errorf("volunteer: %d %v", status, reply)
	}
	resp, err := http.Get("http://" + n.http + "/api/expert-demand")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var demand struct {
		Experts  int `json:"experts"`
		Segments []struct {
			Layer    int    `json:"layer"`
			Experts  [2]int `json:"experts"`
			Replicas int    `json:"replicas"`
		} `json:"segments"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&demand); err != nil {
		t.Fatal(err)
	}
	if demand.Experts != 32 || len(demand.Segments) != 5 || demand.Segments[0].Experts != [2]int{0, 16} || demand.Segments[0].Replicas != 1 {
		t.Errorf("demand %+v, want layer 0 in two and three other layers", demand)
	}
	for path, body := range map[string]string{
		"/api/expert-coverage":  `{"holdings":[{"layer":9,"experts":[0,16]}]}`,
		"/api/expert-volunteer": `{"max_experts":"many"}`,
	} {
		if status, reply := post(path, body); status != 400 || reply["error"] == nil {
			t.Errorf("%s %s: %d %v, want 400 and why", path, body, status, reply)
		}
	}
}

// TestWebListener: peers and plain HTTPS come in at one port, with a certificate
// that only this network knows.
func TestWebListener(t *testing.T) {
	n := newNetwork(t, NewNetwork{})
	cert, key := writeCertificate(t, n.dir)
	web := filepath.Join(n.dir, "web.toml")
	if err := os.WriteFile(web, fmt.Appendf(nil, "[tls]\ncert = %q\nkey = %q\nca = %q\n", cert, key, cert), 0o600); err != nil {
		t.Fatal(err)
	}
	a := n.start("a", "--config", web, "--network", n.file, "--listen", "/ip4/127.0.0.1/tcp/0/tls/ws", "--mdns", Off,
		"--http", Off, "--role", "volunteer,relay")
	st, err := a.await(n.ctx, serving)
	if err != nil {
		t.Fatal(err)
	}
	addr := localAddr(st)
	b := n.start("b", "--config", web, "--network", n.file, "--listen", "/ip4/127.0.0.1/tcp/0", "--mdns", Off, "--http", Off, "--peer", addr)
	_, err = b.await(n.ctx, func(st *api.Status) bool {
		return len(st.Peers) == 1 && st.Peers[0].State == api.PeerConnected && strings.Contains(st.Peers[0].Addr, "/ws")
	})
	if err != nil {
		t.Errorf("the peer does not come in at %s: %v", addr, err)
	}
	_, rest, _ := strings.Cut(addr, "/tcp/")
	port, _, _ := strings.Cut(rest, "/")
	text, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	resp, err := client.Get("https://127.0.0.1:" + port + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ = io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(text), "node of network home-") {
		t.Errorf("GET /healthz: %d %q", resp.StatusCode, text)
	}
}

// writeCertificate writes a certificate for 127.0.0.1, signed by itself, and its key.
func writeCertificate(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &secret.PublicKey, secret)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(secret)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	err = errors.Join(
		os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}
