package experts

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/experts/place"
)

// Call is one MoE layer of one batch of tokens. Pair p = token·Used + k is the k-th expert of
// a token; its input row is the token's (RowsPerToken 1) or its own, row p (RowsPerToken Used).
type Call struct {
	Layer        int
	Program      []byte // encoded expert program, the same for every call of one model and layer
	RowWidth     int    // elements of an input row
	OutWidth     int    // elements of an output row
	RowsPerToken int    // 1 or Used
	Used         int    // experts per token
	Rows         []float32
	IDs          []int32   // [tokens*Used] global expert ids
	Out          []float32 // [len(IDs)*OutWidth] to be filled, in the order of the pairs

	// Of what follows the experts, where that is a sum over each token's, weighted by the router;
	// else nil. Compute may fill Sum, which Summed then says; what Out holds then has no meaning.
	Weights []float32 // [len(IDs)]
	Sum     []float32 // [tokens*OutWidth]
	Summed  bool

	// Draft says that the call is for a guess, which somebody verifies by real calls: only what the
	// backbone has here is computed, and the rows of other experts are zero.
	Draft bool
}

func (c *Call) validate() error {
	switch {
	case c.Layer < 0 || c.Layer >= maxCount:
		return fmt.Errorf("experts: layer %d is out of bounds", c.Layer)
	case len(c.Program) == 0 || len(c.Program) > MaxProgram:
		return fmt.Errorf("experts: program of %d bytes, want 1 to %d", len(c.Program), MaxProgram)
	case min(c.RowWidth, c.OutWidth) < 1 || max(c.RowWidth, c.OutWidth) > MaxWidth:
		return fmt.Errorf("experts: rows of %d and %d elements, want 1 to %d", c.RowWidth, c.OutWidth, MaxWidth)
	case c.Used < 1 || len(c.IDs)%c.Used != 0:
		return fmt.Errorf("experts: %d pairs of tokens with %d experts each", len(c.IDs), c.Used)
	case c.RowsPerToken != 1 && c.RowsPerToken != c.Used:
		return fmt.Errorf("experts: %d rows per token, want 1 or %d", c.RowsPerToken, c.Used)
	}
	if want := len(c.IDs) / c.Used * c.RowsPerToken * c.RowWidth; len(c.Rows) != want {
		return fmt.Errorf("experts: rows hold %d elements, want %d", len(c.Rows), want)
	}
	if want := len(c.IDs) * c.OutWidth; len(c.Out) != want {
		return fmt.Errorf("experts: output holds %d elements, want %d", len(c.Out), want)
	}
	if len(c.Weights) != 0 && (len(c.Weights) != len(c.IDs) || len(c.Sum) != len(c.IDs)/c.Used*c.OutWidth) {
		return fmt.Errorf("experts: %d weights and a sum of %d elements for %d pairs", len(c.Weights), len(c.Sum), len(c.IDs))
	}
	for _, id := range c.IDs {
		if id < 0 || id >= place.MaxExpert {
			return fmt.Errorf("experts: layer %d: expert %d is out of bounds", c.Layer, id)
		}
	}
	return nil
}

// Compute fills call.Out or returns why not: *MissingError when nobody computes some of the
// experts, the cause of ctx when that ends, ErrClosed.
func (d *Dispatcher) Compute(ctx context.Context, call *Call) error {
	if err := call.validate(); err != nil {
		return err
	}
	if len(call.IDs) == 0 {
		return nil
	}
	p, err := d.program(call)
	if err != nil {
		return err
	}
	if call.Draft {
		return d.draft(p, call)
	}
	p.count(d, call.IDs)
	if !p.settled.Load() {
		if err := d.settle(ctx, p); err != nil {
			return err
		}
	}
	r := d.runs.get(d, ctx.Done())
	defer d.runs.put(r)
	return r.compute(ctx, p, call)
}

const (
	// touchCost is what a further peer costs a call, for the planner.
	touchCost = float32(30 * time.Microsecond)
	// A peer that is busy is asked again after firstRetry, then after twice that, up to
	// lastRetry.
	firstRetry = time.Millisecond
	lastRetry  = 64 * time.Millisecond
	// One that computes nothing unpaid is asked again after unpaidRetry and so on, and the call
	// waits for it for unpaidWait: so long it may take to show that somebody pays.
	unpaidRetry = 50 * time.Millisecond
	unpaidWait  = 2 * time.Second
	maxReasons  = 8
)

