package p2p

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// A carried lane goes through a relay, and not by the two connections that the peers have
// there, on which all else that is relayed goes: each opens a lane to the relay, which passes
// on what comes, and through the two goes the lane, with its own handshake. The relay sees
// who and how much.
//
// Frames have flags and id 0, and payloads of deterministic CBOR of at most maxCarry bytes,
// maps with the rules of the hello: 1 token, 16 bytes; 2 peer id, bytes.
//
//	carry/1, to the relay, on a lane:
//	  dialler                relay               listener
//	  carryAsk {2: listener} →
//	                         carried/1: carryOffer {1, 2: dialler} →
//	                         ← carryTake {1}     on a conn of carry/1
//	  ← frameVerdict         frameVerdict →
//
// After a verdict that accepts, what one sends comes to the other.
const (
	carryProtocol   = "carry/1"
	carriedProtocol = "carried/1"

	carryAsk   = 20
	carryTake  = 21
	carryOffer = 22
	maxCarry   = 256
	tokenBytes = 16

	// carryWait is how long the relay waits for the other side, and either side for the relay.
	carryWait    = 5 * time.Second
	carryPerPeer = 16 // at a time, in both roles together
	carryAll     = relayAllCircuits
)

type carryMessage struct {
	Token []byte  `cbor:"1,keyasint,omitempty"`
	Peer  peer.ID `cbor:"2,keyasint,omitempty"`
}

// decodeCarry reads the payload of a frame of one of the three types.
func decodeCarry(typ uint8, b []byte) (carryMessage, error) {
	var m carryMessage
	if err := decMode.Unmarshal(b, &m); err != nil {
		return carryMessage{}, fmt.Errorf("carry: %w", err)
	}
	if hasToken := typ != carryAsk; hasToken != (len(m.Token) == tokenBytes) {
		return carryMessage{}, fmt.Errorf("carry: token of %d bytes", len(m.Token))
	}
	if hasPeer := typ != carryTake; hasPeer != (m.Peer != "") || len(m.Peer) > maxID {
		return carryMessage{}, fmt.Errorf("carry: peer id of %d bytes", len(m.Peer))
	}
	return m, nil
}

func sendCarry(c Conn, typ uint8, m carryMessage) error {
	b, err := encMode.Marshal(m)
	if err != nil {
		return err
	}
	return NewFrameWriter(c, maxCarry).Write(Frame{Type: typ, Payload: b})
}

// carries is the relay's part.
type carries struct {
	s             *relayService
	perPeer, most int

	mu      sync.Mutex // guards what follows
	waiting map[[tokenBytes]byte]*carriage
	open    map[peer.ID]int // of a peer, in both roles
	all     int
}

// carriage is a lane to be carried, while its listener has not come.
type carriage struct {
	to   peer.ID
	came chan Conn     // capacity 1
	done chan struct{} // closed at the end
}

func newCarries(s *relayService) *carries {
	return &carries{s: s, perPeer: carryPerPeer, most: carryAll,
		waiting: make(map[[tokenBytes]byte]*carriage), open: make(map[peer.ID]int)}
}

// serve is the handler of carry/1.
func (cs *carries) serve(p *Peer, c Conn) {
	if c.SetDeadline(time.Now().Add(2*carryWait)) != nil {
		return
	}
	f, err := NewFrameReader(c, maxCarry).Next()
	var m carryMessage
	switch {
	case err != nil:
		err = wireErr(err)
	case f.Type == carryAsk || f.Type == carryTake:
		m, err = decodeCarry(f.Type, f.Payload)
	default:
		err = fmt.Errorf("%w: type %d", ErrFrame, f.Type)
	}
	switch {
	case err != nil:
		cs.s.h.cfg.Logger.Debug("lane not carried", "peer", p.ID, "err", err)
	case f.Type == carryAsk:
		cs.carry(p, c, m.Peer)
	default:
		cs.take(p, c, [tokenBytes]byte(m.Token))
	}
}

