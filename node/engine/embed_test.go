//go:build cgo

package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvasird/ggml"
)

// embedModel is a random model: an encoder, or one that sees only what was before.
func embedModel(t testing.TB, arch string) *ggml.Model {
	t.Helper()
	path := filepath.Join(t.TempDir(), arch+".gguf")
	cfg := ggml.GenerateConfig{Arch: arch, Overrides: map[string]any{"pooling_type": uint32(3)}}
	if arch == "bert" {
		cfg.Overrides = nil
	}
	if err := runtime.GenerateModel(path, cfg); err != nil {
		t.Fatal(err)
	}
	m, err := runtime.LoadModel(ggml.ModelConfig{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func openEmbedder(t testing.TB, cfg EmbedConfig) *Embedder {
	t.Helper()
	if cfg.Model == nil {
		cfg.Model = embedModel(t, "bert")
	}
	e, err := OpenEmbedder(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// someInputs are n inputs of many lengths, none equal.
func someInputs(n int) (all [][]int32) {
	for i := range n {
		in := []int32{int32(i % 128), int32(i / 128)}
		for j := range i % 23 {
			in = append(in, int32((i+7*j)%128))
		}
		all = append(all, in)
	}
	return all
}

// embedAlone is an input's vector by a context of its own, of length 1.
func embedAlone(t testing.TB, m *ggml.Model, input []int32) []float32 {
	t.Helper()
	c, err := m.NewContext(ggml.ContextConfig{Tokens: 512, Embeddings: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := ggml.NewBatch(512)
	for pos, tok := range input {
		b.Add(ggml.Token(tok), pos, 0, true)
	}
	if err := c.Decode(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	v := append([]float32(nil), c.Embedding(0)...)
	var sum float64
	for _, x := range v {
		sum += float64(x) * float64(x)
	}
	for i := range v {
		v[i] /= float32(math.Sqrt(sum))
	}
	return v
}

// near checks that two vectors of length 1 are the same but for rounding, which beside
// other inputs is that of f16.
func near(got, want []float32) error {
	if len(got) != len(want) || len(got) == 0 {
		return fmt.Errorf("%d values, want %d", len(got), len(want))
	}
	var diff, length float64
	for i := range got {
		d := float64(got[i]) - float64(want[i])
		diff, length = diff+d*d, length+float64(got[i])*float64(got[i])
	}
	if diff = math.Sqrt(diff); !(diff < 5e-3) || math.Abs(length-1) > 1e-5 {
		return fmt.Errorf("it is %g from the one alone, its length² %g", diff, length)
	}
	return nil
}

// TestEmbed: the vectors of many requests at once, each larger than a batch, are those
// of every input alone, in their order.
func TestEmbed(t *testing.T) {
	for _, arch := range []string{"bert", "qwen3"} {
		m := embedModel(t, arch)
		inputs := someInputs(90)
		want := make([][]float32, len(inputs))
		for i, in := range inputs {
			want[i] = embedAlone(t, m, in)
		}
		e := openEmbedder(t, EmbedConfig{Model: m, Inputs: 8, Batch: 512})
		var group sync.WaitGroup
		for owner := range 4 {
			group.Go(func() {
				from := owner * 20
				got, err := e.Embed(t.Context(), fmt.Sprint(owner), inputs[from:from+30])
				if err != nil || len(got) != 30 {
					t.Errorf("%s %d: %d vectors, %v", arch, owner, len(got), err)
				}
				for i, v := range got {
					if err := near(v, want[from+i]); err != nil {
						t.Errorf("%s, owner %d, input %d: %v", arch, owner, i, err)
					}
				}
			})
		}
		group.Wait()
		if s := e.Stats(); s.Completed != 4 || s.Decodes < 120/8 || s.Decodes > 40 || s.Waiting != 0 || s.Prompt == 0 {
			t.Errorf("%s: %+v", arch, s)
		}
	}
}

// TestEmbedReady: it is ready after a canary, also when it is full.
func TestEmbedReady(t *testing.T) {
	e := openEmbedder(t, EmbedConfig{Inputs: 1, Queue: 1})
	if err := e.Ready(); err == nil {
		t.Error("ready before anything was computed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	busy := make(chan error, 1)
	go func() {
		_, err := e.Embed(ctx, "a", someInputs(2048))
		busy <- err
	}()
	waitFor(t, "the first runs", func() bool { return e.Stats().Running == 1 })
	if err := e.Canary(t.Context()); err != nil || e.Ready() != nil {
		t.Errorf("canary %v, ready %v", err, e.Ready())
	}
	var full *QueueFullError
	if _, err := e.Embed(t.Context(), "b", someInputs(1)); !errors.As(err, &full) || full.RetryAfter() < time.Second {
		t.Errorf("a full queue: %v", err)
	}
	cancel()
	if err := <-busy; !errors.Is(err, context.Canceled) {
		t.Errorf("who left hears %v", err)
	}
	waitFor(t, "it is idle", func() bool { return e.Stats().Running+e.Stats().Waiting == 0 })
	if s := e.Stats(); s.Cancelled != 1 || s.Failed != 0 || s.Prompt > 1000*10 {
		t.Errorf("after the only one left: %+v", s)
	}
	if _, err := e.Embed(t.Context(), "b", someInputs(3)); err != nil || e.Ready() != nil {
		t.Errorf("afterwards: %v, ready %v", err, e.Ready())
	}
}

// TestEmbedTurns: a large request does not keep small ones of others waiting, nor the
// longest input one for ever.
func TestEmbedTurns(t *testing.T) {
	e := openEmbedder(t, EmbedConfig{Inputs: 4, Context: 64, Batch: 64})
	ended := make(chan string, 3)
	embed := func(owner string, inputs [][]int32) {
		go func() {
			if _, err := e.Embed(t.Context(), owner, inputs); err != nil {
				t.Errorf("%s: %v", owner, err)
			}
			ended <- owner
		}()
	}
	embed("large", someInputs(300))
	waitFor(t, "the large one runs", func() bool { return e.Stats().Running == 1 })
	embed("longest", [][]int32{make([]int32, 64)})
	embed("small", someInputs(1))
	for i := range 3 {
		if owner := <-ended; (owner == "large") != (i == 2) {
			t.Errorf("%s ends as number %d", owner, i)
		}
	}
}

// TestEmbedRefused: what cannot be computed is refused before it waits.
func TestEmbedRefused(t *testing.T) {
	e := openEmbedder(t, EmbedConfig{Context: 8})
	for _, tt := range []struct {
		inputs [][]int32
		says   string
	}{
		{nil, "no input"},
		{[][]int32{{1}, {}}, "input 1 is empty"},
		{[][]int32{{1, -1}}, "token 1 of input 0 is -1"},
		{[][]int32{{128}}, "the vocabulary has 128"},
		{[][]int32{{1}, make([]int32, 9)}, "input 1 has 9 tokens; the model takes 8"},
	} {
		if _, err := e.Embed(t.Context(), "", tt.inputs); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%v: %v, want %q", tt.inputs, err, tt.says)
		}
	}
	var long *InputError
	if _, err := e.Embed(t.Context(), "", [][]int32{make([]int32, 9)}); !errors.As(err, &long) {
		t.Error(err)
	} else if n, limit := long.ContextLength(); n != 9 || limit != 8 {
		t.Errorf("%d of %d tokens", n, limit)
	}
	if e := openEmbedder(t, EmbedConfig{Model: e.cfg.Model, Context: 1 << 20}); e.Context() != e.cfg.Model.TrainContext() {
		t.Errorf("inputs of %d tokens, trained with %d", e.Context(), e.cfg.Model.TrainContext())
	}
	if s := e.Stats(); s.Decodes != 0 {
		t.Errorf("something was computed: %+v", s)
	}
	if _, err := OpenEmbedder(EmbedConfig{Model: tiny}); err == nil || !strings.Contains(err.Error(), "makes text") {
		t.Errorf("a model of text: %v", err)
	}
}

// TestEmbedClose: who waits, runs or comes hears that it is closed.
func TestEmbedClose(t *testing.T) {
	e := openEmbedder(t, EmbedConfig{Inputs: 1})
	heard := make(chan error, 2)
	for owner := range 2 {
		go func() {
			_, err := e.Embed(context.Background(), fmt.Sprint(owner), someInputs(2000))
			heard <- err
		}()
	}
	waitFor(t, "both are there", func() bool { return e.Stats().Running == 1 && e.Stats().Waiting >= 1 })
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-heard; !errors.Is(err, ErrClosed) {
			t.Errorf("heard %v", err)
		}
	}
	if _, err := e.Embed(t.Context(), "", someInputs(1)); !errors.Is(err, ErrClosed) || !errors.Is(e.Ready(), ErrClosed) {
		t.Errorf("afterwards %v, ready %v", err, e.Ready())
	}
}
