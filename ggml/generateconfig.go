package ggml

import "regexp"

// GenerateConfig describes a random-weight model. Equal configurations give
// equal files, byte for byte, on one CPU architecture.
type GenerateConfig struct {
	Arch string // one of GenerateArchitectures, GenerateDense or GenerateEncoders
	Seed uint64

	// Sizes; 0 is the architecture's small default (8 experts of which 2 are
	// used, embedding and feed forward 256, vocabulary 128). Quantised types
	// need Embedding and FeedForward in multiples of their block (256 for the
	// K types). Token ids are 0 to Vocab-1; there is no text tokenizer.
	Layers, Experts, ExpertsUsed, Embedding, FeedForward, Heads, Vocab int

	// Dense leaves the experts out, where the architecture can do without.
	Dense bool
	// Scales adds the per-expert scale tensors that NVFP4 files have, Biases
	// the optional biases, where the architecture knows them.
	Scales, Biases bool
	// Fused stores gate and up as one ffn_gate_up_exps tensor. An error where
	// the architecture does not take it: see GenerateFused.
	Fused bool
	// Drop leaves out the tensors that match, such as `^output\.weight$`. Only
	// what the architecture calls optional may go, or the file does not load.
	Drop *regexp.Regexp

	// Type is the type of the large matrices, such as "Q4_K"; "" is F32. The
	// router, norms and biases stay F32.
	Type string
	// Holes leaves out the bytes of the experts: they read as zeros, and take no disk
	// space where the file system knows holes.
	Holes bool
	// Threads for filling and quantising; 0 is 1.
	Threads int

	// Overrides sets metadata last. Keys are without the architecture's
	// prefix; values are uint32, float32, bool, string, a slice of bool, uint32,
	// uint64, float32 or string, or nil to remove the key.
	Overrides map[string]any
}

// PresetRealShapes is two layers with the widths of a real model: 128 experts
// in all of 9.4 million weights each, about 680 MB of them in Q4_K. It takes
// about 15 s of CPU time to make.
var PresetRealShapes = GenerateConfig{
	Arch: "qwen3moe", Layers: 2, Experts: 64, ExpertsUsed: 8,
	Embedding: 3072, FeedForward: 1024, Heads: 24, Vocab: 2048,
	Type: "Q4_K", Threads: 2,
}

// PresetLargeShapes is a model of 82 GB, 79.7 GB of them in 12,288 experts, which are
// holes: the widths, layers, experts and vocabulary of one with 122 billion weights. It
// takes 2.5 GB of disk.
var PresetLargeShapes = GenerateConfig{
	Arch: "qwen35moe", Layers: 48, Experts: 256, ExpertsUsed: 8,
	Embedding: 3072, FeedForward: 1024, Heads: 24, Vocab: 248320,
	Type: "Q5_K", Holes: true, Threads: 2,
}
