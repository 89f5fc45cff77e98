package p2p

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p"
	libp2pevent "github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/muxer/yamux"
	"github.com/libp2p/go-libp2p/p2p/net/connmgr"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/protocol/holepunch"
	"github.com/libp2p/go-libp2p/p2p/security/noise"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	"github.com/libp2p/go-libp2p/p2p/transport/websocket"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

const (
	// A dead host is noticed after about their sum. Lower values lose connections of
	// busy machines.
	yamuxKeepAlive    = 10 * time.Second
	yamuxWriteTimeout = 10 * time.Second

	// trimGrace is how long a new connection is not closed for being one too many.
	trimGrace = time.Minute

	// interfacesEvery is how often the own interfaces are looked at.
	interfacesEvery = 10 * time.Second

	// httpHeaderTimeout bounds the wait for the header of a plain HTTP request.
	httpHeaderTimeout = 10 * time.Second
)

// newNode makes the libp2p host, not listening yet.
func (h *Host) newNode() (host.Host, error) {
	cfg := &h.cfg
	limits, err := newResourceManager(cfg.Limits, cfg.Relay)
	if err != nil {
		return nil, err
	}
	trim, err := connmgr.NewConnManager(cfg.Limits.Conns*3/4, cfg.Limits.Conns*7/8, connmgr.WithGracePeriod(trimGrace))
	if err != nil {
		return nil, err
	}
	mux := *yamux.DefaultTransport
	mux.KeepAliveInterval = yamuxKeepAlive
	mux.ConnectionWriteTimeout = yamuxWriteTimeout
	relays := ipsOf(cfg.relays)
	rank := func(addrs []ma.Multiaddr) []network.AddrDelay { return rankDials(addrs, relays) }
	options := []libp2p.Option{
		libp2p.Identity(cfg.Identity.key),
		libp2p.UserAgent(cfg.Agent),
		libp2p.EnableRelay(), // before NoListenAddrs, which turns it off otherwise
		libp2p.NoListenAddrs,
		libp2p.Transport(tcp.NewTCPTransport),
		libp2p.Transport(quicTransport(cfg.Identity.key, &h.sockets)),
		libp2p.Transport(websocket.New, webOptions(cfg)...),
		libp2p.Security(libp2ptls.ID, libp2ptls.New),
		libp2p.Security(noise.ID, noise.New),
		libp2p.Muxer(yamux.ID, &mux),
		libp2p.SwarmOpts(swarm.WithDialRanker(rank)),
		libp2p.WithDialTimeout(cfg.HelloTimeout),
		libp2p.ResourceManager(limits),
		libp2p.ConnectionGater(doorkeeper{h.standings}),
		libp2p.ConnectionManager(trim),
		libp2p.DisableMetrics(),
		libp2p.Ping(false),
		libp2p.EnableAutoNATv2(),
		// Otherwise no node tries another's UDP address before a hundred dials of its own,
		// and an address where nothing gets through is told for ever.
		libp2p.UDPBlackHoleSuccessCounter(nil),
		libp2p.AddrsFactory(func(addrs []ma.Multiaddr) []ma.Multiaddr { return tellable(append(addrs, cfg.announce...)) }),
	}
	if sharesPort(cfg.listen) {
		options = append(options, libp2p.ShareTCPListener())
	}
	return libp2p.New(append(options, h.reachOptions()...)...)
}

// reachOptions are those that depend on whether others can connect to this node.
func (h *Host) reachOptions() []libp2p.Option {
	if h.cfg.isPublic() {
		return []libp2p.Option{libp2p.ForceReachabilityPublic(), libp2p.EnableNATService()}
	}
	if h.cfg.Reach == ReachPrivate {
		return []libp2p.Option{libp2p.ForceReachabilityPrivate()}
	}
	return []libp2p.Option{libp2p.EnableNATService()}
}

// isPublic: a relay that could not be reached would be none.
func (c *Config) isPublic() bool { return c.Reach == ReachPublic || c.Relay }

// webOptions are those of the websocket transport.
func webOptions(cfg *Config) []any {
	var options []any
	if cfg.TLS != nil {
		options = append(options, websocket.WithTLSConfig(cfg.TLS),
			websocket.WithTLSClientConfig(&tls.Config{RootCAs: cfg.TLS.RootCAs}))
	}
	if cfg.HTTP != nil {
		options = append(options, websocket.WithHTTPHandler(cfg.HTTP),
			websocket.WithHTTPServerConfig(func(s *http.Server) { s.ReadHeaderTimeout = httpHeaderTimeout }))
	}
	return options
}

// thinWaist is the IP address and TCP port in a listen address, nil when it has none.
func thinWaist(a ma.Multiaddr) ma.Multiaddr {
	var out ma.Multiaddr
	for _, c := range a {
		out = append(out, c)
		if c.Protocol().Code == ma.P_TCP {
			return out
		}
	}
	return nil
}

// tcpAddrs are the IP addresses and TCP ports to listen on, each once; port 0 is left out.
func tcpAddrs(listen []ma.Multiaddr) (once []ma.Multiaddr, twice bool) {
	for _, a := range listen {
		thin := thinWaist(a)
		if port, ok := protocolOf(a, ma.P_TCP); thin == nil || ok && port == "0" {
			continue
		}
		if slices.ContainsFunc(once, thin.Equal) {
			twice = true
			continue
		}
		once = append(once, thin)
	}
	return once, twice
}

