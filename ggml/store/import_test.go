package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// ggufFile makes a file of metadata, given as it is encoded, and tensors. Where data
// is nil only the header is made.
type ggufFile struct {
	keys    int
	meta    []byte
	tensors []gguf.Tensor
	data    [][]byte
}

func (g *ggufFile) key(name string, valueType uint32, value any) {
	g.keys++
	g.meta = append(text(g.meta, name), binary.LittleEndian.AppendUint32(nil, valueType)...)
	if s, ok := value.(string); ok {
		g.meta = text(g.meta, s)
		return
	}
	g.meta, _ = binary.Append(g.meta, binary.LittleEndian, value)
}

// text appends a string as the format has it.
func text(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// encode returns the header and its data; size is that of the whole file.
func (g *ggufFile) encode() (b []byte, size int64) {
	pad := func(n int64) int64 { return (n + 31) / 32 * 32 }
	b = binary.LittleEndian.AppendUint32([]byte("GGUF"), 3)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(g.tensors)))
	b = binary.LittleEndian.AppendUint64(b, uint64(g.keys))
	b = append(b, g.meta...)
	off := int64(0)
	for _, t := range g.tensors {
		b = binary.LittleEndian.AppendUint32(text(b, t.Name), uint32(t.Shape.Dims()))
		for _, d := range t.Shape[:t.Shape.Dims()] {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, uint32(t.DType))
		b = binary.LittleEndian.AppendUint64(b, uint64(off))
		off += pad(t.Bytes)
	}
	if len(g.tensors) > 0 {
		b = append(b, make([]byte, pad(int64(len(b)))-int64(len(b)))...)
	}
	size = int64(len(b)) + off
	for _, data := range g.data {
		b = append(append(b, data...), make([]byte, pad(int64(len(data)))-int64(len(data)))...)
	}
	return b, size
}

// Types of tensors, by their numbers in the format.
var (
	f32 = gguf.Tensor{DType: 0}
	q80 = gguf.Tensor{DType: 8}
	q4k = gguf.Tensor{DType: 12}
	q6k = gguf.Tensor{DType: 14}
)

// ggufTensor returns a tensor of the type of another one.
func ggufTensor(t testing.TB, name string, like gguf.Tensor, dims ...int64) gguf.Tensor {
	t.Helper()
	like.Name, like.Shape = name, [4]int64{1, 1, 1, 1}
	copy(like.Shape[:], dims)
	var err error
	if like.Bytes, err = like.DType.Bytes(like.Shape); err != nil {
		t.Fatal(err)
	}
	return like
}

