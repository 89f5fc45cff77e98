package p2p

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/transport/quicreuse"
	ma "github.com/multiformats/go-multiaddr"
)

// closeTimeout is how long Close waits for handlers to return.
const closeTimeout = 10 * time.Second

var (
	errStarted = errors.New("p2p: host was started already")
	errClosed  = errors.New("p2p: host is closed")
	errNotUp   = errors.New("p2p: host is not started")
)

// Host is this node among its peers. It comes from New, works from Start to Close.
type Host struct {
	cfg       Config
	standings *standings
	gossip    *gossip
	hearts    *hearts
	makeNode  func(...libp2p.Option) (host.Host, error) // nil: newNode
	events    *notifier
	peers     *registry
	members   *membership
	keepers   []*keeper
	refused   *refusals
	lanes     *laneServer
	quic      *quicLanes
	sockets   *quicreuse.ConnManager // of QUIC

	greetings greetings
	outlook   outlook
	meeter    *meeter
	providers *providers
	requests  *requestLimits
	memory    *memory

	// Made by Start; nil when they are off.
	dht   *dht.IpfsDHT
	mdns  *mdns
	relay *relayService
	taken *reserver // into relays

	puncher *puncher

	closeOnce sync.Once
	closeErr  error

	wg       sync.WaitGroup // handlers, keepers, loops: entered through enter
	mu       sync.Mutex     // guards what follows
	node     host.Host      // nil before Start
	closed   bool
	cancel   context.CancelFunc // ends keepers and loops
	caps     *Capabilities      // replaced as a whole
	handlers map[string]Handler // by protocol, "experts/1"
}

// New checks cfg and does nothing else yet.
func New(cfg Config) (*Host, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	h := &Host{cfg: cfg, caps: &cfg.Capabilities, handlers: make(map[string]Handler), events: newNotifier()}
	h.peers = newRegistry(h.events)
	h.standings = newStandings()
	h.members = newMembership(&cfg)
	h.refused = newRefusals(cfg.Logger)
	h.handlers[revokeProtocol] = h.serveRevocations
	h.gossip = newGossip(h)
	h.hearts = newHearts(h)
	h.events.watch(h.gossip)
	h.handlers[pullProtocol] = h.gossip.answerPull
	h.handlers[renewProtocol] = h.gossip.answerRenewals
	h.handlers[carriedProtocol] = h.serveCarried
	h.greetings.underWay, h.greetings.kept = make(map[network.Conn]*greeting), make(map[peer.ID]int)
	h.greetings.left = h.greetLeft
	h.meeter, h.providers, h.memory = newMeeter(h), newProviders(), &memory{h: h}
	h.requests = newRequestLimits(h)
	h.events.watch(protector{h})
	if h.looks() {
		h.events.watch(h.meeter)
	}
	h.addKeepers(cfg.peers, true)
	h.addKeepers(cfg.bootstrap, false)
	h.addKeepers(cfg.relays, false)
	return h, nil
}

// looks reports whether this node looks for peers that it was not told of.
func (h *Host) looks() bool { return h.cfg.DHT || h.cfg.MDNS || h.cfg.Remember != "" }

// NewOn is New for a host that works on the libp2p host which node makes at Start, with at
// least the given options: the identity, and who is kept out. It may listen already;
// cfg.Listen is listened on as well, when set. There are no lanes. Time may be simulated:
// how late this process runs is not looked at.
func NewOn(cfg Config, node func(...libp2p.Option) (host.Host, error)) (*Host, error) {
	if cfg.Listen == nil {
		cfg.Listen = []string{}
	}
	cfg.NoLane = true
	h, err := New(cfg)
	if err != nil {
		return nil, err
	}
	h.makeNode = node
	h.hearts.waited = func() time.Duration { return 0 }
	return h, nil
}

// ID is the own peer id.
func (h *Host) ID() peer.ID { return h.cfg.Identity.id }

// Watch has w told of peers that come and go. Call it before Start.
func (h *Host) Watch(w Watcher) { h.events.watch(w) }

// Start listens, lets peers in, and begins to connect to the configured ones. After an
// error the host is closed.
func (h *Host) Start() error {
	err := h.start()
	if err != nil && !errors.Is(err, errStarted) {
		return errors.Join(err, h.Close())
	}
	return err
}

