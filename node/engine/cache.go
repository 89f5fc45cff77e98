package engine

import (
	"slices"

	"kvasird/ggml"
)

// leastReuse is the shortest prefix that is worth reusing: fewer tokens are read in
// no time, and a short question then gets the same answer to the bit however often
// it is asked.
const leastReuse = 32

// opening is about what a chat template writes in front of an answer, and may write
// otherwise, or leave out with the reasoning, once the conversation goes on.
const opening = 8

// held are the tokens in a slot's cells.
func (s *slot) held() []ggml.Token {
	if s.g != nil {
		return s.g.tokens[:s.past]
	}
	return s.kept
}

// place gives a request to a free slot, with as much of its prompt as some slot has
// in its cells. The last token is always computed, for its logits.
//
// A conversation goes on in its own slot. A prompt that only begins as another one
// shares those cells and goes to the slot that was used least recently, so that the
// other conversation keeps all of its own.
func (e *Engine) place(g *Generation) {
	src, n := e.longest(g)
	dst := e.leastRecent()
	if src != nil && src.continues(n) {
		dst = src
	}
	switch {
	case n == 0:
		e.drop(dst)
	case dst != src:
		e.drop(dst)
		e.ctx.SeqCopy(src.seq, dst.seq)
	}
	if n > 0 && len(src.held()) > n && !e.ctx.SeqRemove(dst.seq, n, -1) { // whatever the architecture promised
		e.drop(dst)
		n = 0
	}
	dst.g, dst.past, dst.owner, dst.kept = g, n, g.owner, nil
	g.setCached(n)
	e.count(func(st *Stats) { st.Cached += int64(n) })
	if n > 0 {
		e.cfg.Served(0, n)
	}
}

// longest returns the slot with the longest prefix of a prompt that can be reused,
// nil when there is none.
func (e *Engine) longest(g *Generation) (best *slot, n int) {
	for i := range e.slots[:e.cfg.Sequences] {
		s := &e.slots[i]
		usable := e.usable(s, g)
		if usable > n || usable == n && n > 0 && s.continues(n) {
			best, n = s, usable
		}
	}
	return best, n
}

// continues says whether a prompt that has the first n tokens in common goes on
// from the request that left them: it has all of that one's prompt.
func (s *slot) continues(n int) bool {
	return s.g == nil && n >= min(len(s.kept), s.prompt-opening)
}

// usable is how many of a slot's cells a request can begin with. Only those of its
// owner: from the time that an answer takes, or from its usage, one could learn
// what others asked.
func (e *Engine) usable(s *slot, g *Generation) int {
	if s.owner != g.owner {
		return 0
	}
	held := s.held()
	n := commonPrefix(held, g.tokens[:len(g.tokens)-1])
	switch {
	case n < leastReuse:
		return 0
	case n == len(held) && s.g == nil:
		return n
	case !e.cfg.Model.CanTruncate(), e.ctx.SeqMin(s.seq) > max(0, n-e.cfg.Model.Window()):
		return 0
	}
	return n
}

func commonPrefix(a, b []ggml.Token) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// leastRecent is the free slot that was used least recently; empty ones come first.
func (e *Engine) leastRecent() *slot {
	var found *slot
	for i := range e.slots[:e.cfg.Sequences] {
		if s := &e.slots[i]; s.g == nil && (found == nil || s.used < found.used) {
			found = s
		}
	}
	return found
}

// keep leaves the cells of a request that is over for later ones.
func (e *Engine) keep(s *slot, g *Generation) {
	e.released++
	s.used = e.released
	s.kept, s.prompt = slices.Clip(g.tokens[:s.past]), g.prompt
}

// drop empties the cells of a slot.
func (e *Engine) drop(s *slot) {
	e.ctx.SeqRemove(s.seq, -1, -1)
	s.kept, s.used = nil, 0
}

// evict drops what is kept in the slot that was used least recently, to make room.
// False: nothing is kept any more.
func (e *Engine) evict() bool {
	var oldest *slot
	for i := range e.slots {
		if s := &e.slots[i]; len(s.kept) > 0 && (oldest == nil || s.used < oldest.used) {
			oldest = s
		}
	}
	if oldest == nil {
		return false
	}
	e.drop(oldest)
	return true
}
