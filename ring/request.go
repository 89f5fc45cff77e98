package ring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// Session is a request that runs. Next is for one goroutine at a time.
type Session struct {
	e      *Entry
	req    Request
	replan Replan
	cancel context.CancelCauseFunc
	notify chan struct{} // something changed for Next; capacity 1
	kick   chan struct{} // there is trouble; capacity 1
	opened chan struct{} // closed when the ring was closed for the first time
	ended  chan struct{} // closed when run is over; err is set then

	// Guarded by Entry.mu.
	id      uint64
	key     []byte
	epoch   uint32
	chain   Chain
	next    *way
	ready   bool      // the ring was closed
	holed   bool      // since then a stage was lost
	begun   time.Time // of this epoch
	tokens  []int32   // prompt and answer
	probs   []Prob    // of the answer, if they are asked for
	read    int       // tokens before this position were returned by Next
	told    int       // rows before this position were told to Served
	shown   []Prob    // of those that Next returned last
	finish  finish
	err     error // io.EOF: complete
	report  *report
	quit    []Hop // that will leave and are known to
	tries   int   // since the last token
	repairs int
}

// errOpenTimeout says that a ring did not close in time.
var errOpenTimeout = errors.New("the ring did not close in time")

// Next waits for tokens of the answer and returns those that there are. The last one of an answer
// that the model ended is its end token. io.EOF ends a complete answer; any other error a failed
// one, as *StageError where a stage is to blame; the tokens before it come first. When ctx ends
// while nothing is there, its error is returned and Next may be called again.
func (s *Session) Next(ctx context.Context) ([]int32, error) {
	for {
		s.e.mu.Lock()
		if s.read < len(s.tokens) {
			list := slices.Clone(s.tokens[s.read:])
			if s.req.Sampling.Logprobs {
				s.shown = s.probs[s.read-len(s.req.Tokens):]
			}
			s.read = len(s.tokens)
			s.e.mu.Unlock()
			return list, nil
		}
		err := s.err
		s.e.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-s.notify:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Probs is the log-probabilities of the tokens that Next returned last, where they were asked for.
func (s *Session) Probs() []Prob {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	return s.shown
}

// Finish says why a complete answer ended: "stop" (the model ended it) or "length". It is ""
// before.
func (s *Session) Finish() string {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	if s.err != io.EOF {
		return ""
	}
	return s.finish.String()
}

// Chain is the chain that the session runs on now, and Repairs how often it was changed or opened
// again.
func (s *Session) Chain() (chain Chain, repairs int) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	return s.chain, s.repairs
}

// Close ends the session and frees the stages. It does not wait for them.
func (s *Session) Close() error {
	s.cancel(ErrClosed)
	<-s.ended
	return nil
}

// partLocked tells the stages that the session is over, or only the first one that it is not in the
// ring any more. Stages behind one that is lost have to be told directly.
func (s *Session) partLocked(here bool) {
	if s.next != nil && s.next.l != nil {
		s.next.l.send(frameClose, s.id, putClose(nil, closing{s.epoch, here, s.key}))
	}
	if s.holed && !here && !s.e.closing {
		s.e.farewellLocked(s)
	}
}

// renewLocked gives the session another identity: stages know nothing of it.
func (s *Session) renewLocked() {
	delete(s.e.sessions, s.id)
	s.id, s.key = newKey()
	s.epoch = 0
	s.e.sessions[s.id] = s
}

// beginLocked opens the next epoch of the session.
func (s *Session) beginLocked(chain Chain) {
	s.epoch++
	s.chain, s.ready, s.report, s.begun = chain, false, nil, time.Now()
	s.next = s.e.ways.getLocked(chain[0])
	if s.next.l != nil {
		s.sendOpenLocked()
	}
}

// sendOpenLocked opens the session on the first stage, whose link is up.
func (s *Session) sendOpenLocked() {
	o := opening{
		Epoch: s.epoch, Key: s.key, Prompt: len(s.req.Tokens), Most: s.req.MaxTokens, Known: len(s.tokens),
		Drafts: !s.req.NoDraft, Sampling: s.req.Sampling,
	}
	o.setChain(s.chain)
	s.next.l.send(frameOpen, s.id, encodeControl(o))
	sendTokens(s.next.l, s.id, tokens{epoch: s.epoch, list: s.tokens})
	if s.next.leaving {
		s.troubleLocked(report{s.epoch, CodeLeaving, 0, "the stage will stop"})
	}
}

func (s *Session) readyLocked() {
	s.ready, s.holed = true, false
	select {
	case <-s.opened:
	default:
		close(s.opened)
	}
}

// takeLocked takes in tokens of the answer.
func (s *Session) takeLocked(t tokens) error {
	old, end := len(s.tokens), t.pos+len(t.list)
	if t.pos > old || end > len(s.req.Tokens)+s.req.MaxTokens {
		return fmt.Errorf("tokens at %d to %d, the next one is %d of %d", t.pos, end, old, len(s.req.Tokens)+s.req.MaxTokens)
	}
	if err := s.req.Sampling.checkProbs(&t); err != nil {
		return err
	}
	if end <= old || s.finish != running {
		return nil
	}
	if t.probs != nil {
		s.probs = append(s.probs, t.probs[old-t.pos:]...)
	}
	s.tokens, s.finish, s.tries = append(s.tokens, t.list[old-t.pos:]...), t.finish, 0
	if rows := len(s.tokens) - 1 - s.told; s.e.cfg.Served != nil { // the last token has no row yet
		s.e.cfg.Served(s.chain, rows)
		s.told += rows
	}
	s.wake()
	if s.finish != running {
		s.hurry()
	}
	return nil
}

// troubleLocked leaves a report to run. The first one of an epoch counts, but that a stage will
// leave is the least of all.
func (s *Session) troubleLocked(r report) {
	if r.hop >= len(s.chain) || r.code == CodeStale {
		return
	}
	if r.code == CodeLeaving && slices.Contains(s.quit, s.chain[r.hop]) {
		return
	}
	s.holed = s.holed || s.ready && r.code != CodeLeaving && !r.code.final()
	if s.report == nil || s.report.code == CodeLeaving && r.code != CodeLeaving {
		s.report = &r
		s.hurry()
	}
}

func (s *Session) wake() {
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

func (s *Session) hurry() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// run repairs the session until it is complete or cannot be repaired.
func (s *Session) run(ctx context.Context) {
	err := s.tend(ctx)
	e := s.e
	e.mu.Lock()
	delete(e.sessions, s.id)
	s.partLocked(false)
	s.err, s.next = err, nil
	e.mu.Unlock()
	s.cancel(err)
	close(s.ended)
	s.wake()
}
