//go:build cgo

package ggml

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"

	"kvasird/ggml/gguf"
)

// part is how many tokens of a sequence are in a batch.
type part struct{ seq, tokens int }

// script is what every cut decodes: a prompt in chunks, single tokens, several
// sequences of unequal length in one batch.
var script = [][]part{{{0, 5}}, {{0, 7}}, {{0, 1}}, {{1, 3}, {0, 1}}, {{0, 1}, {2, 6}, {1, 1}}, {{2, 1}, {1, 1}, {0, 1}}}

// afterRollback is decoded when the last positions of sequence 0 were dropped.
var afterRollback = [][]part{{{0, 4}, {1, 1}}, {{0, 1}}}

const scriptSequences = 3

// played is a script in the making.
type played struct {
	rng    *rand.Rand
	vocab  int
	pos    [scriptSequences]int
	logits [][]float32
}

// play decodes a script and keeps the logits of every token.
func (p *played) play(script [][]part, decode func(*Batch) *Context) {
	for _, parts := range script {
		b := NewBatch(16)
		for _, part := range parts {
			for range part.tokens {
				b.Add(Token(p.rng.IntN(p.vocab)), p.pos[part.seq], part.seq, true)
				p.pos[part.seq]++
			}
		}
		c := decode(b)
		for i := range b.Len() {
			p.logits = append(p.logits, slices.Clone(c.Logits(i)))
		}
	}
}

// playAll plays the script, drops the last three positions of sequence 0 where the
// memory can, and goes on with other tokens.
func playAll(vocab int, truncate func(seq, pos int), decode func(*Batch) *Context) [][]float32 {
	p := &played{rng: rand.New(rand.NewPCG(3, 4)), vocab: vocab}
	p.play(script, decode)
	if truncate != nil {
		p.pos[0] -= 3
		truncate(0, p.pos[0])
		p.play(afterRollback, decode)
	}
	return p.logits
}

var cutContext = ContextConfig{Tokens: 3 * 64, Batch: 16, UBatch: 8, Sequences: scriptSequences}

