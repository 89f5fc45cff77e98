package gguf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"lukechampine.com/blake3"

	"kvasird/ggml/tensor"
)

func TestOpenSplit(t *testing.T) {
	first := splitModel(t)
	dir := filepath.Dir(first)
	for i := range 4 { // any part finds the others
		m := openModel(t, filepath.Join(dir, "moe"+splitSuffix(i, 4)))
		if len(m.Parts()) != 4 || len(m.Tensors()) != len(moeTensors(t)) || m.Arch() != "deepseek2" || m.Layers() != moeLayers || m.Experts() != moeExperts {
			t.Fatalf("part %d: %d parts, %d tensors, %s", i, len(m.Parts()), len(m.Tensors()), m.Arch())
		}
		if got, want := m.ExpertLayers(), []int{1, 2, 3, 4}; !reflect.DeepEqual(got, want) {
			t.Errorf("ExpertLayers = %v, want %v", got, want)
		}
	}
	m := openModel(t, first)
	for _, want := range moeTensors(t) {
		r, err := m.Section(want.name)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(r)
		data := make([]byte, len(got))
		want.src.ReadAt(data, 0)
		if len(got) == 0 || !bytes.Equal(got, data) {
			t.Errorf("%s: other bytes", want.name)
		}
	}
	if _, err := m.Section("absent"); err == nil {
		t.Error("Section(absent) succeeded")
	}
}

