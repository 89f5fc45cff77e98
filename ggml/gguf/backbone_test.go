package gguf

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"kvasird/ggml/tensor"
)

// checkBackbone compares a backbone with the model that it was made of.
func checkBackbone(t *testing.T, m, b *Model) {
	t.Helper()
	want, err := m.ID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.ID(t.Context()); err != nil || got != want || b.Kind() != Backbone {
		t.Errorf("id %v, %v, want %v; %v", got, err, want, b.Kind())
	}
	for i, p := range m.Parts() {
		orig, sparse := readFile(t, p.Path), readFile(t, b.Parts()[i].Path)
		if len(orig) != len(sparse) {
			t.Fatalf("part %d: %d bytes, want %d", i, len(sparse), len(orig))
		}
		for _, x := range p.Tensors {
			if e, ok := parseExpertName(x.Name); ok && e.isHoled() {
				if bytes.ContainsFunc(sparse[x.Offset:][:x.Bytes], func(r rune) bool { return r != 0 }) {
					t.Errorf("%s is not a hole", x.Name)
				}
				copy(sparse[x.Offset:], orig[x.Offset:][:x.Bytes])
			}
		}
		if !bytes.Equal(orig, sparse) {
			t.Errorf("part %d differs outside of the holes", i)
		}
	}
	for _, layer := range m.ExpertLayers() {
		if _, err := b.ExpertTensors(layer, Range{1, 2}); !errors.Is(err, ErrNotHeld) {
			t.Errorf("ExpertTensors of a hole = %v, want ErrNotHeld", err)
		}
	}
}

func TestBackbone(t *testing.T) {
	m := openModel(t, tinyPath)
	dst := filepath.Join(t.TempDir(), "backbone.gguf")
	if err := WriteBackbone(t.Context(), dst, m); err != nil {
		t.Fatal(err)
	}
	b := openModel(t, dst)
	checkBackbone(t, m, b)
	if len(b.Holes()) != 1 || b.Holes()[0] != (Slice{Range{0, 4}, Range{0, 32}}) {
		t.Errorf("Holes = %v", b.Holes())
	}
	if _, err := b.Section("blk.0.ffn_up_exps.weight"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("Section of a hole = %v, want ErrNotHeld", err)
	}
	if _, err := b.Section("blk.0.ffn_gate_inp.weight"); err != nil {
		t.Error(err)
	}
	if err := WriteBackbone(t.Context(), dst+"2", b); err == nil {
		t.Error("a backbone of a backbone was written")
	}
	if _, err := b.StageImage(t.Context(), Range{0, 2}); err == nil {
		t.Error("a stage of a backbone was made")
	}
	var experts int64
	for _, x := range m.Tensors() {
		if e, ok := parseExpertName(x.Name); ok && e.isHoled() {
			experts += x.Bytes
		}
	}
	size := m.Parts()[0].Size
	got := diskBytes(t, dst)
	t.Logf("%d bytes, %d of them experts, %d on disk", size, experts, got)
	if limit := size - experts + experts/20; got > limit {
		t.Errorf("the backbone takes %d bytes on disk, want at most %d", got, limit)
	}
}

func TestBackboneOfSplitSet(t *testing.T) {
	m := openModel(t, splitModel(t))
	dir := t.TempDir()
	if err := WriteBackbone(t.Context(), filepath.Join(dir, "b.gguf"), m); err == nil || !strings.Contains(err.Error(), "-00001-of-00004.gguf") {
		t.Errorf("WriteBackbone with the name of a single file = %v", err)
	}
	dst := filepath.Join(dir, "b"+splitSuffix(0, 4))
	if err := WriteBackbone(t.Context(), dst, m); err != nil {
		t.Fatal(err)
	}
	b := openModel(t, dst)
	checkBackbone(t, m, b)
	// Scales stay, biases do not.
	if _, err := b.Section("blk.1.ffn_down_exps.scale"); err != nil {
		t.Error(err)
	}
	if _, err := b.Section("blk.1.ffn_gate_up_exps.bias"); !errors.Is(err, ErrNotHeld) {
		t.Errorf("Section of a bias = %v, want ErrNotHeld", err)
	}
}

// The image of a backbone is one file, also of a split set, with nothing of the experts.
func TestBackboneImage(t *testing.T) {
	for _, path := range []string{tinyPath, splitModel(t)} {
		checkBackboneImage(t, openModel(t, path))
	}
}

