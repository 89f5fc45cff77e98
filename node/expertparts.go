package node

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/node/engine"
	"kvasird/p2p"
)

// expertsProtocol is the protocol of package experts, as hosts name it. On a
// stream of it the dispatcher first sends the id of the model that it wants, 32
// bytes, since a node may serve several.
const expertsProtocol = "experts/1"

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

// Ranges reads the two ranges. A zero one is all.
func (s SliceConfig) Ranges() (layers, experts gguf.Range, err error) {
	for _, r := range []struct {
		name, text string
		to         *gguf.Range
	}{{"layers", s.Layers, &layers}, {"experts", s.Experts, &experts}} {
		if r.text == "" {
			continue
		}
		if *r.to, err = gguf.ParseRange(r.text); err != nil {
			return layers, experts, fmt.Errorf("slice %s: %w", r.name, err)
		}
	}
	return layers, experts, nil
}

func wireSlices(held []gguf.Slice) []experts.Slice {
	var out []experts.Slice
	for _, s := range held {
		out = append(out, wireSlice(s))
	}
	return out
}

func wireSlice(s gguf.Slice) experts.Slice {
	return experts.Slice{
		FirstLayer: s.Layers.Begin, EndLayer: s.Layers.End,
		FirstExpert: s.Experts.Begin, EndExpert: s.Experts.End,
	}
}

