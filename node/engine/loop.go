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

	owner  string       // of what is in the cells; written under Engine.mu
	kept   []ggml.Token // of a free slot: the tokens in its cells; written under Engine.mu
	prompt int          // of them, or more, were the prompt
	used   uint64       // lane.released when it became free; 0: its cells are empty
}

// pending is what is not in the cells yet: 1 while answering, more before.
func (s *slot) pending() int { return len(s.g.tokens) - s.past }

// loop owns the context until ctx ends.
func (l *lane) loop(ctx context.Context) {
	for ctx.Err() == nil {
		l.admit()
		busy := l.plan()
		if len(busy) == 0 {
			select {
			case <-l.wake:
			case <-ctx.Done():
			}
			continue
		}
		l.begin()
		drawn := 0
		if l.draft(ctx, busy) {
			drawn = l.decode(ctx, busy)
		}
		l.pace(drawn)
		l.addLane(ctx)
	}
	l.failAll()
}

// plan chooses each sequence's share of the next batch: one token for every
// answer, the rest for prompts. A canary goes alone.
func (l *lane) plan() []*slot {
	if s := l.canary; s != nil && s.g != nil {
		s.take = min(s.pending(), l.cfg.Batch)
		return []*slot{s}
	}
	var busy []*slot
	room := l.cfg.Batch
	for i := range l.slots {
		if s := &l.slots[i]; s.g != nil && s.pending() == 1 {
			s.take = 1
			room--
			busy = append(busy, s)
		}
	}
	if len(busy) > 0 {
		room = min(room, l.cfg.Chunk)
	}
	for i := range l.slots {
		if s := &l.slots[i]; s.g != nil && s.pending() > 1 && room > 0 {
			s.take = min(s.pending(), room)
			room -= s.take
			busy = append(busy, s)
		}
	}
	return busy
}

// decode runs one batch and delivers its tokens, which it counts. A failure is narrowed down to
// the sequences that it concerns. What is kept of earlier requests makes room.
func (l *lane) decode(ctx context.Context, busy []*slot) (drawn int) {
	err := l.run(ctx, busy)
	if err != nil && l.dropDrafts(busy, err) {
		err = l.run(ctx, busy)
	}
	for errors.Is(err, ggml.ErrNoRoom) && l.evict() {
		err = l.run(ctx, busy)
	}
	if err == nil {
		for _, s := range busy {
			drawn += l.deliver(s)
		}
		return drawn
	}
	for _, s := range busy {
		l.rewind(s)
	}
	switch {
	case ctx.Err() != nil || l.allGone(busy): // the loop ends, or admit drops them
	case len(busy) == 1:
		l.release(busy[0], fmt.Errorf("the model could not compute the next token: %w", err), "")
	default:
		l.cfg.Logger.Warn("decode failed, each sequence is tried alone", "sequences", len(busy), "error", err)
		for _, s := range busy {
			s.take = min(s.pending(), l.cfg.Batch)
			drawn += l.decode(ctx, []*slot{s})
		}
	}
	return drawn
}