func checkBackboneImage(t *testing.T, m *Model) {
	t.Helper()
	im, err := m.BackboneImage()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "image.gguf")
	if err := im.WriteFile(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	b := openModel(t, path)
	if len(b.Tensors()) != len(m.Tensors()) {
		t.Fatalf("%d tensors, want %d", len(b.Tensors()), len(m.Tensors()))
	}
	for _, kv := range m.Meta().list {
		if got, has := b.Meta().Get(kv.Key); has == strings.HasPrefix(kv.Key, "split.") || has && !reflect.DeepEqual(got, kv.Value) {
			t.Errorf("%s: %v, it is there: %v", kv.Key, got, has)
		}
	}
	for i, want := range m.Tensors() {
		got := b.Tensors()[i]
		if got.Name != want.Name || got.Shape != want.Shape {
			t.Errorf("tensor %s %v, want %s %v", got.Name, got.Shape, want.Name, want.Shape)
		}
		if !InBackbone(want.Name) {
			if want.Shape[0]%128 == 0 && strings.HasSuffix(want.Name, ".weight") && got.DType != tensor.Q1_0 || im.Hole(got.Offset) != got.Bytes {
				t.Errorf("%s is of type %v, with %d of %d bytes of hole", want.Name, got.DType, im.Hole(got.Offset), got.Bytes)
			}
			continue
		}
		a, _ := io.ReadAll(sectionOf(t, m, want.Name))
		c, _ := io.ReadAll(sectionOf(t, b, want.Name))
		if got.DType != want.DType || len(a) == 0 || !bytes.Equal(a, c) {
			t.Errorf("%s differs", want.Name)
		}
	}
}

func sectionOf(t *testing.T, m *Model, name string) io.Reader {
	t.Helper()
	r, err := m.Section(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBackboneOntoItself(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.gguf")
	orig := readFile(t, tinyPath)
	if err := os.WriteFile(path, orig, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WriteBackbone(t.Context(), path, openModel(t, path)); err == nil {
		t.Error("the model was overwritten by its own backbone")
	}
	if !bytes.Equal(readFile(t, path), orig) {
		t.Error("the model changed")
	}
}

func TestSidecarRefuses(t *testing.T) {
	dst := filepath.Join(t.TempDir(), "backbone.gguf")
	if err := WriteBackbone(t.Context(), dst, openModel(t, tinyPath)); err != nil {
		t.Fatal(err)
	}
	good := string(readFile(t, dst+sidecarSuffix))
	var side sidecar
	if err := json.Unmarshal([]byte(good), &side); err != nil {
		t.Fatal(err)
	}
	replace := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("the sidecar has no %s", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	for _, tt := range []struct{ name, text, want string }{
		{"not JSON", "GGUF", "invalid character"},
		{"unknown field", replace(`"version"`, `"extra": 1, "version"`), "unknown field"},
		{"version", replace(`"version": 1`, `"version": 2`), "version 2"},
		{"trailing bytes", good + "{}", "bytes after the object"},
		{"too large", good + strings.Repeat(" ", maxSidecarBytes), "more than"},
		{"model id", replace(side.Model.String(), strings.Repeat("0", 64)), "its files give"},
		{"root", replace(side.Files[0].Root.String(), strings.Repeat("0", 64)), "its files give"},
		{"malformed root", replace(side.Files[0].Root.String(), "0"), "is not a hash"},
		{"header", replace(side.Files[0].Header.String(), strings.Repeat("0", 64)), "another size or header"},
		{"hole layers", replace(`"layers": "0:4"`, `"layers": "0:5"`), "the model has 4 layers"},
		{"hole experts", replace(`"experts": "0:32"`, `"experts": "0:33"`), "32 experts"},
		{"malformed hole", replace(`"layers": "0:4"`, `"layers": "4"`), "is not a range"},
		{"no files", `{"version": 1, "files": [], "holes": []}`, "0 files, the model has 1"},
	} {
		if err := os.WriteFile(dst+sidecarSuffix, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := OpenModel(dst)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), sidecarSuffix) {
			t.Errorf("%s: error = %v, want %q", tt.name, err, tt.want)
		}
	}
}

func FuzzSidecar(f *testing.F) {
	dst := filepath.Join(f.TempDir(), "backbone.gguf")
	m := openModel(f, tinyPath)
	if err := WriteBackbone(f.Context(), dst, m); err != nil {
		f.Fatal(err)
	}
	f.Add(readFile(f, dst+sidecarSuffix))
	f.Fuzz(func(t *testing.T, text []byte) {
		side, err := parseSidecar(text)
		if err != nil {
			return
		}
		if m.checkSidecar(side) == nil {
			for _, hole := range side.Holes {
				if !hole.Layers.within(4) || !hole.Experts.within(32) {
					t.Fatalf("hole %v was accepted", hole)
				}
			}
		}
	})
}
