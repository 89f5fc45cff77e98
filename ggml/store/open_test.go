package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// fetchHeaders writes what HeaderNeeds asks for until the headers are held.
func (fx *fixture) fetchHeaders(t *testing.T, m *Model) (rounds int) {
	t.Helper()
	for i := range fx.data {
		for {
			need, held, err := m.HeaderNeeds(i)
			if err != nil {
				t.Fatal(err)
			}
			if held != (len(m.Missing(i, []Span{need})) == 0) {
				t.Fatalf("file %d: the header is in %v, held %v, missing %v", i, need, held, m.Missing(i, []Span{need}))
			}
			if held {
				break
			}
			fx.fetch(t, m, map[int][]Span{i: {need}})
			if rounds++; rounds > 20 {
				t.Fatal("HeaderNeeds does not end")
			}
		}
	}
	return rounds
}

// fetch writes what of the spans is missing.
func (fx *fixture) fetch(t *testing.T, m *Model, want map[int][]Span) {
	t.Helper()
	for i, spans := range want {
		for _, s := range m.Missing(i, spans) {
			fx.mustWrite(t, m, i, s)
		}
		if left := m.Missing(i, spans); len(left) > 0 {
			t.Fatalf("file %d: still missing %v", i, left)
		}
	}
}

// openFull opens the fixture as an ordinary file.
func (fx *fixture) openFull(t *testing.T) *gguf.Model {
	t.Helper()
	full, err := gguf.Open(writeFiles(t, t.TempDir(), fx.data...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { full.Close() })
	return full
}

func openGGUF(t *testing.T, m *Model, kind gguf.Kind) *gguf.Model {
	t.Helper()
	g, err := m.GGUF(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	id, err := g.ID(t.Context())
	if err != nil || id != m.ID() || g.Kind() != kind {
		t.Fatalf("opened as %v %v, %v; want %v %v", g.Kind(), id, err, kind, m.ID())
	}
	return g
}

func imageBytes(t *testing.T, im *gguf.Image, err error) []byte {
	t.Helper()
	var b bytes.Buffer
	if err == nil {
		_, err = im.WriteTo(&b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestGGUF fills a split model slice by slice, and uses it as nodes do.
func TestGGUF(t *testing.T) {
	slice := gguf.Slice{Layers: gguf.Range{Begin: 1, End: 3}, Experts: gguf.Range{Begin: 8, End: 12}}
	files := splitTiny(t)
	fx := newFixture(files...)
	full := fx.openFull(t)
	s := openStore(t, t.TempDir(), 0)
	m := fx.create(t, s)
	if _, err := m.GGUF(t.Context()); !errors.Is(err, gguf.ErrNotHeld) {
		t.Fatalf("opened without a header: %v", err)
	}
	fx.fetchHeaders(t, m)
	g := openGGUF(t, m, gguf.Partial)
	checkNothingHeld(t, g, slice)

	spans, err := SliceSpans(g, slice)
	if err != nil {
		t.Fatal(err)
	}
	fx.fetch(t, m, spans)
	checkSlice(t, g, full, slice)
	if _, err := g.ExpertTensors(0, gguf.Range{End: 32}); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("experts of another layer: %v", err)
	}
	last := m.Held(len(files) - 1)
	if err := m.Drop(len(files)-1, last); err != nil {
		t.Fatal(err)
	}
	if _, err := g.SliceTensors(slice); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("a dropped slice: %v", err)
	}
	fx.fetchHeaders(t, m)

	fx.fetch(t, m, DenseSpans(g))
	checkBackbone(t, g, full, len(files))
	for i := range files {
		fx.fetch(t, m, map[int][]Span{i: {fx.whole(i)}})
	}
	g = openGGUF(t, m, gguf.Full)
	checkSlice(t, g, full, gguf.Slice{Layers: gguf.Range{End: 4}, Experts: gguf.Range{End: 32}})
	want := stageBytes(t, full, gguf.Range{End: 2})
	if got := stageBytes(t, g, gguf.Range{End: 2}); !bytes.Equal(got, want) {
		t.Error("a stage from the store differs from one of the whole file")
	}
}

func stageBytes(t *testing.T, g *gguf.Model, window gguf.Range) []byte {
	im, err := g.StageImage(t.Context(), window)
	return imageBytes(t, im, err)
}

// checkNothingHeld has every way to the experts refuse.
func checkNothingHeld(t *testing.T, g *gguf.Model, slice gguf.Slice) {
	t.Helper()
	if _, err := g.ExpertTensors(slice.Layers.Begin, slice.Experts); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("ExpertTensors of what is not held: %v", err)
	}
	if _, err := g.Section("blk.2.ffn_up_exps.weight"); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("Section of what is not held: %v", err)
	}
	if _, err := g.SliceImage(t.Context(), slice); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("SliceImage of what is not held: %v", err)
	}
	if err := gguf.WriteBackbone(t.Context(), filepath.Join(t.TempDir(), "x"+dataName(0, len(g.Parts()))[5:]), g); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("WriteBackbone of what is not held: %v", err)
	}
	if _, err := g.Manifest(t.Context()); err != nil {
		t.Errorf("the manifest is known: %v", err)
	}
}

