//go:build cgo

package ggml

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// shape holds the sizes of a generated model; every field is positive.
type shape struct {
	layers, experts, used           int
	embd, ff, heads, kvHeads, vocab int
	dense                           bool // experts and used do not count
}

func (s shape) headSize() int { return s.embd / s.heads }

// perLayer returns f of every layer, as llama.cpp reads per-layer arrays.
func (s shape) perLayer(f func(layer int) uint32) []uint32 {
	v := make([]uint32, s.layers)
	for i := range v {
		v[i] = f(i)
	}
	return v
}

// odd is the pattern of all alternating architectures: layer 0 is of the one
// kind, layer 1 of the other, and so on.
func odd(layer int) uint32 { return uint32(layer % 2) }

// metadata maps a key to its value. A key is without the architecture's name
// in front, unless it starts with "general." or "tokenizer.". A value is a
// uint32, float32, bool, string, or a slice of uint32, uint64, float32 or
// string.
type metadata map[string]any

// trait adds the keys of one feature that several architectures share.
type trait func(m metadata, s shape)

// architecture says what llama.cpp wants to know about one architecture
// beyond baseMetadata. A zero size means the default of shapeOf.
type architecture struct {
	name                string
	layers, embd, heads int
	kvHeads             int
	optional            []optional // beside wantedTensors
	fused               bool       // the loader takes ffn_gate_up_exps
	dense               bool       // it has no experts
	encoder             bool       // it makes embeddings, no text
	traits              []trait
}

const (
	defaultLayers  = 2
	defaultExperts = 8
	defaultUsed    = 2
	defaultWidth   = 256 // embedding and feed forward: the K quants need multiples of 256
	defaultHeads   = 2
	defaultVocab   = 128
	generatedCtx   = 512
)

func orDefault(values ...int) int {
	for _, v := range values {
		if v != 0 {
			return v
		}
	}
	return 0
}

// shapeOf fills in the defaults of cfg and refuses what no model can be.
func (a architecture) shapeOf(cfg GenerateConfig) (shape, error) {
	s := shape{
		layers:  orDefault(cfg.Layers, a.layers, defaultLayers),
		experts: orDefault(cfg.Experts, defaultExperts),
		used:    orDefault(cfg.ExpertsUsed, defaultUsed),
		embd:    orDefault(cfg.Embedding, a.embd, defaultWidth),
		ff:      orDefault(cfg.FeedForward, defaultWidth),
		heads:   orDefault(cfg.Heads, a.heads, defaultHeads),
		vocab:   orDefault(cfg.Vocab, defaultVocab),
	}
	s.kvHeads = s.heads
	if cfg.Heads == 0 && a.kvHeads != 0 {
		s.kvHeads = a.kvHeads
	}
	s.dense = a.dense || cfg.Dense
	for name, v := range map[string]int{"Layers": s.layers, "Experts": s.experts, "ExpertsUsed": s.used,
		"Embedding": s.embd, "FeedForward": s.ff, "Heads": s.heads, "Vocab": s.vocab} {
		if v < 1 || v > 1<<20 {
			return shape{}, fmt.Errorf("generate %s: %s is %d, want 1 to %d", a.name, name, v, 1<<20)
		}
	}
	if s.used > s.experts {
		return shape{}, fmt.Errorf("generate %s: %d experts used of %d", a.name, s.used, s.experts)
	}
	if s.embd%s.heads != 0 || s.headSize()%4 != 0 {
		return shape{}, fmt.Errorf("generate %s: %d heads do not divide an embedding of %d into multiples of 4",
			a.name, s.heads, s.embd)
	}
	return s, nil
}

// baseMetadata is what every architecture reads.
func baseMetadata(a architecture, s shape) metadata {
	tokens := make([]string, s.vocab)
	for i := range tokens {
		tokens[i] = fmt.Sprintf("tok_%d", i)
	}
	return metadata{
		"general.architecture":             a.name,
		"general.name":                     "generated " + a.name,
		"tokenizer.ggml.model":             "test", // ids without text
		"tokenizer.ggml.tokens":            tokens,
		"tokenizer.ggml.scores":            make([]float32, s.vocab),
		"vocab_size":                       uint32(s.vocab),
		"context_length":                   uint32(generatedCtx),
		"embedding_length":                 uint32(s.embd),
		"block_count":                      uint32(s.layers),
		"feed_forward_length":              uint32(s.ff),
		"attention.head_count":             uint32(s.heads),
		"attention.head_count_kv":          uint32(s.kvHeads),
		"attention.layer_norm_rms_epsilon": float32(1e-5),
		"expert_count":                     uint32(s.experts),
		"expert_used_count":                uint32(s.used),
		"expert_feed_forward_length":       uint32(s.ff),
	}
}

// metadataOf puts together base, traits and overrides. An override of nil
// removes the key.
func (a architecture) metadataOf(s shape, overrides map[string]any) (metadata, error) {
	m := baseMetadata(a, s)
	for _, t := range a.traits {
		t(m, s)
	}
	if s.dense {
		for _, k := range []string{"expert_count", "expert_used_count", "expert_feed_forward_length"} {
			delete(m, k)
		}
	}
	for k, v := range overrides {
		switch v.(type) {
		case nil:
			delete(m, k)
		case uint32, float32, bool, string, []bool, []uint32, []uint64, []float32, []string:
			m[k] = v
		default:
			return nil, fmt.Errorf("generate %s: override %q is a %T, want uint32, float32, bool, string or a slice", a.name, k, v)
		}
	}
	return m, nil
}

// fullKey puts the architecture in front of the keys that belong to it.
func (a architecture) fullKey(key string) string {
	if strings.HasPrefix(key, "general.") || strings.HasPrefix(key, "tokenizer.") {
		return key
	}
	return a.name + "." + key
}

// sortedKeys gives the files one order of keys.
func (m metadata) sortedKeys() []string { return slices.Sorted(maps.Keys(m)) }
