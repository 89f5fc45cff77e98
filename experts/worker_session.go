package experts

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvasird/p2p"
)

// inlineTime bounds the calls that the reader of a session computes itself, by what the kernel
// took for earlier ones. Larger ones go through the queue, so that heartbeats are answered
// while they are computed. inlinePairs is the bound until that is known.
const (
	inlineTime  = 30 * time.Millisecond
	inlinePairs = 64
)

// workerSession is one dispatcher's session. Its methods belong to the reader goroutine.
type workerSession struct {
	*link
	w        *Worker
	peer     string           // the dispatcher's address, which is its peer id
	agreed   Precision        // of calls that are not f32
	programs []*workerProgram // by the dispatcher's number; nil: not set
	jobs     atomic.Int32     // calls in the queue, being computed, or with a reply to write
	revoked  atomic.Bool      // Worker.Recheck ended it

	// Guarded by Worker.mu.
	silent  int    // checks without a frame
	greeted bool   // the offer was answered
	told    uint64 // version of the last offer
	sent    uint64 // id of the last offer, which is 0 for the first
	taken   uint64 // id of the last one that the dispatcher knows of
	needed  bool   // while the worker is leaving: only it computes something for the dispatcher
}

// run greets the dispatcher and serves it until the connection ends.
func (s *workerSession) run() error {
	if err := s.handshake(); err != nil {
		return s.refuse(err)
	}
	s.startWriter(func(typ uint8) {
		if typ == frameReply || typ == frameError {
			s.jobs.Add(-1)
		}
	})
	for {
		f, err := s.next()
		if err == nil {
			err = s.handle(f)
		}
		if err != nil {
			return s.refuse(err)
		}
	}
}

func (s *workerSession) handshake() error {
	s.conn.SetDeadline(time.Now().Add(s.w.cfg.Handshake))
	s.w.mu.Lock()
	hello := s.w.hello
	s.told, s.needed = s.w.version, s.w.state == leaving
	s.w.mu.Unlock()
	if err := s.write(frameOffer, 0, hello); err != nil {
		return fmt.Errorf("offer: %w", err)
	}
	f, err := s.next()
	if err != nil {
		return fmt.Errorf("answer to the offer: %w", err)
	}
	if f.Type != frameWant || f.ID != 0 {
		return violation(fmt.Errorf("frame of type %d answers the offer", f.Type))
	}
	want, err := decodeWant(f.Payload)
	if err != nil {
		return violation(err)
	}
	if want.Model != s.w.cfg.Model {
		return &WrongModelError{Offered: s.w.cfg.Model, Wanted: want.Model}
	}
	s.agreed = want.Precision
	s.w.mu.Lock()
	s.greeted = true
	s.tellLocked()
	s.w.mu.Unlock()
	return s.conn.SetDeadline(time.Time{})
}

func (s *workerSession) handle(f p2p.Frame) error {
	if s.revoked.Load() {
		return fmt.Errorf("peer %s has lost the right to be served", s.peer)
	}
	switch f.Type {
	case frameTaken:
		return s.took(f.ID, f.Payload)
	case frameCall:
		return s.call(f)
	case frameProgram:
		return s.setProgram(f)
	case frameCancel, framePing:
		if len(f.Payload) != 0 {
			return violation(fmt.Errorf("frame of type %d with a payload", f.Type))
		}
		if f.Type == framePing {
			return s.write(framePong, f.ID, nil)
		}
		s.w.cancel(s, f.ID)
		return nil
	}
	return violation(fmt.Errorf("frame of type %d from a dispatcher", f.Type))
}

func (s *workerSession) setProgram(f p2p.Frame) error {
	number, layer, program, err := decodeProgram(f.Payload)
	if err != nil {
		return violation(err)
	}
	if int(number) < len(s.programs) && s.programs[number] != nil {
		return violation(fmt.Errorf("program number %d is set already", number))
	}
	p, refused := s.w.program(s, layer, program)
	if refused != nil {
		return s.reject(f.ID, refused)
	}
	if missing := int(number) + 1 - len(s.programs); missing > 0 {
		s.programs = append(s.programs, make([]*workerProgram, missing)...)
	}
	s.programs[number] = p
	return s.write(frameResult, f.ID, putResult(nil, p.rowWidth, p.outWidth))
}

