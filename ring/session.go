package ring

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"kvasird/p2p"
)

// session is a stage's part of a session. Stage.mu guards it.
type session struct {
	id       uint64
	key      []byte
	entry    string // peer id of who runs it
	epoch    uint32
	chain    Chain
	hop      int // of this stage
	seq      int
	prompt   int // tokens
	most     int // tokens of the answer
	known    int // tokens that the entry had when it opened this epoch
	drafts   bool
	sampling Sampling
	heard    time.Time // of anything
	reserved int64

	pred    *link     // nil: lost
	alone   time.Time // since when pred is nil
	next    *way      // nil: lost, or this is the only stage
	resumed bool      // next answered the OPEN of this epoch
	broken  bool      // takes no part until it is opened again
	gone    bool      // freed; the loop may still compute it

	have   []int32 // tokens of the rows that came: positions [0, len)
	cells  int     // positions that the Compute has
	share  int     // rows in the Decode that runs
	resets int     // in a row
	turn   uint64  // when it began to wait, for fairness; 0: it does not

	in          inbox  // not on the first stage
	taken, told uint64 // rows taken from in this epoch, and as said by CREDIT
	out         kept   // not on the last stage
	match       int    // rows of out that next has
	sent        []int32
	// Rows that next takes in this epoch, beside those that it has taken, and rows sent.
	credit, allow, spent uint64

	front *front // on the first stage
	back  *back  // on the last stage
	ret   *link  // on the first stage: from the last one. nil: the ring is open
}

// unknownToken stands in session.sent for a token that next has and did not say.
const unknownToken = -1

// total is the most positions of a session.
func (s *session) total() int { return s.prompt + s.most }

func (s *session) nextHop() int { return (s.hop + 1) % len(s.chain) }

// frame serves a frame of a predecessor.
func (st *Stage) frame(l *link, f p2p.Frame) error {
	var err error
	switch f.Type {
	case framePing:
		if len(f.Payload) == 0 {
			l.post(getBuffer(framePong, f.ID, 0))
			return nil
		}
		err = errors.New("ping with a payload")
	case frameOpen:
		var o opening
		if o, err = decodeOpening(f.Payload); err == nil {
			st.open(l, f.ID, &o)
		}
	case frameRows:
		var r rowsFrame
		if r, err = decodeRows(f.Payload, st.cfg.Width); err == nil {
			st.rows(l, &r)
		}
	case frameTokens:
		var t tokens
		if t, err = decodeTokens(f.Payload); err == nil {
			st.tokens(l, f.ID, t)
		}
	case frameClose:
		var c closing
		if c, err = decodeClose(f.Payload); err == nil {
			st.closed(l, f.ID, c)
		}
	default:
		err = fmt.Errorf("frame of type %d from a predecessor", f.Type)
	}
	if err != nil {
		return violation(err)
	}
	return nil
}

// open opens a session, or opens it again, or refuses to.
func (st *Stage) open(l *link, id uint64, o *opening) {
	st.mu.Lock()
	defer st.mu.Unlock()
	code, text := st.checkLocked(id, o)
	if code == 0 {
		code, text = st.enterLocked(l, id, o)
	}
	if code != 0 {
		l.send(frameError, id, putReport(nil, report{o.Epoch, code, o.Hop % len(o.chain), text}))
	}
}

// checkLocked says why an OPEN cannot be for this stage; 0: it can.
func (st *Stage) checkLocked(id uint64, o *opening) (Code, string) {
	c, me := &st.cfg, o.chain[o.Hop%len(o.chain)]
	s := st.sessions[id]
	switch {
	case me.Peer != c.Peer || me.Layers != c.Layers:
		return CodeModel, fmt.Sprintf("this is peer %s with layers %v", c.Peer, c.Layers)
	case o.chain.layers() != c.Total:
		return CodeModel, fmt.Sprintf("the chain has %d layers, the model %d", o.chain.layers(), c.Total)
	case o.Prompt+o.Most > c.Context:
		return CodeLimit, fmt.Sprintf("prompt of %d and answer of %d tokens, a session holds %d", o.Prompt, o.Most, c.Context)
	case o.Hop < len(o.chain) && !st.ways.roomLocked(o.chain[(o.Hop+1)%len(o.chain)]):
		return CodeBusy, fmt.Sprintf("links to %d stages are open or being opened", mostWays)
	case s == nil:
		return 0, ""
	case !bytes.Equal(s.key, o.Key):
		return CodeRights, "the session has another key"
	case o.Epoch < s.epoch || o.Epoch == s.epoch && o.Hop != len(o.chain):
		return CodeStale, fmt.Sprintf("epoch %d, it is %d", o.Epoch, s.epoch)
	case !s.chain.sameWindows(o.chain) || s.prompt != o.Prompt || s.most != o.Most:
		return CodeRequest, "the session was opened with other windows or lengths"
	}
	return 0, ""
}

