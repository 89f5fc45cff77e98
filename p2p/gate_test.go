package p2p

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
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
)

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
			if b.Refusals()[tt.field] == 0 {
				t.Error("not counted")
			}
			if cost := b.Standing(a.ID()).Score; (cost > 0) != (tt.field == "network") || a.Standing(b.ID()).Score != 0 {
				t.Errorf("the refusal costs %v", cost)
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

// What changes while a hello is under way is said in the next one.
func TestCapabilitiesChangeDuringHello(t *testing.T) {
	a := startHost(t, nil)
	s := stranger(t)
	heard, answer := make(chan Hello, 16), make(chan struct{})
	s.SetStreamHandler(a.protocolID("hello/1"), func(st network.Stream) {
		defer st.Close()
		w, r := NewFrameWriter(st, maxHello), NewFrameReader(st, maxHello)
		payload, err := nextOfType(r, frameHello)
		if err != nil {
			return
		}
		theirs, err := decodeHello(payload)
		if err != nil {
			t.Error(err)
		}
		heard <- theirs
		<-answer
		theirs.ID = s.ID()
		record, err := encodeHello(theirs)
		if err != nil {
			t.Error(err)
		}
		w.Write(Frame{Type: frameHello, Payload: record})
		sendVerdict(w, verdict{})
		readVerdict(r)
	})
	done := make(chan error, 1)
	go func() {
		_, err := a.Hello(t.Context(), peer.AddrInfo{ID: s.ID(), Addrs: s.Addrs()})
		done <- err
	}()
	<-heard
	if err := a.SetCapabilities(Capabilities{Models: []string{"new"}}); err != nil {
		t.Fatal(err)
	}
	close(answer)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	select {
	case h := <-heard:
		if !slices.Equal(h.Models, []string{"new"}) {
			t.Errorf("said %v", h.Models)
		}
	case <-time.After(patience):
		t.Error("the new capabilities were not said")
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

// A peer that says hello all the time keeps this node busy for nothing.
func TestHelloFlood(t *testing.T) {
	a, b := startHost(t, nil), startHost(t, nil)
	hello(t, a, b)
	eventually(t, "b blames a", func() bool {
		for range 8 {
			a.rehello(b.ID())
		}
		return b.Standing(a.ID()).Last == Flood && b.Standing(a.ID()).Score > 0
	})
}