// reject answers a request with an error. It waits for the peer to read, which holds up
// nobody else.
func (s *workerSession) reject(id uint64, e *RemoteError) error {
	switch e.Code {
	case CodeBusy:
		s.w.count.busy.Add(1)
	case CodeExpired:
		s.w.count.expired.Add(1)
	default:
		s.w.count.refused.Add(1)
	}
	return s.write(frameError, id, putError(nil, e.Code, e.Text))
}

// check returns the program of a call, or why it is refused.
func (s *workerSession) check(c *callFrame, served *served) (*workerProgram, *RemoteError) {
	if int(c.program) >= len(s.programs) || s.programs[c.program] == nil {
		return nil, &RemoteError{CodeProgram, fmt.Sprintf("program %d was not given", c.program)}
	}
	p := s.programs[c.program]
	if c.width != p.rowWidth {
		return nil, &RemoteError{CodeProgram, fmt.Sprintf("rows of %d, layer %d takes %d", c.width, p.layer, p.rowWidth)}
	}
	if size := 4 * len(c.row) * p.outWidth; size > MaxFrame {
		return nil, &RemoteError{CodeLimit, fmt.Sprintf("reply of %d bytes, at most %d", size, MaxFrame)}
	}
	if e := served.lacks(p.layer, c.expert); e >= 0 {
		return nil, &RemoteError{CodeExpert, fmt.Sprintf("expert %d of layer %d is not served here", e, p.layer)}
	}
	return p, nil
}

// call computes a small call at once if the kernel is free, and queues it otherwise.
func (s *workerSession) call(f p2p.Frame) error {
	c, err := decodeCall(f.Payload, s.agreed, s.w.cfg.MaxRows, s.w.cfg.MaxPairs)
	if err != nil {
		return violation(err)
	}
	w := s.w
	w.gate.RLock()
	served := w.served.Load()
	p, refused := s.check(&c, served)
	if refused == nil && w.isQuick(len(c.row)) && w.waiting.Load() == 0 && s.wmu.TryLock() {
		if w.kernel.TryLock() {
			if refused = w.unpaid(s, p, len(c.row)); refused == nil {
				return s.inline(f.ID, p, &c)
			}
			w.kernel.Unlock()
		}
		s.wmu.Unlock()
	}
	if refused == nil {
		refused = w.enqueue(s, f.ID, p, served.epoch, f.Payload)
	}
	w.gate.RUnlock()
	if refused != nil {
		return s.reject(f.ID, refused)
	}
	return nil
}

// inline computes into the frame of the reply and sends it. It is called with wmu, the gate and
// the kernel locked, and unlocks all.
func (s *workerSession) inline(id uint64, p *workerProgram, c *callFrame) error {
	defer s.wmu.Unlock()
	err := s.computeInline(p, c)
	s.w.kernel.Unlock()
	s.w.gate.RUnlock()
	if err != nil {
		s.w.count.refused.Add(1)
		text := putError(nil, CodeKernel, err.Error())
		return s.link.w.Write(p2p.Frame{Type: frameError, ID: id, Payload: text})
	}
	s.w.counted(s, p, len(c.row))
	s.w.count.batches.Add(1)
	return s.link.w.Send(frameReply, 0, id)
}

// computeInline leaves the reply to a call in the link's frame. The kernel is locked.
func (s *workerSession) computeInline(p *workerProgram, c *callFrame) error {
	if c.precision == F32 && !c.sums {
		payload, err := s.link.w.Payload(F32.size(len(c.row), p.outWidth))
		if err != nil {
			return err
		}
		return s.w.computeLocked(p, float32s(c.data), c.row, c.expert, float32s(payload))
	}
	b := &s.w.scratch
	b.rows = c.appendRows(b.rows[:0])
	b.out = sized(b.out, len(c.row)*p.outWidth)
	if err := s.w.computeLocked(p, b.rows, c.row, c.expert, b.out); err != nil {
		return err
	}
	out := b.out
	if c.sums {
		out = c.sumRows(out, p.outWidth)
	}
	reply := c.precision.orF32(out)
	payload, err := s.link.w.Payload(reply.size(c.answers(), p.outWidth))
	if err == nil {
		reply.put(payload, out, p.outWidth)
	}
	return err
}

// sized is a slice of n elements of any content, in the memory of list if that is enough.
func sized(list []float32, n int) []float32 { return slices.Grow(list[:0], n)[:n] }
