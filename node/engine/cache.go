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
func (l *lane) place(g *Generation) {
	src, n := l.longest(g)
	dst := l.leastRecent()
	if src != nil && src.continues(n) {
		dst = src
	}
	switch {
	case n == 0:
		l.drop(dst)
	case dst != src:
		l.drop(dst)
		l.ctx.SeqCopy(src.seq, dst.seq)
	}
	if n > 0 && len(src.held()) > n && !l.ctx.SeqRemove(dst.seq, n, -1) { // whatever the architecture promised
		l.drop(dst)
		n = 0
	}
	dst.g, dst.past = g, n
	l.holds(dst, g.owner, nil)
	g.setCached(n)
	l.count(func(st *Stats) { st.Cached += int64(n) })
	if n > 0 {
		l.cfg.Served(0, n)
	}
}

// longest returns the slot with the longest prefix of a prompt that can be reused,
// nil when there is none.
func (l *lane) longest(g *Generation) (best *slot, n int) {
	for i := range l.slots {
		s := &l.slots[i]
		usable := l.usable(s, g)
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
func (l *lane) usable(s *slot, g *Generation) int {
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
	case !l.cfg.Model.CanTruncate(), l.ctx.SeqMin(s.seq) > max(0, n-l.cfg.Model.Window()):
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
func (l *lane) leastRecent() *slot {
	var found *slot
	for i := range l.slots {
		if s := &l.slots[i]; s.g == nil && (found == nil || s.used < found.used) {
			found = s
		}
	}
	return found
}

// keep leaves the cells of a request that is over for later ones.
func (l *lane) keep(s *slot, g *Generation) {
	l.released++
	s.used = l.released
	s.prompt = g.prompt
	l.holds(s, g.owner, slices.Clip(g.tokens[:s.past]))
}

// drop empties the cells of a slot.
func (l *lane) drop(s *slot) {
	l.ctx.SeqRemove(s.seq, -1, -1)
	s.used = 0
	l.holds(s, s.owner, nil)
}

// holds notes whose cells a slot has, and which it keeps. The engine reads it to choose a lane.
func (l *lane) holds(s *slot, owner string, kept []ggml.Token) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.owner, s.kept = owner, kept
}

// evict drops what is kept in the slot that was used least recently, to make room.
// False: nothing is kept any more.
func (l *lane) evict() bool {
	var oldest *slot
	for i := range l.slots {
		if s := &l.slots[i]; len(s.kept) > 0 && (oldest == nil || s.used < oldest.used) {
			oldest = s
		}
	}
	if oldest == nil {
		return false
	}
	l.drop(oldest)
	return true
}
