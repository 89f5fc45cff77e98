package gguf

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"kvasird/ggml/tensor"
)

// headerOf is a model of some layers that has only metadata and a token embedding.
func headerOf(t *testing.T, arch string, layers, vocab int, pairs ...any) *Model {
	t.Helper()
	meta := metaOf("general.architecture", NewValue(arch), arch+".block_count", NewValue(uint32(layers)))
	for i := 0; i < len(pairs); i += 2 {
		meta.set(arch+"."+pairs[i].(string), pairs[i+1].(Value))
	}
	return openModel(t, writeModel(t, "m.gguf", meta, randomTensor(t, "token_embd.weight", tensor.F16, 8, int64(vocab))))
}

func TestCuts(t *testing.T) {
	bools := func(s string) Value {
		v := make([]bool, len(s))
		for i := range s {
			v[i] = s[i] == '1'
		}
		return NewArray(v...)
	}
	tests := []struct {
		name string
		m    *Model
		want []int
	}{
		{"anywhere", headerOf(t, "llama", 4, 3), []int{1, 2, 3}},
		{"by default", headerOf(t, "qwen35moe", 12, 3), []int{4, 8}},
		{"as the file says", headerOf(t, "qwen35moe", 12, 3, "full_attention_interval", NewValue(uint32(3))), []int{3, 6, 9}},
		{"a last period that is not whole", headerOf(t, "gemma3", 26, 3), []int{6, 12, 18}},
		{"prediction layers", headerOf(t, "qwen35moe", 49, 3, "nextn_predict_layers", NewValue(uint32(1))), []int{4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44}},
		{"by list", headerOf(t, "mimo2", 12, 3, "attention.sliding_window_pattern", bools("011101110111")), []int{2, 5}},
		{"one kind only", headerOf(t, "mimo2", 4, 3, "attention.sliding_window_pattern", bools("1111")), []int{1, 2, 3}},
		{"several periods", headerOf(t, "llama4", 24, 3, "interleave_moe_layer_step", NewValue(uint32(3))), []int{12}},
		{"dense alone", headerOf(t, "minimax-m3", 6, 3, "leading_dense_block_count", NewValue(uint32(3))), []int{4, 5}},
		{"one layer", headerOf(t, "llama", 1, 3), nil},
	}
	for _, tt := range tests {
		if got, err := tt.m.Cuts(); err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%s: cuts at %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
}

// No window of DeepSeek V3 may have as many layers as the lite models.
func TestCutsAvoidCounts(t *testing.T) {
	for _, layers := range []int{47, 58, 60, 61} {
		cuts, err := headerOf(t, "deepseek2", layers, 3).Cuts()
		if err != nil || len(cuts) < 3 {
			t.Fatalf("%d layers: cuts at %v, %v", layers, cuts, err)
		}
		bounds := append(append([]int{0}, cuts...), layers)
		for i, from := range bounds {
			for _, to := range bounds[i+1:] {
				if n := to - from; n == 26 || n == 27 {
					t.Errorf("%d layers: the window %d:%d has %d", layers, from, to, n)
				}
			}
		}
	}
}

func TestCutsRefuse(t *testing.T) {
	tests := []struct {
		name string
		m    *Model
		want string
	}{
		{"unknown", headerOf(t, "afmoe", 4, 3), "not among those that were proved"},
		{"lite", headerOf(t, "deepseek2", 27, 3), "lite models"},
		{"lite by its tokens", headerOf(t, "deepseek2", 48, 128256), "lite models"},
		{"gemma3 of 62 layers", headerOf(t, "gemma3", 62, 3), "variant of 62 layers"},
		{"exaone4 of 64 layers", headerOf(t, "exaone4", 64, 3), "variant of 64 layers"},
		{"glm4 without sections", headerOf(t, "glm4", 4, 3), "takes rows only"},
		{"deepstack", headerOf(t, "granite", 4, 3, "deepstack_mapping", NewArray[int32](0, 1, 2, 3)), "pictures"},
	}
	for _, tt := range tests {
		cuts, err := tt.m.Cuts()
		if !errors.Is(err, ErrCut) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.m.Arch()) {
			t.Errorf("%s: %v, %v, want %q", tt.name, cuts, err, tt.want)
		}
		if _, err := tt.m.RowStage(t.Context(), Range{0, 2}); !errors.Is(err, ErrCut) {
			t.Errorf("%s: a stage: %v", tt.name, err)
		}
	}
}

// What is read of an image anywhere is what is written of it.
func TestImageReadAt(t *testing.T) {
	m := openModel(t, splitModel(t))
	rng := rand.New(rand.NewPCG(1, 2))
	holes := false
	for _, window := range []Range{{0, 2}, {2, 4}, {4, 5}} {
		im, err := m.RowStage(t.Context(), window)
		if err != nil {
			t.Fatal(err)
		}
		want := imageBytes(t, im)
		for range 1000 {
			off := rng.IntN(len(want))
			got := make([]byte, rng.IntN(3000))
			n, err := im.ReadAt(got, int64(off))
			end := min(off+len(got), len(want))
			if n != end-off || !bytes.Equal(got[:n], want[off:end]) || (err == io.EOF) != (n < len(got)) || err != nil && err != io.EOF {
				t.Fatalf("%v: ReadAt %d bytes at %d = %d, %v", window, len(got), off, n, err)
			}
			hole := im.Hole(int64(off))
			holes = holes || hole > 0
			if slices.ContainsFunc(want[off:off+int(hole)], func(b byte) bool { return b != 0 }) {
				t.Fatalf("%v: the hole of %d bytes at %d is not empty", window, hole, off)
			}
		}
		if n, err := im.ReadAt(make([]byte, 1), im.Size()); n != 0 || err != io.EOF {
			t.Errorf("%v: read past the end: %d, %v", window, n, err)
		}
		if _, err := im.ReadAt(make([]byte, 1), -1); err == nil {
			t.Errorf("%v: read before the start", window)
		}
		if bare := im.WithoutExperts(); bare.dataSize() >= im.dataSize() || bare.Size() != im.Size() {
			t.Errorf("%v: %d bytes with experts, %d without", window, im.dataSize(), bare.dataSize())
		}
	}
	if !holes {
		t.Error("no hole was met")
	}
}

// The rows of tokens are those of the embedding, and only the first stage has them.
func TestTokenRow(t *testing.T) {
	m := openModel(t, splitModel(t))
	first, err := m.RowStage(t.Context(), Range{0, 2})
	if err != nil {
		t.Fatal(err)
	}
	embd := sectionBytes(t, m, "token_embd.weight")
	var row []byte
	for tok := range first.Tokens() {
		if row, err = first.TokenRow(row, tok); err != nil || !bytes.Equal(row, embd[tok*256:(tok+1)*256]) {
			t.Fatalf("row of token %d: %v", tok, err)
		}
	}
	if typ, width, scale := first.TokenType(); typ != tensor.F16 || width != 128 || scale != 1 || first.Tokens() != moeVocab {
		t.Errorf("%d rows of %d %v, scale %v", first.Tokens(), width, typ, scale)
	}
	later, err := m.RowStage(t.Context(), Range{2, 4})
	if err != nil {
		t.Fatal(err)
	}
	for im, tok := range map[*Image]int{first: moeVocab, later: 0} {
		if _, err := im.TokenRow(nil, tok); err == nil {
			t.Errorf("%v: a row of token %d of %d", im.Window(), tok, im.Tokens())
		}
	}
}
