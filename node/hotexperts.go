package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"kvasird/experts"
	"kvasird/experts/place"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/api"
)

// hotFetchTime bounds how long the other layers wait for one whose experts come slowly; what
// came by then stays.
const hotFetchTime = 5 * time.Minute

// cacheBudget is the setting model.cache in bytes; 0: none.
func (m *ModelConfig) cacheBudget() int64 {
	n, err := parseBytes(m.Cache)
	if err != nil {
		return 0
	}
	return n
}

func (m *ModelConfig) checkCache() error {
	if m.Cache == "" || m.Cache == "0" {
		return nil
	}
	if _, err := parseBytes(m.Cache); err != nil {
		return fmt.Errorf("model.cache %q: %w, or 0 for none", m.Cache, err)
	}
	if m.Experts == ExpertsHere || m.Experts == ExpertsSwarm {
		return fmt.Errorf("model.cache: with model.experts = %q all experts are in memory here: set that to %q, or leave the cache out", m.Experts, ExpertsRemote)
	}
	return nil
}

// hotExperts are the experts that a backbone keeps of those that others compute: the ones that
// its router chooses most. It is the experts.Shelf of their cache.
type hotExperts struct {
	node   *Node
	kernel *ggml.Kernel
	budget int64
	file   *modelFile
	log    *slog.Logger
	every  time.Duration                 // between looks at what the router chose; 0: as experts.Cache has it
	cache  atomic.Pointer[experts.Cache] // nil: the model's experts are not known yet

	// Set by run before there is a cache.
	from   *gguf.Model  // where experts are read
	stored *store.Model // what they are fetched into; nil: from has all
}

// openHot makes room for a model's experts, which holds none until run.
func (n *Node) openHot(file *modelFile, budget int64) (*hotExperts, error) {
	if file.Kind() != gguf.Full && n.weights == nil {
		return nil, fmt.Errorf("model.cache: %s has holes where its experts are, and only in a network with a file can they be fetched: leave the cache out, or name the whole model", file.path)
	}
	k, err := n.rt.NewKernel(ggml.KernelConfig{Threads: n.cfg.Threads})
	if err != nil {
		return nil, err
	}
	return &hotExperts{node: n, kernel: k, budget: budget, file: file, log: n.log}, nil
}

// run keeps the experts until ctx ends. An error says that it cannot, which harms no answer.
func (h *hotExperts) run(ctx context.Context, d *experts.Dispatcher) error {
	if h.from = h.file.Model; h.from.Kind() != gguf.Full {
		m, g, err := h.node.learnModel(ctx, h.file.id, func(error) {})
		if err != nil {
			return err
		}
		h.stored, h.from = m, g
	}
	c, err := h.open(d)
	if err != nil {
		return err
	}
	h.cache.Store(c)
	return c.Run(ctx)
}

// open makes the cache, once it is set where the experts come from.
func (h *hotExperts) open(d *experts.Dispatcher) (*experts.Cache, error) {
	sizes, err := heldSizes(h.kernel, h.from)
	if err != nil {
		return nil, err
	}
	return experts.NewCache(experts.CacheConfig{
		Dispatcher: d, Shelf: h, Room: place.Room{Sizes: sizes, Budget: h.budget}, Known: h.known(), Every: h.every, Logger: h.log,
	})
}

// heldSizes is what an expert takes in a kernel, by layer.
func heldSizes(k *ggml.Kernel, g *gguf.Model) ([]int64, error) {
	sizes := make([]int64, g.Layers())
	for _, layer := range g.ExpertLayers() {
		for _, n := range []int{2, g.Experts()} { // where few lie, what is rounded up weighs more
			n = min(n, g.Experts())
			held, _, err := k.SliceBytes(g, oneLayer(layer, gguf.Range{End: n}))
			if err != nil {
				return nil, err
			}
			sizes[layer] = max(sizes[layer], (held+int64(n)-1)/int64(n))
		}
	}
	return sizes, nil
}

func oneLayer(layer int, held gguf.Range) gguf.Slice {
	return gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: held}
}

// known are the experts whose weights are on disk from before a restart.
func (h *hotExperts) known() [][]int32 {
	if h.stored == nil || h.stored.Complete() { // that all is there says nothing of what is used
		return nil
	}
	list := make([][]int32, h.from.Layers())
	all := make([]int32, h.from.Experts())
	for e := range all {
		all[e] = int32(e)
	}
	for _, layer := range h.from.ExpertLayers() {
		list[layer] = h.onDisk(layer, all)
	}
	return list
}