func TestOpenRefuses(t *testing.T) {
	first := splitModel(t)
	part := func(i int) string { return strings.Replace(first, splitSuffix(0, 4), splitSuffix(i, 4), 1) }
	renamed := copyFile(t, part(1), "model.gguf")
	lonely := copyFile(t, first, "moe"+splitSuffix(0, 4))
	split := func(pairs ...any) string {
		meta := metaOf("general.architecture", NewValue("x"))
		for i := 0; i < len(pairs); i += 2 {
			meta.set(pairs[i].(string), pairs[i+1].(Value))
		}
		return writeModel(t, "m.gguf", meta)
	}
	experts := func(count uint32, extra ...any) Metadata {
		return metaOf(append([]any{"general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(2)), "x.expert_count", NewValue(count)}, extra...)...)
	}
	one := func(meta Metadata, name string, dtype tensor.DType, dims ...int64) []string {
		return []string{writeModel(t, "m.gguf", meta, randomTensor(t, name, dtype, dims...))}
	}
	tests := []struct {
		name  string
		paths []string // one: OpenModel
		want  string
	}{
		{"no such file", []string{first + ".absent"}, "no such file"},
		{"a folder", []string{filepath.Dir(first)}, "not a regular file"},
		{"not GGUF", []string{"model_test.go"}, "magic is"},
		{"no architecture", []string{writeModel(t, "m.gguf", Metadata{})}, "general.architecture"},
		{"renamed part", []string{renamed}, "its name must end in -00002-of-00004.gguf"},
		{"missing part", []string{lonely}, "part 2 of 4 is missing"},
		{"too few parts", []string{part(0), part(1)}, "the model has 4 files (split.count), 2 were given"},
		{"parts out of order", []string{part(0), part(2), part(1), part(3)}, "split.no 2 where 1 is wanted"},
		{"a part twice", []string{part(0), part(1), part(1), part(3)}, `tensor "token_embd.weight" is in`},
		{"huge split count", []string{split("split.count", NewValue(uint32(100000)))}, "split.count is 100000"},
		{"odd split count", []string{split("split.count", NewValue("two"))}, "want integer"},
		{"huge layer count", []string{split("x.block_count", NewValue(uint32(1<<31)))}, "x.block_count is 2147483648"},
		{"fewer experts", one(experts(8), "blk.0.ffn_up_exps.weight", tensor.F32, 4, 4, 7), "dimension 2 is 7, want 8 experts"},
		{"no expert count", one(experts(0), "blk.0.ffn_up_exps.weight", tensor.F32, 4, 4, 7), "no x.expert_count"},
		{"layer past the end", one(experts(7), "blk.2.ffn_up_exps.weight", tensor.F32, 4, 4, 7), "the model has 2 layers"},
		{"experts not outermost", one(experts(7), "blk.0.ffn_up_exps.bias", tensor.F32, 4, 7, 3), "must be the outermost"},
		{"quantised scale", one(experts(32), "blk.0.ffn_up_exps.scale", tensor.Q8_0, 32), "a scale per expert of type q8_0"},
		{"uneven groups", one(experts(7, "x.experts_per_group", NewValue(uint32(2))), "blk.0.ffn_up_chexps.weight", tensor.F32, 4, 4, 4), "7 experts in groups of 2"},
	}
	for _, tt := range tests {
		var m *Model
		var err error
		if len(tt.paths) == 1 {
			m, err = OpenModel(tt.paths[0])
		} else {
			m, err = Open(tt.paths...)
		}
		if m != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error = %v, want %q", tt.name, err, tt.want)
		}
	}
	if m, err := Open(); err == nil {
		t.Errorf("Open() of nothing = %v", m)
	}
}

// copyFile copies a file into a new folder.
func copyFile(t testing.TB, src, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, readFile(t, src), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A file shaped like a 122B model: 48 layers of 256 experts, 75 GB, all of it holes.
func TestLargeModel(t *testing.T) {
	const layers, experts = 48, 256
	meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(layers)), "x.expert_count", NewValue(uint32(experts)))
	var tensors []outTensor
	for l := range layers {
		for _, name := range []string{"gate", "up", "down"} {
			tensors = append(tensors, outTensor{name: fmt.Sprintf("blk.%d.ffn_%s_exps.weight", l, name), dtype: tensor.Q5_K, shape: tensor.Shape{3072, 1024, experts, 1}})
		}
	}
	path := writeModel(t, "large.gguf", meta, tensors...)
	m := openModel(t, path)
	size := m.Parts()[0].Size
	if disk := diskBytes(t, path); size < 75e9 || disk > 1<<20 {
		t.Errorf("%d bytes, %d on disk", size, disk)
	}
	list, err := m.ExpertTensors(layers-1, Range{experts - 1, experts})
	if err != nil {
		t.Fatal(err)
	}
	last := list[len(list)-1]
	if got := last.Offset + last.Bytes; got != size || last.Bytes != 3072*1024/256*176 {
		t.Errorf("the last slab is %d bytes and ends at %d of %d", last.Bytes, got, size)
	}
	slabBytes(t, last)
}

func TestModelWithoutExperts(t *testing.T) {
	meta := metaOf("general.architecture", NewValue("llama"), "llama.block_count", NewValue(uint32(2)))
	m := openModel(t, writeModel(t, "dense.gguf", meta, randomTensor(t, "blk.0.ffn_up.weight", tensor.F32, 4, 4)))
	if m.Experts() != 0 || m.ExpertLayers() != nil {
		t.Errorf("%d experts in layers %v", m.Experts(), m.ExpertLayers())
	}
	if _, err := m.SliceImage(t.Context(), Slice{Range{0, 1}, Range{0, 1}}); err == nil {
		t.Error("SliceImage succeeded")
	}
	if err := WriteBackbone(t.Context(), filepath.Join(t.TempDir(), "b.gguf"), m); !errors.Is(err, ErrNoExperts) {
		t.Errorf("WriteBackbone = %v, want ErrNoExperts", err)
	}
}

func TestModelID(t *testing.T) {
	first := splitModel(t)
	m := openModel(t, first)
	got, err := m.ID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The manifest is written out by hand here: its bytes must never change.
	manifest := "kvasir model 1\n"
	for _, p := range m.Parts() {
		data := readFile(t, p.Path)
		root := blake3.Sum256(data)
		manifest += Hash(root).String() + " " + strings.TrimSpace(NewValue(int64(len(data))).String()) + "\n"
	}
	if want := ModelID(blake3.Sum256([]byte(manifest))); got != want {
		t.Errorf("ID = %v, want %v", got, want)
	}
	if back, err := ParseModelID(got.String()); err != nil || back != got {
		t.Errorf("ParseModelID(String) = %v, %v", back, err)
	}
	for _, s := range []string{"", "00", strings.ToUpper(got.String()), got.String() + "00", strings.Repeat("g", 64)} {
		if _, err := ParseModelID(s); err == nil {
			t.Errorf("ParseModelID(%q) succeeded", s)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := openModel(t, first).ID(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("ID with a cancelled context = %v", err)
	}
}

func TestManifestIDLiteral(t *testing.T) {
	got := ManifestID([]FileSum{{Name: "any", Size: 3, Root: blake3.Sum256([]byte("abc"))}})
	want := blake3.Sum256([]byte("kvasir model 1\n6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85 3\n"))
	if got != ModelID(want) {
		t.Errorf("ManifestID = %v, want %v", got, ModelID(want))
	}
}

func TestRange(t *testing.T) {
	for s, want := range map[string]Range{"0:1": {0, 1}, "3:65536": {3, 65536}} {
		if got, err := ParseRange(s); err != nil || got != want || got.String() != s {
			t.Errorf("ParseRange(%q) = %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", ":", "1", "1:1", "2:1", "-1:2", "+1:2", "01:2", "0:65537", "0:1:2", " 0:1", "0:99999999999999999999"} {
		if got, err := ParseRange(s); err == nil {
			t.Errorf("ParseRange(%q) = %v", s, got)
		}
	}
	if got, err := ParseSlice("0:2/4:8"); err != nil || got != (Slice{Range{0, 2}, Range{4, 8}}) || got.String() != "0:2/4:8" {
		t.Errorf("ParseSlice = %v, %v", got, err)
	}
	for _, s := range []string{"", "0:2", "0:2/", "/0:2", "0:2/1:2/3:4"} {
		if _, err := ParseSlice(s); err == nil {
			t.Errorf("ParseSlice(%q) succeeded", s)
		}
	}
	if got := (Range{2, 5}).Intersect(Range{4, 9}); got != (Range{4, 5}) {
		t.Errorf("Intersect = %v", got)
	}
	if got := (Range{2, 4}).Intersect(Range{4, 9}); got.Len() != 0 {
		t.Errorf("Intersect = %v", got)
	}
	if !(Range{2, 5}).Covers(Range{3, 5}) || (Range{2, 5}).Covers(Range{1, 3}) || (Range{2, 5}).Contains(5) {
		t.Error("Covers or Contains is wrong")
	}
}

func TestExpertNames(t *testing.T) {
	for name, want := range map[string]expertName{
		"blk.0.ffn_up_exps.weight":            {0, false, "weight"},
		"blk.61.ffn_gate_up_exps.bias":        {61, false, "bias"},
		"blk.7.ffn_down_chexps.weight":        {7, true, "weight"},
		"blk.7.ffn_gate_exps.input_scale":     {7, false, "input_scale"},
		"blk.7.ffn_down_exps.scale":           {7, false, "scale"},
		"blk.7.ffn_norm_exps.weight":          {},
		"blk.7.ffn_up_shexp.weight":           {},
		"blk.7.ffn_up.weight":                 {},
		"blk.7.ffn_up_exps":                   {},
		"blk.7.ffn_up_exps.weight.2":          {},
		"blk.07.ffn_up_exps.weight":           {},
		"blk.-1.ffn_up_exps.weight":           {},
		"blk.99999999999.ffn_up_exps.weight":  {},
		"xblk.0.ffn_up_exps.weight":           {},
		"blk.0.ffn_gate_inp.weight":           {},
		"blk.0.exp_probs_b.bias":              {},
		"blk.0.ffn_gate.3.weight":             {},
		"blk.0.ffn_up_exps.lora_a":            {},
		"blk.0.ffn_gate_gate_up_exps.weight":  {},
		"blk.0.ffn_gate_up_exps.weight.extra": {},
	} {
		got, ok := parseExpertName(name)
		if ok != (want != expertName{}) || ok && got != want {
			t.Errorf("parseExpertName(%q) = %v, %v, want %v", name, got, ok, want)
		}
	}
}

// grovemoe's chunk experts are shared by the experts of a group.
func TestChunkExperts(t *testing.T) {
	meta := metaOf("general.architecture", NewValue("grovemoe"), "grovemoe.block_count", NewValue(uint32(1)),
		"grovemoe.expert_count", NewValue(uint32(12)), "grovemoe.experts_per_group", NewValue(uint32(3)))
	m := openModel(t, writeModel(t, "grove.gguf", meta,
		randomTensor(t, "blk.0.ffn_up_exps.weight", tensor.F32, 4, 2, 12),
		randomTensor(t, "blk.0.ffn_up_chexps.weight", tensor.F32, 4, 2, 4)))
	for _, tt := range []struct{ experts, rows Range }{
		{Range{0, 12}, Range{0, 4}}, {Range{0, 3}, Range{0, 1}}, {Range{2, 4}, Range{0, 2}}, {Range{5, 6}, Range{1, 2}}, {Range{8, 12}, Range{2, 4}},
	} {
		list, err := m.ExpertTensors(0, tt.experts)
		if err != nil {
			t.Fatal(err)
		}
		if got := list[1].Rows; got != tt.rows || list[1].Shape[2] != int64(tt.rows.Len()) || list[1].Bytes != 32*int64(tt.rows.Len()) {
			t.Errorf("experts %v use chunk rows %v, want %v", tt.experts, got, tt.rows)
		}
	}
	im, err := m.SliceImage(t.Context(), Slice{Range{0, 1}, Range{4, 8}})
	if err != nil {
		t.Fatal(err)
	}
	s := openModel(t, writeImage(t, im))
	list, err := s.ExpertTensors(0, Range{6, 8})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := m.ExpertTensors(0, Range{6, 8})
	for i := range list {
		if !bytes.Equal(slabBytes(t, list[i]), slabBytes(t, want[i])) {
			t.Errorf("%s: other bytes", list[i].Name)
		}
	}
}

func writeImage(t testing.TB, im *Image) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.gguf")
	if err := im.WriteFile(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	return path
}

func slabBytes(t testing.TB, x ExpertTensor) []byte {
	t.Helper()
	b := make([]byte, x.Bytes)
	if err := x.ReadInto(b); err != nil {
		t.Fatal(err)
	}
	return b
}
