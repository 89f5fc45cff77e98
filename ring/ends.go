package ring

import (
	"fmt"
	"slices"
	"time"
)

// front is what the first stage has of a session beside the rest.
type front struct {
	tokens   []int32 // known: the prompt and what was drawn
	finish   finish  // of the last token
	asked    int     // the last row that wants a token is at position asked-1
	drafting bool    // all stages can drop drafts
	guess    drafter

	// The round that runs: tokens drafted behind position asked-1, and when it began.
	drafts []int32
	began  time.Time
}

// back is what the last stage has of a session beside the rest.
type back struct {
	told   int     // the first stage, or the entry if that is this one, was sent tokens before this position
	tokens []int32 // drawn.tokens and drawn.finish as of the last Decode
	finish finish

	drawn drawn // the loop's, without the lock
}

// drawn is the prompt, what was drawn, and the token drawn last. What was once in tokens is not
// overwritten, so that others may read it.
type drawn struct {
	tokens []int32
	finish finish // of the last token
}

// put sets the token of a position, after which there is none.
func (d *drawn) put(pos int, token int32) {
	if pos < len(d.tokens) {
		d.tokens = slices.Clone(d.tokens[:pos])
	}
	d.tokens, d.finish = append(d.tokens, token), running
}

// waiting says where the next row of the first stage begins, and whether there is one.
func (s *session) waiting() (from int, ok bool) {
	f := s.front
	if f.finish != running || len(f.tokens) <= f.asked {
		return 0, false
	}
	end := len(f.tokens)
	if end >= s.known {
		end-- // the last row has to be computed now, to draw a token
	}
	from = min(f.asked, s.cells) // rows behind asked are drafts: were they drawn?
	for from < s.cells && from < end && s.have[from] == f.tokens[from] {
		from++
	}
	return from, from < len(f.tokens)
}

// tokens takes in a TOKENS frame: from an entry, or from the last stage.
func (st *Stage) tokens(l *link, id uint64, t tokens) {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[id]
	switch {
	case s == nil || s.front == nil || t.epoch >= s.epoch && s.pred != l && s.ret != l:
		l.send(frameError, id, putReport(nil, report{t.epoch, CodeUnknown, 0, "tokens for a session that is not open on this link"}))
	case t.epoch < s.epoch || s.broken:
	case t.epoch > s.epoch:
		st.breakLocked(s, CodeProtocol, len(s.chain)-1, fmt.Sprintf("tokens of epoch %d, it is %d", t.epoch, s.epoch))
	default:
		if code, text := st.takeTokensLocked(s, t, s.ret == l); code != 0 {
			st.breakLocked(s, code, len(s.chain)-1, text)
		}
	}
	st.kick()
}

// takeTokensLocked learns tokens on the first stage and passes on those that are news to the entry.
func (st *Stage) takeTokensLocked(s *session, t tokens, drawn bool) (Code, string) {
	f := s.front
	s.heard = time.Now()
	old := len(f.tokens)
	limit := s.known
	if drawn {
		limit = s.total()
	}
	switch end := t.pos + len(t.list); {
	case t.pos > old:
		return CodeProtocol, fmt.Sprintf("tokens at position %d, the next one is %d", t.pos, old)
	case end > limit:
		return CodeProtocol, fmt.Sprintf("tokens up to position %d, the session ends at %d", end, limit)
	case end <= old || f.finish != running:
		return 0, "" // said before
	}
	fresh := t.list[old-t.pos:]
	f.tokens = append(f.tokens, fresh...)
	f.finish = t.finish
	if !drawn {
		return 0, ""
	}
	st.settleLocked(s, fresh)
	st.newsLocked(s, old)
	return 0, ""
}

// newsLocked tells the entry the tokens from a position on.
func (st *Stage) newsLocked(s *session, from int) {
	if s.pred != nil {
		sendTokens(s.pred, s.id, tokens{s.epoch, from, s.front.finish, s.front.tokens[from:]})
	}
}

// sendTokens sends tokens in as many frames as they need.
func sendTokens(l *link, id uint64, t tokens) {
	for len(t.list) > maxTokens {
		l.send(frameTokens, id, putTokens(nil, tokens{t.epoch, t.pos, running, t.list[:maxTokens]}))
		t.pos, t.list = t.pos+maxTokens, t.list[maxTokens:]
	}
	l.send(frameTokens, id, putTokens(nil, t))
}

// settleLocked learns from a round that ended.
func (st *Stage) settleLocked(s *session, drawn []int32) {
	f := s.front
	if f.began.IsZero() {
		return
	}
	n := 0
	for n < len(f.drafts) && n < len(drawn) && f.drafts[n] == drawn[n] {
		n++
	}
	f.guess.observe(len(f.drafts), n, time.Since(f.began))
	st.count.accepted.Add(uint64(n))
	f.began = time.Time{}
}

// tellLocked sends the tokens that the last stage drew, and the first one does not know yet.
func (st *Stage) tellLocked(s *session) {
	b := s.back
	if b == nil || b.told >= len(b.tokens) {
		return
	}
	t := tokens{s.epoch, b.told, b.finish, b.tokens[b.told:]}
	if len(s.chain) == 1 {
		b.told = len(b.tokens)
		if code, text := st.takeTokensLocked(s, t, true); code != 0 {
			st.breakLocked(s, code, s.hop, text)
		}
		return
	}
	if !s.resumed || s.next == nil || s.next.l == nil {
		return
	}
	b.told = len(b.tokens)
	sendTokens(s.next.l, s.id, t)
}

// draw draws the tokens that the rows of a share want, which are computed. It is the loop's,
// without the lock; its first row is row of the latest batch.
func (st *Stage) draw(sh *share, row int) (Code, string) {
	s, d := sh.s, &sh.s.back.drawn
	for i := range sh.n {
		pos, token, flags := sh.from+i, st.step.batch.Token[sh.at+i], st.step.flags[sh.at+i]
		switch {
		case flags&rowDraft != 0:
			if pos >= len(d.tokens) || d.tokens[pos] != token {
				continue // rejected, and with it what follows
			}
		case pos > len(d.tokens):
			return CodeProtocol, fmt.Sprintf("the row at position %d follows drafts that were rejected", pos)
		case pos == len(d.tokens) || d.tokens[pos] != token:
			d.put(pos, token)
		}
		if !st.step.want[sh.at+i] || d.finish != running && pos == len(d.tokens)-1 {
			continue
		}
		t, end := sh.sampler.Sample(row+i, pos+1, d.tokens[min(s.prompt, pos+1):pos+1])
		if t < 0 {
			return CodeCompute, fmt.Sprintf("no token could be drawn for position %d", pos+1)
		}
		st.count.drawn.Add(1)
		sh.drew = min(sh.drew, pos+1)
		d.put(pos+1, t)
		switch {
		case end:
			d.finish = finishStop
		case pos+1 >= s.total()-1:
			d.finish = finishLength
		}
	}
	return 0, ""
}
