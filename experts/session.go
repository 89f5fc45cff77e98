package experts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/p2p"
)

const (
	// mostCalls bounds the calls of a session that wait for an answer, whatever it offers.
	mostCalls = 256
	// A first missed deadline costs a peer nothing but a heartbeat; each further one, until
	// forgiveAfter good answers, doubles the time that others are preferred to it. A refusal
	// or a wrong answer weighs as much as several, and for that time it is not asked at all.
	firstQuarantine = time.Second
	lastQuarantine  = time.Minute
	forgiveAfter    = 64
	missWeight      = 1
	refusalWeight   = 2
	faultWeight     = 4
)

// trust says whether a peer is given calls.
type trust int32

const (
	trusted trust = iota
	slow          // only what nobody else computes
	banned        // nothing: it may be frozen, or it answered wrongly
)

var errFull = errors.New("as many calls as the worker takes are waiting")

// session is the dispatcher's end of a session with one worker.
type session struct {
	*link
	d     *Dispatcher
	peer  string
	tally *tally
	offer offer // Slices is guarded by Dispatcher.mu

	precision Precision // of calls whose rows fit it

	lat    latency
	queued atomic.Int32  // pairs sent and not answered
	trust  atomic.Int32  // a trust; written under mu
	ponged atomic.Uint64 // the last heartbeat that was answered

	doubted     atomic.Uint64              // the heartbeat that it must answer to be preferred again
	leavingSoon atomic.Bool                // as the worker offers
	programs    map[*program]*programState // asked ones; guarded by Dispatcher.mu
	standing    uint64                     // order of its first proof, 0: none; guarded by Dispatcher.mu
	unproved    chan struct{}              // there may be something to try; capacity 1

	rmu    sync.Mutex    // held to read a frame; guards broken and the link's reading side
	broken error         // why reading ended
	led    atomic.Bool   // a run has led since this was last cleared
	resume chan struct{} // the reader goroutine is needed; capacity 1

	mu         sync.Mutex // guards the rest
	lastID     uint64
	calls      map[uint64]*part
	asked      map[uint64]*program
	bytes      int // of calls and asked
	offering   offering
	pingID     uint64
	pingAt     time.Time
	quiet      bool // no call waited for an answer since pingAt
	silent     int  // heartbeats without a frame
	misses     int  // weights of missed deadlines and wrong answers
	good       int  // answers since the last change of misses
	fault      bool
	quarantine time.Time // of a peer that is not trusted
	probe      uint64    // the heartbeat that it must answer first
	leaving    bool      // the worker sent GOAWAY
	ended      error
}

func newSession(d *Dispatcher, peer string, t *tally, conn net.Conn) *session {
	s := &session{
		link: newLink(conn), d: d, peer: peer, tally: t, programs: map[*program]*programState{},
		calls: map[uint64]*part{}, asked: map[uint64]*program{}, resume: make(chan struct{}, 1),
		unproved: make(chan struct{}, 1), offering: offering{credit: offersPerBeat},
	}
	s.trust.Store(int32(s.trustLocked(time.Now()))) // what was found in a session before holds
	return s
}

// handshake reads the offer and answers it, before the deadline of ctx.
func (s *session) handshake(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	s.conn.SetDeadline(deadline)
	f, err := s.next()
	if err != nil {
		return fmt.Errorf("offer: %w", err)
	}
	if f.Type == frameError && f.ID == 0 {
		refused, err := decodeError(f.Payload)
		if err != nil {
			return violation(err)
		}
		return refused
	}
	if f.Type != frameOffer || f.ID != 0 {
		return violation(fmt.Errorf("first frame is of type %d, want an offer", f.Type))
	}
	if s.offer, err = decodeOffer(f.Payload); err != nil {
		return violation(err)
	}
	s.precision = F32
	if slices.Contains(s.offer.Precisions, s.d.cfg.Precision) {
		s.precision = s.d.cfg.Precision
	}
	if err := s.write(frameWant, 0, encodeControl(want{wireVersion, s.d.cfg.Model, s.precision})); err != nil {
		return fmt.Errorf("answer to the offer: %w", err)
	}
	if s.offer.Model != s.d.cfg.Model {
		return &WrongModelError{Offered: s.offer.Model, Wanted: s.d.cfg.Model}
	}
	s.leavingSoon.Store(s.offer.State == leaving)
	s.source.interruptible = true
	return s.conn.SetDeadline(time.Time{})
}

