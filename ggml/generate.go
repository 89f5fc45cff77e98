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

// GenerateArchitectures names every mixture-of-experts architecture that
// GenerateModel knows.
func GenerateArchitectures() []string {
	return architecturesThat(func(a architecture) bool { return !a.dense && !a.encoder })
}

// GenerateDense names the architectures without experts that GenerateModel knows.
// Others take GenerateConfig.Dense.
func GenerateDense() []string {
	return architecturesThat(func(a architecture) bool { return a.dense && !a.encoder })
}

// GenerateEncoders names the architectures for embeddings that GenerateModel knows. One
// for text makes embeddings where GenerateConfig.Overrides give it a "pooling_type".
func GenerateEncoders() []string {
	return architecturesThat(func(a architecture) bool { return a.encoder })
}

// GenerateFused names the architectures that take GenerateConfig.Fused.
func GenerateFused() []string {
	return architecturesThat(func(a architecture) bool { return a.fused })
}

func architecturesThat(match func(architecture) bool) []string {
	var names []string
	for _, a := range architectures {
		if match(a) {
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
		return fmt.Errorf("generate: unknown architecture %q, want one of %s", cfg.Arch, strings.Join(slices.Concat(GenerateArchitectures(), GenerateDense(), GenerateEncoders()), ", "))
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
	tensors, err := file.discover(s.layers, cfg, arch.optional)
	if err != nil {
		return fmt.Errorf("generate %s: %w", arch.name, err)
	}
	for i := range tensors {
		if tensors[i].isMatrix() {
			tensors[i].kind = matrixType
		}
	}
	if err := file.write(path, tensors, cfg); err != nil {
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
