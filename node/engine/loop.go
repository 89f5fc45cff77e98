package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"kvasird/ggml"
)

// slot is a sequence of the context.
type slot struct {
	seq  int
	g    *Generation // nil: free
	past int         // tokens of g that are in the cells
	take int         // tokens of g in the batch being built
	out  int         // batch index of the last of them when its logits are wanted, else -1; drafts follow

	guess guess // of the batch being built

	owner  string       // of what is in the cells
	kept   []ggml.Token // of a free slot: the tokens in its cells
	prompt int          // of them, or more, were the prompt
	used   uint64       // Engine.released when it became free; 0: its cells are empty
}

// pending is what is not in the cells yet: 1 while answering, more before.
func (s *slot) pending() int { return len(s.g.tokens) - s.past }

// loop owns the context until ctx ends.
func (e *Engine) loop(ctx context.Context) {
	defer close(e.ended)
	for ctx.Err() == nil {
		e.admit()
		busy := e.plan()
		if len(busy) == 0 {
			select {
			case <-e.wake:
			case <-ctx.Done():
			}
			continue
		}
		if !e.draft(ctx, busy) {
			continue
		}
		e.decode(ctx, busy)
	}
	e.failAll()
}

// admit drops requests whose callers are gone, then fills free sequences from
// the queue.
func (e *Engine) admit() {
	for i := range e.slots {
		if s := &e.slots[i]; s.g != nil {
			if cause := s.g.isGone(); cause != nil {
				e.release(s, cause, "")
			}
		}
	}
	e.mu.Lock()
	gone := func(g *Generation) bool {
		cause := g.isGone()
		if cause != nil {
			g.close(cause, "")
			e.stats.Cancelled++
		}
		return cause != nil
	}
	e.waiting.drop(gone)
	e.canaries.drop(gone)
	if s := e.canarySlot(); s.g == nil {
		s.g = e.canaries.pop()
	}
	e.mu.Unlock()
	for e.leastRecent() != nil {
		g := e.next()
		if g == nil {
			return
		}
		e.place(g)
	}
}

func (e *Engine) canarySlot() *slot { return &e.slots[e.cfg.Sequences] }

// next takes the request whose turn it is from the queue, or nil.
func (e *Engine) next() *Generation {
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.waiting.pop()
	if g != nil {
		e.running++
	}
	return g
}

// plan chooses each sequence's share of the next batch: one token for every
// answer, the rest for prompts. A canary goes alone.
func (e *Engine) plan() []*slot {
	if s := e.canarySlot(); s.g != nil {
		s.take = min(s.pending(), e.cfg.Batch)
		return []*slot{s}
	}
	var busy []*slot
	room := e.cfg.Batch
	for i := range e.slots {
		if s := &e.slots[i]; s.g != nil && s.pending() == 1 {
			s.take = 1
			room--
			busy = append(busy, s)
		}
	}
	if len(busy) > 0 {
		room = min(room, e.cfg.Chunk)
	}
	for i := range e.slots {
		if s := &e.slots[i]; s.g != nil && s.pending() > 1 && room > 0 {
			s.take = min(s.pending(), room)
			room -= s.take
			busy = append(busy, s)
		}
	}
	return busy
}

// decode runs one batch and delivers its tokens. A failure is narrowed down to
// the sequences that it concerns. What is kept of earlier requests makes room.
func (e *Engine) decode(ctx context.Context, busy []*slot) {
	err := e.run(ctx, busy)
	if err != nil && e.dropDrafts(busy, err) {
		err = e.run(ctx, busy)
	}
	for errors.Is(err, ggml.ErrNoRoom) && e.evict() {
		err = e.run(ctx, busy)
	}
	if err == nil {
		drawn := 0
		for _, s := range busy {
			drawn += e.deliver(s)
		}
		e.pace(drawn)
		return
	}
	for _, s := range busy {
		e.rewind(s)
	}
	switch {
	case ctx.Err() != nil || e.allGone(busy): // the loop ends, or admit drops them
	case len(busy) == 1:
		e.release(busy[0], fmt.Errorf("the model could not compute the next token: %w", err), "")
	default:
		e.cfg.Logger.Warn("decode failed, each sequence is tried alone", "sequences", len(busy), "error", err)
		for _, s := range busy {
			s.take = min(s.pending(), e.cfg.Batch)
			e.decode(ctx, []*slot{s})
		}
	}
}

