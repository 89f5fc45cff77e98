package p2p

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	libp2pevent "github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/protocol/holepunch"
	ma "github.com/multiformats/go-multiaddr"
)

// testTLS is a certificate for 127.0.0.1 and what trusts it.
func testTLS(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, RootCAs: roots,
	}
}

// One port takes peers by websocket and people by HTTPS.
func TestWebsocketAndHTTPS(t *testing.T) {
	conf := testTLS(t)
	b := startHost(t, func(c *Config) {
		c.Listen, c.TLS = []string{"/ip4/127.0.0.1/tcp/0/tls/ws"}, conf
		c.HTTP = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto, " ", r.URL.Path) })
		c.NoLane = true
	})
	a := startHost(t, func(c *Config) { c.TLS = &tls.Config{RootCAs: conf.RootCAs} })
	p := hello(t, a, b)
	if !strings.Contains(p.Addr, "/ws") {
		t.Errorf("connected at %s", p.Addr)
	}
	c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := echo(c, 1<<20); err != nil {
		t.Error(err)
	}
	port, _ := protocolOf(infoOf(t, b).Addrs[0], ma.P_TCP)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: conf.RootCAs}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	got, err := (&http.Client{Transport: transport, Timeout: patience}).Get("https://127.0.0.1:" + port + "/status")
	if err != nil {
		t.Fatal(err)
	}
	defer got.Body.Close()
	if body, err := io.ReadAll(got.Body); err != nil || string(body) != "HTTP/2.0 /status" {
		t.Errorf("got %q, %v", body, err)
	}
	// Who does not know the authority says so.
	stranger := startHost(t, nil)
	if _, err := stranger.Hello(t.Context(), infoOf(t, b)); err == nil || !strings.Contains(err.Error(), "x509") {
		t.Errorf("unknown authority: %v", err)
	}
}

// A proxy has the certificate and passes websockets on; the node tells its address.
func TestBehindProxy(t *testing.T) {
	b := startHost(t, func(c *Config) { c.Listen, c.NoLane = []string{"/ip4/127.0.0.1/tcp/0/ws"}, true })
	port, _ := protocolOf(infoOf(t, b).Addrs[0], ma.P_TCP)
	conf := testTLS(t)
	proxy := httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "127.0.0.1:" + port}))
	proxy.TLS = conf.Clone()
	proxy.StartTLS()
	defer proxy.Close()
	_, outside, _ := net.SplitHostPort(proxy.Listener.Addr().String())
	addr := ma.StringCast("/ip4/127.0.0.1/tcp/" + outside + "/tls/ws")
	a := startHost(t, func(c *Config) { c.TLS = &tls.Config{RootCAs: conf.RootCAs} })
	p, err := a.Hello(t.Context(), peer.AddrInfo{ID: b.ID(), Addrs: []ma.Multiaddr{addr}})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(p.Addr, "/tcp/"+outside+"/wss") {
		t.Errorf("connected at %s, not through the proxy", p.Addr)
	}
	c, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := echo(c, 1<<20); err != nil {
		t.Error(err)
	}
}

// freePort is a port of 127.0.0.1 that was free a moment ago.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func TestOnePortForTCPAndWebsocket(t *testing.T) {
	tcp := "/ip4/127.0.0.1/tcp/" + freePort(t)
	b := startHost(t, func(c *Config) { c.Listen = []string{tcp, tcp + "/ws"} })
	for _, addr := range []string{tcp, tcp + "/ws"} {
		a := startHost(t, nil)
		p, err := a.Hello(t.Context(), peer.AddrInfo{ID: b.ID(), Addrs: []ma.Multiaddr{ma.StringCast(addr)}})
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(p.Addr, "/ws") != strings.HasSuffix(addr, "/ws") {
			t.Errorf("dialled %s, connected at %s", addr, p.Addr)
		}
	}
	cfg := testConfig(t)
	cfg.Listen = []string{tcp + "/ws"}
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Start(); err == nil || !strings.Contains(err.Error(), tcp) {
		t.Errorf("listening where another does: %v", err)
	}
}

