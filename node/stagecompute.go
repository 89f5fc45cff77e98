package node

import (
	"context"
	"errors"
	"maps"
	"math"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/node/engine"
	"kvasird/node/gateway/grammar"
	"kvasird/ring"
)

// stageBatch is the rows of one decode at most.
func stageBatch(cfg Config) int { return min(512, cfg.Model.Context) }

// stageCompute computes a window of a model: it is the ring.Compute of a stage.
type stageCompute struct {
	model *ggml.Model
	ctx   *ggml.Context
	batch *ggml.Batch
	width int
}

// openStage loads a window, with its experts unless dispatch has them computed.
func (n *Node) openStage(ctx context.Context, m *store.Model, g *gguf.Model, w gguf.Range, dispatch *dispatchPart) (*stagePart, error) {
	sequences := n.cfg.Model.Sequences
	size := stageSize{Tokens: n.cfg.Model.Context, Sequences: sequences, Batch: stageBatch(n.cfg), Threads: n.cfg.Threads}
	var experts ggml.ExpertFunc
	if dispatch != nil {
		experts = dispatch.compute
	}
	c, err := openCompute(ctx, n.rt, m.Path(0), g, w, experts, size)
	if err != nil {
		return nil, err
	}
	stage, err := ring.NewStage(ring.StageConfig{
		Peer: n.host.ID().String(), Model: m.ID().String(), Layers: w, Total: g.Layers(), Width: c.width,
		Compute: c, Dialer: n.stages, Pack: Pack(n.rt), CanTruncate: c.model.CanTruncate(),
		Sequences: sequences, Context: n.cfg.Model.Context / sequences, Batch: size.Batch, MemoryBytes: rowBytes(n.cfg, c.width),
		Precision: rowPrecisions[n.cfg.Model.Rows], Admit: n.stages.mayUse,
		Allow: n.metering.allowsRows(m.ID(), g, w, true, true), Computed: n.metering.window(m.ID(), g, w), Logger: n.log,
	})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &stagePart{model: m.ID(), Stage: stage, compute: c}, nil
}

// stageSize is what the memory of a stage has room for.
type stageSize struct {
	Tokens    int // of all sequences together
	Sequences int
	Batch     int // rows of one Decode
	Threads   int
}

// openCompute loads a window of the model g, whose first file is at path, without its
// experts if someone else computes them.
func openCompute(ctx context.Context, rt *ggml.Runtime, path string, g *gguf.Model, w gguf.Range, experts ggml.ExpertFunc, size stageSize) (*stageCompute, error) {
	cfg := ggml.ModelConfig{Path: path}
	if w.Len() < g.Layers() {
		image, err := g.RowStage(ctx, w)
		if err != nil {
			return nil, err
		}
		cfg = ggml.ModelConfig{Image: image}
	}
	cfg.Experts = experts
	model, err := rt.LoadModel(cfg)
	if err != nil {
		return nil, err
	}
	c := &stageCompute{model: model, width: model.EmbeddingLength()}
	c.ctx, err = model.NewContext(ggml.ContextConfig{
		Tokens: size.Tokens, Batch: size.Batch, Sequences: size.Sequences, Threads: size.Threads,
		UnifiedKV: true, Boundary: w.End < g.Layers(),
	})
	if err != nil {
		return nil, errors.Join(err, model.Close())
	}
	c.batch = ggml.NewBatch(size.Batch)
	if w.Begin > 0 {
		c.batch = ggml.NewRowBatch(size.Batch, c.width)
	}
	return c, nil
}

