package p2p

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

const patience = 20 * time.Second // for what must happen; the machine may be busy

func testConfig(t testing.TB) Config {
	t.Helper()
	id, err := NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Identity: id, Network: "testnet", Pack: "llama-v0.5.0/1", Agent: "kvasird/test",
		Protocols:    []string{"echo/1"},
		Capabilities: Capabilities{Backends: []Backend{{"CPU", "test", "f32"}}, Models: []string{"m1"}},
		HelloTimeout: patience,
	}
	if testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("me", id.ID().ShortString())
	}
	return cfg
}

// startHost starts a host that echoes, and closes it at the end of the test.
func startHost(t testing.TB, change func(*Config)) *Host {
	t.Helper()
	cfg := testConfig(t)
	if change != nil {
		change(&cfg)
	}
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.HandleStream("echo/1", func(_ *Peer, c Conn) { io.Copy(c, c) }); err != nil {
		t.Fatal(err)
	}
	if err := h.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return h
}

func infoOf(t testing.TB, h *Host) peer.AddrInfo {
	t.Helper()
	var out peer.AddrInfo
	for _, a := range h.Addrs() {
		ai, err := ParsePeer(a)
		if err != nil {
			t.Fatal(err)
		}
		out.ID, out.Addrs = ai.ID, append(out.Addrs, ai.Addrs...)
	}
	return out
}

func hello(t testing.TB, from, to *Host) *Peer {
	t.Helper()
	p, err := from.Hello(t.Context(), infoOf(t, to))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if cond() {
			return
		}
	}
	t.Fatalf("did not happen: %s", what)
}

// echo sends a frame and wants it back.
func echo(c Conn, size int) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	payload := bytes.Repeat([]byte("kvasir"), size/6+1)[:size]
	sent := make(chan error, 1)
	go func() { sent <- NewFrameWriter(c, size).Write(Frame{Type: 1, ID: 9, Payload: payload}) }()
	f, err := NewFrameReader(c, size).Next()
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	if f.ID != 9 || !bytes.Equal(f.Payload, payload) {
		return errors.New("echo differs")
	}
	return nil
}