// enterLocked takes in an OPEN that was checked.
func (st *Stage) enterLocked(l *link, id uint64, o *opening) (Code, string) {
	s := st.sessions[id]
	if o.Hop == len(o.chain) {
		if s == nil || s.epoch != o.Epoch || len(s.chain) == 1 {
			return CodeUnknown, "the ring is closed for a session or epoch that is not open"
		}
		st.closeRingLocked(l, s, o)
		return 0, ""
	}
	if s == nil {
		var code Code
		var text string
		if s, code, text = st.newSessionLocked(id, o); code != 0 {
			return code, text
		}
	}
	old := s.next
	oldEpoch := s.epoch
	s.epoch, s.chain, s.hop, s.known, s.drafts = o.Epoch, o.chain, o.Hop, o.Known, o.Drafts && st.cfg.CanTruncate
	s.pred, s.ret, s.broken, s.heard = l, nil, false, time.Now()
	if s.entry = o.Entry; o.Hop == 0 {
		s.entry = l.peer
	}
	s.taken, s.told, s.resumed, s.next = 0, 0, false, nil
	if s.back != nil {
		s.back.told = o.Known
	}
	st.resumeLocked(l, s)
	if f := s.front; f != nil && len(f.tokens) > o.Known { // what was on its way when the epoch changed
		st.newsLocked(s, o.Known)
	}
	if len(s.chain) == 1 {
		s.front.drafting = s.drafts
		l.send(frameReady, id, putReady(nil, s.epoch))
		st.tellLocked(s)
		st.kick()
		return 0, ""
	}
	hop := s.chain[s.nextHop()]
	if old != nil && old.hop != hop && old.l != nil {
		old.l.send(frameClose, id, putClose(nil, closing{oldEpoch, true, s.key}))
	}
	s.next = st.ways.getLocked(hop)
	if s.next.l != nil {
		st.sendOpenLocked(s)
	}
	st.kick()
	return 0, ""
}

// newSessionLocked reserves what a session needs.
func (st *Stage) newSessionLocked(id uint64, o *opening) (*session, Code, string) {
	if st.leaving || st.closing {
		return nil, CodeClosing, "the stage takes no new sessions"
	}
	rows := 0
	if !st.last {
		rows += o.Prompt + o.Most
	}
	if !st.first {
		rows += st.window
	}
	need := int64(rows) * int64(st.cfg.Width) * 4
	seq := st.slotLocked()
	for seq < 0 || st.reserved+need > st.cfg.MemoryBytes {
		orphan := st.orphanLocked()
		switch {
		case orphan != nil:
			st.cfg.Logger.Info("ring session freed: nobody took it over, and there is no room", "session", orphan.id)
			st.freeLocked(orphan, nil, nil)
			seq = st.slotLocked()
		case seq < 0:
			return nil, CodeBusy, fmt.Sprintf("all %d sequences are in use", len(st.slots))
		default:
			return nil, CodeBusy, fmt.Sprintf("%d bytes for rows are needed, %d of %d are free", need, st.cfg.MemoryBytes-st.reserved, st.cfg.MemoryBytes)
		}
	}
	s := &session{
		id: id, key: o.Key, seq: seq, prompt: o.Prompt, most: o.Most, sampling: o.Sampling, reserved: need,
		in: inbox{width: st.cfg.Width}, out: kept{width: st.cfg.Width},
	}
	if st.first {
		s.front = &front{}
	}
	if st.last {
		s.back = &back{drawn: drawn{likely: o.Sampling.Logprobs}}
	}
	st.reserved += need
	st.slots[seq].s = s
	st.sessions[id] = s
	return s, 0, ""
}

