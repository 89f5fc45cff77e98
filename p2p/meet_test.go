package p2p

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	ma "github.com/multiformats/go-multiaddr"
)

// ownNetwork is a network id of this test alone: others may run on this machine.
func ownNetwork() string {
	b := make([]byte, 8)
	rand.Read(b)
	return "test-" + hex.EncodeToString(b)
}

func TestMDNSFindsPeers(t *testing.T) {
	if _, _, err := multicastInterfaces(); err != nil {
		t.Skipf("this machine has no multicast: %v", err)
	}
	start := time.Now()
	network := ownNetwork()
	local := func(c *Config) { c.Network, c.MDNS = network, true }
	a, b := startHost(t, local), startHost(t, local)
	stranger := startHost(t, func(c *Config) { c.Network, c.MDNS = ownNetwork(), true })
	eventually(t, "a and b meet", func() bool { return a.Peer(b.ID()) != nil && b.Peer(a.ID()) != nil })
	t.Logf("met after %v", time.Since(start))
	if s := a.Report().MDNS; !strings.HasPrefix(s, "on: ") {
		t.Errorf("report says %q", s)
	}
	if len(stranger.Peers()) != 0 {
		t.Error("a node of another network was met")
	}
}

func TestMDNSServiceName(t *testing.T) {
	long := mdnsService(strings.Repeat("n", 64))
	if label, _, _ := strings.Cut(long, "."); len(label) > 16 || long == mdnsService("n") {
		t.Errorf("service name %s: want a label of at most 15 letters after _, of its own for each network", long)
	}
}

