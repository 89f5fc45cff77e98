package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"kvasird/ggml"
)

// Stats counts since Open.
type Stats struct {
	Prompt    int64 // prompt tokens read
	Cached    int64 // and not read, since they were in the cells
	Generated int64 // tokens drawn
	Drafted   int64 // tokens guessed, and computed with the next one
	Accepted  int64 // and drawn
	Decodes   int64 // batches, passes for guesses left out
	Completed int64 // requests by how they ended
	Cancelled int64
	Failed    int64

	NoDrafts        string        // why answers are never drafted; "": they may be, or it was not asked for
	Running         int           // requests with a sequence
	Waiting         int           // requests in the queue
	Busy            time.Duration // time inside decodes, and for guesses
	TokensPerSecond float64       // generated, while decoding, over about the last five seconds
}

// Stats returns a copy.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.stats
	s.Running, s.Waiting = e.running, e.waiting.n
	return s
}

func (e *Engine) count(f func(*Stats)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(&e.stats)
}

// measure books a decode: its tokens, its time, and what it says of our health.
func (e *Engine) measure(busy []*slot, err error, aborted bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stats.Decodes++
	e.stats.Busy += e.took
	if err != nil {
		if !aborted && !errors.Is(err, ggml.ErrNoRoom) {
			e.health = err
		}
		return
	}
	if e.drafting.measured {
		e.drafting.costs.Round(e.batch.Len(), e.took)
	}
	for _, s := range busy {
		if s.take > 1 || s.g.generatedNone() {
			e.stats.Prompt += int64(s.take)
		}
	}
}

// pace takes in how many tokens the round drew.
func (e *Engine) pace(drawn int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if seconds := (e.took + e.drafting.spent).Seconds(); seconds > 0 {
		weight := 1 - math.Exp(-seconds/5)
		e.stats.TokensPerSecond += weight * (float64(drawn)/seconds - e.stats.TokensPerSecond)
	}
}

// Ready is nil after a Canary that passed, until a decode fails; then it is that
// failure until the next Canary passes. So whoever serves runs one at the start
// and again, from time to time, while Ready is not nil.
func (e *Engine) Ready() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return ErrClosed
	}
	return e.health
}

// canaryTokens are enough to reach many experts of every layer.
const canaryTokens = 32

// Canary sends tokens from all over the vocabulary through the whole model and
// draws one, in a sequence of its own. When it passes the engine is ready; a failure
// of the decode is remembered by Ready.
func (e *Engine) Canary(ctx context.Context) error {
	vocab := e.cfg.Model.VocabSize()
	n := min(canaryTokens, e.cfg.Context-1, vocab)
	req := Request{MaxTokens: 1}
	for i := range n {
		req.Prompt = append(req.Prompt, int32(i*vocab/n))
	}
	g, err := e.start(ctx, req, Extra{}, true)
	if err != nil {
		return fmt.Errorf("canary: %w", err)
	}
	for {
		_, err := g.Next(ctx)
		if errors.Is(err, io.EOF) {
			e.mu.Lock()
			e.health = nil
			e.mu.Unlock()
			return nil
		}
		if err != nil {
			return fmt.Errorf("canary: %w", err)
		}
	}
}
