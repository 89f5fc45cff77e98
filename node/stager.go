package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/market"
	"kvasird/node/api"
	"kvasird/ring/plan"
)

// drainStage is how long the sessions of a window that is given up may go elsewhere.
const drainStage = 30 * time.Second

// stager carries out what market.Stager decides: which window of one model this
// node runs. A nil one is a node that runs none. It belongs to the goroutine that
// runs the exchange, but for what mu guards.
type stager struct {
	node   *Node
	model  gguf.ModelID
	budget market.Budget
	file   string // of the window that is on disk
	log    *slog.Logger
	paused atomic.Bool

	market *market.Stager // nil until the model's header is known
	stored *store.Model
	gguf   *gguf.Model
	events chan func(now time.Time) // what jobs came to, for the exchange's goroutine
	cancel context.CancelFunc       // of the job that loads
	loads  bool                     // it runs
	drops  bool                     // likewise, for the job that deletes

	part     atomic.Pointer[stagePart]    // what is loaded and serves, or nil
	dispatch atomic.Pointer[dispatchPart] // has the experts computed by workers; nil: they are here
	loops    sync.WaitGroup

	mu      sync.Mutex                        // guards what follows
	name    string                            // of the model
	takes   func(gguf.Range) market.Footprint // what its windows take
	trouble string
	shown   []market.WindowHolding // what was told last
}

// begin learns the model's header, and what its windows take.
func (s *stager) begin(ctx context.Context) {
	s.loops.Go(func() {
		m, g, err := s.node.learnModel(ctx, s.model, s.note)
		if err == nil {
			err = s.open(ctx, m, g)
		}
		if err != nil && ctx.Err() == nil {
			s.note(err)
		}
	})
}

// open gets ready to decide for a model whose header is known.
func (s *stager) open(ctx context.Context, m *store.Model, g *gguf.Model) error {
	remote := s.node.cfg.Model.Experts == ExpertsRemote && len(g.ExpertLayers()) > 0
	shape, rows, err := stageModel(s.model, g, s.node.cfg, !remote)
	if err != nil {
		return err
	}
	if remote {
		d, err := s.node.openDispatch(&modelFile{name: m.Name(), Model: g, id: s.model}, false, 0, nil)
		if err != nil {
			return err
		}
		s.dispatch.Store(d)
	}
	decides, err := market.NewStager(s.node.host.ID().String(), s.node.exchange.policy, shape)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.name, s.takes = m.Name(), decides.Takes
	s.mu.Unlock()
	s.post(ctx, func(time.Time) {
		s.market, s.stored, s.gguf = decides, m, g
		s.budget.Memory = max(0, s.budget.Memory-rows)
		s.note(nil)
		s.restore()
	})
	return nil
}

// post has the exchange's goroutine do something.
func (s *stager) post(ctx context.Context, do func(now time.Time)) {
	select {
	case s.events <- do:
	case <-ctx.Done():
	}
}

// stageModel says what windows of a model take, with their experts or without, and
// with what its sequences take in memory; rows is the memory of rows beside.
func stageModel(id gguf.ModelID, g *gguf.Model, cfg Config, experts bool) (m market.StageModel, rows int64, err error) {
	if g.Pooling() != gguf.NoPooling {
		return m, 0, errors.New("the model makes embeddings, and a ring makes text: run it on one node, with --role backbone,entry")
	}
	d, err := plan.Describe(g)
	if err != nil {
		return m, 0, err
	}
	cuts, err := g.Cuts()
	if err != nil && !errors.Is(err, gguf.ErrCut) {
		return m, 0, err
	}
	m = market.StageModel{ID: id, Cuts: cuts}
	for _, l := range d.Layers {
		bytes := l.Dense
		if experts {
			bytes += l.Expert * int64(d.Experts)
		}
		cache := l.KV*int64(cfg.Model.Context) + l.State*int64(cfg.Model.Sequences)
		m.Layers = append(m.Layers, market.Footprint{Disk: bytes, Memory: bytes + cache})
	}
	for range d.Extra {
		m.Layers = append(m.Layers, market.Footprint{})
	}
	m.First = market.Footprint{Disk: d.Embedding}
	m.Last = market.Footprint{Disk: d.Head + d.Unused, Memory: d.Head}
	if d.Tied {
		m.Shared.Disk = d.Head
	}
	return m, rowBytes(cfg, d.Width), nil
}

