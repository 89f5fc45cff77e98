package p2p

import (
	"net/netip"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/protocol"
	rcmgr "github.com/libp2p/go-libp2p/p2p/host/resource-manager"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/proto"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/relay"
	"github.com/libp2p/go-libp2p/p2p/protocol/identify"
	"github.com/libp2p/go-libp2p/x/rate"
)

// newResourceManager replaces libp2p's limits where they do not suit a swarm: 8
// connections per address and 0.2 new ones per second would keep out a household or a
// company behind one address, with nothing but "EOF" on the other side.
// A relay needs a stream more to a peer for each circuit there.
func newResourceManager(l Limits, isRelay bool) (network.ResourceManager, error) {
	scaling := rcmgr.DefaultLimits
	libp2p.SetDefaultServiceLimits(&scaling)
	conns := rcmgr.LimitVal(l.Conns)
	streams := rcmgr.LimitVal(l.StreamsPerPeer)
	memory := rcmgr.LimitVal64(l.MemoryPerPeer)
	perPeer := rcmgr.ResourceLimits{
		Streams: 2 * streams, StreamsInbound: streams, StreamsOutbound: streams,
		Memory: memory,
	}
	whole := rcmgr.ResourceLimits{
		Streams: conns * 16, StreamsInbound: conns * 16, StreamsOutbound: conns * 16,
		Conns: conns, ConnsInbound: conns, ConnsOutbound: conns, FD: conns,
		Memory: rcmgr.Unlimited64, // the sum is bounded by what each peer may take
	}
	partial := rcmgr.PartialLimitConfig{
		System: whole,
		Transient: rcmgr.ResourceLimits{
			Streams: conns, StreamsInbound: conns, StreamsOutbound: conns,
			Conns: conns, ConnsInbound: conns, ConnsOutbound: conns, FD: conns,
		},
		PeerDefault:         perPeer,
		ProtocolPeerDefault: perPeer,
		ProtocolDefault:     whole,
	}
	allowIdentify(&partial, conns)
	if isRelay {
		allowCircuits(&partial)
	}
	partial.PeerDefault.Conns, partial.PeerDefault.ConnsInbound, partial.PeerDefault.ConnsOutbound = 16, 8, 8
	limiter := rcmgr.NewFixedLimiter(partial.Build(scaling.AutoScale()))
	return rcmgr.NewResourceManager(limiter,
		rcmgr.WithMetricsDisabled(),
		rcmgr.WithLimitPerSubnet(
			[]rcmgr.ConnLimitPerSubnet{{PrefixLength: 32, ConnCount: l.ConnsPerIP}},
			[]rcmgr.ConnLimitPerSubnet{{PrefixLength: 56, ConnCount: l.ConnsPerIP}}),
		rcmgr.WithConnRateLimiters(connRate(l)))
}

// connRate lets all peers behind one address come back at once after a router restart,
// and then a few each second.
func connRate(l Limits) *rate.Limiter {
	perIP := rate.Limit{RPS: float64(l.ConnsPerIP) / 16, Burst: 2 * l.ConnsPerIP}
	return &rate.Limiter{
		NetworkPrefixLimits: []rate.PrefixLimit{
			{Prefix: netip.MustParsePrefix("127.0.0.0/8")},
			{Prefix: netip.MustParsePrefix("::1/128")},
		},
		SubnetRateLimiter: rate.SubnetLimiter{
			IPv4SubnetLimits: []rate.SubnetLimit{{PrefixLength: 32, Limit: perIP}},
			IPv6SubnetLimits: []rate.SubnetLimit{{PrefixLength: 56, Limit: perIP}},
			GracePeriod:      time.Minute,
		},
	}
}

// allowIdentify lets as many peers as may connect exchange their identities at the same
// time, as they do after an outage.
func allowIdentify(p *rcmgr.PartialLimitConfig, conns rcmgr.LimitVal) {
	all := streamLimits(conns, rcmgr.Unlimited64)
	p.Service = map[string]rcmgr.ResourceLimits{identify.ServiceName: all}
	p.Protocol = map[protocol.ID]rcmgr.ResourceLimits{identify.ID: all, identify.IDPush: all}
}

// allowCircuits lets a relay serve what relay.go promises: each circuit takes a stream from
// one peer, a stream to another, and two buffers.
func allowCircuits(p *rcmgr.PartialLimitConfig) {
	all := streamLimits(relayAllCircuits, 2*relayBuffer*relayAllCircuits)
	each := streamLimits(relayCircuits, p.PeerDefault.Memory)
	p.Service[relay.ServiceName] = all
	p.ServicePeer = map[string]rcmgr.ResourceLimits{relay.ServiceName: each}
	p.ProtocolPeer = make(map[protocol.ID]rcmgr.ResourceLimits)
	for _, id := range []protocol.ID{proto.ProtoIDv2Hop, proto.ProtoIDv2Stop} {
		p.Protocol[id] = streamLimits(relayAllCircuits, rcmgr.Unlimited64)
		p.ProtocolPeer[id] = each
	}
	p.PeerDefault.Streams += 2 * relayCircuits
	p.PeerDefault.StreamsInbound += relayCircuits
	p.PeerDefault.StreamsOutbound += relayCircuits
}

// streamLimits allows n streams each way.
func streamLimits(n rcmgr.LimitVal, memory rcmgr.LimitVal64) rcmgr.ResourceLimits {
	return rcmgr.ResourceLimits{Streams: 2 * n, StreamsInbound: n, StreamsOutbound: n, Memory: memory}
}
