package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/engine"
	"kvasird/node/gateway"
	"kvasird/node/pay"
)

// sourcePause is the first pause before it is looked again for who has a model.
const sourcePause = 250 * time.Millisecond

// draftsAuto is ModelConfig.Drafts where guessing tokens is left to what it brings.
const draftsAuto = "auto"

// backbone is the model that this node runs for clients: all of it, or all but
// the experts.
type backbone struct {
	file     *modelFile
	dispatch *dispatchPart // nil: its experts are here
	model    *ggml.Model
	computer
	engine   *engine.Engine   // the computer that makes text, or nil
	embedder *engine.Embedder // the one that makes embeddings, or nil
	second   atomic.Int64     // bytes of memory for a second context
	tried    atomic.Bool      // a canary went through every part once
	takes    int64            // bytes of memory for weights and caches; 0: not known
	caches   int64            // of them, for the tokens of sequences
	pace     pace             // of the exchange's goroutine
	// lent counts rows of answers for other nodes; may be nil.
	lent func(entry string, rows int)
	// allows says why rows of an answer for another node are not computed; may be nil.
	allows func(entry string, rows int) error
	show   func(ctx context.Context, peers []string, needed bool) // that ctx is of a paid request
}

// computer is what answers of a backbone are computed by.
type computer interface {
	Ready() error // nil after a Canary, until something fails
	Canary(ctx context.Context) error
	Stats() engine.Stats
	Context() int // tokens of one sequence
	Close() error
}

// openBackbone loads the model, after a child process tried it, and answers for it.
func (n *Node) openBackbone(ctx context.Context, file *modelFile) error {
	remote, ownCopy, err := file.remoteExperts(n.cfg)
	if err != nil {
		return err
	}
	if free, err := availableMemory(); err == nil {
		if err := file.admit(n.cfg, remote, free, n.log); err != nil {
			return err
		}
	}
	if err := file.probe(ctx, n.cfg, n.rt.Release(), remote); err != nil {
		return err
	}
	takes, caches := file.takes(n.cfg, remote)
	b := &backbone{file: file, takes: takes, caches: caches, show: n.metering.show,
		lent:   n.metering.window(file.id, file.Model, gguf.Range{End: file.Layers()}),
		allows: n.metering.allowsRows(file.id, file.Model, gguf.Range{End: file.Layers()}, !remote, false)}
	cfg := ggml.ModelConfig{Path: file.path, GPULayers: n.cfg.Model.GPULayers}
	if cfg.Overrides, err = n.cfg.Model.overrides(); err != nil {
		return err
	}
	if remote {
		if b.dispatch, err = n.openDispatch(file, ownCopy, n.cfg.Model.cacheBudget(), n.metering.pairs(file.id, file.Model)); err != nil {
			return err
		}
		n.onStop(b.dispatch.Close)
		if n.exchange == nil {
			n.host.Watch(b.dispatch)
		}
		cfg.Experts = engine.Experts(b.dispatch.compute)
	}
	if b.model, err = n.rt.LoadModel(cfg); err != nil {
		return err
	}
	n.onStop(b.model.Close)
	if err := b.openComputer(n.cfg, n.metering.own(file.id, file.Model, !remote), n.log); err != nil {
		return err
	}
	n.onStop(b.Close)
	n.backbone.Store(b)
	if n.exchange != nil {
		n.exchange.changed() // which tells it who has the experts
	}
	return n.answers.set(file.id, n.served(b))
}

// openComputer makes what the model is for: text, or embeddings. served is told of its
// rows, in a network with a token; nil: nobody is.
func (b *backbone) openComputer(cfg Config, served func(computed, cached int), log *slog.Logger) (err error) {
	context := cfg.Model.Context / cfg.Model.Sequences
	if b.file.Pooling() != gguf.NoPooling {
		b.embedder, err = engine.OpenEmbedder(engine.EmbedConfig{Model: b.model, Context: context, Threads: cfg.Threads, Served: served})
		b.computer = b.embedder
		return err
	}
	own := engine.Config{
		Model: b.model, Context: context, Sequences: cfg.Model.Sequences, Threads: cfg.Threads, Logger: log, Served: served,
	}
	if b.dispatch != nil {
		own.Turn, own.Lanes = &b.dispatch.turn, cfg.Model.Interleave
		if cfg.Model.Drafts == draftsAuto {
			own.Drafts = &engine.Drafts{Resident: b.dispatch.Resident, Paid: served != nil}
		}
		own.Spare = b.spare
	}
	b.engine, err = engine.Open(own)
	b.computer = b.engine
	return err
}

// spare says whether there is memory for a second context with half of the cells, twice over, and
// counts it.
func (b *backbone) spare() bool {
	free, err := availableMemory()
	if err != nil || b.takes == 0 || free < b.caches {
		return false
	}
	b.second.Store(b.caches / 2)
	return true
}

