package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvasird/ggml"
)

// share is what a request has in a batch: inputs [from, to), the first of them in
// sequence seq, the others in the next ones.
type share struct {
	r         *embedding
	from, to  int
	seq       int
	vectors   [][]float32
	vectorErr error
}

// loop owns the context until ctx ends.
func (e *Embedder) loop(ctx context.Context) {
	defer close(e.ended)
	for ctx.Err() == nil {
		work, shares := e.plan(ctx)
		if len(shares) == 0 {
			select {
			case <-e.wake:
			case <-ctx.Done():
			}
			continue
		}
		e.decode(work, shares)
	}
	e.failAll()
}

// plan takes the requests whose turn it is, as far as a batch has room. One that is not
// whole by then waits again, behind the others. A canary goes alone. The batch is in
// progress from here on, until work ends.
func (e *Embedder) plan(ctx context.Context) (work context.Context, shares []share) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.canaries.pop(); r != nil {
		shares = append(shares, share{r: r, to: len(r.inputs)})
	}
	tokens, inputs := e.cfg.Batch, e.cfg.Inputs
	for len(shares) == 0 || !shares[0].r.canary {
		r := e.waiting.first()
		if r == nil || inputs == 0 || len(r.inputs[len(r.vectors)]) > tokens {
			break // who does not fit is the first of the next batch
		}
		e.waiting.pop()
		s := share{r: r, from: len(r.vectors), seq: e.cfg.Inputs - inputs}
		for s.to = s.from; s.to < len(r.inputs) && inputs > 0 && len(r.inputs[s.to]) <= tokens; s.to++ {
			tokens -= len(r.inputs[s.to])
			inputs--
		}
		shares = append(shares, s)
	}
	for _, s := range shares {
		if s.to < len(s.r.inputs) {
			e.waiting.push(s.r)
		}
	}
	work, e.abort = context.WithCancel(ctx)
	e.current = shares
	return work, shares
}

// decode computes a batch.
func (e *Embedder) decode(ctx context.Context, shares []share) {
	e.batch.Reset()
	for _, s := range shares {
		for i, input := range s.r.inputs[s.from:s.to] {
			for pos, t := range input {
				e.batch.Add(ggml.Token(t), pos, s.seq+i, true)
			}
		}
	}
	start := e.cfg.Now()
	err := e.ctx.Decode(ctx, e.batch)
	took := e.cfg.Now().Sub(start)
	for i := range shares {
		if err == nil {
			shares[i].read(e.ctx)
		}
	}
	e.ctx.SeqRemove(-1, -1, -1)
	e.finish(ctx, shares, took, err)
}

// read takes the vectors of a share out of the context.
func (s *share) read(c *ggml.Context) {
	for i := range s.to - s.from {
		v, err := unit(c.Embedding(s.seq + i))
		if err != nil {
			s.vectorErr = fmt.Errorf("input %d: %w", s.from+i, err)
			return
		}
		s.vectors = append(s.vectors, v)
	}
}

// finish books a batch, and ends the requests that are whole or failed.
func (e *Embedder) finish(ctx context.Context, shares []share, took time.Duration, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ctx.Err() != nil && err != nil { // all of them are gone, or the loop ends
		err = ErrClosed
	}
	e.abort() // the context is of no more use
	e.abort, e.current = nil, nil
	e.stats.Decodes++
	e.stats.Busy += took
	for _, s := range shares {
		switch failed := errors.Join(err, s.vectorErr); {
		case s.r.gone:
		case errors.Is(failed, ErrClosed):
			e.endLocked(s.r, ErrClosed)
		case failed != nil:
			if !onlyUnpaid(failed) {
				e.health = failed
			}
			e.endLocked(s.r, fmt.Errorf("the model could not compute the embeddings: %w", failed))
		default:
			rows := 0
			for _, input := range s.r.inputs[s.from:s.to] {
				rows += len(input)
			}
			e.stats.Prompt += int64(rows)
			if !s.r.canary {
				e.cfg.Served(rows, 0)
			}
			s.r.vectors = append(s.r.vectors, s.vectors...)
			if len(s.r.vectors) == len(s.r.inputs) {
				e.endLocked(s.r, nil)
			}
		}
	}
}

// endLocked ends a request.
func (e *Embedder) endLocked(r *embedding, err error) {
	e.dropLocked(r)
	if r.err = err; err != nil {
		r.vectors = nil
	}
	close(r.done)
	switch {
	case r.canary:
		if err == nil || onlyUnpaid(err) {
			e.health = nil
		}
	case err == nil:
		e.stats.Completed++
		e.perRequest += (e.cfg.Now().Sub(r.started) - e.perRequest) / time.Duration(min(e.stats.Completed, 16))
	default:
		e.stats.Failed++
	}
}

func (e *Embedder) dropLocked(r *embedding) {
	same := func(o *embedding) bool { return o == r }
	e.waiting.drop(same)
	e.canaries.drop(same)
}

// leave gives a request up, unless it ended. A decode that is for nobody else any more
// is aborted.
func (e *Embedder) leave(r *embedding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-r.done:
		return
	default:
	}
	r.gone = true
	e.dropLocked(r)
	if !r.canary {
		e.stats.Cancelled++
	}
	if e.abort != nil && !slices.ContainsFunc(e.current, func(s share) bool { return !s.r.gone }) {
		e.abort()
	}
}

// failAll ends what waits when the embedder closes.
func (e *Embedder) failAll() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for r := e.waiting.first(); r != nil; r = e.waiting.first() {
		e.endLocked(r, ErrClosed)
	}
	for r := e.canaries.first(); r != nil; r = e.canaries.first() {
		e.endLocked(r, ErrClosed)
	}
}

// Ready is that of an Engine.
func (e *Embedder) Ready() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return ErrClosed
	}
	return e.health
}

// Canary makes the embedding of tokens from all over the vocabulary. When it passes the
// embedder is ready; a failure is remembered by Ready.
func (e *Embedder) Canary(ctx context.Context) error {
	vocab := e.cfg.Model.VocabSize()
	input := make([]int32, min(canaryTokens, e.cfg.Context, vocab))
	for i := range input {
		input[i] = int32(i * vocab / len(input))
	}
	if _, err := e.embed(ctx, &embedding{inputs: [][]int32{input}, canary: true}); err != nil && !onlyUnpaid(err) {
		return fmt.Errorf("canary: %w", err)
	}
	return nil
}

// Stats counts since OpenEmbedder; nothing is generated. A request that goes on in a
// later batch waits.
func (e *Embedder) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.stats
	s.Running, s.Waiting = len(e.current), e.waiting.n
	return s
}
