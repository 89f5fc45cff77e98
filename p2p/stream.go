package p2p

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
)

// Conn is a stream or a lane. Deadlines end a blocked call with os.ErrDeadlineExceeded;
// one that strikes within a frame leaves the conn of no use. Close ends both directions
// and may be called at any time, and again.
type Conn interface {
	io.ReadWriteCloser
	SetDeadline(t time.Time) error
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
	Remote() peer.ID // proved by the handshake
	Lane() bool      // a connection of its own, not a stream among others
}

// Handler serves a conn that a peer opened. The conn is closed when it returns.
type Handler func(p *Peer, c Conn)

// HandleStream has handler serve the streams and lanes of a protocol, "experts/1". Each
// runs in a goroutine of its own, for which Close waits.
func (h *Host) HandleStream(proto string, handler Handler) error {
	if !protocolPattern.MatchString(proto) {
		return fmt.Errorf("p2p: protocol %q: want name/version, as in experts/1", proto)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errClosed
	}
	h.handlers[proto] = handler
	if h.node != nil {
		h.setStreamHandler(proto, handler)
	}
	return nil
}

func (h *Host) setStreamHandler(proto string, handler Handler) {
	h.node.SetStreamHandler(h.protocolID(proto), func(s network.Stream) { h.serveStream(s, handler) })
}

func (h *Host) handler(proto string) Handler {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.handlers[proto]
}

// admitStream returns who opened a stream, if it passed the hello or is about to, and
// counts the caller among those that Close waits for until it calls leave. With an error the
// stream was reset.
func (h *Host) admitStream(s network.Stream) (p *Peer, leave func(), err error) {
	if leave, err = h.enter(); err != nil {
		s.ResetWithError(codeDropped)
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), h.cfg.HelloTimeout)
	defer cancel()
	if p, err = h.peers.await(ctx, s.Conn().RemotePeer()); err != nil {
		s.ResetWithError(codeNotAdmitted)
		leave()
		h.refused.tell(s.Conn(), "stream of a stranger", err)
		return nil, nil, err
	}
	return p, leave, nil
}

func (h *Host) serveStream(s network.Stream, handler Handler) {
	p, leave, err := h.admitStream(s)
	if err != nil {
		return
	}
	defer leave()
	c := &streamConn{Stream: s, peers: h.peers}
	if err := h.peers.attach(p, c, 0); err != nil {
		s.ResetWithError(codeNotAdmitted)
		return
	}
	defer c.Close()
	handler(p, c)
}

// OpenStream opens a stream to a ready peer. That the peer refuses it may show only at the
// first Read, as ErrNotAdmitted or another error.
func (h *Host) OpenStream(ctx context.Context, id peer.ID, proto string) (Conn, error) {
	node, err := h.up()
	if err != nil {
		return nil, err
	}
	p := h.peers.get(id)
	if p == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotAdmitted, id)
	}
	ctx = network.WithAllowLimitedConn(network.WithNoDial(ctx, proto), proto)
	s, err := node.NewStream(ctx, id, h.protocolID(proto))
	if err != nil {
		return nil, fmt.Errorf("open %s to peer %s: %w", proto, id, err)
	}
	c := &streamConn{Stream: s, peers: h.peers}
	if err := h.peers.attach(p, c, 0); err != nil {
		s.ResetWithError(codeDropped)
		return nil, err
	}
	return c, nil
}

// streamConn is a libp2p stream as a Conn.
type streamConn struct {
	network.Stream
	peers *registry
	stay  *stay
}

func (c *streamConn) Remote() peer.ID { return c.Conn().RemotePeer() }
func (c *streamConn) Lane() bool      { return false }
func (c *streamConn) bind(s *stay)    { c.stay = s }
func (c *streamConn) drop()           { c.ResetWithError(codeDropped) }

func (c *streamConn) Read(b []byte) (int, error) {
	n, err := c.Stream.Read(b)
	if n > 0 {
		c.stay.hear()
	}
	return n, wireErr(err)
}

func (c *streamConn) Write(b []byte) (int, error) {
	n, err := c.Stream.Write(b)
	return n, wireErr(err)
}

func (c *streamConn) Close() error {
	c.peers.detach(c, false)
	return wireErr(c.Stream.Close())
}

// wireErr gives the errors of streams the meaning that callers know.
func wireErr(err error) error {
	if err == nil || err == io.EOF || err == io.ErrUnexpectedEOF {
		return err
	}
	var reset *network.StreamError
	if errors.As(err, &reset) && reset.Remote {
		switch reset.ErrorCode {
		case codeNotAdmitted:
			return fmt.Errorf("%w there", ErrNotAdmitted)
		case codeMalformed:
			return fmt.Errorf("peer could not read what was sent: %w", err)
		case network.StreamResourceLimitExceeded:
			return fmt.Errorf("peer is at its limit of streams: %w", err)
		}
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return os.ErrDeadlineExceeded
	}
	return err
}
