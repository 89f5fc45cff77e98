package gguf

import (
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
)

// holey is a file of which all before an offset is held.
type holey struct {
	data []byte
	held int64
}

func (h *holey) Holds(off, n int64) bool { return off+n <= h.held }

func (h *holey) ReadAt(p []byte, off int64) (int, error) {
	n, err := bytes.NewReader(h.data[:h.held]).ReadAt(p, off)
	if err == io.EOF && h.held < int64(len(h.data)) {
		err = ErrNotHeld
	}
	return n, err
}

// knownFiles returns a model's files with their sums, all of them held.
func knownFiles(t *testing.T, m *Model) (files []KnownFile, stores []*holey) {
	t.Helper()
	sums, err := m.Manifest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range m.Parts() {
		data := readFile(t, p.Path)
		stores = append(stores, &holey{data, int64(len(data))})
		files = append(files, KnownFile{p.Path, sums[i], stores[i]})
	}
	return files, stores
}

func TestOpenKnown(t *testing.T) {
	for _, path := range []string{splitModel(t), writeModel(t, "moe.gguf", moeMeta(), moeTensors(t)...)} {
		m := openModel(t, path)
		files, stores := knownFiles(t, m)
		all := Slice{Range{1, moeLayers}, Range{0, moeExperts}}
		k, err := OpenKnown(files)
		if err != nil {
			t.Fatal(err)
		}
		id, err := m.ID(t.Context())
		if got, err2 := k.ID(t.Context()); err != nil || err2 != nil || got != id || k.Kind() != Full {
			t.Errorf("opened as %v %v, want %v", k.Kind(), got, id)
		}
		want, err := m.PlanSlice(all)
		if err != nil {
			t.Fatal(err)
		}

		last := len(files) - 1
		stores[last].held = m.Parts()[last].DataOffset
		if k, err = OpenKnown(files); err != nil {
			t.Fatal(err)
		}
		if got, err := k.ID(t.Context()); err != nil || got != id || k.Kind() != Partial {
			t.Errorf("opened as %v %v, %v; want a partial %v", k.Kind(), got, err, id)
		}
		if _, err := k.SliceTensors(all); !errors.Is(err, ErrNotHeld) {
			t.Errorf("SliceTensors = %v, want ErrNotHeld", err)
		}
		plan, err := k.PlanSlice(all)
		if err != nil || len(plan) != len(want) {
			t.Fatalf("%d ranges are planned, want %d, %v", len(plan), len(want), err)
		}
		for i := range plan {
			if plan[i].Name != want[i].Name || plan[i].Part != want[i].Part || plan[i].Offset != want[i].Offset || plan[i].Bytes != want[i].Bytes {
				t.Errorf("planned %+v, want %+v", plan[i], want[i])
			}
		}
		tensor := m.Parts()[last].Tensors[0]
		if _, err := k.Section(tensor.Name); !errors.Is(err, ErrNotHeld) {
			t.Errorf("Section = %v, want ErrNotHeld", err)
		}
		stores[last].held = tensor.Offset + tensor.Bytes // what arrives later counts
		if _, err := k.Section(tensor.Name); err != nil {
			t.Errorf("Section of what has arrived: %v", err)
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		stores[last].held = 100
		if _, err := OpenKnown(files); !errors.Is(err, ErrNotHeld) {
			t.Errorf("without a header: %v, want ErrNotHeld", err)
		}
	}
}

func TestOpenKnownRefuses(t *testing.T) {
	m := openModel(t, splitModel(t))
	files, _ := knownFiles(t, m)
	im, err := m.SliceImage(t.Context(), Slice{Range{1, 2}, Range{0, 2}})
	if err != nil {
		t.Fatal(err)
	}
	mini := imageBytes(t, im)
	miniFile := KnownFile{"mini", FileSum{"mini.gguf", int64(len(mini)), Hash{}}, &holey{mini, int64(len(mini))}}
	for _, tt := range []struct {
		name  string
		files []KnownFile
		want  string
	}{
		{"nothing", nil, "no file"},
		{"a part", files[:1], "has 4 files"},
		{"wrong order", []KnownFile{files[0], files[2], files[1], files[3]}, "split.no"},
		{"twice", []KnownFile{files[0], files[1], files[1], files[3]}, "is in"},
		{"slice", []KnownFile{miniFile}, "only whole models"},
	} {
		if _, err := OpenKnown(tt.files); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	path := filepath.Join(t.TempDir(), "slice.gguf")
	if err := im.WriteFile(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if _, err := openModel(t, path).PlanSlice(Slice{Range{1, 2}, Range{0, 2}}); err == nil {
		t.Error("what to fetch was planned with a slice")
	}
}
