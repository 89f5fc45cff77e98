package p2p

import (
	"context"

	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
)

// gated is the libp2p host for protocols that libp2p brings and that choose their peers
// themselves: the DHT, gossip. Their streams, too, come from and go to ready peers only.
type gated struct {
	host.Host
	h *Host
}

// Connect passes the gate with a peer.
func (g gated) Connect(ctx context.Context, ai peer.AddrInfo) error {
	if g.h.peers.get(ai.ID) != nil {
		return nil
	}
	_, err := g.h.Hello(ctx, ai)
	return err
}

// NewStream opens a stream to a ready peer, and connects to one that is not.
func (g gated) NewStream(ctx context.Context, id peer.ID, protocols ...protocol.ID) (network.Stream, error) {
	if noDial, _ := network.GetNoDial(ctx); noDial {
		if _, err := g.h.peers.await(ctx, id); err != nil {
			return nil, err
		}
	} else if err := g.Connect(ctx, peer.AddrInfo{ID: id}); err != nil {
		return nil, err
	}
	return g.Host.NewStream(network.WithAllowLimitedConn(network.WithNoDial(ctx, "gated"), "gated"), id, protocols...)
}

func (g gated) SetStreamHandler(id protocol.ID, handler network.StreamHandler) {
	g.Host.SetStreamHandler(id, g.admit(handler))
}

func (g gated) SetStreamHandlerMatch(id protocol.ID, match func(protocol.ID) bool, handler network.StreamHandler) {
	g.Host.SetStreamHandlerMatch(id, match, g.admit(handler))
}

// admit keeps the streams of who has not passed the hello from a handler.
func (g gated) admit(handler network.StreamHandler) network.StreamHandler {
	return func(s network.Stream) {
		_, leave, err := g.h.admitStream(s)
		if err != nil {
			return
		}
		defer leave()
		handler(s)
	}
}