// checkSlice compares the experts of a slice with those of the whole model.
func checkSlice(t *testing.T, g, full *gguf.Model, slice gguf.Slice) {
	t.Helper()
	got, err := g.SliceTensors(slice)
	if err != nil {
		t.Fatal(err)
	}
	want, err := full.SliceTensors(slice)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d expert tensors, want %d, %v", len(got), len(want), err)
	}
	for i := range got {
		a, b := make([]byte, got[i].Bytes), make([]byte, want[i].Bytes)
		if err := errors.Join(got[i].ReadInto(a), want[i].ReadInto(b)); err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v", got[i].Name, err)
		}
	}
	im, err := g.SliceImage(t.Context(), slice)
	mini := imageBytes(t, im, err)
	im, err = full.SliceImage(t.Context(), slice)
	if !bytes.Equal(mini, imageBytes(t, im, err)) {
		t.Error("the slice's file differs from that of the whole model")
	}
}

// checkBackbone compares the backbone file with that of the whole model.
func checkBackbone(t *testing.T, g, full *gguf.Model, parts int) {
	t.Helper()
	var files [2][][]byte
	for i, m := range []*gguf.Model{g, full} {
		dir := t.TempDir()
		if err := gguf.WriteBackbone(t.Context(), filepath.Join(dir, dataName(0, parts)), m); err != nil {
			t.Fatal(err)
		}
		for p := range parts {
			b, err := os.ReadFile(filepath.Join(dir, dataName(p, parts)))
			if err != nil {
				t.Fatal(err)
			}
			files[i] = append(files[i], b)
		}
	}
	for p := range parts {
		if !bytes.Equal(files[0][p], files[1][p]) {
			t.Errorf("file %d of the backbone differs from that of the whole model", p)
		}
	}
	// The store's own file serves as one: all but the experts is in it.
	for i, p := range g.Parts() {
		onDisk, err := os.ReadFile(p.Path)
		if err != nil {
			t.Fatal(err)
		}
		for _, tensor := range p.Tensors {
			if end := tensor.Offset + tensor.Bytes; gguf.InBackbone(tensor.Name) && !bytes.Equal(onDisk[tensor.Offset:end], files[1][i][tensor.Offset:end]) {
				t.Errorf("%s is not in the store's file", tensor.Name)
			}
		}
	}
}

// TestHeaderNeeds has headers longer than the first guess, and one that is none.
func TestHeaderNeeds(t *testing.T) {
	for _, keys := range []int{1, 300, 1000} {
		g := &ggufFile{tensors: []gguf.Tensor{ggufTensor(t, "token_embd.weight", f32, 64, 60_000)}}
		g.key("general.architecture", 8, "llama")
		g.key("llama.block_count", 4, uint32(1))
		for i := range keys {
			g.key(fmt.Sprintf("x.%d", i), 8, strings.Repeat("x", 10_000))
		}
		g.data = [][]byte{randomData(1, g.tensors[0].Bytes)}
		b, _ := g.encode()
		fx := newFixture(b)
		m := fx.create(t, openStore(t, t.TempDir(), 0))
		rounds := fx.fetchHeaders(t, m)
		header := int64(len(b)) - g.tensors[0].Bytes
		if held := heldBytes(m); held > max(headerGuess, 4*header)+Group {
			t.Errorf("%d bytes were fetched in %d rounds for a header of %d", held, rounds, header)
		}
		openGGUF(t, m, gguf.Partial)
	}
	fx := newFixture(randomData(1, 3*Group))
	m := fx.create(t, openStore(t, t.TempDir(), 0))
	fx.mustWrite(t, m, 0, fx.whole(0))
	var format *gguf.FormatError
	if _, _, err := m.HeaderNeeds(0); !errors.As(err, &format) {
		t.Errorf("random bytes: %v, want a *gguf.FormatError", err)
	}
	if _, err := m.GGUF(t.Context()); !errors.As(err, &format) {
		t.Errorf("random bytes: %v, want a *gguf.FormatError", err)
	}
	if _, _, err := m.HeaderNeeds(1); err == nil {
		t.Error("a file that there is not has a header")
	}
}

// Shape of Qwen3.5-122B-A10B.
const (
	bigLayers  = 48
	bigExperts = 256
	bigWidth   = 3072
	bigInner   = 1024
)

