package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/transport"
	"github.com/multiformats/go-multiaddr"
)

// tripsToConnect is what a handshake takes, in one-way trips.
const tripsToConnect = 4

// port is the libp2p transport of one host. To libp2p it is QUIC, as the addresses look so.
type port struct {
	net   *Network
	addr  multiaddr.Multiaddr
	id    peer.ID
	key   crypto.PubKey
	gater connmgr.ConnectionGater
	calls chan *conn // that came in

	once   sync.Once
	closed chan struct{}
}

func (p *port) CanDial(multiaddr.Multiaddr) bool { return true }
func (p *port) Protocols() []int                 { return []int{multiaddr.P_QUIC_V1} }
func (p *port) Proxy() bool                      { return false }

func (p *port) Listen(multiaddr.Multiaddr) (transport.Listener, error) {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.net.ports[p.addr.String()] = p
	return listener{p}, nil
}

// Dial connects to who listens at an address. Across a partition nothing answers.
func (p *port) Dial(ctx context.Context, addr multiaddr.Multiaddr, id peer.ID) (transport.CapableConn, error) {
	trip := time.NewTimer(tripsToConnect * p.net.oneWay)
	defer trip.Stop()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-trip.C:
	}
	there := p.net.port(addr)
	if there == nil {
		return nil, fmt.Errorf("sim: nobody listens at %v", addr)
	}
	l := &link{net: p.net, oneWay: p.net.oneWay, a: p, b: there}
	if l.isCut() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if there.id != id {
		return nil, fmt.Errorf("sim: %v is %v, want %v", addr, there.id, id)
	}
	own, far := newConn(l, p, there), newConn(l, there, p)
	own.far, far.far = far, own
	if !there.gater.InterceptAccept(far) || !there.gater.InterceptSecured(network.DirInbound, p.id, far) ||
		!p.gater.InterceptSecured(network.DirOutbound, id, own) {
		return nil, errors.New("sim: the connection is refused")
	}
	select {
	case there.calls <- far:
		return own, nil
	case <-there.closed:
		return nil, fmt.Errorf("sim: %v closed", addr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// listener is a port that listens.
type listener struct{ *port }

func (l listener) Accept() (transport.CapableConn, error) {
	select {
	case c := <-l.calls:
		return c, nil
	case <-l.closed:
		return nil, transport.ErrListenerClosed
	}
}

func (l listener) Close() error {
	l.once.Do(func() {
		l.net.mu.Lock()
		defer l.net.mu.Unlock()
		delete(l.net.ports, l.addr.String())
		close(l.closed)
	})
	return nil
}

func (l listener) Addr() net.Addr                 { return &net.UDPAddr{} }
func (l listener) Multiaddr() multiaddr.Multiaddr { return l.addr }

// link is what a connection goes over.
type link struct {
	net    *Network
	oneWay time.Duration
	a, b   *port
}

func (l *link) isCut() bool             { return l.net.apart(l.a, l.b) }
func (l *link) healed() <-chan struct{} { return l.net.parts.Load().over }

// conn is one end of a connection.
type conn struct {
	link        *link
	local, peer *port
	far         *conn

	mu      sync.Mutex // guards what follows
	streams map[*stream]struct{}
	opened  []*stream     // by the other side, not accepted yet
	poke    chan struct{} // there are some; capacity 1
	closed  chan struct{}
	err     error // once closed
}

func newConn(l *link, local, remote *port) *conn {
	return &conn{link: l, local: local, peer: remote, streams: make(map[*stream]struct{}),
		poke: make(chan struct{}, 1), closed: make(chan struct{})}
}

func (c *conn) LocalPeer() peer.ID                   { return c.local.id }
func (c *conn) RemotePeer() peer.ID                  { return c.peer.id }
func (c *conn) RemotePublicKey() crypto.PubKey       { return c.peer.key }
func (c *conn) LocalMultiaddr() multiaddr.Multiaddr  { return c.local.addr }
func (c *conn) RemoteMultiaddr() multiaddr.Multiaddr { return c.peer.addr }
func (c *conn) Scope() network.ConnScope             { return &network.NullScope{} }
func (c *conn) Transport() transport.Transport       { return c.local }
func (c *conn) As(any) bool                          { return false }

func (c *conn) ConnState() network.ConnectionState {
	return network.ConnectionState{Transport: "quic-v1"}
}

func (c *conn) IsClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

func (c *conn) OpenStream(context.Context) (network.MuxedStream, error) {
	there, back := newLine(c.link), newLine(c.link)
	own, far := &stream{c, back, there}, &stream{c.far, there, back}
	if err := c.add(own); err != nil {
		return nil, err
	}
	if err := c.far.add(far); err != nil {
		own.Reset()
		return nil, err
	}
	c.far.mu.Lock()
	defer c.far.mu.Unlock()
	c.far.opened = append(c.far.opened, far)
	select {
	case c.far.poke <- struct{}{}:
	default:
	}
	return own, nil
}

func (c *conn) add(s *stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.streams[s] = struct{}{}
	}
	return c.err
}

func (c *conn) forget(s *stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.streams, s)
}

func (c *conn) AcceptStream() (network.MuxedStream, error) {
	for {
		c.mu.Lock()
		if len(c.opened) > 0 {
			s := c.opened[0]
			c.opened = c.opened[1:]
			c.mu.Unlock()
			return s, nil
		}
		c.mu.Unlock()
		select {
		case <-c.poke:
		case <-c.closed:
			return nil, c.err
		}
	}
}

func (c *conn) Close() error { return c.CloseWithError(0) }

func (c *conn) CloseWithError(code network.ConnErrorCode) error {
	c.end(&network.ConnError{ErrorCode: code})
	if !c.link.isCut() {
		time.AfterFunc(c.link.oneWay, func() { c.far.end(&network.ConnError{ErrorCode: code, Remote: true}) })
	}
	return nil
}

func (c *conn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	close(c.closed)
	for s := range c.streams {
		s.in.cut(err)
		s.out.cut(err)
	}
	clear(c.streams)
}
