package p2p

import (
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// Head start of TCP on a local network and to a relay.
const (
	lanQUICDelay   = 100 * time.Millisecond
	relayQUICDelay = 500 * time.Millisecond
)

// rankDials prefers TCP where it costs less than QUIC: on a local network, a third of the
// CPU time and a quarter of the latency, and to a relay, which can carry twice as much for
// others then. Elsewhere libp2p's order, QUIC first, holds. relays are IP addresses.
func rankDials(addrs []ma.Multiaddr, relays []string) []network.AddrDelay {
	var ranked []network.AddrDelay
	var rest []ma.Multiaddr
	for _, a := range addrs {
		ip, _ := firstIP(a)
		delay := lanQUICDelay
		if slices.Contains(relays, ip) {
			delay = relayQUICDelay
		} else if !manet.IsPrivateAddr(a) {
			delay = 0
		}
		_, isTCP := protocolOf(a, ma.P_TCP)
		switch {
		case delay == 0 || isCircuit(a):
			rest = append(rest, a)
		case isTCP:
			ranked = append(ranked, network.AddrDelay{Addr: a})
		default:
			ranked = append(ranked, network.AddrDelay{Addr: a, Delay: delay})
		}
	}
	return append(ranked, swarm.DefaultDialRanker(rest)...)
}

// ipsOf are the IP addresses of peers.
func ipsOf(list []peer.AddrInfo) []string {
	var out []string
	for _, ai := range list {
		for _, a := range ai.Addrs {
			if ip, ok := firstIP(a); ok {
				out = append(out, ip)
			}
		}
	}
	return out
}
