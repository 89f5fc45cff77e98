package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/carry"
	"kvasird/node/engine"
	"kvasird/node/gateway"
	"kvasird/ring"
	"kvasird/ring/plan"
)

const (
	// ringCanary bounds a canary token's way round a chain, ringPause the time until the
	// next one where one failed.
	ringCanary = 30 * time.Second
	ringPause  = 2 * time.Second
	// ringModels bounds the models of rings that are answered for here.
	ringModels = 16
)

// rings are the models that this node answers for by having others, or its own
// stages, run their windows, or another node answer. It belongs to the exchange's goroutine, which tells it
// when what is announced has changed; each model then looks for itself.
type rings struct {
	node  *Node
	log   *slog.Logger
	list  map[gguf.ModelID]*ringModel
	loops sync.WaitGroup
}

// ringModel is one of them.
type ringModel struct {
	rings *rings
	id    gguf.ModelID
	wake  chan struct{} // what is announced has changed; holds one

	// set before it is answered for
	name   string
	layers int
	vocab  *ggml.Model // its tokenizer
	entry  *ring.Entry
	far    *carry.Client // by which other nodes answer

	mu    sync.Mutex    // guards what follows
	why   error         // why it is not ready
	news  chan struct{} // closed when why is another
	tried []ring.Hop    // of chains that a canary went round
}

// errRingChanged is why a ring that was ready is not at the moment.
var errRingChanged = errors.New("the ring has changed, and a canary token is on its way round it")

func newRings(n *Node) *rings {
	return &rings{node: n, log: n.log, list: map[gguf.ModelID]*ringModel{}}
}

// look begins to answer for models that stages serve or other nodes answer for, and has the others look at
// what has changed.
func (r *rings) look(ctx context.Context, now time.Time) {
	if r == nil {
		return
	}
	for _, id := range r.node.exchange.table.Models(now) {
		if r.list[id] != nil || len(r.list) >= ringModels || r.node.backboneOf(id) || len(r.serving(id, now))+len(r.servers(id, now)) == 0 {
			continue
		}
		m := &ringModel{rings: r, id: id, wake: make(chan struct{}, 1), news: make(chan struct{}), why: errors.New("its tokenizer is being fetched")}
		r.list[id] = m
		r.loops.Go(func() { m.run(ctx) })
	}
	for _, m := range r.list {
		select {
		case m.wake <- struct{}{}:
		default:
		}
	}
}

// serving lists the windows of a model that can be used, this node's too.
func (r *rings) serving(id gguf.ModelID, now time.Time) []plan.Window {
	var out []plan.Window
	for _, w := range r.node.exchange.windows(id, now) {
		if w.State == market.Serving {
			out = append(out, plan.Window{
				Peer: w.Peer, Layers: w.Layers, Slots: w.Slots, Free: w.Free, Token: w.Token, Batched: w.Batched,
			})
		}
	}
	return out
}

// wait waits for the models' goroutines, whose context has ended, and ends their rings.
func (r *rings) wait() {
	if r == nil {
		return
	}
	r.loops.Wait()
	for _, m := range r.list {
		if m.entry != nil {
			m.entry.Close()
		}
	}
}

// Close frees the tokenizers, which answers need to their end.
func (r *rings) Close() error {
	for _, m := range r.list {
		if m.entry != nil {
			m.vocab.Close()
		}
	}
	return nil
}