func TestTwoHosts(t *testing.T) {
	for _, transport := range []string{"/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"} {
		t.Run(transport, func(t *testing.T) {
			a := startHost(t, nil)
			b := startHost(t, func(c *Config) {
				c.Listen = []string{transport}
				c.Capabilities.Models = []string{"m2", "m3"}
				c.Capabilities.Backends = []Backend{{"CUDA", "card", "f16"}}
			})
			p := hello(t, a, b)
			if p.ID != b.ID() || p.Agent != "kvasird/test" || p.LanePort == 0 ||
				!slices.Equal(p.Models, []string{"m2", "m3"}) || !slices.Equal(p.Backends, []Backend{{"CUDA", "card", "f16"}}) {
				t.Errorf("hello of the peer: %+v", p.Hello)
			}
			if !strings.HasPrefix(p.Addr, "/ip4/127.0.0.1/") {
				t.Errorf("peer at %s", p.Addr)
			}
			for _, open := range []func(context.Context, peer.ID, string) (Conn, error){a.OpenStream, a.OpenLane} {
				c, err := open(t.Context(), b.ID(), "echo/1")
				if err != nil {
					t.Fatal(err)
				}
				if c.Remote() != b.ID() {
					t.Errorf("remote is %s", c.Remote())
				}
				for _, size := range []int{0, 12 << 10, 3 << 20} {
					if err := echo(c, size); err != nil {
						t.Errorf("lane %v, %d bytes: %v", c.Lane(), size, err)
					}
				}
				if err := errors.Join(c.Close(), c.Close()); err != nil {
					t.Errorf("close: %v", err)
				}
			}
			// The listening side opens too.
			c, err := b.OpenLane(t.Context(), a.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if !c.Lane() {
				t.Error("got a stream, want a lane")
			}
			if err := echo(c, 100); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCapabilitiesAreRenewed(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	hello(t, a, b)
	c := Capabilities{Models: []string{"later"}}
	if err := b.SetCapabilities(c); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a knows of the new model", func() bool {
		p := a.Peer(b.ID())
		return p != nil && slices.Equal(p.Models, c.Models)
	})
	if err := b.SetCapabilities(Capabilities{Models: make([]string, maxModels+1)}); err == nil {
		t.Error("too many models accepted")
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	run := func() {
		a, b := startHost(t, nil), startHost(t, nil)
		hello(t, a, b)
		var wg sync.WaitGroup
		for _, open := range []func(context.Context, peer.ID, string) (Conn, error){a.OpenStream, a.OpenLane} {
			c, err := open(t.Context(), b.ID(), "echo/1")
			if err != nil {
				t.Fatal(err)
			}
			if err := echo(c, 10); err != nil {
				t.Fatal(err)
			}
			wg.Go(func() { // blocked in Read when the host closes
				c.SetDeadline(time.Time{})
				if _, err := c.Read(make([]byte, 1)); err == nil {
					t.Error("read something from nowhere")
				}
			})
		}
		if err := errors.Join(a.Close(), a.Close(), b.Close()); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if _, err := a.OpenStream(t.Context(), b.ID(), "echo/1"); !errors.Is(err, errClosed) {
			t.Errorf("open after close: %v", err)
		}
		if err := a.Start(); !errors.Is(err, errClosed) {
			t.Errorf("start after close: %v", err)
		}
	}
	run() // starts what libp2p keeps for the process
	before := runtime.NumGoroutine()
	run()
	run()
	eventually(t, fmt.Sprintf("goroutines back to %d", before), func() bool { return runtime.NumGoroutine() <= before })
}

func TestStartTellsWhatIsWrong(t *testing.T) {
	a := startHost(t, nil)
	taken := strings.Split(a.Addrs()[0], "/p2p/")[0]
	lane := fmt.Sprintf("127.0.0.1:%d", a.lanes.port)
	tests := []struct {
		name, want string
		change     func(*Config)
	}{
		{"port taken", taken, func(c *Config) { c.Listen = []string{taken} }},
		{"lane port taken", lane, func(c *Config) { c.LaneListen = lane }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig(t)
			tt.change(&cfg)
			h, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Start(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestConfigRefused(t *testing.T) {
	self := testConfig(t)
	tests := []struct {
		name, want string
		change     func(*Config)
	}{
		{"no identity", "identity", func(c *Config) { c.Identity = Identity{} }},
		{"no network", "network id", func(c *Config) { c.Network = "" }},
		{"slash in network", "network id", func(c *Config) { c.Network = "a/b" }},
		{"protocol without version", "name/version", func(c *Config) { c.Protocols = []string{"echo"} }},
		{"listen address", "listen address", func(c *Config) { c.Listen = []string{"0.0.0.0:1"} }},
		{"peer without id", "peer address", func(c *Config) { c.Peers = []string{"/ip4/127.0.0.1/tcp/1"} }},
		{"peer without address", "peer address", func(c *Config) { c.Peers = []string{"/p2p/" + self.Identity.ID().String()} }},
		{"itself as peer", "itself", func(c *Config) {
			c.Identity = self.Identity
			c.Peers = []string{"/ip4/127.0.0.1/tcp/1/p2p/" + self.Identity.ID().String()}
		}},
		{"long spin", "spin", func(c *Config) { c.Spin = time.Second }},
		{"negative timeout", "timeout", func(c *Config) { c.HelloTimeout = -1 }},
		{"negative limit", "limit", func(c *Config) { c.Limits.Conns = -1 }},
		{"long pack", "bytes", func(c *Config) { c.Pack = strings.Repeat("x", maxText+1) }},
		{"unprintable agent", "printable", func(c *Config) { c.Agent = "a\x1b[2J" }},
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
}

// Many peers behind one address get in; the limit that there is holds.
func TestManyPeersBehindOneAddress(t *testing.T) {
	l := Limits{ConnsPerIP: 64}
	if err := l.validate(); err != nil {
		t.Fatal(err)
	}
	rm, err := newResourceManager(l, false)
	if err != nil {
		t.Fatal(err)
	}
	defer rm.Close()
	addr := ma.StringCast("/ip4/203.0.113.7/tcp/4001")
	for i := range 64 {
		if _, err := rm.OpenConnection(network.DirInbound, true, addr); err != nil {
			t.Fatalf("connection %d: %v", i+1, err)
		}
	}
	if _, err := rm.OpenConnection(network.DirInbound, true, addr); err == nil {
		t.Error("connection 65 got in, limit 64")
	}
	if _, err := rm.OpenConnection(network.DirInbound, true, ma.StringCast("/ip4/203.0.113.8/tcp/4001")); err != nil {
		t.Errorf("another address: %v", err)
	}
}

func TestDialOrder(t *testing.T) {
	delays := make(map[string]time.Duration)
	for _, d := range rankDials([]ma.Multiaddr{
		ma.StringCast("/ip4/192.168.1.2/udp/1/quic-v1"), ma.StringCast("/ip4/192.168.1.2/tcp/1"),
		ma.StringCast("/ip4/8.8.8.8/udp/1/quic-v1"), ma.StringCast("/ip4/8.8.8.8/tcp/1"),
		ma.StringCast("/ip4/9.9.9.9/udp/1/quic-v1"), ma.StringCast("/ip4/9.9.9.9/tcp/1"),
	}, []string{"9.9.9.9"}) {
		delays[d.Addr.String()] = d.Delay
	}
	if len(delays) != 6 {
		t.Fatalf("ranked %d of 6 addresses", len(delays))
	}
	if delays["/ip4/9.9.9.9/tcp/1"] != 0 || delays["/ip4/9.9.9.9/udp/1/quic-v1"] == 0 {
		t.Errorf("TCP is not first to a relay: %v", delays)
	}
	if delays["/ip4/192.168.1.2/tcp/1"] != 0 || delays["/ip4/192.168.1.2/udp/1/quic-v1"] == 0 {
		t.Errorf("TCP is not first on the LAN: %v", delays)
	}
	if delays["/ip4/8.8.8.8/udp/1/quic-v1"] != 0 || delays["/ip4/8.8.8.8/tcp/1"] == 0 {
		t.Errorf("QUIC is not first elsewhere: %v", delays)
	}
}
