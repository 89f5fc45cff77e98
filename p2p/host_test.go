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

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
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

// stranger is a libp2p host that does not know our protocols.
func stranger(t *testing.T) host.Host {
	t.Helper()
	h, err := libp2p.New(libp2p.ListenAddrStrings("/ip4/127.0.0.1/tcp/0"), libp2p.DisableMetrics())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
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

func TestHelloRefused(t *testing.T) {
	tests := []struct {
		name        string
		change      func(*Config)
		field       string
		dials, sits string // what the dialler and the listener have
	}{
		{"network", func(c *Config) { c.Network = "othernet" }, "network", "othernet", "testnet"},
		{"pack", func(c *Config) { c.Pack = "llama-v0.4.0/1" }, "runtime pack", "llama-v0.4.0/1", "llama-v0.5.0/1"},
		{"protocol", func(c *Config) { c.Protocols = []string{"echo/2", "echo/3"} }, "protocol echo", "2, 3", "1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var log lockedBuffer
			b := startHost(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			a := startHost(t, tt.change)
			_, err := a.Hello(t.Context(), infoOf(t, b))
			want := RefusedError{Peer: b.ID(), Field: tt.field, Want: tt.dials, Got: tt.sits}
			var got *RefusedError
			if !errors.As(err, &got) || *got != want {
				t.Errorf("dialler got %v, want %+v", err, want)
			}
			other := &RefusedError{Peer: a.ID(), Field: tt.field, Want: tt.sits, Got: tt.dials}
			eventually(t, "listener logs the refusal: "+other.Error(), func() bool {
				return strings.Contains(log.String(), fmt.Sprintf("%q", other.Error()))
			})
			if a.Peer(b.ID()) != nil || b.Peer(a.ID()) != nil {
				t.Error("refused peer is ready")
			}
			if _, err := a.OpenStream(t.Context(), b.ID(), "echo/1"); !errors.Is(err, ErrNotAdmitted) {
				t.Errorf("stream to a refused peer: %v", err)
			}
			eventually(t, "both disconnect", func() bool {
				return len(a.node.Network().Conns()) == 0 && len(b.node.Network().Conns()) == 0
			})
		})
	}
}

// A verdict of the peer alone must reach us as well.
func TestHelloRefusedByPeer(t *testing.T) {
	a := startHost(t, nil)
	s := stranger(t)
	s.SetStreamHandler(a.protocolID("hello/1"), func(st network.Stream) {
		h, _ := a.ownHello()
		h.ID = s.ID()
		record, err := encodeHello(h)
		if err != nil {
			t.Error(err)
		}
		w, r := NewFrameWriter(st, maxHello), NewFrameReader(st, maxHello)
		w.Write(Frame{Type: frameHello, Payload: record})
		sendVerdict(w, verdict{"ban", "nobody", "you"})
		nextOfType(r, frameHello)
		readVerdict(r)
		st.Close()
	})
	_, err := a.Hello(t.Context(), peer.AddrInfo{ID: s.ID(), Addrs: s.Addrs()})
	want := RefusedError{Peer: s.ID(), Field: "ban", Want: "nobody", Got: "you", ByPeer: true}
	var got *RefusedError
	if !errors.As(err, &got) || *got != want {
		t.Errorf("got %v, want %+v", err, want)
	}
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Whatever a listener does with a hello, the dialler ends with an error, and soon.
func TestHelloToBadListener(t *testing.T) {
	frame := func(f Frame) []byte {
		var b bytes.Buffer
		if err := NewFrameWriter(&b, 1<<20).Write(f); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	silent := make(chan struct{})
	defer close(silent)
	tests := []struct {
		name  string
		serve func(network.Stream)
		want  string
	}{
		{"silent", func(network.Stream) { <-silent }, os.ErrDeadlineExceeded.Error()},
		{"garbled", func(s network.Stream) { s.Write(frame(Frame{Type: frameHello, Payload: []byte("garbage")})) }, "hello record"},
		{"huge", func(s network.Stream) { s.Write(frame(Frame{Type: frameHello, Payload: make([]byte, maxHello+1)})) }, "too large"},
		{"wrong frame", func(s network.Stream) { s.Write(frame(Frame{Type: 9})) }, "malformed frame"},
		{"closes", func(s network.Stream) { s.Close() }, "EOF"},
		{"disconnects", func(s network.Stream) { s.Write([]byte{1, 2, 3}); s.Conn().Close() }, "hello to peer"},
		{"resets", func(s network.Stream) { s.Reset() }, "reset"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := startHost(t, func(c *Config) { c.HelloTimeout = time.Second })
			s := stranger(t)
			s.SetStreamHandler(a.protocolID("hello/1"), tt.serve)
			_, err := a.Hello(t.Context(), peer.AddrInfo{ID: s.ID(), Addrs: s.Addrs()})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			eventually(t, "disconnect", func() bool { return len(a.node.Network().Conns()) == 0 })
		})
	}
	t.Run("no kvasir", func(t *testing.T) {
		a, s := startHost(t, nil), stranger(t)
		_, err := a.Hello(t.Context(), peer.AddrInfo{ID: s.ID(), Addrs: s.Addrs()})
		if err == nil || !strings.Contains(err.Error(), "protocols not supported") {
			t.Errorf("got %v", err)
		}
	})
}

// The same from the other side: who dials and does not pass is disconnected.
func TestBadDialler(t *testing.T) {
	tests := []struct {
		name string
		do   func(network.Stream)
	}{
		{"silent", func(network.Stream) {}},
		{"garbled", func(s network.Stream) { s.Write(bytes.Repeat([]byte{0xff}, 64)) }},
		{"leaves in the middle", func(s network.Stream) { s.Write([]byte{9, 0}); s.CloseWrite() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := startHost(t, func(c *Config) { c.HelloTimeout = time.Second })
			s := stranger(t)
			if err := s.Connect(t.Context(), infoOf(t, b)); err != nil {
				t.Fatal(err)
			}
			st, err := s.NewStream(t.Context(), b.ID(), b.protocolID("hello/1"))
			if err != nil {
				t.Fatal(err)
			}
			tt.do(st)
			eventually(t, "disconnect", func() bool { return len(b.node.Network().Conns()) == 0 })
		})
	}
	t.Run("no hello", func(t *testing.T) {
		b := startHost(t, func(c *Config) { c.HelloTimeout = time.Second })
		s := stranger(t)
		if err := s.Connect(t.Context(), infoOf(t, b)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "disconnect", func() bool { return len(b.node.Network().Conns()) == 0 })
	})
}

func TestStreamOfStrangerIsReset(t *testing.T) {
	b, s := startHost(t, nil), stranger(t)
	if err := s.Connect(t.Context(), infoOf(t, b)); err != nil {
		t.Fatal(err)
	}
	st, err := s.NewStream(t.Context(), b.ID(), protocol.ID("/kvasir/testnet/echo/1"))
	if err != nil {
		t.Fatal(err)
	}
	st.Write([]byte("x"))
	_, err = st.Read(make([]byte, 1))
	var reset *network.StreamError
	if !errors.As(err, &reset) || reset.ErrorCode != codeNotAdmitted {
		t.Errorf("got %v, want a reset with code %#x", err, codeNotAdmitted)
	}
	if !errors.Is(wireErr(err), ErrNotAdmitted) {
		t.Errorf("%v does not map to ErrNotAdmitted", err)
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

// watchLog writes down what it is told.
type watchLog struct {
	mu  sync.Mutex
	got []string
}

func (w *watchLog) PeerReady(p *Peer) { w.add("ready " + p.ID.String()) }
func (w *watchLog) PeerLost(p *Peer)  { w.add("lost " + p.ID.String()) }

func (w *watchLog) add(s string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.got = append(w.got, s)
}

func (w *watchLog) has(s string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.got, s)
}

// Three hosts: a keeps b and c. b is restarted on its port, c is of another network.
func TestKeeperReconnects(t *testing.T) {
	bCfg := testConfig(t)
	startB := func() *Host {
		return startHost(t, func(c *Config) { c.Identity = bCfg.Identity; c.Listen = bCfg.Listen })
	}
	b := startB()
	bCfg.Listen = nil
	for _, a := range b.Addrs() {
		bCfg.Listen = append(bCfg.Listen, strings.Split(a, "/p2p/")[0])
	}
	c := startHost(t, func(c *Config) { c.Network = "othernet" })

	cfg := testConfig(t)
	cfg.Peers = append(b.Addrs(), c.Addrs()...)
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var w watchLog
	a.Watch(&w)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	status := func(id peer.ID) PeerStatus {
		for _, s := range a.Peers() {
			if s.ID == id {
				return s
			}
		}
		t.Fatalf("no status of %s", id)
		return PeerStatus{}
	}
	eventually(t, "b connected", func() bool { return status(b.ID()).State == Connected && status(b.ID()).Peer != nil })
	eventually(t, "c refused", func() bool {
		var refused *RefusedError
		s := status(c.ID())
		return s.State == Refused && errors.As(s.Err, &refused) && refused.Field == "network"
	})

	stream, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	lane, err := a.OpenLane(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(echo(stream, 10), echo(lane, 10)); err != nil {
		t.Fatal(err)
	}
	if s := status(b.ID()); s.Streams != 1 || s.Lanes != 1 {
		t.Errorf("%d streams and %d lanes, want 1 and 1", s.Streams, s.Lanes)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b unreachable", func() bool { return status(b.ID()).State == Unreachable && status(b.ID()).Err != nil })
	for _, conn := range []Conn{stream, lane} {
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read after the peer is gone: %v", err)
		}
		conn.Close()
	}
	eventually(t, "the watcher hears of the loss", func() bool { return w.has("lost " + b.ID().String()) })

	startB()
	eventually(t, "b connected again", func() bool { return status(b.ID()).State == Connected && status(b.ID()).Peer != nil })
	again, err := a.OpenStream(t.Context(), b.ID(), "echo/1")
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := echo(again, 10); err != nil {
		t.Error(err)
	}
	if w.has("ready " + c.ID().String()) {
		t.Error("the watcher heard of a refused peer")
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
	rm, err := newResourceManager(l)
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
	}) {
		delays[d.Addr.String()] = d.Delay
	}
	if len(delays) != 4 {
		t.Fatalf("ranked %d of 4 addresses", len(delays))
	}
	if delays["/ip4/192.168.1.2/tcp/1"] != 0 || delays["/ip4/192.168.1.2/udp/1/quic-v1"] == 0 {
		t.Errorf("TCP is not first on the LAN: %v", delays)
	}
	if delays["/ip4/8.8.8.8/udp/1/quic-v1"] != 0 || delays["/ip4/8.8.8.8/tcp/1"] == 0 {
		t.Errorf("QUIC is not first elsewhere: %v", delays)
	}
}

func TestJitter(t *testing.T) {
	for _, r := range []float64{0, 0.5, 0.999} {
		if got := jitter(time.Second, r); got > time.Second || got < time.Second/2 {
			t.Errorf("jitter(1s, %v) = %v", r, got)
		}
	}
}
