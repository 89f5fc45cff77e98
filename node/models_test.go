package node

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/api"
)

// cutTiny writes the shipped model, its backbone and a slice of it into a folder.
func cutTiny(t *testing.T, dir string) (whole, backbone, slice string) {
	t.Helper()
	whole, err := tiny.Write(dir)
	if err != nil {
		t.Fatal(err)
	}
	m, err := gguf.OpenModel(whole)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	backbone, slice = filepath.Join(dir, "backbone.gguf"), filepath.Join(dir, "slice.gguf")
	part := gguf.Slice{Layers: gguf.Range{End: 1}, Experts: gguf.Range{End: 8}}
	im, err := m.SliceImage(t.Context(), part)
	if err == nil {
		err = errors.Join(im.WriteFile(t.Context(), slice), gguf.WriteBackbone(t.Context(), backbone, m))
	}
	if err != nil {
		t.Fatal(err)
	}
	return whole, backbone, slice
}

// TestManageModels runs the commands one after the other on a folder that no
// daemon holds.
func TestManageModels(t *testing.T) {
	cfg := Config{Data: filepath.Join(t.TempDir(), "data")}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	whole, backbone, slice := cutTiny(t, t.TempDir())
	t.Chdir(filepath.Dir(whole))
	name := strings.TrimSuffix(tiny.Name, ".gguf")
	var id string
	run := func(action string, args ...string) (out, progress string, err error) {
		var o, p bytes.Buffer
		err = ManageModels(t.Context(), cfg, action, args, &o, &p)
		return o.String(), p.String(), err
	}
	works := func(want, action string, args ...string) {
		t.Helper()
		out, _, err := run(action, args...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s %v: %q, %v, want %q", action, args, out, err, want)
		}
	}
	fails := func(want, action string, args ...string) {
		t.Helper()
		out, _, err := run(action, args...)
		if err == nil || out != "" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s %v: %q, %v, want an error with %q", action, args, out, err, want)
		}
	}
	works("No model is in the store", "list")
	fails("no file is named", "add")
	fails("none.gguf: no such file", "add", "none.gguf")
	fails("only a whole model can be imported", "add", backbone)
	fails("only a whole model can be imported", "add", slice)
	fails(`no model "other" in the store`, "remove", "other")

	out, progress, err := run("add", tiny.Name) // relative, as it is typed
	if err != nil || !strings.HasPrefix(out, "Added "+name+", id ") || !strings.Contains(progress, "import 100%") {
		t.Fatalf("add: %q, %q, %v", out, progress, err)
	}
	_, id, _ = strings.Cut(out, "id ")
	id, _, _ = strings.Cut(id, ":")
	works("Added "+name, "add", whole) // known already
	works("no      "+id, "list")
	works("MiB  no  ", "list")
	works("Pinned "+name, "pin", id[:leastOfID])
	works("MiB  yes  ", "list")
	works("Unpinned "+name, "unpin", id)
	works("are as they should be", "verify", name)
	fails("no model", "verify", id[:leastOfID-1])

	loseModel(t, cfg, whole)
	works("0 bytes of", "list")
	works(": no such file", "list")
	works("Removed "+name, "remove", name)
	works("No model is in the store", "list")
}

// loseModel deletes the user's file of a model, and what the store may keep of it.
func loseModel(t *testing.T, cfg Config, path string) {
	t.Helper()
	kept, err := filepath.Glob(filepath.Join(cfg.Data, storeName, "*", "kept-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(kept, path) {
		if err := os.Remove(p); err != nil {
			t.Fatal(err)
		}
	}
}

// TestManageModelsBusy: a process that holds the folder and does not answer is
// named.
func TestManageModelsBusy(t *testing.T) {
	cfg := Config{Data: t.TempDir()}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	data, err := OpenData(cfg.Data)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	err = ManageModels(t.Context(), cfg, "list", nil, &bytes.Buffer{}, &bytes.Buffer{})
	if !errors.Is(err, ErrDataBusy) || !strings.Contains(err.Error(), "does not answer at "+cfg.Control) {
		t.Errorf("%v", err)
	}
}

func TestAmbiguousModel(t *testing.T) {
	cfg := Config{Data: t.TempDir()}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	st, err := openStore(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	for _, size := range []int64{1, 2} {
		files := []gguf.FileSum{{Name: "same.gguf", Size: size}}
		if _, err := st.Create(gguf.ManifestID(files), files); err != nil {
			t.Fatal(err)
		}
	}
	var refused *api.Error
	if _, err := findModel(st, "same"); !errors.As(err, &refused) || !strings.Contains(refused.Message, "2 models have the name") {
		t.Errorf("%v", err)
	}
	for _, m := range st.Models() {
		if got, err := findModel(st, m.ID().String()); got != m || err != nil {
			t.Errorf("by its id: %v, %v", got, err)
		}
	}
}

// TestModelEventsEnd: an import ends when nobody listens any more.
func TestModelEventsEnd(t *testing.T) {
	cfg := Config{Data: t.TempDir()}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	whole, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	gone := errors.New("gone")
	req := api.ModelRequest{Action: api.ModelAdd, Paths: []string{whole}}
	err = modelCommand(context.Background(), cfg, req, func(api.ModelEvent) error { return gone })
	if !errors.Is(err, gone) {
		t.Errorf("%v, want %v", err, gone)
	}
}

func TestProgressLine(t *testing.T) {
	p := func(done int64) api.Progress {
		return api.Progress{What: "import", Done: done << 20, Total: 200 << 20, Rate: 10 << 20, LeftSec: 61}
	}
	start := time.Unix(1000, 0)
	for _, tt := range []struct {
		rewrite bool
		want    string
	}{
		{true, "\rimport 0%, 1.0 MiB of 200.0 MiB, 10.0 MiB/s, 1m1s left\x1b[K\rimport 1%, 2.0 MiB of 200.0 MiB, 10.0 MiB/s, 1m1s left\x1b[K" +
			"\rimport 100%, 200.0 MiB of 200.0 MiB, 10.0 MiB/s, 1m1s left\x1b[K\n"},
		{false, "import 0%, 1.0 MiB of 200.0 MiB, 10.0 MiB/s, 1m1s left\nimport 100%, 200.0 MiB of 200.0 MiB, 10.0 MiB/s, 1m1s left\n"},
	} {
		var out bytes.Buffer
		line := progressLine{w: &out, rewrite: tt.rewrite}
		for i, done := range []int64{1, 2, 200} {
			line.show(p(done), start.Add(time.Duration(i)*time.Second))
		}
		line.end()
		if out.String() != tt.want {
			t.Errorf("rewrite %v: %q, want %q", tt.rewrite, out.String(), tt.want)
		}
	}
	if got := progressText(api.Progress{What: "verify"}); got != "verify, 0 bytes of 0 bytes" {
		t.Errorf("nothing known: %q", got)
	}
}

func TestModelText(t *testing.T) {
	m := api.StoredModel{ID: strings.Repeat("ab", 32), Name: "m\x1b[2J", Held: 1 << 20, Total: 2 << 30, Note: "x\ny"}
	got := printable(modelText(api.ModelVerify, api.ModelEvent{Models: []api.StoredModel{m}, Note: "but"}))
	for _, want := range []string{"Verified m\ufffd[2J, id " + m.ID + ": 1.0 MiB of 2.0 GiB are", "But: x\ny\n", "But: but\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not contain %q", got, want)
		}
	}
	got = modelText(api.ModelList, api.ModelEvent{Models: []api.StoredModel{m}})
	if !strings.Contains(got, "x; y\n") {
		t.Errorf("a note of two lines breaks the table: %q", got)
	}
}
