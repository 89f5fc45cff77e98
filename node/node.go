package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/node/api"
	"kvasird/node/engine"
	"kvasird/node/gateway"
	"kvasird/p2p"
	"kvasird/p2p/fetch"

	"github.com/libp2p/go-libp2p/core/peer"
)

// Version of this program.
const Version = "0.1.0"

// wireVersion is the version of what peers say to each other about experts. It
// is part of the runtime pack.
const wireVersion = 2

const (
	stopTime       = 10 * time.Second // for a daemon to end, of which
	answerTime     = 3 * time.Second  // for running answers to end by themselves, and
	doorTime       = 5 * time.Second  // for their clients to read that, or why they do not
	leaveTime      = 3 * time.Second  // for those who have experts computed here to go elsewhere
	canaryPause    = 2 * time.Second  // between canaries while one fails
	canaryDeadline = 30 * time.Second
)

// Pack is what must be equal for two nodes to compute together.
func Pack(rt *ggml.Runtime) string {
	return fmt.Sprintf("%s, kvasir wire %d", rt.Release(), wireVersion)
}

// Node is a running daemon.
type Node struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	rt      *ggml.Runtime
	device  ggml.Device // that experts lie on
	file    *modelFile
	host    *p2p.Host
	workers *workers // roles worker and volunteer; empty for others

	store    *store.Store  // in a network with a file
	weights  *weights      // likewise
	exchange *exchange     // likewise
	dispatch *dispatchPart // a backbone whose experts are elsewhere
	model    *ggml.Model   // role backbone
	engine   *engine.Engine
	gateway  *gateway.Gateway
	answers  answers
	http     net.Listener // of the gateway, role entry

	stops []func() error // in the order of starting

	storeMu sync.Mutex // held while a node without a network file works on its store

	mu    sync.Mutex // guards what follows
	state api.State
	tried bool // a canary went through every part once
}

// Run starts a node, calls ready, and works until ctx ends. Start goes from the
// ground up, stop the other way.
func Run(ctx context.Context, cfg Config, log *slog.Logger, ready func(*Node)) (err error) {
	n := &Node{cfg: cfg, log: log, started: time.Now(), state: api.StateStarting}
	defer func() { err = errors.Join(err, n.stop()) }()
	if err := n.start(ctx); err != nil {
		if ctx.Err() != nil {
			log.Info("stopped while starting", "reason", err)
			return nil
		}
		return err
	}
	failed := make(chan error, 1)
	wait := n.serve(ctx, failed)
	n.setState(api.StateServing)
	ready(n)
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	n.setState(api.StateStopping)
	log.Info("stopping")
	leave, done := context.WithTimeout(context.Background(), leaveTime)
	defer done()
	n.workers.drain(leave) // who still needs this node then hears that it is gone
	wait()
	return err
}

func (n *Node) onStop(f func() error) { n.stops = append(n.stops, f) }

func (n *Node) stop() error {
	var errs []error
	for _, f := range slices.Backward(n.stops) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

func (n *Node) setState(s api.State) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.state = s
}

// start opens what the roles need, from the ground up.
func (n *Node) start(ctx context.Context) error {
	data, err := OpenData(n.cfg.Data)
	if err != nil {
		return err
	}
	n.onStop(data.Close)
	identity, err := p2p.LoadOrCreateIdentity(data.Path("identity.key"))
	if err != nil {
		return err
	}
	if n.rt, err = ggml.Open(ggml.Config{Logger: n.log}); err != nil {
		return err
	}
	if n.device, err = n.rt.Device(n.cfg.Device); err != nil {
		return err
	}
	if n.cfg.Genesis != nil {
		if err := fillBudget(&n.cfg, n.device); err != nil {
			return err
		}
		if n.store, err = openStore(n.cfg); err != nil {
			return err
		}
		n.onStop(n.store.Close)
	}
	if n.cfg.Has(RoleWorker) || n.cfg.Has(RoleBackbone) {
		if n.file, err = openModelFile(ctx, n.cfg, n.store, n.log); err != nil {
			return err
		}
		n.onStop(n.file.Close)
	}
	n.workers = newWorkers(n.rt, n.cfg, n.log)
	n.onStop(n.workers.Close)
	if n.cfg.Has(RoleWorker) {
		held, err := n.file.slices(n.cfg.Slices)
		if err == nil {
			err = n.workers.addAll(n.file, held)
		}
		if err != nil {
			return err
		}
	}
	if err := n.startHost(identity); err != nil {
		return err
	}
	if n.cfg.Genesis != nil {
		if err := n.startExchange(ctx); err != nil {
			return err
		}
	}
	if n.cfg.Has(RoleBackbone) {
		if err := n.startBackbone(ctx); err != nil {
			return err
		}
	}
	if err := n.startDoor(); err != nil {
		return err
	}
	if err := n.host.Start(); err != nil {
		return err
	}
	n.handOutRevocations()
	return nil
}

