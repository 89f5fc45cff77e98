package ring

import (
	"bytes"
	"fmt"
	"time"

	"kvasird/p2p"
)

// wayUpLocked opens the sessions that waited for a link.
func (st *Stage) wayUpLocked(w *way) {
	for _, s := range st.sessions {
		if s.next == w {
			st.sendOpenLocked(s)
		}
	}
}

// wayDownLocked reports the loss of a successor.
func (st *Stage) wayDownLocked(w *way, err error) {
	code, text := trouble(err)
	for _, s := range st.sessions {
		if s.next == w {
			s.next, s.resumed = nil, false
			st.count.lost.Add(1)
			st.reportLocked(s, code, s.nextHop(), text)
		}
	}
}

func (st *Stage) wayUsedLocked(w *way) bool {
	for _, s := range st.sessions {
		if s.next == w {
			return true
		}
	}
	return false
}

func (st *Stage) wayDrained() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.flushLocked()
}

// wayFrame serves a frame of a successor.
func (st *Stage) wayFrame(w *way, f p2p.Frame) error {
	var err error
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[f.ID]
	if s != nil && s.next != w {
		s = nil // it goes another way by now: the frame is checked and passed over
	}
	switch f.Type {
	case frameResume:
		var r resume
		if r, err = decodeResume(f.Payload); err == nil && s != nil && r.epoch == s.epoch {
			st.resumedLocked(s, r)
		}
	case frameCredit:
		var epoch uint32
		var taken uint64
		if epoch, taken, err = decodeCredit(f.Payload); err == nil && s != nil && epoch == s.epoch {
			if taken > s.spent+maxContext {
				err = fmt.Errorf("credit for %d rows, %d were sent", taken, s.spent)
				break
			}
			s.allow = max(s.allow, taken)
			st.flushLocked()
		}
	case frameError:
		var r report
		if r, err = decodeReport(f.Payload); err == nil && s != nil && r.epoch == s.epoch {
			if r.code == CodeUnknown {
				r.hop, s.resumed = s.nextHop(), false
			}
			st.reportLocked(s, r.code, r.hop, r.text)
		}
	case frameClose:
		var c closing
		if c, err = decodeClose(f.Payload); err == nil && s != nil && c.epoch >= s.epoch && bytes.Equal(c.key, s.key) {
			st.freeLocked(s, nil, w)
		}
	case frameDrain:
		st.leavingLocked(w)
	default:
		err = fmt.Errorf("frame of type %d from a successor", f.Type)
	}
	if err != nil {
		return violation(err)
	}
	return nil
}

// leavingLocked tells the entries that a successor will stop.
func (st *Stage) leavingLocked(w *way) {
	w.leaving = true
	for _, s := range st.sessions {
		if s.next == w {
			st.reportLocked(s, CodeLeaving, s.nextHop(), "the stage will stop")
		}
	}
}

// resumedLocked learns what the successor has.
func (st *Stage) resumedLocked(s *session, r resume) {
	s.heard, s.resumed = time.Now(), true
	s.sent = s.sent[:0]
	for range r.have - len(r.tail) {
		s.sent = append(s.sent, unknownToken)
	}
	s.sent = append(s.sent, r.tail...)
	s.match, s.spent, s.credit, s.allow = 0, 0, uint64(r.credit), 0
	if s.next.leaving {
		st.reportLocked(s, CodeLeaving, s.nextHop(), "the stage will stop")
	}
	st.flushLocked()
	st.tellLocked(s)
}

// rows takes in a frame of rows.
func (st *Stage) rows(l *link, f *rowsFrame) {
	st.mu.Lock()
	defer st.mu.Unlock()
	now := time.Now()
	at := 0
	for i := range f.count() {
		g := f.segment(i)
		s := st.sessions[g.session]
		switch {
		case s == nil || s.pred != l && g.epoch >= s.epoch:
			l.send(frameError, g.session, putReport(nil, report{g.epoch, CodeUnknown, 0, "rows for a session that is not open on this link"}))
		case g.epoch < s.epoch || s.broken: // on its way when that changed
		default:
			s.heard = now
			st.count.rowsIn.Add(uint64(g.n))
			if code, text := st.takeRowsLocked(s, f, g, at); code != 0 {
				st.breakLocked(s, code, max(s.hop-1, 0), text)
			}
		}
		at += g.n
	}
	st.kick()
}

