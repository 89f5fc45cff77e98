package node

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/p2p"
)

// expertsProtocol is the protocol of package experts, as hosts name it.
const expertsProtocol = "experts/1"

// workerPart computes this node's slices for others.
type workerPart struct {
	kernel *ggml.Kernel
	worker *experts.Worker
	slices []gguf.Slice
}

func openWorker(rt *ggml.Runtime, cfg Config, m *modelFile, log *slog.Logger) (*workerPart, error) {
	held, err := m.slices(cfg.Slices)
	if err != nil {
		return nil, err
	}
	k, err := rt.NewKernel(ggml.KernelConfig{Device: cfg.Device, Threads: cfg.Threads})
	if err != nil {
		return nil, err
	}
	w := &workerPart{kernel: k, slices: held}
	if err := k.LoadSlices(m.Model, held...); err != nil {
		k.Close()
		return nil, fmt.Errorf("%s: %w: name another file with --model", m.path, err)
	}
	w.worker, err = experts.NewWorker(experts.WorkerConfig{
		Model: experts.ModelID(m.id.String()), Kernel: k, Slices: wireSlices(held), Logger: log,
	})
	if err != nil {
		k.Close()
		return nil, err
	}
	log.Info("experts loaded", "slices", fmt.Sprint(held), "bytes", k.Bytes(), "repacked_tensors", k.Repacked())
	return w, nil
}

// slices resolves the configured slices; what is left out is all that the file holds.
func (m *modelFile) slices(configured []SliceConfig) ([]gguf.Slice, error) {
	all := gguf.Slice{Layers: gguf.Range{End: m.Layers()}, Experts: gguf.Range{End: m.Experts()}}
	if m.Kind() == gguf.ExpertSlice {
		all = m.Slice()
	}
	if len(m.ExpertLayers()) == 0 {
		return nil, fmt.Errorf("%s has no experts: a worker has nothing to do", m.path)
	}
	if len(configured) == 0 {
		return []gguf.Slice{all}, nil
	}
	var out []gguf.Slice
	for _, c := range configured {
		layers, held, err := c.Ranges()
		if err != nil {
			return nil, err
		}
		s := all
		if layers != (gguf.Range{}) {
			s.Layers = layers
		}
		if held != (gguf.Range{}) {
			s.Experts = held
		}
		if !all.Layers.Covers(s.Layers) || !all.Experts.Covers(s.Experts) {
			return nil, fmt.Errorf("slice %v: %s holds %v", s, m.path, all)
		}
		out = append(out, s)
	}
	return out, nil
}

func wireSlices(held []gguf.Slice) []experts.Slice {
	var out []experts.Slice
	for _, s := range held {
		out = append(out, experts.Slice{
			FirstLayer: s.Layers.Begin, EndLayer: s.Layers.End,
			FirstExpert: s.Experts.Begin, EndExpert: s.Experts.End,
		})
	}
	return out
}

func apiSlices(held []experts.Slice) []api.Slice {
	var out []api.Slice
	for _, s := range held {
		out = append(out, api.Slice{
			LayerBegin: s.FirstLayer, LayerEnd: s.EndLayer,
			ExpertBegin: s.FirstExpert, ExpertEnd: s.EndExpert,
		})
	}
	return out
}

// serve answers one peer's stream or lane.
func (w *workerPart) serve(log *slog.Logger) p2p.Handler {
	return func(p *p2p.Peer, c p2p.Conn) {
		if err := w.worker.Serve(context.Background(), netConn{c}); err != nil {
			log.Warn("expert session ended", "peer", p.ID.String(), "error", err)
		}
	}
}

func (w *workerPart) Close() error {
	if err := w.worker.Close(); err != nil {
		return err
	}
	return w.kernel.Close()
}

// dispatchPart has this node's experts computed by workers.
type dispatchPart struct {
	*experts.Dispatcher
	own *ggml.Kernel // the copy of last resort, or nil
}

func openDispatch(rt *ggml.Runtime, cfg Config, m *modelFile, host *p2p.Host, ownCopy bool, log *slog.Logger) (*dispatchPart, error) {
	d := &dispatchPart{}
	var local *experts.Local
	if ownCopy {
		k, err := rt.NewKernel(ggml.KernelConfig{Device: cfg.Device, Threads: cfg.Threads})
		if err != nil {
			return nil, err
		}
		d.own = k
		held, err := m.slices(nil)
		if err == nil {
			err = k.LoadSlices(m.Model, held...)
		}
		if err != nil {
			k.Close()
			return nil, err
		}
		local = &experts.Local{Kernel: k, Slices: wireSlices(held)}
	}
	var err error
	d.Dispatcher, err = experts.NewDispatcher(experts.Config{
		Model: experts.ModelID(m.id.String()), Dialer: laneDialer{host}, Local: local,
		CoverageWait: cfg.CoverageWait(), Logger: log,
	})
	if err != nil {
		if d.own != nil {
			d.own.Close()
		}
		return nil, err
	}
	return d, nil
}

// compute is the ExpertFunc of the node's model.
func (d *dispatchPart) compute(ctx context.Context, call *ggml.ExpertCall) error {
	return d.Compute(ctx, (*experts.Call)(call))
}

// PeerReady and PeerLost make dispatchPart a p2p.Watcher: every peer that says it
// serves experts gets a session, which finds out whether the model is the same.
func (d *dispatchPart) PeerReady(p *p2p.Peer) {
	if len(p.Models) > 0 && slices.Contains(p.Protocols, expertsProtocol) {
		d.AddPeer(p.ID.String())
	}
}

func (d *dispatchPart) PeerLost(p *p2p.Peer) { d.RemovePeer(p.ID.String()) }

func (d *dispatchPart) Close() error {
	err := d.Dispatcher.Close()
	if d.own != nil {
		d.own.Close()
	}
	return err
}

// laneDialer connects package experts to peers over the fast lane, or a stream
// where there is none.
type laneDialer struct{ host *p2p.Host }

func (l laneDialer) Dial(ctx context.Context, peerID string) (net.Conn, error) {
	id, err := peer.Decode(peerID)
	if err != nil {
		return nil, err
	}
	c, err := l.host.OpenLane(ctx, id, expertsProtocol)
	if err != nil {
		return nil, err
	}
	return netConn{c}, nil
}

// netConn gives a p2p.Conn the addresses that net.Conn asks for: peer ids.
type netConn struct{ p2p.Conn }

type peerAddr peer.ID

func (peerAddr) Network() string  { return "kvasir" }
func (a peerAddr) String() string { return peer.ID(a).String() }

func (c netConn) LocalAddr() net.Addr  { return peerAddr("") }
func (c netConn) RemoteAddr() net.Addr { return peerAddr(c.Remote()) }
