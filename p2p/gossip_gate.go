package p2p

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pubsub "github.com/libp2p/go-libp2p-pubsub"
	pb "github.com/libp2p/go-libp2p-pubsub/pb"
	bus "github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"golang.org/x/time/rate"
)

const (
	maxSubscriptions = 2 * maxTopics // topics of one peer
	maxPaces         = 4096          // peers in one table of rates
)

// gossipHost is the libp2p host as gossipsub sees it: the peers are the ready ones, they
// appear when they become ready, and streams of others end before it reads them.
type gossipHost struct {
	gated
	g *gossip
}

func (n *gossipHost) EventBus() bus.Bus        { return n.g.own }
func (n *gossipHost) Network() network.Network { return &gossipNet{n.Host.Network(), n.g.h.peers} }

func (n *gossipHost) SetStreamHandler(id protocol.ID, handler network.StreamHandler) {
	n.Host.SetStreamHandler(id, func(s network.Stream) { n.g.admit(s, handler) })
}

func (n *gossipHost) NewStream(ctx context.Context, id peer.ID, ids ...protocol.ID) (network.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, n.g.h.cfg.HelloTimeout)
	defer cancel()
	return n.gated.NewStream(network.WithNoDial(ctx, "gossip"), id, ids...)
}

// gossipNet shows the ready peers only.
type gossipNet struct {
	network.Network
	peers *registry
}

func (n *gossipNet) Peers() []peer.ID {
	var out []peer.ID
	for _, p := range n.peers.list() {
		out = append(out, p.ID)
	}
	return out
}

func (n *gossipNet) Connectedness(id peer.ID) network.Connectedness {
	if n.peers.get(id) == nil {
		return network.NotConnected
	}
	return network.Connected
}

// admit hands the stream of a ready peer to gossipsub.
func (g *gossip) admit(s network.Stream, handler network.StreamHandler) {
	id := s.Conn().RemotePeer()
	_, leave, err := g.h.admitStream(s)
	if errors.Is(err, ErrNotAdmitted) {
		g.count("stranger")
	}
	if err != nil {
		return
	}
	defer leave()
	gs := &gossipStream{Stream: s, g: g}
	g.mu.Lock()
	before := g.streams[id]
	g.streams[id] = gs
	g.mu.Unlock()
	if before != nil {
		before.replace()
	}
	handler(gs)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.streams[id] == gs {
		delete(g.streams, id)
	}
}

// gossipStream is an inbound stream of gossipsub, which resets one when it can not read
// what came, but does not say so. A reset while nothing else was wrong is that.
type gossipStream struct {
	network.Stream
	g *gossip

	mu   sync.Mutex // guards over
	over bool       // the stream has ended, or another took its place
}

func (s *gossipStream) replace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
}

func (s *gossipStream) Read(b []byte) (int, error) {
	n, err := s.Stream.Read(b)
	if err != nil {
		s.replace()
	}
	return n, err
}

func (s *gossipStream) Reset() error {
	s.mu.Lock()
	over := s.over
	s.over = true
	s.mu.Unlock()
	if _, err := s.g.h.up(); !over && err == nil {
		s.g.count("malformed")
		s.g.h.Blame(s.Conn().RemotePeer(), Malformed, "gossip that can not be read")
	}
	return s.Stream.Reset()
}

// inspect judges a message of gossipsub as a whole, before its parts are looked at.
func (g *gossip) inspect(from peer.ID, rpc *pubsub.RPC) error {
	if g.h.peers.get(from) == nil {
		g.count("stranger")
		return ErrNotAdmitted
	}
	if !g.rpcs.allow(from, time.Now()) {
		g.count("too often")
		g.h.Blame(from, Flood, "gossip messages")
		return errors.New("too many messages")
	}
	for _, m := range rpc.GetPublish() {
		if m.Signature != nil || m.From != nil || m.Seqno != nil || m.Key != nil {
			g.count("malformed")
			g.h.Blame(from, Malformed, "gossip with a signature outside of the envelope")
			return errors.New("unexpected signature")
		}
		if g.topic(m.GetTopic()) == nil {
			g.count("unjoined topic")
			g.h.Blame(from, Flood, "gossip on a topic that was not joined")
			return errors.New("topic was not joined")
		}
	}
	return nil
}

// CanSubscribe is for own subscriptions.
func (g *gossip) CanSubscribe(topic string) bool { return topicPattern.MatchString(topic) }

// FilterIncomingSubscriptions bounds the topics that gossipsub keeps of a peer.
func (g *gossip) FilterIncomingSubscriptions(from peer.ID, opts []*pb.RPC_SubOpts) ([]*pb.RPC_SubOpts, error) {
	g.mu.Lock()
	subs := g.subs[from]
	if subs == nil {
		subs = make(map[string]struct{})
		g.subs[from] = subs
	}
	fault := ""
	for _, o := range opts {
		if !topicPattern.MatchString(o.GetTopicid()) {
			fault = "subscription to a topic with a wrong name"
			break
		}
		if o.GetSubscribe() {
			subs[o.GetTopicid()] = struct{}{}
		}
	}
	if fault == "" && len(subs) > maxSubscriptions {
		fault = fmt.Sprintf("over %d subscriptions", maxSubscriptions)
	}
	g.mu.Unlock()
	if fault == "" {
		return opts, nil
	}
	g.count("malformed")
	g.h.Blame(from, Malformed, fault)
	return nil, errors.New(fault)
}

// PeerReady makes gossipsub open its stream, and pulls what the peer knows.
func (g *gossip) PeerReady(p *Peer) {
	g.meet(p.ID)
	if g.stays[p.ID] != p.stay {
		g.stays[p.ID] = p.stay
		g.pullTwice(p)
	}
}

// PeerLost forgets what belonged to the peer's connection.
func (g *gossip) PeerLost(p *Peer) {
	delete(g.stays, p.ID)
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.subs, p.ID)
}

// meet tells gossipsub of a ready peer; that it knows it already does no harm.
func (g *gossip) meet(id peer.ID) {
	g.ready.Emit(bus.EvtPeerProtocolsUpdated{Peer: id, Added: []protocol.ID{g.meshProtocol()}})
}

// paces are rates at which peers may do something. They outlast connections.
type paces struct {
	limit rate.Limit
	burst int

	mu    sync.Mutex // guards peers
	peers map[peer.ID]*rate.Limiter
}

func newPaces(limit rate.Limit, burst int) *paces {
	return &paces{limit: limit, burst: burst, peers: make(map[peer.ID]*rate.Limiter)}
}

func (p *paces) allow(id peer.ID, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.peers[id]
	if l == nil {
		if len(p.peers) >= maxPaces {
			p.forgetLocked(now)
		}
		l = rate.NewLimiter(p.limit, p.burst)
		p.peers[id] = l
	}
	return l.AllowN(now, 1)
}

// forgetLocked drops who was within its rate of late, or else all.
func (p *paces) forgetLocked(now time.Time) {
	for id, l := range p.peers {
		if l.TokensAt(now) >= float64(p.burst) {
			delete(p.peers, id)
		}
	}
	if len(p.peers) >= maxPaces {
		clear(p.peers)
	}
}
