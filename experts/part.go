package experts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// errGone says that a session ended while a call was being sent.
var errGone = errors.New("the session has just ended")

// part is what one worker was asked of one call. The run that made it owns it, except that
// the session's reader owns it from session.take to finish.
type part struct {
	run   *run
	s     *session
	pairs []int32   // positions in the call, ascending
	rows  int       // distinct rows of these
	sums  bool      // the answer is a sum for each of these
	size  int       // payload bytes
	as    Precision // of its rows and the answer

	id       uint64
	ahead    int // pairs that the worker was working on
	sent     time.Time
	deadline time.Time
	alarm    time.Time // when the run looks after it: when it is late, half way to the deadline, there
	half     time.Time // half way to the deadline; zero once it was late
	probe    uint64    // heartbeat sent on its behalf; 0: none
	filled   int       // pairs of Call.Out that it filled; set before done
	twin     bool      // asked because another part was late

	mu     sync.Mutex  // held by the reader while it fills Call.Out; guards hedged
	hedged bool        // other parts have the same pairs: each is filled by who claims it
	err    error       // set before done
	done   atomic.Bool // answered or failed: the run may have it back
}

// source is the input row of a pair.
func (c *Call) source(pair int32) int32 {
	if c.RowsPerToken == 1 {
		return pair / int32(c.Used)
	}
	return pair
}

// send gives the part to its session and writes its frame, or leaves that to the writer when
// the peer's socket might not take it. An error means that nothing was sent.
func (p *part) send(now time.Time) error {
	s, c := p.s, p.run.call
	cfg := &s.d.cfg
	p.as = p.precision()
	p.size = callSize(p.as, p.rows, len(p.pairs), c.RowWidth, p.sums)
	p.ahead = int(s.queued.Load())
	late, wait := s.lat.limits(p.ahead + len(p.pairs))
	wait = max(cfg.MinDeadline, min(cfg.MaxDeadline, wait))
	late = min(wait/2, max(cfg.MinHedge, late))
	p.sent, p.alarm, p.half, p.deadline, p.probe = now, now.Add(late), now.Add(wait/2), now.Add(wait), 0
	p.err, p.filled = nil, 0
	p.done.Store(false)

	s.mu.Lock()
	if s.ended != nil || s.leaving {
		s.mu.Unlock()
		return errGone
	}
	if len(s.calls) >= min(mostCalls, s.offer.Queue) {
		s.mu.Unlock()
		return errFull
	}
	s.lastID++
	p.id = s.lastID
	s.calls[p.id] = p
	s.quiet = false
	s.bytes += p.size
	s.queued.Add(int32(len(p.pairs)))
	direct := s.bytes <= directBytes
	s.mu.Unlock()

	millis := uint32((cfg.MaxDeadline + time.Millisecond - 1) / time.Millisecond)
	if !direct {
		buf := getBuffer(p.size)
		p.lay(buf.b, millis)
		s.post(outFrame{typ: frameCall, id: p.id, pooled: buf})
		return nil
	}
	s.wmu.Lock()
	payload, err := s.w.Payload(p.size)
	if err == nil {
		p.lay(payload, millis)
		err = s.w.Send(frameCall, 0, p.id)
	}
	s.wmu.Unlock()
	if err != nil {
		s.conn.Close() // the reader gives up every call of the session, this one too
	}
	return nil
}

// precision is that of the session, if the part's rows fit it.
func (p *part) precision() Precision {
	if p.s.precision == F32 {
		return F32
	}
	c, last := p.run.call, int32(-1)
	for _, pair := range p.pairs {
		if from := c.source(pair); from != last {
			last = from
			if !p.s.precision.fits(c.inputRow(from)) {
				return F32
			}
		}
	}
	return p.s.precision
}

// inputRow is a row by its index.
func (c *Call) inputRow(i int32) []float32 { return c.Rows[int(i)*c.RowWidth:][:c.RowWidth] }

// lay writes the call into a payload.
func (p *part) lay(payload []byte, millis uint32) {
	c, w := p.run.call, p.run.call.RowWidth
	f := layCall(payload, callFrame{program: p.run.program.number, deadline: millis, precision: p.as, rows: p.rows, width: w, sums: p.sums}, len(p.pairs))
	size := p.as.size(1, w)
	row, last := int32(-1), int32(-1)
	for i, pair := range p.pairs {
		if from := c.source(pair); from != last {
			row, last = row+1, from
			p.as.put(f.data[int(row)*size:][:size], c.inputRow(from), w)
		}
		f.row[i], f.expert[i] = row, c.IDs[pair]
		if p.sums {
			f.weight[i] = c.Weights[pair]
		}
	}
}

