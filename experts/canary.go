package experts

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// Before a worker is given calls for the experts of a span, it must have computed a row with
// some of them, and where others can compute the same row most of them must agree. The
// backbone's own copy is always right; between two workers that differ and nobody else, the one
// that has served for longer is believed, and the other one is not used, but not held to have
// lied either.
const (
	// tolerance is how far, relative to its length, a row may lie from another backend's.
	tolerance = 0.05
	// mostWitnesses is how many others are asked for a row, if there is no own copy.
	mostWitnesses = 2
	// trialsAtOnce bounds the programs for which a worker is tried at a time.
	trialsAtOnce = 8
	// triedSpans bounds the spans that are tried in one call.
	triedSpans = 64
	// sampled bounds the elements of a row that are kept.
	sampled = 512
	// mostEvidence bounds the experts of a program of which rows are kept.
	mostEvidence = 256

	firstProofRetry = 500 * time.Millisecond
	lastProofRetry  = 30 * time.Second
)

// programState is what a session's worker said about a program and showed of it.
type programState struct {
	answered bool
	refused  string // why; empty if accepted
	proved   []span // what calls are sent for
	again    []span // of that, what is to be tried once more, since the worker may have loaded it anew
	failed   []span // what was tried last, in vain
	trouble  string // why
	trying   bool   // a trial is under way
	retry    time.Time
	wait     time.Duration // the pause before retry
}

// open says whether a first call of the program should wait: the worker was not heard or tried.
func (st *programState) open(offered []span) bool {
	return !st.answered || st.refused == "" && len(subtract(offered, union(st.proved, st.failed))) > 0
}

// evidence is a row that somebody computed for a canary.
type evidence struct {
	by  *session // nil: the backbone's own copy
	row []float32
}

// isOf reports whether it is a row of the same worker, which may have two sessions.
func (e evidence) isOf(s *session) bool {
	return e.by == s || e.by != nil && s != nil && e.by.peer == s.peer
}

func (s *session) tellProver() {
	select {
	case s.unproved <- struct{}{}:
	default:
	}
}

// prove tries what the worker offers, until ctx ends.
func (s *session) prove(ctx context.Context) {
	var trials sync.WaitGroup
	defer trials.Wait()
	room := make(chan struct{}, trialsAtOnce)
	for ctx.Err() == nil {
		p, spans, at := s.d.nextProof(s, time.Now())
		if p != nil {
			room <- struct{}{}
			trials.Go(func() {
				s.d.tryOut(ctx, s, p, spans)
				<-room
			})
			continue
		}
		var later <-chan time.Time
		if !at.IsZero() {
			later = time.After(time.Until(at))
		}
		select {
		case <-ctx.Done():
		case <-s.unproved:
		case <-later:
		}
	}
}

// nextProof returns what a worker has to be tried for, which is its caller's to do from then on, or
// when there will be something.
func (d *Dispatcher) nextProof(s *session, now time.Time) (p *program, spans []span, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.tally.isOut(now) {
		return nil, nil, time.Unix(0, s.tally.outUntil.Load())
	}
	for _, layer := range *d.programs.Load() {
		for _, p := range layer {
			st := s.programs[p]
			if st == nil || !st.answered || st.refused != "" || st.trying {
				continue
			}
			spans = subtract(spansOf(s.offer.Slices, p.layer), st.proved)
			if fresh := subtract(spans, st.failed); len(fresh) > 0 {
				spans = fresh
			} else if len(spans) == 0 || now.Before(st.retry) {
				if len(spans) > 0 && (at.IsZero() || st.retry.Before(at)) {
					at = st.retry
				}
				spans = st.again
			}
			if len(spans) > 0 {
				st.trying = true
				return p, spans[:min(len(spans), triedSpans)], at
			}
		}
	}
	return nil, nil, at
}