// takeRowsLocked queues the rows of a segment, of which the first is row at of the frame, or says
// what is wrong with them.
func (st *Stage) takeRowsLocked(s *session, f *rowsFrame, g segment, at int) (Code, string) {
	switch {
	case st.first:
		return CodeProtocol, "rows for a first stage, which takes tokens"
	case g.epoch > s.epoch:
		return CodeProtocol, fmt.Sprintf("rows of epoch %d, it is %d", g.epoch, s.epoch)
	case g.pos > len(s.have):
		return CodeProtocol, fmt.Sprintf("rows at position %d, the next one is %d", g.pos, len(s.have))
	case g.pos+g.n > s.total():
		return CodeProtocol, fmt.Sprintf("rows up to position %d, the session ends at %d", g.pos+g.n, s.total())
	}
	s.have = s.have[:g.pos]
	s.taken += uint64(s.in.truncate(g.pos))
	if s.in.len() == 0 {
		s.in.from = g.pos
	}
	if s.in.len()+g.n > st.window {
		return CodeProtocol, fmt.Sprintf("%d rows wait, at most %d may", s.in.len()+g.n, st.window)
	}
	drafts := 0
	for i := range g.n {
		token, flags := f.tokens[at+i], f.flags[at+i]
		if flags&rowDraft == 0 {
			drafts = 0
		} else if drafts++; drafts > MaxDraft || i == 0 {
			return CodeProtocol, fmt.Sprintf("%d drafts follow each other, or follow nothing", drafts)
		}
		s.have = append(s.have, token)
		if !unpackRow(s.in.add(token, flags), f.row(at+i), f.precision) {
			s.have = s.have[:g.pos+i]
			s.in.truncate(g.pos + i)
			return CodeRows, fmt.Sprintf("the row at position %d has elements that are not finite", g.pos+i)
		}
	}
	return 0, ""
}

// flushLocked sends what the successors may be sent, the rows of all sessions that go the same way
// together. On the last stage it has nothing to do.
func (st *Stage) flushLocked() {
	if st.last {
		return
	}
	for _, w := range st.ways.open {
		for w.l != nil && w.l.room() && st.flushWayLocked(w) {
		}
	}
}

// flushWayLocked sends one frame of rows; false: there are none.
func (st *Stage) flushWayLocked(w *way) bool {
	st.segments, st.senders = st.segments[:0], st.senders[:0]
	room, rows := mostRows(len(st.slots), st.cfg.Width, w.l.precision), 0
	for i := range st.slots {
		s := st.slots[i].s
		if s == nil || s.next != w || !s.resumed {
			continue
		}
		if from, n := s.sendable(room - rows); n > 0 {
			st.segments = append(st.segments, segment{s.id, s.epoch, from, n})
			st.senders = append(st.senders, s)
			rows += n
		}
	}
	if rows == 0 {
		return false
	}
	buf := getBuffer(frameRows, 0, rowsSize(len(st.segments), rows, st.cfg.Width, w.l.precision))
	f := layRows(buf.b, len(st.segments), rows, st.cfg.Width, w.l.precision)
	at := 0
	for i, g := range st.segments {
		s := st.senders[i]
		f.setSegment(i, g)
		copy(f.tokens[at:], s.out.tokens[g.pos:g.pos+g.n])
		copy(f.flags[at:], s.out.flags[g.pos:g.pos+g.n])
		for j := range g.n {
			packRow(f.row(at+j), s.out.row(g.pos+j), f.precision)
		}
		at += g.n
		s.sent = append(s.sent[:g.pos], s.out.tokens[g.pos:g.pos+g.n]...)
		s.match = g.pos + g.n
		s.spent += uint64(g.n)
	}
	st.count.rowsOut.Add(uint64(rows))
	w.l.post(buf)
	return true
}

// sendable says which rows the successor lacks and may be sent, at most room.
func (s *session) sendable(room int) (from, n int) {
	for s.match < s.out.len() && s.match < len(s.sent) && (s.sent[s.match] == s.out.tokens[s.match] || s.sent[s.match] == unknownToken) {
		s.match++
	}
	from = s.match
	if from == s.out.len() {
		return 0, 0
	}
	for from > 0 && s.out.flags[from]&rowDraft != 0 {
		from--
	}
	credit := s.credit + s.allow - s.spent
	return from, group(s.out.flags[from:], min(room, int(min(credit, maxContext))))
}