// carry connects a dialler with the peer to.
func (cs *carries) carry(p *Peer, c Conn, to peer.ID) {
	w := NewFrameWriter(c, maxCarry)
	refuse := func(v verdict) {
		cs.s.refused.Add(1)
		sendVerdict(w, v)
	}
	if p.ID == to || !cs.s.AllowConnect(p.ID, nil, to) {
		refuse(verdict{"peer", "a member that is connected", to.String()})
		return
	}
	var token [tokenBytes]byte
	rand.Read(token[:])
	g := &carriage{to: to, came: make(chan Conn, 1), done: make(chan struct{})}
	if !cs.enter(token, g, p.ID) {
		refuse(verdict{"carried lanes", fmt.Sprintf("at most %d of a peer", cs.perPeer), "one more"})
		return
	}
	defer cs.leave(token, g, p.ID)
	other, err := cs.call(token, g, p.ID)
	if err != nil {
		refuse(verdict{"peer", "a member that comes", clip(printable(err.Error()))})
		return
	}
	err = errors.Join(sendVerdict(NewFrameWriter(other, maxCarry), verdict{}), sendVerdict(w, verdict{}),
		c.SetDeadline(time.Time{}), other.SetDeadline(time.Time{}))
	if err == nil {
		cs.splice(c, other)
	}
}

func (cs *carries) enter(token [tokenBytes]byte, g *carriage, from peer.ID) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.all >= cs.most || cs.open[from] >= cs.perPeer || cs.open[g.to] >= cs.perPeer {
		return false
	}
	cs.all++
	cs.open[from]++
	cs.open[g.to]++
	cs.waiting[token] = g
	return true
}

func (cs *carries) leave(token [tokenBytes]byte, g *carriage, from peer.ID) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.waiting, token)
	cs.all--
	for _, id := range []peer.ID{from, g.to} {
		if cs.open[id]--; cs.open[id] == 0 {
			delete(cs.open, id)
		}
	}
	close(g.done)
}

// call tells the listener that it is asked for, and waits until it has come.
func (cs *carries) call(token [tokenBytes]byte, g *carriage, from peer.ID) (Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), carryWait)
	defer cancel()
	c, err := cs.s.h.OpenStream(ctx, g.to, carriedProtocol)
	if err != nil {
		return nil, err
	}
	err = c.SetDeadline(time.Now().Add(carryWait))
	if err == nil {
		err = sendCarry(c, carryOffer, carryMessage{token[:], from})
	}
	c.Close() // whose error may be that the peer has closed already
	if err != nil {
		return nil, err
	}
	select {
	case other := <-g.came:
		return other, nil
	case <-ctx.Done():
		return nil, errors.New("it did not come")
	}
}

// take brings a listener to its dialler.
func (cs *carries) take(p *Peer, c Conn, token [tokenBytes]byte) {
	cs.mu.Lock()
	g := cs.waiting[token]
	if g != nil && g.to == p.ID {
		delete(cs.waiting, token) // so it comes once
	}
	cs.mu.Unlock()
	if g == nil || g.to != p.ID {
		sendVerdict(NewFrameWriter(c, maxCarry), verdict{"token", "one that was offered", "another, or late"})
		return
	}
	g.came <- c
	<-g.done
}

// splice passes on what comes, until one side ends.
func (cs *carries) splice(a, b Conn) {
	cs.s.circuits.Add(1)
	defer cs.s.circuits.Add(-1)
	pass := func(to, from Conn) {
		defer to.Close()
		defer from.Close()
		buf := make([]byte, relayBuffer)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				cs.s.carried.Add(int64(n))
				if _, err := to.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { pass(a, b) })
	pass(b, a)
	wg.Wait()
}