// slotLocked is a free sequence, -1 if there is none. A dirty one is cleaned before its first row.
func (st *Stage) slotLocked() int {
	seq := -1
	for i := range st.slots {
		if sl := &st.slots[i]; sl.s == nil && (seq < 0 || !sl.dirty) {
			if seq = i; !sl.dirty {
				break
			}
		}
	}
	return seq
}

// orphanTime is how long a session waits for a new predecessor before it makes room for another: a
// ring that is repaired comes sooner, and a stage that was stopped for a while is left with sessions
// that went on elsewhere.
const orphanTime = time.Second

// orphanLocked is the session that waits for a predecessor the longest, if one does for orphanTime.
func (st *Stage) orphanLocked() (oldest *session) {
	for _, s := range st.sessions {
		if s.pred == nil && time.Since(s.alone) >= orphanTime && (oldest == nil || s.alone.Before(oldest.alone)) {
			oldest = s
		}
	}
	return oldest
}

// resumeLocked answers an OPEN.
func (st *Stage) resumeLocked(l *link, s *session) {
	have := s.have
	if s.front != nil {
		have = s.front.tokens
	}
	r := resume{epoch: s.epoch, have: len(have), credit: st.window - s.in.len(), tail: have[max(len(have)-maxTail, 0):]}
	l.send(frameResume, s.id, putResume(nil, r))
}

// closeRingLocked takes the link of the last stage.
func (st *Stage) closeRingLocked(l *link, s *session, o *opening) {
	s.ret, s.heard = l, time.Now()
	s.front.drafting = o.Drafts && s.drafts
	st.resumeLocked(l, s)
	if s.pred != nil {
		s.pred.send(frameReady, s.id, putReady(nil, s.epoch))
	}
}

// sendOpenLocked opens a session on the next stage, whose link is up.
func (st *Stage) sendOpenLocked(s *session) {
	o := opening{
		Epoch: s.epoch, Key: s.key, Hop: s.hop + 1, Prompt: s.prompt, Most: s.most, Known: s.known, Drafts: s.drafts, Sampling: s.sampling,
		Entry: s.entry,
	}
	o.setChain(s.chain)
	s.next.l.send(frameOpen, s.id, encodeControl(o))
}

// reportLocked tells the entry what is wrong with a stage of the chain.
func (st *Stage) reportLocked(s *session, code Code, hop int, text string) {
	if s.pred != nil {
		s.pred.send(frameError, s.id, putReport(nil, report{s.epoch, code, hop, text}))
	}
}

// breakLocked ends this stage's part of a session until it is opened again, and reports why.
func (st *Stage) breakLocked(s *session, code Code, hop int, text string) {
	s.broken = true
	st.reportLocked(s, code, hop, text)
}

// closed serves a CLOSE of a predecessor, of the last stage, or of an entry that cannot reach those
// before this one.
func (st *Stage) closed(l *link, id uint64, c closing) {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[id]
	if s == nil || c.epoch < s.epoch || !bytes.Equal(c.key, s.key) {
		return
	}
	if c.here {
		st.dropLocked(s)
		return
	}
	st.freeLocked(s, l, nil)
}

// freeLocked frees a session here and tells its neighbours, but for those that told this stage.
func (st *Stage) freeLocked(s *session, but *link, butWay *way) {
	for _, l := range []*link{s.pred, s.ret} {
		if l != nil && l != but {
			l.send(frameClose, s.id, putClose(nil, closing{s.epoch, false, s.key}))
		}
	}
	if s.next != nil && s.next != butWay && s.next.l != nil {
		s.next.l.send(frameClose, s.id, putClose(nil, closing{s.epoch, false, s.key}))
	}
	st.dropLocked(s)
}

// dropLocked frees a session here. The loop drops its cells.
func (st *Stage) dropLocked(s *session) {
	delete(st.sessions, s.id)
	s.gone = true
	st.reserved -= s.reserved
	sl := &st.slots[s.seq]
	sl.s, sl.dirty = nil, true
	if s.share > 0 {
		if st.inBatch--; st.inBatch == 0 && st.abort != nil {
			st.abort()
		}
	}
	close(st.left)
	st.left = make(chan struct{})
	st.kick()
}
