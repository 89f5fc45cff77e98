package ring

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// compute runs the batch that pick made and passes on what comes of it. A failure is narrowed down
// to the sessions that it concerns.
func (st *Stage) compute() {
	p := &st.step
	n := len(p.pos)
	p.batch = Batch{Seq: p.seq, Pos: p.pos, Token: p.token}
	if !st.first {
		p.batch.Rows = p.rows
	}
	if st.last {
		p.want = p.want[:0]
		for i := range p.shares {
			st.wantRows(&p.shares[i])
		}
		p.batch.Want = p.want
	} else {
		p.out = slices.Grow(p.out[:0], n*st.cfg.Width)[:n*st.cfg.Width]
		p.batch.Out = p.out
	}
	st.decodeAll()
	st.deliver()
}

// wantRows marks the rows of a share whose logits are sampled. A new last stage, which is refilled,
// draws what the entry does not know yet, and what drafts have to be compared with.
func (st *Stage) wantRows(sh *share) {
	flags := st.step.flags[sh.at : sh.at+sh.n]
	for i, f := range flags {
		drafts := f&rowDraft != 0 || i+1 < len(flags) && flags[i+1]&rowDraft != 0
		st.step.want = append(st.step.want, f&rowWant != 0 && (drafts || sh.from+i >= sh.known-1))
	}
}

// decodeAll runs the batch, and if that fails the share of each session alone. The tokens of a
// share are drawn before the next Decode.
func (st *Stage) decodeAll() {
	p := &st.step
	err := st.decode(&p.batch)
	switch {
	case err == nil:
		for i := range p.shares {
			st.drawShare(&p.shares[i], p.shares[i].at)
		}
	case len(p.shares) == 1 || p.ctx.Err() != nil:
		for i := range p.shares {
			st.fail(&p.shares[i], err)
		}
	default:
		st.cfg.Logger.Warn("decode failed, each session is tried alone", "sessions", len(p.shares), "error", err)
		for i := range p.shares {
			st.decodeAlone(&p.shares[i])
		}
	}
	if p.ctx.Err() != nil {
		st.newStep()
	}
}

// decodeAlone runs one share of a batch that failed.
func (st *Stage) decodeAlone(sh *share) {
	if !st.rewind(sh) {
		sh.code = CodeReset
		return
	}
	b := st.step.batch.part(sh.at, sh.n, st.cfg.Width)
	if err := st.decode(&b); err != nil {
		st.fail(sh, err)
		return
	}
	st.drawShare(sh, 0)
}

// rewind drops the cells of a share; false: all of the session's were dropped.
func (st *Stage) rewind(sh *share) bool {
	if st.cfg.Compute.Truncate(sh.s.seq, sh.from) {
		return true
	}
	st.cfg.Compute.Truncate(sh.s.seq, 0)
	return false
}

func (st *Stage) fail(sh *share, err error) {
	st.rewind(sh)
	sh.code, sh.text = CodeCompute, err.Error()
}

// drawShare draws the tokens of a share, whose rows in the latest batch begin at row.
func (st *Stage) drawShare(sh *share, row int) {
	if st.last {
		if sh.code, sh.text = st.draw(sh, row); sh.code != 0 {
			st.rewind(sh)
		}
	}
}

// decode runs a batch that is still wanted, and measures it.
func (st *Stage) decode(b *Batch) error {
	st.mu.Lock()
	if st.inBatch == 0 || st.closing {
		st.mu.Unlock()
		return context.Canceled
	}
	start := time.Now()
	st.abort, st.began = st.step.cancel, start
	st.mu.Unlock()
	err := st.cfg.Compute.Decode(st.step.ctx, b)
	took := time.Since(start)
	st.mu.Lock()
	defer st.mu.Unlock()
	st.abort = nil
	st.count.steps.Add(1)
	switch n := b.Len(); {
	case err != nil && st.step.ctx.Err() != nil && took >= st.cfg.StepTimeout:
		return fmt.Errorf("the stage computed for %v, at most %v are allowed: %w", took.Round(time.Millisecond), st.cfg.StepTimeout, err)
	case err != nil:
	case n == 1:
		smooth(&st.alone, took)
	default:
		smooth(&st.beside, took/time.Duration(n))
	}
	return err
}

// smooth moves an average towards a measurement.
func smooth(average *time.Duration, d time.Duration) {
	if *average == 0 {
		*average = d
	}
	*average += (d - *average) / 8
}

// deliver takes in what a batch computed and sends it on.
func (st *Stage) deliver() {
	st.mu.Lock()
	defer st.mu.Unlock()
	for i := range st.step.shares {
		sh := &st.step.shares[i]
		sh.s.share = 0
		if !sh.s.gone {
			st.deliverLocked(sh)
		}
		sh.s, sh.sampler = nil, nil
	}
	st.inBatch = 0
	st.flushLocked()
}

func (st *Stage) deliverLocked(sh *share) {
	s, p := sh.s, &st.step
	if sh.code == CodeReset && s.resets < mostResets {
		s.resets++
		st.resetLocked(s)
		return
	}
	if sh.code != 0 {
		st.count.failed.Add(1)
		s.undo(sh.from)
		hop := s.hop
		if sh.code == CodeProtocol { // of the rows that came
			hop = max(hop-1, 0)
		}
		st.breakLocked(s, sh.code, hop, sh.text)
		return
	}
	s.cells, s.resets = sh.from+sh.n, 0
	if st.cfg.Computed != nil {
		st.cfg.Computed(s.entry, sh.n)
	}
	if st.last {
		d := &s.back.drawn
		s.back.tokens, s.back.probs, s.back.finish = d.tokens, d.probs, d.finish
		s.back.told = min(s.back.told, sh.drew)
		st.tellLocked(s)
		return
	}
	s.out.confirm()
	for i := range sh.n {
		at := sh.at + i
		s.out.add(p.out[at*st.cfg.Width:(at+1)*st.cfg.Width], p.token[at], p.flags[at])
	}
}

// undo drops a share that is not computed, and what waits behind it.
func (s *session) undo(from int) {
	s.cut(from)
	if s.front != nil {
		s.front.asked = 0
		return
	}
	s.have = s.have[:min(len(s.have), from)]
	s.in.truncate(0)
	s.in.from = len(s.have)
}

// mostResets is how often in a row a session whose memory cannot drop a part is begun anew since a
// batch with others failed.
const mostResets = 2

// part is some rows of a batch.
func (b *Batch) part(at, n, width int) Batch {
	o := Batch{Seq: b.Seq[at : at+n], Pos: b.Pos[at : at+n], Token: b.Token[at : at+n]}
	if b.Rows != nil {
		o.Rows = b.Rows[at*width : (at+n)*width]
	}
	if b.Want != nil {
		o.Want = b.Want[at : at+n]
	}
	if b.Out != nil {
		o.Out = b.Out[at*width : (at+n)*width]
	}
	return o
}