// playWhole is the measure: the model that is not cut.
func playWhole(t testing.TB, rt *Runtime, path string, cfg ContextConfig) [][]float32 {
	t.Helper()
	m := loadModel(t, rt, ModelConfig{Path: path})
	c, err := m.NewContext(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var truncate func(seq, pos int)
	if m.CanTruncate() {
		truncate = func(seq, pos int) { c.SeqRemove(seq, pos, -1) }
	}
	return playAll(m.VocabSize(), truncate, func(b *Batch) *Context {
		if err := c.Decode(context.Background(), b); err != nil {
			t.Fatal(err)
		}
		return c
	})
}

// playCut plays through stages that follow each other in this process.
func playCut(t testing.TB, rt *Runtime, bounds []int, cfg ContextConfig, image imageMaker) [][]float32 {
	t.Helper()
	ch := newChain(t, rt, bounds, cfg, image)
	defer ch.close(t)
	return ch.play(t)
}

// play plays everything through a chain.
func (ch *chain) play(t testing.TB) [][]float32 {
	t.Helper()
	var truncate func(seq, pos int)
	if ch.canTruncate() {
		truncate = func(seq, pos int) {
			for _, c := range ch.contexts {
				c.SeqRemove(seq, pos, -1)
			}
		}
	}
	return playAll(ch.vocab(), truncate, func(b *Batch) *Context { return ch.decode(t, b) })
}

// bounds lists every cut in two, and one each in three and four.
func boundsOf(cuts []int, layers int) [][]int {
	var all [][]int
	for _, at := range cuts {
		all = append(all, []int{0, at, layers})
	}
	for stages := 3; stages <= 4; stages++ {
		if len(cuts) >= stages-1 {
			b := []int{0}
			for i := range stages - 1 {
				b = append(b, cuts[i*len(cuts)/(stages-1)])
			}
			all = append(all, append(b, layers))
		}
	}
	return all
}

// proveCuts compares every cut of a file with the whole, bit for bit.
func proveCuts(t *testing.T, rt *Runtime, path string, fewest int, cfg ContextConfig) {
	t.Helper()
	file := openGGUF(t, path)
	cuts, err := file.Cuts()
	if err != nil {
		t.Fatal(err)
	}
	if len(cuts) < fewest {
		t.Fatalf("cuts at %v, want %d at the least", cuts, fewest)
	}
	want := playWhole(t, rt, path, cfg)
	for _, bounds := range boundsOf(cuts, file.Layers()) {
		got := playCut(t, rt, bounds, cfg, file.RowStage)
		if d := maxAbs(want, got); d != 0 {
			t.Errorf("%v: max |Δ| of the logits is %g, want 0", bounds, d)
		}
	}
}

// cutCase is a model with three periods of its pattern.
type cutCase struct {
	name   string
	cfg    GenerateConfig
	fewest int // cuts
}

// everyTwo turns layer by layer.
func everyTwo(layers int) []bool {
	v := make([]bool, layers)
	for i := range v {
		v[i] = i%2 == 0
	}
	return v
}

// cutCases has every architecture of the table in gguf, and what of it depends on
// metadata. The first ones stand for the rest where time is short.
var cutCases = []cutCase{
	{"qwen35moe", GenerateConfig{Arch: "qwen35moe", Layers: 6, Overrides: map[string]any{"full_attention_interval": uint32(2)}}, 2},
	{"gpt-oss", GenerateConfig{Arch: "gpt-oss", Layers: 6}, 2},
	{"deepseek2", GenerateConfig{Arch: "deepseek2", Layers: 4}, 3},
	{"glm4moe text", GenerateConfig{Arch: "glm4moe", Layers: 4, Overrides: map[string]any{"rope.dimension_sections": nil}}, 3},
	{"qwen3vlmoe deepstack", GenerateConfig{Arch: "qwen3vlmoe", Layers: 4, Overrides: map[string]any{"n_deepstack_layers": uint32(2)}}, 3},
	{"gemma3", GenerateConfig{Arch: "gemma3", Layers: 6}, 2},
	{"granite", GenerateConfig{Arch: "granite", Layers: 4, Dense: true, Overrides: map[string]any{"embedding_scale": float32(12), "residual_scale": float32(0.22)}}, 3},
	{"qwen3 tied", GenerateConfig{Arch: "qwen3", Layers: 4, Drop: regexp.MustCompile(`^output\.weight$`)}, 3},

	{"qwen35moe by default", GenerateConfig{Arch: "qwen35moe", Layers: 12, Overrides: map[string]any{"full_attention_interval": nil}}, 2},
	{"qwen35moe by list", GenerateConfig{Arch: "qwen35moe", Layers: 6, Overrides: map[string]any{
		"full_attention_interval": uint32(1), "attention.recurrent_layers": everyTwo(6)}}, 2},
	{"gpt-oss by list", GenerateConfig{Arch: "gpt-oss", Layers: 6, Overrides: map[string]any{sliding: everyTwo(6)}}, 2},
	{"gpt-oss MXFP4", GenerateConfig{Arch: "gpt-oss", Layers: 6, Type: "MXFP4"}, 2},
	{"deepseek2 lead", GenerateConfig{Arch: "deepseek2", Layers: 6, Overrides: map[string]any{"leading_dense_block_count": uint32(3), "expert_gating_func": nil}}, 5},
	{"gemma3 by default", GenerateConfig{Arch: "gemma3", Layers: 18, Overrides: map[string]any{sliding: nil}}, 2},
	{"llama dense", GenerateConfig{Arch: "llama", Layers: 4, Dense: true}, 3},
	{"llama Q4_K", GenerateConfig{Arch: "llama", Layers: 4, Embedding: 256, FeedForward: 256, Type: "Q4_K"}, 3},
	{"mistral3 dense", GenerateConfig{Arch: "mistral3", Layers: 4, Dense: true}, 3},
	{"llama4", GenerateConfig{Arch: "llama4", Layers: 12, Overrides: map[string]any{sliding: nil}}, 2},
	{"minimax-m3", GenerateConfig{Arch: "minimax-m3", Layers: 5}, 3},
	{"smollm3", GenerateConfig{Arch: "smollm3", Layers: 12}, 2},
}

const sliding = "attention.sliding_window_pattern"

// bare are the architectures that need no metadata beyond the generator's.
var bareCases = map[int][]string{
	4: {"arcee", "arctic", "bailingmoe", "bailingmoe2", "command-r", "dbrx", "deepseek", "deepseek2-ocr", "deepseek32", "dots1",
		"falcon-h1", "glm4", "glm4moe", "granite", "granitemoe", "grok", "grovemoe", "hunyuan-dense", "hunyuan-moe", "hy_v3", "internlm2",
		"llama", "mamba2", "minicpm", "minimax-m2", "mistral3", "mistral4", "nemotron", "olmoe", "phi3", "phimoe", "qwen2",
		"qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss", "stablelm", "starcoder2"},
	6: {"bailingmoe3", "cohere2", "cohere2moe", "ernie4_5-moe", "exaone-moe", "exaone4", "granite_swa", "granitehybrid", "jamba", "laguna",
		"lfm2", "lfm2moe", "maple", "mellum", "mimo2", "olmo2", "qwen35", "qwen3next"},
}

func init() {
	for layers, archs := range bareCases {
		for _, arch := range archs {
			cutCases = append(cutCases, cutCase{arch, GenerateConfig{Arch: arch, Layers: layers}, layers/2 - 1})
		}
	}
}

// small makes the models of the table quick to make and to run.
func (c cutCase) small() GenerateConfig {
	cfg := c.cfg
	if cfg.Embedding == 0 {
		cfg.Embedding, cfg.FeedForward, cfg.Experts, cfg.Heads = 128, 64, 4, 2
	}
	cfg.Seed = 11
	return cfg
}

// inShort are the first cases, which stand for the rest under the race detector.
const inShort = 8

func TestEveryCut(t *testing.T) {
	rt := openRuntime(t)
	cases := cutCases
	if raceEnabled {
		cases = cases[:inShort]
	}
	for i, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			path := generate(t, rt, tt.small())
			proveCuts(t, rt, path, tt.fewest, cutContext)
			if i < inShort { // how memory is shared decides in which order rows are computed
				unified := cutContext
				unified.UnifiedKV = true
				proveCuts(t, rt, path, tt.fewest, unified)
			}
		})
	}
}

