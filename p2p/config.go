package p2p

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// Config says what a host is and whom it keeps connected to.
type Config struct {
	Identity Identity // required
	Network  string   // network id, part of every protocol id: [a-z0-9._-], 1 to 64 bytes; "": Genesis's
	// Genesis says who may come in. nil: an open network.
	Genesis *Genesis
	Ticket  string // the invitation that this node shows; "": none
	// Revocations is the file in which the newest revocation list is kept. "": none.
	Revocations string
	Pack        string // runtime pack; peers with another one are refused
	Agent       string // program and version, for people
	// Protocols that this node speaks, "name/version". Peers that speak the same name in
	// no common version are refused.
	Protocols []string
	// Capabilities at the start; see Host.SetCapabilities.
	Capabilities Capabilities

	// Listen holds multiaddrs: /ip4/0.0.0.0/tcp/4001, …/udp/4001/quic-v1, …/tcp/4001/ws,
	// …/tcp/443/tls/ws. nil: TCP and QUIC on free ports of 127.0.0.1.
	Listen []string
	// LaneListen is host:port of the lane listener. Peers dial the port at the address
	// where the node is connected, so it must listen there too. "": a free port of
	// 127.0.0.1.
	LaneListen string
	NoLane     bool     // neither listen for lanes nor dial them
	Peers      []string // multiaddrs with /p2p/ID, to be kept connected

	// Bootstrap are nodes by which this one finds others, Relays nodes through which it
	// can be reached when it cannot be directly. Both are multiaddrs with /p2p/ID and are
	// kept connected. This node itself may be among them.
	Bootstrap []string
	Relays    []string
	MDNS      bool // find peers on the local network
	DHT       bool // find peers and providers through other peers; Provide needs it
	// MaxPeers bounds for how many peers this node looks; who comes by itself is let in
	// all the same. 0: 128.
	MaxPeers int
	Remember string // file of good peers, to come back without a bootstrap; "": none

	Reach    Reach    // "": ReachAuto
	Relay    bool     // carry the traffic of members that cannot be reached directly
	Announce []string // multiaddrs under which a proxy passes connections on to this node
	// TLS is for the listeners …/tls/ws, which need a certificate. Its RootCAs, when set,
	// are the authorities of such listeners of others.
	TLS  *tls.Config
	HTTP http.Handler // serves plain HTTP requests that reach a …/ws listener; nil: 404

	// Spin is how long a read on a lane looks at the socket before its goroutine is
	// parked. 0: the default, 50 µs; negative: never.
	Spin         time.Duration
	HelloTimeout time.Duration // for connect, hello, and a lane's opening, each; 0: 10 s
	Limits       Limits
	Logger       *slog.Logger // nil: silent

	peers, bootstrap, relays []peer.AddrInfo
	listen, announce         []ma.Multiaddr
	ticket                   []byte           // as the hello shows it
	now                      func() time.Time // for tickets; nil: time.Now
}

// Reach says whether others can connect to this node.
type Reach string

const (
	ReachAuto    Reach = "auto"    // peers are asked to try
	ReachPublic  Reach = "public"  // they can
	ReachPrivate Reach = "private" // they cannot: behind NAT or a firewall, by relays only
)

// Limits bound what peers can take. Zero values stand for the defaults.
type Limits struct {
	Conns          int   // connections in all, 2048
	ConnsPerIP     int   // connections from one IPv4 address or IPv6 /56, 512: many peers share one
	StreamsPerPeer int   // each way, 256
	MemoryPerPeer  int64 // bytes of flow-control windows, 512 MiB
	LanesPerPeer   int   // inbound, 16
	HalfOpenLanes  int   // inbound handshakes at a time, 64
}

const (
	defaultHelloTimeout = 10 * time.Second
	defaultSpin         = 50 * time.Microsecond
	maxSpin             = 10 * time.Millisecond
	defaultMaxPeers     = 128
)

var (
	networkPattern  = regexp.MustCompile(`^[a-z0-9._-]{1,64}$`)
	protocolPattern = regexp.MustCompile(`^[a-z0-9-]{1,32}/[0-9]{1,5}$`)
)

// validate fills in defaults and refuses what cannot work.
func (c *Config) validate() error {
	if c.Identity.key == nil {
		return errors.New("p2p: identity is missing")
	}
	if err := c.validateMembership(); err != nil {
		return err
	}
	if !networkPattern.MatchString(c.Network) {
		return fmt.Errorf("p2p: network id %q: want 1 to 64 of a-z 0-9 . _ -", c.Network)
	}
	for _, p := range c.Protocols {
		if !protocolPattern.MatchString(p) {
			return fmt.Errorf("p2p: protocol %q: want name/version, as in experts/1", p)
		}
	}
	if c.Spin > maxSpin {
		return fmt.Errorf("p2p: spin of %v: at most %v", c.Spin, maxSpin)
	}
	if c.HelloTimeout < 0 {
		return fmt.Errorf("p2p: hello timeout of %v is negative", c.HelloTimeout)
	}
	if err := c.Limits.validate(); err != nil {
		return err
	}
	c.fillDefaults()
	if err := c.parseAddresses(); err != nil {
		return err
	}
	if err := c.validateReach(); err != nil {
		return err
	}
	hello := c.hello(c.Capabilities, 0)
	_, err := encodeHello(hello)
	if err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	return nil
}