// served is the node's own model as the gateway sees it.
func (n *Node) served(b *backbone) gateway.Model {
	m := b.model
	created := n.started
	if info, err := os.Stat(b.file.path); err == nil {
		created = info.ModTime()
	}
	out := gateway.Model{
		ID: b.file.name, Created: created, ChatTemplate: m.ChatTemplate(),
		BOS: string(m.Piece(m.BOS(), true)), EOS: string(m.Piece(m.EOS(), true)),
		VocabSize: m.VocabSize(), Engine: engineDoor{n, b},
	}
	if b.embedder != nil {
		out.NoText, out.Engine = true, embedDoor{n, b.embedder}
	}
	return out
}

// runBackbone keeps the model ready, after fetching what it needs of one that is
// named by its id. Errors of that end the node.
func (n *Node) runBackbone(ctx context.Context) error {
	if n.backbone.Load() == nil {
		file, err := n.fetchBackbone(ctx)
		if err == nil {
			n.setWaiting(fmt.Errorf("model %s is being loaded", file.name))
			err = n.openBackbone(ctx, file)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
	b := n.backbone.Load()
	var hot sync.WaitGroup
	hot.Go(func() { n.keepHot(ctx, b.dispatch) })
	n.keepReady(ctx, b)
	hot.Wait()
	return nil
}

// fetchBackbone brings what the backbone itself needs of a model of the network:
// all but the experts, or all of a model that has none.
func (n *Node) fetchBackbone(ctx context.Context) (*modelFile, error) {
	id := *n.cfg.Model.ID
	m, g, err := n.learnModel(ctx, id, n.setWaiting)
	if err != nil {
		return nil, err
	}
	what := "what the backbone needs of " + m.Name()
	n.setWaiting(errors.New(what + " is being fetched"))
	err = n.weights.fetchPatiently(ctx, m, store.DenseSpans(g), what, func(err error) {
		if err != nil {
			n.setWaiting(err)
		}
	})
	return &modelFile{path: m.Path(0), name: m.Name(), Model: g, id: id}, err
}

// learnModel learns the header of a model, from whoever comes to have it, until ctx
// ends. why is told what is in the way.
func (n *Node) learnModel(ctx context.Context, id gguf.ModelID, why func(error)) (*store.Model, *gguf.Model, error) {
	for {
		m, g, err := n.weights.learn(ctx, id)
		if err == nil {
			err = n.exchange.know(id, g)
		}
		if err == nil {
			return m, g, nil
		}
		why(err)
		if err := n.awaitSource(ctx, id); err != nil {
			return nil, nil, err
		}
	}
}

// awaitSource waits a while, or less when somebody who has something of a model is
// connected by then, and was not before. It asks the network who that is.
func (n *Node) awaitSource(ctx context.Context, id gguf.ModelID) error {
	limit, cancel := context.WithTimeout(ctx, seekEvery)
	var seek sync.WaitGroup
	defer seek.Wait()
	defer cancel()
	seek.Go(func() { n.exchange.seek(limit, id) })
	pause := sourcePause
	if len(n.weights.sources(id)) > 0 { // which was of no use just now
		pause = fetchPause
	}
	for ; ; pause = min(2*pause, fetchPause) {
		select {
		case <-time.After(pause):
		case <-limit.Done():
			return ctx.Err()
		}
		if len(n.weights.sources(id)) > 0 {
			return nil
		}
	}
}

// backboneOf reports whether this node runs a model as a backbone, or is about to.
func (n *Node) backboneOf(id gguf.ModelID) bool {
	if b := n.backbone.Load(); b != nil && b.file.id == id {
		return true
	}
	return n.cfg.Has(RoleBackbone) && n.cfg.Model.ID != nil && *n.cfg.Model.ID == id
}

// setWaiting notes why there is no backbone yet.
func (n *Node) setWaiting(why error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.waiting == nil || n.waiting.Error() != why.Error() {
		n.log.Info("no model yet", "reason", why)
	}
	n.waiting = why
}

// keepReady sends canaries until one went through every part that serves, and
// again when the engine is not ready any more or other workers are connected.
func (n *Node) keepReady(ctx context.Context, b *backbone) {
	tick := time.NewTicker(canaryPause)
	defer tick.Stop()
	said, tried := "", ""
	was := false
	for {
		parts := b.connected()
		if b.computer.Ready() != nil || tried != parts {
			limit, cancel := context.WithTimeout(ctx, canaryDeadline)
			err := n.canary(limit, b)
			cancel()
			switch {
			case err == nil:
				n.log.Info("ready: a canary token went through every part", "model", b.file.name)
				said, tried = "", parts
				b.tried.Store(true)
			case ctx.Err() == nil && err.Error() != said:
				said = err.Error()
				n.log.Warn("not ready yet", "reason", said)
			}
		}
		if now := n.Ready() == nil; now != was && n.exchange != nil {
			n.exchange.changed() // others are told whether it answers
			was = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// connected names the workers that are connected now.
func (b *backbone) connected() string {
	if b.dispatch == nil {
		return "none"
	}
	names := "some:"
	for _, p := range b.dispatch.Peers() {
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
func (n *Node) canary(ctx context.Context, b *backbone) error {
	if b.computer.Ready() != nil {
		if err := b.computer.Canary(ctx); err != nil {
			return err
		}
	}
	if b.dispatch == nil {
		return nil
	}
	if err := b.dispatch.Canary(ctx); err != nil {
		n.log.Warn("workers failed the canary", "error", err)
		return b.computer.Canary(ctx)
	}
	return nil
}

// Ready is nil once a canary went through every part that serves, as long as every expert
// has somebody who computes it.
func (n *Node) Ready() error {
	b := n.backbone.Load()
	if b == nil {
		return n.whyWaiting()
	}
	if err := b.computer.Ready(); err != nil {
		return err
	}
	if !b.tried.Load() {
		return errors.New("not every worker has been tried yet")
	}
	if b.dispatch != nil { // a worker may be lost since, and nobody asked
		return b.dispatch.Covered(b.file.ExpertLayers(), b.file.Experts())
	}
	return nil
}

// whyWaiting says why there is no backbone yet, and how far a download of it is.
func (n *Node) whyWaiting() error {
	n.mu.Lock()
	why := n.waiting
	n.mu.Unlock()
	if n.weights != nil {
		for _, p := range n.weights.progress() {
			why = fmt.Errorf("%w: %s", why, progressText(p))
		}
	}
	return why
}

// heard tells the dispatcher who has which experts now.
func (n *Node) heard() {
	if d := n.dispatching(); d != nil {
		d.SetHolders(d.file.all(), n.holdersOf(d.file))
	}
}

// dispatching has experts computed by workers, for a backbone or a stage of this
// node; nil when they are here, or there is none yet.
func (n *Node) dispatching() *dispatchPart {
	if b := n.backbone.Load(); b != nil {
		return b.dispatch
	}
	if n.exchange != nil {
		return n.exchange.stager.dispatching()
	}
	return nil
}

// direct has the session with a peer move to the better path.
func (n *Node) direct(id peer.ID) {
	if d := n.dispatching(); d != nil {
		d.MovePeer(id.String())
	}
}

var _ gateway.ExtraEngine = engineDoor{}

// engineDoor lets clients use the engine.
type engineDoor struct {
	node *Node
	*backbone
}

func (d engineDoor) Ready() error { return d.node.Ready() }

func (d engineDoor) Tokenize(prompt string) ([]int32, error) { return d.engine.Tokenize(prompt) }

func (d engineDoor) Start(ctx context.Context, req gateway.Request) (gateway.Stream, error) {
	return startExtra(ctx, d, req, gateway.Extra{})
}

func (d engineDoor) Abilities() gateway.Abilities { return allAbilities }

func (d engineDoor) StartExtra(ctx context.Context, req gateway.Request, extra gateway.Extra) (gateway.Stream, error) {
	return startExtra(ctx, d, req, extra)
}

// begin gets the workers ready for a request, where it is a paid one.
func (b *backbone) begin(ctx context.Context) {
	if paid, ok := pay.From(ctx); ok && b.dispatch != nil {
		b.dispatch.drawFor(ctx, paid)
		b.show(ctx, b.dispatch.connectedPeers(), false)
	}
}

func (b *backbone) generate(ctx context.Context, req engine.Request, extra engine.Extra) (generation, error) {
	b.begin(ctx)
	g, err := b.engine.StartExtra(ctx, req, extra)
	if err != nil {
		return nil, err
	}
	return ownStream{g}, nil
}

// holdersOf lists the ready peers that serve experts of a model: what they
// announce, or all of it when only their hello says so yet.
func (n *Node) holdersOf(file *modelFile) []experts.Holder {
	announced := map[string][]experts.Slice{}
	for _, h := range n.exchange.table.Holders(file.id, time.Now()) {
		for _, hold := range h.News.Holdings {
			if hold.State == market.Serving || hold.State == market.Leaving {
				announced[h.Peer] = append(announced[h.Peer], wireSlice(hold.Slice))
			}
		}
	}
	var out []experts.Holder
	for _, p := range n.host.Peers() {
		if p.Peer == nil {
			continue
		}
		h := experts.Holder{Peer: p.ID.String(), Slices: announced[p.ID.String()], RTT: p.RTT}
		if len(h.Slices) == 0 && serves(p.Peer, file.id) {
			h.Slices = []experts.Slice{file.all()}
		}
		if len(h.Slices) > 0 {
			out = append(out, h)
		}
	}
	return out
}
