package ring

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"kvasird/ring/draft"
)

// share is one session's rows of a Decode.
type share struct {
	s       *session
	from, n int // positions
	at      int // index of the first row in the batch

	// Of the last stage.
	sampler Sampler
	known   int // of the session, when the batch was made
	drew    int // position of the first token drawn

	code Code // why it failed; 0: it did not
	text string
}

// step is the loop's own.
type step struct {
	ctx    context.Context // of Decodes, until one is ended
	cancel context.CancelFunc
	chores []chore
	order  []*session
	shares []share
	batch  Batch // views of the arrays below
	flags  []uint8

	seq, pos, token []int32
	rows, out       []float32
	want            []bool
}

// loop computes what waits, until the stage is closed.
func (st *Stage) loop() {
	st.newStep()
	for {
		select {
		case <-st.done:
			st.step.cancel()
			for i := range st.slots {
				if sm := st.slots[i].sampler; sm != nil {
					sm.Close()
				}
			}
			return
		case <-st.wake:
		}
		for {
			st.prepare()
			if !st.pick() {
				break
			}
			st.compute()
		}
	}
}

func (st *Stage) newStep() { st.step.ctx, st.step.cancel = context.WithCancel(context.Background()) }

// chore is what a sequence needs before its rows can be computed.
type chore struct {
	seq     int
	s       *session // nil: the sequence was freed
	from    int      // cells from here on are dropped; -1: none are
	sampler Sampler  // was made, or is to be closed
	err     error
}