func (n *Node) startHost(identity p2p.Identity) error {
	cfg, err := n.hostConfig(identity)
	if err != nil {
		return err
	}
	if n.host, err = p2p.New(cfg); err != nil {
		return err
	}
	n.onStop(n.host.Close)
	n.onStop(n.workers.closeWorkers) // answers what was sent, while there is a host
	n.workers.admit = n.admit
	n.workers.served = n.say
	return n.host.HandleStream(expertsProtocol, n.workers.serve)
}

// hostConfig is how this node appears among its peers.
func (n *Node) hostConfig(identity p2p.Identity) (p2p.Config, error) {
	cfg := p2p.Config{
		Identity: identity, Network: n.cfg.Network, Pack: Pack(n.rt), Agent: "kvasird/" + Version,
		Protocols: []string{expertsProtocol}, Capabilities: n.capabilities(n.workers.models()),
		Listen: n.cfg.Listen, LaneListen: n.cfg.Lane, NoLane: n.cfg.Lane == Off,
		Peers: n.cfg.Peers, Logger: n.log,
	}
	if cfg.NoLane {
		cfg.LaneListen = ""
	}
	if n.cfg.Genesis == nil {
		return cfg, nil
	}
	cfg.Protocols = append(cfg.Protocols, fetch.Protocol)
	cfg.DHT, cfg.MDNS = true, n.cfg.MDNS == "on"
	cfg.Reach, cfg.Relay, cfg.Announce = p2p.Reach(n.cfg.Reach), n.cfg.Has(RoleRelay), n.cfg.Tell
	cfg.Remember = filepath.Join(n.cfg.Data, "peers.json")
	var err error
	if cfg.TLS, err = n.cfg.TLS.load(); err != nil {
		return cfg, err
	}
	if listensOnWeb(n.cfg.Listen) {
		cfg.HTTP = http.HandlerFunc(n.publicPage)
	}
	return cfg, n.cfg.joinNetwork(&cfg, time.Now())
}

// capabilities are what this node says of itself when it holds experts of models.
func (n *Node) capabilities(models []gguf.ModelID) p2p.Capabilities {
	caps := p2p.Capabilities{}
	for _, d := range n.rt.Devices() {
		caps.Backends = append(caps.Backends, p2p.Backend{
			Name: d.Backend, Device: d.Description, Accumulate: "f32",
		})
	}
	for _, id := range models {
		caps.Models = append(caps.Models, id.String())
	}
	return caps
}

// say tells the peers of which models this node has experts.
func (n *Node) say(models []gguf.ModelID) {
	if err := n.host.SetCapabilities(n.capabilities(models)); err != nil {
		n.log.Error("peers are not told what is served here", "error", err)
	}
}

// admit says whether a peer may have experts computed here.
func (n *Node) admit(id peer.ID) error {
	if n.cfg.Genesis == nil || n.host.Rights(id).Has(p2p.Infer) {
		return nil
	}
	return fmt.Errorf("this network gives the right to infer by a ticket for the peer: ask its operator for `kvasir network invite --for %s --infer`", id)
}

// startBackbone loads the model, after a child process tried it.
func (n *Node) startBackbone(ctx context.Context) error {
	remote, ownCopy, err := n.file.remoteExperts(n.cfg)
	if err != nil {
		return err
	}
	if err := n.file.probe(ctx, n.cfg, n.rt.Release(), remote); err != nil {
		return err
	}
	cfg := ggml.ModelConfig{Path: n.file.path}
	if remote {
		if n.dispatch, err = openDispatch(n.rt, n.cfg, n.file, n.host, ownCopy, n.log); err != nil {
			return err
		}
		n.onStop(n.dispatch.Close)
		if n.exchange == nil {
			n.host.Watch(n.dispatch)
		} else {
			n.exchange.runs = n.runs
			// The session is opened again at once, by SetHolders, over the better path;
			// what was asked over the old one is asked again.
			n.exchange.onDirect = func(id peer.ID) { n.dispatch.RemovePeer(id.String()) }
			n.exchange.onHeard = func() { n.dispatch.SetHolders(n.file.all(), n.holdersOf(n.file.id)) }
		}
		cfg.Experts = n.dispatch.compute
	}
	if n.model, err = n.rt.LoadModel(cfg); err != nil {
		return err
	}
	n.onStop(n.model.Close)
	n.engine, err = engine.Open(engine.Config{
		Model: n.model, Context: n.cfg.Model.Context / n.cfg.Model.Sequences, Sequences: n.cfg.Model.Sequences,
		Threads: n.cfg.Threads, Logger: n.log,
	})
	if err != nil {
		return err
	}
	n.onStop(n.engine.Close)
	return nil
}

