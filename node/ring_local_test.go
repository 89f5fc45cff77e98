//go:build cgo && linux

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/engine"
	"kvasird/ring"
)

const (
	localSequences = 16
	localContext   = 256 // tokens of one sequence
	localBatch     = 512
	localPatience  = time.Minute
	offDraws       = 16 // that must agree, for a model to be sure of a token
)

// localModel is a model that is not split, in this process.
type localModel struct {
	t     *testing.T
	rt    *ggml.Runtime
	path  string
	gguf  *gguf.Model
	model *ggml.Model
	eng   *engine.Engine
	ends  map[int32]float32 // a bias that keeps answers from ending

	// off is ten times what a logit may be off in a batch of another shape, where
	// llama.cpp's own sums round differently. Only answers that do not depend on so
	// much can be compared between different batches.
	off     float32
	prompts [][]int32
	most    int // tokens of an answer
}

func openLocal(t *testing.T, rt *ggml.Runtime, path string, off float32) *localModel {
	t.Helper()
	m := &localModel{t: t, rt: rt, path: path, off: off}
	var err error
	if m.gguf, err = gguf.OpenModel(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.gguf.Close() })
	if m.model, err = rt.LoadModel(ggml.ModelConfig{Path: path}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.model.Close() })
	if m.eng, err = engine.Open(engine.Config{Model: m.model, Context: localContext, Sequences: 1, Queue: 64, Threads: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.eng.Close() })
	m.ends = noEnd(m.model).LogitBias
	return m
}

// answer is what the whole model answers.
func (m *localModel) answer(req ring.Request) []int32 {
	m.t.Helper()
	ask, extra := requestOf(req.Sampling)
	ask.Prompt, ask.MaxTokens = req.Tokens, req.MaxTokens
	g, err := m.eng.StartExtra(m.t.Context(), ask, extra)
	if err != nil {
		m.t.Fatal(err)
	}
	var list []int32
	for {
		token, _, err := g.NextToken(m.t.Context())
		if err == io.EOF {
			return list
		}
		if err != nil {
			m.t.Fatal(err)
		}
		list = append(list, int32(token))
	}
}

// draws are samplers that should choose the same token: the first one by the logits,
// the others by logits that are a little off.
func (m *localModel) draws(s ring.Sampling) (list []*ggml.PositionSampler) {
	m.t.Helper()
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range 1 + offDraws {
		bias := map[ggml.Token]float32{}
		for t := range m.model.VocabSize() {
			bias[ggml.Token(t)] = s.LogitBias[int32(t)]
			if i > 0 {
				bias[ggml.Token(t)] += (2*rng.Float32() - 1) * m.off
			}
		}
		req, extra := requestOf(s)
		cfg := engine.SamplerConfig(&req, &extra)
		cfg.LogitBias = bias
		p, err := m.model.NewPositionSampler(cfg)
		if err != nil {
			m.t.Fatal(err)
		}
		list = append(list, p)
	}
	return list
}

// step answers token by token. It gives nil if the model is not sure of the answer.
func (m *localModel) step(req ring.Request) (answer []int32) {
	m.t.Helper()
	c, err := m.model.NewContext(ggml.ContextConfig{Tokens: localContext, Batch: localContext, Threads: 1})
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close()
	draws := m.draws(req.Sampling)
	defer func() {
		for _, p := range draws {
			p.Close()
		}
	}()
	b := ggml.NewBatch(localContext)
	for i, token := range req.Tokens {
		b.Add(ggml.Token(token), i, 0, i == len(req.Tokens)-1)
	}
	var history []ggml.Token
	for {
		if err := c.Decode(m.t.Context(), b); err != nil {
			m.t.Fatal(err)
		}
		pos := len(req.Tokens) + len(answer)
		token, err := draws[0].Sample(c, b.Len()-1, pos, history)
		for _, p := range draws[1:] {
			other, err2 := p.Sample(c, b.Len()-1, pos, history)
			if err = errors.Join(err, err2); err != nil {
				m.t.Fatal(err)
			}
			if other != token {
				return nil
			}
		}
		answer, history = append(answer, int32(token)), append(history, token)
		if m.model.IsEOG(token) || len(answer) == req.MaxTokens {
			return answer
		}
		b.Reset()
		b.Add(token, pos, 0, true)
	}
}

// answered is a request and what the whole model answers.
type answered struct {
	req  ring.Request
	want []int32
}

// sure lists requests of whose answers the model is sure.
func (m *localModel) sure(prompts [][]int32, s ring.Sampling, most int) (list []answered) {
	m.t.Helper()
	for _, p := range prompts {
		a := answered{req: ring.Request{Tokens: p, MaxTokens: most, Sampling: s}}
		if a.want = m.step(a.req); a.want != nil {
			list = append(list, a)
		}
		s.Seed++
	}
	return list
}