// What finds peers and serves them ends with the host.
func TestCloseEndsServices(t *testing.T) {
	run := func() {
		network := ownNetwork()
		all := func(c *Config) {
			c.Network, c.DHT, c.MDNS, c.Remember = network, true, true, filepath.Join(t.TempDir(), "peers.json")
		}
		relay := startHost(t, func(c *Config) { all(c); c.Relay = true })
		hidden := startHost(t, func(c *Config) { all(c); noWayIn(relay)(c) })
		circuitTo(t, hidden)
		if err := errors.Join(hidden.Close(), relay.Close()); err != nil {
			t.Error(err)
		}
	}
	run() // starts what libraries keep for the process
	before := runtime.NumGoroutine()
	run()
	run()
	eventually(t, fmt.Sprintf("goroutines back to %d", before), func() bool { return runtime.NumGoroutine() <= before })
}

func TestAnnouncedAddresses(t *testing.T) {
	const addr = "/dns4/relay.example.org/tcp/443/tls/ws"
	a := startHost(t, func(c *Config) { c.Announce = []string{addr} })
	if !slices.ContainsFunc(a.Addrs(), func(s string) bool { return strings.HasPrefix(s, addr+"/p2p/") }) {
		t.Errorf("not among %v", a.Addrs())
	}
	if r := a.Report(); !slices.Equal(r.Announced, []string{addr}) || slices.Contains(r.Observed, addr) {
		t.Errorf("report: %+v", r)
	}
}

func TestReachRefused(t *testing.T) {
	id := testConfig(t).Identity.ID().String()
	tests := []struct {
		name, want string
		change     func(*Config)
	}{
		{"unknown reach", "reach", func(c *Config) { c.Reach = "maybe" }},
		{"private relay", "relay", func(c *Config) { c.Relay, c.Reach = true, ReachPrivate }},
		{"wss without certificate", "certificate", func(c *Config) { c.Listen = []string{"/ip4/127.0.0.1/tcp/0/tls/ws"} }},
		{"HTTP without websocket", "websocket", func(c *Config) { c.HTTP = http.NotFoundHandler() }},
		{"negative peers", "peers", func(c *Config) { c.MaxPeers = -1 }},
		{"announced address", "announced", func(c *Config) { c.Announce = []string{"example.org:443"} }},
		{"bootstrap without id", "peer address", func(c *Config) { c.Bootstrap = []string{"/ip4/127.0.0.1/tcp/1"} }},
		{"relay without address", "peer address", func(c *Config) { c.Relays = []string{"/p2p/" + id} }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig(t)
			tt.change(&cfg)
			if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
	// The network file that all share names the bootstrap itself too.
	cfg := testConfig(t)
	cfg.Bootstrap = []string{"/ip4/127.0.0.1/tcp/1/p2p/" + cfg.Identity.ID().String()}
	if h, err := New(cfg); err != nil || len(h.keepers) != 0 {
		t.Errorf("itself as bootstrap: %v", err)
	}
}

// What a household has behind its router gets in at once, and again after each restart of
// the router, from an address that is not exempt.
func TestManyPeersComeBackAtOnce(t *testing.T) {
	var l Limits
	if err := l.validate(); err != nil {
		t.Fatal(err)
	}
	rm, err := newResourceManager(l, true)
	if err != nil {
		t.Fatal(err)
	}
	defer rm.Close()
	addr := ma.StringCast("/ip4/192.0.2.1/tcp/4001")
	ids := make([]peer.ID, 200)
	for i := range ids {
		id, err := NewIdentity()
		if err != nil {
			t.Fatal(err)
		}
		ids[i] = id.ID()
	}
	for restart := range 4 {
		var open []network.ConnManagementScope
		for i, id := range ids {
			c, err := rm.OpenConnection(network.DirInbound, true, addr)
			if err == nil {
				err = c.SetPeer(id)
			}
			if err != nil {
				t.Fatalf("restart %d, peer %d: %v", restart, i, err)
			}
			s, err := rm.OpenStream(id, network.DirInbound)
			if err == nil {
				err = errors.Join(s.SetProtocol("/ipfs/id/1.0.0"), s.SetService("libp2p.identify"))
			}
			if err != nil {
				t.Fatalf("restart %d, identity of peer %d: %v", restart, i, err)
			}
			defer s.Done()
			open = append(open, c)
		}
		for _, c := range open {
			c.Done()
		}
	}
}

func TestOutlookInWords(t *testing.T) {
	addr := ma.StringCast("/ip4/198.51.100.7/tcp/4001")
	failed := &holepunch.Event{Evt: &holepunch.EndHolePunchEvt{}}
	punched := &holepunch.Event{Evt: &holepunch.EndHolePunchEvt{Success: true}}
	nat := func(kind network.NATDeviceType) any { return libp2pevent.EvtNATDeviceTypeChanged{NatDeviceType: kind} }
	tests := []struct {
		name       string
		events     []any
		reach, nat string // how the words begin
		needsRelay bool
	}{
		{"nothing known", nil, "not known", "not known", true},
		{"asked peers could not", []any{libp2pevent.EvtLocalReachabilityChanged{Reachability: network.ReachabilityPrivate}}, "private", "not known", true},
		{"asked peers could", []any{libp2pevent.EvtLocalReachabilityChanged{Reachability: network.ReachabilityPublic}}, "public", "not known", false},
		{"an address is good", []any{libp2pevent.EvtHostReachableAddrsChanged{Reachable: []ma.Multiaddr{addr}}}, "public: a peer could connect to " + addr.String(), "not known", false},
		{"an address is not", []any{libp2pevent.EvtHostReachableAddrsChanged{Unreachable: []ma.Multiaddr{addr}}}, "private", "not known", true},
		{"same port for all", []any{nat(network.NATDeviceTypeEndpointIndependent)}, "not known", "passable", true},
		{"a port for each", []any{nat(network.NATDeviceTypeEndpointDependent)}, "not known", "symmetric", true},
		{"holes fail", []any{failed, failed, failed}, "not known", "symmetric, or behind a firewall: all 3", true},
		{"a hole at last", []any{failed, failed, punched}, "not known", "passable: 1 of 3", true},
	}
	started := startHost(t, nil)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := &Host{cfg: started.cfg, node: started.node} // with an outlook of its own
			for _, e := range tt.events {
				if p, ok := e.(*holepunch.Event); ok {
					h.outlook.Trace(p)
				} else {
					h.outlook.note(e)
				}
			}
			var r Report
			h.outlook.describe(&r, &h.cfg)
			if !strings.HasPrefix(r.Reach, tt.reach) || !strings.HasPrefix(r.NAT, tt.nat) {
				t.Errorf("reach %q, NAT %q, want %q and %q", r.Reach, r.NAT, tt.reach, tt.nat)
			}
			if got := h.needsRelay(); got != tt.needsRelay {
				t.Errorf("needs a relay: %v", got)
			}
		})
	}
}

