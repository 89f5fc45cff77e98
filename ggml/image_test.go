//go:build cgo

package ggml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

// partly is a file of which only some tensors are held.
type partly struct {
	io.ReaderAt
	held []gguf.Located
	head int64
}

func (p partly) Holds(off, n int64) bool {
	return off+n <= p.head || slices.ContainsFunc(p.held, func(t gguf.Located) bool {
		return t.Offset <= off && off+n <= t.Offset+t.Bytes
	})
}

func (p partly) ReadAt(b []byte, off int64) (int, error) {
	if off < p.head && off+int64(len(b)) > p.head {
		n, _ := p.ReaderAt.ReadAt(b[:p.head-off], off)
		return n, fmt.Errorf("bytes at %d: %w", p.head, gguf.ErrNotHeld)
	}
	if !p.Holds(off, int64(len(b))) {
		return 0, fmt.Errorf("bytes at %d: %w", off, gguf.ErrNotHeld)
	}
	return p.ReaderAt.ReadAt(b, off)
}

// openPartly opens the shipped model as if only these tensors were held.
func openPartly(t *testing.T, held []gguf.Located) *gguf.Model {
	t.Helper()
	full := openGGUF(t, tinyPath)
	sums, err := full.Manifest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	head := full.Parts()[0].DataOffset
	m, err := gguf.OpenKnown([]gguf.KnownFile{{Path: tinyPath, Sum: sums[0], Stored: partly{f, held, head}}})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// windowReads lists what a window needs.
func windowReads(t *testing.T, window gguf.Range, experts bool) []gguf.Located {
	t.Helper()
	m := openGGUF(t, tinyPath)
	reads, err := m.WindowReads(window, experts)
	if err != nil {
		t.Fatal(err)
	}
	return reads
}

// A stage needs what WindowReads lists and nothing else; with one tensor less it is
// an error, and no crash.
func TestStageFromWhatItReads(t *testing.T) {
	rt := openRuntime(t)
	zeros := func(_ context.Context, call *ExpertCall) error { clear(call.Out); return nil }
	for _, tt := range []struct {
		window  gguf.Range
		experts ExpertFunc
	}{
		{gguf.Range{Begin: 0, End: 1}, nil}, {gguf.Range{Begin: 1, End: 3}, nil}, {gguf.Range{Begin: 3, End: 4}, nil},
		{gguf.Range{Begin: 0, End: 1}, zeros}, {gguf.Range{Begin: 1, End: 3}, zeros}, {gguf.Range{Begin: 3, End: 4}, zeros},
	} {
		reads := windowReads(t, tt.window, tt.experts == nil)
		im, err := openPartly(t, reads).RowStage(t.Context(), tt.window)
		if err != nil {
			t.Fatal(err)
		}
		m, err := rt.LoadModel(ModelConfig{Image: im, Experts: tt.experts})
		if err != nil {
			t.Errorf("%v: %v", tt.window, err)
			continue
		}
		m.Close()
		less := slices.DeleteFunc(slices.Clone(reads), func(x gguf.Located) bool { return strings.HasSuffix(x.Name, "attn_q.weight") })
		if im, err = openPartly(t, less).RowStage(t.Context(), tt.window); err != nil {
			t.Fatal(err)
		}
		if m, err := rt.LoadModel(ModelConfig{Image: im, Experts: tt.experts}); !errors.Is(err, gguf.ErrNotHeld) || m != nil {
			t.Errorf("%v without a tensor: %v, want ErrNotHeld", tt.window, err)
		}
	}
}

// The token embedding is read row by row while the first stage decodes.
func TestTokenRowNotHeld(t *testing.T) {
	window := gguf.Range{Begin: 0, End: 1}
	reads := slices.DeleteFunc(windowReads(t, window, true), func(x gguf.Located) bool { return x.Name == "token_embd.weight" })
	im, err := openPartly(t, reads).RowStage(t.Context(), window)
	if err != nil {
		t.Fatal(err)
	}
	m := loadModel(t, openRuntime(t), ModelConfig{Image: im})
	c, err := m.NewContext(ContextConfig{Tokens: 16, Batch: 4, Boundary: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := NewBatch(1)
	b.Add(1, 0, 0, true)
	if err := c.Decode(t.Context(), b); !errors.Is(err, gguf.ErrNotHeld) {
		t.Errorf("decode: %v, want ErrNotHeld", err)
	}
}

// Where the C library has no files that are functions, a temporary file takes their place.
func TestLoadCopy(t *testing.T) {
	rt := openRuntime(t)
	file := openGGUF(t, tinyPath)
	want := playWhole(t, rt, tinyPath, cutContext)
	asFiles := imagesAsFiles
	imagesAsFiles = true
	defer func() { imagesAsFiles = asFiles }()
	if d := maxAbs(want, playCut(t, rt, []int{0, 2, 4}, cutContext, file.RowStage)); d != 0 {
		t.Errorf("max |Δ| of the logits is %g, want 0", d)
	}
}

// A stage whose experts are elsewhere asks for them by the numbers of the whole model.
func TestStageWithRemoteExperts(t *testing.T) {
	rt := openRuntime(t)
	file := openGGUF(t, tinyPath)
	want := playWhole(t, rt, tinyPath, cutContext)
	ks := newKernels(t, rt, tinyPath, 3, KernelConfig{})
	ch, err := loadCut(rt, []int{0, 1, 3, 4}, file.RowStage, ks.compute)
	if err != nil {
		t.Fatal(err)
	}
	defer ch.close(t)
	ch.open(t, cutContext)
	if d := maxAbs(want, ch.play(t)); d != 0 {
		t.Errorf("max |Δ| of the logits is %g, want 0", d)
	}
	for layer := range file.Layers() {
		if ks.calls[layer] == 0 {
			t.Errorf("layer %d was never asked for", layer)
		}
	}
}

func TestVocabOnly(t *testing.T) {
	rt := openRuntime(t)
	whole := loadModel(t, rt, ModelConfig{Path: tinyPath})
	full, err := os.ReadFile(tinyPath)
	if err != nil {
		t.Fatal(err)
	}
	file := openGGUF(t, tinyPath)
	path := t.TempDir() + "/header.gguf"
	if err := os.WriteFile(path, full[:file.Parts()[0].DataOffset], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, int64(len(full))); err != nil {
		t.Fatal(err)
	}
	vocab := loadModel(t, rt, ModelConfig{Path: path, VocabOnly: true})
	text := "<|im_start|>user\nThe capital of France is"
	want, _ := whole.Tokenize(text, true, true)
	got, err := vocab.Tokenize(text, true, true)
	if err != nil || !slices.Equal(got, want) || vocab.ChatTemplate() != whole.ChatTemplate() || vocab.VocabSize() != whole.VocabSize() {
		t.Errorf("tokens %v, %v, want %v", got, err, want)
	}
	for tok := range Token(whole.VocabSize()) {
		if vocab.IsEOG(tok) != whole.IsEOG(tok) || string(vocab.Piece(tok, true)) != string(whole.Piece(tok, true)) {
			t.Fatalf("token %d differs", tok)
		}
	}
	if c, err := vocab.NewContext(ContextConfig{Tokens: 16}); err == nil {
		c.Close()
		t.Error("a context of a vocabulary was made")
	}
}

func TestRowBatchRefuses(t *testing.T) {
	m := loadModel(t, openRuntime(t), ModelConfig{Path: tinyPath})
	c, err := m.NewContext(ContextConfig{Tokens: 16, Batch: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	narrow := NewRowBatch(1, 8)
	narrow.AddRow(make([]float32, 8), 0, 0, true)
	short := NewRowBatch(1, m.EmbeddingLength())
	short.AddRow(make([]float32, 8), 0, 0, true)
	mixed := NewBatch(1)
	mixed.AddRow(make([]float32, 8), 0, 0, true)
	for name, b := range map[string]*Batch{"narrow": narrow, "short": short, "mixed": mixed} {
		if err := c.Decode(t.Context(), b); err == nil {
			t.Errorf("%s rows were decoded", name)
		}
	}
	if c.Hidden(0) != nil {
		t.Error("a context without Boundary has hidden rows")
	}
}

// probeEnv makes the test binary the child of a probe.
const probeEnv = "KVASIR_TEST_PROBE"

func serveProbe() int {
	rt, err := Open(Config{})
	if err == nil {
		err = ServeProbe(rt, os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func TestProbeStage(t *testing.T) {
	file := openGGUF(t, tinyPath)
	sums, err := file.Manifest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	files := []ProbeFile{{Path: tinyPath, Sum: sums[0]}}
	short := sums[0]
	short.Size /= 2
	for name, tt := range map[string]struct {
		req  ProbeRequest
		want string
	}{
		"first":           {ProbeRequest{Files: files, Layers: gguf.Range{Begin: 0, End: 2}}, ""},
		"last, no expert": {ProbeRequest{Files: files, Layers: gguf.Range{Begin: 2, End: 4}, Backbone: true}, ""},
		"whole file":      {ProbeRequest{Path: tinyPath}, ""},
		"no such layers":  {ProbeRequest{Files: files, Layers: gguf.Range{Begin: 2, End: 5}}, "the model has 4 layers"},
		"cut short":       {ProbeRequest{Files: []ProbeFile{{tinyPath, short}}, Layers: gguf.Range{Begin: 0, End: 2}}, "past the file"},
		"no file":         {ProbeRequest{Files: []ProbeFile{{"missing.gguf", sums[0]}}, Layers: gguf.Range{Begin: 0, End: 2}}, "missing.gguf"},
	} {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), probeEnv+"=1")
		tt.req.Threads = 1
		err := Probe(t.Context(), child, tt.req)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !errors.Is(err, ErrProbe) || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// What is asked about a file has the form that it had before there were stages.
func TestProbeRequestOfFile(t *testing.T) {
	text, err := json.Marshal(ProbeRequest{Path: "m.gguf", Threads: 2})
	if err != nil || strings.Contains(string(text), `"layers"`) || strings.Contains(string(text), `"files"`) {
		t.Errorf("%s, %v", text, err)
	}
	var back ProbeRequest
	if err := json.Unmarshal(text, &back); err != nil || back.Path != "m.gguf" || back.Threads != 2 {
		t.Errorf("%+v, %v", back, err)
	}
}
