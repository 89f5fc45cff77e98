package p2p

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// Config says what a host is and whom it keeps connected to.
type Config struct {
	Identity Identity // required
	Network  string   // network id, part of every protocol id: [a-z0-9._-], 1 to 64 bytes
	Pack     string   // runtime pack; peers with another one are refused
	Agent    string   // program and version, for people
	// Protocols that this node speaks, "name/version". Peers that speak the same name in
	// no common version are refused.
	Protocols []string
	// Capabilities at the start; see Host.SetCapabilities.
	Capabilities Capabilities

	Listen []string // multiaddrs; nil: TCP and QUIC on free ports of 127.0.0.1
	// LaneListen is host:port of the lane listener. Peers dial the port at the address
	// where the node is connected, so it must listen there too. "": a free port of
	// 127.0.0.1.
	LaneListen string
	NoLane     bool     // neither listen for lanes nor dial them
	Peers      []string // multiaddrs with /p2p/ID, to be kept connected

	// Spin is how long a read on a lane looks at the socket before its goroutine is
	// parked. 0: the default, 50 µs; negative: never.
	Spin         time.Duration
	HelloTimeout time.Duration // for connect, hello, and a lane's opening, each; 0: 10 s
	Limits       Limits
	Logger       *slog.Logger // nil: silent

	peers  []peer.AddrInfo
	listen []ma.Multiaddr
}

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
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

func (c *Config) parseAddresses() error {
	for _, s := range c.Listen {
		a, err := ma.NewMultiaddr(s)
		if err != nil {
			return fmt.Errorf("p2p: listen address %q: %v: want one like /ip4/0.0.0.0/tcp/4001", s, err)
		}
		c.listen = append(c.listen, a)
	}
	for _, s := range c.Peers {
		ai, err := ParsePeer(s)
		if err != nil {
			return err
		}
		if ai.ID == c.Identity.id {
			return fmt.Errorf("p2p: peer %q is this node itself", s)
		}
		same := slices.IndexFunc(c.peers, func(p peer.AddrInfo) bool { return p.ID == ai.ID })
		if same < 0 {
			c.peers = append(c.peers, ai)
		} else {
			c.peers[same].Addrs = append(c.peers[same].Addrs, ai.Addrs...)
		}
	}
	return nil
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
		Protocols: c.Protocols, Backends: caps.Backends, Models: caps.Models, LanePort: lanePort,
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