func (h *Host) start() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return errClosed
	case h.node != nil:
		return errStarted
	}
	if err := h.members.load(); err != nil {
		return err
	}
	node, err := h.openNode()
	if err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	h.node = node
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel = cancel
	// All handlers are there before the first listener.
	h.handleHello()
	for name, handler := range h.handlers {
		h.setStreamHandler(name, handler)
	}
	node.Network().Notify(&network.NotifyBundle{ConnectedF: h.connected, DisconnectedF: h.disconnected})
	if err := h.startServices(ctx); err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	if err := h.listen(); err != nil {
		return err
	}
	h.startLoops(ctx)
	return nil
}

// openNode makes the libp2p host.
func (h *Host) openNode() (host.Host, error) {
	if h.makeNode == nil {
		return h.newNode()
	}
	node, err := h.makeNode(libp2p.Identity(h.cfg.Identity.key), libp2p.ConnectionGater(doorkeeper{h.standings}))
	if err == nil && node.ID() != h.ID() {
		err = errors.Join(fmt.Errorf("libp2p host is %s, want %s", node.ID(), h.ID()), node.Close())
	}
	return node, err
}

// startServices starts what serves others, before they can connect.
func (h *Host) startServices(ctx context.Context) error {
	h.node.SetStreamHandler(h.protocolID(ctlProtocol), h.hearts.answer)
	err := h.subscribe(ctx)
	if err == nil && h.makeNode == nil {
		h.puncher, err = newPuncher(h.node, &h.outlook)
	}
	if err == nil {
		err = h.gossip.start(ctx)
	}
	if err == nil && h.cfg.DHT {
		h.dht, err = newDHT(h)
	}
	if err == nil && h.cfg.Relay {
		h.relay, err = newRelayService(h)
	}
	if err == nil && !h.cfg.isPublic() {
		h.taken, err = newReserver(h)
	}
	if err == nil && h.cfg.Remember != "" {
		h.recall()
	}
	return err
}

// recall has good peers of former times met again.
func (h *Host) recall() {
	good, err := readRemembered(h.cfg.Remember, h.cfg.Network)
	if err != nil {
		h.cfg.Logger.Warn("good peers of before are not known", "err", err)
	}
	h.memory.good = good
	for _, g := range good {
		h.meeter.add(g.info)
	}
}

// startLoops starts what acts by itself, once the listeners are up.
func (h *Host) startLoops(ctx context.Context) {
	h.wg.Go(func() { h.sweep(ctx) })
	h.wg.Go(func() { h.upgradeLoop(ctx) })
	h.wg.Go(func() { h.watchMembers(ctx) })
	h.wg.Go(func() { h.gossip.run(ctx) })
	h.wg.Go(func() { h.hearts.run(ctx) })
	h.wg.Go(func() { h.events.run(ctx.Done()) })
	if h.lanes != nil {
		h.wg.Go(func() { h.lanes.run(ctx) })
		for _, l := range h.quic.listeners {
			h.wg.Go(func() { h.quic.run(ctx, l) })
		}
	}
	for _, k := range h.keepers {
		h.wg.Go(func() { k.run(ctx) })
	}
	if h.taken != nil {
		h.wg.Go(func() { h.taken.run(ctx) })
	}
	if h.looks() {
		h.wg.Go(func() { h.meeter.run(ctx) })
	}
	if h.cfg.Remember != "" {
		h.wg.Go(func() { h.memory.run(ctx) })
	}
	if h.cfg.MDNS {
		h.mdns = &mdns{h: h, found: h.meeter.add, others: make(map[peer.ID]struct{})}
		h.wg.Go(func() { h.mdns.run(ctx) })
	}
	if h.dht == nil {
		return
	}
	h.providers.keys[MemberKey] = &provided{pause: provideRetry}
	if h.cfg.Relay {
		h.providers.keys[RelayKey] = &provided{pause: provideRetry}
	}
	h.wg.Go(func() { h.provideLoop(ctx) })
	h.wg.Go(func() { h.meeter.lookup(ctx) })
}

