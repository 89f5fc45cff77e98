//go:build cgo

package ggml

import (
	"context"
	"errors"
)

var (
	errDraftCells  = errors.New("cells of a draft are left: remove them before the next Decode")
	errDraftLogits = errors.New("the latest batch was a draft: its logits are a guess, of which no token is drawn")
)

// guesses are the cells that drafts filled and that were not removed since.
type guesses struct {
	from  []int // by sequence: the first position of such cells; -1: none
	count int   // sequences that have some
	last  bool  // the latest batch was a draft
}

func newGuesses(seqs int) guesses {
	g := guesses{from: make([]int, seqs)}
	for i := range g.from {
		g.from[i] = -1
	}
	return g
}

// add takes in that a position of a sequence is a guess.
func (g *guesses) add(seq, pos int) {
	switch from := &g.from[seq]; {
	case *from < 0:
		*from = pos
		g.count++
	case pos < *from:
		*from = pos
	}
}

// removed takes in that cells from p0 up to p1 are gone, as in SeqRemove.
func (g *guesses) removed(seq, p0, p1 int) {
	if seq < 0 {
		for i := range g.from {
			g.removed(i, p0, p1)
		}
		return
	}
	if from := &g.from[seq]; *from >= 0 && p1 < 0 && p0 <= *from {
		*from = -1
		g.count--
	}
}

// Draft is Decode where expert calls are drafts (ExpertCall.Draft), so that what comes of it is
// a guess. Its logits can be read, but no sampler draws from them. Until the cells of its tokens are
// removed (SeqRemove, up to the end of the sequence) only Draft goes on: Decode refuses.
func (c *Context) Draft(ctx context.Context, b *Batch) error { return c.decode(ctx, b, true) }

// beginDraft notes what the batch in progress guesses, or refuses to go on from a guess.
func (c *Context) beginDraft(b *Batch, draft bool) error {
	if !draft && c.guesses.count > 0 {
		return errDraftCells
	}
	c.guesses.last = draft
	if draft {
		for i := range b.Len() {
			c.guesses.add(int(b.seq[i]), int(b.pos[i]))
		}
	}
	return nil
}