// Decode computes the rows of b.
func (c *stageCompute) Decode(ctx context.Context, b *ring.Batch) error {
	c.batch.Reset()
	for i := range b.Len() {
		pos, seq, want := int(b.Pos[i]), int(b.Seq[i]), b.Want == nil || b.Want[i]
		if b.Rows == nil {
			c.batch.Add(ggml.Token(b.Token[i]), pos, seq, want)
		} else {
			c.batch.AddRow(b.Rows[i*c.width:(i+1)*c.width], pos, seq, want)
		}
	}
	if err := c.ctx.Decode(ctx, c.batch); err != nil {
		return err
	}
	for i := range b.Len() {
		switch {
		case b.Out != nil:
			copy(b.Out[i*c.width:(i+1)*c.width], c.ctx.Hidden(i))
		case b.Want[i]:
			// What is not finite in a row is in all its logits.
			if l := float64(c.ctx.Logits(i)[0]); math.IsNaN(l) || math.IsInf(l, 0) {
				return errors.New("the logits are not finite")
			}
		}
	}
	return nil
}

// Truncate drops what a sequence has from a position on.
func (c *stageCompute) Truncate(seq, pos int) bool {
	if pos == 0 {
		pos = -1
	}
	return c.ctx.SeqRemove(seq, pos, -1)
}

// NewSampler builds the sampler of one session.
func (c *stageCompute) NewSampler(s ring.Sampling) (ring.Sampler, error) {
	if err := grammar.Check(s.Grammar); err != nil {
		return nil, err
	}
	req, extra := requestOf(s)
	p, err := c.model.NewPositionSampler(engine.SamplerConfig(&req, &extra))
	if err != nil {
		return nil, err
	}
	return &stageSampler{c, p, extra, nil}, nil
}

type stageSampler struct {
	*stageCompute
	sampler *ggml.PositionSampler
	extra   engine.Extra
	history []ggml.Token
}

// Sample draws the token of a position. Where no token may be drawn at all, by biases
// that forbid them, a free answer ends.
func (s *stageSampler) Sample(row, pos int, answer []int32) (out ring.Drawn, err error) {
	s.history = s.history[:0]
	for _, t := range answer {
		s.history = append(s.history, ggml.Token(t))
	}
	t, err := s.sampler.Sample(s.ctx, row, pos, s.history)
	if err != nil {
		if s.extra.Grammar == "" {
			return ring.Drawn{End: true}, nil
		}
		return out, err
	}
	out.Token, out.End = int32(t), s.model.IsEOG(t)
	if s.extra.Logprobs {
		of, top := engine.Probs(s.ctx.Logits(row), t, s.extra.Top)
		out.Logprob = of.Logprob
		for _, p := range top {
			out.Top = append(out.Top, ring.TokenProb{Token: p.ID, Logprob: p.Logprob})
		}
	}
	return out, nil
}

// samplingOf is how a ring draws the tokens of a request.
func samplingOf(req engine.Request, extra engine.Extra) ring.Sampling {
	return ring.Sampling{
		Temperature: req.Temperature, TopK: req.TopK, TopP: req.TopP, MinP: req.MinP, Seed: req.Seed,
		RepeatPenalty: req.RepeatPenalty, FrequencyPenalty: req.FrequencyPenalty, PresencePenalty: req.PresencePenalty,
		LogitBias: maps.Clone(req.LogitBias),
		Grammar:   extra.Grammar, Triggers: extra.Triggers, Special: extra.Special, Logprobs: extra.Logprobs, Top: extra.Top,
	}
}

// requestOf is the other way round, but for the prompt.
func requestOf(s ring.Sampling) (engine.Request, engine.Extra) {
	return engine.Request{
		Temperature: s.Temperature, TopK: s.TopK, TopP: s.TopP, MinP: s.MinP, Seed: s.Seed,
		RepeatPenalty: s.RepeatPenalty, FrequencyPenalty: s.FrequencyPenalty, PresencePenalty: s.PresencePenalty, LogitBias: s.LogitBias,
	}, engine.Extra{Grammar: s.Grammar, Triggers: s.Triggers, Special: s.Special, Logprobs: s.Logprobs, Top: s.Top}
}

func (s *stageSampler) Close() { s.sampler.Close() }

// Close frees the window.
func (c *stageCompute) Close() error { return errors.Join(c.ctx.Close(), c.model.Close()) }
