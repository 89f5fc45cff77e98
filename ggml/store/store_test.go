package store

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"lukechampine.com/blake3"
	"lukechampine.com/blake3/bao"
)

// tinyPath is the model that ships: real data.
const tinyPath = "../tiny/kvasir-tiny-q4_k_m.gguf"

// randomData returns bytes that depend on the seed alone.
func randomData(seed byte, n int64) []byte {
	data := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(data)
	return data
}

// fixture is a model, its bytes and its trees as the Bao library makes them.
type fixture struct {
	id    gguf.ModelID
	sums  []gguf.FileSum
	data  [][]byte
	trees [][]byte
}

func newFixture(files ...[]byte) *fixture {
	fx := &fixture{data: files}
	for i, data := range files {
		tree, root := bao.EncodeBuf(data, 8, true)
		fx.trees = append(fx.trees, tree)
		fx.sums = append(fx.sums, gguf.FileSum{Name: dataName(i, len(files)), Size: int64(len(data)), Root: root})
	}
	fx.id = gguf.ManifestID(fx.sums)
	return fx
}

func tinyFixture(t testing.TB) *fixture {
	t.Helper()
	data, err := os.ReadFile(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	return newFixture(data)
}

func openStore(t testing.TB, dir string, limit int64) *Store {
	t.Helper()
	s, err := Open(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// create adds the model with its trees, and nothing else.
func (fx *fixture) create(t testing.TB, s *Store) *Model {
	t.Helper()
	m, err := s.Create(fx.id, fx.sums)
	if err != nil {
		t.Fatal(err)
	}
	for i, tree := range fx.trees {
		if err := m.SetTree(i, tree); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// write gives the model the groups of a span.
func (fx *fixture) write(m *Model, file int, s Span) error {
	return m.WriteGroups(file, s.Off, fx.data[file][s.Off:s.end()])
}

func (fx *fixture) mustWrite(t testing.TB, m *Model, file int, s Span) {
	t.Helper()
	if err := fx.write(m, file, s); err != nil {
		t.Fatal(err)
	}
}

// whole returns the span of a file.
func (fx *fixture) whole(file int) Span { return Span{0, int64(len(fx.data[file]))} }

// checkHeld fails unless everything held is right.
func (fx *fixture) checkHeld(t testing.TB, m *Model) {
	t.Helper()
	for i, data := range fx.data {
		for _, s := range m.Held(i) {
			got := make([]byte, s.Len)
			if n, err := m.ReadAt(i, got, s.Off); int64(n) != s.Len || err != nil && err != io.EOF {
				t.Fatalf("ReadAt of held %v = %d, %v", s, n, err)
			}
			if !bytes.Equal(got, data[s.Off:s.end()]) {
				t.Fatalf("file %d: wrong bytes are held in %v", i, s)
			}
		}
	}
}

// heldBytes returns what Bytes says is held.
func heldBytes(m *Model) int64 {
	n, _ := m.Bytes()
	return n
}

func TestTreeIsBao(t *testing.T) {
	for _, size := range []int64{1, 63, 64, 1023, 1024, 1025, 2048, 3000, 16 << 10, 16<<10 + 1, 100_000, Group - 1, Group, Group + 1, 2 * Group, 2*Group + 5, 3 * Group, 7*Group + 1024, 8 * Group, 13*Group - 1} {
		data := randomData(1, size)
		want, root := bao.EncodeBuf(data, 8, true)
		if blake3.Sum256(data) != root {
			t.Fatalf("%d bytes: the library's root is not the hash", size)
		}
		var leaves []words
		for i := range groupCount(size) {
			leaves = append(leaves, hashGroup(data[i*Group:min((i+1)*Group, len(data))], i, groupCount(size) == 1))
		}
		got, gotRoot := buildTree(size, leaves)
		if !bytes.Equal(got, want) || gotRoot != root || int64(len(got)) != treeSize(size) {
			t.Errorf("%d bytes: buildTree differs from the Bao library", size)
		}
		back, reason := checkTree(size, root, want)
		if reason != "" || len(back) != len(leaves) {
			t.Fatalf("%d bytes: checkTree = %d leaves, %q", size, len(back), reason)
		}
		for i := range back {
			if back[i] != leaves[i] {
				t.Errorf("%d bytes: leaf %d differs", size, i)
			}
		}
	}
}

func TestFillAndReopen(t *testing.T) {
	for _, tt := range []struct {
		name string
		fx   *fixture
	}{
		{"shipped model", tinyFixture(t)},
		{"three files", newFixture(randomData(1, 1000), randomData(2, 3*Group), randomData(3, 2*Group+7))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx, dir := tt.fx, t.TempDir()
			s := openStore(t, dir, 0)
			m := fx.create(t, s)
			if m.Complete() || heldBytes(m) != 0 {
				t.Fatal("a new model holds something")
			}
			for i := range fx.data {
				for _, span := range m.Missing(i, []Span{fx.whole(i)}) {
					for off := span.Off; off < span.end(); off += 2 * Group {
						fx.mustWrite(t, m, i, Span{off, min(2*Group, span.end()-off)})
					}
				}
			}
			fx.checkHeld(t, m)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, dir, 0)
			m = s.Model(fx.id)
			if m == nil || !m.Complete() || len(s.Problems()) > 0 {
				t.Fatalf("reopened: %v, problems %v", m, s.Problems())
			}
			fx.checkHeld(t, m)
			for i := range fx.data {
				tree := make([]byte, m.TreeSize(i))
				if n, err := m.ReadTree(i, tree, 0); n != len(tree) || err != nil && err != io.EOF || !bytes.Equal(tree, fx.trees[i]) {
					t.Errorf("tree %d is not what was set: %d, %v", i, n, err)
				}
			}
			if err := s.Verify(t.Context(), fx.id, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCreateRefuses(t *testing.T) {
	fx := newFixture(randomData(1, 1000))
	change := func(f func(*gguf.FileSum)) []gguf.FileSum {
		sum := fx.sums[0]
		f(&sum)
		return []gguf.FileSum{sum}
	}
	s := openStore(t, t.TempDir(), 0)
	for _, tt := range []struct {
		name  string
		files []gguf.FileSum
		want  string
	}{
		{"no file", nil, "0 files"},
		{"too many files", make([]gguf.FileSum, MaxFiles+1), "4097 files"},
		{"empty file", change(func(f *gguf.FileSum) { f.Size = 0 }), "0 bytes"},
		{"negative size", change(func(f *gguf.FileSum) { f.Size = -1 }), "-1 bytes"},
		{"huge file", change(func(f *gguf.FileSum) { f.Size = MaxModelBytes + 1 }), "a model at most"},
		{"huge model", []gguf.FileSum{{Name: "a", Size: MaxModelBytes}, {Name: "b", Size: 1}}, "file 2: 1 bytes"},
		{"no name", change(func(f *gguf.FileSum) { f.Name = "" }), "not a printable file name"},
		{"long name", change(func(f *gguf.FileSum) { f.Name = strings.Repeat("x", 256) }), "not a printable file name"},
		{"folder in name", change(func(f *gguf.FileSum) { f.Name = "../x" }), "not a printable file name"},
		{"other folder in name", change(func(f *gguf.FileSum) { f.Name = `..\x` }), "not a printable file name"},
		{"control byte in name", change(func(f *gguf.FileSum) { f.Name = "a\x1b[2J" }), "not a printable file name"},
		{"not UTF-8", change(func(f *gguf.FileSum) { f.Name = "a\xff" }), "not a printable file name"},
		{"other size", change(func(f *gguf.FileSum) { f.Size++ }), "those of model"},
		{"other root", change(func(f *gguf.FileSum) { f.Root[3] ^= 1 }), "those of model"},
	} {
		if _, err := s.Create(fx.id, tt.files); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	if entries, err := os.ReadDir(s.dir); err != nil || len(entries) != 0 {
		t.Errorf("a refused model left %v, %v", entries, err)
	}
}

func TestSetTreeRefuses(t *testing.T) {
	fx := newFixture(randomData(1, 5*Group+9))
	tree := fx.trees[0]
	s := openStore(t, t.TempDir(), 0)
	m, err := s.Create(fx.id, fx.sums)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.WriteGroups(0, 0, fx.data[0][:Group]); !errors.Is(err, ErrNoTree) {
		t.Errorf("a group without a tree: %v, want ErrNoTree", err)
	}
	flip := func(at int) []byte {
		b := bytes.Clone(tree)
		b[at] ^= 0x10
		return b
	}
	bad := map[string][]byte{
		"short": tree[:len(tree)-1], "empty": nil, "long": append(bytes.Clone(tree), 0), "size": flip(0),
		"header only": tree[:8],
	}
	for at := 8; at < len(tree); at += 32 {
		bad["node "+string(rune('a'+at/32))] = flip(at + at/32%32)
	}
	for name, b := range bad {
		err := m.SetTree(0, b)
		var wrong *WrongTreeError
		if !errors.As(err, &wrong) || !wrong.Wrong() || wrong.File != 0 {
			t.Errorf("%s: %v, want a *WrongTreeError", name, err)
		}
		if m.HasTree(0) {
			t.Fatalf("%s: the tree was taken", name)
		}
	}
	if err := m.SetTree(1, tree); err == nil {
		t.Error("a file that is not there has a tree now")
	}
	if err := m.SetTree(0, tree); err != nil || !m.HasTree(0) {
		t.Errorf("the right tree: %v", err)
	}
}

func TestWriteGroupsRefuses(t *testing.T) {
	fx := newFixture(randomData(1, 3*Group+100))
	s := openStore(t, t.TempDir(), 0)
	m := fx.create(t, s)
	data := fx.data[0]
	for _, tt := range []struct {
		name string
		file int
		off  int64
		data []byte
	}{
		{"file", 1, 0, data[:Group]},
		{"negative file", -1, 0, data[:Group]},
		{"negative offset", 0, -Group, data[:Group]},
		{"unaligned", 0, 1, data[1 : 1+Group]},
		{"short group", 0, 0, data[:Group-1]},
		{"nothing", 0, 0, nil},
		{"past the end", 0, 3 * Group, append(bytes.Clone(data[3*Group:]), 0)},
		{"after the end", 0, 4 * Group, data[:Group]},
	} {
		if err := m.WriteGroups(tt.file, tt.off, tt.data); err == nil {
			t.Errorf("%s: accepted", tt.name)
		}
	}
	for _, at := range []int{0, Group - 1, Group, 2*Group + 17, 3*Group + 99} {
		bad := bytes.Clone(data)
		bad[at] ^= 1
		err := m.WriteGroups(0, 0, bad)
		var wrong *WrongDataError
		if !errors.As(err, &wrong) || !wrong.Wrong() || wrong.Offset != int64(at/Group*Group) {
			t.Errorf("flipped bit at %d: %v, want a *WrongDataError of its group", at, err)
		}
	}
	// The right bytes at a wrong place are wrong too.
	if err := m.WriteGroups(0, Group, data[:Group]); err == nil {
		t.Error("another group's bytes were accepted")
	}
	onDisk, err := os.ReadFile(m.Path(0))
	if err != nil || heldBytes(m) != 0 || !bytes.Equal(onDisk, make([]byte, len(data))) {
		t.Errorf("something wrong was written: held %d, %v", heldBytes(m), err)
	}
}

func TestReadAt(t *testing.T) {
	fx := newFixture(randomData(1, 3*Group+100))
	s := openStore(t, t.TempDir(), 0)
	m := fx.create(t, s)
	fx.mustWrite(t, m, 0, Span{Group, Group})
	fx.mustWrite(t, m, 0, Span{3 * Group, 100})
	for _, tt := range []struct {
		off, n int64
		want   int
		err    error
	}{
		{Group, Group, Group, nil},
		{Group + 5, 10, 10, nil},
		{0, 10, 0, gguf.ErrNotHeld},
		{Group - 1, 2, 0, gguf.ErrNotHeld},
		{2*Group - 10, 20, 10, gguf.ErrNotHeld},
		{3 * Group, 100, 100, nil},
		{3 * Group, 101, 100, io.EOF},
		{3*Group + 100, 1, 0, io.EOF},
		{1 << 40, 1, 0, io.EOF},
	} {
		buf := make([]byte, tt.n)
		n, err := m.ReadAt(0, buf, tt.off)
		if n != tt.want || !errors.Is(err, tt.err) || !bytes.Equal(buf[:n], fx.data[0][min(tt.off, int64(len(fx.data[0]))):][:n]) {
			t.Errorf("ReadAt(%d bytes at %d) = %d, %v; want %d, %v", tt.n, tt.off, n, err, tt.want, tt.err)
		}
	}
	if _, err := m.ReadAt(0, make([]byte, 1), -1); err == nil {
		t.Error("a negative offset was read")
	}
	if _, err := m.ReadAt(1, make([]byte, 1), 0); err == nil {
		t.Error("a file that there is not was read")
	}
}

func TestDropRemovePin(t *testing.T) {
	fx, other := newFixture(randomData(1, 6*Group+100)), newFixture(randomData(2, 10))
	dir := t.TempDir()
	s := openStore(t, dir, 0)
	empty, _ := s.Used()
	m := fx.create(t, s)
	fx.mustWrite(t, m, 0, fx.whole(0))
	if err := m.Flush(); err != nil {
		t.Fatal(err)
	}
	full := diskBytes(t, m.Path(0))
	if err := m.Drop(0, []Span{{Group + 1, Group}, {5*Group + 1, 2 * Group}}); err != nil {
		t.Fatal(err)
	}
	want := []Span{{0, Group}, {3 * Group, 2 * Group}}
	check := func(m *Model) {
		t.Helper()
		got := m.Held(0)
		if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
			t.Errorf("held %v, want %v", got, want)
		}
		fx.checkHeld(t, m)
	}
	check(m)
	if now := diskBytes(t, m.Path(0)); now > full-3*Group {
		t.Errorf("%d of %d bytes are still on disk", now, full)
	}
	if err := s.Pin(fx.id, true); err != nil {
		t.Fatal(err)
	}
	other.create(t, s)
	s.Close()

	s = openStore(t, dir, 0)
	m = s.Model(fx.id)
	check(m)
	if !m.Pinned() || s.Model(other.id).Pinned() || len(s.Models()) != 2 {
		t.Error("the pins were not remembered")
	}
	fx.mustWrite(t, m, 0, fx.whole(0)) // fills the gaps alone
	if !m.Complete() {
		t.Error("the gaps were not filled")
	}
	fx.checkHeld(t, m)
	for _, id := range []gguf.ModelID{fx.id, other.id} {
		if err := s.Remove(id); err != nil {
			t.Fatal(err)
		}
		if err := s.Remove(id); !errors.Is(err, ErrNoModel) {
			t.Errorf("removed twice: %v", err)
		}
	}
	if err := fx.write(m, 0, fx.whole(0)); err == nil {
		t.Error("a removed model was written to")
	}
	if _, err := m.ReadAt(0, make([]byte, 1), 0); err == nil {
		t.Error("a removed model was read")
	}
	if used, _ := s.Used(); used != empty || len(s.Models()) != 0 {
		t.Errorf("%d bytes used by %v, want %d", used, s.Models(), empty)
	}
	if err := s.Pin(fx.id, true); !errors.Is(err, ErrNoModel) {
		t.Errorf("Pin of a removed model: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