// tryOut has a worker compute rows for some spans, has others compute them too, and judges.
func (d *Dispatcher) tryOut(ctx context.Context, s *session, p *program, spans []span) {
	experts := d.sample(p, spans)
	rows, err := d.rowsOf(ctx, s, p, d.canaryRow(p.rowWidth), experts)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		d.callWitnesses(ctx, s, p, experts)
	}
	wrong := d.judge(s, p, spans, experts, rows, err)
	for _, w := range wrong {
		d.cfg.Logger.Warn("expert worker failed a canary", "peer", w.peer, "layer", p.layer)
		d.cfg.Fault(w.peer, fmt.Errorf("a canary of layer %d was answered wrongly", p.layer))
		w.penalise(faultWeight, false)
	}
}

// sample chooses the experts to try: the first of each span, and one of which others' rows are
// known.
func (d *Dispatcher) sample(p *program, spans []span) (experts []int32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, sp := range spans {
		experts = append(experts, sp.from)
		for e := range p.evidence {
			if sp.from < e && e < sp.to {
				experts = append(experts, e)
				break
			}
		}
	}
	return experts
}

// canaryRow is the row that is computed, other ones in every process.
func (d *Dispatcher) canaryRow(width int) []float32 {
	row := make([]float32, width)
	for i := range row {
		row[i] = float32(math.Sin(d.phase + float64(i)))
	}
	return row
}

// rowsOf has one worker compute a row with some experts, whatever it has proved.
func (d *Dispatcher) rowsOf(ctx context.Context, s *session, p *program, row []float32, experts []int32) ([]float32, error) {
	call := &Call{
		Layer: p.layer, Program: p.bytes, RowWidth: p.rowWidth, OutWidth: p.outWidth, RowsPerToken: 1,
		Used: len(experts), IDs: experts, Rows: row, Out: make([]float32, len(experts)*p.outWidth),
	}
	if err := call.validate(); err != nil {
		return nil, err
	}
	r := d.runs.get(d, ctx.Done())
	defer d.runs.put(r)
	r.only, r.via = s, onlyRoutes(s, experts)
	if err := r.compute(ctx, p, call); err != nil {
		return nil, err
	}
	return call.Out, nil
}

// callWitnesses has the own copy, or else others who hold the same experts, compute the row, as
// far as they do within half of ProgramWait: the first call of a program waits for all of it.
func (d *Dispatcher) callWitnesses(ctx context.Context, s *session, p *program, experts []int32) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.ProgramWait/2)
	defer cancel()
	for o, list := range d.witnesses(ctx, s, p, d.witnessHere(p, experts)) {
		if rows, err := d.rowsOf(ctx, o, p, d.canaryRow(p.rowWidth), list); err == nil {
			d.testify(o, p, list, rows)
		}
	}
}

