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
	"attention.sliding_window_pattern", "expert_feed_forward_length",
	"expert_used_count", "feed_forward_length", "swiglu_clamp_exp", "swiglu_clamp_shexp",
}

// globalKeys are arrays that are not per layer, whatever their length.
var globalKeys = []string{"rope.dimension_sections", "classifier.output_labels"}

// stage is a window of a model's layers.
type stage struct {
	m     *Model
	win   Range // in the numbering of the model
	main  int   // layers without those for multi-token prediction
	vocab int64 // rows of the token embedding
	rows  bool  // takes rows, also when it is the first
	rule  cutRule
}

func (s *stage) first() bool { return s.win.Begin == 0 }
func (s *stage) last() bool  { return s.win.End == s.m.layers }

// blocks returns the layers that the stage holds: none for multi-token prediction.
func (s *stage) blocks() Range { return Range{s.win.Begin, min(s.win.End, s.main)} }

// bare reports whether the stage needs no vocabulary.
func (s *stage) bare() bool { return !s.last() && (s.rows || !s.first()) }

// StageImage returns the mini-GGUF of one stage of a ring: the layers of a window,
// numbered from 0, which llama.cpp loads as a model of its own.
//
// block_count and arrays per layer are those of the window;
// leading_dense_block_count is lowered by its first layer; embedding_scale is 1 but
// in the first stage, whose rows alone are embeddings. The first stage has the token
// embedding, the last the output head. llama.cpp insists on both, so each has a
// stand-in where it is not used: zeros of the smallest type, a hole when written to a
// file, of one row in a middle stage, which gets tokenizer "none" and vocab_size 1; in
// the first and the last the vocabulary fixes the shape. The window of the last stage
// includes layers for multi-token prediction, the stage does not.
//
// A window that is not between two of Cuts is refused.
func (m *Model) StageImage(ctx context.Context, window Range) (*Image, error) {
	return m.stageImage(ctx, window, cutOptions{})
}

// RowStage is StageImage for a stage that runs here: the first stage is like a middle
// one and takes rows too, those that Image.TokenRow reads. So it holds neither a
// vocabulary nor the logits of one, and its token embedding takes no memory.
func (m *Model) RowStage(ctx context.Context, window Range) (*Image, error) {
	return m.stageImage(ctx, window, cutOptions{rows: true})
}

// UnprovenStage is RowStage without regard to Cuts. What llama.cpp makes of it may be
// wrong, or end the process: it is for the tests that prove the table of Cuts.
func (m *Model) UnprovenStage(ctx context.Context, window Range) (*Image, error) {
	return m.stageImage(ctx, window, cutOptions{rows: true, unproven: true})
}

type cutOptions struct{ rows, unproven bool }

func (m *Model) stageImage(ctx context.Context, window Range, opt cutOptions) (*Image, error) {
	s, err := m.newStage(window, opt)
	if err != nil {
		return nil, err
	}
	out, _, err := s.tensors()
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
	im, err := newImage(meta, m.parts[0].Alignment, out)
	if err != nil {
		return nil, err
	}
	im.window = window
	if s.rows && s.first() {
		im.tokens, err = s.tokenRows()
	}
	return im, err
}

func (m *Model) newStage(window Range, opt cutOptions) (*stage, error) {
	if m.kind != Full && m.kind != Partial {
		return nil, fmt.Errorf("gguf: %s is a %v: a stage is made from a full model", m.parts[0].Path, m.kind)
	}
	if !window.within(m.layers) || window.Len() == m.layers {
		return nil, fmt.Errorf("gguf: stage %v: the model has %d layers, a stage is a part of them", window, m.layers)
	}
	rule := cutRules[m.arch]
	if !opt.unproven {
		if err := m.checkCut(window); err != nil {
			return nil, fmt.Errorf("gguf: stage %v: %w", window, err)
		}
	}
	main, err := m.mainLayers()
	if err != nil {
		return nil, err
	}
	embd, ok := m.Tensor("token_embd.weight")
	if !ok {
		return nil, fmt.Errorf("gguf: stage %v: the model has no token_embd.weight", window)
	}
	return &stage{m: m, win: window, main: main, vocab: embd.Shape[1], rows: opt.rows, rule: rule}, nil
}