// Nothing is in the table that is not proved above.
func TestEveryRuleIsProved(t *testing.T) {
	proved := map[string]bool{}
	for _, c := range cutCases {
		proved[c.cfg.Arch] = true
	}
	if got := slices.Sorted(maps.Keys(proved)); !slices.Equal(got, gguf.CutArchitectures()) {
		t.Errorf("cases of %v, rules for %v", got, gguf.CutArchitectures())
	}
}

// A cut beside the table must show: else the tests above could not fail.
func TestWrongCutIsWrong(t *testing.T) {
	rt := openRuntime(t)
	tests := []struct {
		name   string
		cfg    GenerateConfig
		bounds []int
	}{
		{"hybrid, not at a period", GenerateConfig{Arch: "qwen3next", Layers: 9, Overrides: map[string]any{"full_attention_interval": uint32(3)}}, []int{0, 4, 9}},
		{"sliding window, not at a period", GenerateConfig{Arch: "gpt-oss", Layers: 9, Overrides: map[string]any{sliding: uint32(3)}}, []int{0, 4, 9}},
		{"rows scaled as embeddings", GenerateConfig{Arch: "afmoe", Layers: 4}, []int{0, 2, 4}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := generate(t, rt, cutCase{cfg: tt.cfg}.small())
			file := openGGUF(t, path)
			first := gguf.Range{End: tt.bounds[1]}
			if _, err := file.RowStage(t.Context(), first); !errors.Is(err, gguf.ErrCut) {
				t.Errorf("a stage of %v: %v, want ErrCut", first, err)
			}
			m, err := loadCut(rt, tt.bounds, file.UnprovenStage, nil)
			if err != nil {
				t.Logf("the library refuses it: %v", err)
				return
			}
			m.close(t)
			if d := maxAbs(playWhole(t, rt, path, cutContext), playCut(t, rt, tt.bounds, cutContext, file.UnprovenStage)); d < 1e-3 {
				t.Errorf("max |Δ| of the logits is %g: this test cannot see a wrong cut", d)
			}
		})
	}
}

func TestTinyCuts(t *testing.T) {
	proveCuts(t, openRuntime(t), tinyPath, 3, cutContext)
}