// onDisk are those of some experts that can be read.
func (h *hotExperts) onDisk(layer int, ids []int32) (here []int32) {
	for _, e := range ids {
		spans, err := store.SliceSpans(h.from, oneLayer(layer, gguf.Range{Begin: int(e), End: int(e) + 1}))
		whole := err == nil
		for file, list := range spans {
			whole = whole && len(h.stored.Missing(file, list)) == 0
		}
		if whole {
			here = append(here, e)
		}
	}
	return here
}

// Fetch brings experts here from peers, verified group by group.
func (h *hotExperts) Fetch(ctx context.Context, layer int, ids []int32) ([]int32, error) {
	if h.stored == nil {
		return ids, nil
	}
	spans := map[int][]store.Span{}
	for _, r := range rangesOf(ids) {
		more, err := store.SliceSpans(h.from, oneLayer(layer, r))
		if err != nil {
			return nil, err
		}
		for file, list := range more {
			spans[file] = append(spans[file], list...)
		}
	}
	limit, cancel := context.WithTimeout(ctx, hotFetchTime)
	defer cancel()
	err := h.node.weights.fetchNow(limit, h.stored, spans, fmt.Sprintf("hot experts of layer %d of %s", layer, h.stored.Name()))
	if err == nil {
		return ids, nil
	}
	return h.onDisk(layer, ids), err
}

// Put has the kernel hold some experts of a layer, and gives back the disk of those before.
func (h *hotExperts) Put(_ context.Context, layer int, ids []int32) error {
	err := h.kernel.DropSlice(oneLayer(layer, gguf.Range{End: h.from.Experts()}))
	if err != nil && !errors.Is(err, ggml.ErrNotLoaded) {
		return err
	}
	keep := rangesOf(ids)
	if len(keep) > 0 {
		if err := h.kernel.Load(h.from, layer, keep...); err != nil {
			return err
		}
	}
	if err := h.forget(layer, keep); err != nil { // only their disk is not given back
		h.log.Warn("experts that are not kept any more stay on disk", "layer", layer, "error", err)
	}
	return nil
}

// forget deletes what is on disk of a layer but for what is kept, is the volunteer's, or is of
// a model that is here as a whole.
func (h *hotExperts) forget(layer int, keep []gguf.Range) error {
	if h.stored == nil || h.stored.Complete() || h.stored.Pinned() || h.node.cfg.Has(RoleStage) {
		return nil
	}
	var others []gguf.Slice
	if v := h.node.exchange.volunteer; v != nil {
		others = v.beside(market.Part{Model: h.file.id})
	}
	gone := []gguf.Range{{End: h.from.Experts()}}
	for _, r := range keep {
		others = append(others, oneLayer(layer, r))
		last := gone[len(gone)-1]
		gone = append(gone[:len(gone)-1], gguf.Range{Begin: last.Begin, End: r.Begin}, gguf.Range{Begin: r.End, End: last.End})
	}
	for _, r := range gone {
		if r.Len() == 0 {
			continue
		}
		if err := dropSpans(h.stored, h.from, oneLayer(layer, r), others); err != nil {
			return err
		}
	}
	return nil
}

// rangesOf joins ascending ids.
func rangesOf(ids []int32) (list []gguf.Range) {
	for _, e := range ids {
		if n := len(list) - 1; n >= 0 && list[n].End == int(e) {
			list[n].End++
			continue
		}
		list = append(list, gguf.Range{Begin: int(e), End: int(e) + 1})
	}
	return list
}

// hotStatus is nil where no experts are kept.
func (d *dispatchPart) hotStatus() *api.HotExperts {
	if d == nil || d.hot == nil {
		return nil
	}
	out := &api.HotExperts{Budget: d.hot.budget, Trouble: "what the model's experts take is not known yet"}
	c := d.hot.cache.Load()
	if c == nil {
		return out
	}
	st := c.Stats()
	out.Bytes, out.Experts, out.Fetched, out.Recent, out.Trouble = d.hot.kernel.Bytes(), st.Experts, st.Fetched, st.Hits, st.Trouble
	out.Pairs, out.Hits = d.Pairs(), d.LocalPairs()
	return out
}

// keepHot runs the cache of a backbone; nil does nothing.
func (n *Node) keepHot(ctx context.Context, d *dispatchPart) {
	if d == nil || d.hot == nil {
		return
	}
	if err := d.hot.run(ctx, d.Dispatcher); err != nil && ctx.Err() == nil {
		n.log.Warn("no hot experts are kept: all are computed by workers", "error", err)
	}
}