// windows cuts the layers into n windows.
func (m *localModel) windows(n int) (list []gguf.Range) {
	m.t.Helper()
	cuts, err := m.gguf.Cuts()
	if err != nil || len(cuts) < n-1 {
		m.t.Fatalf("cuts at %v, %v, want %d", cuts, err, n-1)
	}
	begin := 0
	for i := 1; i < n; i++ {
		at := cuts[i*(len(cuts)+1)/n-1]
		list = append(list, gguf.Range{Begin: begin, End: at})
		begin = at
	}
	return append(list, gguf.Range{Begin: begin, End: m.gguf.Layers()})
}

// localRing is stages of a model in this process, and an entry.
type localRing struct {
	*localModel
	entry   *ring.Entry
	chain   ring.Chain
	serving sync.WaitGroup

	mu     sync.Mutex // guards stages and links
	stages map[string]*stagePart
	links  map[string][]net.Conn
}

func (m *localModel) ring(stages int) *localRing {
	m.t.Helper()
	r := &localRing{localModel: m, stages: map[string]*stagePart{}, links: map[string][]net.Conn{}}
	for i, w := range m.windows(stages) {
		h := ring.Hop{Peer: fmt.Sprint("s", i), Layers: w}
		r.start(h)
		r.chain = append(r.chain, h)
	}
	var err error
	r.entry, err = ring.NewEntry(ring.EntryConfig{Model: "local", Total: m.gguf.Layers(), Dialer: r})
	if err != nil {
		m.t.Fatal(err)
	}
	return r
}

// start adds a stage.
func (r *localRing) start(h ring.Hop) {
	r.t.Helper()
	size := stageSize{Tokens: localSequences * localContext, Sequences: localSequences, Batch: localBatch, Threads: 1}
	c, err := openCompute(r.t.Context(), r.rt, r.path, r.gguf, h.Layers, nil, size)
	if err != nil {
		r.t.Fatal(err)
	}
	st, err := ring.NewStage(ring.StageConfig{
		Peer: h.Peer, Model: "local", Layers: h.Layers, Total: r.gguf.Layers(), Width: c.width, Compute: c, Dialer: r,
		CanTruncate: c.model.CanTruncate(), Sequences: localSequences, Context: localContext, Batch: localBatch, MemoryBytes: 64 << 20,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stages[h.Peer] = &stagePart{Stage: st, compute: c}
}

// Dial implements ring.Dialer.
func (r *localRing) Dial(_ context.Context, id string) (net.Conn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.stages[id]
	if p == nil {
		return nil, fmt.Errorf("%s is lost", id)
	}
	near, far := net.Pipe()
	r.links[id] = append(r.links[id], far)
	r.serving.Go(func() {
		if err := p.Serve(context.Background(), far); errors.Is(err, ring.ErrProtocol) {
			r.t.Errorf("link to %s: %v", id, err)
		}
	})
	return near, nil
}

// kill ends a stage without a word to its neighbours.
func (r *localRing) kill(id string) {
	r.mu.Lock()
	p := r.stages[id]
	delete(r.stages, id)
	for _, c := range r.links[id] {
		c.Close()
	}
	r.mu.Unlock()
	if p == nil {
		r.t.Errorf("there is no stage %s to kill", id)
	} else if err := p.Close(); err != nil {
		r.t.Error(err)
	}
}

// free waits until no stage has a session any more.
func (r *localRing) free() {
	r.t.Helper()
	limit := time.Now().Add(localPatience)
	for id, p := range r.stages {
		for st := p.Stats(); st.Free < st.Sequences || st.Sessions > 0; st = p.Stats() {
			if time.Now().After(limit) {
				r.t.Fatalf("%s: %d of %d sequences are free, %d sessions", id, st.Free, st.Sequences, st.Sessions)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func (r *localRing) close() {
	r.free()
	r.entry.Close()
	for _, p := range r.stages {
		if err := p.Close(); err != nil {
			r.t.Error(err)
		}
	}
	r.serving.Wait()
}

// ask runs a request; on is called as its tokens come, with how many there are.
func (r *localRing) ask(req ring.Request, replan ring.Replan, on func(n int)) ([]int32, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), localPatience)
	defer cancel()
	s, err := r.entry.Open(ctx, r.chain, req, replan)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var list []int32
	for {
		more, err := s.Next(ctx)
		if err == io.EOF {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		list = append(list, more...)
		if on != nil {
			on(len(list))
		}
	}
}

// same asks and compares with the whole model.
func (r *localRing) same(a answered, replan ring.Replan, on func(n int)) {
	r.t.Helper()
	if got, err := r.ask(a.req, replan, on); err != nil || !slices.Equal(got, a.want) {
		r.t.Errorf("prompt %v, no drafts %v: %v\n got %v\nwant %v", a.req.Tokens, a.req.NoDraft, err, got, a.want)
	}
}
