package gguf

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"kvasird/ggml/tensor"
)

// The architecture of tests that need no library.
func init() {
	cutRules["x"] = cutRule{every: []period{{"full_attention_interval", 1}}, kinds: []string{"attention.head_count_kv"}}
}

func openStage(t *testing.T, m *Model, window Range) *Model {
	t.Helper()
	im, err := m.StageImage(t.Context(), window)
	if err != nil {
		t.Fatal(err)
	}
	path := writeImage(t, im)
	if !bytes.Equal(readFile(t, path), imageBytes(t, im)) {
		t.Fatalf("stage %v: WriteFile and WriteTo differ", window)
	}
	return openModel(t, path)
}

func sectionBytes(t *testing.T, m *Model, name string) []byte {
	t.Helper()
	r, err := m.Section(name)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, r.Size())
	if _, err := r.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// vocabTensor is how a stage should have a tensor with a row per token.
type vocabTensor struct {
	dtype tensor.DType
	rows  int64
	real  bool // its rows are the first of the model's; else it is all zeros
}

func checkVocab(t *testing.T, m, s *Model, name string, want vocabTensor) {
	t.Helper()
	x, _ := s.Tensor(name)
	got := sectionBytes(t, s, name)
	wantBytes := make([]byte, len(got))
	if want.real {
		copy(wantBytes, sectionBytes(t, m, name))
	}
	if x.DType != want.dtype || x.Shape != (tensor.Shape{128, want.rows, 1, 1}) || !bytes.Equal(got, wantBytes) {
		t.Errorf("stage %v: %s is %v %v, want %+v", s.Slice().Layers, name, x.DType, x.Shape, want)
	}
}

func TestStages(t *testing.T) {
	m := openModel(t, splitModel(t))
	id, err := m.ID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		window     Range
		heads      []int64
		lead       int64
		scale      bool
		tokenizer  string
		embd, head vocabTensor
	}{
		{Range{0, 2}, []int64{1, 2}, 1, false, "gpt2", vocabTensor{tensor.F16, moeVocab, true}, vocabTensor{tensor.Q1_0, moeVocab, false}},
		{Range{2, 4}, []int64{3, 4}, 0, true, "none", vocabTensor{tensor.Q1_0, 1, false}, vocabTensor{tensor.Q1_0, 1, false}},
		{Range{4, 5}, []int64{5}, 0, true, "gpt2", vocabTensor{tensor.Q1_0, moeVocab, false}, vocabTensor{tensor.Q8_0, moeVocab, true}},
	}
	for _, tt := range tests {
		s := openStage(t, m, tt.window)
		if got, _ := s.ID(t.Context()); got != id || s.Kind() != Stage || s.Slice().Layers != tt.window || s.Layers() != tt.window.Len() {
			t.Errorf("stage %v: %v of %v, window %v, %d layers", tt.window, s.Kind(), got, s.Slice(), s.Layers())
		}
		if got, err := s.Meta().Ints("deepseek2.attention.head_count"); err != nil || !slices.Equal(got, tt.heads) {
			t.Errorf("stage %v: head_count = %v, %v, want %v", tt.window, got, err, tt.heads)
		}
		if got, _ := s.Meta().Ints("deepseek2.rope.dimension_sections"); len(got) != 5 {
			t.Errorf("stage %v: rope sections were cut to %v", tt.window, got)
		}
		if got, err := s.Meta().Int("deepseek2.leading_dense_block_count"); err != nil || got != tt.lead {
			t.Errorf("stage %v: leading_dense_block_count = %d, %v, want %d", tt.window, got, err, tt.lead)
		}
		if scale, err := s.Meta().Float("deepseek2.embedding_scale"); (err == nil) != tt.scale || tt.scale && scale != 1 {
			t.Errorf("stage %v: embedding_scale = %v, %v", tt.window, scale, err)
		}
		if got, _ := s.Meta().Text("tokenizer.ggml.model"); got != tt.tokenizer {
			t.Errorf("stage %v: tokenizer %q, want %q", tt.window, got, tt.tokenizer)
		}
		vocabSize, _ := s.Meta().Int("deepseek2.vocab_size")
		if _, err := s.Meta().Strings("tokenizer.ggml.tokens"); (err == nil) == (tt.tokenizer == "none") || (vocabSize == 1) != (tt.tokenizer == "none") {
			t.Errorf("stage %v: tokens %v, vocab_size %d", tt.window, err, vocabSize)
		}
		if _, ok := s.Meta().Get("split.count"); ok {
			t.Errorf("stage %v says that it is part of a split set", tt.window)
		}
		checkVocab(t, m, s, "token_embd.weight", tt.embd)
		checkVocab(t, m, s, "output.weight", tt.head)
		checkBlocks(t, m, s, tt.window)
	}
}

