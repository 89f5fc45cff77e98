package p2p

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p"
	"github.com/libp2p/go-libp2p/core/connmgr"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/muxer/yamux"
	"github.com/libp2p/go-libp2p/p2p/net/swarm"
	"github.com/libp2p/go-libp2p/p2p/security/noise"
	libp2ptls "github.com/libp2p/go-libp2p/p2p/security/tls"
	"github.com/libp2p/go-libp2p/p2p/transport/quic"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	ma "github.com/multiformats/go-multiaddr"
	manet "github.com/multiformats/go-multiaddr/net"
)

const (
	// A dead host is noticed after about their sum. Lower values lose connections of
	// busy machines.
	yamuxKeepAlive    = 10 * time.Second
	yamuxWriteTimeout = 10 * time.Second

	// closeTimeout is how long Close waits for handlers to return.
	closeTimeout = 10 * time.Second
)

var (
	errStarted = errors.New("p2p: host was started already")
	errClosed  = errors.New("p2p: host is closed")
	errNotUp   = errors.New("p2p: host is not started")
)

// Host is this node among its peers. It comes from New, works from Start to Close.
type Host struct {
	cfg       Config
	standings *standings
	events    *notifier
	peers     *registry
	keepers   []*keeper
	lanes     *laneServer

	greetings greetings

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
	h.greetings.underWay, h.greetings.kept = make(map[network.Conn]*greeting), make(map[peer.ID]int)
	h.greetings.left = h.greetLeft
	for _, ai := range cfg.peers {
		h.keepers = append(h.keepers, newKeeper(h, ai))
	}
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
	node, err := newNode(&h.cfg, doorkeeper{h.standings})
	if err != nil {
		return fmt.Errorf("p2p: %w", err)
	}
	h.node = node
	// All handlers are there before the first listener.
	h.handleHello()
	for name, handler := range h.handlers {
		h.setStreamHandler(name, handler)
	}
	node.Network().Notify(&network.NotifyBundle{ConnectedF: h.connected, DisconnectedF: h.disconnected})
	if err := h.listen(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel = cancel
	h.wg.Go(func() { h.sweep(ctx) })
	h.wg.Go(func() { h.events.run(ctx.Done()) })
	if h.lanes != nil {
		h.wg.Go(func() { h.lanes.run(ctx) })
	}
	for _, k := range h.keepers {
		h.wg.Go(func() { k.run(ctx) })
	}
	return nil
}

// newNode makes the libp2p host, not listening yet.
func newNode(cfg *Config, door connmgr.ConnectionGater) (host.Host, error) {
	limits, err := newResourceManager(cfg.Limits)
	if err != nil {
		return nil, err
	}
	mux := *yamux.DefaultTransport
	mux.KeepAliveInterval = yamuxKeepAlive
	mux.ConnectionWriteTimeout = yamuxWriteTimeout
	return libp2p.New(
		libp2p.Identity(cfg.Identity.key),
		libp2p.UserAgent(cfg.Agent),
		libp2p.NoListenAddrs,
		libp2p.Transport(tcp.NewTCPTransport),
		libp2p.Transport(libp2pquic.NewTransport),
		libp2p.Security(libp2ptls.ID, libp2ptls.New),
		libp2p.Security(noise.ID, noise.New),
		libp2p.Muxer(yamux.ID, &mux),
		libp2p.SwarmOpts(swarm.WithDialRanker(rankDials)),
		libp2p.WithDialTimeout(cfg.HelloTimeout),
		libp2p.ResourceManager(limits),
		libp2p.ConnectionGater(door),
		libp2p.DisableRelay(),
		libp2p.DisableMetrics(),
		libp2p.Ping(false),
	)
}

func (h *Host) listen() error {
	for _, a := range h.cfg.listen {
		err := checkFree(a)
		if err == nil {
			err = h.node.Network().Listen(a)
		}
		if err != nil {
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
	h.lanes, err = newLaneServer(h, l)
	return err
}

// checkFree fails when another program listens on a TCP address. libp2p, which dials from
// the port on which it listens, would share it and get some of the other's connections.
func checkFree(a ma.Multiaddr) error {
	if _, err := a.ValueForProtocol(ma.P_TCP); err != nil {
		return nil
	}
	l, err := manet.Listen(a)
	if err != nil {
		return err
	}
	return l.Close()
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
	node, cancel, lanes := h.node, h.cancel, h.lanes
	h.mu.Unlock()
	var errs []error
	if lanes != nil {
		errs = append(errs, lanes.close())
	}
	h.peers.loseAll()
	if cancel != nil {
		cancel()
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

// Addrs are the multiaddrs, with /p2p/ID, under which this host listens.
func (h *Host) Addrs() []string {
	node, err := h.up()
	if err != nil {
		return nil
	}
	var out []string
	for _, a := range node.Addrs() {
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
	return h.cfg.hello(*h.caps, port), h.caps
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
