package gguf

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// rejoin writes the slices of every range, and returns what their tensors of one
// name are together.
func rejoin(t *testing.T, m *Model, layers Range, cuts []int) map[string][]byte {
	t.Helper()
	id, err := m.ID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	joined := make(map[string][]byte)
	for i := range len(cuts) - 1 {
		want := Slice{layers, Range{cuts[i], cuts[i+1]}}
		im, err := m.SliceImage(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		path := writeImage(t, im)
		if !bytes.Equal(readFile(t, path), imageBytes(t, im)) {
			t.Fatalf("slice %v: WriteFile and WriteTo differ", want)
		}
		s := openModel(t, path)
		gotID, err := s.ID(t.Context())
		if err != nil || gotID != id || s.Kind() != ExpertSlice || s.Slice() != want || s.Arch() != m.Arch() {
			t.Fatalf("slice %v: id %v, %v; %v %v of %s", want, gotID, err, s.Kind(), s.Slice(), s.Arch())
		}
		list, err := s.SliceTensors(want)
		if err != nil {
			t.Fatal(err)
		}
		if len(list) != len(s.Tensors()) {
			t.Fatalf("slice %v: %d expert tensors of %d", want, len(list), len(s.Tensors()))
		}
		for _, x := range list {
			joined[x.Name] = append(joined[x.Name], slabBytes(t, x)...)
		}
	}
	return joined
}

func TestSlicesRejoin(t *testing.T) {
	for _, tt := range []struct {
		name   string
		path   string
		layers Range
		cuts   []int
	}{
		{"shipped model", tinyPath, Range{1, 3}, []int{0, 16, 32}},
		{"uneven", tinyPath, Range{0, 1}, []int{0, 1, 2, 9, 31, 32}},
		{"split set with biases and scales", splitModel(t), Range{0, moeLayers}, []int{0, 5, 12}},
	} {
		m := openModel(t, tt.path)
		joined := rejoin(t, m, tt.layers, tt.cuts)
		count := 0
		for _, x := range m.Tensors() {
			name, ok := parseExpertName(x.Name)
			if !ok || !tt.layers.Contains(name.layer) {
				continue
			}
			count++
			r, err := m.Section(x.Name)
			if err != nil {
				t.Fatal(err)
			}
			want := make([]byte, x.Bytes)
			if _, err := r.ReadAt(want, 0); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(joined[x.Name], want) {
				t.Errorf("%s: %s differs after slicing and joining", tt.name, x.Name)
			}
		}
		if count == 0 || count != len(joined) {
			t.Errorf("%s: %d tensors in the model, %d in the slices", tt.name, count, len(joined))
		}
	}
}

func TestSliceOfSlice(t *testing.T) {
	m := openModel(t, tinyPath)
	im, err := m.SliceImage(t.Context(), Slice{Range{0, 3}, Range{8, 24}})
	if err != nil {
		t.Fatal(err)
	}
	s := openModel(t, writeImage(t, im))
	inner := Slice{Range{1, 2}, Range{10, 12}}
	got, err := s.SliceImage(t.Context(), inner)
	if err != nil {
		t.Fatal(err)
	}
	want, err := m.SliceImage(t.Context(), inner)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(imageBytes(t, got), imageBytes(t, want)) {
		t.Error("a slice of a slice differs from the same slice of the model")
	}
}

func TestSliceMetadata(t *testing.T) {
	m := openModel(t, splitModel(t))
	im, err := m.SliceImage(t.Context(), Slice{Range{1, 2}, Range{0, 4}})
	if err != nil {
		t.Fatal(err)
	}
	s := openModel(t, writeImage(t, im))
	var keys []string
	for i := range s.Meta().Len() {
		keys = append(keys, s.Meta().At(i).Key)
	}
	want := []string{"general.architecture", "deepseek2.block_count", "deepseek2.expert_count", "deepseek2.expert_used_count",
		"deepseek2.leading_dense_block_count", "deepseek2.embedding_length",
		"kvasir.version", "kvasir.model_id", "kvasir.slice.layers", "kvasir.slice.experts"}
	if !slices.Equal(keys, want) {
		t.Errorf("keys = %q, want %q", keys, want)
	}
	if _, ok := s.Tensor("blk.1.ffn_down_exps.scale"); !ok {
		t.Error("the slice has no scales")
	}
	for _, x := range s.Tensors() {
		if _, ok := parseExpertName(x.Name); !ok {
			t.Errorf("%s is in the slice", x.Name)
		}
	}
}

func TestExpertTensorsRefuses(t *testing.T) {
	m := openModel(t, splitModel(t))
	im, err := m.SliceImage(t.Context(), Slice{Range{1, 3}, Range{4, 8}})
	if err != nil {
		t.Fatal(err)
	}
	s := openModel(t, writeImage(t, im))
	tests := []struct {
		name    string
		m       *Model
		layer   int
		experts Range
		is      error
	}{
		{"negative layer", m, -1, Range{0, 1}, nil},
		{"layer past the end", m, moeLayers, Range{0, 1}, nil},
		{"empty range", m, 1, Range{3, 3}, nil},
		{"backward range", m, 1, Range{3, 1}, nil},
		{"experts past the end", m, 1, Range{0, moeExperts + 1}, nil},
		{"overflow", m, 1, Range{1, math.MaxInt}, nil},
		{"negative experts", m, 1, Range{-1, 2}, nil},
		{"dense layer", m, 0, Range{0, 1}, ErrNoExperts},
		{"another layer of a slice", s, 3, Range{4, 5}, ErrNotHeld},
		{"before the slice", s, 1, Range{3, 5}, ErrNotHeld},
		{"after the slice", s, 1, Range{7, 9}, ErrNotHeld},
	}
	for _, tt := range tests {
		list, err := tt.m.ExpertTensors(tt.layer, tt.experts)
		if err == nil || list != nil || tt.is != nil && !errors.Is(err, tt.is) {
			t.Errorf("%s: error = %v, want %v", tt.name, err, tt.is)
		}
	}
	for _, bad := range []Slice{{}, {Range{0, 1}, Range{0, 1}}, {Range{0, 9}, Range{0, 1}}, {Range{1, 2}, Range{0, 13}}} {
		if _, err := m.SliceImage(t.Context(), bad); err == nil {
			t.Errorf("SliceImage(%v) succeeded", bad)
		}
	}
	if _, err := s.SliceImage(t.Context(), Slice{Range{2, 4}, Range{4, 8}}); !errors.Is(err, ErrNotHeld) {
		t.Errorf("slice beyond a slice: %v", err)
	}
	if _, err := s.Manifest(t.Context()); err == nil {
		t.Error("a slice has a manifest")
	}
	list, err := m.ExpertTensors(1, Range{0, 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := list[0].ReadInto(make([]byte, list[0].Bytes-1)); err == nil {
		t.Error("ReadInto of a short buffer succeeded")
	}
}

func TestMiniRefuses(t *testing.T) {
	id := strings.Repeat("ab", 32)
	base := func(pairs ...any) string {
		meta := metaOf("general.architecture", NewValue("x"), "x.block_count", NewValue(uint32(2)), "x.expert_count", NewValue(uint32(4)),
			keyVersion, NewValue(uint32(1)), keyModelID, NewValue(id), keySliceLayers, NewValue("0:1"), keySliceExperts, NewValue("0:2"))
		for i := 0; i < len(pairs); i += 2 {
			meta.set(pairs[i].(string), pairs[i+1].(Value))
		}
		return writeModel(t, "mini.gguf", meta)
	}
	openModel(t, base()) // nothing wrong with it
	for want, path := range map[string]string{
		"kvasir.version 2":                 base(keyVersion, NewValue(uint32(2))),
		"is not a hash":                    base(keyModelID, NewValue("abc")),
		"kvasir.model_id is u8":            base(keyModelID, NewValue(uint8(1))),
		"is not a range":                   base(keySliceLayers, NewValue("1:0")),
		"kvasir.slice.layers is 0:3":       base(keySliceLayers, NewValue("0:3")),
		"kvasir.slice.experts is 0:5":      base(keySliceExperts, NewValue("0:5")),
		"outside of the slice's layers":    writeModel(t, "m.gguf", openModel(t, base()).Meta(), randomTensor(t, "blk.1.ffn_up_exps.bias", 0, 4, 2)),
		"dimension 1 is 4, want 2 experts": writeModel(t, "m.gguf", openModel(t, base()).Meta(), randomTensor(t, "blk.0.ffn_up_exps.bias", 0, 4, 4)),
	} {
		if _, err := OpenModel(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v, want %q", err, want)
		}
	}
}

func TestWriteFileErrors(t *testing.T) {
	m := openModel(t, tinyPath)
	im, err := m.SliceImage(t.Context(), Slice{Range{0, 1}, Range{0, 4}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "slice.gguf")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := im.WriteFile(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled WriteFile = %v", err)
	}
	m.Close()
	if err := im.WriteFile(t.Context(), path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("WriteFile from a closed model = %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("failed writes left %v", left)
	}
	if err := im.WriteFile(t.Context(), filepath.Join(dir, "absent", "x")); err == nil {
		t.Error("WriteFile into no folder succeeded")
	}
}

// /dev/full answers every write as a full disk does.
func TestDiskFull(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full on this system: ", err)
	}
	defer full.Close()
	m := openModel(t, tinyPath)
	im, err := m.SliceImage(t.Context(), Slice{Range{0, 1}, Range{0, 4}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "slice.gguf")
	err = replaceFile(path, im.dataSize(), func(*os.File) (int64, error) { return im.writeSparse(t.Context(), full) })
	var disk *DiskFullError
	if !errors.As(err, &disk) || disk.Path != path || disk.Missing != im.Size() || !strings.Contains(err.Error(), path) {
		t.Errorf("error = %v, want a DiskFullError for %s with %d bytes", err, path, im.Size())
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a part of the file is there")
	}
}
