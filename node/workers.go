package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/p2p"
)

// prefaceTime is how long a dispatcher may take to name the model it wants.
const prefaceTime = 10 * time.Second

// workers are this node's experts of all models, which others have computed.
type workers struct {
	rt     *ggml.Runtime
	cfg    Config
	log    *slog.Logger
	admit  func(id peer.ID) error      // nil: everybody who passed the hello
	served func(models []gguf.ModelID) // told which models have experts here, when that changes
	meters *metering                   // counts what is computed; may be nil
	limit  int64                       // bytes of experts where they lie; 0: none

	limitKey string // the setting that limit is

	mu    sync.Mutex // guards parts
	parts map[gguf.ModelID]*workerPart
}

func newWorkers(rt *ggml.Runtime, cfg Config, log *slog.Logger) *workers {
	return &workers{rt: rt, cfg: cfg, log: log, parts: map[gguf.ModelID]*workerPart{}}
}

// workerPart computes slices of one model. Slices come and go one at a time.
type workerPart struct {
	id     gguf.ModelID
	kernel *ggml.Kernel
	worker *experts.Worker

	mu    sync.Mutex   // held while slices change; guards what follows
	banks []gguf.Slice // as loaded in the kernel
}

// open returns the part for a model, without slices when it is new.
func (ws *workers) open(id gguf.ModelID, g *gguf.Model) (*workerPart, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.parts[id]; w != nil {
		return w, nil
	}
	k, err := ws.rt.NewKernel(ggml.KernelConfig{Device: ws.cfg.Device, Threads: ws.cfg.Threads})
	if err != nil {
		return nil, err
	}
	w := &workerPart{id: id, kernel: k}
	cfg := experts.WorkerConfig{Model: experts.ModelID(id.String()), Kernel: k, Allow: ws.meters.allows(id, g), Computed: ws.meters.computed(id, g), Logger: ws.log}
	if ws.admit != nil {
		cfg.Admit = func(id string) error {
			p, err := peer.Decode(id)
			if err != nil {
				return err
			}
			return ws.admit(p)
		}
	}
	if w.worker, err = experts.NewWorker(cfg); err != nil {
		k.Close()
		return nil, err
	}
	ws.parts[id] = w
	return w, nil
}

func (ws *workers) list() []*workerPart {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return slices.Collect(maps.Values(ws.parts))
}

// hang reports whether a batch is being computed for longer than any takes.
func (ws *workers) hang() bool {
	return slices.ContainsFunc(ws.list(), func(w *workerPart) bool { return w.worker.Stats().Kernel >= hungAfter })
}

// bytes is the memory that all experts take.
func (ws *workers) bytes() (n int64) {
	for _, w := range ws.list() {
		n += w.kernel.Bytes()
	}
	return n
}

// add loads a slice and offers it to those who have it computed.
func (ws *workers) add(ctx context.Context, id gguf.ModelID, g *gguf.Model, s gguf.Slice) error {
	w, err := ws.open(id, g)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	held, _, err := w.kernel.SliceBytes(g, s)
	if err != nil {
		return err
	}
	if n := ws.bytes(); ws.limit > 0 && n+held > ws.limit {
		return fmt.Errorf("experts %v take %s: %s of the %s that they may take in memory are used (%s)",
			s, bytesText(held), bytesText(n), bytesText(ws.limit), ws.limitKey)
	}
	if err := w.kernel.LoadSlice(ctx, g, s); err != nil {
		return err
	}
	if err := w.worker.AddSlice(wireSlice(s)); err != nil {
		return errors.Join(err, w.kernel.DropSlice(s))
	}
	w.banks = append(w.banks, s)
	ws.log.Info("experts loaded", "model", id.String(), "slice", s.String(), "bytes", w.kernel.Bytes())
	ws.tell()
	return nil
}

// addAll loads slices, which may overlap, as one.
func (ws *workers) addAll(m *modelFile, held []gguf.Slice) error {
	w, err := ws.open(m.id, m.Model)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.kernel.LoadSlices(m.Model, held...); err != nil {
		return fmt.Errorf("%s: %w: name another file with --model", m.path, err)
	}
	ws.log.Info("experts loaded", "slices", fmt.Sprint(held), "bytes", w.kernel.Bytes(), "repacked_tensors", w.kernel.Repacked())
	return w.worker.SetSlices(context.Background(), wireSlices(held))
}

// loaded lists the slices as they were loaded.
func (ws *workers) loaded() map[gguf.ModelID][]gguf.Slice {
	out := map[gguf.ModelID][]gguf.Slice{}
	for _, w := range ws.list() {
		w.mu.Lock()
		out[w.id] = slices.Clone(w.banks)
		w.mu.Unlock()
	}
	return out
}

// slices lists what is served, of all models.
func (ws *workers) slices() []experts.Slice {
	var out []experts.Slice
	for _, w := range ws.list() {
		out = append(out, w.worker.Slices()...)
	}
	return out
}

