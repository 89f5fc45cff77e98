package p2p

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// symmetricAfter is how many holes must not have been punched, and none punched, before a
// NAT is called symmetric without better evidence.
const symmetricAfter = 3

// Report says in words how a node is connected, and if it is not, why.
type Report struct {
	Reach string // whether others can connect to this node, and how that is known
	NAT   string // what NAT there is before it
	MDNS  string // whether peers are found on the local network; why not
	DHT   string

	// Addresses of this node, multiaddrs: where it listens, where peers see it from,
	// what was configured to be told, and circuits at relays.
	Listening, Observed, Announced, Relayed []string

	DHTPeers     int // in the routing table
	DirectPeers  int
	RelayedPeers int
	Bootstrap    []KeptPeer
	Relays       []KeptPeer    // configured ones, and those in use
	Unmet        []KeptPeer    // peers that were found and not met, at most 32
	Serving      *RelayTraffic // nil: this node is no relay
	Advice       []string      // what to do about it, most urgent first
}

// KeptPeer is how it stands with a node to which this one connects, or tries to.
type KeptPeer struct {
	ID    peer.ID
	Addrs []string
	State State
	Since time.Time // of State; zero where it is not noted
	Err   string    // why it is not connected; "" when it is
	Holds bool      // it is a relay at which this node has a reservation
}

// RelayTraffic is what this node does as a relay.
type RelayTraffic struct {
	Reservations, Circuits int   // open
	Refused                int64 // requests, since the start
	Bytes                  int64 // carried, since the start
}

// Report describes the connections of a started host.
func (h *Host) Report() Report {
	node, err := h.up()
	if err != nil {
		return Report{Reach: err.Error()}
	}
	r := Report{DHT: "off", MDNS: "off", Announced: h.cfg.Announce}
	r.Listening, r.Observed = ownAddrs(node, h.cfg.announce)
	for _, p := range h.peers.list() {
		if p.Path() == Relayed {
			r.RelayedPeers++
		} else {
			r.DirectPeers++
		}
	}
	h.outlook.describe(&r, &h.cfg)
	if h.dht != nil {
		r.DHTPeers = h.dht.RoutingTable().Size()
		r.DHT = fmt.Sprintf("on: %d peers in the table", r.DHTPeers)
	}
	if h.mdns != nil {
		r.MDNS = h.mdns.describe()
	}
	if s := h.relay; s != nil {
		r.Serving = &RelayTraffic{int(s.reservations.Load()), int(s.circuits.Load()), s.refused.Load(), s.carried.Load()}
	}
	r.Unmet = h.meeter.unmet()
	r.Bootstrap, r.Relays = h.contacts(h.cfg.bootstrap), h.contacts(h.cfg.relays)
	if h.taken != nil {
		h.taken.report(&r)
	}
	r.Advice = h.advise(&r)
	return r
}

// ownAddrs are the addresses of the own interfaces, and those that only others can know.
func ownAddrs(node host.Host, announced []ma.Multiaddr) (listening, observed []string) {
	addrs, err := node.Network().InterfaceListenAddresses()
	if err != nil {
		addrs = node.Network().ListenAddresses()
	}
	for _, a := range addrs {
		if !isCircuit(a) {
			listening = append(listening, a.String())
		}
	}
	all, ok := node.(interface{ AllAddrs() []ma.Multiaddr })
	if !ok {
		return listening, nil
	}
	for _, a := range all.AllAddrs() {
		s := a.String()
		if !slices.Contains(listening, s) && !slices.ContainsFunc(announced, a.Equal) {
			observed = append(observed, s)
		}
	}
	return listening, observed
}

// contacts are the kept peers of a list with their states.
func (h *Host) contacts(list []peer.AddrInfo) []KeptPeer {
	var out []KeptPeer
	for _, ai := range list {
		k := h.keeperOf(ai.ID)
		s := k.status()
		c := KeptPeer{ID: ai.ID, State: s.State, Since: s.Since}
		for _, a := range ai.Addrs {
			c.Addrs = append(c.Addrs, a.String())
		}
		if h.peers.get(ai.ID) != nil {
			c.State = Connected
		} else if s.Err != nil {
			c.Err = s.Err.Error()
		}
		out = append(out, c)
	}
	return out
}

// describe fills in what depends on the outlook.
func (o *outlook) describe(r *Report, cfg *Config) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, a := range o.relayed {
		r.Relayed = append(r.Relayed, a.String())
	}
	r.NAT = o.natLocked()
	switch {
	case cfg.Relay && cfg.Reach == ReachAuto:
		r.Reach = "public, since this node is a relay"
	case cfg.Reach != ReachAuto:
		r.Reach = string(cfg.Reach) + ", as configured"
	case len(o.reachable) > 0:
		r.Reach = fmt.Sprintf("public: a peer could connect to %s", o.reachable[0])
	case len(o.unreachable) > 0:
		r.Reach = fmt.Sprintf("private: a peer could not connect to %s", o.unreachable[0])
	case o.reach == network.ReachabilityPublic:
		r.Reach = "public: peers that were asked could connect"
	case o.reach == network.ReachabilityPrivate:
		r.Reach = "private: peers that were asked could not connect"
	default:
		r.Reach = "not known: no peer outside of this network has tried to connect"
	}
	if len(o.relayed) > 0 {
		r.Reach += "; reached through a relay"
	}
}

func (o *outlook) natLocked() string {
	symmetric := false
	for _, kind := range o.nat {
		symmetric = symmetric || kind == network.NATDeviceTypeEndpointDependent
	}
	tries := o.punched + o.notPunched
	switch {
	case symmetric:
		return "symmetric: it shows every peer another port, so that connections through it need a relay"
	case o.punched > 0:
		return fmt.Sprintf("passable: %d of %d attempts to go through it made a direct connection", o.punched, tries)
	case o.notPunched >= symmetricAfter:
		return fmt.Sprintf("symmetric, or behind a firewall: all %d attempts to go through it failed", tries)
	case len(o.nat) > 0:
		return "passable: it shows all peers the same port"
	default:
		return "not known"
	}
}

// advise says what a person could do.
func (h *Host) advise(r *Report) []string {
	var out []string
	alone := r.DirectPeers+r.RelayedPeers == 0
	isUp := func(c KeptPeer) bool { return c.State == Connected }
	if alone && len(r.Bootstrap)+len(h.cfg.peers) == 0 {
		out = append(out, "no peer found: add the address of a node that is always on as bootstrap")
	}
	if len(r.Bootstrap) > 0 && !slices.ContainsFunc(r.Bootstrap, isUp) {
		out = append(out, "no bootstrap is connected: check their addresses, and that a firewall lets connections out")
	}
	if h.mdns != nil && h.mdns.failure() != nil {
		out = append(out, "peers on the local network are not found by themselves: add one of them as bootstrap")
	}
	if h.cfg.Reach == ReachPrivate && len(r.Relayed) == 0 {
		out = append(out, "no relay has taken this node in: add a relay, or let one member with a public address be one")
	}
	if r.RelayedPeers > 0 && strings.HasPrefix(r.NAT, "symmetric") {
		out = append(out, fmt.Sprintf("%d peers are reached through a relay only, which is slower: let the router pass a port on to this node, if you can", r.RelayedPeers))
	}
	return out
}