// run has the model answered for, until ctx ends.
func (m *ringModel) run(ctx context.Context) {
	for m.open(ctx) != nil {
		select {
		case <-time.After(fetchPause):
		case <-ctx.Done():
			return
		}
	}
	pause := ringPause
	for {
		err := m.ready(ctx)
		m.set(err)
		var again <-chan time.Time
		if err != nil {
			again = time.After(pause)
			pause = min(2*pause, ringCanary)
		} else {
			pause = ringPause
		}
		select {
		case <-m.wake:
			time.Sleep(stepGap)
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// open learns the model's header and tokenizer, and has clients answered.
func (m *ringModel) open(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			m.set(err)
		}
	}()
	n := m.rings.node
	stored, g, err := n.learnModel(ctx, m.id, m.set)
	if err != nil {
		return err
	}
	if m.vocab, err = n.rt.LoadModel(ggml.ModelConfig{Path: stored.Path(0), VocabOnly: true}); err != nil {
		return err
	}
	m.name, m.layers = stored.Name(), g.Layers()
	m.entry, err = ring.NewEntry(ring.EntryConfig{
		Model: m.id.String(), Total: m.layers, Dialer: n.stages, Pack: Pack(n.rt), Logger: n.log,
		Served: n.metering.chains(m.id, g),
	})
	if err != nil {
		m.vocab.Close()
		return err
	}
	m.far = m.newFar(g)
	served := gateway.Model{
		ID: m.name, Created: n.started, ChatTemplate: m.vocab.ChatTemplate(),
		BOS: string(m.vocab.Piece(m.vocab.BOS(), true)), EOS: string(m.vocab.Piece(m.vocab.EOS(), true)),
		VocabSize: m.vocab.VocabSize(), Engine: m,
	}
	if g.Pooling() != gguf.NoPooling {
		served.NoText, served.Engine = true, farVectors{m}
	}
	return n.answers.set(m.id, served)
}

func (m *ringModel) set(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if (err == nil) != (m.why == nil) || err != nil && err.Error() != m.why.Error() {
		if err == nil {
			m.rings.log.Info("ready: a canary token went round the ring", "model", m.name)
		} else {
			m.rings.log.Info("ring is not ready", "model", m.id.String(), "reason", err)
		}
		close(m.news)
		m.news = make(chan struct{})
	}
	m.why = err
}

// settled is Ready, once the canary of a ring that has changed is back or lost.
func (m *ringModel) settled(ctx context.Context) error {
	for {
		m.mu.Lock()
		why, news := m.why, m.news
		m.mu.Unlock()
		if why != errRingChanged {
			return why
		}
		select {
		case <-news:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ready is nil while there is a chain of stages that a canary token went through. It
// sends one round the best chain, where that is another one.
func (m *ringModel) ready(ctx context.Context) error {
	chain, err := m.chain(nil)
	if err == nil && m.knows(chain) {
		return nil
	}
	_, unproven := m.proven()
	before := m.ringReady()
	if err == nil {
		if unproven != nil && before == nil {
			m.set(errRingChanged)
		}
		err = m.canary(ctx, chain)
	}
	// a ring that has no room left is one that works
	if _, full := ringError(err).(*ringFullError); unproven == nil || full && before == nil {
		return nil
	}
	return err
}

// canary sends a token round a chain.
func (m *ringModel) canary(ctx context.Context, chain ring.Chain) error {
	ctx, cancel := context.WithTimeout(ctx, ringCanary)
	defer cancel()
	bos := m.vocab.BOS()
	if _, err := m.entry.Canary(ctx, chain, []int32{int32(max(0, bos))}); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tried = append(m.tried[max(0, len(m.tried)-ring.MaxHops):], chain...)
	return nil
}

// proven is the best chain of stages that a canary went through.
func (m *ringModel) proven() (ring.Chain, error) {
	q := m.query(nil)
	m.mu.Lock()
	q.Windows = slices.DeleteFunc(q.Windows, func(w plan.Window) bool {
		return !slices.Contains(m.tried, ring.Hop{Peer: w.Peer, Layers: w.Layers})
	})
	m.mu.Unlock()
	return chainFor(q)
}

// knows reports whether a canary went through every stage of a chain.
func (m *ringModel) knows(chain ring.Chain) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !slices.ContainsFunc(chain, func(h ring.Hop) bool { return !slices.Contains(m.tried, h) })
}

// chain is the best chain without some stages.
func (m *ringModel) chain(avoid []ring.Hop) (ring.Chain, error) { return chainFor(m.query(avoid)) }

// chainFor is the best chain. How many sequences are free was announced a while ago, and
// in bursts all of them were taken for a moment: where there is no chain of those that had
// some, the others are asked, who say themselves that they are full.
func chainFor(q plan.ChainQuery) (ring.Chain, error) {
	windows, err := plan.Chain(q)
	if err != nil {
		q.Windows = slices.Clone(q.Windows)
		for i := range q.Windows {
			q.Windows[i].Free = max(1, q.Windows[i].Free)
		}
		windows, err = plan.Chain(q)
	}
	return chainOf(windows), err
}

func (m *ringModel) query(avoid []ring.Hop) plan.ChainQuery {
	n, now := m.rings.node, time.Now()
	q := plan.ChainQuery{Layers: m.layers, Windows: m.rings.serving(m.id, now), Entry: n.host.ID().String()}
	for _, h := range avoid {
		q.Avoid = append(q.Avoid, h.Peer)
	}
	q.RTT = n.roundTrips(now)
	return q
}

// roundTrips tells the round trip between two nodes: as this one measured its own, as
// others announce theirs.
func (n *Node) roundTrips(now time.Time) func(a, b string) (time.Duration, bool) {
	self := n.host.ID().String()
	own := map[string]time.Duration{}
	for _, p := range n.host.Peers() {
		own[p.ID.String()] = p.RTT
	}
	return func(a, b string) (time.Duration, bool) {
		if b == self {
			a, b = b, a
		}
		if a == self && own[b] > 0 {
			return own[b], true
		}
		return n.exchange.table.RTT(a, b, now)
	}
}

// peersOf are the peers of a chain's stages.
func peersOf(chain ring.Chain) (peers []string) {
	for _, h := range chain {
		peers = append(peers, h.Peer)
	}
	return peers
}

func chainOf(windows []plan.Window) ring.Chain {
	var chain ring.Chain
	for _, w := range windows {
		chain = append(chain, ring.Hop{Peer: w.Peer, Layers: w.Layers})
	}
	return chain
}

// replan mends a chain where one stage is lost, or chooses another one.
func (m *ringModel) replan(old ring.Chain) ring.Replan {
	return func(ctx context.Context, lost []ring.Hop) (ring.Chain, error) {
		next, err := replanned(m.query, old, lost)
		if err == nil {
			old = next
			m.rings.node.metering.show(ctx, peersOf(next), true)
		}
		return next, err
	}
}

// replanned is a chain in place of one that lost stages. Those that were lost long ago may
// be back: they are asked again where there is no chain without them, the first lost first.
// The last one is not.
func replanned(query func(avoid []ring.Hop) plan.ChainQuery, old ring.Chain, lost []ring.Hop) (ring.Chain, error) {
	for {
		next, err := mended(query(lost), old, lost)
		if err == nil || len(lost) <= 1 {
			return next, err
		}
		lost = lost[1:]
	}
}

// mended is a chain with a part of it replaced, or another one.
func mended(q plan.ChainQuery, old ring.Chain, lost []ring.Hop) (ring.Chain, error) {
	gone := slices.IndexFunc(old, func(h ring.Hop) bool { return slices.Contains(lost, h) })
	if gone >= 0 {
		var windows []plan.Window
		for _, h := range old {
			windows = append(windows, plan.Window{Peer: h.Peer, Layers: h.Layers})
		}
		if mended, err := plan.Mend(q, windows, gone); err == nil {
			return chainOf(mended), nil
		}
	}
	return chainFor(q)
}

// Ready makes ringModel an answerer.
func (m *ringModel) Ready() error {
	why := m.ringReady()
	if why == nil || m.answered() {
		return nil
	}
	return alone(why)
}

// alone is why a ring is not ready where nobody else answers either.
func alone(why error) error {
	return fmt.Errorf("no other node answers for the model, and stages do not: %w", why)
}

// ringReady says why the ring does not answer.
func (m *ringModel) ringReady() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

// answered reports whether another node answers for the model.
func (m *ringModel) answered() bool { return len(m.rings.servers(m.id, time.Now())) > 0 }

func (m *ringModel) Tokenize(prompt string) ([]int32, error) { return engine.Tokenize(m.vocab, prompt) }

func (m *ringModel) Start(ctx context.Context, req gateway.Request) (gateway.Stream, error) {
	return startExtra(ctx, m, req, gateway.Extra{})
}

// Abilities: stages and other nodes serve the same wishes as an engine here.
func (m *ringModel) Abilities() gateway.Abilities { return allAbilities }

func (m *ringModel) StartExtra(ctx context.Context, req gateway.Request, extra gateway.Extra) (gateway.Stream, error) {
	return startExtra(ctx, m, req, extra)
}

// generate has the ring answer, or another node where the ring does not.
func (m *ringModel) generate(ctx context.Context, req engine.Request, extra engine.Extra) (generation, error) {
	err := m.settled(ctx)
	if err != nil {
		err = alone(err)
	} else if g, failed := m.around(ctx, req, extra); failed == nil {
		return g, nil
	} else {
		err = failed
	}
	if ctx.Err() != nil || !m.answered() {
		return nil, err
	}
	return m.carried(ctx, req, extra)
}

// around has the ring answer.
func (m *ringModel) around(ctx context.Context, req engine.Request, extra engine.Extra) (generation, error) {
	limit := m.rings.node.cfg.Model.Context / m.rings.node.cfg.Model.Sequences
	room := limit - len(req.Prompt)
	if room < 1 {
		return nil, &engine.ContextError{Prompt: len(req.Prompt), Limit: limit}
	}
	if req.MaxTokens > 0 {
		room = min(room, req.MaxTokens)
	}
	chain, err := m.proven()
	if err != nil {
		chain, err = m.chain(nil)
	}
	if err != nil {
		return nil, ringError(err)
	}
	m.rings.node.metering.show(ctx, peersOf(chain), true)
	s, err := m.entry.Open(ctx, chain, ring.Request{Tokens: req.Prompt, MaxTokens: room, Sampling: samplingOf(req, extra)}, m.replan(chain))
	if err != nil {
		return nil, ringError(err)
	}
	g := &ringAnswer{session: s, vocab: m.vocab, special: extra.Special}
	context.AfterFunc(ctx, func() { s.Close() })
	return g, nil
}

// neighbours are the nearest peers, for an announcement.
func (n *Node) neighbours(most int) []market.Neighbour {
	var out []market.Neighbour
	for _, p := range n.host.Peers() {
		if p.Peer != nil && p.RTT > 0 {
			out = append(out, market.Neighbour{Peer: p.ID.String(), RTT: p.RTT})
		}
	}
	slices.SortFunc(out, func(a, b market.Neighbour) int { return cmp.Compare(a.RTT, b.RTT) })
	out = out[:min(len(out), most)]
	slices.SortFunc(out, func(a, b market.Neighbour) int { return cmp.Compare(a.Peer, b.Peer) })
	return out
}
