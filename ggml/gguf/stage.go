package gguf

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"kvasird/ggml/tensor"
)

// layerKeys are the metadata arrays with one element per layer, by what follows
// "<arch>."; a stage takes the elements of its window.
var layerKeys = []string{
	"attention.compress_ratios", "attention.head_count", "attention.head_count_kv",
	"attention.indexer.types", "attention.recurrent_layers", "attention.rope_pattern",
	"attention.sliding_window_pattern", "deepstack_mapping", "expert_feed_forward_length",
	"expert_used_count", "feed_forward_length", "swiglu_clamp_exp", "swiglu_clamp_shexp",
}

// globalKeys are arrays that are not per layer, whatever their length.
var globalKeys = []string{"rope.dimension_sections", "classifier.output_labels"}

// patternKeys are scalars n with which an architecture treats every n-th layer
// differently: a window that does not begin at a multiple would shift the pattern.
var patternKeys = []string{
	"full_attention_interval", "attention.sliding_window_pattern", "moe_every_n_layers", "interleave_moe_layer_step",
}

// wrongArchs are the architectures that llama.cpp v0.5.0 computes differently, or does
// not load, when they are cut so: measured on generated models of eight layers, two
// stages, largest difference of the logits above 0. The causes are what depends on
// the number or the index of a layer or on the rows being embeddings. The architectures
// that are not listed are not thereby proven.
var wrongArchs = []string{
	"afmoe", "bloom", "cohere2", "command-r", "gemma", "gemma2", "gpt2", "hy_v4", "kimi-k3", "minicpm", "minicpm3",
	"minimax-01", "mpt", "muse-glimmer", "openelm", "qwen4exp", "smallthinker", "starcoder",
}

// stage is a window of a model's layers.
type stage struct {
	m     *Model
	win   Range // in the numbering of the model; the last one includes nextn layers
	main  int   // layers without those for multi-token prediction
	vocab int64 // rows of the token embedding
}

func (s *stage) first() bool { return s.win.Begin == 0 }
func (s *stage) last() bool  { return s.win.End == s.m.layers }

// StageImage returns the mini-GGUF of one stage of a ring: the layers of a window,
// numbered from 0, which llama.cpp loads as a model of its own.
//
// block_count and arrays per layer are those of the window;
// leading_dense_block_count is lowered by its first layer; embedding_scale is 1 but
// in the first stage, whose rows alone are embeddings. The first stage has the token
// embedding, the last the output head. llama.cpp insists on both, so each has a
// stand-in where it is not used: one row in a middle stage, which gets tokenizer
// "none" and vocab_size 1; in the first and the last, whose vocabulary fixes the
// shape, zeros of the smallest type, a hole when written to a file. Layers for
// multi-token prediction go with the last stage, and only with it.
//
// What is known to be cut wrongly is refused. That the rest computes exactly what the
// model computes is for the caller to prove, per architecture and window.
func (m *Model) StageImage(ctx context.Context, window Range) (*Image, error) {
	s, err := m.newStage(window)
	if err != nil {
		return nil, err
	}
	out, err := s.tensors()
	if err != nil {
		return nil, err
	}
	meta, err := s.meta()
	if err != nil {
		return nil, err
	}
	id, err := m.ID(ctx)
	if err != nil {
		return nil, err
	}
	meta.set(keyVersion, NewValue(uint32(formatVersion)))
	meta.set(keyModelID, NewValue(id.String()))
	meta.set(keyStageLayers, NewValue(window.String()))
	meta.set(keyStageTotal, NewValue(uint32(m.layers)))
	return newImage(meta, m.parts[0].Alignment, out)
}

func (m *Model) newStage(window Range) (*stage, error) {
	if m.kind != Full && m.kind != Partial {
		return nil, fmt.Errorf("gguf: %s is a %v: a stage is made from a full model", m.parts[0].Path, m.kind)
	}
	if !window.within(m.layers) || window.Len() == m.layers {
		return nil, fmt.Errorf("gguf: stage %v: the model has %d layers, a stage is a part of them", window, m.layers)
	}
	if slices.Contains(wrongArchs, m.arch) {
		return nil, fmt.Errorf("gguf: stage %v: llama.cpp does not compute a part of %s as it computes the whole", window, m.arch)
	}
	nextn, err := m.Meta().count(m.arch+".nextn_predict_layers", 0, m.layers-1)
	if err != nil {
		return nil, err
	}
	embd, ok := m.Tensor("token_embd.weight")
	if !ok {
		return nil, fmt.Errorf("gguf: stage %v: the model has no token_embd.weight", window)
	}
	s := &stage{m: m, win: window, main: m.layers - nextn, vocab: embd.Shape[1]}
	if window.Begin >= s.main || window.End > s.main && !s.last() {
		return nil, fmt.Errorf("gguf: stage %v: the layers %d:%d are for multi-token prediction, they go with the last stage", window, s.main, m.layers)
	}
	for _, field := range patternKeys {
		n, err := m.Meta().Int(m.arch + "." + field)
		if err == nil && n > 1 && int64(window.Begin)%n != 0 {
			return nil, fmt.Errorf("gguf: stage %v: must begin at a multiple of %d (%s.%s)", window, n, m.arch, field)
		}
	}
	return s, nil
}