// askLocked gives the worker a program of a layer that it serves. Dispatcher.mu is held.
func (s *session) askLocked(p *program) {
	if len(spansOf(s.offer.Slices, p.layer)) == 0 {
		return
	}
	s.programs[p] = &programState{}
	s.mu.Lock()
	s.lastID++
	id := s.lastID
	s.asked[id] = p
	s.bytes += len(p.bytes)
	s.mu.Unlock()
	s.post(outFrame{typ: frameProgram, id: id, payload: putProgram(nil, p.number, p.layer, p.bytes)})
	s.tellReader()
}

// heardAbout takes in the worker's answer about a program.
func (s *session) heardAbout(id uint64, rowWidth, outWidth int, refused string) error {
	s.mu.Lock()
	p := s.asked[id]
	delete(s.asked, id)
	if p != nil {
		s.bytes -= len(p.bytes)
	}
	s.mu.Unlock()
	if p == nil {
		return violation(fmt.Errorf("program result for request %d, which did not ask", id))
	}
	if refused == "" && (rowWidth != p.rowWidth || outWidth != p.outWidth) {
		refused = fmt.Sprintf("its layer %d maps rows of %d to %d, the backbone's %d to %d",
			p.layer, rowWidth, outWidth, p.rowWidth, p.outWidth)
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if st := s.programs[p]; st != nil {
		st.answered, st.refused = true, refused
	}
	s.tellProver()
	s.d.announceLocked()
	return nil
}

func (s *session) handle(f p2p.Frame) error {
	switch f.Type {
	case frameReply:
		return s.reply(f)
	case frameError:
		return s.failed(f)
	case frameResult:
		rowWidth, outWidth, err := decodeResult(f.Payload)
		if err != nil {
			return violation(err)
		}
		return s.heardAbout(f.ID, rowWidth, outWidth, "")
	case frameOffer:
		return s.reoffer(f)
	case framePong, frameGoAway:
		if len(f.Payload) != 0 {
			return violation(fmt.Errorf("frame of type %d with a payload", f.Type))
		}
		if f.Type == framePong {
			return s.pong(f.ID, time.Now())
		}
		return s.goAway()
	}
	return violation(fmt.Errorf("frame of type %d from a worker", f.Type))
}

// take claims the call of an answer: nil if nobody waits for it any more. The part is locked.
func (s *session) take(id uint64) (*part, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.calls[id]
	if p == nil {
		if id == 0 || id > s.lastID {
			return nil, violation(fmt.Errorf("answer to request %d, the last one was %d", id, s.lastID))
		}
		return nil, nil
	}
	s.forgetLocked(p)
	p.mu.Lock()
	return p, nil
}

func (s *session) forgetLocked(p *part) {
	delete(s.calls, p.id)
	s.bytes -= p.size
	s.queued.Add(-int32(len(p.pairs)))
	s.leaveLocked()
}

func (s *session) reply(f p2p.Frame) error {
	p, err := s.take(f.ID)
	if p == nil {
		return err
	}
	if err := p.fill(f.Payload); err != nil {
		s.d.cfg.Fault(s.peer, err)
		s.penalise(faultWeight, false)
		p.finish(err)
		return nil
	}
	s.lat.answered(time.Since(p.sent), p.ahead, len(p.pairs))
	if s.source.given == s.source.consumed { // nothing of another frame came with it
		s.lat.heard(s.source.pace.perByte())
	}
	s.tally.computed(p.run.program.layer, len(p.pairs))
	s.forgive()
	p.finish(nil)
	return nil
}

// forgive takes in a good answer.
func (s *session) forgive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.misses == 0 {
		return
	}
	if s.good++; s.good >= forgiveAfter {
		s.misses, s.good = s.misses-1, 0
	}
}

// failed takes in an error frame: for a call, for a program, or for the session.
func (s *session) failed(f p2p.Frame) error {
	e, err := decodeError(f.Payload)
	if err != nil {
		return violation(err)
	}
	if f.ID == 0 {
		return e
	}
	s.mu.Lock()
	_, asked := s.asked[f.ID]
	s.mu.Unlock()
	if asked {
		return s.heardAbout(f.ID, 0, 0, e.Error())
	}
	p, err := s.take(f.ID)
	if p == nil {
		return err
	}
	switch e.Code {
	case CodeBusy:
	case CodeUnpaid:
		s.d.cfg.Unpaid(s.peer)
	case CodeClosing:
		s.d.leave(s)
	case CodeExpired:
		s.penalise(missWeight, true)
	case CodeExpert:
		if s.offersAll(p) { // else it said so meanwhile
			s.penalise(refusalWeight, false)
		}
	default:
		s.penalise(refusalWeight, false)
	}
	p.finish(e)
	return nil
}

