//go:build nettest && linux

package p2p_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"kvasird/p2p"
)

// line is what a home has: 10 ms to the router.
var line = link{Delay: 10 * time.Millisecond}

// swarm is a world with a relay in it that is also everyone's first contact.
type swarm struct {
	*world
	relay     *node
	relaySpec nodeSpec
	cert, key []byte // of the relay's websocket, known to all
}

func newSwarm(t testing.TB) *swarm {
	t.Helper()
	s := &swarm{world: newWorld(t)}
	at := s.public("relay", link{})
	s.cert, s.key = certificate(t, at.addr)
	s.relaySpec = nodeSpec{
		Listen: []string{"/ip4/0.0.0.0" + viaTCP, "/ip4/0.0.0.0" + viaQUIC, "/ip4/0.0.0.0" + viaWeb},
		Reach:  p2p.ReachPublic, Relay: true, DHT: true, CertPEM: s.cert, KeyPEM: s.key,
	}
	s.relay = at.start(s.relaySpec)
	return s
}

// member is how a node joins the swarm that knows nothing but the relay.
func (s *swarm) member(via ...string) nodeSpec {
	spec := nodeSpec{DHT: true, CertPEM: s.cert, KeyPEM: s.key}
	for _, v := range via {
		spec.Bootstrap = append(spec.Bootstrap, s.relay.at(v))
	}
	spec.Relays = spec.Bootstrap
	return spec
}

func certificate(t testing.TB, ip string) (certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "relay"},
		IPAddresses: []net.IP{net.ParseIP(ip)}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	rawKey, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: rawKey})
}

// echoes has both nodes get their bytes back from the other.
func echoes(a, b *node) {
	a.t.Helper()
	a.has(b)
	b.has(a)
	a.echo(b, 200_000, 3, false)
	b.echo(a, 200_000, 3, false)
}

// Two nodes behind NATs that know the relay alone find each other there and punch through.
func TestNetHolePunch(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, via string }{{"tcp", viaTCP}, {"quic", viaQUIC}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSwarm(t)
			spec := s.member(c.via)
			spec.Listen = []string{"/ip4/0.0.0.0" + c.via}
			start := time.Now()
			a := s.nat("nata", cone, line).host("a").start(spec)
			b := s.nat("natb", cone, line).host("b").start(spec)
			met := a.meets(b, "")
			direct := a.meets(b, p2p.Direct)
			b.meets(a, p2p.Direct)
			t.Logf("met (%s) after %v, direct after %v, at %s", met.Path, met.At.Sub(start), direct.At.Sub(start), direct.Addr)
			if !strings.Contains(direct.Addr, strings.Split(c.via, "/")[1]) {
				t.Errorf("direct at %s, want it over %s", direct.Addr, c.name)
			}
			echoes(a, b)
			stays(t, a, b, p2p.Direct, 10*time.Second)
		})
	}
}

// Nodes that were up before their network meet before libp2p is ready to punch holes; they
// go direct all the same.
func TestNetHolePunchAfterLateNetwork(t *testing.T) {
	t.Parallel()
	s := newSwarm(t)
	hostA, hostB := s.nat("nata", cone, line).host("a"), s.nat("natb", cone, line).host("b")
	mend := s.cut()
	a, b := hostA.start(s.member(viaTCP, viaQUIC)), hostB.start(s.member(viaTCP, viaQUIC))
	time.Sleep(10 * time.Second)
	mended := time.Now()
	mend()
	met := a.meets(b, "")
	direct := a.meets(b, p2p.Direct)
	t.Logf("met (%s) after %v, direct after %v, at %s", met.Path, met.At.Sub(mended), direct.At.Sub(mended), direct.Addr)
}

// stays checks that two nodes keep a path.
func stays(t *testing.T, a, b *node, path p2p.Path, d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		atA, atB := a.now(b), b.now(a)
		if atA != path || atB != path {
			t.Fatalf("%s is %q at %s, which is %q at the other, want both %q", b.name, atA, a.name, atB, path)
		}
	}
}

