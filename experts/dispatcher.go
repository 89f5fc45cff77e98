package experts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/experts/audit"
	"kvasird/experts/place"
)

// Dialer opens a connection to a peer that speaks the protocol of this package, before ctx
// ends. It is safe for concurrent use.
type Dialer interface {
	Dial(ctx context.Context, peerID string) (net.Conn, error)
}

// Config configures a Dispatcher. Zero fields but the first two have the default stated.
type Config struct {
	Model  ModelID
	Dialer Dialer
	Local  *Local // nil: none

	// Precision is that of rows to and from workers that offer it, where they fit it; others get
	// f32. Only f32 gives what the backbone alone would compute: F32
	Precision Precision

	// Sums says whether workers that have several experts of a token are asked for the sum of their
	// rows, where a Call has the router's weights.
	Sums Sums

	CoverageWait time.Duration // a call waits so long for a worker to return: 0
	MinDeadline  time.Duration // of a call, however fast its peer is: 250 ms
	MaxDeadline  time.Duration // of a call, however slow its peer is: 10 s
	Heartbeat    time.Duration // 1 s
	DeadAfter    time.Duration // a peer silent for so long is disconnected: 5 s
	DialTimeout  time.Duration // to connect and greet: 10 s
	ProgramWait  time.Duration // for workers to accept a new program: 2 s

	NoLead bool // answers are read by a goroutine of each session, never by Compute

	NoHedge  bool          // a call that is late is not asked of a second worker
	MinHedge time.Duration // a call is never late before: 10 ms

	MostPeers int // of those that SetHolders names, so many have sessions: 64
	Replicas  int // of an expert that these should be: 3
	MostDrawn int // a draw is among so many workers that answer first: 4

	// Fault is told of a peer that answered wrongly or broke the protocol, once for each time.
	// It is called with locks held: it does not wait, and does not call the Dispatcher. nil: nobody
	// is told.
	Fault func(peerID string, reason error)

	// Unpaid is told of a peer that computes no more until it knows that somebody pays. It does not
	// wait, and does not call the Dispatcher. nil: nobody is told.
	Unpaid func(peerID string)

	// Served is told how many pairs of a call a worker computed that were accepted into its output,
	// once the call is complete; the peer id is "" for Local. Hedged losers, failed calls and
	// canaries are not told. It does not wait. nil: nobody is told.
	Served func(peerID string, layer, pairs int)

	// AuditInterval has one of so many answers of workers computed again elsewhere, chosen by chance:
	// 0: none.
	AuditInterval int
	// Band is how far the rows of two peers may be apart, as audit.Distance measures it; "" is the own
	// copy. It does not wait. nil: UnknownBand for all.
	Band audit.Bands
	// Found is told what audits found of a worker, with the evidence. It may keep what it is given,
	// and does not call the Dispatcher. nil: nobody is told.
	Found func(Audited)

	Logger *slog.Logger // nil: none
}