// meta returns the metadata of the model adapted to the window.
func (s *stage) meta() (Metadata, error) {
	var meta Metadata
	for _, kv := range s.m.Meta().list {
		field, ofArch := strings.CutPrefix(kv.Key, s.m.arch+".")
		isTokenizer := strings.HasPrefix(kv.Key, "tokenizer.")
		switch {
		case strings.HasPrefix(kv.Key, "split."), s.bare() && isTokenizer:
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
	meta.set(arch+"block_count", NewValue(uint32(s.blocks().Len())))
	if lead > 0 {
		meta.set(arch+"leading_dense_block_count", NewValue(uint32(max(lead-s.win.Begin, 0))))
	}
	if s.main < s.m.layers {
		meta.set(arch+"nextn_predict_layers", NewValue(uint32(0)))
	}
	if !s.first() {
		meta.set(arch+"embedding_scale", NewValue(float32(1)))
	}
	// Rows are text here: no other embeddings are added to them in the first layers.
	if key := arch + "n_deepstack_layers"; meta.has(key) {
		meta.set(key, NewValue(uint32(0)))
	}
	if s.rule.mend != nil {
		s.rule.mend(s.m, s.main, &meta)
	}
	if s.bare() {
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
		return kv.Value.cut(s.win.Begin, s.blocks().End), nil
	case perLayer:
		return Value{}, fmt.Errorf("gguf: stage %v: %s has %d elements for %d layers", s.win, kv.Key, n, s.m.layers)
	case ofArch && !slices.Contains(globalKeys, field) && (n == s.m.layers || n == s.main):
		return Value{}, fmt.Errorf("gguf: stage %v: %s may be per layer or not: this architecture cannot be cut yet", s.win, kv.Key)
	}
	return kv.Value, nil
}

// tensors lists what the stage holds, in the order of the model, and what of the model
// is read for it.
func (s *stage) tensors() (out []outTensor, reads []Located, err error) {
	for _, t := range s.m.tensors {
		layer, rest, isBlock := blockName(t.Name)
		o := outTensor{t.Name, t.DType, t.Shape, s.m.parts[t.Part].file, t.Offset}
		switch {
		case isBlock && !s.blocks().Contains(layer):
			continue
		case isBlock:
			o.name = fmt.Sprintf("blk.%d.%s", layer-s.win.Begin, rest)
		case t.Name == "token_embd.weight":
			_, hasHead := s.m.Tensor("output.weight")
			// Without a head of its own, the model's head is the embedding.
			o = s.vocabTensor(o, 1, s.first() && !s.rows || s.last() && !hasHead)
		case t.Name == "output.weight":
			o = s.vocabTensor(o, 1, s.last())
		case t.Name == "output.bias":
			o = s.vocabTensor(o, 0, true)
		}
		if s.bare() && s.vocab > 1 && !isBlock && slices.Contains(o.shape[1:], s.vocab) {
			return nil, nil, fmt.Errorf("gguf: stage %v: %s has a row per token, which a middle stage cannot hold", s.win, t.Name)
		}
		out = append(out, o)
		if o.src != nil {
			reads = append(reads, t)
		}
	}
	return out, reads, nil
}

// vocabTensor returns a tensor whose dimension dim is the vocabulary as this stage
// has it: whole when keep is set, else zeros, for one token when the stage is bare.
func (s *stage) vocabTensor(t outTensor, dim int, keep bool) outTensor {
	if s.bare() {
		t.shape[dim], keep = 1, false
	}
	if keep {
		return t
	}
	t.src, t.off = nil, 0
	if dim == 1 {
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

// WindowReads lists the tensors that a stage of a window reads, as StageImage and as
// RowStage makes it, with the experts or without.
func (m *Model) WindowReads(window Range, experts bool) ([]Located, error) {
	s, err := m.newStage(window, cutOptions{})
	if err != nil {
		return nil, err
	}
	_, reads, err := s.tensors()
	if !experts {
		reads = slices.DeleteFunc(reads, func(t Located) bool { return !InBackbone(t.Name) })
	}
	return reads, err
}