// run decodes the planned tokens of the slots.
func (e *Engine) run(ctx context.Context, busy []*slot) error {
	e.batch.Reset()
	for _, s := range busy {
		s.out = -1
		for i := s.past; i < s.past+s.take; i++ {
			last := i == len(s.g.tokens)-1
			if last {
				s.out = e.batch.Len()
			}
			e.batch.Add(s.g.tokens[i], i, s.seq, last)
		}
		for i, t := range s.guess.drafts {
			e.batch.Add(t, s.past+s.take+i, s.seq, true)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !e.beginDecode(busy, cancel) {
		return context.Canceled
	}
	start := e.cfg.Now()
	err := e.ctx.Decode(ctx, e.batch)
	e.took = e.cfg.Now().Sub(start)
	e.endDecode(busy)
	e.measure(busy, err, ctx.Err() != nil)
	return err
}

// beginDecode lets leave abort the decode once all its requests are gone. False:
// they are gone already.
func (e *Engine) beginDecode(busy []*slot, abort context.CancelFunc) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inBatch = 0
	for _, s := range busy {
		s.g.mu.Lock()
		s.g.decoding = s.g.gone == nil
		if s.g.decoding {
			e.inBatch++
		}
		s.g.mu.Unlock()
	}
	e.abort = abort
	return e.inBatch > 0
}

func (e *Engine) endDecode(busy []*slot) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range busy {
		s.g.mu.Lock()
		s.g.decoding = false
		s.g.mu.Unlock()
	}
}

func (e *Engine) allGone(busy []*slot) bool {
	return !slices.ContainsFunc(busy, func(s *slot) bool { return s.g.isGone() == nil })
}

// rewind drops the cells of a failed batch. A model whose memory cannot drop a
// part loses all of the sequence and reads it again.
func (e *Engine) rewind(s *slot) {
	if !e.ctx.SeqRemove(s.seq, s.past, -1) {
		e.ctx.SeqRemove(s.seq, -1, -1)
		s.past = 0
		s.g.setCached(0)
	}
}

// deliver draws the next token of a sequence whose pending tokens are all in, and the one behind
// every draft that was drawn. It returns how many it drew.
func (e *Engine) deliver(s *slot) int {
	s.past += s.take
	g := s.g
	if !g.canary {
		e.cfg.Served(s.take, 0)
	}
	if s.out < 0 {
		return 0
	}
	before, accepted := len(g.tokens), 0
	finish, err := e.draw(g, s.out)
	for err == nil && accepted < len(s.guess.drafts) && s.guess.drafts[accepted] == g.tokens[len(g.tokens)-1] {
		accepted++
		finish, err = e.draw(g, s.out+accepted)
	}
	s.past += accepted
	if drafted := len(s.guess.drafts); drafted > 0 {
		e.takeBack(s)
		g.wrong += drafted - accepted
		e.count(func(st *Stats) { st.Accepted += int64(accepted) })
		if accepted > 0 {
			e.cfg.Served(accepted, 0)
		}
	}
	e.drafting.learn(s, g.tokens[before:], accepted)
	if err != nil {
		e.release(s, err, finish)
	}
	return accepted + 1
}

// draw draws the token behind an entry of the batch and hands it over. An error ends the answer;
// io.EOF: it is complete.
func (e *Engine) draw(g *Generation, out int) (finish string, err error) {
	t, err := g.sampler.Sample(e.ctx, out)
	if err != nil {
		return "", fmt.Errorf("the next token cannot be drawn: %w", err)
	}
	e.count(func(st *Stats) { st.Generated++ })
	g.left--
	p := piece{token: t}
	if g.extra.Logprobs {
		p.chosen, p.top = e.probs(e.ctx.Logits(out), t, g.extra.Top)
	}
	if e.cfg.Model.IsEOG(t) {
		g.add(p)
		return "stop", io.EOF
	}
	g.tokens = append(g.tokens, t)
	p.bytes = e.cfg.Model.Piece(t, g.extra.Special)
	g.add(p)
	if g.left == 0 {
		return "length", io.EOF
	}
	return "", nil
}

// release frees a sequence and ends its request. Its cells stay for the next one
// that begins likewise, unless it failed.
func (e *Engine) release(s *slot, err error, finish string) {
	g := s.g
	s.g = nil
	if whole := err == io.EOF || g.isGone() != nil; whole && !g.canary && s.past > 0 {
		e.keep(s, g)
	} else {
		e.drop(s)
	}
	s.past = 0
	e.mu.Lock()
	if !g.canary {
		e.running--
	}
	switch {
	case g.canary:
	case err == io.EOF:
		e.stats.Completed++
		e.perAnswer += (e.cfg.Now().Sub(g.started) - e.perAnswer) / time.Duration(min(e.stats.Completed, 16))
	case g.isGone() != nil:
		e.stats.Cancelled++
	default:
		e.stats.Failed++
	}
	e.mu.Unlock()
	g.close(err, finish)
}

// failAll ends what runs and waits when the engine closes.
func (e *Engine) failAll() {
	for i := range e.slots {
		if s := &e.slots[i]; s.g != nil {
			e.release(s, ErrClosed, "")
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	fail := func(g *Generation) bool {
		g.close(ErrClosed, "")
		e.stats.Failed++
		return true
	}
	e.waiting.drop(fail)
	e.canaries.drop(fail)
}