// splitTiny cuts the shipped model into three files, the first with metadata alone,
// and returns them.
func splitTiny(t testing.TB) [][]byte {
	t.Helper()
	whole, err := os.ReadFile(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	h, err := gguf.Parse(bytes.NewReader(whole), int64(len(whole)))
	if err != nil {
		t.Fatal(err)
	}
	index := bytes.Index(whole, text(nil, h.Tensors[0].Name)) // where the tensors are listed
	half := len(h.Tensors) / 2
	var files [][]byte
	for i, tensors := range [][]gguf.Tensor{nil, h.Tensors[:half], h.Tensors[half:]} {
		g := &ggufFile{tensors: tensors}
		if i == 0 {
			g.keys, g.meta = h.Meta.Len(), bytes.Clone(whole[24:index])
		} else {
			g.key("general.architecture", 8, "qwen3moe")
		}
		g.key("split.no", 2, uint16(i))
		g.key("split.count", 2, uint16(3))
		g.key("split.tensors.count", 5, int32(len(h.Tensors)))
		for _, t := range tensors {
			g.data = append(g.data, whole[t.Offset:t.Offset+t.Bytes])
		}
		b, _ := g.encode()
		files = append(files, b)
	}
	return files
}

// writeFiles puts a model into a folder, and returns the paths.
func writeFiles(t testing.TB, dir string, files ...[]byte) (paths []string) {
	t.Helper()
	for i, b := range files {
		path := filepath.Join(dir, dataName(i, len(files)))
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	return paths
}

// watch is a progress function that checks what it is told.
type watch struct {
	t     *testing.T
	calls int
	last  int64
}

func (w *watch) progress(done, total int64) {
	if w.calls++; done <= w.last || done > total {
		w.t.Errorf("progress %d of %d after %d", done, total, w.last)
	}
	w.last = done
}

// mustImport imports, and fails unless it read as many bytes as said.
func mustImport(t *testing.T, s *Store, read int64, paths ...string) *Model {
	t.Helper()
	w := &watch{t: t}
	m, err := s.Import(t.Context(), paths, w.progress)
	if err != nil {
		t.Fatal(err)
	}
	if w.last != read {
		t.Errorf("the import read %d bytes, want %d", w.last, read)
	}
	if err := m.Err(); err != nil || !m.Complete() {
		t.Errorf("imported: complete %v, %v", m.Complete(), err)
	}
	return m
}

func TestImport(t *testing.T) {
	whole, err := os.ReadFile(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		files [][]byte
	}{{"one file", [][]byte{whole}}, {"split, first part without tensors", splitTiny(t)}} {
		for _, way := range []string{keptClone, keptLink, ""} {
			t.Run(tt.name+" "+way, func(t *testing.T) { importFiles(t, way, tt.files) })
		}
	}
}

func importFiles(t *testing.T, way string, files [][]byte) {
	fx, dir := newFixture(files...), t.TempDir()
	paths := writeFiles(t, t.TempDir(), files...)
	total := int64(0)
	for _, b := range files {
		total += int64(len(b))
	}
	s := keeping(t, way, dir, 1<<20) // which a copy would exceed
	m := mustImport(t, s, total, paths[len(paths)-1])
	if m.ID() != fx.id {
		t.Fatalf("imported as %v, want %v", m.ID(), fx.id)
	}
	fx.checkHeld(t, m)
	for i := range fx.trees {
		if tree, err := os.ReadFile(filepath.Join(m.dir, treeName(i))); err != nil || !bytes.Equal(tree, fx.trees[i]) {
			t.Errorf("file %d: the tree is not that of the Bao library: %v", i, err)
		}
	}
	checkKept(t, m, way, paths)
	if again := mustImport(t, s, 0, paths...); again != m {
		t.Error("a second import made another model")
	}
	checkLimit(t, s)
	s.Close()

	s = keeping(t, way, dir, 1<<20)
	m = s.Model(fx.id)
	if err := m.Err(); err != nil || !m.Complete() {
		t.Fatalf("after a restart: complete %v, %v", m.Complete(), err)
	}
	moved := t.TempDir()
	for i := range paths {
		to := filepath.Join(moved, filepath.Base(paths[i]))
		if err := os.Rename(paths[i], to); err != nil {
			t.Fatal(err)
		}
		paths[i] = to
	}
	mustImport(t, s, 0, paths[0]) // the same files under other names
	checkKept(t, m, way, paths)
	if err := s.Verify(t.Context(), fx.id, (&watch{t: t}).progress); err != nil {
		t.Error(err)
	}
	if err := m.Drop(0, []Span{{0, Group}}); err == nil {
		t.Error("a part of an imported file was dropped")
	}
	if err := s.Remove(fx.id); err != nil {
		t.Fatal(err)
	}
	for i, path := range paths {
		if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, files[i]) {
			t.Errorf("Remove touched %s: %v", path, err)
		}
	}
}

// TestImportChanges has imported files that are not kept vanish or change, while the store is open and
// while it is not.
func TestImportChanges(t *testing.T) {
	fx := tinyFixture(t)
	for _, tt := range []struct {
		name   string
		change func(path string) error
		noted  bool // while it is open
		back   func(path string) error
		hashed bool // when it comes back
	}{
		{"vanished", func(p string) error { return os.Rename(p, p+"x") }, false, func(p string) error { return os.Rename(p+"x", p) }, false},
		{"time", func(p string) error { return os.Chtimes(p, time.Time{}, time.Unix(1e9, 0)) }, true, func(string) error { return nil }, true},
		{"longer", func(p string) error { return os.Truncate(p, fx.sums[0].Size+1) }, true, func(p string) error { return os.Truncate(p, fx.sums[0].Size) }, true},
		{"shorter", func(p string) error { return os.Truncate(p, 1000) }, true, func(p string) error { return os.WriteFile(p, fx.data[0], 0o644) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			path := writeFiles(t, t.TempDir(), fx.data[0])[0]
			s := keeping(t, "", dir, 0)
			m := mustImport(t, s, fx.sums[0].Size, path)
			if err := tt.change(path); err != nil {
				t.Fatal(err)
			}
			if tt.noted {
				_, err := m.ReadAt(0, make([]byte, 10), 100)
				if !errors.Is(err, gguf.ErrNotHeld) || !strings.Contains(err.Error(), path) || m.Err() == nil || heldBytes(m) != 0 {
					t.Errorf("read of a changed file: %v; Err %v, %d bytes held", err, m.Err(), heldBytes(m))
				}
			}
			s.Close()
			s = keeping(t, "", dir, 0)
			m = s.Model(fx.id)
			if err := m.Err(); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "import it again") {
				t.Errorf("Err = %v, want words about %s", err, path)
			}
			if heldBytes(m) != 0 || len(m.Held(0)) != 0 || m.Complete() {
				t.Error("bytes of a file that is not there are held")
			}
			if _, err := m.GGUF(t.Context()); !errors.Is(err, gguf.ErrNotHeld) {
				t.Errorf("GGUF = %v, want ErrNotHeld", err)
			}
			if _, _, err := m.HeaderNeeds(0); err == nil {
				t.Error("the header of a file that is gone can be fetched")
			}
			if err := fx.write(m, 0, Span{0, Group}); err == nil {
				t.Error("a group was written to a file of somebody else")
			}
			if err := s.Verify(t.Context(), fx.id, nil); err == nil {
				t.Error("Verify found nothing")
			}
			if err := tt.back(path); err != nil {
				t.Fatal(err)
			}
			read := int64(0)
			if tt.hashed {
				read = fx.sums[0].Size
			}
			if back := mustImport(t, s, read, path); back != m {
				t.Error("it came back as another model")
			}
			fx.checkHeld(t, m)
			s.Close()
			if err := openStore(t, dir, 0).Model(fx.id).Err(); err != nil {
				t.Errorf("after a restart: %v", err)
			}
		})
	}
}