// A node that is alone says why and what to do.
func TestReportOfALonelyNode(t *testing.T) {
	dead := "/ip4/127.0.0.1/tcp/1/p2p/" + testConfig(t).Identity.ID().String()
	h := startHost(t, func(c *Config) {
		c.Bootstrap, c.Relays, c.Reach, c.MDNS, c.Listen = []string{dead}, []string{dead}, ReachPrivate, true, []string{}
	})
	eventually(t, "the report has the reasons", func() bool {
		r := h.Report()
		return len(r.Bootstrap) == 1 && r.Bootstrap[0].State == Unreachable && strings.Contains(r.Bootstrap[0].Err, "refused") &&
			len(r.Relays) == 1 && !r.Relays[0].Holds && r.Relays[0].Err != "" && strings.HasPrefix(r.MDNS, "failed: ")
	})
	advice := strings.Join(h.Report().Advice, "\n")
	for _, want := range []string{"no bootstrap is connected", "local network", "no relay has taken"} {
		if !strings.Contains(advice, want) {
			t.Errorf("%q is not in the advice:\n%s", want, advice)
		}
	}
	quiet := startHost(t, nil)
	if a := quiet.Report().Advice; len(a) != 1 || !strings.Contains(a[0], "add the address") {
		t.Errorf("advice: %v", a)
	}
	if r := (&Host{cfg: quiet.cfg}).Report(); r.Reach != errNotUp.Error() {
		t.Errorf("before the start: %q", r.Reach)
	}
}

// A listener that hangs up in the handshake, as one at its limit does, is explained.
func TestHangUpIsExplained(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Read(make([]byte, 64))
			c.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	a := startHost(t, nil)
	addr := ma.StringCast("/ip4/127.0.0.1/tcp/" + port)
	_, err = a.Hello(t.Context(), peer.AddrInfo{ID: testConfig(t).Identity.ID(), Addrs: []ma.Multiaddr{addr}})
	if !errors.Is(err, errLimited) {
		t.Errorf("got %v, want it explained", err)
	}
	other := errors.New("connection refused")
	if err := explainDial(other); err != other {
		t.Errorf("got %v", err)
	}
}
