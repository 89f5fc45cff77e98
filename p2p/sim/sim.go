// Package sim makes p2p hosts on a network in memory, for tests under testing/synctest: the
// real code above libp2p's transports, with time and lines made up. What costs most of a real
// connection and proves nothing about a swarm, packets and ciphers, is left out, so that a
// thousand hosts fit into one process. It is not for programs.
package sim

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/multiformats/go-multiaddr"

	"kvasird/p2p"
)

// Network is a network in memory. It is safe for concurrent use.
type Network struct {
	oneWay time.Duration
	parts  atomic.Pointer[partition]
	bytes  atomic.Int64

	mu    sync.Mutex // guards what follows
	hosts int
	ports map[string]*port // that listen, by address
}

type partition struct {
	side map[peer.ID]int
	over chan struct{} // closed when another takes its place
}

// New returns a network in which a byte takes oneWay.
func New(oneWay time.Duration) *Network {
	n := &Network{oneWay: oneWay, ports: make(map[string]*port)}
	n.parts.Store(&partition{over: make(chan struct{})})
	return n
}

// Split parts the network: between hosts of different sides nothing arrives, also not that a
// connection ended. A host that side does not name is on side 0; nil heals the network.
func (n *Network) Split(side map[string]int) {
	now := &partition{make(map[peer.ID]int), make(chan struct{})}
	for id, s := range side {
		now.side[peer.ID(id)] = s
	}
	close(n.parts.Swap(now).over)
}

// Bytes returns how many bytes were sent so far on all streams.
func (n *Network) Bytes() int64 { return n.bytes.Load() }

func (n *Network) apart(a, b *port) bool {
	p := n.parts.Load()
	return p.side[a.id] != p.side[b.id]
}

func (n *Network) port(addr multiaddr.Multiaddr) *port {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ports[addr.String()]
}

// Host returns a host that is not started, and the address at which others reach it then.
func (n *Network) Host(cfg p2p.Config) (h *p2p.Host, addr string, err error) {
	n.mu.Lock()
	n.hosts++
	i := n.hosts
	n.mu.Unlock()
	listen, err := multiaddr.NewMultiaddr(fmt.Sprintf("/ip4/52.%d.%d.%d/udp/8000/quic-v1", i>>16&255, i>>8&255, i&255))
	if err != nil {
		return nil, "", err
	}
	open := func(id peer.ID, key crypto.PrivKey, gater connmgr.ConnectionGater) *port {
		return &port{net: n, addr: listen, id: id, key: key.GetPublic(), gater: gater,
			calls: make(chan *conn, 16), closed: make(chan struct{})}
	}
	h, err = p2p.NewOn(cfg, func(opts ...libp2p.Option) (host.Host, error) {
		return libp2p.New(append(opts,
			libp2p.ListenAddrs(listen),
			libp2p.Transport(open),
			// It waits for what synctest does not count as time.
			libp2p.DisableIdentifyAddressDiscovery(),
			libp2p.ResourceManager(&network.NullResourceManager{}))...)
	})
	if err != nil {
		return nil, "", err
	}
	return h, listen.String() + "/p2p/" + h.ID().String(), nil
}