// witnesses are others who are to compute a row, once all who might have answered about the
// program.
func (d *Dispatcher) witnesses(ctx context.Context, s *session, p *program, experts []int32) map[*session][]int32 {
	for {
		ask, silent := map[*session][]int32{}, false
		d.mu.Lock()
		for _, e := range experts {
			list, wait := d.witnessesLocked(s, p, e)
			for _, o := range list {
				ask[o] = append(ask[o], e)
			}
			silent = silent || wait
		}
		changed := d.changed
		d.mu.Unlock()
		if !silent {
			return ask
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// witnessesLocked are others who hold an expert and whose rows are not known, as many as are
// missing, and whether there might be more once they answered about the program.
func (d *Dispatcher) witnessesLocked(s *session, p *program, expert int32) (list []*session, silent bool) {
	known := 0
	for _, e := range p.evidence[expert] {
		if !e.isOf(s) {
			known++
		}
	}
	for _, o := range d.sessions {
		st := o.programs[p]
		if o.peer == s.peer || st == nil || st.refused != "" || trust(o.trust.Load()) != trusted ||
			!contains(spansOf(o.offer.Slices, p.layer), expert) ||
			slices.ContainsFunc(p.evidence[expert], func(e evidence) bool { return e.by == o }) {
			continue
		}
		if !st.answered {
			silent = true
		} else if known+len(list) < mostWitnesses {
			list = append(list, o)
		}
	}
	return list, silent && known+len(list) < mostWitnesses
}

// witnessHere has the own copy compute the row by the experts that it has, and returns the others.
func (d *Dispatcher) witnessHere(p *program, experts []int32) (rest []int32) {
	if d.cfg.Local == nil {
		return experts
	}
	d.held.using.RLock()
	defer d.held.using.RUnlock()
	held := d.held.set.Load()
	var own []int32
	for _, e := range experts {
		if held.holds(p.layer, e) {
			own = append(own, e)
		} else {
			rest = append(rest, e)
		}
	}
	if rows := d.ownRows(p, d.canaryRow(p.rowWidth), own); rows != nil {
		d.testify(nil, p, own, rows)
	}
	return rest
}

// ownRows is a row computed by the backbone's own copy, nil if it cannot.
func (d *Dispatcher) ownRows(p *program, input []float32, experts []int32) []float32 {
	if len(experts) == 0 {
		return nil
	}
	d.introduce(p)
	if !p.local.ready.Load() {
		return nil
	}
	out := make([]float32, len(experts)*p.outWidth)
	d.local.Lock()
	defer d.local.Unlock()
	row := make([]int32, len(experts))
	if d.cfg.Local.Kernel.Compute(p.local.number, input, row, experts, out) != nil {
		return nil
	}
	return out
}

// testify keeps rows that somebody computed.
func (d *Dispatcher) testify(by *session, p *program, experts []int32, rows []float32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.testifyLocked(by, p, experts, rows)
}

func (d *Dispatcher) testifyLocked(by *session, p *program, experts []int32, rows []float32) {
	if by != nil && !slices.Contains(d.sessions, by) {
		return
	}
	for i, e := range experts {
		if p.evidence == nil || len(p.evidence) >= mostEvidence {
			p.evidence = map[int32][]evidence{}
		}
		p.evidence[e] = append(p.withoutLocked(e, by), evidence{by, sampleRow(rows[i*p.outWidth:][:p.outWidth])})
	}
}

func (p *program) withoutLocked(expert int32, by *session) []evidence {
	return slices.DeleteFunc(p.evidence[expert], func(e evidence) bool { return e.by == by })
}

func sampleRow(row []float32) []float32 {
	step := (len(row) + sampled - 1) / sampled
	var out []float32
	for i := 0; i < len(row); i += step {
		out = append(out, row[i])
	}
	return out
}

// near says whether two rows are the same within the tolerance.
func near(a, b []float32) bool {
	var diff, aa, bb float64
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		diff, aa, bb = diff+(x-y)*(x-y), aa+x*x, bb+y*y
	}
	return diff <= tolerance*tolerance*max(aa, bb)
}

// judge takes in what a worker computed for its canary and returns the workers that are wrong:
// it, or others that now have most against them.
func (d *Dispatcher) judge(s *session, p *program, spans []span, experts []int32, rows []float32, err error) (wrong []*session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := s.programs[p]
	if st == nil || !slices.Contains(d.sessions, s) {
		return nil
	}
	st.trying = false
	s.tellProver()
	if s.tally.isOut(time.Now()) {
		return nil // found meanwhile: it is tried again when it is let in again
	}
	offered := spansOf(s.offer.Slices, p.layer)
	if err == nil {
		var sure bool
		d.testifyLocked(s, p, experts, rows)
		if err, sure = d.verdictLocked(s, p, experts); sure {
			wrong = append(wrong, s)
		}
	}
	if err == nil {
		st.proved = intersect(union(st.proved, spans), offered)
		st.failed, st.trouble, st.wait = subtract(st.failed, spans), "", 0
		st.again = subtract(st.again, spans)
		if s.standing == 0 {
			d.standings++
			s.standing = d.standings
		}
	} else {
		d.failLocked(s, st, intersect(spans, offered), err)
	}
	for _, o := range d.servingLocked(s, p, experts) {
		err, sure := d.verdictLocked(o, p, experts)
		if err != nil {
			d.failLocked(o, o.programs[p], o.programs[p].proved, err)
		}
		if sure {
			wrong = append(wrong, o)
		}
	}
	d.routeLocked(p)
	d.announceLocked()
	return wrong
}

// servingLocked are the others that serve some of the experts and whose rows are known.
func (d *Dispatcher) servingLocked(s *session, p *program, experts []int32) (list []*session) {
	for _, o := range d.sessions {
		st := o.programs[p]
		if o != s && st != nil && slices.ContainsFunc(experts, func(e int32) bool {
			return contains(st.proved, e) && slices.ContainsFunc(p.evidence[e], func(w evidence) bool { return w.by == o })
		}) {
			list = append(list, o)
		}
	}
	return list
}

// failLocked keeps calls for some spans from a worker until it was tried again.
func (d *Dispatcher) failLocked(s *session, st *programState, spans []span, err error) {
	st.failed = union(st.failed, spans)
	st.proved = subtract(st.proved, spans)
	st.trouble = "canary: " + err.Error()
	st.wait = min(max(2*st.wait, firstProofRetry), lastProofRetry)
	st.retry = time.Now().Add(st.wait)
	s.tellProver()
}

// verdictLocked says what is wrong with a worker's rows of some experts, by those of others, and
// whether that is sure.
func (d *Dispatcher) verdictLocked(s *session, p *program, experts []int32) (err error, sure bool) {
	for _, e := range experts {
		i := slices.IndexFunc(p.evidence[e], func(w evidence) bool { return w.by == s })
		if i < 0 {
			continue
		}
		if err, sure = p.verdictLocked(e, p.evidence[e][i]); err != nil {
			return err, sure
		}
	}
	return nil, false
}

// verdictLocked judges a row of an expert: by the own copy if there is one, else by most of the
// others.
func (p *program) verdictLocked(expert int32, mine evidence) (err error, sure bool) {
	agree, differ, senior := 0, 0, false
	for _, w := range p.evidence[expert] {
		same := near(mine.row, w.row)
		switch {
		case w.isOf(mine.by):
		case w.by == nil && same:
			return nil, false
		case w.by == nil:
			return fmt.Errorf("its row of layer %d, expert %d is not that of the own copy: its model file or its build is damaged", p.layer, expert), true
		case same:
			agree++
		default:
			differ++
			senior = senior || w.by.standing != 0 && (mine.by.standing == 0 || w.by.standing < mine.by.standing)
		}
	}
	if differ > agree && (senior || differ > 1) {
		return fmt.Errorf("its row of layer %d, expert %d is not that of %d other workers: its model file or its build is damaged", p.layer, expert, differ), differ > 1
	}
	return nil, false
}

// Canary has every connected peer compute one row with the first expert of each of its slices
// in every layer whose program it accepted, so that each part that serves has been tried. It
// learns of programs from Compute: run a token through the model first. A peer that fails is
// suspect from then on; the error names all of them.
func (d *Dispatcher) Canary(ctx context.Context) error {
	d.mu.Lock()
	sessions := append([]*session(nil), d.sessions...)
	d.mu.Unlock()
	var errs []error
	for _, s := range sessions {
		for _, layer := range *d.programs.Load() {
			for _, p := range layer {
				if err := d.try(ctx, s, p); err != nil {
					errs = append(errs, fmt.Errorf("peer %s: %w", s.peer, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// try computes the first experts of a peer in a layer there and nowhere else.
func (d *Dispatcher) try(ctx context.Context, s *session, p *program) error {
	var experts []int32
	d.mu.Lock()
	for _, sp := range spansOf(s.offer.Slices, p.layer) {
		experts = append(experts, sp.from)
	}
	st := s.programs[p]
	refused := ""
	if st != nil {
		refused = st.refused
	}
	d.mu.Unlock()
	switch {
	case len(experts) == 0 || st == nil:
		return nil
	case refused != "":
		return errors.New(refused)
	}
	_, err := d.rowsOf(ctx, s, p, d.canaryRow(p.rowWidth), experts)
	if m := (*MissingError)(nil); errors.As(err, &m) && m.Unpaid() {
		return nil // it lives
	}
	return err
}