// run is the state of one Compute, kept for the next one.
type run struct {
	d       *Dispatcher
	call    *Call
	program *program
	only    *session    // nobody else is asked; nil: whoever is best
	via     *routes     // instead of the program's; with only
	except  *session    // is not asked
	seed    *place.Seed // that replicas are drawn by; nil: whoever is soonest

	planner place.Planner
	peers   []place.Peer
	experts []int32 // of pending
	choice  []int32 // for pending
	pending []int32 // pairs that nobody was asked for
	rest    []int32 // scratch of dispatch
	here    []int32 // pairs for the local kernel
	parts   []*part // asked and not collected
	free    []*part
	shares  []share // of Call.Out, by who filled it; kept only where Config.Served wants to know
	late    []*part // scratch of collect: to be hedged
	lost    []int32 // scratch of collect
	race    race
	has     []uint8 // what Call.Out has of each pair, if it is weighted
	hedging bool    // parts that are sent are second ones
	dice    uint64  // state of jitter

	busy    []busyPeer
	reasons []string
	missing time.Time // since when pairs are pending with nobody to ask; zero: never

	weighted    bool // workers may be asked for sums
	summing     bool // some were
	onlyBusy    bool // every pending pair has a worker that is busy
	onlyUnpaid  bool // or one that wants to know who pays
	localFailed bool

	left   atomic.Int32  // parts that are not done
	hungry atomic.Bool   // pairs are pending: every answer may make room for them
	event  chan struct{} // a part failed, or left is 0, or it is time; capacity 1
	timer  *time.Timer   // wakes the run at alarm or before
	alarm  time.Time

	leading atomic.Pointer[session] // session that the run is reading
	watched <-chan struct{}         // its end wakes the run
	unwatch func() bool
}

// busyPeer is a peer that the run does not ask until some time.
type busyPeer struct {
	s     *session
	until time.Time
	wait  time.Duration

	unpaid bool // it is not busy, but wants to know who pays
}

// runList keeps runs for reuse.
type runList struct {
	mu   sync.Mutex // guards list
	list []*run
}

// get returns a run, if possible one that watches the same context already.
func (l *runList) get(d *Dispatcher, done <-chan struct{}) *run {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last := len(l.list) - 1; last >= 0 {
		i := max(0, slices.IndexFunc(l.list, func(r *run) bool { return r.watched == done }))
		r := l.list[i]
		l.list[i] = l.list[last]
		l.list = l.list[:last]
		return r
	}
	r := &run{d: d, event: make(chan struct{}, 1), dice: rand.Uint64() | 1}
	r.planner.TouchCost = touchCost
	return r
}

func (l *runList) put(r *run) {
	r.call, r.program, r.only, r.via = nil, nil, nil, nil
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, r)
}

// wake has the run look at its parts.
func (r *run) wake() {
	select {
	case r.event <- struct{}{}:
	default:
	}
	if s := r.leading.Load(); s != nil {
		s.interrupt()
	}
}

// watch has the end of ctx wake the run. It stays so for later calls with the same ctx.
func (r *run) watch(ctx context.Context) {
	if ctx.Done() == r.watched {
		return
	}
	if r.unwatch != nil {
		r.unwatch()
	}
	r.watched, r.unwatch = ctx.Done(), nil
	if r.watched != nil {
		r.unwatch = context.AfterFunc(ctx, r.wake)
	}
}

// begin takes up a call, all of whose pairs are pending.
func (r *run) begin(p *program, call *Call) {
	r.call, r.program, r.seed = call, p, r.d.draws.now.Load()
	r.busy, r.reasons, r.missing, r.localFailed = r.busy[:0], r.reasons[:0], time.Time{}, false
	r.race.on, r.pending, r.shares = false, r.pending[:0], r.shares[:0]
	for i := range call.IDs {
		r.pending = append(r.pending, int32(i))
	}
	call.Summed, r.summing = false, false
	r.weighted = len(call.Weights) > 0 && call.Used > 1 && call.RowsPerToken == 1 && maxAbs(call.Weights) < infinite
	if r.weighted {
		r.has = slices.Grow(r.has[:0], len(call.IDs))[:len(call.IDs)]
		clear(r.has)
	}
}

