package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/p2p"
)

// crew is some worker processes, each of which has all experts of a model, and the
// host by which this process reaches them.
type crew struct {
	model   gguf.ModelID
	workers []*child
	names   []string // their peer ids
	host    *p2p.Host

	ctx   context.Context // of what is carried over lines
	end   context.CancelFunc
	lines sync.WaitGroup
}

// crewTime is for workers to load a model, which a busy disk may make them wait for.
const crewTime = 3 * time.Minute

// openCrew starts workers and greets them.
func (b *bench) openCrew(path string, workers int) (_ *crew, err error) {
	c := &crew{}
	c.ctx, c.end = context.WithCancel(b.ctx)
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	m, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	if c.model, err = m.ID(b.ctx); err != nil {
		return nil, err
	}
	for range workers {
		w, err := startChild(b.dir, fmt.Sprintf("worker-%d", rand.Uint32()), "--role", "worker", "--model", path,
			"--threads", fmt.Sprint(b.Threads), "--listen", "/ip4/127.0.0.1/tcp/0", "--mdns", Off, "--http", Off)
		if err != nil {
			return nil, err
		}
		c.workers = append(c.workers, w)
	}
	limit, cancel := context.WithTimeout(b.ctx, crewTime)
	defer cancel()
	return c, c.connect(limit, b.rt)
}

// connect waits for the workers and greets them.
func (c *crew) connect(ctx context.Context, rt *ggml.Runtime) error {
	var addrs []string
	for _, w := range c.workers {
		st, err := w.await(ctx, func(st *api.Status) bool { return serving(st) && localAddr(st) != "" })
		if err != nil {
			return err
		}
		addrs, c.names = append(addrs, localAddr(st)), append(c.names, st.PeerID)
	}
	identity, err := p2p.NewIdentity()
	if err != nil {
		return err
	}
	c.host, err = p2p.New(p2p.Config{
		Identity: identity, Network: "kvasir", Pack: Pack(rt), Agent: "kvasird-bench",
		Protocols: []string{expertsProtocol}, Peers: addrs,
	})
	if err != nil {
		return err
	}
	if err := c.host.Start(); err != nil {
		return err
	}
	for _, name := range c.names {
		id, err := peer.Decode(name)
		if err == nil {
			err = awaitPeer(ctx, c.host, id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// dispatch has experts computed by the workers with these names, over lines. The rest
// of the configuration may be zero.
func (c *crew) dispatch(ctx context.Context, cfg experts.Config, names []string, line func(name string) line) (*experts.Dispatcher, error) {
	cfg.Model, cfg.Logger = experts.ModelID(c.model.String()), slog.New(slog.DiscardHandler)
	cfg.Dialer = crewDialer{c, line}
	d, err := experts.NewDispatcher(cfg)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		d.AddPeer(name)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := awaitWorkers(ctx, d, len(names)); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// awaitWorkers waits for the sessions with so many workers.
func awaitWorkers(ctx context.Context, d *experts.Dispatcher, want int) error {
	for {
		connected := 0
		for _, p := range d.Peers() {
			if p.Connected {
				connected++
			}
		}
		if connected == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("sessions with %d of %d workers: %w", connected, want, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// crewDialer dials as a node does, and puts a line between.
type crewDialer struct {
	*crew
	line func(name string) line
}

func (d crewDialer) Dial(ctx context.Context, name string) (net.Conn, error) {
	far, err := laneDialer{d.host, d.model}.Dial(ctx, name)
	l := d.line(name)
	if err != nil || l == (line{}) {
		return far, err
	}
	near, inner, err := delayedPair(0)
	if err != nil {
		return nil, errors.Join(err, far.Close())
	}
	d.lines.Go(func() { bridge(d.ctx, inner, far, l) })
	return near, nil
}

// Close ends the workers.
func (c *crew) Close() error {
	var errs []error
	c.end()
	if c.host != nil {
		errs = append(errs, c.host.Close())
	}
	for _, w := range c.workers {
		errs = append(errs, w.stop())
	}
	c.lines.Wait()
	return errors.Join(errs...)
}

// remote is one worker process and a dispatcher to it, with nothing between.
type remote struct {
	*crew
	*experts.Dispatcher
}

// openRemote starts a worker for the whole of a model and waits for its session.
func (b *bench) openRemote(path string) (*remote, error) {
	c, err := b.openCrew(path, 1)
	if err != nil {
		return nil, err
	}
	d, err := c.dispatch(b.ctx, experts.Config{}, c.names, noLine)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &remote{c, d}, nil
}

func (r *remote) Close() error { return errors.Join(r.Dispatcher.Close(), r.crew.Close()) }

func (r *remote) compute(ctx context.Context, call *ggml.ExpertCall) error {
	return r.Compute(ctx, (*experts.Call)(call))
}
