package experts

import (
	"errors"
	"fmt"
	"net"
	"time"
)

// Who reads a session. A goroutine that is woken by another one costs more than the frame it
// is woken for, so a run that waits for a session reads it itself ("leads"), and hands out
// what comes for others. The session's own reader goroutine rests meanwhile. It reads
//   - when it is told to (resume): a heartbeat or program was sent, a run waits without
//     leading, or one stopped leading while others still wait; then as long as something is
//     owed;
//   - when nobody has led for restTick, to notice the end of the connection.
//
// A run that leads must not sleep through its own alarm, so a read can be interrupted: a read
// deadline in the past makes it return errInterrupted, between two frames only. Within a frame
// it goes on while bytes arrive, and gives the connection up when none does for stallLimit.
const (
	restTick   = 50 * time.Millisecond
	stallLimit = time.Second // a lost packet or two are sent again by then
	// leadBytes bounds the answer for which a run leads: a large one takes long to arrive,
	// and within a frame nobody can be interrupted.
	leadBytes = 256 << 10
)

var (
	errInterrupted = errors.New("read interrupted")
	longAgo        = time.Unix(1, 0)
)

// frameSource is the connection as the frame reader sees it.
type frameSource struct {
	net.Conn
	interruptible   bool  // set after the greeting
	given, consumed int64 // bytes: read from the connection, in whole frames
	pace            pace
}

func (c *frameSource) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.interruptible {
		c.pace.came(n, c.given == c.consumed)
	}
	c.given += int64(n)
	if err == nil || !c.interruptible || !timedOut(err) {
		return n, err
	}
	if n > 0 {
		return n, nil
	}
	if c.given == c.consumed {
		c.SetReadDeadline(time.Time{})
		return 0, errInterrupted
	}
	if n, err = c.finishFrame(b); n > 0 {
		c.pace.came(n, false)
	}
	c.given += int64(n)
	return n, err
}

// finishFrame reads on in spite of interruptions.
func (c *frameSource) finishFrame(b []byte) (int, error) {
	end := time.Now().Add(stallLimit)
	for {
		c.SetReadDeadline(end)
		n, err := c.Conn.Read(b)
		if n > 0 || err == nil || !timedOut(err) {
			c.SetReadDeadline(time.Time{})
			return n, err
		}
		if !time.Now().Before(end) {
			return 0, fmt.Errorf("nothing within %v in the middle of a frame", stallLimit)
		}
	}
}

func timedOut(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

// interrupt makes the read under way, or the next one, return soon.
func (s *session) interrupt() { s.conn.SetReadDeadline(longAgo) }

// tellReader has the reader goroutine read.
func (s *session) tellReader() {
	select {
	case s.resume <- struct{}{}:
	default:
	}
}

// turnLocked reads and handles one frame; rmu is held. An error other than errInterrupted ends
// the session, for every later turn too.
func (s *session) turnLocked() error {
	if s.broken != nil {
		return s.broken
	}
	f, err := s.next()
	if err == nil {
		err = s.handle(f)
	}
	if err != nil && err != errInterrupted {
		s.broken = err
	}
	return err
}

// owes says whether the worker has something to answer.
func (s *session) owes() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)+len(s.asked) > 0 || s.ponged.Load() < s.pingID
}

// read is the reader goroutine's part, until the session ends; it returns why it ended.
func (s *session) read() error {
	tick := time.NewTicker(restTick)
	defer tick.Stop()
	for {
		told := s.rest(tick.C)
		for more := true; more; more = s.owes() {
			s.rmu.Lock()
			var err error
			if !told || s.owes() || s.broken != nil {
				err = s.turnLocked()
			}
			s.rmu.Unlock()
			if err == nil || err == errInterrupted {
				continue
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.ended != nil { // this side closed it: that is why reading failed
				return s.ended
			}
			return err
		}
	}
}

// rest returns when the reader goroutine is needed, and whether it was told so.
func (s *session) rest(tick <-chan time.Time) (told bool) {
	for {
		select {
		case <-s.resume:
			return true
		case <-tick:
			if !s.led.Swap(false) {
				return false
			}
		}
	}
}

// lead has the run read the sessions that owe it something until they do not, or something
// else needs its attention. It returns false if the run must wait for others.
func (r *run) lead() (attention bool) {
	if r.d.cfg.NoLead || len(r.pending) > 0 || r.race.on {
		return false
	}
	for _, p := range r.parts {
		s := p.s
		if p.done.Load() || p.as.size(p.answers(), r.call.OutWidth) > leadBytes || !s.rmu.TryLock() {
			continue
		}
		s.led.Store(true)
		r.leading.Store(s) // before looking at event: from now on, whoever sends one interrupts
		var err error
		for !p.done.Load() && err == nil && len(r.event) == 0 {
			err = s.turnLocked()
		}
		r.leading.Store(nil)
		s.rmu.Unlock()
		if err != nil && err != errInterrupted || s.waitedFor() {
			s.tellReader()
		}
		if err == errInterrupted || len(r.event) > 0 || p.done.Load() && p.err != nil {
			return true
		}
	}
	return r.left.Load() == 0
}

// over says whether nothing can be sent any more.
func (s *session) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended != nil || s.leaving
}

// waitedFor says whether calls wait for the session.
func (s *session) waitedFor() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls) > 0
}
