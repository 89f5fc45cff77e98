package p2p

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/pnet"
	"github.com/libp2p/go-libp2p/core/transport"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	libp2pquic "github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/quicreuse"
	ma "github.com/multiformats/go-multiaddr"
	"github.com/quic-go/quic-go"
)

const (
	// quicLaneTimeout bounds the opening of a QUIC lane: where the peer's connection is,
	// an answer comes soon or not at all.
	quicLaneTimeout = 3 * time.Second
	// quicLinger is how long a closed QUIC lane waits for the other side to have read all.
	quicLinger = 5 * time.Second
)

// quicLanes are lanes over QUIC: a connection with the lane's ALPN name and one stream. They
// go from and to the UDP socket on which libp2p's QUIC connections are, so that they pass
// where one of those does: through a hole in a NAT, too.
type quicLanes struct {
	s         *laneServer
	sockets   *quicreuse.ConnManager
	listeners []quicreuse.Listener
}

// quicTransport is libp2p's; sockets is told of the sockets that it uses for own. libp2p makes
// another one, under another identity, to try whether peers can be reached.
func quicTransport(own crypto.PrivKey, sockets **quicreuse.ConnManager) any {
	return func(key crypto.PrivKey, m *quicreuse.ConnManager, psk pnet.PSK, gater connmgr.ConnectionGater, limits network.ResourceManager) (transport.Transport, error) {
		if key.Equals(own) {
			*sockets = m
		}
		return libp2pquic.NewTransport(key, m, psk, gater, limits)
	}
}

// listenQUIC lets lanes in wherever libp2p listens for QUIC.
func (s *laneServer) listenQUIC(sockets *quicreuse.ConnManager) (*quicLanes, error) {
	q := &quicLanes{s: s, sockets: sockets}
	conf := &tls.Config{NextProtos: []string{laneALPN}, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c, _ := s.identity.ConfigForPeer("")
		return laneTLS(c), nil
	}}
	for _, a := range s.h.node.Network().ListenAddresses() {
		if !isQUIC(a) {
			continue
		}
		l, err := sockets.ListenQUIC(a, conf, anyWindow)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("p2p: listen for lanes on %s: %w", a, err), q.close())
		}
		q.listeners = append(q.listeners, l)
	}
	return q, nil
}

// anyWindow leaves the windows to QUIC's own limit: 15 MiB of a lane.
func anyWindow(*quic.Conn, uint64) bool { return true }

// isQUIC reports whether a is an address of libp2p's QUIC, without a relay.
func isQUIC(a ma.Multiaddr) bool {
	_, quic := protocolOf(a, ma.P_QUIC_V1)
	_, web := protocolOf(a, ma.P_WEBTRANSPORT)
	return quic && !web && !isCircuit(a)
}