// meta returns the metadata of the model adapted to the window.
func (s *stage) meta() (Metadata, error) {
	var meta Metadata
	middle := !s.first() && !s.last()
	for _, kv := range s.m.Meta().list {
		field, ofArch := strings.CutPrefix(kv.Key, s.m.arch+".")
		isTokenizer := strings.HasPrefix(kv.Key, "tokenizer.")
		switch {
		case strings.HasPrefix(kv.Key, "split."), middle && isTokenizer:
			continue
		case !isTokenizer && kv.Value.Type() == Array:
			// Some arrays per layer, such as xielu.beta, have no architecture before them.
			v, err := s.cutArray(kv, field, ofArch)
			if err != nil {
				return meta, err
			}
			meta.set(kv.Key, v)
		default:
			meta.set(kv.Key, kv.Value)
		}
	}
	lead, err := meta.count(s.m.arch+".leading_dense_block_count", 0, s.m.layers)
	if err != nil {
		return meta, err
	}
	arch := s.m.arch + "."
	meta.set(arch+"block_count", NewValue(uint32(s.win.Len())))
	if lead > 0 {
		meta.set(arch+"leading_dense_block_count", NewValue(uint32(max(lead-s.win.Begin, 0))))
	}
	if s.main < s.m.layers && !s.last() {
		meta.set(arch+"nextn_predict_layers", NewValue(uint32(0)))
	}
	if !s.first() {
		meta.set(arch+"embedding_scale", NewValue(float32(1)))
	}
	if middle {
		meta.set("tokenizer.ggml.model", NewValue("none"))
		meta.set(arch+"vocab_size", NewValue(uint32(1)))
	}
	return meta, nil
}

// cutArray returns the window of an array per layer, and any other array unchanged.
func (s *stage) cutArray(kv KV, field string, ofArch bool) (Value, error) {
	n := kv.Value.Len()
	perLayer := ofArch && slices.Contains(layerKeys, field) || strings.HasPrefix(kv.Key, "xielu.")
	switch {
	case perLayer && (n == s.m.layers || n == s.main):
		return kv.Value.cut(s.win.Begin, min(s.win.End, n)), nil
	case perLayer:
		return Value{}, fmt.Errorf("gguf: stage %v: %s has %d elements for %d layers", s.win, kv.Key, n, s.m.layers)
	case ofArch && !slices.Contains(globalKeys, field) && (n == s.m.layers || n == s.main):
		return Value{}, fmt.Errorf("gguf: stage %v: %s may be per layer or not: this architecture cannot be cut yet", s.win, kv.Key)
	}
	return kv.Value, nil
}

// tensors lists what the stage holds, in the order of the model.
func (s *stage) tensors() ([]outTensor, error) {
	var out []outTensor
	for _, t := range s.m.tensors {
		layer, rest, isBlock := blockName(t.Name)
		o := outTensor{t.Name, t.DType, t.Shape, s.m.parts[t.Part].file, t.Offset}
		switch {
		case isBlock && !s.win.Contains(layer):
			continue
		case isBlock:
			o.name = fmt.Sprintf("blk.%d.%s", layer-s.win.Begin, rest)
		case t.Name == "token_embd.weight":
			_, hasHead := s.m.Tensor("output.weight")
			// Without a head of its own, the model's head is the embedding.
			o = s.vocabTensor(o, 1, s.first() || s.last() && !hasHead)
		case t.Name == "output.weight":
			o = s.vocabTensor(o, 1, s.last())
		case t.Name == "output.bias":
			o = s.vocabTensor(o, 0, true)
		}
		if middle := !s.first() && !s.last(); middle && s.vocab > 1 && slices.Contains(o.shape[1:], s.vocab) {
			return nil, fmt.Errorf("gguf: stage %v: %s has a row per token, which a middle stage cannot hold", s.win, t.Name)
		}
		out = append(out, o)
	}
	return out, nil
}

// vocabTensor returns a tensor whose dimension dim is the vocabulary as this stage
// has it: whole when keep is set, else a stand-in.
func (s *stage) vocabTensor(t outTensor, dim int, keep bool) outTensor {
	switch {
	case !s.first() && !s.last():
		t.shape[dim] = 1 // the first row, whose bytes come first
	case !keep:
		t.src, t.off = nil, 0
		t.dtype = smallestType(t.shape[0])
	}
	return t
}

// smallestType returns the smallest type whose blocks fit rows of n elements.
func smallestType(n int64) tensor.DType {
	for _, t := range []tensor.DType{tensor.Q1_0, tensor.Q2_0, tensor.Q4_0} {
		if n%t.BlockSize() == 0 {
			return t
		}
	}
	return tensor.F16
}