// all is the slice of every expert.
func (m *modelFile) all() experts.Slice {
	return experts.Slice{EndLayer: m.Layers(), EndExpert: m.Experts()}
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

// dispatchPart has this node's experts computed by workers.
type dispatchPart struct {
	*experts.Dispatcher
	file *modelFile
	own  *ggml.Kernel // the copy of last resort, or nil
	hot  *hotExperts  // that are kept here, or nil
	turn engine.Turn  // of what computes here for the node's model

	mu      sync.Mutex // guards what follows
	meter   *market.Meter
	counted [][]uint64 // pairs by layer and expert that the meter has
}

// PrecisionAuto leaves it to the node how rows travel to the experts of others and back. It takes
// f32: of what answers may lose by less, nothing is known that holds for every pair of backends. An
// operator may choose f16, bf16 or q8 where the bytes of a line cost more than that.
const PrecisionAuto = "auto"

func (m *ModelConfig) precision() (experts.Precision, error) {
	if m.Precision == PrecisionAuto {
		return experts.F32, nil
	}
	return experts.ParsePrecision(m.Precision)
}

// openDispatch begins to have experts computed by workers, of which so many bytes are to be kept
// here unless all are. served is told by whom; nil: nobody is.
func (n *Node) openDispatch(m *modelFile, ownCopy bool, cache int64, served func(peerID string, layer, pairs int)) (*dispatchPart, error) {
	shape, err := market.ShapeOf(m.Model)
	if err != nil {
		return nil, err
	}
	precision, err := n.cfg.Model.precision()
	if err != nil {
		return nil, err
	}
	sums, err := experts.ParseSums(n.cfg.Model.Sums)
	if err != nil {
		return nil, err
	}
	d := &dispatchPart{file: m}
	if d.meter, err = market.NewMeter(shape); err != nil {
		return nil, err
	}
	var local *experts.Local
	switch {
	case ownCopy:
		k, err := n.rt.NewKernel(ggml.KernelConfig{Device: n.cfg.Device, Threads: n.cfg.Threads})
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
		local = &experts.Local{Kernel: turnKernel{k, &d.turn}, Slices: wireSlices(held)}
	case cache > 0:
		if d.hot, err = n.openHot(m, cache); err != nil {
			return nil, err
		}
		local = &experts.Local{Kernel: turnKernel{d.hot.kernel, &d.turn}, First: true}
	}
	d.Dispatcher, err = experts.NewDispatcher(experts.Config{
		Model: experts.ModelID(m.id.String()), Dialer: laneDialer{n.host, m.id}, Local: local, Precision: precision, Sums: sums,
		CoverageWait: n.cfg.CoverageWait(), Logger: n.log, Served: served, Unpaid: n.metering.unpaid(m.id),
		AuditInterval: n.cfg.auditInterval(), Band: n.band, Found: n.found(m.id),
		Fault: func(id string, reason error) {
			if p, err := peer.Decode(id); err == nil {
				n.host.Blame(p, p2p.WrongData, reason.Error())
			}
		},
	})
	if err != nil {
		d.closeKernels()
		return nil, err
	}
	return d, nil
}

// turnKernel computes in turn with the contexts whose experts it has.
type turnKernel struct {
	*ggml.Kernel
	turn *engine.Turn
}

func (k turnKernel) Compute(prog int, rows []float32, row, expert []int32, out []float32) error {
	return k.turn.Compute(func() error { return k.Kernel.Compute(prog, rows, row, expert, out) })
}

func (d *dispatchPart) closeKernels() {
	if d.own != nil {
		d.own.Close()
	}
	if d.hot != nil {
		d.hot.kernel.Close()
	}
}

// demand is what the router chose of late, for the market.
func (d *dispatchPart) demand(now time.Time) []market.LayerDemand {
	d.mu.Lock()
	defer d.mu.Unlock()
	for layer, row := range d.Demand() {
		if layer == len(d.counted) {
			d.counted = append(d.counted, nil)
		}
		for e, n := range row {
			if e == len(d.counted[layer]) {
				d.counted[layer] = append(d.counted[layer], 0)
			}
			d.meter.Add(layer, e, int(n-d.counted[layer][e]), now)
			d.counted[layer][e] = n
		}
	}
	return d.meter.Demand(now)
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

// serves reports whether a peer says that it serves experts of a model.
func serves(p *p2p.Peer, id gguf.ModelID) bool {
	return slices.Contains(p.Models, id.String()) && slices.Contains(p.Protocols, expertsProtocol)
}

func (d *dispatchPart) PeerLost(p *p2p.Peer) { d.RemovePeer(p.ID.String()) }

func (d *dispatchPart) Close() error {
	err := d.Dispatcher.Close()
	d.closeKernels()
	return err
}

// laneDialer connects package experts to peers.
type laneDialer struct {
	host  *p2p.Host
	model gguf.ModelID
}

func (l laneDialer) Dial(ctx context.Context, peerID string) (net.Conn, error) {
	c, err := dialLane(ctx, l.host, peerID, expertsProtocol)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	c.SetWriteDeadline(deadline)
	if _, err := c.Write(l.model[:]); err != nil {
		c.Close()
		return nil, err
	}
	c.SetWriteDeadline(time.Time{})
	return c, nil
}

// dialLane connects to a peer over the fast lane, or a stream where there is none.
func dialLane(ctx context.Context, host *p2p.Host, name, proto string) (net.Conn, error) {
	id, err := meet(ctx, host, name)
	if err != nil {
		return nil, err
	}
	c, err := host.OpenLane(ctx, id, proto)
	if err != nil {
		return nil, err
	}
	return netConn{c}, nil
}

// meet greets a peer unless it is ready.
func meet(ctx context.Context, host *p2p.Host, name string) (peer.ID, error) {
	id, err := peer.Decode(name)
	if err == nil && host.Peer(id) == nil {
		_, err = host.Hello(ctx, peer.AddrInfo{ID: id})
	}
	return id, err
}

// netConn gives a p2p.Conn the addresses that net.Conn asks for: peer ids.
type netConn struct{ p2p.Conn }

type peerAddr peer.ID

func (peerAddr) Network() string  { return "kvasir" }
func (a peerAddr) String() string { return peer.ID(a).String() }

func (c netConn) LocalAddr() net.Addr  { return peerAddr("") }
func (c netConn) RemoteAddr() net.Addr { return peerAddr(c.Remote()) }