// answers is the rows of the answer.
func (p *part) answers() int {
	if p.sums {
		return p.rows
	}
	return len(p.pairs)
}

// fill writes an answer into Call.Out, if all of it is good. A sum is where its first pair is.
func (p *part) fill(payload []byte) error {
	c, as := p.run.call, p.as
	if len(payload) == F32.size(p.answers(), c.OutWidth) {
		as = F32
	}
	if want := as.size(p.answers(), c.OutWidth); len(payload) != want {
		return fmt.Errorf("answer of %d bytes, want %d", len(payload), want)
	}
	if !as.finite(payload, c.OutWidth) {
		return fmt.Errorf("answer with numbers that are not finite")
	}
	if p.hedged {
		p.run.race.mu.Lock()
		defer p.run.race.mu.Unlock()
	}
	size := as.size(1, c.OutWidth)
	for pairs := p.pairs; len(pairs) > 0; payload = payload[size:] {
		row := pairs[:1]
		for p.sums && len(row) < len(pairs) && c.source(pairs[len(row)]) == c.source(row[0]) {
			row = pairs[:len(row)+1]
		}
		pairs = pairs[len(row):]
		claimed := len(row)
		if p.hedged {
			claimed = p.run.race.claim(row)
		}
		if claimed == 0 {
			continue
		}
		as.get(c.Out[int(row[0])*c.OutWidth:][:c.OutWidth], payload[:size], c.OutWidth)
		p.filled += claimed
		if p.sums {
			p.run.hasSum(row)
		}
	}
	return nil
}

// hasSum takes in that Call.Out has a sum of some pairs, where it may have had some of their rows.
func (r *run) hasSum(pairs []int32) {
	for _, pair := range pairs {
		r.has[pair] = inASum
	}
	r.has[pairs[0]] = isSum
}

// finish ends a part that session.take claimed and locked, and wakes its run if that was
// waiting for it.
func (p *part) finish(err error) {
	r, s := p.run, p.s
	p.err = err
	matters := r.left.Add(-1) == 0 || err != nil || p.hedged
	p.done.Store(true)
	p.mu.Unlock()
	if (matters || r.hungry.Load()) && r.leading.Load() != s { // else it sees for itself
		r.wake()
	}
}

// revoke takes an unanswered part back. It returns false if the answer came first; then the
// part is done.
func (p *part) revoke() bool {
	s := p.s
	s.mu.Lock()
	waiting := s.calls[p.id] == p
	if waiting {
		s.forgetLocked(p)
	}
	s.mu.Unlock()
	if !waiting {
		p.mu.Lock() // wait for the reader to finish with Call.Out
		//lint:ignore SA2001 nothing is to be done under the lock
		p.mu.Unlock()
		return false
	}
	p.run.left.Add(-1)
	s.post(outFrame{typ: frameCancel, id: p.id})
	return true
}

// abandon fails all calls of a session that ended.
func (s *session) abandon(err error) {
	s.mu.Lock()
	s.ended = err
	var open []*part
	for _, p := range s.calls {
		open = append(open, p)
		p.mu.Lock()
	}
	for _, p := range open {
		s.forgetLocked(p)
	}
	s.mu.Unlock()
	for _, p := range open {
		p.finish(fmt.Errorf("session ended: %w", err))
	}
}

// finite says whether none of the float32 in b is infinite or not a number, that is, has all
// exponent bits set. Adding one to such an exponent carries into the sign's place, which the
// mask has cleared; two numbers are tested per word.
func finite(b []byte) bool {
	const (
		exponents = 0x7f800000_7f800000
		one       = 0x00800000_00800000
		carry     = 0x80000000_80000000
	)
	le := binary.LittleEndian
	var bad uint64
	for ; len(b) >= 32; b = b[32:] {
		bad |= le.Uint64(b)&exponents + one
		bad |= le.Uint64(b[8:])&exponents + one
		bad |= le.Uint64(b[16:])&exponents + one
		bad |= le.Uint64(b[24:])&exponents + one
	}
	for ; len(b) >= 4; b = b[4:] {
		bad |= uint64(le.Uint32(b))&exponents + one
	}
	return bad&carry == 0
}
