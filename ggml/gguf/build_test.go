package gguf

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"kvasird/ggml/tensor"
)

const tinyPath = "../tiny/kvasir-tiny-q4_k_m.gguf"

// metaOf makes metadata of key, value pairs.
func metaOf(pairs ...any) Metadata {
	var meta Metadata
	for i := 0; i < len(pairs); i += 2 {
		meta.set(pairs[i].(string), pairs[i+1].(Value))
	}
	return meta
}

// randomTensor makes a tensor of random bytes that depend on its name alone.
func randomTensor(t testing.TB, name string, dtype tensor.DType, dims ...int64) outTensor {
	t.Helper()
	shape, err := tensor.NewShape(dims...)
	if err != nil {
		t.Fatal(err)
	}
	n, err := dtype.Bytes(shape)
	if err != nil {
		t.Fatal(err)
	}
	var seed [32]byte
	copy(seed[:], name)
	data := make([]byte, n)
	rand.NewChaCha8(seed).Read(data)
	return outTensor{name: name, dtype: dtype, shape: shape, src: bytes.NewReader(data)}
}

// writeModel writes a file into a new folder.
func writeModel(t testing.TB, name string, meta Metadata, tensors ...outTensor) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	im, err := newImage(meta, defaultAlignment, tensors)
	if err != nil {
		t.Fatal(err)
	}
	if err := im.WriteFile(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	return path
}

func openModel(t testing.TB, path string) *Model {
	t.Helper()
	m, err := OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// moe is a small generated model: biases, scales, a dense first layer, an output head.
const (
	moeLayers  = 5
	moeExperts = 12
	moeVocab   = 40
)

func moeMeta() Metadata {
	heads := []uint32{1, 2, 3, 4, 5}
	return metaOf(
		"general.architecture", NewValue("deepseek2"),
		"deepseek2.block_count", NewValue(uint32(moeLayers)),
		"deepseek2.expert_count", NewValue(uint32(moeExperts)),
		"deepseek2.expert_used_count", NewValue(uint32(3)),
		"deepseek2.leading_dense_block_count", NewValue(uint32(1)),
		"deepseek2.embedding_length", NewValue(uint32(128)),
		"deepseek2.attention.head_count", NewArray(heads...),
		"deepseek2.rope.dimension_sections", NewArray[int32](1, 2, 3, 4, 5),
		"tokenizer.ggml.model", NewValue("gpt2"),
		"tokenizer.ggml.tokens", NewArray("a", "b"),
	)
}

func moeTensors(t testing.TB) []outTensor {
	list := []outTensor{
		randomTensor(t, "token_embd.weight", tensor.F16, 128, moeVocab),
		randomTensor(t, "output_norm.weight", tensor.F32, 128),
		randomTensor(t, "output.weight", tensor.Q8_0, 128, moeVocab),
		randomTensor(t, "blk.0.ffn_up.weight", tensor.F16, 128, 64),
	}
	for l := range moeLayers {
		name := func(s string) string { return fmt.Sprintf("blk.%d.%s", l, s) }
		list = append(list, randomTensor(t, name("attn_norm.weight"), tensor.F32, 128))
		if l == 0 {
			continue
		}
		list = append(list,
			randomTensor(t, name("ffn_gate_inp.weight"), tensor.F32, 128, moeExperts),
			randomTensor(t, name("ffn_gate_up_exps.weight"), tensor.Q4_0, 128, 96, moeExperts),
			randomTensor(t, name("ffn_gate_up_exps.bias"), tensor.F32, 96, moeExperts),
			randomTensor(t, name("ffn_down_exps.weight"), tensor.Q8_0, 96, 128, moeExperts),
			randomTensor(t, name("ffn_down_exps.scale"), tensor.F32, moeExperts),
			randomTensor(t, name("ffn_down_shexp.weight"), tensor.F16, 96, 128),
		)
	}
	return list
}

// splitModel writes the generated model as a split set whose first part has metadata
// only, and returns the path of the first part.
func splitModel(t testing.TB) string {
	t.Helper()
	tensors := moeTensors(t)
	groups := [][]outTensor{nil, tensors[:7], tensors[7:19], tensors[19:]}
	dir := t.TempDir()
	for i, group := range groups {
		meta := metaOf("general.architecture", NewValue("deepseek2"))
		if i == 0 {
			meta = moeMeta()
		}
		meta.set("split.no", NewValue(uint16(i)))
		meta.set("split.count", NewValue(uint16(len(groups))))
		meta.set("split.tensors.count", NewValue(int32(len(tensors))))
		im, err := newImage(meta, defaultAlignment, group)
		if err != nil {
			t.Fatal(err)
		}
		if err := im.WriteFile(t.Context(), filepath.Join(dir, "moe"+splitSuffix(i, len(groups)))); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "moe"+splitSuffix(0, len(groups)))
}

// imageBytes returns the whole file.
func imageBytes(t testing.TB, im *Image) []byte {
	t.Helper()
	var b bytes.Buffer
	n, err := im.WriteTo(&b)
	if err != nil || n != im.Size() || n != int64(b.Len()) {
		t.Fatalf("WriteTo = %d, %v; size %d, wrote %d", n, err, im.Size(), b.Len())
	}
	return b.Bytes()
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
