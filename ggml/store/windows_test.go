package store

import (
	"bytes"
	"errors"
	"testing"

	"kvasird/ggml/gguf"
)

// A store that holds the spans of a window, and nothing else, gives its stages.
func TestWindowSpans(t *testing.T) {
	files := splitTiny(t)
	fx := newFixture(files...)
	full := fx.openFull(t)
	s := openStore(t, t.TempDir(), 0)
	for _, window := range []gguf.Range{{Begin: 0, End: 1}, {Begin: 1, End: 3}, {Begin: 3, End: 4}} {
		for _, experts := range []bool{true, false} {
			m := fx.create(t, s)
			fx.fetchHeaders(t, m)
			g := openGGUF(t, m, gguf.Partial)
			spans, err := WindowSpans(g, window, experts)
			if err != nil {
				t.Fatal(err)
			}
			fx.fetch(t, m, spans)
			for _, make := range []func(*gguf.Model) (*gguf.Image, error){
				func(g *gguf.Model) (*gguf.Image, error) { return g.StageImage(t.Context(), window) },
				func(g *gguf.Model) (*gguf.Image, error) { return g.RowStage(t.Context(), window) },
			} {
				checkStage(t, window, experts, make, g, full)
			}
			held, total := m.Bytes()
			if held >= total {
				t.Errorf("%v: all of the model is held", window)
			}
			if err := s.Remove(m.ID()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func checkStage(t *testing.T, window gguf.Range, experts bool, image func(*gguf.Model) (*gguf.Image, error), g, full *gguf.Model) {
	t.Helper()
	got, err := image(g)
	if err != nil {
		t.Fatal(err)
	}
	want, err := image(full)
	if err != nil {
		t.Fatal(err)
	}
	if !experts {
		if _, err := got.ReadAt(make([]byte, got.Size()), 0); !errors.Is(err, gguf.ErrNotHeld) {
			t.Errorf("%v: experts that were not fetched: %v", window, err)
		}
		got, want = got.WithoutExperts(), want.WithoutExperts()
	}
	if !bytes.Equal(imageBytes(t, got, nil), imageBytes(t, want, nil)) {
		t.Errorf("stage %v, experts %v: it differs from one of the whole file", window, experts)
	}
	for tok := range got.Tokens() {
		a, err := got.TokenRow(nil, tok)
		b, _ := want.TokenRow(nil, tok)
		if err != nil || !bytes.Equal(a, b) {
			t.Fatalf("row of token %d: %v", tok, err)
		}
	}
}

func TestWindowSpansRefuses(t *testing.T) {
	full := tinyFixture(t).openFull(t)
	if _, err := WindowSpans(full, gguf.Range{Begin: 1, End: 5}, true); err == nil {
		t.Error("spans of layers that are not there")
	}
}