func (q *quicLanes) close() error {
	var errs []error
	for _, l := range q.listeners {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

func (q *quicLanes) run(ctx context.Context, l quicreuse.Listener) {
	for {
		conn, err := l.Accept(ctx)
		if err != nil {
			return
		}
		select {
		case q.s.halfOpen <- struct{}{}:
			q.s.h.wg.Go(func() { q.serve(ctx, conn) })
		default:
			conn.CloseWithError(quicRefused, "")
		}
	}
}

// Codes with which the connection of a lane is closed.
const (
	quicDone    quic.ApplicationErrorCode = 0
	quicRefused quic.ApplicationErrorCode = quic.ApplicationErrorCode(codeNotAdmitted)
	quicDropped quic.ApplicationErrorCode = quic.ApplicationErrorCode(codeDropped)
)

func (q *quicLanes) serve(ctx context.Context, conn *quic.Conn) {
	c, p, handler, err := q.admit(ctx, conn)
	<-q.s.halfOpen
	if err != nil {
		q.s.h.refused.note("lane refused", hostOf(conn.RemoteAddr()), conn.RemoteAddr().String(), err)
		return
	}
	defer c.Close()
	handler(p, c)
}

// admit makes conn, which came in, a lane. With an error conn is closed.
func (q *quicLanes) admit(ctx context.Context, conn *quic.Conn) (c *quicLane, p *Peer, handler Handler, err error) {
	c = &quicLane{conn: conn, h: q.s.h, inbound: true}
	p, handler, err = q.s.letIn(ctx, c, func(ctx context.Context) error { return c.prove(conn.AcceptStream(ctx)) })
	var refused *RefusedError
	switch {
	case errors.As(err, &refused): // it has to read why
		c.linger(refusedLinger)
	case err != nil:
		c.drop()
	}
	return c, p, handler, err
}

// dial opens a lane to a peer whose connection is QUIC, at that address, or says why not.
func (q *quicLanes) dial(ctx context.Context, p *Peer, proto string) (*quicLane, error) {
	addr, err := ma.NewMultiaddr(p.Addr)
	if err != nil {
		return nil, err
	}
	if !isQUIC(addr) {
		return nil, errors.New("the peer is not connected by QUIC")
	}
	ctx, cancel := context.WithTimeout(ctx, quicLaneTimeout)
	defer cancel()
	conf, _ := q.s.identity.ConfigForPeer(p.ID)
	conn, err := q.sockets.DialQUIC(ctx, addr, laneTLS(conf), anyWindow)
	if err != nil {
		return nil, fmt.Errorf("QUIC lane: %w", err)
	}
	c := &quicLane{conn: conn, h: q.s.h}
	err = q.s.ask(ctx, c, func(ctx context.Context) error { return c.prove(conn.OpenStreamSync(ctx)) }, p, proto)
	if err != nil {
		return nil, fmt.Errorf("QUIC lane: %w", err)
	}
	return c, nil
}

// quicLane is a lane over QUIC as a Conn.
type quicLane struct {
	*quic.Stream
	conn    *quic.Conn
	h       *Host
	remote  peer.ID
	inbound bool
	stay    *stay
	ended   atomic.Bool // the other side has closed
}

// prove takes the lane's stream, if there is one, and the peer id from the handshake.
func (c *quicLane) prove(s *quic.Stream, err error) error {
	if err != nil {
		return err
	}
	c.Stream = s
	key, err := libp2ptls.PubKeyFromCertChain(c.conn.ConnectionState().TLS.PeerCertificates)
	if err == nil {
		c.remote, err = peer.IDFromPublicKey(key)
	}
	return err
}

func (c *quicLane) Remote() peer.ID { return c.remote }
func (c *quicLane) Lane() bool      { return true }
func (c *quicLane) bind(s *stay)    { c.stay = s }
func (c *quicLane) drop()           { c.conn.CloseWithError(quicDropped, "") }

func (c *quicLane) Read(b []byte) (int, error) {
	n, err := c.Stream.Read(b)
	if n > 0 {
		c.stay.hear()
	}
	err = quicErr(err)
	if err == io.EOF {
		c.ended.Store(true)
	}
	return n, err
}

func (c *quicLane) Write(b []byte) (int, error) {
	n, err := c.Stream.Write(b)
	return n, quicErr(err)
}

// quicErr says what the end of the connection means.
func quicErr(err error) error {
	var ended *quic.ApplicationError
	var idle *quic.IdleTimeoutError
	switch {
	case errors.As(err, &ended) && ended.Remote && ended.ErrorCode == quicDone:
		return io.EOF
	case errors.As(err, &idle): // which says of itself that it is a deadline
		return fmt.Errorf("lane ended: %v", err)
	}
	return wireErr(err)
}

// Close ends the lane. What was written still arrives, if the other side reads it.
func (c *quicLane) Close() error {
	c.h.peers.detach(c, c.inbound)
	c.linger(quicLinger)
	return nil
}

// linger ends both directions and closes the connection when the other side has done so, or
// after a time: to close it at once would lose what is on its way.
func (c *quicLane) linger(most time.Duration) {
	c.Stream.Close()
	c.Stream.CancelRead(quic.StreamErrorCode(codeDropped))
	if c.ended.Load() {
		c.conn.CloseWithError(quicDone, "")
		return
	}
	leave, err := c.h.enter()
	if err != nil {
		c.conn.CloseWithError(quicDone, "")
		return
	}
	go func() {
		defer leave()
		timer := time.NewTimer(most)
		defer timer.Stop()
		select {
		case <-c.conn.Context().Done():
		case <-timer.C:
		}
		c.conn.CloseWithError(quicDone, "")
	}()
}
