package p2p

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
)

// A lane is a TCP connection without a muxer: libp2p's TLS 1.3 handshake, in which both
// sides prove their peer ids, under the ALPN name laneALPN; then the dialler sends a frame
// of type frameLane with a preface, and the listener answers with a frame of type
// frameVerdict. An empty verdict opens the lane; what follows is the protocol's. Frames
// have flags and id 0 and at most maxPreface bytes of payload.
//
// The same goes over QUIC, from and to libp2p's socket (lane_quic.go), and through a relay
// over two other lanes (carry.go).
//
// The preface is a map of deterministic CBOR with the rules of the hello:
//
//	1 network, text     2 protocol, "name/version"
const (
	laneALPN   = "kvasir-lane/1"
	frameLane  = 16
	maxPreface = 1 << 10

	// laneConnectTimeout is short: a port behind a NAT does not answer, and then a stream
	// serves. What answers may take laneDialTimeout for all.
	laneConnectTimeout = time.Second
	laneDialTimeout    = 5 * time.Second
	// laneRetry is when to try again where no lane listener was reached.
	laneRetry = time.Minute
	// acceptPause is how long to wait when the process is out of file descriptors.
	acceptPause = 100 * time.Millisecond
)

// laneServer lets lanes of ready peers in.
type laneServer struct {
	h        *Host
	listener net.Listener
	port     uint16
	identity *libp2ptls.Identity
	halfOpen chan struct{} // a slot for each handshake under way
}

func newLaneServer(h *Host, l net.Listener) (*laneServer, error) {
	identity, err := libp2ptls.NewIdentity(h.cfg.Identity.key)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("p2p: lane certificate: %w", err), l.Close())
	}
	return &laneServer{
		h: h, listener: l, identity: identity,
		port:     uint16(l.Addr().(*net.TCPAddr).Port),
		halfOpen: make(chan struct{}, h.cfg.Limits.HalfOpenLanes),
	}, nil
}

// close ends accepting and the handshakes under way end by their deadline or with ctx.
func (s *laneServer) close() error { return s.listener.Close() }

func (s *laneServer) run(ctx context.Context) {
	for {
		nc, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.h.cfg.Logger.Warn("accept lane", "err", err)
			time.Sleep(acceptPause)
			continue
		}
		select {
		case s.halfOpen <- struct{}{}:
			s.h.wg.Go(func() { s.serve(ctx, nc.(*net.TCPConn)) })
		default:
			nc.Close()
		}
	}
}

// serve takes one connection from the handshake to the end of its handler.
func (s *laneServer) serve(ctx context.Context, nc *net.TCPConn) {
	socket := newSpinConn(nc)
	c, p, handler, err := s.admit(ctx, socket)
	<-s.halfOpen
	if err != nil {
		s.h.refused.note("lane refused", hostOf(nc.RemoteAddr()), nc.RemoteAddr().String(), err)
		return
	}
	defer c.Close()
	socket.spinFor(s.h.cfg.Spin)
	handler(p, c)
}

// hostOf is the IP address in a.
func hostOf(a net.Addr) string {
	host, _, _ := net.SplitHostPort(a.String())
	return host
}

// admit makes nc, which came in, a lane. With an error nc is closed.
func (s *laneServer) admit(ctx context.Context, nc net.Conn) (c *laneConn, p *Peer, handler Handler, err error) {
	gather := &gatherConn{Conn: nc}
	conf, keys := s.identity.ConfigForPeer("")
	c = &laneConn{Conn: tls.Server(gather, laneTLS(conf)), gather: gather, peers: s.h.peers, inbound: true}
	p, handler, err = s.letIn(ctx, c, func(ctx context.Context) error { return c.handshake(ctx, keys) })
	if err != nil {
		c.drop()
	}
	return c, p, handler, err
}

// dial opens a lane or says why not; it takes laneDialTimeout at most.
func (s *laneServer) dial(ctx context.Context, p *Peer, proto string) (*laneConn, error) {
	ctx, cancel := context.WithTimeout(ctx, laneDialTimeout)
	defer cancel()
	nc, err := (&net.Dialer{Timeout: laneConnectTimeout}).DialContext(ctx, "tcp", p.lane)
	if err != nil {
		return nil, err
	}
	socket := newSpinConn(nc.(*net.TCPConn))
	c, err := s.request(ctx, socket, p, proto)
	if err != nil {
		return nil, err
	}
	socket.spinFor(s.h.cfg.Spin)
	return c, nil
}

// request makes nc, at whose other end p is, a lane. With an error nc is closed.
func (s *laneServer) request(ctx context.Context, nc net.Conn, p *Peer, proto string) (*laneConn, error) {
	gather := &gatherConn{Conn: nc}
	conf, keys := s.identity.ConfigForPeer(p.ID)
	c := &laneConn{Conn: tls.Client(gather, laneTLS(conf)), gather: gather, peers: s.h.peers}
	err := s.ask(ctx, c, func(ctx context.Context) error { return c.handshake(ctx, keys) }, p, proto)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// laneConn is a lane over TCP, or over what a relay carries, as a Conn.
type laneConn struct {
	*tls.Conn
	gather  *gatherConn // below it
	wmu     sync.Mutex  // one large Write at a time
	peers   *registry
	remote  peer.ID
	inbound bool
	stay    *stay
}

func (c *laneConn) handshake(ctx context.Context, keys <-chan crypto.PubKey) error {
	if err := c.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("lane handshake: %w", err)
	}
	if got := c.ConnectionState().NegotiatedProtocol; got != laneALPN {
		return fmt.Errorf("lane handshake: protocol %q, want %q", got, laneALPN)
	}
	var err error
	select {
	case key := <-keys:
		c.remote, err = peer.IDFromPublicKey(key)
	default:
		err = errors.New("lane handshake: no key of the peer")
	}
	return err
}

// Write sends b; the records of a large one leave together.
func (c *laneConn) Write(b []byte) (int, error) {
	if len(b) <= tlsRecord {
		return c.Conn.Write(b)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.gather.together(func() (int, error) { return c.Conn.Write(b) })
}

func (c *laneConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.stay.hear()
	}
	return n, err
}

func (c *laneConn) Remote() peer.ID { return c.remote }
func (c *laneConn) Lane() bool      { return true }
func (c *laneConn) bind(s *stay)    { c.stay = s }
func (c *laneConn) drop()           { c.NetConn().Close() }

func (c *laneConn) Close() error {
	c.peers.detach(c, c.inbound)
	err := c.Conn.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