// offersAll says whether the worker still offers all experts of a part.
func (s *session) offersAll(p *part) bool {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	offered := spansOf(s.offer.Slices, p.run.program.layer)
	return !slices.ContainsFunc(p.pairs, func(pair int32) bool { return !contains(offered, p.run.call.IDs[pair]) })
}

// level is how much a peer is trusted with a call: one that is leaving or doubted is a last
// resort.
func (s *session) level() trust {
	t := trust(s.trust.Load())
	if t == trusted && (s.leavingSoon.Load() || s.isDoubted()) {
		return slow
	}
	return t
}

// isDoubted says whether the peer was outrun and has not answered a heartbeat since.
func (s *session) isDoubted() bool { return s.ponged.Load() < s.doubted.Load() }

// penalise takes in a missed deadline (missWeight) or a bad answer (more). A peer that is not
// known to be alive is probed and not asked until it answers.
func (s *session) penalise(weight int, alive bool) {
	s.tally.failed.Add(1)
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if trust(s.trust.Load()) != trusted {
		return // for the same reason, most likely: one pause makes every call in flight late
	}
	s.misses, s.good, s.fault = s.misses+weight, 0, weight > missWeight
	s.quarantine, s.probe = now, 0
	if s.misses > 1 {
		s.quarantine = now.Add(min(lastQuarantine, firstQuarantine<<min(s.misses-2, 16)))
	}
	if !alive {
		s.probe = s.pingLocked(now)
	}
	s.trust.Store(int32(s.trustLocked(now)))
	s.d.cfg.Logger.Warn("expert worker is suspect", "peer", s.peer, "weight", weight, "alive", alive)
}

// trustLocked is what the peer's record says of it now.
func (s *session) trustLocked(now time.Time) trust {
	switch {
	case s.ponged.Load() < s.probe, s.tally.isOut(now):
		return banned
	case !now.Before(s.quarantine):
		return trusted
	case s.fault:
		return banned
	}
	return slow
}

// ping sends a heartbeat and returns its id.
func (s *session) ping(now time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pingLocked(now)
}

func (s *session) pingLocked(now time.Time) uint64 {
	s.pingID, s.pingAt, s.quiet = s.pingID+1, now, len(s.calls) == 0
	s.post(outFrame{typ: framePing, id: s.pingID})
	s.tellReader()
	return s.pingID
}

// beat sends a heartbeat, or ends the session of a silent peer.
func (s *session) beat(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offering.credit = offersPerBeat
	if s.heard.Swap(false) {
		s.silent = 0
	} else if s.silent++; time.Duration(s.silent)*s.d.cfg.Heartbeat >= s.d.cfg.DeadAfter {
		s.ended = fmt.Errorf("silent for %v", s.d.cfg.DeadAfter)
		s.conn.Close()
		return
	}
	s.pingLocked(now)
}

func (s *session) pong(id uint64, now time.Time) error {
	s.mu.Lock()
	if id == 0 || id > s.pingID {
		defer s.mu.Unlock()
		return violation(fmt.Errorf("answer to heartbeat %d, the last one was %d", id, s.pingID))
	}
	if id == s.pingID {
		s.lat.pong(now.Sub(s.pingAt), s.quiet)
	}
	s.ponged.Store(max(id, s.ponged.Load()))
	before, after := trust(s.trust.Load()), s.trustLocked(now)
	s.trust.Store(int32(after))
	s.mu.Unlock()
	if before != after {
		s.d.announce()
	}
	return nil
}

// goAway stops sending to a worker that is stopping; what it still owes is awaited.
func (s *session) goAway() error {
	s.d.leave(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaving = true
	s.leaveLocked()
	return nil
}

// leaveLocked closes the session of a worker that is stopping once it owes nothing.
func (s *session) leaveLocked() {
	if s.leaving && len(s.calls) == 0 && s.ended == nil {
		s.ended = errors.New("the worker is stopping")
		s.conn.Close()
	}
}