// prepare does what sequences need: the Compute is only used without the lock.
func (st *Stage) prepare() {
	st.mu.Lock()
	st.step.chores = st.step.chores[:0]
	for i := range st.slots {
		st.choreLocked(i)
	}
	st.mu.Unlock()
	if len(st.step.chores) == 0 {
		return
	}
	for i := range st.step.chores {
		st.do(&st.step.chores[i])
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	for i := range st.step.chores {
		st.doneLocked(&st.step.chores[i])
	}
}

func (st *Stage) choreLocked(seq int) {
	sl := &st.slots[seq]
	if sl.dirty {
		st.step.chores = append(st.step.chores, chore{seq: seq, sampler: sl.sampler})
		return
	}
	from, ok := st.waitingLocked(sl.s)
	if !ok {
		return
	}
	c := chore{seq: seq, s: sl.s, from: -1}
	if from < sl.s.cells {
		c.from = from
	}
	if c.from >= 0 || st.last && sl.sampler == nil {
		st.step.chores = append(st.step.chores, c)
	}
}

// waitingLocked says whether a session has rows to compute, and from which position.
func (st *Stage) waitingLocked(s *session) (from int, ok bool) {
	switch {
	case s == nil || s.broken:
		return 0, false
	case st.first:
		return s.waiting()
	}
	return s.in.from, s.in.len() > 0
}

func (st *Stage) do(c *chore) {
	if c.s == nil {
		if c.sampler != nil {
			c.sampler.Close()
		}
		st.cfg.Compute.Truncate(c.seq, 0)
		return
	}
	if c.from >= 0 && !st.cfg.Compute.Truncate(c.seq, c.from) {
		st.cfg.Compute.Truncate(c.seq, 0)
		c.from = 0
		c.err = errReset
	}
	if st.last && c.err == nil && st.slots[c.seq].sampler == nil { // only the loop sets it
		c.sampler, c.err = st.cfg.Compute.NewSampler(c.s.sampling)
	}
}

// errReset says that the memory could not drop a part of a sequence, and has dropped all of it.
var errReset = fmt.Errorf("the memory of this model cannot drop a part of a sequence")

func (st *Stage) doneLocked(c *chore) {
	sl := &st.slots[c.seq]
	if c.s == nil {
		sl.sampler, sl.dirty = nil, false
		return
	}
	if c.sampler != nil {
		sl.sampler = c.sampler // closed with the slot if the session is gone
	}
	s := c.s
	if s.gone {
		return
	}
	if c.from >= 0 {
		s.cut(c.from)
	}
	switch {
	case c.err == errReset:
		st.resetLocked(s)
	case c.err != nil:
		st.breakLocked(s, CodeRequest, s.hop, c.err.Error())
	}
}

// cut drops what is computed at positions >= pos.
func (s *session) cut(pos int) {
	s.cells = min(s.cells, pos)
	s.out.truncate(pos)
	s.match = min(s.match, pos)
	if s.front != nil {
		s.have = s.have[:min(len(s.have), pos)]
	}
}

// resetLocked begins a session anew whose cells were lost. The first stage has its tokens; another
// one needs its rows again.
func (st *Stage) resetLocked(s *session) {
	s.cut(0)
	if s.front != nil {
		s.front.asked, s.front.drafts = 0, nil
		return
	}
	s.have = s.have[:0]
	s.in.truncate(0)
	s.in.from = 0
	s.in.compact()
	st.breakLocked(s, CodeReset, s.hop, errReset.Error())
}

// pick makes the next batch of what waits: a row of every answer, or on the first stage of so
// many that all stages have something to do, then as much of the prompts as fits. False: nothing
// waits.
func (st *Stage) pick() bool {
	p := &st.step
	st.mu.Lock()
	defer st.mu.Unlock()
	p.order, p.shares = p.order[:0], p.shares[:0]
	p.seq, p.pos, p.token, p.rows, p.flags = p.seq[:0], p.pos[:0], p.token[:0], p.rows[:0], p.flags[:0]
	for i := range st.slots {
		s := st.slots[i].s
		if from, ok := st.waitingLocked(s); ok && !st.slots[i].dirty && from == s.cells && (!st.last || st.slots[i].sampler != nil) {
			if s.turn == 0 {
				st.turn++
				s.turn = st.turn
			}
			p.order = append(p.order, s)
		}
	}
	slices.SortFunc(p.order, func(a, b *session) int { return cmp.Compare(a.turn, b.turn) })
	answers, quota, most := 0, st.quotaLocked(), st.cfg.Batch
	if slices.ContainsFunc(p.order, func(s *session) bool { return !st.isShort(s) }) {
		most -= st.cfg.Chunk // what is left has room for any draft with the row before it
	}
	for _, s := range p.order {
		if st.isShort(s) && answers < quota && st.shareLocked(s, most-len(p.pos)) {
			answers++
		}
	}
	room := st.cfg.Batch - len(p.pos)
	if answers > 0 || st.answeringLocked() {
		room = min(room, st.cfg.Chunk)
	}
	for _, s := range p.order {
		before := len(p.pos)
		if s.share == 0 && !st.isShort(s) && st.shareLocked(s, room) {
			room -= len(p.pos) - before
		}
	}
	st.inBatch = len(p.shares)
	return len(p.shares) > 0
}

// isShort says whether what waits of a session is a round of an answer, not a prompt.
func (st *Stage) isShort(s *session) bool {
	if st.first {
		return len(s.front.tokens)-s.cells == 1
	}
	return s.in.len() <= MaxDraft+1
}

// quotaLocked is how many answers the first stage has in a batch. With fewer than all of them
// several batches are under way, so that every stage has one.
func (st *Stage) quotaLocked() int {
	if !st.first {
		return len(st.slots)
	}
	busy, stages := 0, 1
	for i := range st.slots {
		if s := st.slots[i].s; s != nil && s.front.finish == running && s.front.asked > 0 {
			busy++
			stages = max(stages, len(s.chain))
		}
	}
	return max((busy+stages-1)/stages, 1)
}

// answeringLocked says whether some answer is under way, whose rows may come soon.
func (st *Stage) answeringLocked() bool {
	for i := range st.slots {
		if s := st.slots[i].s; s != nil && !s.broken && s.cells >= s.prompt && (s.front == nil || s.front.finish == running) {
			return true
		}
	}
	return false
}

// shareLocked adds rows of a session to the batch, at most room.
func (st *Stage) shareLocked(s *session, room int) bool {
	p := &st.step
	sh := share{s: s, from: s.cells, at: len(p.pos), known: s.known, drew: math.MaxInt, sampler: st.slots[s.seq].sampler}
	if st.first {
		st.fillFirstLocked(s, room)
	} else {
		n := group(s.in.flags[s.in.head:], room)
		at := s.in.head
		p.token = append(p.token, s.in.tokens[at:at+n]...)
		p.flags = append(p.flags, s.in.flags[at:at+n]...)
		p.rows = append(p.rows, s.in.rows[at*s.in.width:(at+n)*s.in.width]...)
		s.in.take(n)
		st.creditLocked(s, n)
	}
	if sh.n = len(p.token) - sh.at; sh.n == 0 {
		return false
	}
	if st.cfg.Allow != nil {
		if err := st.cfg.Allow(s.entry, sh.n); err != nil {
			p.token, p.flags, p.rows = p.token[:sh.at], p.flags[:sh.at], p.rows[:min(len(p.rows), sh.at*st.cfg.Width)]
			s.undo(sh.from)
			st.breakLocked(s, CodeUnpaid, s.hop, err.Error())
			return false
		}
	}
	for i := range sh.n {
		p.pos, p.seq = append(p.pos, int32(sh.from+i)), append(p.seq, int32(s.seq))
	}
	s.share, s.turn = sh.n, 0
	p.shares = append(p.shares, sh)
	return true
}

// fillFirstLocked adds known tokens, and drafts behind the last one.
func (st *Stage) fillFirstLocked(s *session, room int) {
	p, f := &st.step, s.front
	n := min(len(f.tokens)-s.cells, room)
	end := s.cells + n
	p.token = append(p.token, f.tokens[s.cells:end]...)
	for range n {
		p.flags = append(p.flags, 0)
	}
	s.have = append(s.have[:s.cells], f.tokens[s.cells:end]...)
	if end < len(f.tokens) || end < s.known || n == 0 {
		return
	}
	p.flags[len(p.flags)-1] = rowWant
	f.asked, f.drafts, f.began = end, nil, time.Time{}
	if n == 1 {
		f.began = time.Now() // how long a prompt takes tells nothing of a round
	}
	if f.drafting && n == 1 {
		most := min(room-1, s.total()-1-end)
		if st.cfg.Allow != nil { // stages are paid for tokens
			most = min(most, draft.Spare(end, f.wrong))
		}
		f.drafts = f.guess.Draft(f.tokens, most)
	}
	p.token = append(p.token, f.drafts...)
	s.have = append(s.have, f.drafts...)
	for range f.drafts {
		p.flags = append(p.flags, rowWant|rowDraft)
	}
	st.count.drafted.Add(uint64(len(f.drafts)))
}

// creditLocked lets the predecessor send more, once that is worth a frame.
func (st *Stage) creditLocked(s *session, n int) {
	s.taken += uint64(n)
	if s.taken-s.told >= uint64(st.window/2) && s.pred != nil {
		s.told = s.taken
		s.pred.send(frameCredit, s.id, putCredit(nil, s.epoch, s.taken))
	}
}
