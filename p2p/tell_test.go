package p2p

import (
	"net"
	"slices"
	"strings"
	"testing"

	ma "github.com/multiformats/go-multiaddr"
)

func multiaddrs(list ...string) []ma.Multiaddr {
	var out []ma.Multiaddr
	for _, s := range list {
		out = append(out, ma.StringCast(s))
	}
	return out
}

func TestTellable(t *testing.T) {
	const (
		loop4, loop6 = "/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"
		link4, link6 = "/ip4/169.254.3.4/tcp/1", "/ip6/fe80::1/udp/1/quic-v1"
		lan, public  = "/ip4/192.168.1.5/tcp/1", "/ip6/2001:db8::1/tcp/1"
		name         = "/dns4/example.org/tcp/443/tls/ws"
		circuit      = lan + "/p2p/12D3KooWPA6ax6t3jqTyGq73Zm1RmwppYqxaXzrtarfcTWGp5Wzx/p2p-circuit"
	)
	all := multiaddrs(loop4, loop6, link4, link6, lan, public, name, circuit)
	far := multiaddrs(lan, public, name, circuit)
	tests := []struct {
		name      string
		got, want []ma.Multiaddr
	}{
		{"to anybody", tellable(all), far},
		{"of a node that is on its machine alone", tellable(multiaddrs(loop4, loop6)), multiaddrs(loop4, loop6)},
		{"of one that takes circuits", tellable(multiaddrs("/p2p-circuit", loop4)), multiaddrs("/p2p-circuit", loop4)},
		{"of none", tellable(nil), nil},
		{"beyond", within(beyond, all), far},
		{"on a link", within(onLink, all), append(multiaddrs(link4, link6), far...)},
		{"on the machine", within(onMachine, all), all},
	}
	for _, tt := range tests {
		if !slices.EqualFunc(tt.got, tt.want, ma.Multiaddr.Equal) {
			t.Errorf("%s: got %v, want %v", tt.name, tt.got, tt.want)
		}
	}
}

// What libp2p tells of a host, in identify and in the DHT, follows; the host itself knows all.
func TestLoopbackIsNotTold(t *testing.T) {
	const proxy = "/dns4/example.org/tcp/443/tls/ws"
	h := startHost(t, func(c *Config) { c.Announce = []string{proxy} })
	told := h.node.Addrs()
	if len(told) != 1 || told[0].String() != proxy {
		t.Errorf("told %v, want %s", told, proxy)
	}
	if s := strings.Join(h.Addrs(), " "); !strings.Contains(s, "/ip4/127.0.0.1/tcp/") || !strings.Contains(s, proxy) {
		t.Errorf("own addresses %s", s)
	}
	other := startHost(t, nil)
	hello(t, other, h)
	eventually(t, "what was told arrived", func() bool {
		return slices.ContainsFunc(other.node.Peerstore().Addrs(h.ID()), ma.StringCast(proxy).Equal)
	})
}

// All that goes over IPv4 goes over IPv6.
func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Logf("not tried: this machine has no ::1: %v", err)
		return
	}
	l.Close()
	on := func(listen ...string) func(*Config) {
		return func(c *Config) { c.Listen, c.LaneListen = listen, "[::1]:0" }
	}
	const tcp, quic = "/ip6/::1/tcp/0", "/ip6/::1/udp/0/quic-v1"
	for _, transport := range []string{tcp, quic} {
		a, b := startHost(t, on(transport)), startHost(t, on(transport))
		p := hello(t, a, b)
		if !strings.HasPrefix(p.Addr, "/ip6/::1/") || !strings.HasPrefix(p.lane, "[::1]:") {
			t.Errorf("peer at %s, its lanes at %s", p.Addr, p.lane)
		}
		openOver(t, a, b, Direct)
		if _, ok := openBulk(t, a, b).(*laneConn); !ok {
			t.Error("no lane over TCP")
		}
		if transport == quic {
			p.stay.dead.add(p.lane)
			if _, ok := openBulk(t, a, b).(*quicLane); !ok {
				t.Error("no lane over QUIC")
			}
		}
	}
	relay := startHost(t, func(c *Config) { on(tcp)(c); c.Relay = true })
	a, b := startHost(t, noWayIn(relay)), startHost(t, noWayIn(relay))
	if p, err := a.Hello(t.Context(), circuitTo(t, b)); err != nil || p.Path() != Relayed || !strings.HasPrefix(p.Addr, "/ip6/::1/") {
		t.Fatalf("through a relay: %+v, %v", p, err)
	}
	openBulk(t, a, b)
}
