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

type preface struct {
	Network  string `cbor:"1,keyasint"`
	Protocol string `cbor:"2,keyasint"`
}

func decodePreface(b []byte) (preface, error) {
	var p preface
	if err := decMode.Unmarshal(b, &p); err != nil {
		return preface{}, fmt.Errorf("lane preface: %w", err)
	}
	if checkText(p.Network) != nil || !protocolPattern.MatchString(p.Protocol) {
		return preface{}, fmt.Errorf("lane preface: network %q or protocol %q is malformed", p.Network, p.Protocol)
	}
	return p, nil
}

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
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	c, p, handler, err := s.admit(ctx, nc)
	stop()
	<-s.halfOpen
	if err != nil {
		host, _, _ := net.SplitHostPort(nc.RemoteAddr().String())
		s.h.refused.note("lane refused", host, nc.RemoteAddr().String(), err)
		nc.Close()
		return
	}
	defer c.Close()
	handler(p, c)
}

// admit runs the handshake and the preface and answers it.
func (s *laneServer) admit(ctx context.Context, nc *net.TCPConn) (*laneConn, *Peer, Handler, error) {
	ctx, cancel := context.WithTimeout(ctx, s.h.cfg.HelloTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	if err := nc.SetDeadline(deadline); err != nil {
		return nil, nil, nil, err
	}
	socket := newSpinConn(nc)
	gather := &gatherConn{Conn: socket}
	conf, keys := s.identity.ConfigForPeer("")
	c := &laneConn{Conn: tls.Server(gather, laneTLS(conf)), gather: gather, peers: s.h.peers, inbound: true}
	if err := c.handshake(ctx, keys); err != nil {
		return nil, nil, nil, err
	}
	w, r := NewFrameWriter(c.Conn, maxPreface), NewFrameReader(c.Conn, maxPreface)
	payload, err := nextOfType(r, frameLane)
	if err != nil {
		return nil, nil, nil, err
	}
	pre, err := decodePreface(payload)
	if err != nil {
		return nil, nil, nil, err
	}
	p, handler, v := s.judge(ctx, c, pre)
	if err = sendVerdict(w, v); err == nil && v.Field != "" {
		err = &RefusedError{Peer: c.remote, Field: v.Field, Want: v.Want, Got: v.Got}
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if err != nil {
		s.h.peers.detach(c, true)
		return nil, nil, nil, err
	}
	socket.spinFor(s.h.cfg.Spin)
	return c, p, handler, nil
}

// judge decides on a lane and, when it is let in, ties it to its peer.
func (s *laneServer) judge(ctx context.Context, c *laneConn, pre preface) (*Peer, Handler, verdict) {
	if pre.Network != s.h.cfg.Network {
		return nil, nil, verdict{"network", s.h.cfg.Network, pre.Network}
	}
	handler := s.h.handler(pre.Protocol)
	if handler == nil {
		return nil, nil, verdict{"protocol", "one that is served", pre.Protocol}
	}
	p, err := s.h.peers.await(ctx, c.remote)
	if err != nil {
		return nil, nil, verdict{"hello", "passed", "not passed"}
	}
	if err := s.h.peers.attach(p, c, s.h.cfg.Limits.LanesPerPeer); err != nil {
		return nil, nil, verdict{"lanes", fmt.Sprintf("at most %d of a ready peer", s.h.cfg.Limits.LanesPerPeer), "one more"}
	}
	return p, handler, verdict{}
}

// OpenLane opens a lane to a ready peer, or a stream when the peer has no lane listener
// or it can not be reached. Conn.Lane tells which.
func (h *Host) OpenLane(ctx context.Context, id peer.ID, proto string) (Conn, error) {
	if _, err := h.up(); err != nil {
		return nil, err
	}
	p := h.peers.get(id)
	if p == nil {
		return nil, fmt.Errorf("%w: %s", ErrNotAdmitted, id)
	}
	if h.lanes == nil || p.lane == "" || p.laneIsDead() {
		return h.OpenStream(ctx, id, proto)
	}
	c, err := h.lanes.dial(ctx, p, proto)
	if err == nil {
		return c, nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("lane to peer %s: %w", id, err)
	}
	var refused *RefusedError
	if !errors.As(err, &refused) {
		p.stay.noLane.Store(&deadLane{p.lane, time.Now().Add(laneRetry)})
	}
	h.cfg.Logger.Info("no lane, using a stream", "peer", id, "addr", p.lane, "protocol", proto, "err", err)
	return h.OpenStream(ctx, id, proto)
}

// dial opens a lane or says why not; it takes laneDialTimeout at most.
func (s *laneServer) dial(ctx context.Context, p *Peer, proto string) (c *laneConn, err error) {
	ctx, cancel := context.WithTimeout(ctx, laneDialTimeout)
	defer cancel()
	nc, err := (&net.Dialer{Timeout: laneConnectTimeout}).DialContext(ctx, "tcp", p.lane)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			nc.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	socket := newSpinConn(nc.(*net.TCPConn))
	gather := &gatherConn{Conn: socket}
	conf, keys := s.identity.ConfigForPeer(p.ID)
	c = &laneConn{Conn: tls.Client(gather, laneTLS(conf)), gather: gather, peers: s.h.peers}
	if err := c.handshake(ctx, keys); err != nil {
		return nil, err
	}
	if err := c.requestProtocol(preface{s.h.cfg.Network, proto}); err != nil {
		return nil, err
	}
	if !stop() {
		return nil, ctx.Err()
	}
	socket.spinFor(s.h.cfg.Spin)
	if err := s.h.peers.attach(p, c, 0); err != nil {
		return nil, err
	}
	return c, nil
}

// deadLane is an address at which the lane listener of a peer was not reached.
type deadLane struct {
	addr  string
	until time.Time
}

func (p *Peer) laneIsDead() bool {
	d := p.stay.noLane.Load()
	return d != nil && d.addr == p.lane && time.Now().Before(d.until)
}

// laneConn is a lane as a Conn.
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

// requestProtocol sends the preface and reads the verdict.
func (c *laneConn) requestProtocol(pre preface) error {
	b, err := encMode.Marshal(pre)
	if err != nil {
		return err
	}
	w, r := NewFrameWriter(c.Conn, maxPreface), NewFrameReader(c.Conn, maxPreface)
	if err := w.Write(Frame{Type: frameLane, Payload: b}); err != nil {
		return err
	}
	v, err := readVerdict(r)
	if err == nil && v.Field != "" {
		err = &RefusedError{Peer: c.remote, Field: v.Field, Want: v.Want, Got: v.Got, ByPeer: true}
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
