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
	Lanes           int           // contexts
	Running         int           // requests with a sequence
	Waiting         int           // requests in the queue
	Busy            time.Duration // time inside decodes, and for guesses, of all lanes
	TokensPerSecond float64       // generated, while some lane is at work, over about the last five seconds
}

// Stats returns a copy.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.stats
	s.Running, s.Waiting, s.Lanes = e.running, e.waiting.n, len(e.lanes)
	return s
}

func (e *Engine) count(f func(*Stats)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(&e.stats)
}

// measure books a decode: its tokens, its time, and what it says of our health.
func (l *lane) measure(busy []*slot, use *turnUse, err error, aborted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Decodes++
	l.stats.Busy += l.took
	if err != nil {
		if !aborted && !errors.Is(err, ggml.ErrNoRoom) && !onlyUnpaid(err) {
			l.health = err
		}
		return
	}
	if l.drafting.measured {
		l.drafting.costs.Round(l.batch.Len(), l.took)
	}
	if l.running >= leastApart {
		l.apart.observe(use, l.busyLanesLocked())
	}
	for _, s := range busy {
		if s.take > 1 || s.g.generatedNone() {
			l.stats.Prompt += int64(s.take)
		}
	}
}

// pace takes in that the lane's round is over, and how many tokens it drew.
func (l *lane) pace(drawn int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.passedLocked()
	l.active--
	if seconds := l.unpaced.Seconds(); seconds > 0 {
		weight := 1 - math.Exp(-seconds/5)
		l.stats.TokensPerSecond += weight * (float64(drawn)/seconds - l.stats.TokensPerSecond)
		l.unpaced = 0
	}
}

// onlyUnpaid says that those who compute a part want to know who pays, by an error's method Unpaid:
// they live, and requests that are paid are computed.
func onlyUnpaid(err error) bool {
	var u interface{ Unpaid() bool }
	return errors.As(err, &u) && u.Unpaid()
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
		if errors.Is(err, io.EOF) || onlyUnpaid(err) {
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
