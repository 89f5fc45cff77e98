package gguf

import (
	"slices"
	"testing"

	"kvasird/ggml/tensor"
)

func TestWorkParts(t *testing.T) {
	m := openModel(t, splitModel(t))
	got, err := m.WorkParts()
	if err != nil {
		t.Fatal(err)
	}
	const (
		dense = 128 + 128*moeExperts + 96*128  // norm, router, shared expert
		used  = 3 * (128*96 + 96 + 96*128 + 1) // gate_up with bias, down with scale
		head  = 128 + 128*moeVocab             // norm and output
	)
	want := []WorkPart{{128, 1}, {128 + 128*64, 1}, {0, 1}}
	for range moeLayers - 1 {
		want = append(want, WorkPart{dense, 1}, WorkPart{used, 3})
	}
	if want = append(want, WorkPart{head, 1}); !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if DensePart(0) != 1 || ExpertPart(moeLayers-1) != len(got)-2 || HeadPart(moeLayers) != len(got)-1 {
		t.Error("places of parts")
	}
}

// TestWorkPartsTied: a head that is the embedding weighs all of it, layers for
// multi-token prediction weigh nothing, and the experts used may differ by layer.
func TestWorkPartsTied(t *testing.T) {
	meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(3)), "x.nextn_predict_layers", NewValue(uint32(1)),
		"x.expert_count", NewValue(uint32(4)), "x.expert_used_count", NewArray[uint32](1, 2, 2))
	m := openModel(t, writeModel(t, "tied.gguf", meta,
		randomTensor(t, "token_embd.weight", tensor.F32, 8, 10),
		randomTensor(t, "output_norm.weight", tensor.F32, 8),
		randomTensor(t, "rope_freqs.weight", tensor.F32, 5),
		randomTensor(t, "blk.0.ffn_up_exps.weight", tensor.F32, 8, 2, 4),
		randomTensor(t, "blk.1.ffn_up_exps.weight", tensor.F32, 8, 2, 4),
		randomTensor(t, "blk.2.ffn_up_exps.weight", tensor.F32, 8, 2, 4),
	))
	got, err := m.WorkParts()
	want := []WorkPart{{8 + 5, 1}, {0, 1}, {16, 1}, {0, 1}, {32, 2}, {0, 1}, {0, 1}, {88, 1}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v\nwant %v", got, err, want)
	}
}

func TestWorkPartsRefuses(t *testing.T) {
	m := openModel(t, splitModel(t))
	if _, err := openStage(t, m, Range{0, 2}).WorkParts(); err == nil {
		t.Error("the parts of a window were taken for those of the model")
	}
}

func TestWorkPartsTiny(t *testing.T) {
	parts, err := openModel(t, tinyPath).WorkParts()
	if err != nil {
		t.Fatal(err)
	}
	var active uint64
	for i, p := range parts {
		active += p.Params
		if i > 0 && i < len(parts)-1 && i%2 == 0 && p.PerToken != 4 {
			t.Errorf("part %d: %d experts per token, want 4", i, p.PerToken)
		}
	}
	if len(parts) != 10 || active < 4e6 || active > 10e6 {
		t.Errorf("%d parts, %d active parameters: %v", len(parts), active, parts)
	}
}
