package gguf

import (
	"context"
	"strings"
)

// sliceKeys are the architecture's hyper-parameters that an expert slice carries, by
// what follows "<arch>."; one that ends in * is a prefix. They describe experts and
// the rows that go in and out of them.
var sliceKeys = []string{
	"block_count", "embedding_length", "feed_forward_length", "leading_dense_block_count",
	"expert_*", "experts_per_group", "moe_*", "interleave_moe_layer_step", "swiglu_clamp_*", "activation.*",
}

// SliceImage returns the expert-slice mini-GGUF: the slabs of a slice, nothing else.
// Tensor names are unchanged; the expert dimension is that of the slice. Metadata
// are the architecture, its sliceKeys, and the kvasir keys that say whose experts
// these are. The router and the shared expert stay out.
//
// For a full model this computes the model id if that is not known yet, which reads
// all of its bytes.
func (m *Model) SliceImage(ctx context.Context, s Slice) (*Image, error) {
	list, err := m.SliceTensors(s)
	if err != nil {
		return nil, err
	}
	id, err := m.ID(ctx)
	if err != nil {
		return nil, err
	}
	var meta Metadata
	meta.set("general.architecture", NewValue(m.arch))
	for _, kv := range m.Meta().list {
		if field, ok := strings.CutPrefix(kv.Key, m.arch+"."); ok && describesExperts(field) {
			meta.set(kv.Key, kv.Value)
		}
	}
	meta.set(keyVersion, NewValue(uint32(formatVersion)))
	meta.set(keyModelID, NewValue(id.String()))
	meta.set(keySliceLayers, NewValue(s.Layers.String()))
	meta.set(keySliceExperts, NewValue(s.Experts.String()))
	out := make([]outTensor, len(list))
	for i, t := range list {
		out[i] = outTensor{t.Name, t.DType, t.Shape, t.file, t.Offset}
	}
	return newImage(meta, m.parts[0].Alignment, out)
}

func describesExperts(field string) bool {
	for _, key := range sliceKeys {
		prefix, isPrefix := strings.CutSuffix(key, "*")
		if field == key || isPrefix && strings.HasPrefix(field, prefix) {
			return true
		}
	}
	return false
}
