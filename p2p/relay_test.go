package p2p

import (
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/client"
	ma "github.com/multiformats/go-multiaddr"
)

// circuitTo waits until h is reached through relays and returns how.
func circuitTo(t *testing.T, h *Host) peer.AddrInfo {
	t.Helper()
	var out peer.AddrInfo
	eventually(t, "a relay takes it in", func() bool {
		out = peer.AddrInfo{ID: h.ID()}
		for _, s := range h.Addrs() {
			if ai, err := ParsePeer(s); err == nil && strings.Contains(s, "/p2p-circuit") {
				out.Addrs = append(out.Addrs, ai.Addrs...)
			}
		}
		return len(out.Addrs) > 0
	})
	return out
}

// noWayIn makes a host that nobody can connect to.
func noWayIn(relay *Host) func(*Config) {
	return func(c *Config) {
		c.Listen, c.Reach, c.Relays = []string{}, ReachPrivate, relay.Addrs()
	}
}

func TestThroughRelay(t *testing.T) {
	start := time.Now()
	relay := startHost(t, func(c *Config) { c.Relay = true })
	a, b := startHost(t, noWayIn(relay)), startHost(t, noWayIn(relay))
	to := circuitTo(t, b)
	t.Logf("reserved after %v", time.Since(start))
	p, err := a.Hello(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("met after %v", time.Since(start))
	if p.Path() != Relayed || statusOf(t, a, b).Path != Relayed {
		t.Errorf("path of %s is %s", p.Addr, p.Path())
	}
	c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Lane() {
		t.Error("a lane through a relay")
	}
	if err := echo(c, 1<<20); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the relay counts", func() bool {
		s := relay.Report().Serving
		return s.Reservations == 2 && s.Circuits >= 1 && s.Bytes > 2<<20
	})
	r := b.Report()
	if len(r.Relayed) == 0 || len(r.Relays) != 1 || !r.Relays[0].Holds || r.RelayedPeers != 1 || r.DirectPeers != 1 {
		t.Errorf("report: %+v", r)
	}
}

// A private node learns of relays from the DHT.
func TestRelayFromDHT(t *testing.T) {
	network := ownNetwork()
	bootstrap := startHost(t, func(c *Config) { c.Network, c.DHT = network, true })
	join := func(c *Config) { c.Network, c.DHT, c.Bootstrap = network, true, bootstrap.Addrs() }
	relay := startHost(t, func(c *Config) { join(c); c.Relay = true })
	start := time.Now()
	hidden := startHost(t, func(c *Config) { join(c); c.Listen, c.Reach = []string{}, ReachPrivate })
	circuitTo(t, hidden)
	t.Logf("reserved after %v", time.Since(start))
	if r := hidden.Report(); len(r.Relays) != 1 || r.Relays[0].ID != relay.ID() || !r.Relays[0].Holds {
		t.Errorf("relays: %+v", r.Relays)
	}
	// Another one finds it as a member, and comes through the relay.
	other := startHost(t, func(c *Config) { join(c); c.Listen, c.Reach = []string{}, ReachPrivate })
	eventually(t, "two hidden nodes meet", func() bool { return other.Peer(hidden.ID()) != nil || hidden.Peer(other.ID()) != nil })
}