// rowBytes is what a stage's sequences take at most in rows that are kept for its
// successor, and in rows that wait.
func rowBytes(cfg Config, width int) int64 {
	context := cfg.Model.Context / cfg.Model.Sequences
	return int64(cfg.Model.Sequences) * int64(context+stageBatch(cfg)) * int64(width) * 4
}

// decide starts what is to be done now.
func (s *stager) decide(ctx context.Context, t *market.Table, now time.Time) (announce bool, next time.Time) {
	if s.market == nil {
		return false, now.Add(time.Minute) // learning ends with an event
	}
	budget := s.budget
	budget.Drain = s.paused.Load()
	d := s.market.Decide(t, budget, now)
	if d.Drop.Len() > 0 && !s.drops {
		s.drop(ctx, d.Drop)
	}
	if d.Load.Len() > 0 {
		s.load(ctx, d.Load)
	}
	return d.Announce, d.Next
}

// load brings a window here, loads it and has it served.
func (s *stager) load(ctx context.Context, w gguf.Range) {
	ctx, s.cancel = context.WithCancel(ctx)
	s.loads = true
	s.save(w)
	s.loops.Go(func() {
		part, err := s.bring(ctx, w)
		s.post(context.WithoutCancel(ctx), func(now time.Time) {
			s.loads = false
			s.cancel()
			switch {
			case err == nil:
				s.serve(part)
				s.market.Done(w)
			case !errors.Is(err, context.Canceled):
				s.note(fmt.Errorf("layers %v: %w", w, err))
				s.market.Failed(w, now)
			}
		})
	})
}

// serve takes up a window that is loaded.
func (s *stager) serve(p *stagePart) {
	s.part.Store(p)
	s.node.stages.add(p)
	s.note(nil)
	s.log.Info("stage serves", "model", s.stored.Name(), "layers", p.Layers().String())
}

func (s *stager) bring(ctx context.Context, w gguf.Range) (*stagePart, error) {
	dispatch := s.dispatch.Load()
	spans, err := windowSpans(s.gguf, w, dispatch == nil)
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("layers %v of %s", w, s.stored.Name())
	if err := s.node.weights.fetchPatiently(ctx, s.stored, spans, what, s.note); err != nil {
		return nil, err
	}
	if err := s.probe(ctx, w, dispatch != nil); err != nil {
		return nil, err
	}
	return s.node.openStage(ctx, s.stored, s.gguf, w, dispatch)
}

// windowSpans is what of each file a window needs, which may be the whole model.
func windowSpans(g *gguf.Model, w gguf.Range, experts bool) (map[int][]store.Span, error) {
	switch {
	case w.Len() < g.Layers():
		return store.WindowSpans(g, w, experts)
	case !experts:
		return store.DenseSpans(g), nil
	}
	spans := make(map[int][]store.Span)
	for i, p := range g.Parts() {
		spans[i] = []store.Span{{Len: p.Size}}
	}
	return spans, nil
}

// probe tries a window in a child process, unless this runtime is known to run it.
func (s *stager) probe(ctx context.Context, w gguf.Range, remote bool) error {
	req := ggml.ProbeRequest{Layers: w, Backbone: remote, Threads: s.node.cfg.Threads}
	if w.Len() == s.gguf.Layers() {
		req = ggml.ProbeRequest{Path: s.stored.Path(0), Backbone: remote, Threads: req.Threads}
	} else {
		for i, sum := range s.stored.Files() {
			req.Files = append(req.Files, ggml.ProbeFile{Path: s.stored.Path(i), Sum: sum})
		}
	}
	return s.node.cfg.tryOut(ctx, fmt.Sprintf("%s layers=%v remote=%v %s", s.model, w, remote, s.node.rt.Release()), req)
}

// drop has a window served by others only, and deletes it.
func (s *stager) drop(ctx context.Context, w gguf.Range) {
	if s.loads {
		s.cancel()
		return // it is asked again when that has ended
	}
	s.drops = true
	part := s.part.Swap(nil)
	s.loops.Go(func() {
		var err error
		if part != nil {
			limit, cancel := context.WithTimeout(ctx, drainStage)
			err = s.node.stages.remove(limit, part)
			cancel()
		}
		if !s.stored.Complete() && !s.stored.Pinned() {
			err = errors.Join(err, dropWindow(s.stored, s.gguf, w, s.dispatch.Load() == nil))
		}
		s.post(context.WithoutCancel(ctx), func(time.Time) {
			s.drops = false
			if err != nil {
				s.log.Warn("window not deleted", "layers", w.String(), "error", err)
			}
			s.market.Dropped(w)
			s.save(gguf.Range{})
		})
	})
}