func (r *run) compute(ctx context.Context, p *program, call *Call) error {
	r.begin(p, call)
	r.watch(ctx)
	now := time.Now()
	for {
		var changed <-chan struct{}
		if len(r.pending) > 0 {
			if !r.missing.IsZero() {
				changed = r.d.nextChange() // before looking, so that none is missed
			}
			r.dispatch(now)
		}
		switch {
		case len(r.pending) == 0 && len(r.parts) == 0:
			if r.summing {
				r.addUp()
			}
			r.tellServed()
			if r.only == nil {
				r.d.allPairs.Add(uint64(len(call.IDs)))
			}
			return nil
		case len(r.pending) > 0 && r.missing.IsZero():
			r.missing = now
			continue // once more, listening for changes
		case len(r.pending) > 0 && !now.Before(r.missing.Add(r.patience())):
			r.abort()
			return r.missingError()
		}
		r.hungry.Store(len(r.pending) > 0)
		if r.left.Load() > 0 || len(r.pending) > 0 {
			if err := r.wait(ctx, now, changed); err != nil {
				r.abort()
				return err
			}
		}
		now = r.collect()
	}
}

// patience is how long pairs may have nobody to ask.
func (r *run) patience() time.Duration {
	if r.only != nil && (!r.onlyBusy || r.only.over()) {
		return 0
	}
	switch {
	case r.onlyBusy:
		return max(r.d.cfg.CoverageWait, r.d.cfg.MaxDeadline)
	case r.onlyUnpaid:
		return unpaidWait
	}
	return r.d.cfg.CoverageWait
}

// wait returns when something happened: a part failed, all are done, the time of one is up,
// or there is somebody new to ask.
func (r *run) wait(ctx context.Context, now time.Time, changed <-chan struct{}) error {
	if ctx.Err() != nil { // an event of it may have been taken for another
		return context.Cause(ctx)
	}
	next := now.Add(r.d.cfg.MaxDeadline)
	for _, p := range r.parts {
		if p.alarm.Before(next) {
			next = p.alarm
		}
	}
	if len(r.pending) > 0 {
		if len(r.busy) == 0 {
			r.d.starved.Add(1)
			defer r.d.starved.Add(-1)
		}
		if t := r.missing.Add(r.patience()); t.Before(next) {
			next = t
		}
		for _, b := range r.busy {
			if b.until.After(now) && b.until.Before(next) {
				next = b.until
			}
		}
	}
	r.setAlarm(now, next)
	if r.lead() {
		select {
		case <-r.event:
		default:
		}
		return nil
	}
	for _, p := range r.parts {
		if !p.done.Load() {
			p.s.tellReader()
		}
	}
	select {
	case <-r.event:
		return nil
	case <-changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.d.done:
		return ErrClosed
	}
}

// setAlarm makes the timer fire at next or before. An alarm that is too early stays: it
// wakes the run for nothing, which is cheaper than setting it for each call.
func (r *run) setAlarm(now, next time.Time) {
	if r.alarm.After(now) && !r.alarm.After(next) {
		return
	}
	r.alarm = next
	if r.timer == nil {
		r.timer = time.AfterFunc(next.Sub(now), r.wake)
		return
	}
	r.timer.Reset(next.Sub(now))
}

// collect takes back the parts that are done or late. The pairs of those that failed are
// pending again, unless another part has them.
func (r *run) collect() time.Time {
	now := time.Now()
	r.late = r.late[:0]
	r.parts = slices.DeleteFunc(r.parts, func(p *part) bool {
		if !p.done.Load() && !r.isLate(p, now) {
			return false
		}
		if p.err == nil && len(r.busy) > 0 {
			r.hasRoom(p.s)
		}
		lost := p.pairs
		if r.race.on {
			r.lost = r.race.settle(p, r.lost[:0])
			lost = r.lost
		}
		if p.err != nil {
			r.failed(p, lost, now)
		} else {
			r.share(p.s.peer, p.filled)
			r.sample(p)
		}
		r.recycle(p)
		return true
	})
	if r.race.on {
		r.endRaces(now)
	}
	for _, p := range r.late {
		r.hedge(p, now)
	}
	return now
}

