package experts

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"kvasird/experts/audit"
)

// In service some answers, chosen by chance once they are here, are computed again by the own copy or
// by another replica, and compared (package audit). That is off the path of the call, which only
// leaves a copy of one row and its answer, and never waits for it: while auditsWaiting of them wait
// to be computed, no more are taken. What a worker is sent for an audit is a call like any other of
// one row, with a row of a real call, in the same session.
const (
	auditsWaiting = 4
	// mostAudited bounds the experts of a row that are compared.
	mostAudited = 16
	// UnknownBand is what two backends may differ by of which nothing is known, as the Max of
	// a tolerance.Delta measures it: some quantise rows, others do not.
	UnknownBand = 0.25
	// mostReplays bounds who computes a row again, at most so many beside who is audited.
	mostReplays = 3
)

// auditing is the audits of a dispatcher.
type auditing struct {
	free, waiting          chan *sample
	taken, skipped, nobody atomic.Uint64
	found, open            atomic.Uint64
}

// sample is an answer that is to be audited: one row of a call, with the experts that a worker
// computed it with.
type sample struct {
	program   *program
	by        string
	precision Precision
	row       []float32
	experts   []int32
	out       []float32 // a row for each expert
}

func newAuditing() *auditing {
	a := &auditing{free: make(chan *sample, auditsWaiting), waiting: make(chan *sample, auditsWaiting)}
	for range auditsWaiting {
		a.free <- &sample{}
	}
	return a
}

// AuditStats counts since the dispatcher was made.
type AuditStats struct {
	Audited uint64 // answers that were computed again
	Skipped uint64 // not taken, since others waited
	Nobody  uint64 // nobody else holds the expert
	Found   uint64 // workers that were found to be wrong
	Open    uint64 // two differed, and nobody could say who is wrong
}

// Audits returns the counters of audits.
func (d *Dispatcher) Audits() AuditStats {
	a := d.audits
	return AuditStats{a.taken.Load(), a.skipped.Load(), a.nobody.Load(), a.found.Load(), a.open.Load()}
}

// Audited is what an audit found of a worker, with what shows it.
type Audited struct {
	audit.Finding
	Layer           int
	Expert          int32
	Program, Inputs [sha256.Size]byte
	Answers         []audit.Answer // a row of each who computed that expert
}

// sample leaves a part that was answered to the audits, if chance chooses it.
func (r *run) sample(p *part) {
	d := r.d
	if d.cfg.AuditInterval == 0 || r.only != nil || p.hedged || p.sums || r.roll()%uint64(d.cfg.AuditInterval) != 0 {
		return
	}
	var s *sample
	select {
	case s = <-d.audits.free:
	default:
		d.audits.skipped.Add(1)
		return
	}
	c := r.call
	from := c.source(p.pairs[r.roll()%uint64(len(p.pairs))])
	s.program, s.by, s.precision = r.program, p.s.peer, p.as
	s.row, s.experts, s.out = append(s.row[:0], c.inputRow(from)...), s.experts[:0], s.out[:0]
	for _, pair := range p.pairs {
		if c.source(pair) == from && len(s.experts) < mostAudited {
			s.experts = append(s.experts, c.IDs[pair])
			s.out = append(s.out, c.Out[int(pair)*c.OutWidth:][:c.OutWidth]...)
		}
	}
	d.audits.waiting <- s // there is room for all that are
}

// audit judges samples until Close.
func (d *Dispatcher) audit() {
	for {
		select {
		case <-d.done:
			return
		case s := <-d.audits.waiting:
			d.judgeSample(s)
			s.program = nil
			d.audits.free <- s
		}
	}
}

// judgeSample has others compute a sample too, one after the other until it is known who is right.
func (d *Dispatcher) judgeSample(s *sample) {
	p := s.program
	answers := []audit.Answer{{By: s.by, Rows: s.out}}
	var found []audit.Finding
	if rows := d.ownAnswer(p, s.row, s.experts); rows != nil {
		answers = append(answers, audit.Answer{Rows: rows})
		found = audit.Judge(p.outWidth, answers, d.bands(s.precision))
	} else {
		for _, w := range d.others(s) {
			rows, err := d.replay(w, s)
			if err != nil {
				continue // it may be busy, or gone: who else holds the expert is asked
			}
			answers = append(answers, audit.Answer{By: w.peer, Rows: rows})
			found = audit.Judge(p.outWidth, answers, d.bands(s.precision))
			if len(found) == 0 || found[0].Outcome != audit.Open || len(answers) > mostReplays {
				break
			}
		}
	}
	if len(answers) < 2 {
		d.audits.nobody.Add(1)
		return
	}
	d.audits.taken.Add(1)
	d.conclude(s, answers, found)
}

