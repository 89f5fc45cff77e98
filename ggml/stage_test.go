//go:build cgo

package ggml

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
)

// imageMaker makes the image of a window, as gguf's RowStage does.
type imageMaker func(context.Context, gguf.Range) (*gguf.Image, error)

// chain is a model cut into stages that follow each other in one process.
type chain struct {
	models   []*Model
	contexts []*Context
	rows     []*Batch
}

// openGGUF opens a model file until the test ends.
func openGGUF(t testing.TB, path string) *gguf.Model {
	t.Helper()
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// newChain cuts the model of a file at the given layers.
func newChain(t testing.TB, rt *Runtime, bounds []int, cfg ContextConfig, image imageMaker) *chain {
	t.Helper()
	ch, err := loadCut(rt, bounds, image, nil)
	if err != nil {
		t.Fatal(err)
	}
	ch.open(t, cfg)
	return ch
}

// open makes the contexts of a chain.
func (ch *chain) open(t testing.TB, cfg ContextConfig) {
	t.Helper()
	for i, m := range ch.models {
		cfg.Boundary = i < ch.last()
		c, err := m.NewContext(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ch.contexts = append(ch.contexts, c)
		ch.rows = append(ch.rows, NewRowBatch(cfg.Batch, m.EmbeddingLength()))
	}
}

// loadCut loads the models of a chain.
func loadCut(rt *Runtime, bounds []int, image imageMaker, experts ExpertFunc) (*chain, error) {
	ch := &chain{}
	for i := 1; i < len(bounds); i++ {
		im, err := image(context.Background(), gguf.Range{Begin: bounds[i-1], End: bounds[i]})
		if err != nil {
			return nil, errors.Join(err, ch.free())
		}
		m, err := rt.LoadModel(ModelConfig{Image: im, Experts: experts})
		if err != nil {
			return nil, errors.Join(err, ch.free())
		}
		ch.models = append(ch.models, m)
	}
	return ch, nil
}

func (ch *chain) free() (err error) {
	for _, c := range ch.contexts {
		err = errors.Join(err, c.Close())
	}
	for _, m := range ch.models {
		err = errors.Join(err, m.Close())
	}
	return err
}

func (ch *chain) close(t testing.TB) {
	if err := ch.free(); err != nil {
		t.Error(err)
	}
}

func (ch *chain) last() int { return len(ch.models) - 1 }

// vocab is that of the last stage, which is the model's.
func (ch *chain) vocab() int { return ch.models[ch.last()].VocabSize() }

func (ch *chain) canTruncate() bool {
	return !slices.ContainsFunc(ch.models, func(m *Model) bool { return !m.CanTruncate() })
}

// decode sends a batch of tokens through the chain; the logits are those of the last
// context.
func (ch *chain) decode(t testing.TB, b *Batch) *Context {
	t.Helper()
	for i, c := range ch.contexts {
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatalf("stage %d: %v", i, err)
		}
		if i == ch.last() {
			break
		}
		next := ch.rows[i]
		next.Reset()
		for j := range b.Len() {
			next.AddRow(c.Hidden(j), int(b.pos[j]), int(b.seq[j]), b.output[j])
		}
		b = next
	}
	return ch.contexts[ch.last()]
}

func testTokens(n, vocab int) []Token {
	rng := rand.New(rand.NewPCG(1, 2))
	tokens := make([]Token, n)
	for i := range tokens {
		tokens[i] = Token(rng.IntN(vocab))
	}
	return tokens
}