// isLate says whether a part that is not done is to be given up, and then takes it back. When it
// is later than most it is to be hedged. Half way to its deadline the worker is probed, so that
// at the deadline it is known whether it lives. A worker that lives is waited for, up to
// MaxDeadline, if nobody else can compute the part.
func (r *run) isLate(p *part, now time.Time) bool {
	if now.Before(p.alarm) {
		return false
	}
	if !p.half.IsZero() {
		p.alarm, p.half = p.half, time.Time{}
		r.late = append(r.late, p)
		return false
	}
	if now.Before(p.deadline) {
		p.probe, p.alarm = p.s.ping(now), p.deadline
		return false
	}
	last := p.sent.Add(r.d.cfg.MaxDeadline)
	alive := p.probe != 0 && p.s.ponged.Load() >= p.probe
	p.s.penalise(missWeight, alive)
	if alive && now.Before(last) && !r.elsewhere(p) {
		p.probe = p.s.ping(now)
		p.deadline = now.Add(r.d.cfg.MinDeadline)
		if last.Before(p.deadline) {
			p.deadline = last
		}
		p.alarm = p.deadline
		return false
	}
	if p.revoke() {
		took := now.Sub(p.sent)
		p.err = fmt.Errorf("no answer within %v", took.Round(time.Millisecond))
		p.s.lat.missed(took, p.ahead, len(p.pairs))
	}
	return true
}

func (r *run) recycle(p *part) {
	p.s = nil
	r.free = append(r.free, p)
}

// failed takes in why a part failed, and puts what was lost with it back, for someone else.
func (r *run) failed(p *part, lost []int32, now time.Time) {
	if e, ok := p.err.(*RemoteError); ok && (e.Code == CodeBusy || e.Code == CodeUnpaid) {
		r.isBusy(p.s, now, e.Code == CodeUnpaid)
	}
	r.note(p.s, p.err)
	r.pending = append(r.pending, lost...)
	slices.Sort(r.pending)
}

func (r *run) note(s *session, err error) {
	if why := fmt.Sprintf("peer %s: %v", s.peer, err); len(r.reasons) < maxReasons && !slices.Contains(r.reasons, why) {
		r.reasons = append(r.reasons, why)
	}
}

func (r *run) isBusy(s *session, now time.Time, unpaid bool) {
	first, last := firstRetry, lastRetry
	if unpaid {
		first, last = unpaidRetry, unpaidWait
	}
	for i := range r.busy {
		if b := &r.busy[i]; b.s == s {
			b.wait = max(first, min(2*b.wait, last))
			b.until, b.unpaid = now.Add(b.wait), unpaid
			return
		}
	}
	r.busy = append(r.busy, busyPeer{s, now.Add(first), first, unpaid})
}

// hasRoom takes in that a peer answered: it can be asked at once.
func (r *run) hasRoom(s *session) {
	r.busy = slices.DeleteFunc(r.busy, func(b busyPeer) bool { return b.s == s })
}

// abort takes everything back. Afterwards nobody writes to Call.Out.
func (r *run) abort() {
	for _, p := range r.parts {
		if !p.done.Load() {
			p.revoke()
		}
		r.recycle(p)
	}
	r.parts = r.parts[:0]
}

func (r *run) missingError() error {
	e := &MissingError{Layer: r.call.Layer, unpaid: r.onlyUnpaid}
	for _, pair := range r.pending {
		e.Experts = append(e.Experts, int(r.call.IDs[pair]))
	}
	slices.Sort(e.Experts)
	e.Experts = slices.Compact(e.Experts)
	e.Reasons = append(slices.Clone(r.reasons), r.d.reasons(r.program)...)
	if why := r.program.local.refused; why != "" {
		e.Reasons = append(e.Reasons, "own copy: "+why)
	}
	return e
}