// startDoor makes the gateway, by which the control API renders prompts too, and
// opens its HTTP door for clients where that is wanted.
func (n *Node) startDoor() (err error) {
	cfg := gateway.Config{Logger: n.log}
	if n.exchange != nil {
		cfg.Routes = newMarketDoor(n.exchange.table, n.weights).routes()
	}
	if n.gateway, err = gateway.New(cfg); err != nil {
		return err
	}
	n.answers.gateway = n.gateway
	if n.engine != nil {
		if err := n.answers.set(n.served()); err != nil {
			return err
		}
	}
	if !n.cfg.Has(RoleEntry) || n.cfg.HTTP == Off {
		return nil
	}
	if n.http, err = gateway.Listen(n.cfg.HTTP); err == nil {
		n.onStop(func() error { n.http.Close(); return nil }) // closed already unless the start failed
	}
	return err
}

// serve starts the loops and doors; the returned function waits for them. It
// is called once ctx has ended or failed has an error.
func (n *Node) serve(ctx context.Context, failed chan<- error) (wait func()) {
	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	fail := func(err error) {
		select {
		case failed <- err:
		default:
		}
	}
	if n.engine != nil {
		loops.Go(func() { n.keepReady(ctx) })
	}
	if n.exchange != nil {
		loops.Go(func() { n.exchange.run(ctx) })
	}
	if n.http != nil {
		loops.Go(func() {
			if err := n.gateway.Run(ctx, n.http); err != nil {
				fail(err)
			}
		})
	}
	control, err := OpenControl(n.cfg.Control, n, n.log)
	if err != nil {
		fail(err)
	}
	return func() {
		cancel()
		if n.engine != nil {
			late := time.AfterFunc(answerTime, func() { n.engine.Close() })
			defer late.Stop()
		}
		if control != nil {
			stop, done := context.WithTimeout(context.Background(), doorTime)
			defer done()
			control.Close(stop)
		}
		loops.Wait()
	}
}

// keepReady sends canaries until one went through every part that serves, and
// again when the engine is not ready any more or other workers are connected.
func (n *Node) keepReady(ctx context.Context) {
	tick := time.NewTicker(canaryPause)
	defer tick.Stop()
	said, tried := "", ""
	for {
		parts := n.connected()
		if n.engine.Ready() != nil || tried != parts {
			limit, cancel := context.WithTimeout(ctx, canaryDeadline)
			err := n.canary(limit)
			cancel()
			switch {
			case err == nil:
				n.log.Info("ready: a canary token went through every part", "model", n.file.name())
				said, tried = "", parts
				n.setTried()
			case ctx.Err() == nil && err.Error() != said:
				said = err.Error()
				n.log.Warn("not ready yet", "reason", said)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// connected names the workers that are connected now.
func (n *Node) connected() string {
	if n.dispatch == nil {
		return "none"
	}
	names := "some:"
	for _, p := range n.dispatch.Peers() {
		if p.Connected {
			names += " " + p.ID
		}
	}
	return names
}

// canary sends a token through the model, unless one went through just now, and
// a row through every worker. A worker that fails is not asked any more, so then a
// token is sent again. Running answers are left alone where that is possible:
// beside other tokens their sums round differently.
func (n *Node) canary(ctx context.Context) error {
	if n.engine.Ready() != nil {
		if err := n.engine.Canary(ctx); err != nil {
			return err
		}
	}
	if n.dispatch == nil {
		return nil
	}
	if err := n.dispatch.Canary(ctx); err != nil {
		n.log.Warn("workers failed the canary", "error", err)
		return n.engine.Canary(ctx)
	}
	return nil
}

func (n *Node) setTried() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tried = true
}

// Ready is nil once a canary went through every part that serves.
func (n *Node) Ready() error {
	if err := n.engine.Ready(); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.tried {
		return errors.New("not every worker has been tried yet")
	}
	return nil
}

// HTTPAddr is where the gateway listens, or "".
func (n *Node) HTTPAddr() string {
	if n.http == nil {
		return ""
	}
	return n.http.Addr().String()
}

// Addrs are the multiaddrs by which peers reach this node.
func (n *Node) Addrs() []string { return n.host.Addrs() }
