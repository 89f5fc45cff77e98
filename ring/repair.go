package ring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// tend waits for what happens to a session and returns how it ended: io.EOF when complete.
func (s *Session) tend(ctx context.Context) error {
	var lost []Hop
	timer := time.NewTimer(s.e.cfg.OpenTimeout)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.kick:
		case <-timer.C:
		}
		r, late, done := s.state()
		switch {
		case done:
			return io.EOF
		case r == nil && late > 0: // not yet
			timer.Reset(late)
			continue
		case r == nil && late == 0: // all is well
			continue
		}
		var err error
		if lost, err = s.repair(ctx, r, lost); err != nil {
			return err
		}
		timer.Reset(s.e.cfg.OpenTimeout)
	}
}

// state is what there is to do: a report to act on; or none, and the time until the ring must be
// closed: 0 if it is, negative if it is over.
func (s *Session) state() (r *report, late time.Duration, done bool) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	r, s.report = s.report, nil
	if !s.ready {
		if late = s.e.cfg.OpenTimeout - time.Since(s.begun); late <= 0 {
			late = -1
		}
	}
	return r, late, s.finish != running
}

// repair opens a session again, on another chain if its stages cannot be kept. r is nil if the ring
// did not close in time.
func (s *Session) repair(ctx context.Context, r *report, lost []Hop) ([]Hop, error) {
	cause := error(errOpenTimeout)
	chain, again, avoid := s.chain, false, lost // only this goroutine changes the chain
	busy := r != nil && r.code == CodeBusy
	if r != nil {
		hop := chain[r.hop]
		cause = &StageError{r.hop, hop, r.code, r.text}
		if again = r.code == CodeReset; !again && !slices.Contains(lost, hop) {
			avoid = append(slices.Clone(lost), hop)
		}
		if !busy { // who is busy now is not so for good
			lost = avoid
		}
		if r.code.final() {
			return lost, cause
		}
		if r.code == CodeLeaving {
			return s.leave(ctx, hop, lost)
		}
	}
	if s.replan == nil && !again {
		return lost, cause
	}
	if err := s.pause(ctx); err != nil {
		return lost, fmt.Errorf("%w, the last time since %w", err, cause)
	}
	if !again {
		next, err := s.replan(ctx, slices.Clone(avoid))
		if err == nil {
			err = s.e.check(next)
		}
		switch {
		case ctx.Err() != nil:
			return lost, context.Cause(ctx)
		case err == nil:
			chain = next
		case !busy:
			return lost, fmt.Errorf("%w; no replacement: %w", cause, err)
		}
	}
	s.e.cfg.Logger.Info("ring session is repaired", "cause", cause.Error(), "stages", len(chain))
	s.change(chain)
	return lost, nil
}

var errRepairs = errors.New("the session was repaired too often without a token")

// pause counts a repair, and waits if those before did not help.
func (s *Session) pause(ctx context.Context) error {
	s.e.mu.Lock()
	s.tries++
	s.repairs++
	tries := s.tries
	s.e.mu.Unlock()
	if tries > s.e.cfg.Repairs {
		return errRepairs
	}
	if tries == 1 {
		return nil
	}
	select {
	case <-time.After(min(10*time.Millisecond<<tries, time.Second)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// leave moves the session away from a stage that will stop and still serves. If there is no other,
// the session stays until the stage is gone.
func (s *Session) leave(ctx context.Context, hop Hop, lost []Hop) ([]Hop, error) {
	s.e.mu.Lock()
	s.quit = append(s.quit, hop)
	s.e.mu.Unlock()
	if s.replan == nil {
		return lost, nil
	}
	chain, err := s.replan(ctx, slices.Clone(lost))
	if err == nil {
		err = s.e.check(chain)
	}
	switch {
	case ctx.Err() != nil:
		return lost, context.Cause(ctx)
	case err != nil || slices.Contains(chain, hop):
		return lost, nil
	}
	s.e.mu.Lock()
	s.repairs++
	s.e.mu.Unlock()
	s.change(chain)
	return lost, nil
}

// change moves the session to a chain.
func (s *Session) change(chain Chain) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	same := s.chain.sameWindows(chain)
	if !same || s.chain[0] != chain[0] {
		s.partLocked(same)
	}
	if !same {
		s.holed = false
		s.renewLocked()
	}
	s.beginLocked(chain)
}