// One member is known; the others are found through it.
func TestDHTFindsMembers(t *testing.T) {
	start := time.Now()
	network := ownNetwork()
	bootstrap := startHost(t, func(c *Config) { c.Network, c.DHT = network, true })
	join := func(c *Config) { c.Network, c.DHT, c.Bootstrap = network, true, bootstrap.Addrs() }
	all := []*Host{bootstrap}
	for range 4 {
		all = append(all, startHost(t, join))
	}
	newcomer := startHost(t, join)
	eventually(t, "the newcomer meets all five", func() bool {
		for _, h := range all {
			if newcomer.Peer(h.ID()) == nil {
				return false
			}
		}
		return true
	})
	t.Logf("met all after %v", time.Since(start))

	const key = "model/abc"
	if err := all[1].Provide(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	find := func(key string) []peer.AddrInfo {
		found, err := newcomer.FindProviders(t.Context(), key, 8)
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	eventually(t, "the newcomer finds who has the model", func() bool {
		found := find(key)
		return len(found) == 1 && found[0].ID == all[1].ID() && len(found[0].Addrs) > 0
	})
	if found := find("model/abd"); len(found) != 0 {
		t.Errorf("found %v for a key that nobody has", found)
	}
	if found, err := newcomer.FindProviders(t.Context(), MemberKey, 2); err != nil || len(found) > 2 {
		t.Errorf("asked for 2 members, got %d, %v", len(found), err)
	}
	all[1].Unprovide(key)
	if _, wait := all[1].providers.due(time.Now()); all[1].providers.keys[key] != nil {
		t.Errorf("still provided, next in %v", wait)
	}
	if r := newcomer.Report(); r.DHTPeers == 0 || r.DirectPeers < 5 || len(r.Bootstrap) != 1 || r.Bootstrap[0].State != Connected {
		t.Errorf("report: %+v", r)
	}
}

func TestProvideRefused(t *testing.T) {
	h := startHost(t, func(c *Config) { c.DHT = true })
	for _, key := range []string{"", strings.Repeat("k", maxKey+1)} {
		if err := h.Provide(t.Context(), key); err == nil {
			t.Errorf("key of %d bytes accepted", len(key))
		}
		if _, err := h.FindProviders(t.Context(), key, 1); err == nil {
			t.Errorf("key of %d bytes looked for", len(key))
		}
	}
	for i := range maxProvided - len(h.providers.keys) {
		if err := h.Provide(t.Context(), fmt.Sprint("k", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Provide(t.Context(), "one more"); err == nil {
		t.Error("too many keys accepted")
	}
	off := startHost(t, nil)
	if err := off.Provide(t.Context(), "k"); err != errNoDHT {
		t.Errorf("without a DHT: %v", err)
	}
	if _, err := off.FindProviders(t.Context(), "k", 1); err != errNoDHT {
		t.Errorf("without a DHT: %v", err)
	}
}

// Who does not say hello can neither ask nor tell, and is disconnected.
func TestDHTIsForMembers(t *testing.T) {
	network := ownNetwork()
	h := startHost(t, func(c *Config) { c.Network, c.DHT, c.HelloTimeout = network, true, 2*time.Second })
	s := stranger(t)
	d, err := dht.New(s, dht.ProtocolPrefix(protocol.ID("/kvasir/"+network)), dht.Mode(dht.ModeServer), dht.DisableValues())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := s.Connect(t.Context(), infoOf(t, h)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.GetClosestPeers(t.Context(), "any"); err == nil && d.RoutingTable().Size() > 0 {
		t.Error("a stranger was answered")
	}
	eventually(t, "disconnect", func() bool { return len(h.node.Network().ConnsToPeer(s.ID())) == 0 })
	if h.dht.RoutingTable().Find(s.ID()) != "" {
		t.Error("a stranger is in the routing table")
	}
}

func TestPeersAreRemembered(t *testing.T) {
	network := ownNetwork()
	file := filepath.Join(t.TempDir(), "peers.json")
	b := startHost(t, func(c *Config) { c.Network = network })
	cfg := testConfig(t)
	cfg.Network, cfg.Remember, cfg.Peers = network, file, b.Addrs()
	first, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first run meets b", func() bool { return first.Peer(b.ID()) != nil && len(first.goodPeers()) > 0 })
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := startHost(t, func(c *Config) { c.Network, c.Remember, c.Identity = network, file, cfg.Identity })
	eventually(t, "the second run meets b by memory", func() bool { return second.Peer(b.ID()) != nil })
}

func TestParseRemembered(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	entry := func(id, addr, seen string) string {
		return fmt.Sprintf(`{"id":%q,"addrs":[%q],"seen":%q}`, id, addr, seen)
	}
	const addr, seen = "/ip4/192.168.1.5/tcp/4001", "2026-01-01T00:00:00Z"
	good := entry(id.ID().String(), addr, seen)
	file := func(peers ...string) string {
		return fmt.Sprintf(`{"version":1,"network":"home","peers":[%s]}`, strings.Join(peers, ","))
	}
	tests := []struct {
		name, in string
		want     int // -1: refused
	}{
		{"good", file(good), 1},
		{"empty", file(), 0},
		{"same peer twice", file(good, good), 1},
		{"unseen for too long", file(entry(id.ID().String(), addr, "2025-11-01T00:00:00Z")), 0},
		{"seen in the future", file(entry(id.ID().String(), addr, "2026-02-01T00:00:00Z")), 0},
		{"no peer id", file(entry("nobody", addr, seen)), 0},
		{"no address", file(entry(id.ID().String(), "nowhere", seen)), 0},
		{"not JSON", "peers", -1},
		{"other version", strings.Replace(file(good), `:1,`, `:2,`, 1), -1},
		{"other network", strings.Replace(file(good), "home", "work", 1), -1},
		{"too large", file(good) + strings.Repeat(" ", maxRememberFile), -1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseRemembered([]byte(tt.in), "home", now)
			if (err != nil) != (tt.want < 0) || err == nil && len(got) != tt.want {
				t.Errorf("got %d peers and %v, want %d", len(got), err, tt.want)
			}
		})
	}
}

// What is written is read again, newest first, at most maxRemembered and without the old.
func TestRememberedIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "peers.json")
	goodPeers := func(n int, seen time.Time) []goodPeer {
		var out []goodPeer
		for range n {
			id, err := NewIdentity()
			if err != nil {
				t.Fatal(err)
			}
			addrs := []ma.Multiaddr{ma.StringCast("/ip4/127.0.0.1/tcp/1")}
			out = append(out, goodPeer{peer.AddrInfo{ID: id.ID(), Addrs: addrs}, seen})
		}
		return out
	}
	now := time.Now()
	current := goodPeers(maxRemembered-1, now)
	before := append(goodPeers(2, now.Add(-time.Hour)), current[0])
	if got := merge(goodPeers(1, now), goodPeers(1, now.Add(-rememberFor-time.Hour))); len(got) != 1 {
		t.Errorf("%d peers, want only the one that was seen in time", len(got))
	}
	if err := writeRemembered(path, "home", merge(current, before)); err != nil {
		t.Fatal(err)
	}
	got, err := readRemembered(path, "home")
	if err != nil || len(got) != maxRemembered || got[0].seen.Before(now.Add(-time.Minute)) {
		t.Errorf("read %d peers and %v, want %d with the newest first", len(got), err, maxRemembered)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".peers-*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func FuzzParseRemembered(f *testing.F) {
	f.Add([]byte(`{"version":1,"network":"home","peers":[{"id":"x","addrs":["/ip4/1.2.3.4/tcp/1"],"seen":"2026-01-01T00:00:00Z"}]}`))
	f.Add(bytes.Repeat([]byte("["), 100))
	f.Fuzz(func(t *testing.T, raw []byte) {
		good, err := parseRemembered(raw, "home", time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC))
		if err == nil && len(good) > maxRemembered {
			t.Errorf("%d peers", len(good))
		}
		for _, g := range good {
			if len(g.info.Addrs) == 0 || len(g.info.Addrs) > maxRememberedAddrs {
				t.Errorf("%d addresses", len(g.info.Addrs))
			}
		}
	})
}

func TestParseMDNS(t *testing.T) {
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	const addr = "/ip4/192.168.1.5/tcp/4001"
	end := "/p2p/" + id.ID().String()
	good := mdnsPrefix + addr + end
	tests := []struct {
		name string
		in   []string
		want int // addresses
	}{
		{"good", []string{good}, 1},
		{"two of one node", []string{good, mdnsPrefix + "/ip4/192.168.1.5/udp/4001/quic-v1" + end}, 2},
		{"nothing", nil, 0},
		{"no prefix", []string{addr + end}, 0},
		{"no peer id", []string{mdnsPrefix + addr}, 0},
		{"no address", []string{mdnsPrefix + end}, 0},
		{"no multiaddr", []string{mdnsPrefix + "192.168.1.5:4001"}, 0},
		{"through a relay", []string{mdnsPrefix + addr + end + "/p2p-circuit" + end}, 0},
		{"too long", []string{mdnsPrefix + "/dns4/" + strings.Repeat("a.", 200) + "a/tcp/1" + end}, 0},
		{"too many", slices.Repeat([]string{good}, maxMDNSText+5), maxMDNSText},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			for _, ai := range parseMDNS(tt.in) {
				n += len(ai.Addrs)
			}
			if n != tt.want {
				t.Errorf("%d addresses, want %d", n, tt.want)
			}
		})
	}
}

func FuzzParseMDNS(f *testing.F) {
	f.Add("dnsaddr=/ip4/1.2.3.4/tcp/1/p2p/12D3KooWFFZZ6GPtkJAdBJeH5isrP87p7hA6qjmrJoK3yjELqhC4", "dnsaddr=/p2p-circuit")
	f.Fuzz(func(t *testing.T, a, b string) {
		for _, ai := range parseMDNS([]string{a, b}) {
			if ai.ID == "" || len(ai.Addrs) == 0 {
				t.Errorf("%q, %q gave %v", a, b, ai)
			}
		}
	})
}

// Of a peer that was found and does not fit, the report says why.
func TestReportOfUnmetPeers(t *testing.T) {
	network := ownNetwork()
	b := startHost(t, func(c *Config) { c.Network, c.Pack = network, "other/1" })
	a := startHost(t, func(c *Config) { c.Network, c.DHT = network, true })
	a.meeter.add(infoOf(t, b))
	eventually(t, "the report names the pack", func() bool {
		u := a.Report().Unmet
		return len(u) == 1 && u[0].ID == b.ID() && u[0].State == Refused && strings.Contains(u[0].Err, "runtime pack")
	})
	a.meeter.mu.Lock()
	c := a.meeter.known[b.ID()]
	waits := c.next.After(time.Now())
	a.meeter.mu.Unlock()
	if !waits {
		t.Error("a peer that refused is asked again at once")
	}
	m := newMeeter(a)
	m.add(infoOf(t, b))
	m.known[b.ID()].next = time.Now().Add(time.Hour)
	m.add(infoOf(t, b))
	if len(m.due(time.Now(), 0)) != 0 {
		t.Error("the same addresses are tried again before their time")
	}
	m.add(peer.AddrInfo{ID: b.ID(), Addrs: []ma.Multiaddr{ma.StringCast("/ip4/127.0.0.1/tcp/1")}})
	if len(m.due(time.Now(), 0)) != 1 {
		t.Error("another address is not tried at once")
	}
}

// For peers that do not answer the pauses grow; who is ready, or cannot be met, is
// forgotten; and not more are met than are wanted.
func TestMeeter(t *testing.T) {
	h := startHost(t, func(c *Config) { c.MaxPeers, c.HelloTimeout = 3, time.Second })
	m := newMeeter(h)
	candidates := func(n int) []peer.AddrInfo {
		var out []peer.AddrInfo
		for range n {
			out = append(out, peer.AddrInfo{ID: testConfig(t).Identity.ID(), Addrs: []ma.Multiaddr{ma.StringCast("/ip4/127.0.0.1/tcp/1")}})
		}
		return out
	}
	m.add(peer.AddrInfo{ID: h.ID(), Addrs: infoOf(t, h).Addrs})
	m.add(peer.AddrInfo{ID: candidates(1)[0].ID})
	if len(m.known) != 0 {
		t.Errorf("to be met: itself, or a peer without address: %v", m.known)
	}
	for _, ai := range candidates(5) {
		m.add(ai)
	}
	now := time.Now()
	if got := m.due(now, 1); len(got) != 2 {
		t.Fatalf("%d peers are met beside one of at most 3", len(got))
	} else if len(m.due(now, 1)) != 0 {
		t.Error("more are met while two hellos are under way")
	} else {
		c := got[0]
		for range 3 {
			c.busy = true
			m.meet(t.Context(), c)
		}
		m.busy = 1
		if c.fails != 3 || c.pause != 8*firstMeet || !c.next.After(time.Now()) {
			t.Errorf("after 3 failures: %+v", c)
		}
		c.fails = meetFails - 1
		m.busy++
		m.meet(t.Context(), c)
		if m.known[c.info.ID] != nil {
			t.Error("not forgotten after many failures")
		}
	}
	for _, ai := range candidates(maxCandidates) {
		m.add(ai)
	}
	if len(m.known) != maxCandidates {
		t.Errorf("%d candidates, at most %d", len(m.known), maxCandidates)
	}
}