// rows counts the rows computed, by layer.
func (ws *workers) rows() []experts.LayerRows {
	byLayer := map[int]uint64{}
	for _, w := range ws.list() {
		for _, r := range w.worker.Stats().Rows {
			byLayer[r.Layer] += r.Rows
		}
	}
	var out []experts.LayerRows
	for _, layer := range slices.Sorted(maps.Keys(byLayer)) {
		out = append(out, experts.LayerRows{Layer: layer, Rows: byLayer[layer]})
	}
	return out
}

// remove gives experts up: the dispatchers are told first. What else was loaded
// together with them goes on being served.
func (ws *workers) remove(ctx context.Context, id gguf.ModelID, g *gguf.Model, s gguf.Slice) error {
	w, err := ws.open(id, g)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var stay, touched, rest []gguf.Slice
	for _, b := range w.banks {
		cut := without(b, s)
		if len(cut) == 1 && cut[0] == b {
			stay = append(stay, b)
			continue
		}
		touched, rest = append(touched, b), append(rest, cut...)
	}
	if len(touched) == 0 {
		return nil
	}
	now := slices.Concat(stay, rest)
	if err := w.worker.SetSlices(ctx, wireSlices(now)); err != nil {
		return err
	}
	for _, b := range touched {
		if err := w.kernel.ReplaceSlice(ctx, g, b, without(b, s)...); err != nil {
			return err
		}
	}
	w.banks = now
	ws.log.Info("experts given up", "model", id.String(), "slice", s.String(), "bytes", w.kernel.Bytes())
	ws.tell()
	return nil
}

// without returns what is left of a one-layer slice.
func without(b, s gguf.Slice) []gguf.Slice {
	cut := b.Experts.Intersect(s.Experts)
	if b.Layers.Intersect(s.Layers).Len() == 0 || cut.Len() == 0 {
		return []gguf.Slice{b}
	}
	var rest []gguf.Slice
	for _, r := range []gguf.Range{{Begin: b.Experts.Begin, End: cut.Begin}, {Begin: cut.End, End: b.Experts.End}} {
		if r.Len() > 0 {
			rest = append(rest, gguf.Slice{Layers: b.Layers, Experts: r})
		}
	}
	return rest
}

// tell reports the models that have experts here.
func (ws *workers) tell() {
	if ws.served != nil {
		ws.served(ws.models())
	}
}

// models lists the models that have experts here.
func (ws *workers) models() []gguf.ModelID {
	var models []gguf.ModelID
	for _, w := range ws.list() {
		if len(w.worker.Slices()) > 0 {
			models = append(models, w.id)
		}
	}
	slices.SortFunc(models, func(a, b gguf.ModelID) int { return slices.Compare(a[:], b[:]) })
	return models
}

// serve answers one peer's stream or lane, which begins with the id of the model
// that it wants.
func (ws *workers) serve(p *p2p.Peer, c p2p.Conn) {
	w, err := ws.wanted(c)
	if err == nil {
		err = w.worker.Serve(context.Background(), netConn{c})
	}
	if err != nil {
		ws.log.Warn("expert session ended", "peer", p.ID.String(), "error", err)
	}
}

func (ws *workers) wanted(c p2p.Conn) (*workerPart, error) {
	var id gguf.ModelID
	c.SetReadDeadline(time.Now().Add(prefaceTime))
	if _, err := io.ReadFull(c, id[:]); err != nil {
		return nil, fmt.Errorf("it did not say which model it wants: %w", err)
	}
	c.SetReadDeadline(time.Time{})
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w := ws.parts[id]; w != nil {
		return w, nil
	}
	for _, w := range ws.parts {
		return w, nil // which says to the peer that it is of another model
	}
	return nil, fmt.Errorf("it wants experts of model %v: there are none of any model here", id)
}

// recheck ends the sessions of peers that have lost their rights.
func (ws *workers) recheck() {
	for _, w := range ws.list() {
		w.worker.Recheck()
	}
}

// busy reports whether calls wait to be computed.
func (ws *workers) busy() bool {
	for _, w := range ws.list() {
		if w.worker.Stats().Waiting > 0 {
			return true
		}
	}
	return false
}

// drain has all who use the experts go elsewhere, until ctx ends.
func (ws *workers) drain(ctx context.Context) error {
	var errs []error
	for _, w := range ws.list() {
		errs = append(errs, w.worker.Drain(ctx))
	}
	return errors.Join(errs...)
}

func (ws *workers) resume() error {
	var errs []error
	for _, w := range ws.list() {
		errs = append(errs, w.worker.Resume())
	}
	return errors.Join(errs...)
}

// closeWorkers answers what was sent and ends all sessions.
func (ws *workers) closeWorkers() error {
	var all sync.WaitGroup
	list := ws.list()
	errs := make([]error, len(list))
	for i, w := range list {
		all.Go(func() { errs[i] = w.worker.Close() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// Close frees the experts.
func (ws *workers) Close() error {
	err := ws.closeWorkers()
	for _, w := range ws.list() {
		err = errors.Join(err, w.kernel.Close())
	}
	return err
}
