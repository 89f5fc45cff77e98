// Package sim makes p2p hosts on a simulated network of packets, for tests under
// testing/synctest: the real code, connections and handshakes, with time and lines made up. It is
// not for programs.
package sim

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/x/simlibp2p"
	"github.com/marcopolo/simnet"

	"kvasird/p2p"
)

// Network is a simulated network. Every host has an address and a line of its own. It is safe for
// concurrent use.
type Network struct {
	net   *simnet.Simnet
	line  simnet.NodeBiDiLinkSettings
	hosts atomic.Int32
}

// New returns a network in which a packet takes oneWay, and lines carry so many bits per second.
// Close it after its hosts.
func New(oneWay time.Duration, bitsPerSecond int) *Network {
	link := simnet.LinkSettings{BitsPerSecond: bitsPerSecond}
	n := &Network{net: &simnet.Simnet{LatencyFunc: simnet.StaticLatency(oneWay)},
		line: simnet.NodeBiDiLinkSettings{Downlink: link, Uplink: link}}
	n.net.Start()
	return n
}

// Close ends the network.
func (n *Network) Close() { n.net.Close() }

// Host returns a host that is not started, and the address at which others reach it then.
func (n *Network) Host(cfg p2p.Config) (h *p2p.Host, addr string, err error) {
	listen := fmt.Sprintf("/ip4/%s/udp/8000/quic-v1", simnet.IntToPublicIPv4(int(n.hosts.Add(1))))
	h, err = p2p.NewOn(cfg, func(opts ...libp2p.Option) (host.Host, error) {
		return libp2p.New(append(opts,
			libp2p.ListenAddrStrings(listen),
			simlibp2p.QUICSimnet(n.net, n.line),
			// It waits for what synctest does not count as time.
			libp2p.DisableIdentifyAddressDiscovery(),
			libp2p.ResourceManager(&network.NullResourceManager{}))...)
	})
	if err != nil {
		return nil, "", err
	}
	return h, listen + "/p2p/" + h.ID().String(), nil
}
