package ring

import (
	"fmt"
	"slices"
	"time"

	"kvasird/ring/draft"
)

// front is what the first stage has of a session beside the rest.
type front struct {
	tokens   []int32 // known: the prompt and what was drawn
	probs    []Prob  // if log-probabilities are asked for: of each of tokens; of those that the entry told, none
	finish   finish  // of the last token
	asked    int     // the last row that wants a token is at position asked-1
	drafting bool    // all stages can drop drafts
	guess    draft.Drafter
	wrong    int // drafts that were not accepted

	// The round that runs: tokens drafted behind position asked-1, and when it began.
	drafts []int32
	began  time.Time
}

// back is what the last stage has of a session beside the rest.
type back struct {
	told   int     // the first stage, or the entry if that is this one, was sent tokens before this position
	tokens []int32 // drawn.tokens, drawn.probs and drawn.finish as of the last Decode
	probs  []Prob
	finish finish

	drawn drawn // the loop's, without the lock
}

// drawn is the prompt, what was drawn, and the token drawn last. What was once in tokens and probs
// is not overwritten, so that others may read it.
type drawn struct {
	tokens []int32
	likely bool   // log-probabilities are asked for
	probs  []Prob // if so: of each of tokens; of those that were not drawn here, none
	finish finish // of the last token
}

// put sets the token of a position, after which there is none.
func (d *drawn) put(pos int, token int32, p Prob) {
	if pos < len(d.tokens) {
		d.tokens = slices.Clone(d.tokens[:pos])
		d.probs = slices.Clone(d.probs[:min(pos, len(d.probs))])
	}
	d.tokens, d.finish = append(d.tokens, token), running
	if d.likely {
		d.probs = append(d.probs, p)
	}
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
	limit, asked := s.known, &Sampling{}
	if drawn {
		limit, asked = s.total(), &s.sampling
	}
	if err := asked.checkProbs(&t); err != nil {
		return CodeProtocol, err.Error()
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
	switch {
	case !s.sampling.Logprobs:
	case drawn:
		f.probs = append(f.probs, t.probs[old-t.pos:]...)
	default:
		f.probs = append(f.probs, make([]Prob, len(fresh))...)
	}
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
		sendTokens(s.pred, s.id, s.tokensFrom(from, s.front.finish, s.front.tokens, s.front.probs))
	}
}

// tokensFrom is the tokens from a position on, as they are sent.
func (s *session) tokensFrom(pos int, finish finish, list []int32, probs []Prob) tokens {
	t := tokens{epoch: s.epoch, pos: pos, finish: finish, list: list[pos:]}
	if s.sampling.Logprobs {
		t.probs = probs[pos:]
	}
	return t
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
	f.wrong += len(f.drafts) - n
	f.guess.Observe(len(f.drafts), n, time.Since(f.began))
	st.count.accepted.Add(uint64(n))
	f.began = time.Time{}
}

// tellLocked sends the tokens that the last stage drew, and the first one does not know yet.
func (st *Stage) tellLocked(s *session) {
	b := s.back
	if b == nil || b.told >= len(b.tokens) {
		return
	}
	t := s.tokensFrom(b.told, b.finish, b.tokens, b.probs)
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
			d.put(pos, token, Prob{})
		}
		if !st.step.want[sh.at+i] || d.finish != running && pos == len(d.tokens)-1 {
			continue
		}
		next, err := sh.sampler.Sample(row+i, pos+1, d.tokens[min(s.prompt, pos+1):pos+1])
		if err != nil {
			return CodeCompute, fmt.Sprintf("the token at position %d cannot be drawn: %v", pos+1, err)
		}
		st.count.drawn.Add(1)
		sh.drew = min(sh.drew, pos+1)
		d.put(pos+1, next.Token, next.Prob)
		switch {
		case next.End:
			d.finish = finishStop
		case pos+1 >= s.total()-1:
			d.finish = finishLength
		}
	}
	return 0, ""
}
