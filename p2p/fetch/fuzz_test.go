package fetch

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
)

// scriptConn reads what was recorded and throws away what is written.
type scriptConn struct {
	io.Reader
	closed atomic.Bool
}

func (c *scriptConn) Read(b []byte) (int, error) {
	if c.closed.Load() {
		return 0, net.ErrClosed
	}
	return c.Reader.Read(b)
}
func (c *scriptConn) Write(b []byte) (int, error)      { return len(b), nil }
func (c *scriptConn) Close() error                     { c.closed.Store(true); return nil }
func (c *scriptConn) SetDeadline(time.Time) error      { return nil }
func (c *scriptConn) SetReadDeadline(time.Time) error  { return nil }
func (c *scriptConn) SetWriteDeadline(time.Time) error { return nil }
func (c *scriptConn) Remote() peer.ID                  { return "script" }
func (c *scriptConn) Lane() bool                       { return true }

func FuzzServer(f *testing.F) {
	m := makeModel(1, 2*Group+9)
	f.Add(frame(frameWant, 0, 0, encodeWant(m.id)))
	f.Add(bytes.Join([][]byte{
		frame(frameWant, 0, 0, encodeWant(m.id)),
		askFrame(frameAskHeld, 1, ask{}),
		askFrame(frameAskTree, 2, ask{0, 100, 4}),
		askFrame(frameAskData, 3, ask{0, Group + 9, Group}),
		frame(frameCancel, 0, 3, nil),
	}, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		srv := NewServer(ServerConfig{Library: m})
		srv.Serve(t.Context(), &scriptConn{Reader: bytes.NewReader(b)})
		if n := srv.Stats().Sessions; n != 0 {
			t.Errorf("%d sessions left", n)
		}
	})
}

type scriptSource struct{ b []byte }

func (s scriptSource) ID() string { return "script" }
func (s scriptSource) Open(context.Context) (p2p.Conn, error) {
	return &scriptConn{Reader: bytes.NewReader(s.b)}, nil
}

// FuzzClient lets a source say anything: nothing wrong is held, and a download fails.
func FuzzClient(f *testing.F) {
	m := makeModel(1, 2*Group+9)
	session := func(data []byte) []byte {
		return bytes.Join([][]byte{
			frame(frameManifest, 0, 0, encodeManifest(m.files)),
			frame(frameHeld, 0, 1, encodeHeld([]Span{{0, 2*Group + 9}}, 2*Group+9, 0)),
			frame(framePiece, flagLast, 2, m.trees[0]),
			frame(framePiece, 0, 3, data[:Group]),
			frame(framePiece, flagLast, 3, data[Group:]),
		}, nil)
	}
	f.Add(session(m.data[0]))
	f.Add(session(make([]byte, 2*Group+9)))
	f.Add(frame(frameError, 0, 0, refusal{codeBusy, "busy"}.encode()))
	f.Fuzz(func(t *testing.T, b []byte) {
		tried := false
		sink := newJudge(t, m)
		err := NewClient(ClientConfig{HeldEvery: time.Millisecond}).Fetch(t.Context(), Request{Model: m.id, Sink: sink, Sources: func() []Source {
			if tried {
				return nil
			}
			tried = true
			return []Source{scriptSource{b}}
		}})
		if complete := sink.bytes() == 2*Group+9; complete != (err == nil) {
			t.Errorf("%d bytes held, %v", sink.bytes(), err)
		}
		if err == nil {
			sink.check(nil)
		} else if !strings.Contains(err.Error(), "no source left") {
			t.Error(err)
		}
	})
}