// dialCarried opens a lane to a peer by way of the relay through which it is connected.
func (s *laneServer) dialCarried(ctx context.Context, p *Peer, proto string) (Conn, error) {
	relay, err := relayOf(p.Addr)
	if err != nil {
		return nil, err
	}
	c, err := s.h.OpenLane(ctx, relay, carryProtocol)
	if err != nil {
		return nil, fmt.Errorf("lane to the relay: %w", err)
	}
	if !c.Lane() {
		c.Close()
		return nil, errors.New("the relay is not reached by a lane")
	}
	err = s.askRelay(c, carryAsk, carryMessage{Peer: p.ID})
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("relay %s: %w", relay, err)
	}
	lane, err := s.request(ctx, carriedConn{c}, p, proto)
	if err != nil {
		return nil, err // not lane, which is no nil Conn
	}
	return lane, nil
}

// askRelay sends the first frame of carry/1 and reads the verdict.
func (s *laneServer) askRelay(c Conn, typ uint8, m carryMessage) error {
	err := c.SetDeadline(time.Now().Add(2 * carryWait))
	if err == nil {
		err = sendCarry(c, typ, m)
	}
	if err == nil {
		err = readAccepted(NewFrameReader(c, maxPreface), c.Remote())
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	return err
}

// serveCarried is the handler of carried/1: a relay says that a peer wants a lane.
func (h *Host) serveCarried(relay *Peer, c Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*carryWait)
	defer cancel()
	if c.SetDeadline(time.Now().Add(carryWait)) != nil {
		return
	}
	payload, err := nextOfType(NewFrameReader(c, maxCarry), carryOffer)
	c.Close()
	var m carryMessage
	if err == nil {
		m, err = decodeCarry(carryOffer, payload)
	}
	if err == nil && h.lanes == nil {
		err = errors.New("this node takes no lanes")
	}
	if err != nil {
		h.refused.note("carried lane refused", relay.ID.String(), relay.Addr, err)
		return
	}
	select {
	case h.lanes.halfOpen <- struct{}{}:
	default:
		return
	}
	lane, p, handler, err := h.lanes.takeCarried(ctx, relay.ID, m)
	<-h.lanes.halfOpen
	if err != nil {
		h.refused.note("carried lane refused", relay.ID.String(), relay.Addr, err)
		return
	}
	defer lane.Close()
	handler(p, lane)
}

// takeCarried fetches a lane from the relay, once the peer that wants it has passed the hello.
func (s *laneServer) takeCarried(ctx context.Context, relay peer.ID, offer carryMessage) (*laneConn, *Peer, Handler, error) {
	if _, err := s.h.peers.await(ctx, offer.Peer); err != nil {
		return nil, nil, nil, err
	}
	c, err := s.h.OpenLane(ctx, relay, carryProtocol)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := s.askRelay(c, carryTake, carryMessage{Token: offer.Token}); err != nil {
		c.Close()
		return nil, nil, nil, err
	}
	return s.admit(ctx, carriedConn{c})
}

// relayOf is the relay in a circuit's address.
func relayOf(addr string) (peer.ID, error) {
	a, err := ma.NewMultiaddr(addr)
	if err != nil {
		return "", err
	}
	var id string
	for _, part := range a {
		switch part.Protocol().Code {
		case ma.P_P2P:
			id = part.Value()
		case ma.P_CIRCUIT:
			return peer.Decode(id)
		}
	}
	return "", errors.New("the peer is not connected through a relay")
}

// carriedConn is what a relay passes on as a net.Conn, below a lane.
type carriedConn struct{ Conn }

func (c carriedConn) LocalAddr() net.Addr  { return carriedAddr(c.Remote()) }
func (c carriedConn) RemoteAddr() net.Addr { return carriedAddr(c.Remote()) }

// carriedAddr is the relay.
type carriedAddr peer.ID

func (a carriedAddr) Network() string { return "relay" }
func (a carriedAddr) String() string  { return peer.ID(a).String() }