func TestImportOfPartialModel(t *testing.T) {
	fx, dir := newFixture(splitTiny(t)...), t.TempDir()
	paths := writeFiles(t, t.TempDir(), fx.data...)
	s := openStore(t, dir, 0)
	m := fx.create(t, s)
	fx.mustWrite(t, m, 1, Span{0, 4 * Group})
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := s.Pin(fx.id, true); err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	for _, sum := range fx.sums {
		total += sum.Size
	}
	if again := mustImport(t, s, total, paths...); again != m || !m.Pinned() {
		t.Error("the import replaced the model or its pin")
	}
	fx.checkHeld(t, m)
	if left, _ := filepath.Glob(filepath.Join(m.dir, "model*.gguf")); len(left) > 0 {
		t.Errorf("the own copy is still there: %v", left)
	}
	fx.mustWrite(t, m, 1, Span{0, Group}) // nothing to do: it is held
	if err := m.Drop(1, []Span{{0, Group}}); err == nil {
		t.Error("a part of an imported file was dropped")
	}
	used, _ := s.Used()
	s.Close()
	s = openStore(t, dir, 0)
	if now, _ := s.Used(); now > used || !s.Model(fx.id).Complete() {
		t.Errorf("after a restart %d bytes are counted, %d were", now, used)
	}
	fx.checkHeld(t, s.Model(fx.id))
}

func TestImportRefuses(t *testing.T) {
	dir := t.TempDir()
	path := writeFiles(t, dir, tinyFixture(t).data[0])[0]
	full, err := gguf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	image := func(im *gguf.Image, err error) string {
		t.Helper()
		name := filepath.Join(dir, fmt.Sprint(im.Size(), ".gguf"))
		if err == nil {
			err = im.WriteFile(t.Context(), name)
		}
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	backbone := filepath.Join(dir, "backbone.gguf")
	if err := gguf.WriteBackbone(t.Context(), backbone, full); err != nil {
		t.Fatal(err)
	}
	split := writeFiles(t, t.TempDir(), splitTiny(t)...)
	if err := os.Remove(split[1]); err != nil {
		t.Fatal(err)
	}
	garbage := filepath.Join(dir, "garbage")
	if err := os.WriteFile(garbage, []byte("not a model"), 0o644); err != nil {
		t.Fatal(err)
	}
	slice := gguf.Slice{Layers: gguf.Range{Begin: 1, End: 2}, Experts: gguf.Range{End: 4}}
	s := openStore(t, t.TempDir(), 0)
	for _, tt := range []struct {
		name, want string
		paths      []string
	}{
		{"nothing", "no file", nil},
		{"slice", "expert slice", []string{image(full.SliceImage(t.Context(), slice))}},
		{"stage", "stage", []string{image(full.StageImage(t.Context(), gguf.Range{End: 2}))}},
		{"backbone", "backbone", []string{backbone}},
		{"missing part", "part 2 of 3 is missing", []string{split[0]}},
		{"parts left out", "has 3 files", []string{split[0], split[2]}},
		{"not a model", "magic", []string{garbage}},
		{"folder", "not a regular file", []string{dir}},
		{"no file", "no such file", []string{filepath.Join(dir, "none")}},
	} {
		if _, err := s.Import(t.Context(), tt.paths, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := s.Import(ctx, []string{path}, func(done, total int64) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled import: %v", err)
	}
	changes := 0
	_, err = s.Import(t.Context(), []string{path}, func(done, total int64) {
		if changes++; changes == 1 {
			os.Chtimes(path, time.Time{}, time.Unix(1e9, 0))
		}
	})
	if err == nil || !strings.Contains(err.Error(), "was changed while it was read") {
		t.Errorf("a file that changed meanwhile: %v", err)
	}
	if len(s.Models()) != 0 {
		t.Error("something was imported")
	}
	var limit *LimitError
	if _, err := openStore(t, t.TempDir(), 2*diskBlock).Import(t.Context(), []string{path}, nil); !errors.As(err, &limit) {
		t.Errorf("a tree above the limit: %v", err)
	}
}