// bigModel makes the header of a model of 77.6 GB and a sparse file around it.
func bigModel(t *testing.T) (path string, size int64) {
	t.Helper()
	g := &ggufFile{}
	g.key("general.architecture", 8, "qwen35moe")
	g.key("qwen35moe.block_count", 4, uint32(bigLayers))
	g.key("qwen35moe.expert_count", 4, uint32(bigExperts))
	g.key("qwen35moe.expert_used_count", 4, uint32(8))
	add := func(name string, like gguf.Tensor, dims ...int64) {
		g.tensors = append(g.tensors, ggufTensor(t, name, like, dims...))
	}
	add("token_embd.weight", q4k, bigWidth, 248_320)
	add("output.weight", q6k, bigWidth, 248_320)
	for l := range int64(bigLayers) {
		name := func(s string) string { return fmt.Sprintf("blk.%d.%s", l, s) }
		add(name("attn_q.weight"), q80, bigWidth, 7800)
		add(name("ffn_gate_inp.weight"), f32, bigWidth, bigExperts)
		add(name("ffn_gate_exps.weight"), q4k, bigWidth, bigInner, bigExperts)
		add(name("ffn_up_exps.weight"), q4k, bigWidth, bigInner, bigExperts)
		add(name("ffn_down_exps.weight"), q6k, bigInner, bigWidth, bigExperts)
	}
	header, size := g.encode()
	path = filepath.Join(t.TempDir(), "big.gguf")
	if err := os.WriteFile(path, header, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path, size
}

// TestBigModel checks the arithmetic at the size of real models. No data are hashed.
func TestBigModel(t *testing.T) {
	path, size := bigModel(t)
	if size < 77_000_000_000 || size > 78_000_000_000 {
		t.Fatalf("the file has %d bytes, want 77.6 GB", size)
	}
	if n := treeSize(size); n < 18_500_000 || n > 19_500_000 {
		t.Errorf("its tree has %d bytes, want about 19 MB", n)
	}
	if n := heldSize(size); n < 36_000 || n > 38_000 {
		t.Errorf("its set has %d bytes, want about 37 kB", n)
	}
	g, err := gguf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	all := newGroupSet(size)
	add := func(spans []Span) {
		for i := range groupsIn(spans) {
			all.add(i)
		}
	}
	const experts = 16
	slab := int64(bigWidth * bigInner / 256 * (144 + 144 + 210)) // of one expert: gate, up, down
	for l := range bigLayers {
		for e := 0; e < bigExperts; e += experts {
			s := gguf.Slice{Layers: gguf.Range{Begin: l, End: l + 1}, Experts: gguf.Range{Begin: e, End: e + experts}}
			spans, err := SliceSpans(g, s)
			if err != nil {
				t.Fatal(err)
			}
			if n := length(spans[0]); n < experts*slab || n > experts*slab+3*2*Group || len(spans[0]) != 3 {
				t.Fatalf("slice %v: %v is %d bytes, the experts have %d", s, spans, n, experts*slab)
			}
			add(spans[0])
		}
	}
	if missing := size - all.bytes; missing < 2_000_000_000 || missing > 3_000_000_000 {
		t.Errorf("all slices leave %d bytes", missing)
	}
	dense := DenseSpans(g)[0]
	if n := length(dense); n < 2_000_000_000 || n > 3_000_000_000 {
		t.Errorf("the dense part is %d bytes", n)
	}
	if add(dense); all.bytes != size {
		t.Errorf("slices and the dense part are %d of %d bytes", all.bytes, size)
	}
	if _, err := SliceSpans(g, gguf.Slice{Layers: gguf.Range{End: 1}, Experts: gguf.Range{End: 257}}); err == nil {
		t.Error("an expert that there is not was found")
	}
	checkBigStore(t, size)
}

// checkBigStore keeps a set of that size; the hash is none, as nothing is verified.
func checkBigStore(t *testing.T, size int64) {
	t.Helper()
	sums := []gguf.FileSum{{Name: "big.gguf", Size: size, Root: gguf.Hash{1}}}
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20) // which the sparse file alone must not exceed
	m, err := s.Create(gguf.ManifestID(sums), sums)
	if err != nil {
		t.Fatal(err)
	}
	checkLimit(t, s)
	for i := 0; i < groupCount(size); i += 2 {
		m.files[0].held.add(i)
	}
	start := time.Now()
	missing := m.Missing(0, []Span{{0, size}})
	if n := groupCount(size) / 2; len(missing) != n || len(m.Held(0)) != n+groupCount(size)%2 {
		t.Errorf("%d spans are missing, want %d", len(missing), n)
	}
	t.Logf("%d spans in %v", len(missing), time.Since(start))
	set := m.files[0].held
	back, err := decodeHeld(size, sums[0].Root, encodeHeld(sums[0].Root, set))
	if err != nil || back.bytes != set.bytes {
		t.Errorf("the set came back as %v, %v", back, err)
	}
	var full *LimitError
	if _, err := m.Reserve(map[int][]Span{0: {{0, size}}}); !errors.As(err, &full) || full.Need < size/2 {
		t.Errorf("38 GB were promised: %v", err)
	}
}