// sharesPort reports whether one TCP port is to take libp2p and websockets.
func sharesPort(listen []ma.Multiaddr) bool {
	_, twice := tcpAddrs(listen)
	return twice
}

// checkFree fails when another program listens on one of our TCP ports. libp2p, which dials
// from the port on which it listens, would share it and get some of the other's connections.
func checkFree(listen []ma.Multiaddr) error {
	addrs, _ := tcpAddrs(listen)
	for _, a := range addrs {
		l, err := manet.Listen(a)
		if err == nil {
			err = l.Close()
		}
		if err != nil {
			return fmt.Errorf("p2p: listen on %s: %v: is another program using the port?", a, err)
		}
	}
	return nil
}

// outlook is what is known of how others can reach this node.
type outlook struct {
	mu          sync.Mutex // guards what follows
	reach       network.Reachability
	nat         map[network.NATTransportProtocol]network.NATDeviceType
	reachable   []ma.Multiaddr // tried by a peer and found good
	unreachable []ma.Multiaddr
	relayed     []ma.Multiaddr // circuits at relays
	ownPublic   bool           // an own interface has a public address, as of looked
	looked      time.Time
	punched     int // holes
	notPunched  int
}

// Trace hears of attempts to punch holes.
func (o *outlook) Trace(e *holepunch.Event) {
	end, ok := e.Evt.(*holepunch.EndHolePunchEvt)
	if !ok {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if end.Success {
		o.punched++
	} else {
		o.notPunched++
	}
}

// follow keeps the outlook up to date.
func (o *outlook) follow(ctx context.Context, events libp2pevent.Subscription) {
	defer events.Close()
	for {
		select {
		case e, ok := <-events.Out():
			if !ok {
				return
			}
			o.note(e)
		case <-ctx.Done():
			return
		}
	}
}

func (o *outlook) note(e any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e := e.(type) {
	case libp2pevent.EvtLocalReachabilityChanged:
		o.reach = e.Reachability
	case libp2pevent.EvtNATDeviceTypeChanged:
		if o.nat == nil {
			o.nat = make(map[network.NATTransportProtocol]network.NATDeviceType)
		}
		o.nat[e.TransportProtocol] = e.NatDeviceType
	case libp2pevent.EvtHostReachableAddrsChanged:
		o.reachable, o.unreachable = e.Reachable, e.Unreachable
	case libp2pevent.EvtAutoRelayAddrsUpdated:
		o.relayed = e.RelayAddrs
	}
}

// subscribe begins to follow what libp2p finds out.
func (h *Host) subscribe(ctx context.Context) error {
	events, err := h.node.EventBus().Subscribe([]any{
		new(libp2pevent.EvtLocalReachabilityChanged), new(libp2pevent.EvtNATDeviceTypeChanged),
		new(libp2pevent.EvtHostReachableAddrsChanged), new(libp2pevent.EvtAutoRelayAddrsUpdated),
	})
	if err != nil {
		return err
	}
	h.wg.Go(func() { h.outlook.follow(ctx, events) })
	return nil
}

// needsRelay reports whether others cannot connect to this node, as far as is known. While
// nothing is, it does unless an own interface has a public address: to wait for peers to
// have tried would take a quarter of a minute.
func (h *Host) needsRelay() bool {
	switch {
	case h.cfg.isPublic():
		return false
	case h.cfg.Reach == ReachPrivate:
		return true
	}
	o := &h.outlook
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.reach == network.ReachabilityPublic || len(o.reachable) > 0:
		return false
	case o.reach == network.ReachabilityPrivate || len(o.unreachable) > 0:
		return true
	}
	if time.Since(o.looked) > interfacesEvery {
		o.ownPublic, o.looked = hasPublicAddr(h.node), time.Now()
	}
	return !o.ownPublic
}

// hasPublicAddr reports whether an own interface has a public address.
func hasPublicAddr(node host.Host) bool {
	addrs, err := node.Network().InterfaceListenAddresses()
	return err == nil && slices.ContainsFunc(addrs, manet.IsPublicAddr)
}

// hasWayIn reports whether others can connect to this node, as far as is known.
func (h *Host) hasWayIn() bool {
	if h.cfg.Reach != ReachPrivate {
		return true
	}
	h.outlook.mu.Lock()
	defer h.outlook.mu.Unlock()
	return len(h.outlook.relayed) > 0
}

// addrsOf are the known addresses of a peer, direct ones first, at most n.
func addrsOf(node host.Host, id peer.ID, n int) []ma.Multiaddr {
	addrs := node.Peerstore().Addrs(id)
	slices.SortStableFunc(addrs, func(a, b ma.Multiaddr) int { return circuitRank(a) - circuitRank(b) })
	return addrs[:min(n, len(addrs))]
}

func circuitRank(a ma.Multiaddr) int {
	if isCircuit(a) {
		return 1
	}
	return 0
}

// protector keeps ready peers when connections are closed because there are too many.
type protector struct{ h *Host }

const protectTag = "ready"

func (p protector) PeerReady(r *Peer) {
	if node, err := p.h.up(); err == nil {
		node.ConnManager().Protect(r.ID, protectTag)
	}
}

func (p protector) PeerLost(r *Peer) {
	if node, err := p.h.up(); err == nil {
		node.ConnManager().Unprotect(r.ID, protectTag)
	}
}