// dropWindow deletes the bytes of a window but for the headers.
func dropWindow(m *store.Model, g *gguf.Model, w gguf.Range, experts bool) error {
	spans, err := windowSpans(g, w, experts)
	if err != nil {
		return err
	}
	for file, list := range spans {
		header := store.Span{Len: g.Parts()[file].DataOffset}
		if err := m.Drop(file, subtract(list, []store.Span{header})); err != nil {
			return err
		}
	}
	return nil
}

// announced tells that what news said was published.
func (s *stager) announced(now time.Time) {
	if s != nil && s.market != nil {
		s.market.Announced(now)
	}
}

// note keeps what is in the way, for the status.
func (s *stager) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != s.trouble {
		s.log.Warn("stage is not served yet", "error", err)
	}
	s.trouble = text
}

// news adds what to announce to n.
func (s *stager) news(n *market.ModelNews) {
	n.Windows, n.Room, n.Dense = s.market.Windows(), s.market.Room(), s.dispatch.Load() != nil
	part := s.part.Load()
	for i := range n.Windows {
		w := &n.Windows[i]
		if part == nil || part.Layers() != w.Layers || w.State != market.Serving && w.State != market.Leaving {
			continue
		}
		st := part.Stats()
		w.Slots, w.Free, w.Token, w.Batched = st.Sequences, st.Free, st.Token, st.Batched
		if st.Batched > st.Token {
			w.Batched = st.Token
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shown = n.Windows
}

// status says what is held and what is in the way.
func (s *stager) status(out *api.Volunteer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Paused = s.paused.Load()
	part := s.part.Load()
	for _, w := range s.shown {
		if part != nil && part.Layers() == w.Layers {
			st := part.Stats()
			w.Free, w.Token = st.Free, st.Token
			out.Memory.Used = s.takes(w.Layers).Memory
		}
		text := apiWindow(w)
		text.Model = s.name
		out.Windows = append(out.Windows, text)
	}
	if s.trouble != "" {
		out.Troubles = []string{s.trouble}
	}
}

// windows lists this node's windows of a model.
func (s *stager) windows(id gguf.ModelID) (list []market.WindowHolder) {
	if s == nil || s.model != id {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.shown {
		list = append(list, market.WindowHolder{Peer: s.node.host.ID().String(), WindowHolding: w})
	}
	return list
}

// loaded is the memory of the window that is loaded of a model.
func (s *stager) loaded(id gguf.ModelID) int64 {
	if s == nil || s.model != id {
		return 0
	}
	part := s.part.Load()
	if part == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takes(part.Layers()).Memory
}

// save writes which window is here, or on its way; restore takes it up again.
func (s *stager) save(w gguf.Range) {
	if err := writeJSON(s.file, map[gguf.ModelID]gguf.Range{s.model: w}); err != nil {
		s.log.Warn("window not noted: after a restart it is chosen anew", "error", err)
	}
}

func (s *stager) restore() {
	before := map[gguf.ModelID]gguf.Range{}
	err := readJSON(s.file, &before)
	w := before[s.model]
	if err == nil && w.Len() > 0 {
		err = s.market.Restore(w, false)
	}
	if err != nil {
		s.log.Warn("the window of before is not known: one is chosen anew", "file", s.file, "error", err)
	}
}

// dispatching has the experts of the window computed by workers; nil when they are
// here.
func (s *stager) dispatching() *dispatchPart {
	if s == nil {
		return nil
	}
	return s.dispatch.Load()
}

// Close ends the sessions with workers.
func (s *stager) Close() error {
	if d := s.dispatch.Load(); d != nil {
		return d.Close()
	}
	return nil
}

// finish waits for the jobs, whose context has ended.
func (s *stager) finish() {
	if s == nil {
		return
	}
	finishJobs(&s.loops, s.events, func(do func(time.Time)) { do(time.Now()) })
}

// results is where jobs end; nil, which never does, for a node that is no stage.
func (s *stager) results() <-chan func(time.Time) {
	if s == nil {
		return nil
	}
	return s.events
}
