//go:build cgo

package ggml

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"kvasird/ggml/tensor"
)

// GenerateConfig describes a random-weight model. Equal configurations give
// equal files, byte for byte, on one CPU architecture.
type GenerateConfig struct {
	Arch string // one of GenerateArchitectures
	Seed uint64

	// Sizes; 0 is the architecture's small default (8 experts of which 2 are
	// used, embedding and feed forward 256, vocabulary 128). Quantised types
	// need Embedding and FeedForward in multiples of their block (256 for the
	// K types). Token ids are 0 to Vocab-1; there is no text tokenizer.
	Layers, Experts, ExpertsUsed, Embedding, FeedForward, Heads, Vocab int

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
	// Threads for filling and quantising; 0 is 1.
	Threads int

	// Overrides sets metadata last. Keys are without the architecture's
	// prefix; values are uint32, float32, bool, string, a slice of uint32,
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

// GenerateArchitectures names every mixture-of-experts architecture that
// GenerateModel knows.
func GenerateArchitectures() []string {
	var names []string
	for _, a := range architectures {
		names = append(names, a.name)
	}
	return names
}

// GenerateFused names the architectures that take GenerateConfig.Fused.
func GenerateFused() []string {
	var names []string
	for _, a := range architectures {
		if a.fused {
			names = append(names, a.name)
		}
	}
	return names
}

// GenerateModel writes a GGUF with random weights to path. It holds less than
// 20 MiB per thread, whatever the size of the model. A tensor of more than 8191
// rows repeats them. On an error path is removed.
func (rt *Runtime) GenerateModel(path string, cfg GenerateConfig) error {
	i := slices.IndexFunc(architectures, func(a architecture) bool { return a.name == cfg.Arch })
	if i < 0 {
		return fmt.Errorf("generate: unknown architecture %q, want one of %s", cfg.Arch, strings.Join(GenerateArchitectures(), ", "))
	}
	arch := architectures[i]
	if cfg.Fused && !arch.fused {
		return fmt.Errorf("generate: %s does not take fused gate_up experts, but %s do", arch.name, strings.Join(GenerateFused(), ", "))
	}
	matrixType, err := weightType(cmp.Or(cfg.Type, "F32"))
	if err != nil {
		return fmt.Errorf("generate %s: %w", arch.name, err)
	}
	s, err := arch.shapeOf(cfg)
	if err != nil {
		return err
	}
	m, err := arch.metadataOf(s, cfg.Overrides)
	if err != nil {
		return err
	}
	file := newGGUF()
	defer file.free()
	for _, k := range m.sortedKeys() {
		if err := file.set(arch.fullKey(k), m[k]); err != nil {
			return err
		}
	}
	tensors, err := file.discover(s.layers, cfg)
	if err != nil {
		return fmt.Errorf("generate %s: %w", arch.name, err)
	}
	for i := range tensors {
		if tensors[i].isMatrix() {
			tensors[i].kind = matrixType
		}
	}
	if err := file.write(path, tensors, cfg.Seed, max(cfg.Threads, 1)); err != nil {
		os.Remove(path)
		return fmt.Errorf("generate %s: %w", arch.name, err)
	}
	return nil
}

// generated is one tensor of the file to be.
type generated struct {
	name string
	ne   [4]int64
	kind tensor.DType
}

var (
	matrixName = regexp.MustCompile(`(^token_embd|^output|\.attn_(q|k|v|qkv|output)|\.ffn_(up|gate|down|gate_up)(_ch|_sh)?(_?exps?)?)\.weight$`)
	blockName  = regexp.MustCompile(`^blk\.(\d+)\.`)
)

func (t generated) isMatrix() bool { return matrixName.MatchString(t.name) && t.ne[1] > 1 }

func (t generated) elements() int64 { return t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3] }

// layer is the tensor's layer, -1 for those of no layer.
func (t generated) layer() int {
	if m := blockName.FindStringSubmatch(t.name); m != nil {
		n, _ := strconv.Atoi(m[1])
		return n
	}
	return -1
}
