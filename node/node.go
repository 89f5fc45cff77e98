package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/node/api"
	"kvasird/node/carry"
	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/node/meter"
	"kvasird/p2p"
	"kvasird/p2p/fetch"

	"github.com/libp2p/go-libp2p/core/peer"
)

// Version of this program.
const Version = "0.1.0"

// wireVersion is the version of what peers say to each other about experts. It
// is part of the runtime pack.
const wireVersion = 3

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
	cfg      Config
	log      *slog.Logger
	started  time.Time
	rt       *ggml.Runtime
	identity p2p.Identity
	device   ggml.Device // that experts lie on
	file     *modelFile
	host     *p2p.Host
	workers  *workers // roles worker and volunteer; empty for others

	metering   *metering   // in a network with a token; else nil, which counts nothing
	settlement *settlement // likewise; else nil

	store    *store.Store             // in a network with a file
	weights  *weights                 // likewise
	stages   *stages                  // likewise
	exchange *exchange                // likewise
	carried  *carry.Server            // likewise
	backbone atomic.Pointer[backbone] // role backbone; nil: it is not here yet
	gateway  *gateway.Gateway
	answers  answers
	keys     *keyBook // of the gateway
	http     httpDoor // of the gateway, role entry

	stops []func() error // in the order of starting

	storeMu sync.Mutex // held while a node without a network file works on its store

	mu      sync.Mutex // guards what follows
	state   api.State
	waiting error // why there is no backbone yet
}

// Run starts a node, calls ready, and works until ctx ends. Start goes from the
// ground up, stop the other way.
func Run(ctx context.Context, cfg Config, log *slog.Logger, ready func(*Node)) (err error) {
	n := &Node{cfg: cfg, log: log, started: time.Now(), state: api.StateStarting, http: httpDoor{opened: make(chan struct{})}}
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
	n.identity = identity
	if err := n.openMetering(identity); err != nil {
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
	if n.cfg.Has(RoleWorker) || (n.cfg.Has(RoleBackbone) || n.cfg.Has(RoleStage)) && n.cfg.Model.ID == nil {
		if n.file, err = openModelFile(ctx, n.cfg, n.store, n.log); err != nil {
			return err
		}
		n.onStop(n.file.Close)
	}
	n.workers = newWorkers(n.rt, n.cfg, n.log)
	n.workers.meters = n.metering
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
		if err := n.startSettlement(ctx, identity, data); err != nil {
			return err
		}
	}
	if err := n.makeGateway(); err != nil {
		return err
	}
	if n.cfg.Has(RoleBackbone) {
		n.setWaiting(errors.New("it begins to look for the model"))
		if n.file != nil {
			if err := n.openBackbone(ctx, n.file); err != nil {
				return err
			}
		}
	}
	if err := n.openHTTP(); err != nil {
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
	if err := n.serveMetering(); err != nil {
		return err
	}
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
	cfg.Protocols = append(cfg.Protocols, fetch.Protocol, ringProtocol, carry.Protocol)
	if n.metering != nil {
		cfg.Protocols = append(cfg.Protocols, meter.Protocol, pricesProtocol)
	}
	if n.cfg.Has(RoleSettle) {
		cfg.Protocols = append(cfg.Protocols, cashier.Protocol)
	}
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

// makeGateway makes the gateway, by which the control API renders prompts too.
func (n *Node) makeGateway() (err error) {
	if n.keys, err = openKeys(filepath.Join(n.cfg.Data, keysName), time.Now); err != nil {
		return err
	}
	cfg := gateway.Config{Logger: n.log, Limit: time.Duration(n.cfg.Deadline) * time.Second, Hosts: n.cfg.Gateway.Hosts, Origins: n.cfg.Gateway.Origins}
	if n.cfg.asksForKey() {
		cfg.Keys = n.keys.ring
	}
	if cfg.Store, err = n.openResponses(); err != nil {
		return err
	}
	if n.exchange != nil {
		cfg.Routes = newMarketDoor(n.exchange.table, n.weights).routes()
	}
	if n.settlement != nil {
		maps.Copy(cfg.Routes, n.moneyDoor())
		cfg.Payments = n.settlement.pay
	}
	n.gateway, err = gateway.New(cfg)
	n.answers.gateway, n.answers.names, n.answers.log = n.gateway, &n.cfg.Gateway, n.log
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
	if n.cfg.Has(RoleBackbone) {
		loops.Go(func() {
			if err := n.runBackbone(ctx); err != nil {
				fail(err)
			}
		})
	}
	if n.exchange != nil {
		loops.Go(func() { n.exchange.run(ctx) })
	}
	loops.Go(func() {
		if err := n.runHTTP(ctx); err != nil {
			fail(err)
		}
	})
	if n.settlement != nil {
		n.settlement.run(ctx, &loops, fail)
	}
	control, err := OpenControl(n.cfg.Control, n, n.log)
	if err != nil {
		fail(err)
	}
	return func() {
		cancel()
		if b := n.backbone.Load(); b != nil {
			late := time.AfterFunc(answerTime, func() { b.Close() })
			defer late.Stop()
		}
		if control != nil {
			stop, done := context.WithTimeout(context.Background(), doorTime)
			defer done()
			control.Close(stop)
		}
		if n.carried != nil {
			stop, done := context.WithTimeout(context.Background(), answerTime)
			defer done()
			n.carried.Close(stop)
		}
		n.settlement.close()
		loops.Wait()
	}
}

// HTTPAddr is where the gateway listens, or "".
func (n *Node) HTTPAddr() string {
	addr, _ := n.http.addr()
	return addr
}

// Addrs are the multiaddrs by which peers reach this node.
func (n *Node) Addrs() []string { return n.host.Addrs() }
