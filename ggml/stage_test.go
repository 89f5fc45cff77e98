//go:build cgo

package ggml

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
)

// chain is a model cut into stages that follow each other in one process.
type chain struct {
	contexts []*Context
	width    int
}

// newChain cuts the model of a file at the given layers.
func newChain(t testing.TB, rt *Runtime, m *gguf.Model, cuts []int, cfg ContextConfig) *chain {
	t.Helper()
	ch := &chain{}
	for i, at := range cuts {
		if i == 0 {
			continue
		}
		im, err := m.RowStage(context.Background(), gguf.Range{Begin: cuts[i-1], End: at})
		if err != nil {
			t.Fatal(err)
		}
		part := loadModel(t, rt, ModelConfig{Image: im})
		ch.width = part.EmbeddingLength()
		cfg.Boundary = i < len(cuts)-1
		c, err := part.NewContext(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		ch.contexts = append(ch.contexts, c)
	}
	return ch
}

// decode sends a batch of tokens through the chain; the logits are those of the last
// context.
func (ch *chain) decode(t testing.TB, b *Batch) *Context {
	t.Helper()
	for i, c := range ch.contexts {
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatalf("stage %d: %v", i, err)
		}
		if i == len(ch.contexts)-1 {
			return c
		}
		next := NewRowBatch(b.Len(), ch.width)
		for j := range b.Len() {
			next.AddRow(c.Hidden(j), int(b.pos[j]), int(b.seq[j]), b.output[j])
		}
		b = next
	}
	return nil
}

func testTokens(n, vocab int) []Token {
	rng := rand.New(rand.NewPCG(1, 2))
	tokens := make([]Token, n)
	for i := range tokens {
		tokens[i] = Token(rng.IntN(vocab))
	}
	return tokens
}

// steps are what a sequence of tests decodes: chunks of a prompt, then single tokens.
var steps = []int{5, 7, 1, 1, 1}

// runSteps returns the logits of every token, decode by decode.
func runSteps(t testing.TB, tokens []Token, decode func(*Batch) *Context) [][]float32 {
	t.Helper()
	var all [][]float32
	pos := 0
	for _, n := range steps {
		b := NewBatch(n)
		for i := range n {
			b.Add(tokens[pos+i], pos+i, 0, true)
		}
		c := decode(b)
		for i := range n {
			all = append(all, slices.Clone(c.Logits(i)))
		}
		pos += n
	}
	return all
}

func TestStagesOfTiny(t *testing.T) {
	rt := openRuntime(t)
	file, err := gguf.OpenModel(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	whole := loadModel(t, rt, ModelConfig{Path: tinyPath})
	cfg := ContextConfig{Tokens: 64, Batch: 16}
	c, err := whole.NewContext(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	tokens := testTokens(15, whole.VocabSize())
	want := runSteps(t, tokens, func(b *Batch) *Context {
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		return c
	})
	for _, cuts := range [][]int{{0, 1, 4}, {0, 2, 4}, {0, 3, 4}, {0, 1, 2, 4}, {0, 1, 2, 3, 4}} {
		t.Run(fmt.Sprint(cuts), func(t *testing.T) {
			ch := newChain(t, rt, file, cuts, cfg)
			got := runSteps(t, tokens, func(b *Batch) *Context { return ch.decode(t, b) })
			if d := maxAbs(want, got); d != 0 {
				t.Errorf("max |Δ| of the logits is %g, want 0", d)
			}
		})
	}
}