// others are the sessions that may compute a sample again, in an order of chance.
func (d *Dispatcher) others(s *sample) (list []*session) {
	routes := s.program.routes.Load()
	for _, o := range routes.sessions {
		if o.peer != s.by && o.level() == trusted && !slices.ContainsFunc(list, func(l *session) bool { return l.peer == o.peer }) &&
			!slices.ContainsFunc(s.experts, func(e int32) bool { return !routes.has(e, func(h *session) bool { return h == o }) }) {
			list = append(list, o)
		}
	}
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

// replay has one worker compute a sample.
func (d *Dispatcher) replay(w *session, s *sample) ([]float32, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.MaxDeadline)
	defer cancel()
	return d.rowsOf(ctx, w, s.program, s.row, s.experts)
}

// ownAnswer is what the own copy computes, nil if it lacks one of the experts. It keeps calls from
// the own copy for no longer than one of them takes.
func (d *Dispatcher) ownAnswer(p *program, row []float32, experts []int32) (out []float32) {
	if d.cfg.Local == nil {
		return nil
	}
	d.held.using.RLock()
	defer d.held.using.RUnlock()
	held := d.held.set.Load()
	for _, e := range experts {
		if !held.holds(p.layer, e) {
			return nil
		}
	}
	for i := range experts {
		one := d.ownRows(p, row, experts[i:i+1])
		if one == nil {
			return nil
		}
		out = append(out, one...)
	}
	return out
}

// precisionBand is what rows of a precision may be off beside the band of two backends, since the
// own copy's, and another replica's of another precision, were not rounded like them.
var precisionBand = map[Precision]float64{F16: 0.01, BF16: 0.06, Q8: 0.12}

func (d *Dispatcher) bands(p Precision) audit.Bands {
	return func(a, b string) float64 { return d.cfg.Band(a, b) + precisionBand[p] }
}

// conclude takes in what an audit came to.
func (d *Dispatcher) conclude(s *sample, answers []audit.Answer, found []audit.Finding) {
	now := time.Now()
	d.mu.Lock()
	for _, a := range answers {
		outcome, why := audit.Alike, ""
		for _, f := range found {
			switch {
			case f.Culprit == a.By && a.By != "":
				outcome, why = f.Outcome, fmt.Sprintf("layer %d, expert %d: %s", s.program.layer, s.experts[f.Pair], f.Text())
			case f.Outcome == audit.Open && slices.Contains(f.Against, a.By):
				outcome = audit.Open
			}
		}
		if a.By != "" {
			d.standsLocked(a.By, outcome, why, now)
		}
	}
	d.mu.Unlock()
	for _, f := range found {
		expert := s.experts[f.Pair]
		log := d.cfg.Logger.With("layer", s.program.layer, "expert", expert, "distance", f.Distance, "allowed", f.Band)
		if f.Outcome == audit.Open {
			d.audits.open.Add(1)
			log.Warn("two expert workers differ, and there is no third to say which one is wrong", "peers", f.Against)
			continue
		}
		d.audits.found.Add(1)
		log.Warn("an audit found an expert worker", "peer", f.Culprit, "outcome", f.Outcome.String())
		if f.Outcome == audit.Wrong {
			d.cfg.Fault(f.Culprit, fmt.Errorf("an answer of layer %d, expert %d was audited: %s", s.program.layer, expert, f.Text()))
		}
		d.cfg.Found(s.evidence(f, answers))
	}
}

// evidence is what shows a finding.
func (s *sample) evidence(f audit.Finding, answers []audit.Answer) Audited {
	a := Audited{
		Finding: f, Layer: s.program.layer, Expert: s.experts[f.Pair],
		Program: sha256.Sum256(s.program.bytes), Inputs: sha256.Sum256(audit.RowBytes(s.row)),
	}
	for _, o := range answers {
		w := s.program.outWidth
		a.Answers = append(a.Answers, audit.Answer{By: o.By, Rows: slices.Clone(o.Rows[f.Pair*w:][:w])})
	}
	return a
}

// standsLocked changes the standing of a worker. One who is out has what it offers tried again
// before it gets calls once more. Dispatcher.mu is held.
func (d *Dispatcher) standsLocked(peer string, o audit.Outcome, why string, now time.Time) {
	t := d.tallyLocked(peer)
	if k := d.keepers[peer]; k != nil {
		t = k.tally
	}
	t.standing.Take(o, why, now)
	until := t.standing.Until(now)
	t.outUntil.Store(until.UnixNano())
	if until.IsZero() {
		t.outUntil.Store(0)
		return
	}
	for _, s := range d.sessions {
		if s.peer != peer {
			continue
		}
		for _, st := range s.programs {
			st.proved, st.again = nil, nil
		}
		s.mu.Lock()
		s.trust.Store(int32(s.trustLocked(now)))
		s.mu.Unlock()
		for p := range s.programs {
			d.routeLocked(p)
		}
		s.tellProver()
	}
	d.announceLocked()
}

// isOut says whether a worker gets no calls for what audits found of it.
func (t *tally) isOut(now time.Time) bool { return t.outUntil.Load() > now.UnixNano() }
