package p2p

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
)

func laneAt(h *Host) string { return fmt.Sprintf("127.0.0.1:%d", h.lanes.port) }

// dialLane dials a lane with identity i, as far as the verdict.
func dialLane(t *testing.T, addr string, i Identity, alpn string, want peer.ID, pre preface) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	id, err := libp2ptls.NewIdentity(i.key)
	if err != nil {
		t.Fatal(err)
	}
	conf, keys := id.ConfigForPeer(want)
	conf = laneTLS(conf)
	conf.NextProtos = []string{alpn}
	c := &laneConn{Conn: tls.Client(nc, conf)}
	if err := c.handshake(ctx, keys); err != nil {
		return err
	}
	return requestProtocol(c, pre)
}

func TestLaneRefused(t *testing.T) {
	b := startHost(t, nil)
	a := startHost(t, nil)
	hello(t, a, b)
	nobody, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	good := preface{"testnet", "echo/1"}
	tests := []struct {
		name string
		as   Identity
		alpn string
		want peer.ID // whom the dialler expects
		pre  preface
		err  string
	}{
		{"stranger", nobody, laneALPN, b.ID(), good, `hello is "passed" there and "not passed" here`},
		{"wrong identity", a.cfg.Identity, laneALPN, nobody.ID(), good, "peer id mismatch"},
		{"libp2p connection", a.cfg.Identity, "libp2p", b.ID(), good, "no application protocol"},
		{"network", a.cfg.Identity, laneALPN, b.ID(), preface{"othernet", "echo/1"}, `network is "testnet" there`},
		{"protocol", a.cfg.Identity, laneALPN, b.ID(), preface{"testnet", "none/1"}, "protocol is"},
		{"malformed", a.cfg.Identity, laneALPN, b.ID(), preface{"testnet", "none"}, "EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := dialLane(t, laneAt(b), tt.as, tt.alpn, tt.want, tt.pre)
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("got %v, want an error with %q", err, tt.err)
			}
		})
	}
	// The same dialler does it right.
	if err := dialLane(t, laneAt(b), a.cfg.Identity, laneALPN, b.ID(), good); err != nil {
		t.Errorf("lane of a peer: %v", err)
	}
}

// A peer that can not be reached by a lane, or not as itself, is reached by a stream.
func TestLaneFallsBackToStream(t *testing.T) {
	other := startHost(t, nil)
	tests := []struct {
		name   string
		change func(*Config)
		port   uint16 // where the lane is dialled instead
	}{
		{"no listener", func(c *Config) { c.NoLane = true }, 0},
		{"nobody there", nil, 1},
		{"someone else there", nil, other.lanes.port},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := startHost(t, nil), startHost(t, tt.change)
			p := hello(t, a, b)
			if tt.port != 0 {
				moved := p.Hello
				moved.LanePort = tt.port
				a.peers.pass(moved, admission{}, a.node.Network().ConnsToPeer(b.ID())[0])
			}
			c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if c.Lane() {
				t.Error("got a lane")
			}
			if err := echo(c, 10); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLanesPerPeer(t *testing.T) {
	const limit = 3
	a, b := startHost(t, nil), startHost(t, func(c *Config) { c.Limits.LanesPerPeer = limit })
	hello(t, a, b)
	var lanes []Conn
	for i := range limit + 1 {
		c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if want := i < limit; c.Lane() != want {
			t.Errorf("conn %d: lane %v, want %v", i+1, c.Lane(), want)
		}
		if err := echo(c, 10); err != nil {
			t.Error(err)
		}
		lanes = append(lanes, c)
	}
	lanes[0].Close()
	eventually(t, "the closed lane makes room", func() bool {
		c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.Lane()
	})
}

// Connections that say nothing take a slot until their deadline, and no more than there are.
func TestHalfOpenLanes(t *testing.T) {
	const slots = 2
	b := startHost(t, func(c *Config) { c.Limits.HalfOpenLanes = slots; c.HelloTimeout = 2 * time.Second })
	a := startHost(t, nil)
	hello(t, a, b)
	var silent []net.Conn
	for range slots {
		c, err := net.Dial("tcp", laneAt(b))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	eventually(t, "slots taken", func() bool { return len(b.lanes.halfOpen) == slots })
	one, err := net.Dial("tcp", laneAt(b))
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	for i, c := range append(slices.Clone(silent), one) {
		c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("conn %d was not closed: %v", i, err)
		}
	}
	c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !c.Lane() {
		t.Error("no lane after the silent ones are gone")
	}
}

// When the peer loses its readiness, so do its lanes.
func TestLaneEndsWithItsPeer(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	hello(t, a, b)
	c, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := echo(c, 10); err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	if err := a.node.Network().ClosePeer(b.ID()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want the end of the lane", err)
	}
	if _, err := a.OpenLane(t.Context(), b.ID(), "echo/1"); !errors.Is(err, ErrNotAdmitted) {
		t.Errorf("lane to a lost peer: %v", err)
	}
}

// Deadlines and Close work the same on streams and lanes, spinning or not.
func TestConnDeadlineAndClose(t *testing.T) {
	for _, spin := range []time.Duration{-1, 5 * time.Millisecond} {
		a, b := startHost(t, func(c *Config) { c.Spin = spin }), startHost(t, nil)
		hello(t, a, b)
		for _, open := range []func(context.Context, peer.ID, string) (Conn, error){a.OpenStream, a.OpenLane} {
			c, err := open(t.Context(), b.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			name := fmt.Sprintf("spin %v, lane %v", spin, c.Lane())
			if err := echo(c, 100); err != nil { // the protocol is agreed upon from here
				t.Fatalf("%s: %v", name, err)
			}
			if err := c.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: read after the deadline: %v", name, err)
			}
			if err := echo(c, 100); err != nil {
				t.Errorf("%s: the conn is of no use after a deadline: %v", name, err)
			}
			c.SetDeadline(time.Time{})
			done := make(chan error, 1)
			go func() {
				_, err := c.Read(make([]byte, 1))
				done <- err
			}()
			time.Sleep(10 * time.Millisecond)
			c.Close()
			select {
			case err := <-done:
				if err == nil {
					t.Errorf("%s: read something", name)
				}
			case <-time.After(patience):
				t.Fatalf("%s: Close does not end a Read", name)
			}
		}
	}
}
