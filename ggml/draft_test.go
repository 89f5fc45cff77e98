//go:build cgo

package ggml

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// draftExperts answers calls through kernels, drafts with zeros.
type draftExperts struct {
	*kernels
	drafts, reals int
}

func (e *draftExperts) compute(ctx context.Context, call *ExpertCall) error {
	if call.Draft {
		e.drafts++
		clear(call.Out)
		return nil
	}
	e.reals++
	return e.kernels.compute(ctx, call)
}

// decodeAt runs tokens from a position of sequence 0 on, by Decode or Draft, and returns the logits of
// the last of them.
func decodeAt(t *testing.T, run func(context.Context, *Batch) error, c *Context, pos int, tokens ...Token) []float32 {
	t.Helper()
	b := NewBatch(len(tokens))
	for i, token := range tokens {
		b.Add(token, pos+i, 0, i == len(tokens)-1)
	}
	if err := run(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	return slices.Clone(c.Logits(len(tokens) - 1))
}

// TestDraft: a draft is marked in every expert call, nothing is drawn from it or goes on from its
// cells, and what follows once they are removed is as if it had not been.
func TestDraft(t *testing.T) {
	rt := openRuntime(t)
	e := &draftExperts{kernels: newKernels(t, rt, tinyPath, 1, KernelConfig{})}
	m, err := rt.LoadModel(ModelConfig{Path: tinyPath, Experts: e.compute})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c, err := m.NewContext(ContextConfig{Tokens: 64, Batch: 16, Sequences: 3, UnifiedKV: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := m.NewSampler(SamplerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ps, err := m.NewPositionSampler(SamplerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer ps.Close()

	decodeAt(t, c.Decode, c, 0, 11, 12, 13)
	want := decodeAt(t, c.Decode, c, 3, 14)
	if !c.SeqRemove(0, 3, -1) {
		t.Fatal("the end of a sequence cannot be removed")
	}
	reals := e.reals
	guess := decodeAt(t, c.Draft, c, 3, 14)
	decodeAt(t, c.Draft, c, 4, 15)
	if e.drafts != 2*m.Layers() || e.reals != reals {
		t.Errorf("%d calls were drafts and %d were not, want %d and none", e.drafts, e.reals-reals, 2*m.Layers())
	}
	if len(guess) != m.VocabSize() || slices.Equal(guess, want) {
		t.Error("a draft without experts has the logits of the whole model, or none")
	}
	if _, err := s.Sample(c, 0); !errors.Is(err, errDraftLogits) {
		t.Errorf("a token of a draft is drawn: %v", err)
	}
	if _, err := ps.Sample(c, 0, 5, nil); !errors.Is(err, errDraftLogits) {
		t.Errorf("a token of a draft is drawn by position: %v", err)
	}
	c.SeqCopy(0, 1)
	for _, still := range []func(){
		func() {}, func() { c.SeqRemove(0, 4, -1) }, func() { c.SeqRemove(0, 3, 5) }, func() { c.SeqRemove(0, 3, -1) },
	} {
		still()
		b := NewBatch(1)
		b.Add(7, 0, 2, true) // of another sequence
		if err := c.Decode(t.Context(), b); !errors.Is(err, errDraftCells) {
			t.Fatalf("Decode beside cells of a draft: %v", err)
		}
	}
	c.SeqRemove(1, -1, -1)
	if got := decodeAt(t, c.Decode, c, 3, 14); !slices.Equal(got, want) {
		t.Error("the logits behind a removed draft are others than without it")
	}
	if _, err := s.Sample(c, 0); err != nil {
		t.Errorf("of a real batch: %v", err)
	}
}
