package ring

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"kvasird/p2p"
)

// Replan chooses another chain for a session. lost are the stages that it was lost by, refused by or
// will be left by, each once, in the order in which that happened; naming one of them again is
// possible. One that is busy is among them only the time after it said so, and where there is no
// chain without it, it is tried again after a while. Where the windows of the chain are those of the one before, the stages that stay go on
// where they are; otherwise all tokens are computed again. The error says why there is no chain.
type Replan func(ctx context.Context, lost []Hop) (Chain, error)

// Entry opens sessions for requests.
type Entry struct {
	cfg  EntryConfig
	ways ways
	loop sync.WaitGroup // pulse and sessions
	done chan struct{}

	mu        sync.Mutex // guards the rest, and the fields of sessions that say so
	sessions  map[uint64]*Session
	farewells map[*way][]farewell
	closing   bool
}

// NewEntry returns an entry that serves until Close.
func NewEntry(cfg EntryConfig) (*Entry, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Entry{cfg: cfg, sessions: map[uint64]*Session{}, farewells: map[*way][]farewell{}, done: make(chan struct{})}
	e.ways = ways{dialer: cfg.Dialer, timing: &e.cfg.Timing, logger: cfg.Logger, hello: e.hello, owner: e, mu: &e.mu}
	e.ways.init()
	e.loop.Go(e.pulse)
	return e, nil
}

func (e *Entry) hello(h Hop) hello {
	return hello{
		Version: wireVersion, Pack: e.cfg.Pack, Model: e.cfg.Model, Total: e.cfg.Total,
		Begin: h.Layers.Begin, End: h.Layers.End, Precision: F32,
	}
}

func (e *Entry) pulse() {
	tick := time.NewTicker(e.cfg.beat())
	defer tick.Stop()
	for {
		select {
		case <-e.done:
			return
		case <-tick.C:
		}
		e.mu.Lock()
		e.ways.beatLocked()
		e.mu.Unlock()
	}
}

// Close ends all sessions with ErrClosed and waits for them.
func (e *Entry) Close() error {
	e.mu.Lock()
	if !e.closing {
		e.closing = true
		close(e.done)
		for _, s := range e.sessions {
			s.cancel(ErrClosed)
		}
	}
	e.mu.Unlock()
	e.loop.Wait()
	e.ways.close()
	return nil
}

// Open runs a request over a chain and returns when the ring is closed, which is before the first
// token. When ctx ends, so does the session. replan may be nil: then nothing is repaired.
// Errors: those of Session.Next, and what is wrong with the request.
func (e *Entry) Open(ctx context.Context, chain Chain, req Request, replan Replan) (*Session, error) {
	if err := req.validate(); err != nil {
		return nil, fmt.Errorf("ring: %w", err)
	}
	if err := e.check(chain); err != nil {
		return nil, err
	}
	s := &Session{
		e: e, req: req, replan: replan, chain: chain, tokens: append([]int32(nil), req.Tokens...), read: len(req.Tokens),
		notify: make(chan struct{}, 1), kick: make(chan struct{}, 1), opened: make(chan struct{}), ended: make(chan struct{}),
	}
	var inner context.Context
	inner, s.cancel = context.WithCancelCause(ctx)
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		s.cancel(ErrClosed)
		return nil, ErrClosed
	}
	s.renewLocked()
	s.beginLocked(chain)
	e.loop.Go(func() { s.run(inner) })
	e.mu.Unlock()
	select {
	case <-s.opened:
		return s, nil
	case <-s.ended:
		return nil, s.err
	}
}

func (e *Entry) check(chain Chain) error {
	if err := chain.validate(); err != nil {
		return fmt.Errorf("ring: %w", err)
	}
	if n := chain.layers(); n != e.cfg.Total {
		return fmt.Errorf("ring: the chain ends at layer %d, nobody has layers %d:%d", n, n, e.cfg.Total)
	}
	return nil
}

// Canary sends one greedy token through a chain: the first one of the answer to a prompt.
func (e *Entry) Canary(ctx context.Context, chain Chain, prompt []int32) (int32, error) {
	s, err := e.Open(ctx, chain, Request{Tokens: prompt, MaxTokens: 1, NoDraft: true}, nil)
	if err != nil {
		return 0, err
	}
	defer s.Close()
	list, err := s.Next(ctx)
	if err != nil {
		return 0, err
	}
	return list[0], nil
}

// wayUpLocked opens the sessions that waited for a link.
func (e *Entry) wayUpLocked(w *way) {
	for _, s := range e.sessions {
		if s.next == w {
			s.sendOpenLocked()
		}
	}
	for _, c := range e.farewells[w] {
		w.l.send(frameClose, c.id, putClose(nil, c.closing))
	}
	delete(e.farewells, w)
}

// farewell is a CLOSE for a stage that the entry had no link to.
type farewell struct {
	id uint64
	closing
}

// farewellLocked tells all stages that a session is over, when those before them may be lost.
func (e *Entry) farewellLocked(s *Session) {
	f := farewell{s.id, closing{s.epoch, false, s.key}}
	for _, h := range s.chain {
		if w := e.ways.getLocked(h); w.l != nil {
			w.l.send(frameClose, f.id, putClose(nil, f.closing))
		} else {
			e.farewells[w] = append(e.farewells[w], f)
		}
	}
}

func (e *Entry) wayDownLocked(w *way, err error) {
	delete(e.farewells, w)
	code, text := trouble(err)
	for _, s := range e.sessions {
		if s.next == w {
			s.next = nil
			s.troubleLocked(report{s.epoch, code, 0, text})
		}
	}
}

func (e *Entry) wayUsedLocked(w *way) bool {
	for _, s := range e.sessions {
		if s.next == w {
			return true
		}
	}
	return false
}

func (e *Entry) wayDrained() {} // an entry sends no rows

// wayFrame serves a frame of a first stage.
func (e *Entry) wayFrame(w *way, f p2p.Frame) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.sessions[f.ID]
	if s != nil && s.next != w {
		s = nil // it goes another way by now: the frame is checked and passed over
	}
	var err error
	switch f.Type {
	case frameResume:
		_, err = decodeResume(f.Payload)
	case frameReady:
		var epoch uint32
		if epoch, err = decodeReady(f.Payload); err == nil && s != nil && epoch == s.epoch {
			s.readyLocked()
		}
	case frameTokens:
		var t tokens
		if t, err = decodeTokens(f.Payload); err == nil && s != nil && t.epoch == s.epoch {
			err = s.takeLocked(t)
		}
	case frameError:
		var r report
		if r, err = decodeReport(f.Payload); err == nil && s != nil && r.epoch == s.epoch {
			s.troubleLocked(r)
		}
	case frameClose:
		var c closing
		if c, err = decodeClose(f.Payload); err == nil && s != nil && c.epoch >= s.epoch {
			s.troubleLocked(report{s.epoch, CodeUnknown, 0, "the session was freed"})
		}
	case frameDrain:
		w.leaving = true
		for _, s := range e.sessions {
			if s.next == w {
				s.troubleLocked(report{s.epoch, CodeLeaving, 0, "the stage will stop"})
			}
		}
	default:
		err = fmt.Errorf("frame of type %d from a first stage", f.Type)
	}
	if err != nil {
		return violation(err)
	}
	return nil
}

// newKey returns a random session id and key.
func newKey() (id uint64, key []byte) {
	b := make([]byte, 8+keySize)
	rand.Read(b) // never fails
	return binary.LittleEndian.Uint64(b) | 1, b[8:]
}
