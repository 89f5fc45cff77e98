package p2p

import (
	"errors"
	"fmt"
	"slices"

	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/host/observedaddrs"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/protocol/holepunch"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// puncher connects nodes behind NAT directly (DCUtR). The service that libp2p starts by
// itself punches once, when a relayed connection comes in, and not at all when one of the
// two did not know its public address yet. This one can be asked again.
type puncher struct {
	node     host.Host
	own      func() []ma.Multiaddr // addresses of this node
	observed *observedaddrs.Manager
	service  *holepunch.Service
}

func newPuncher(node host.Host, tracer *outlook) (*puncher, error) {
	basic, ok := node.(interface {
		IDService() identify.IDService
		AllAddrs() []ma.Multiaddr
	})
	if !ok {
		return nil, fmt.Errorf("libp2p host %T does not tell its addresses", node)
	}
	observed, err := observedaddrs.NewManager(node.EventBus(), node.Network())
	if err != nil {
		return nil, err
	}
	p := &puncher{node: node, own: basic.AllAddrs, observed: observed}
	if p.service, err = holepunch.NewService(node, basic.IDService(), p.addrs, holepunch.WithTracer(tracer)); err != nil {
		return nil, errors.Join(err, observed.Close())
	}
	observed.Start(node.Network())
	return p, nil
}

// addrs are the public addresses of this node, also those that only one peer has seen.
func (p *puncher) addrs() []ma.Multiaddr {
	addrs := ma.Unique(append(p.own(), p.observed.Addrs(1)...))
	return slices.DeleteFunc(addrs, func(a ma.Multiaddr) bool { return !manet.IsPublicAddr(a) })
}

// punch makes holes for the two sides of a relayed connection, if it can. The side that
// was dialled begins; the other has nothing to do.
func (p *puncher) punch(c network.Conn) error {
	if c.Stat().Direction != network.DirInbound || !slices.Contains(p.node.Mux().Protocols(), holepunch.Protocol) {
		return nil
	}
	clearBackoff(p.node, c.RemotePeer())
	return p.service.DirectConnect(c.RemotePeer())
}

// clearBackoff has a dial tried that would be refused because one failed a moment ago.
func clearBackoff(node host.Host, id peer.ID) {
	if sw, ok := node.Network().(*swarm.Swarm); ok {
		sw.Backoff().Clear(id)
	}
}

func (p *puncher) close() error { return errors.Join(p.service.Close(), p.observed.Close()) }