// No hole can be punched between two symmetric NATs: the nodes work through the relay, and
// say why.
func TestNetSymmetricNAT(t *testing.T) {
	t.Parallel()
	s := newSwarm(t)
	start := time.Now()
	a := s.nat("nata", symmetric, line).host("a").start(s.member(viaTCP, viaQUIC))
	b := s.nat("natb", symmetric, line).host("b").start(s.member(viaTCP, viaQUIC))
	met := a.meets(b, p2p.Relayed)
	b.meets(a, p2p.Relayed)
	t.Logf("met after %v", met.At.Sub(start))
	echoes(a, b)
	// Long enough for all attempts to punch.
	stays(t, a, b, p2p.Relayed, 25*time.Second)
	echoes(a, b)
	r := a.reports("a symmetric NAT", func(r p2p.Report) bool { return strings.Contains(r.NAT, "symmetric") && r.RelayedPeers == 1 })
	t.Logf("%+v", r)
}

// A relay that no configuration names is found in the DHT.
func TestNetRelayFromDHT(t *testing.T) {
	s := newSwarm(t)
	spec := s.member(viaTCP, viaQUIC)
	spec.Relays = nil
	start := time.Now()
	a := s.nat("nata", symmetric, line).host("a").start(spec)
	b := s.nat("natb", symmetric, line).host("b").start(spec)
	met := a.meets(b, p2p.Relayed)
	b.meets(a, p2p.Relayed)
	t.Logf("met after %v", met.At.Sub(start))
	echoes(a, b)
}

// Where nothing but TCP to port 443 gets out, two nodes meet at the relay's websocket,
// which is a web server for others.
func TestNetOnlyPort443(t *testing.T) {
	s := newSwarm(t)
	natA, natB := s.nat("nata", cone, line), s.nat("natb", cone, line)
	s.nft(natA.ns, webOnly)
	s.nft(natB.ns, webOnly)
	hostA, hostB := natA.host("a"), natB.host("b")
	page, err := s.get(hostA, "https://"+s.relay.site.addr+"/")
	if err != nil || page != nodePage {
		t.Errorf("relay's page: %q, %v", page, err)
	}
	start := time.Now()
	a := hostA.start(s.member(viaWeb))
	b := hostB.start(s.member(viaWeb))
	met := a.meets(b, p2p.Relayed)
	b.meets(a, p2p.Relayed)
	t.Logf("met after %v", met.At.Sub(start))
	echoes(a, b)
}

// get asks the relay's web server.
func (s *swarm) get(from *site, url string) (page string, err error) {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.cert)
	err = inNamespace(from.ns, func() error {
		c, err := tls.Dial("tcp4", s.relay.site.addr+":443", &tls.Config{RootCAs: roots})
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		client := http.Client{Transport: &http.Transport{
			DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return c, nil },
		}}
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
		page = string(raw)
		return err
	})
	return page, err
}

// Two nodes behind one NAT go direct on their LAN, found by multicast.
func TestNetSameLAN(t *testing.T) {
	s := newSwarm(t)
	nat := s.nat("nat", cone, line)
	spec := s.member(viaTCP, viaQUIC)
	spec.MDNS = true
	start := time.Now()
	a, b := nat.host("a").start(spec), nat.host("b").start(spec)
	met := a.meets(b, p2p.Direct)
	t.Logf("met after %v at %s", met.At.Sub(start), met.Addr)
	if !strings.HasPrefix(met.Addr, "/ip4/"+b.site.addr+"/") {
		t.Errorf("met at %s, want the LAN address %s", met.Addr, b.site.addr)
	}
	echoes(a, b)
}

// noMulticast is a network that keeps multicast from a machine.
const noMulticast = `table ip kv {
	chain kmin { type filter hook input priority 0; policy accept; ip daddr 224.0.0.0/4 drop; }
	chain kmout { type filter hook output priority 0; policy accept; ip daddr 224.0.0.0/4 drop; }
}`

