package p2p

import (
	"slices"

	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

// How far an address is good: on this machine, on one link, or beyond. Nobody elsewhere can
// do anything with the first two, and they say what a network looks like inside.
type scope int

const (
	beyond scope = iota
	onLink
	onMachine
)

// scopeOf is that of the address itself, or of the relay in a circuit's.
func scopeOf(a ma.Multiaddr) scope {
	ip, err := manet.ToIP(a)
	switch {
	case err != nil && len(a) > 0 && a[0].Protocol().Code == ma.P_CIRCUIT: // of no relay: that it takes circuits
		return onMachine
	case err != nil: // a name
		return beyond
	case ip.IsLoopback():
		return onMachine
	case ip.IsLinkLocalUnicast():
		return onLink
	}
	return beyond
}

// tellable are those of the addresses of one node that anybody may be told: none that is good
// on a machine or a link only, unless there are no others. Then nobody from elsewhere is
// connected who could come back.
func tellable(addrs []ma.Multiaddr) []ma.Multiaddr {
	if far := within(beyond, addrs); len(far) > 0 {
		return far
	}
	return addrs
}

// within are the addresses that are good for a peer of that scope: on a link are those
// of the link too, and on the same machine all.
func within(s scope, addrs []ma.Multiaddr) []ma.Multiaddr {
	return slices.DeleteFunc(slices.Clone(addrs), func(a ma.Multiaddr) bool { return scopeOf(a) > s })
}

// toldInDHT are the addresses of another node that this one passes on. A node that is
// itself on its machine alone has its peers there too.
func (h *Host) toldInDHT(addrs []ma.Multiaddr) []ma.Multiaddr {
	if len(within(beyond, h.node.Network().ListenAddresses())) == 0 {
		return addrs
	}
	return within(beyond, addrs)
}