func (c *Config) validate() error {
	if !hostIsLittleEndian {
		return errBigEndian
	}
	if c.Dialer == nil {
		return errors.New("experts: dispatcher without a dialer")
	}
	if err := c.Model.validate(); err != nil {
		return fmt.Errorf("experts: dispatcher: %w", err)
	}
	if c.Local != nil && c.Local.Kernel == nil {
		return errors.New("experts: local experts without a kernel")
	}
	if c.Precision == 0 {
		c.Precision = F32
	}
	if c.AuditInterval < 0 {
		return fmt.Errorf("experts: one audit in %d answers: want 0 or more", c.AuditInterval)
	}
	if !slices.Contains(precisions, c.Precision) {
		return fmt.Errorf("experts: dispatcher with %v", c.Precision)
	}
	if c.Sums > SumsOff {
		return fmt.Errorf("experts: dispatcher with sums %d", c.Sums)
	}
	defaults(&c.MinDeadline, 250*time.Millisecond)
	defaults(&c.MaxDeadline, 10*time.Second)
	defaults(&c.Heartbeat, time.Second)
	defaults(&c.DeadAfter, 5*time.Second)
	defaults(&c.DialTimeout, 10*time.Second)
	defaults(&c.ProgramWait, 2*time.Second)
	defaults(&c.MinHedge, 10*time.Millisecond)
	defaults(&c.MostPeers, 64)
	defaults(&c.Replicas, 3)
	defaults(&c.MostDrawn, 4)
	if c.Fault == nil {
		c.Fault = func(string, error) {}
	}
	if c.Band == nil {
		c.Band = func(string, string) float64 { return UnknownBand }
	}
	if c.Found == nil {
		c.Found = func(Audited) {}
	}
	if c.Unpaid == nil {
		c.Unpaid = func(string) {}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.MaxDeadline < c.MinDeadline {
		return fmt.Errorf("experts: MaxDeadline %v is below MinDeadline %v", c.MaxDeadline, c.MinDeadline)
	}
	return nil
}

// Dispatcher has the experts of one model computed by workers.
type Dispatcher struct {
	cfg   Config
	done  chan struct{}  // closed by Close
	loops sync.WaitGroup // keepers and pulse

	programs atomic.Pointer[[][]*program] // by layer; copied on write under mu
	runs     runList
	local    sync.Mutex // guards cfg.Local.Kernel and the scratch of local calls
	scratch  localScratch
	held     holding       // what of cfg.Local.Kernel is used
	ownPairs atomic.Uint64 // computed by cfg.Local
	allPairs atomic.Uint64 // of calls that succeeded
	hedges   hedges
	draws    draws
	audits   *auditing
	starved  atomic.Int32 // calls with pairs that nobody serves
	phase    float64      // of canary rows

	mu        sync.Mutex // guards the rest, and the fields of programs and sessions that say so
	keepers   map[string]*keeper
	tallies   map[string]*tally
	sessions  []*session // ready
	count     int        // programs
	standings uint64     // sessions that proved something
	changed   chan struct{}
	closed    bool
}

// program is an expert program of a layer, with where it can run.
type program struct {
	number             uint32
	layer              int
	bytes              []byte
	rowWidth, outWidth int

	settled atomic.Bool            // the workers of its first call had their time to accept it
	routes  atomic.Pointer[routes] // replaced under Dispatcher.mu
	local   localProgram
	demand  atomic.Pointer[[]atomic.Uint64] // pairs by expert; replaced under Dispatcher.mu

	evidence map[int32][]evidence // by expert; guarded by Dispatcher.mu
}

// routes are the replicas of a program: the sessions that accepted it and proved themselves.
type routes struct {
	sessions []*session
	replicas []place.Replica // Peer indexes sessions
}

// NewDispatcher returns a dispatcher without peers.
func NewDispatcher(cfg Config) (*Dispatcher, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	d := &Dispatcher{
		cfg: cfg, done: make(chan struct{}), phase: rand.Float64() * 2 * math.Pi,
		keepers: map[string]*keeper{}, tallies: map[string]*tally{}, changed: make(chan struct{}),
		audits: newAuditing(),
	}
	d.hedges.credit.Store(firstCredit)
	d.programs.Store(&[][]*program{})
	if cfg.Local != nil {
		d.held.set.Store(newLocalSet(cfg.Local.Slices))
	}
	d.loops.Go(d.pulse)
	if cfg.AuditInterval > 0 {
		d.loops.Go(d.audit)
	}
	return d, nil
}

// Starved reports whether a call waits for experts that nobody serves now.
func (d *Dispatcher) Starved() bool { return d.starved.Load() > 0 }

// Close ends all sessions and calls and waits for them.
func (d *Dispatcher) Close() error {
	d.mu.Lock()
	if !d.closed {
		d.closed = true
		close(d.done)
		for _, k := range d.keepers {
			k.cancel()
		}
	}
	d.mu.Unlock()
	d.loops.Wait()
	return nil
}

// program returns the program of a call, and introduces it to the workers the first time.
func (d *Dispatcher) program(call *Call) (*program, error) {
	if p := d.known(call); p != nil {
		return p, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if p := d.known(call); p != nil {
		return p, nil
	}
	if d.count >= MaxPrograms {
		return nil, fmt.Errorf("experts: more than %d programs", MaxPrograms)
	}
	p := &program{
		number: uint32(d.count), layer: call.Layer, bytes: bytes.Clone(call.Program),
		rowWidth: call.RowWidth, outWidth: call.OutWidth,
	}
	p.routes.Store(&routes{})
	d.count++
	table := slices.Clone(*d.programs.Load())
	if missing := call.Layer + 1 - len(table); missing > 0 {
		table = append(table, make([][]*program, missing)...)
	}
	table[call.Layer] = append(slices.Clip(table[call.Layer]), p)
	d.programs.Store(&table)
	for _, s := range d.sessions {
		s.askLocked(p)
	}
	return p, nil
}

func (d *Dispatcher) known(call *Call) *program {
	table := *d.programs.Load()
	if call.Layer >= len(table) {
		return nil
	}
	for _, p := range table[call.Layer] {
		if p.rowWidth == call.RowWidth && p.outWidth == call.OutWidth && bytes.Equal(p.bytes, call.Program) {
			return p
		}
	}
	return nil
}

// settle waits until every session was heard about a new program and tried with it, or had its
// time: those that did not answer are suspect.
func (d *Dispatcher) settle(ctx context.Context, p *program) error {
	late := time.NewTimer(d.cfg.ProgramWait)
	defer late.Stop()
	for !p.settled.Load() {
		d.mu.Lock()
		var open []*session
		for _, s := range d.sessions {
			if st := s.programs[p]; st != nil && st.open(spansOf(s.offer.Slices, p.layer)) {
				open = append(open, s)
			}
		}
		changed := d.changed
		d.mu.Unlock()
		if len(open) == 0 {
			p.settled.Store(true)
			return nil
		}
		select {
		case <-changed:
		case <-late.C:
			d.blameSilent(open, p)
			p.settled.Store(true)
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-d.done:
			return ErrClosed
		}
	}
	return nil
}

// blameSilent makes those suspect that have not answered about a program.
func (d *Dispatcher) blameSilent(open []*session, p *program) {
	d.mu.Lock()
	open = slices.DeleteFunc(open, func(s *session) bool { return s.programs[p].answered })
	d.mu.Unlock()
	for _, s := range open {
		s.penalise(missWeight, false)
	}
}

// join makes a greeted session available, first for the programs that are known.
func (d *Dispatcher) join(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sessions = append(d.sessions, s)
	for _, layer := range *d.programs.Load() {
		for _, p := range layer {
			s.askLocked(p)
		}
	}
}

// leave takes a session out of the routes. It may be called twice.
func (d *Dispatcher) leave(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sessions = slices.DeleteFunc(d.sessions, func(o *session) bool { return o == s })
	for p := range s.programs {
		for e := range p.evidence {
			p.evidence[e] = p.withoutLocked(e, s)
		}
		d.routeLocked(p)
	}
	d.announceLocked()
}

// routeLocked recomputes where a program can run.
func (d *Dispatcher) routeLocked(p *program) {
	r := &routes{}
	for _, s := range d.sessions {
		if st := s.programs[p]; st != nil {
			r.add(s, st.proved)
		}
	}
	p.routes.Store(r)
}

// add makes a session a replica of some experts.
func (r *routes) add(s *session, spans []span) {
	if len(spans) == 0 {
		return
	}
	for _, sp := range spans {
		r.replicas = append(r.replicas, place.Replica{Peer: int32(len(r.sessions)), From: sp.from, To: sp.to})
	}
	r.sessions = append(r.sessions, s)
}

// onlyRoutes are those of one session for some experts, whatever it proved.
func onlyRoutes(s *session, experts []int32) *routes {
	var spans []span
	for _, e := range experts {
		spans = append(spans, span{e, e + 1})
	}
	r := &routes{}
	r.add(s, spans)
	return r
}

// announceLocked wakes the calls that wait for coverage.
func (d *Dispatcher) announceLocked() {
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *Dispatcher) announce() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.announceLocked()
}

func (d *Dispatcher) nextChange() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

// pulse sends heartbeats and disconnects silent peers until Close.
func (d *Dispatcher) pulse() {
	tick := time.NewTicker(d.cfg.Heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-d.done:
			return
		case now := <-tick.C:
			d.mu.Lock()
			sessions := slices.Clone(d.sessions)
			d.mu.Unlock()
			for _, s := range sessions {
				s.beat(now)
				s.takeOffer()
			}
		}
	}
}

// reasons says why the experts of a program might not be computed, a line per peer.
func (d *Dispatcher) reasons(p *program) []string {
	const most = 8
	var list []string
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(d.keepers)) {
		k := d.keepers[id]
		if k.trouble != "" {
			list = append(list, "peer "+id+": "+k.trouble)
		}
	}
	for _, s := range d.sessions {
		switch st := s.programs[p]; {
		case s.tally.isOut(time.Now()):
			list = append(list, "peer "+s.peer+": "+s.tally.standing.Text(time.Now()))
		case st != nil && st.refused != "":
			list = append(list, "peer "+s.peer+": "+st.refused)
		case st != nil && st.trouble != "":
			list = append(list, "peer "+s.peer+": "+st.trouble)
		case trust(s.trust.Load()) == banned:
			list = append(list, "peer "+s.peer+" is not asked: it does not answer, or answered wrongly")
		}
	}
	return list[:min(len(list), most)]
}