// Without multicast two nodes behind one NAT meet at the relay, and then go direct on
// their LAN, not around by the NAT.
func TestNetSameLANByRelay(t *testing.T) {
	s := newSwarm(t)
	nat := s.nat("nat", cone, line)
	spec := s.member(viaTCP, viaQUIC)
	spec.MDNS = true
	hostA, hostB := nat.host("a"), nat.host("b")
	s.nft(hostA.ns, noMulticast)
	s.nft(hostB.ns, noMulticast)
	start := time.Now()
	a, b := hostA.start(spec), hostB.start(spec)
	met := a.meets(b, "")
	direct := a.meets(b, p2p.Direct)
	t.Logf("met (%s) after %v, direct after %v, at %s", met.Path, met.At.Sub(start), direct.At.Sub(start), direct.Addr)
	if !strings.HasPrefix(direct.Addr, "/ip4/"+b.site.addr+"/") {
		t.Errorf("direct at %s, want the LAN address %s", direct.Addr, b.site.addr)
	}
	echoes(a, b)
}

// Without multicast one address that two nodes were given is enough for three to form a
// swarm, and the report says what is wrong with the network.
func TestNetNoMulticast(t *testing.T) {
	w := newWorld(t)
	lan := w.nat("nat", cone, link{})
	hosts := []*site{lan.host("a"), lan.host("b"), lan.host("c")}
	for _, h := range hosts {
		w.nft(h.ns, noMulticast)
	}
	spec := nodeSpec{DHT: true, MDNS: true}
	a := hosts[0].start(spec)
	spec.Bootstrap = []string{a.at(viaTCP)}
	start := time.Now()
	b, c := hosts[1].start(spec), hosts[2].start(spec)
	met := b.meets(c, p2p.Direct)
	c.meets(b, p2p.Direct)
	a.meets(b, p2p.Direct)
	a.meets(c, p2p.Direct)
	t.Logf("two that knew the third alone met after %v", met.At.Sub(start))
	echoes(b, c)
	r := a.reports("a want of multicast", func(r p2p.Report) bool { return strings.Contains(r.MDNS, "multicast") })
	t.Logf("%+v", r)
}

// Two networks that speak nothing but IPv6, whose nodes listen on all addresses that there
// are: they meet, have lanes, and are told no address that leads nowhere.
func TestNetIPv6(t *testing.T) {
	w := newWorld(t)
	sites := []*site{w.public("one", link{}), w.public("two", link{})}
	for _, ns := range []string{w.wan(), sites[0].ns, sites[1].ns} {
		w.check("IPv6 in "+ns, inNamespace(ns, func() error {
			const conf = "/proc/sys/net/ipv6/conf/all/"
			return errors.Join(os.WriteFile(conf+"disable_ipv6", []byte("0"), 0), os.WriteFile(conf+"forwarding", []byte("1"), 0))
		}))
	}
	for _, s := range sites {
		w.ip(w.wan(), "addr add fd00:%d::1/64 dev to%d nodad", s.n, s.n)
		w.ip(s.ns, "addr add fd00:%d::2/64 dev up0 nodad\nroute add default via fd00:%d::1\naddr del %s/30 dev up0", s.n, s.n, s.addr)
	}
	for _, via := range []string{viaTCP, viaQUIC} {
		spec := nodeSpec{Listen: []string{"/ip6/::" + via}, Lanes: "[::]:4002"}
		a := sites[0].start(spec)
		spec.Peers = []string{fmt.Sprintf("/ip6/fd00:%d::2%s/p2p/%s", sites[0].n, via, a.id)}
		b := sites[1].start(spec)
		if e := b.meets(a, p2p.Direct); !strings.HasPrefix(e.Addr, "/ip6/fd00:") {
			t.Errorf("met at %s", e.Addr)
		}
		echoes(a, b)
		var r besideResult
		if err := b.call("beside", besideArg{Peer: a.id, Size: 1000, Count: 3, Bulk: true}, &r); err != nil || !r.Lane {
			t.Errorf("%s: download with a lane %v: %v", via, r.Lane, err)
		}
		a.stop()
		b.stop()
	}
}
