//go:build cgo

package ggml

import (
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

// embeddingModels are random models of every pooling, of both kinds of attention.
var embeddingModels = []struct {
	name    string
	cfg     GenerateConfig
	pooling gguf.Pooling
}{
	{"bert", GenerateConfig{Arch: "bert"}, gguf.MeanPooling},
	{"bert of the first token", GenerateConfig{Arch: "bert", Overrides: map[string]any{"pooling_type": uint32(2)}}, gguf.FirstPooling},
	{"bert without a word", GenerateConfig{Arch: "bert", Overrides: map[string]any{"pooling_type": nil}}, gguf.MeanPooling},
	{"experts", GenerateConfig{Arch: "nomic-bert-moe"}, gguf.MeanPooling},
	{"qwen3 of the last token", GenerateConfig{Arch: "qwen3", Overrides: map[string]any{"pooling_type": uint32(3)}}, gguf.LastPooling},
	{"qwen3 of the mean", GenerateConfig{Arch: "qwen3", Overrides: map[string]any{"pooling_type": uint32(1)}}, gguf.MeanPooling},
}

// embeddingInputs have lengths of all kinds.
func embeddingInputs(vocab int) (all [][]Token) {
	for i, n := range []int{1, 7, 32, 3, 50} {
		var in []Token
		for j := range n {
			in = append(in, Token((i*31+j*17+5)%vocab))
		}
		all = append(all, in)
	}
	return all
}

// embed makes the vectors of inputs in one batch.
func embed(t *testing.T, c *Context, inputs [][]Token) (vectors [][]float32) {
	t.Helper()
	b := NewBatch(256)
	for seq, in := range inputs {
		for pos, tok := range in {
			b.Add(tok, pos, seq, false)
		}
	}
	if err := c.Decode(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	for seq := range inputs {
		vectors = append(vectors, append([]float32(nil), c.Embedding(seq)...))
	}
	if c.Embedding(len(inputs)) != nil || c.Embedding(-1) != nil || c.Embedding(1<<20) != nil {
		t.Error("a sequence that was not in the batch has a vector")
	}
	if !c.SeqRemove(-1, -1, -1) {
		t.Error("the cells of a batch of embeddings cannot be removed")
	}
	return vectors
}

func embeddingContext(t *testing.T, m *Model) *Context {
	t.Helper()
	c, err := m.NewContext(ContextConfig{Tokens: 256, Batch: 256, Sequences: 8, UnifiedKV: true, Embeddings: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// besideOthers is how far, by its length, a vector is from the one alone at most: attention
// then sums halves of f32 in other groups.
const besideOthers = 5e-3

// apart is how far two vectors are from each other, by their lengths.
func apart(a, b []float32) float64 {
	if len(a) != len(b) || len(a) == 0 {
		return math.Inf(1)
	}
	var diff, aa, bb float64
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		diff, aa, bb = diff+(x-y)*(x-y), aa+x*x, bb+y*y
	}
	return math.Sqrt(diff / max(aa, bb))
}

// TestEmbeddings: beside others, in another order, and after others, an input has the
// vector that it has alone; other inputs have other ones.
func TestEmbeddings(t *testing.T) {
	rt := openRuntime(t)
	for _, tt := range embeddingModels {
		t.Run(tt.name, func(t *testing.T) {
			path := generate(t, rt, tt.cfg)
			m := loadModel(t, rt, ModelConfig{Path: path})
			if got, header := m.Pooling(), openGGUF(t, path).Pooling(); got != tt.pooling || header != tt.pooling {
				t.Fatalf("pooling %v, by its header %v, want %v", got, header, tt.pooling)
			}
			inputs := embeddingInputs(m.VocabSize())
			var alone [][]float32
			for _, in := range inputs {
				alone = append(alone, embed(t, embeddingContext(t, m), [][]Token{in})[0])
			}
			c := embeddingContext(t, m)
			for round := range 2 {
				for i, v := range embed(t, c, inputs) {
					if d := apart(v, alone[i]); !(d < besideOthers) || len(v) != m.EmbeddingSize() {
						t.Errorf("round %d: input %d of %d values is %g from the one alone", round, i, len(v), d)
					}
					if d := apart(v, alone[(i+1)%len(alone)]); !(d > 0.1) {
						t.Errorf("inputs %d and %d have the same vector, but for %g", i, i+1, d)
					}
				}
			}
			if err := rt.probe(ProbeRequest{Path: path, Threads: 1}); err != nil {
				t.Errorf("probe: %v", err)
			}
		})
	}
}

// TestEmbeddingsByHand: the vectors are the pooled rows after the last norm, which a
// context for text and plain Go make too.
func TestEmbeddingsByHand(t *testing.T) {
	rt := openRuntime(t)
	for _, pooling := range []gguf.Pooling{gguf.MeanPooling, gguf.LastPooling} {
		path := generate(t, rt, GenerateConfig{Arch: "qwen3", Overrides: map[string]any{"pooling_type": uint32(pooling)}})
		m := loadModel(t, rt, ModelConfig{Path: path})
		norm := outputNorm(t, path, m.EmbeddingLength())
		for _, in := range embeddingInputs(m.VocabSize()) {
			text, err := m.NewContext(ContextConfig{Tokens: 256, Batch: 256, Boundary: true})
			if err != nil {
				t.Fatal(err)
			}
			b := NewBatch(len(in))
			for pos, tok := range in {
				b.Add(tok, pos, 0, true)
			}
			if err := text.Decode(t.Context(), b); err != nil {
				t.Fatal(err)
			}
			want := make([]float32, m.EmbeddingLength())
			for i := range in {
				if pooling == gguf.LastPooling && i < len(in)-1 {
					continue
				}
				for j, x := range rmsNorm(text.Hidden(i), norm) {
					want[j] += x
				}
			}
			text.Close()
			if pooling == gguf.MeanPooling {
				for j := range want {
					want[j] /= float32(len(in))
				}
			}
			if d := apart(embed(t, embeddingContext(t, m), [][]Token{in})[0], want); !(d < 1e-3) {
				t.Errorf("%v of %d tokens: %g from the one by hand", pooling, len(in), d)
			}
		}
	}
}

func outputNorm(t *testing.T, path string, width int) []float32 {
	t.Helper()
	r, err := openGGUF(t, path).Section("output_norm.weight")
	if err != nil {
		t.Fatal(err)
	}
	norm := make([]float32, width)
	if err := binary.Read(r, binary.LittleEndian, norm); err != nil {
		t.Fatal(err)
	}
	return norm
}

func rmsNorm(row, weight []float32) []float32 {
	sum := 0.0
	for _, x := range row {
		sum += float64(x) * float64(x)
	}
	scale := 1 / math.Sqrt(sum/float64(len(row))+1e-5)
	out := make([]float32, len(row))
	for i, x := range row {
		out[i] = float32(float64(x)*scale) * weight[i]
	}
	return out
}

// TestEmbeddingsRefused: what makes no embeddings says why, and does no harm.
func TestEmbeddingsRefused(t *testing.T) {
	rt := openRuntime(t)
	with := func(kind uint32) string {
		return generate(t, rt, GenerateConfig{Arch: "qwen3", Overrides: map[string]any{"pooling_type": kind}})
	}
	for _, tt := range []struct {
		path string
		cfg  ContextConfig
		says string
	}{
		{tinyPath, ContextConfig{}, "makes text"},
		{with(4), ContextConfig{}, "reranker"},
		{with(77), ContextConfig{}, "77"},
		{with(3), ContextConfig{Boundary: true}, "Boundary"},
		{with(3), ContextConfig{Batch: 64, UBatch: 32}, "at once"},
	} {
		m := loadModel(t, rt, ModelConfig{Path: tt.path})
		tt.cfg.Tokens, tt.cfg.Embeddings = 256, true
		if c, err := m.NewContext(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.path, err, tt.says)
			if err == nil {
				c.Close()
			}
		}
		if tt.cfg.Boundary || tt.cfg.UBatch > 0 || tt.path == tinyPath {
			continue
		}
		if err := rt.probe(ProbeRequest{Path: tt.path, Threads: 1}); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("probe of %s: %v, want %q", tt.path, err, tt.says)
		}
	}
}