// checkBlocks checks that a stage has exactly the blocks of its window.
func checkBlocks(t *testing.T, m, s *Model, window Range) {
	t.Helper()
	blocks := 0
	for _, x := range m.Tensors() {
		layer, rest, ok := blockName(x.Name)
		if !ok || !window.Contains(layer) {
			continue
		}
		blocks++
		if name := fmt.Sprintf("blk.%d.%s", layer-window.Begin, rest); !bytes.Equal(sectionBytes(t, s, name), sectionBytes(t, m, x.Name)) {
			t.Errorf("stage %v: %s differs from %s", window, name, x.Name)
		}
	}
	for _, x := range s.Tensors() {
		if _, _, ok := blockName(x.Name); ok {
			blocks--
		}
	}
	if blocks != 0 {
		t.Errorf("stage %v: %d blocks are missing", window, blocks)
	}
	if !reflect.DeepEqual(sectionBytes(t, s, "output_norm.weight"), sectionBytes(t, m, "output_norm.weight")) {
		t.Errorf("stage %v: output_norm differs", window)
	}
}

// A model without a head of its own uses the embedding, so the last stage needs it.
func TestStageTiedHead(t *testing.T) {
	meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(2)))
	m := openModel(t, writeModel(t, "m.gguf", meta,
		randomTensor(t, "token_embd.weight", tensor.F16, 8, 30),
		randomTensor(t, "output_norm.weight", tensor.F32, 8),
		randomTensor(t, "blk.0.a.weight", tensor.F32, 8), randomTensor(t, "blk.1.a.weight", tensor.F32, 8)))
	s := openStage(t, m, Range{1, 2})
	if !bytes.Equal(sectionBytes(t, s, "token_embd.weight"), sectionBytes(t, m, "token_embd.weight")) {
		t.Error("the last stage has no embedding to use as its head")
	}
}

// Layers for multi-token prediction are in the window of the last stage, not in it.
func TestStageNextn(t *testing.T) {
	meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(4)), "x.nextn_predict_layers", NewValue(uint32(1)))
	tensors := []outTensor{randomTensor(t, "token_embd.weight", tensor.F16, 8, 30), randomTensor(t, "output_norm.weight", tensor.F32, 8)}
	for l := range 4 {
		tensors = append(tensors, randomTensor(t, fmt.Sprintf("blk.%d.a.weight", l), tensor.F32, 8))
	}
	m := openModel(t, writeModel(t, "m.gguf", meta, tensors...))
	for window, want := range map[Range]int{{0, 2}: 2, {1, 2}: 1, {2, 4}: 1} {
		s := openStage(t, m, window)
		blocks := 0
		for _, x := range s.Tensors() {
			if _, _, ok := blockName(x.Name); ok {
				blocks++
			}
		}
		if n, err := s.Meta().Int("x.nextn_predict_layers"); err != nil || n != 0 || blocks != want || s.Layers() != want {
			t.Errorf("stage %v: nextn_predict_layers = %d, %v, %d blocks of %d, want %d", window, n, err, blocks, s.Layers(), want)
		}
	}
	if _, err := m.StageImage(t.Context(), Range{3, 4}); err == nil {
		t.Error("a stage of multi-token prediction alone was made")
	}
}

func TestStageRefuses(t *testing.T) {
	model := func(pairs ...any) *Model {
		meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(6)))
		for i := 0; i < len(pairs); i += 2 {
			meta.set(pairs[i].(string), pairs[i+1].(Value))
		}
		return openModel(t, writeModel(t, "m.gguf", meta,
			randomTensor(t, "token_embd.weight", tensor.F16, 8, 30),
			randomTensor(t, "per_layer_token_embd.weight", tensor.F16, 8, 30),
			randomTensor(t, "blk.0.a.weight", tensor.F32, 8)))
	}
	plain := model()
	headless := openModel(t, writeModel(t, "m.gguf", plain.Meta()))
	tests := []struct {
		name   string
		m      *Model
		window Range
		want   string
	}{
		{"empty", plain, Range{2, 2}, "a stage is a part"},
		{"past the end", plain, Range{2, 7}, "a stage is a part"},
		{"whole model", plain, Range{0, 6}, "a stage is a part"},
		{"no embedding", headless, Range{0, 3}, "no token_embd.weight"},
		{"shifted interval", model("x.full_attention_interval", NewValue(uint32(4))), Range{2, 6}, "no stage of this x may begin or end at layer 2"},
		{"array of unknown meaning", model("x.mystery", NewArray[int32](1, 2, 3, 4, 5, 6)), Range{0, 3}, "x.mystery may be per layer"},
		{"array per layer of another length", model("x.attention.head_count", NewArray[int32](1, 2)), Range{0, 3}, "has 2 elements for 6 layers"},
		{"architecture", openModel(t, writeModel(t, "m.gguf", metaOf("general.architecture", NewValue("afmoe"), "afmoe.block_count", NewValue(uint32(6))))), Range{0, 3}, "a model of afmoe cannot be cut"},
		{"rows per token in a middle stage", plain, Range{2, 4}, "per_layer_token_embd.weight has a row per token"},
		{"more prediction layers than layers", model("x.nextn_predict_layers", NewValue(uint32(6))), Range{0, 3}, "nextn_predict_layers is 6"},
	}
	for _, tt := range tests {
		im, err := tt.m.StageImage(t.Context(), tt.window)
		if im != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error = %v, want %q", tt.name, err, tt.want)
		}
	}
}