// Only who passed the hello may reserve, connect, or be connected to.
func TestRelayIsForMembers(t *testing.T) {
	relay := startHost(t, func(c *Config) { c.Relay = true })
	member := startHost(t, noWayIn(relay))
	to := circuitTo(t, member)
	s := stranger(t)
	if err := s.Connect(t.Context(), infoOf(t, relay)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Reserve(t.Context(), s, infoOf(t, relay)); err == nil || !strings.Contains(err.Error(), "PERMISSION_DENIED") {
		t.Errorf("reservation of a stranger: %v", err)
	}
	if err := s.Connect(t.Context(), to); err == nil {
		t.Error("a stranger got through to a member")
	}
	third := startHost(t, func(c *Config) { c.Listen, c.Peers = []string{}, relay.Addrs() })
	absent := startHost(t, nil)
	nowhere := peer.AddrInfo{ID: absent.ID(), Addrs: to.Addrs}
	eventually(t, "a third member at the relay", func() bool { return third.Peer(relay.ID()) != nil })
	if _, err := third.Hello(t.Context(), nowhere); err == nil {
		t.Error("got through to a peer that has no reservation")
	}
	if relay.Report().Serving.Refused < 2 {
		t.Errorf("refusals are not counted: %+v", relay.Report().Serving)
	}
}

// A relayed connection gives way to a direct one, unseen by streams.
func TestUpgradeToDirect(t *testing.T) {
	relay := startHost(t, func(c *Config) { c.Relay = true })
	b := startHost(t, func(c *Config) { c.Reach, c.Relays = ReachPrivate, relay.Addrs() })
	cfg := testConfig(t)
	noWayIn(relay)(&cfg)
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var w watchLog
	a.Watch(&w)
	if err := a.HandleStream("echo/1", func(_ *Peer, c Conn) { io.Copy(c, c) }); err != nil {
		t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	eventually(t, "a at the relay", func() bool { return a.Peer(relay.ID()) != nil })

	if _, err := a.Hello(t.Context(), circuitTo(t, b)); err != nil {
		t.Fatal(err)
	}
	old := openOver(t, a, b, Relayed)
	direct := func() bool { return a.Peer(b.ID()).Path() == Direct && b.Peer(a.ID()).Path() == Direct }
	eventually(t, "both know of a direct connection", direct)
	fresh := openOver(t, a, b, Direct)
	if err := errors.Join(echo(old, 1000), echo(fresh, 1000)); err != nil {
		t.Fatal(err)
	}
	// Without the direct one the relayed serves, and the direct one comes back.
	since := a.Peer(b.ID()).stay
	for _, c := range a.node.Network().ConnsToPeer(b.ID()) {
		if !isRelayed(c) {
			c.Close()
		}
	}
	if err := echo(old, 1000); err != nil {
		t.Errorf("the relayed stream after the loss of the direct connection: %v", err)
	}
	eventually(t, "direct again", direct)
	old.Close()
	eventually(t, "the relayed connection goes", func() bool {
		return !slices.ContainsFunc(a.node.Network().ConnsToPeer(b.ID()), isRelayed)
	})
	if err := echo(openOver(t, a, b, Direct), 1000); err != nil {
		t.Error(err)
	}
	lane, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer lane.Close()
	if !lane.Lane() {
		t.Error("no lane to a peer that is connected directly")
	}
	if w.has("lost "+b.ID().String()) || a.Peer(b.ID()).stay != since {
		t.Error("the peer was lost on the way")
	}
}

// openOver opens a stream and checks how it goes.
func openOver(t *testing.T, from, to *Host, want Path) Conn {
	t.Helper()
	c, err := from.OpenStream(t.Context(), to.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if got := c.(*streamConn).Conn(); isRelayed(got) != (want == Relayed) {
		t.Errorf("stream over %s, want a %s one", got.RemoteMultiaddr(), want)
	}
	if err := echo(c, 10); err != nil {
		t.Fatal(err)
	}
	return c
}

// The side that has nothing but outgoing connections is told where the other listens.
func TestHelloThroughRelayTellsAddresses(t *testing.T) {
	h := startHost(t, nil)
	if len(h.directAddrs(onMachine)) == 0 {
		t.Fatal("no addresses")
	}
	record := h.cfg.hello(Capabilities{}, 1)
	if addrs := h.directAddrs(beyond); len(addrs) != 0 {
		t.Errorf("a peer beyond this machine is told %v", addrs)
	}
	record.Addrs = append(h.directAddrs(onMachine), "/ip4/127.0.0.1/tcp/1/p2p/"+h.ID().String()+"/p2p-circuit", "nonsense")
	b, err := encodeHello(record)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeHello(b)
	if err != nil {
		t.Fatal(err)
	}
	circuit := "/tcp/4001/p2p/" + h.ID().String() + "/p2p-circuit"
	here, away := &Peer{Hello: got, Addr: "/ip4/127.0.0.1" + circuit}, &Peer{Hello: got, Addr: "/ip4/192.0.2.1" + circuit}
	if addrs := here.directAddrs(); len(addrs) != len(h.directAddrs(onMachine)) {
		t.Errorf("addresses to dial: %v", addrs)
	}
	if addrs := away.directAddrs(); len(addrs) != 0 {
		t.Errorf("loopback addresses of another machine are dialled: %v", addrs)
	}
	record.Addrs = make([]string, maxAddrs+1)
	if _, err := encodeHello(record); err == nil {
		t.Error("too many addresses accepted")
	}
}

// No port that does not answer delays the opening of streams for long, or twice.
func TestDeadLaneIsNotTriedAgain(t *testing.T) {
	var dead deadWays
	const here, elsewhere = "192.0.2.1:1", "192.0.2.2:1"
	dead.add(here)
	if !dead.has(here) {
		t.Error("tried again at once")
	}
	if dead.has(elsewhere) {
		t.Error("not tried at another address")
	}
	dead.until[here] = time.Now().Add(-time.Second)
	if dead.has(here) {
		t.Error("never tried again")
	}
	for i := range 3 * maxDeadWays {
		dead.add(strconv.Itoa(i))
	}
	if len(dead.until) > maxDeadWays {
		t.Errorf("%d addresses are remembered", len(dead.until))
	}
}

func TestCircuits(t *testing.T) {
	relay, other := testConfig(t).Identity.ID(), testConfig(t).Identity.ID()
	p2p := "/p2p/" + relay.String()
	const here, lan, loopback = "/ip4/198.51.100.7/tcp/4001", "/ip4/10.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001"
	tests := []struct {
		name, here string
		told       []string
		want       []string
	}{
		{"told twice", here, []string{here + p2p, lan}, []string{here, lan}},
		{"loopback elsewhere", here, []string{loopback + p2p}, []string{here}},
		{"loopback here", loopback, []string{loopback + p2p}, []string{loopback}},
		{"of another", here, []string{lan + "/p2p/" + other.String()}, []string{here}},
		{"a circuit itself", here, []string{lan + "/p2p/" + other.String() + "/p2p-circuit" + p2p}, []string{here}},
		{"nothing but an id", here, []string{p2p}, []string{here}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var told []ma.Multiaddr
			for _, s := range tt.told {
				told = append(told, ma.StringCast(s))
			}
			var got []string
			for _, a := range circuits(relay, told, ma.StringCast(tt.here)) {
				s, ok := strings.CutSuffix(a.String(), p2p+"/p2p-circuit")
				if !ok {
					t.Errorf("%s does not end in %s/p2p-circuit", a, p2p)
				}
				got = append(got, s)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// A relay that was restarted takes its peers in again.
func TestRelayRestarts(t *testing.T) {
	relay := startHost(t, func(c *Config) { c.Relay = true })
	var listen []string
	for _, s := range relay.Addrs() {
		listen = append(listen, strings.Split(s, "/p2p/")[0])
	}
	hidden := startHost(t, noWayIn(relay))
	circuitTo(t, hidden)
	if err := relay.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the address at the relay is gone", func() bool {
		return !slices.ContainsFunc(hidden.Addrs(), func(s string) bool { return strings.Contains(s, "/p2p-circuit") })
	})
	startHost(t, func(c *Config) { c.Relay, c.Identity, c.Listen = true, relay.cfg.Identity, listen })
	circuitTo(t, hidden)
}

// Who is put out has nothing at a relay any more: neither a new reservation or circuit, nor
// those that it had. So it is in a network by invitation and in a closed one.
func TestRelayEndsWithMembership(t *testing.T) {
	for _, admission := range []Admission{Invitation, Closed} {
		t.Run(string(admission), func(t *testing.T) {
			c := newClub(t, admission)
			relay := c.boss(t, func(cfg *Config) { cfg.Relay = true })
			var ticket string
			outcast := c.start(t, func(id peer.ID) string { ticket = c.bound(t)(id); return ticket }, noWayIn(relay))
			member := c.start(t, c.bound(t), noWayIn(relay))
			circuitTo(t, member)
			if _, err := member.Hello(t.Context(), circuitTo(t, outcast)); err != nil {
				t.Fatal(err)
			}
			conn := openOver(t, member, outcast, Relayed)
			bulk := openBulk(t, member, outcast)
			s := relay.relay
			if !s.AllowReserve(outcast.ID(), nil) || !s.AllowConnect(member.ID(), nil, outcast.ID()) {
				t.Fatal("a member is refused")
			}
			// Before anybody has looked who is still there.
			if _, err := relay.members.take(c.revoke(t, nil, ticket).Bytes()); err != nil {
				t.Fatal(err)
			}
			if s.AllowReserve(outcast.ID(), nil) || s.AllowConnect(outcast.ID(), nil, member.ID()) || s.AllowConnect(member.ID(), nil, outcast.ID()) {
				t.Error("who was put out may still use the relay")
			}
			if !s.AllowReserve(member.ID(), nil) {
				t.Error("the other member may not")
			}
			eventually(t, "what it had ends", func() bool {
				r := relay.Report().Serving
				return r.Reservations == 1 && r.Circuits == 0 && relay.Peer(outcast.ID()) == nil
			})
			if echo(conn, 100) == nil || echo(bulk, 100) == nil {
				t.Error("the circuit still carries")
			}
			if _, err := client.Reserve(t.Context(), outcast.node, infoOf(t, relay)); err == nil {
				t.Error("it got another reservation")
			}
		})
	}
}
