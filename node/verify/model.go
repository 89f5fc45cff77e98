package verify

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// Limits of a measurement with a model, which is held in memory at once.
const (
	maxPromptTokens = 64
	maxTextTokens   = 1024
	textWindow      = 256 // tokens that perplexity looks back at most
	maxFloats       = 1 << 28
)

// modelTask runs a whole model over prompts and a text. On the backend Reference the
// experts are computed by plain Go, and the rest as on Base.
type modelTask struct {
	Path    string
	Base    Backend
	Prompts []string
	Greedy  int    // tokens
	Text    string // for the perplexity; "" for none
}

// modelRun is what came of it.
type modelRun struct {
	Prompts []promptRun
	// Surprise is the mean of -ln p of the text's tokens, over Tokens of them.
	Surprise float64
	Tokens   int
}

// promptRun is what came of a prompt, all of whose tokens are decoded at once.
type promptRun struct {
	Tokens []ggml.Token
	Logits [][]float32 // by token
	Layers [][]float32 // by layer, [tokens*width]
	Routes [][]int32   // by layer, [tokens*used], each token's in ascending order; nil where no router is
	Width  int
	Used   int
	Greedy []ggml.Token
	Margin []float64 // by greedy token: its logit less that of the second
}

func (m *modelTask) run(ctx context.Context, rt *ggml.Runtime, b Backend) (*modelRun, error) {
	cfg := ggml.ModelConfig{Path: m.Path}
	if b.Name == tolerance.Reference {
		experts, err := referenceExperts(m.Path)
		if err != nil {
			return nil, err
		}
		cfg.Experts = experts
	} else if b.Device != "" {
		cfg.GPULayers = -1
	}
	model, err := rt.LoadModel(cfg)
	if err != nil {
		return nil, err
	}
	defer model.Close()
	out := &modelRun{}
	for _, p := range m.Prompts {
		run, err := m.prompt(ctx, model, p)
		if err != nil {
			return nil, fmt.Errorf("prompt %q: %w", p, err)
		}
		out.Prompts = append(out.Prompts, *run)
	}
	return out, out.readText(ctx, model, m.Text)
}

// referenceExperts computes all experts of a file by plain Go.
func referenceExperts(path string) (ggml.ExpertFunc, error) {
	file, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	ref := ggml.NewReference()
	if err := ref.Load(file, gguf.Slice{Layers: gguf.Range{End: file.Layers()}, Experts: gguf.Range{End: file.Experts()}}); err != nil {
		return nil, err
	}
	return func(_ context.Context, call *ggml.ExpertCall) error {
		prog, _, _, err := ref.SetProgram(call.Layer, call.Program)
		if err != nil {
			return err
		}
		row := make([]int32, len(call.IDs))
		for i := range row {
			row[i] = int32(i)
			if call.RowsPerToken == 1 {
				row[i] /= int32(call.Used)
			}
		}
		return ref.Compute(prog, call.Rows, row, call.IDs, call.Out)
	}, nil
}

func (m *modelTask) prompt(ctx context.Context, model *ggml.Model, text string) (*promptRun, error) {
	tokens, err := model.Tokenize(text, true, true)
	if err != nil {
		return nil, err
	}
	if len(tokens) == 0 {
		return nil, errors.New("it has no token")
	}
	r := &promptRun{Tokens: tokens[:min(len(tokens), maxPromptTokens)]}
	r.Layers, r.Routes = make([][]float32, model.Layers()), make([][]int32, model.Layers())
	traced, err := model.NewContext(ggml.ContextConfig{Tokens: maxPromptTokens, Batch: maxPromptTokens, Threads: 1, Trace: r.take})
	if err != nil {
		return nil, err
	}
	defer traced.Close()
	if r.Logits, err = decodeAll(ctx, traced, r.Tokens); err != nil {
		return nil, err
	}
	plain, err := model.NewContext(ggml.ContextConfig{Tokens: maxPromptTokens + m.Greedy, Batch: maxPromptTokens, Threads: 1})
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	return r, r.generate(ctx, plain, m.Greedy)
}

func (r *promptRun) take(t ggml.Traced) {
	switch {
	case t.Layer >= len(r.Layers):
	case t.Experts != nil:
		r.Used = t.Width
		ids := slices.Clone(t.Experts)
		for at := 0; at < len(ids); at += t.Width {
			slices.Sort(ids[at : at+t.Width])
		}
		r.Routes[t.Layer] = ids
	default:
		r.Width = t.Width
		r.Layers[t.Layer] = slices.Clone(t.Rows)
	}
}

// decodeAll decodes tokens of a new sequence at once and gives the logits of each.
func decodeAll(ctx context.Context, c *ggml.Context, tokens []ggml.Token) (logits [][]float32, err error) {
	batch := ggml.NewBatch(len(tokens))
	for i, t := range tokens {
		batch.Add(t, i, 0, true)
	}
	if err := c.Decode(ctx, batch); err != nil {
		return nil, err
	}
	for i := range tokens {
		row := c.Logits(i)
		if len(row)*len(tokens) > maxFloats {
			return nil, fmt.Errorf("a vocabulary of %d is too large for %d tokens", len(row), len(tokens))
		}
		logits = append(logits, slices.Clone(row))
	}
	return logits, nil
}

// generate draws the likeliest token n times.
func (r *promptRun) generate(ctx context.Context, c *ggml.Context, n int) error {
	batch := ggml.NewBatch(maxPromptTokens)
	for i, t := range r.Tokens {
		batch.Add(t, i, 0, i == len(r.Tokens)-1)
	}
	for i := range n {
		if err := c.Decode(ctx, batch); err != nil {
			return err
		}
		best, margin := likeliest(c.Logits(batch.Len() - 1))
		r.Greedy, r.Margin = append(r.Greedy, best), append(r.Margin, margin)
		batch.Reset()
		batch.Add(best, len(r.Tokens)+i, 0, true)
	}
	return nil
}

// likeliest is the token with the largest logit, and by how much it is that.
func likeliest(logits []float32) (best ggml.Token, margin float64) {
	second := math.Inf(-1)
	for i, v := range logits {
		switch {
		case v > logits[best]:
			best, second = ggml.Token(i), float64(logits[best])
		case i != int(best):
			second = max(second, float64(v))
		}
	}
	return best, float64(logits[best]) - second
}

// readText measures how much each token of a text surprises the model.
func (out *modelRun) readText(ctx context.Context, model *ggml.Model, text string) error {
	if text == "" {
		return nil
	}
	tokens, err := model.Tokenize(text, true, false)
	if err != nil {
		return err
	}
	tokens = tokens[:min(len(tokens), maxTextTokens)]
	c, err := model.NewContext(ggml.ContextConfig{Tokens: textWindow, Batch: textWindow, Threads: 1})
	if err != nil {
		return err
	}
	defer c.Close()
	sum := 0.0
	for part := range slices.Chunk(tokens, textWindow) {
		logits, err := decodeAll(ctx, c, part)
		if err != nil {
			return err
		}
		for i, next := range part[1:] {
			sum -= logSoftmax(logits[i])[next]
			out.Tokens++
		}
		c.SeqRemove(0, -1, -1)
	}
	if out.Tokens == 0 {
		return errors.New("the text for the perplexity has fewer than two tokens")
	}
	out.Surprise = sum / float64(out.Tokens)
	return nil
}

func logSoftmax(logits []float32) []float64 {
	top := float64(slices.Max(logits))
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	out := make([]float64, len(logits))
	for i, v := range logits {
		out[i] = float64(v) - top - math.Log(sum)
	}
	return out
}