func (c *Config) fillDefaults() {
	if c.Listen == nil {
		c.Listen = []string{"/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"}
	}
	if c.LaneListen == "" {
		c.LaneListen = "127.0.0.1:0"
	}
	if c.Spin == 0 {
		c.Spin = defaultSpin
	}
	if c.HelloTimeout == 0 {
		c.HelloTimeout = defaultHelloTimeout
	}
	if c.Reach == "" {
		c.Reach = ReachAuto
	}
	setDefault(&c.MaxPeers, defaultMaxPeers)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

// validateReach refuses what contradicts itself.
func (c *Config) validateReach() error {
	switch c.Reach {
	case ReachAuto, ReachPublic, ReachPrivate:
	default:
		return fmt.Errorf("p2p: reach %q: want %q, %q or %q", c.Reach, ReachAuto, ReachPublic, ReachPrivate)
	}
	if c.Relay && c.Reach == ReachPrivate {
		return errors.New("p2p: a node that cannot be reached cannot be a relay: set reach to public, or relay to false")
	}
	if c.MaxPeers < 0 {
		return fmt.Errorf("p2p: at most %d peers: want a positive number", c.MaxPeers)
	}
	web := false
	for _, a := range c.listen {
		_, isWS := protocolOf(a, ma.P_WS)
		_, isWSS := protocolOf(a, ma.P_WSS)
		_, isTLS := protocolOf(a, ma.P_TLS)
		web = web || isWS || isWSS
		if (isWSS || isWS && isTLS) && c.TLS == nil {
			return fmt.Errorf("p2p: listen address %s needs a TLS certificate: give one, or listen on …/ws behind a proxy that has one", a)
		}
	}
	if c.HTTP != nil && !web {
		return errors.New("p2p: plain HTTP is served on websocket listeners only: add one like /ip4/0.0.0.0/tcp/443/tls/ws")
	}
	return nil
}

func protocolOf(a ma.Multiaddr, code int) (string, bool) {
	v, err := a.ValueForProtocol(code)
	return v, err == nil
}

// isCircuit reports whether a goes through a relay.
func isCircuit(a ma.Multiaddr) bool {
	_, circuit := protocolOf(a, ma.P_CIRCUIT)
	return circuit
}

func (c *Config) parseAddresses() error {
	for _, s := range c.Listen {
		a, err := ma.NewMultiaddr(s)
		if err != nil {
			return fmt.Errorf("p2p: listen address %q: %v: want one like /ip4/0.0.0.0/tcp/4001", s, err)
		}
		c.listen = append(c.listen, a)
	}
	for _, s := range c.Announce {
		a, err := ma.NewMultiaddr(s)
		if err != nil {
			return fmt.Errorf("p2p: announced address %q: %v: want one like /dns4/example.org/tcp/443/tls/ws", s, err)
		}
		c.announce = append(c.announce, a)
	}
	for _, s := range c.Peers {
		if ai, err := ParsePeer(s); err == nil && ai.ID == c.Identity.id {
			return fmt.Errorf("p2p: peer %q is this node itself", s)
		}
	}
	var err error
	if c.peers, err = c.parsePeers(c.Peers); err != nil {
		return err
	}
	if c.bootstrap, err = c.parsePeers(c.Bootstrap); err != nil {
		return err
	}
	c.relays, err = c.parsePeers(c.Relays)
	return err
}

// parsePeers reads addresses, puts those of one peer together, and leaves this node out.
func (c *Config) parsePeers(list []string) ([]peer.AddrInfo, error) {
	var out []peer.AddrInfo
	for _, s := range list {
		ai, err := ParsePeer(s)
		if err != nil {
			return nil, err
		}
		same := slices.IndexFunc(out, func(p peer.AddrInfo) bool { return p.ID == ai.ID })
		switch {
		case ai.ID == c.Identity.id:
		case same < 0:
			out = append(out, ai)
		default:
			out[same].Addrs = append(out[same].Addrs, ai.Addrs...)
		}
	}
	return out, nil
}

// ParsePeer reads a peer's address, a multiaddr that ends in /p2p/ID.
func ParsePeer(s string) (peer.AddrInfo, error) {
	ai, err := peer.AddrInfoFromString(s)
	if err != nil || len(ai.Addrs) == 0 {
		return peer.AddrInfo{}, fmt.Errorf("p2p: peer address %q: want one like /ip4/192.168.1.5/tcp/4001/p2p/12D3Koo…", s)
	}
	return *ai, nil
}

func (c *Config) hello(caps Capabilities, lanePort uint16) Hello {
	return Hello{
		Version: helloVersion, ID: c.Identity.id, Agent: c.Agent, Network: c.Network, Pack: c.Pack,
		Protocols: c.Protocols, Backends: caps.Backends, Models: caps.Models, LanePort: lanePort, Ticket: c.ticket,
		Heartbeats: true,
	}
}

func (l *Limits) validate() error {
	if l.Conns < 0 || l.ConnsPerIP < 0 || l.StreamsPerPeer < 0 || l.MemoryPerPeer < 0 || l.LanesPerPeer < 0 || l.HalfOpenLanes < 0 {
		return fmt.Errorf("p2p: negative limit in %+v", *l)
	}
	setDefault(&l.Conns, 2048)
	setDefault(&l.ConnsPerIP, 512)
	setDefault(&l.StreamsPerPeer, 256)
	setDefault(&l.MemoryPerPeer, 512<<20)
	setDefault(&l.LanesPerPeer, 16)
	setDefault(&l.HalfOpenLanes, 64)
	return nil
}

func setDefault[T int | int64](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}