func (h *Host) listen() error {
	if err := checkFree(h.cfg.listen); err != nil {
		return err
	}
	for _, a := range h.cfg.listen {
		if err := h.node.Network().Listen(a); err != nil {
			return fmt.Errorf("p2p: listen on %s: %v: is another program using the port?", a, err)
		}
	}
	if h.cfg.NoLane {
		return nil
	}
	l, err := net.Listen("tcp", h.cfg.LaneListen)
	if err != nil {
		return fmt.Errorf("p2p: listen for lanes on %s: %v: is another program using the port?", h.cfg.LaneListen, err)
	}
	if h.lanes, err = newLaneServer(h, l); err == nil {
		h.quic, err = h.lanes.listenQUIC(h.sockets)
	}
	return err
}

// Close ends all connections, waits for handlers and loops, and returns the same error
// when called again. Handlers end when their streams do; one that does not is reported.
func (h *Host) Close() error {
	h.closeOnce.Do(func() { h.closeErr = h.close() })
	return h.closeErr
}

func (h *Host) close() error {
	h.mu.Lock()
	h.closed = true
	node, cancel, lanes, quic := h.node, h.cancel, h.lanes, h.quic
	h.mu.Unlock()
	var errs []error
	if lanes != nil {
		errs = append(errs, lanes.close())
	}
	if quic != nil {
		errs = append(errs, quic.close())
	}
	var good []goodPeer
	if node != nil {
		good = h.goodPeers()
	}
	h.peers.loseAll()
	if cancel != nil {
		cancel()
	}
	if h.dht != nil {
		errs = append(errs, h.dht.Close())
	}
	if h.relay != nil {
		errs = append(errs, h.relay.service.Close())
	}
	if h.puncher != nil {
		errs = append(errs, h.puncher.close())
	}
	if node != nil {
		errs = append(errs, node.Close())
	}
	done := make(chan struct{})
	go func() {
		h.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(closeTimeout):
		errs = append(errs, fmt.Errorf("p2p: a stream handler or watcher did not return within %v", closeTimeout))
		return errors.Join(errs...)
	}
	if h.cfg.Remember != "" {
		h.memory.save(good)
	}
	return errors.Join(errs...)
}

// enter counts the caller's goroutine among those that Close waits for, until leave is
// called. It fails when the host is closed.
func (h *Host) enter() (leave func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosed
	}
	h.wg.Add(1)
	return h.wg.Done, nil
}

// up returns the libp2p host of a started, open host.
func (h *Host) up() (host.Host, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return nil, errClosed
	case h.node == nil:
		return nil, errNotUp
	}
	return h.node, nil
}

// Addrs are the multiaddrs, with /p2p/ID, under which this host is reached, those included
// that are of use on this machine or link only and that others are not told.
func (h *Host) Addrs() []string {
	node, err := h.up()
	if err != nil {
		return nil
	}
	addrs := node.Addrs()
	if own, err := node.Network().InterfaceListenAddresses(); err == nil {
		addrs = append(addrs, slices.DeleteFunc(own, func(a ma.Multiaddr) bool { return scopeOf(a) == beyond || isCircuit(a) })...)
	}
	var out []string
	for _, a := range ma.Unique(addrs) {
		out = append(out, fmt.Sprintf("%s/p2p/%s", a, node.ID()))
	}
	return out
}

// SetCapabilities changes what this node says of itself, and says it to the ready peers.
func (h *Host) SetCapabilities(c Capabilities) error {
	if _, err := encodeHello(h.cfg.hello(c, 0)); err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	h.mu.Lock()
	h.caps = &c
	h.mu.Unlock()
	for _, p := range h.peers.list() {
		h.rehello(p.ID)
	}
	return nil
}

// ownHello is what this node says of itself now, and the capabilities in it.
func (h *Host) ownHello() (Hello, *Capabilities) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var port uint16
	if h.lanes != nil {
		port = h.lanes.port
	}
	hello := h.cfg.hello(*h.caps, port)
	hello.Revocations = h.members.list().version()
	return hello, h.caps
}

// upToDate reports whether said are still the capabilities of this node.
func (h *Host) upToDate(said *Capabilities) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.caps == said
}

// laneTLS completes libp2p's TLS settings for a lane: its own ALPN name, so that a lane
// can not be taken for a libp2p connection, and full records from the first byte, since
// Go otherwise cuts a frame into packets of 1.4 kB until 128 kB have gone through.
func laneTLS(c *tls.Config) *tls.Config {
	c.NextProtos = []string{laneALPN}
	c.DynamicRecordSizingDisabled = true
	return c
}