// run decodes the planned tokens of the slots.
func (l *lane) run(ctx context.Context, busy []*slot) error {
	l.batch.Reset()
	for _, s := range busy {
		s.out = -1
		for i := s.past; i < s.past+s.take; i++ {
			last := i == len(s.g.tokens)-1
			if last {
				s.out = l.batch.Len()
			}
			l.batch.Add(s.g.tokens[i], i, s.seq, last)
		}
		for i, t := range s.guess.drafts {
			l.batch.Add(t, s.past+s.take+i, s.seq, true)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !l.beginDecode(busy, cancel) {
		return context.Canceled
	}
	start := l.cfg.Now()
	use, err := l.turn(ctx, func(ctx context.Context) error { return l.ctx.Decode(ctx, l.batch) })
	l.took = l.cfg.Now().Sub(start)
	l.endDecode(busy)
	l.measure(busy, use, err, ctx.Err() != nil)
	return err
}

// beginDecode lets leave abort the decode once all its requests are gone. False:
// they are gone already.
func (l *lane) beginDecode(busy []*slot, abort context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inBatch = 0
	for _, s := range busy {
		s.g.mu.Lock()
		s.g.decoding = s.g.gone == nil
		if s.g.decoding {
			l.inBatch++
		}
		s.g.mu.Unlock()
	}
	l.abort = abort
	return l.inBatch > 0
}

func (l *lane) endDecode(busy []*slot) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range busy {
		s.g.mu.Lock()
		s.g.decoding = false
		s.g.mu.Unlock()
	}
}

func (l *lane) allGone(busy []*slot) bool {
	return !slices.ContainsFunc(busy, func(s *slot) bool { return s.g.isGone() == nil })
}

// rewind drops the cells of a failed batch. A model whose memory cannot drop a
// part loses all of the sequence and reads it again.
func (l *lane) rewind(s *slot) {
	if !l.ctx.SeqRemove(s.seq, s.past, -1) {
		l.ctx.SeqRemove(s.seq, -1, -1)
		s.past = 0
		s.g.setCached(0)
	}
}

// deliver draws the next token of a sequence whose pending tokens are all in, and the one behind
// every draft that was drawn. It returns how many it drew.
func (l *lane) deliver(s *slot) int {
	s.past += s.take
	g := s.g
	if !g.canary {
		l.cfg.Served(s.take, 0)
	}
	if s.out < 0 {
		return 0
	}
	before, accepted := len(g.tokens), 0
	finish, err := l.draw(g, s.out)
	for err == nil && accepted < len(s.guess.drafts) && s.guess.drafts[accepted] == g.tokens[len(g.tokens)-1] {
		accepted++
		finish, err = l.draw(g, s.out+accepted)
	}
	s.past += accepted
	if drafted := len(s.guess.drafts); drafted > 0 {
		l.takeBack(s)
		g.wrong += drafted - accepted
		l.count(func(st *Stats) { st.Accepted += int64(accepted) })
		if accepted > 0 {
			l.cfg.Served(accepted, 0)
		}
	}
	l.drafting.learn(s, g.tokens[before:], accepted)
	if err != nil {
		l.release(s, err, finish)
	}
	return accepted + 1
}

// draw draws the token behind an entry of the batch and hands it over. An error ends the answer;
// io.EOF: it is complete.
func (l *lane) draw(g *Generation, out int) (finish string, err error) {
	t, err := g.sampler.Sample(l.ctx, out)
	if err != nil {
		return "", fmt.Errorf("the next token cannot be drawn: %w", err)
	}
	l.count(func(st *Stats) { st.Generated++ })
	g.left--
	p := piece{token: t}
	if g.extra.Logprobs {
		p.chosen, p.top = l.probs(l.ctx.Logits(out), t, g.extra.Top)
	}
	if l.cfg.Model.IsEOG(t) {
		g.add(p)
		return "stop", io.EOF
	}
	g.tokens = append(g.tokens, t)
	p.bytes = l.cfg.Model.Piece(t, g.extra.Special)
	g.add(p)
	if g.left == 0 {
		return "length", io.EOF
	}
	return "", nil
}

// release frees a sequence and ends its request. Its cells stay for the next one
// that begins likewise, unless it failed.
func (l *lane) release(s *slot, err error, finish string) {
	g := s.g
	s.g = nil
	if whole := err == io.EOF || g.isGone() != nil; whole && !g.canary && s.past > 0 {
		l.keep(s, g)
	} else {
		l.drop(s)
	}
	s.past = 0
	l.mu.Lock()
	if !g.canary {
		l.leftLocked()
	}
	switch {
	case g.canary:
	case err == io.EOF:
		l.stats.Completed++
		l.perAnswer += (l.cfg.Now().Sub(g.started) - l.perAnswer) / time.Duration(min(l.stats.Completed, 16))
	case g.isGone() != nil:
		l.stats.Cancelled++
	default:
		l.stats.Failed++
	}
	l.mu.Unlock()
	g.close(err, finish)
}

// failAll ends what the lane has when the engine closes.
func (l *lane) failAll() {
	for i := range l.slots {
		if s := &l.slots[i]; s.g != nil {
			l.release(s, ErrClosed, "")
		}
	}
}

// failWaiting ends what waits when the engine closes.
func (e *Engine) failWaiting() {
	e.mu.Lock()
	defer e.mu.Unlock()
	fail := func(g *Generation) bool {
		g.close(ErrClosed, "")
		e.stats.Failed++
		return true
	}
	e.waiting.drop(fail)
	e.canaries.drop(fail)
	for _, l := range e.lanes {
		for _, g := range l.given {
			fail(g)
			l.leftLocked()
		}
		l.given = nil
	}
}
