package p2p

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// openBulk opens a connection of its own and tries it.
func openBulk(t *testing.T, from, to *Host) Conn {
	t.Helper()
	c, err := from.OpenBulk(t.Context(), to.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if !c.Lane() || c.Remote() != to.ID() {
		t.Fatalf("got lane %v to %s, want a connection of its own to %s", c.Lane(), c.Remote(), to.ID())
	}
	for _, size := range []int{0, 12 << 10, 1 << 20} {
		if err := echo(c, size); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// relayedPair are two hosts that meet through a relay.
func relayedPair(t *testing.T, change func(*Config)) (relay, a, b *Host) {
	t.Helper()
	relay = startHost(t, func(c *Config) { c.Relay = true })
	with := func(c *Config) {
		noWayIn(relay)(c)
		if change != nil {
			change(c)
		}
	}
	a, b = startHost(t, with), startHost(t, with)
	circuitTo(t, a)
	if _, err := a.Hello(t.Context(), circuitTo(t, b)); err != nil {
		t.Fatal(err)
	}
	return relay, a, b
}

func TestBulkThroughRelay(t *testing.T) {
	relay, a, b := relayedPair(t, nil)
	c := openBulk(t, a, b)
	if _, lanes := relay.peers.open(a.ID()); lanes != 1 {
		t.Errorf("%d lanes between a and the relay, want 1", lanes)
	}
	if _, lanes := relay.peers.open(b.ID()); lanes != 1 {
		t.Errorf("%d lanes between b and the relay, want 1", lanes)
	}
	if s := relay.Report().Serving; s.Bytes < 2<<20 {
		t.Errorf("%d bytes are counted", s.Bytes)
	}
	if statusOf(t, a, b).Lanes != 1 || statusOf(t, b, a).Lanes != 1 {
		t.Error("the lane is not counted at its ends")
	}
	openBulk(t, b, a) // and the other way round
	c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Second)); err == nil {
		_, err = c.Read(make([]byte, 1))
		if err == nil {
			t.Error("read from what is closed")
		}
	}
	eventually(t, "nothing is left at the relay but the other", func() bool {
		_, lanes := relay.peers.open(a.ID())
		relay.relay.carries.mu.Lock()
		defer relay.relay.carries.mu.Unlock()
		return lanes == 1 && relay.relay.carries.all == 1 && len(relay.relay.carries.waiting) == 0
	})
	// A peer that is lost takes what the relay carries along.
	last := openBulk(t, a, b)
	relay.peers.lose(b.ID(), nil)
	if err := echo(last, 10); err == nil {
		t.Error("carried without one end")
	}
}

// A relay that carries no more, or not for this peer, leaves the shared connection, and the
// log says so.
func TestBulkFallsBackToStream(t *testing.T) {
	tests := []struct {
		name   string
		change func(relay, b *Host)
		want   string
	}{
		{"full", func(relay, _ *Host) { relay.relay.carries.most = 0 }, "at most"},
		{"too many of the peer", func(relay, _ *Host) { relay.relay.carries.perPeer = 0 }, "at most"},
		{"not there", func(relay, b *Host) { relay.peers.lose(b.ID(), nil) }, "a member that is connected"},
		{"an older relay", func(relay, _ *Host) {
			relay.mu.Lock()
			defer relay.mu.Unlock()
			delete(relay.handlers, carryProtocol)
		}, "relay is not reached by a lane"},
		{"the peer takes no lanes", func(_, b *Host) {
			b.node.RemoveStreamHandler(b.protocolID(carriedProtocol))
		}, "a member that comes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var log lockedBuffer
			relay, a, b := relayedPair(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			tt.change(relay, b)
			c, err := a.OpenBulk(t.Context(), b.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if c.Lane() {
				t.Fatal("got a connection of its own")
			}
			if err := echo(c, 1000); err != nil {
				t.Error(err)
			}
			if !strings.Contains(log.String(), "no lane, using a stream") || !strings.Contains(log.String(), tt.want) {
				t.Errorf("the log does not say why (%q):\n%s", tt.want, log.String())
			}
		})
	}
}

// Where the peer's lane port is behind a NAT, but its QUIC connection goes through.
func TestBulkOverQUIC(t *testing.T) {
	quicOnly := func(c *Config) { c.Listen = []string{"/ip4/127.0.0.1/udp/0/quic-v1"} }
	a, b := startHost(t, quicOnly), startHost(t, quicOnly)
	hello(t, a, b)
	eventually(t, "both are ready", func() bool { return b.Peer(a.ID()) != nil })
	for _, ends := range [][2]*Host{{a, b}, {b, a}} {
		from, to := ends[0], ends[1]
		from.Peer(to.ID()).stay.dead.add(from.Peer(to.ID()).lane)
		before := len(from.node.Network().ConnsToPeer(to.ID()))
		c := openBulk(t, from, to)
		if _, ok := c.(*quicLane); !ok {
			t.Fatalf("got a %T", c)
		}
		if n := len(from.node.Network().ConnsToPeer(to.ID())); n != before {
			t.Errorf("libp2p has %d connections to the peer, want %d: it would use the lane", n, before)
		}
		eventually(t, "counted", func() bool { return statusOf(t, to, from).Lanes == 1 })
		blocked := make(chan error, 1)
		go func() { _, err := c.Read(make([]byte, 1)); blocked <- err }()
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if err := <-blocked; !errors.Is(err, context.DeadlineExceeded) && !strings.Contains(err.Error(), "timeout") {
			t.Errorf("read past its deadline: %v", err)
		}
		c.Close()
		eventually(t, "gone on both sides", func() bool { return statusOf(t, to, from).Lanes == 0 && statusOf(t, from, to).Lanes == 0 })
	}
	c := openBulk(t, a, b)
	b.peers.lose(a.ID(), nil)
	if err := echo(c, 10); err == nil {
		t.Error("the lane outlives the peer's stay")
	}
}

// What was written before Close arrives.
func TestQUICLaneDeliversBeforeClose(t *testing.T) {
	quicOnly := func(c *Config) { c.Listen = []string{"/ip4/127.0.0.1/udp/0/quic-v1"} }
	a, b := startHost(t, quicOnly), startHost(t, quicOnly)
	const size = 4 << 20
	if err := b.HandleStream("gift/1", func(_ *Peer, c Conn) { c.Write(make([]byte, size)) }); err != nil {
		t.Fatal(err)
	}
	p := hello(t, a, b)
	p.stay.dead.add(p.lane)
	c, err := a.OpenBulk(t.Context(), b.ID(), "gift/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if n, err := io.Copy(io.Discard, c); n != size || err != nil || !c.Lane() {
		t.Errorf("lane %v: %d bytes, %v", c.Lane(), n, err)
	}
}

func TestQUICLaneRefused(t *testing.T) {
	quicOnly := func(c *Config) { c.Listen = []string{"/ip4/127.0.0.1/udp/0/quic-v1"} }
	a, b := startHost(t, quicOnly), startHost(t, quicOnly)
	p := hello(t, a, b)
	if _, err := a.quic.dial(t.Context(), p, "none/1"); err == nil || !strings.Contains(err.Error(), "protocol is") {
		t.Errorf("protocol that is not served: %v", err)
	}
	other := startHost(t, quicOnly)
	wrong := *p
	wrong.ID = other.ID()
	if _, err := a.quic.dial(t.Context(), &wrong, "echo/1"); err == nil || !strings.Contains(err.Error(), "mismatch") {
		t.Errorf("another peer than wanted: %v", err)
	}
	if _, err := other.quic.dial(t.Context(), p, "echo/1"); err == nil || !strings.Contains(err.Error(), `hello is "passed" there`) {
		t.Errorf("stranger: %v", err)
	}
}

func TestDecodeCarryRefuses(t *testing.T) {
	token := "50" + strings.Repeat("07", tokenBytes)
	id := "5826" + hex.EncodeToString([]byte(seedIdentity(t, 3).ID()))
	tests := []struct {
		name string
		typ  uint8
		raw  string
		want string // "": accepted
	}{
		{"ask", carryAsk, "a1 02" + id, ""},
		{"take", carryTake, "a1 01" + token, ""},
		{"offer", carryOffer, "a2 01" + token + "02" + id, ""},
		{"not CBOR", carryAsk, "ff", "cbor"},
		{"trailing", carryTake, "a1 01" + token + "00", "extraneous"},
		{"ask for nobody", carryAsk, "a0", "peer id of 0 bytes"},
		{"ask with a token", carryAsk, "a2 01" + token + "02" + id, "token"},
		{"take without a token", carryTake, "a0", "token of 0 bytes"},
		{"short token", carryTake, "a1 01 41 07", "token of 1 bytes"},
		{"offer of nobody", carryOffer, "a1 01" + token, "peer id of 0 bytes"},
		{"no peer id", carryAsk, "a1 02 41 01", "multihash"},
		{"take with a wrong peer", carryTake, "a2 01" + token + "02" + id, "peer id of 38 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := decodeCarry(tt.typ, unhex(t, tt.raw))
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func FuzzDecodeCarry(f *testing.F) {
	id := seedIdentity(f, 3).ID()
	for _, m := range []carryMessage{{Peer: id}, {Token: make([]byte, tokenBytes)}, {make([]byte, tokenBytes), id}} {
		f.Add(uint8(carryAsk), must(encMode.Marshal(m)))
		f.Add(uint8(carryTake), must(encMode.Marshal(m)))
	}
	f.Fuzz(func(t *testing.T, typ uint8, raw []byte) {
		m, err := decodeCarry(typ, raw)
		if err != nil {
			return
		}
		again, err := decodeCarry(typ, must(encMode.Marshal(m)))
		if err != nil || string(again.Token) != string(m.Token) || again.Peer != m.Peer {
			t.Fatalf("%+v reads back as %+v, %v", m, again, err)
		}
	})
}

// Whoever asks a relay for what it must not give reads why.
func TestCarryRefused(t *testing.T) {
	relay, a, b := relayedPair(t, nil)
	ask := func(typ uint8, m carryMessage) error {
		c, err := a.OpenLane(t.Context(), relay.ID(), carryProtocol)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return a.lanes.askRelay(c, typ, m)
	}
	tests := []struct {
		name string
		typ  uint8
		m    carryMessage
		want string
	}{
		{"itself", carryAsk, carryMessage{Peer: a.ID()}, "a member that is connected"},
		{"nobody", carryAsk, carryMessage{Peer: peer.ID(seedIdentity(t, 9).ID())}, "a member that is connected"},
		{"a token that was not offered", carryTake, carryMessage{Token: make([]byte, tokenBytes)}, "another, or late"},
		{"wrong type", 9, carryMessage{Peer: b.ID()}, "EOF"},
		{"malformed", carryTake, carryMessage{Token: []byte{1}}, "EOF"},
	}
	for _, tt := range tests {
		if err := ask(tt.typ, tt.m); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	// An offer for a peer that this node does not know leads to nothing.
	c, err := relay.OpenStream(t.Context(), b.ID(), carriedProtocol)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := sendCarry(c, carryOffer, carryMessage{make([]byte, tokenBytes), seedIdentity(t, 9).ID()}); err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("answered")
	}
	if _, lanes := relay.peers.open(b.ID()); lanes != 0 {
		t.Errorf("%d lanes to the relay", lanes)
	}
}
