package experts

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/experts/place"
)

// dispatch asks for the pending pairs: workers, and the backbone's own copy for those that it
// is to compute first or that no worker can. What nobody can stays pending.
func (r *run) dispatch(now time.Time) {
	r.here = r.here[:0]
	local := r.d.cfg.Local
	if r.only != nil {
		local = nil
	}
	if local != nil {
		r.d.held.using.RLock() // what is taken here stays here until it is computed
		defer r.d.held.using.RUnlock()
	}
	if local != nil && local.First {
		r.pending = r.takeLocal(r.pending)
	}
	routes := r.routes()
	r.left.Add(1) // so that it is not 0 before all parts are sent
	r.askPeers(routes, now, trusted)
	if local != nil && !local.First && len(r.pending) > 0 {
		r.pending = r.takeLocal(r.pending)
	}
	if len(r.pending) > 0 {
		r.askPeers(routes, now, slow)
	}
	r.left.Add(-1)
	r.computeHere()
	r.onlyBusy = r.waitsFor(routes, false)
	r.onlyUnpaid = !r.onlyBusy && r.waitsFor(routes, true)
}

// askPeers sends the pending pairs to peers that are trusted so much; others stay pending.
func (r *run) askPeers(routes *routes, now time.Time, least trust) {
	r.rest = r.rest[:0]
	r.plan(routes, now, least)
	for i, s := range routes.sessions {
		if !r.peers[i].Avoid {
			r.ask(s, int32(i), now)
		}
	}
	for i, pair := range r.pending {
		if r.choice[i] == place.Missing {
			r.rest = append(r.rest, pair)
		}
	}
	r.pending, r.rest = r.rest, r.pending
	slices.Sort(r.pending)
}

// routes are the replicas that may be asked.
func (r *run) routes() *routes {
	if r.via != nil {
		return r.via
	}
	return r.program.routes.Load()
}

// band is how much slower than the best a replica may be expected to be and still get calls. It
// spreads calls over equal replicas, and keeps several backbones from all going to the same one.
const band = 0.25

// roll returns other bits each time (xorshift64).
func (r *run) roll() uint64 {
	r.dice ^= r.dice << 13
	r.dice ^= r.dice >> 7
	r.dice ^= r.dice << 17
	return r.dice
}

// jitter is a factor of 1 to 1+band, another one each time.
func (r *run) jitter() float32 { return 1 + band*float32(r.roll()>>40)/(1<<24) }

// plan fills choice for the pending pairs.
func (r *run) plan(routes *routes, now time.Time, least trust) {
	r.peers = r.peers[:0]
	for _, s := range routes.sessions {
		p := place.Peer{
			Base: float32(load(&s.lat.base)), PerPair: float32(load(&s.lat.perPair)),
			Queued: s.queued.Load(),
			Avoid:  s.level() > least || r.busyNow(s, now) || s == r.except,
		}
		if r.seed != nil {
			p.Rank = place.Rank(r.seed, int32(r.call.Layer), s.peer)
		} else {
			j := r.jitter()
			p.Base, p.PerPair = j*p.Base, j*p.PerPair
		}
		r.peers = append(r.peers, p)
	}
	r.experts, r.choice = r.experts[:0], r.choice[:0]
	for _, pair := range r.pending {
		r.experts = append(r.experts, r.call.IDs[pair])
		r.choice = append(r.choice, place.Missing)
	}
	if r.seed != nil {
		r.planner.Draw(r.d.cfg.MostDrawn, r.peers, routes.replicas, r.experts, r.choice)
		return
	}
	r.planner.Plan(r.peers, routes.replicas, r.experts, r.choice)
}

func (r *run) busyNow(s *session, now time.Time) bool {
	for i := range r.busy {
		if r.busy[i].s == s {
			return now.Before(r.busy[i].until)
		}
	}
	return false
}

// waitsFor says whether every pending pair has a worker that is only busy, or wants to be paid.
func (r *run) waitsFor(routes *routes, unpaid bool) bool {
	return !slices.ContainsFunc(r.pending, func(pair int32) bool {
		return !routes.has(r.call.IDs[pair], func(s *session) bool {
			return trust(s.trust.Load()) != banned && (unpaid || !slices.ContainsFunc(r.busy, func(b busyPeer) bool { return b.s == s && b.unpaid }))
		})
	})
}

// has says whether a session that satisfies ok computes an expert.
func (r *routes) has(expert int32, ok func(*session) bool) bool {
	return slices.ContainsFunc(r.replicas, func(p place.Replica) bool {
		return p.From <= expert && expert < p.To && ok(r.sessions[p.Peer])
	})
}

// elsewhere says whether all pairs of a part could be computed by someone else.
func (r *run) elsewhere(p *part) bool {
	if r.only != nil {
		return false
	}
	routes := r.program.routes.Load()
	return !slices.ContainsFunc(p.pairs, func(pair int32) bool {
		expert := r.call.IDs[pair]
		return !r.holdsHere(expert) && !routes.has(expert, func(s *session) bool {
			return s != p.s && s.level() == trusted
		})
	})
}

// holdsHere says whether the backbone's own copy computes an expert of this call.
func (r *run) holdsHere(expert int32) bool {
	return r.d.cfg.Local != nil && !r.localFailed && r.program.local.ready.Load() &&
		r.d.held.set.Load().holds(r.program.layer, expert)
}

// ask sends the pairs chosen for a peer: those of whose tokens it is to sum up, and the others.
func (r *run) ask(s *session, peer int32, now time.Time) {
	sums := r.sumsFrom(s, peer)
	if sums != sumsOfNone {
		r.summing = true
		r.askFor(s, peer, now, sums, true)
	}
	if sums != sumsOfAll {
		r.askFor(s, peer, now, sums, false)
	}
}

// askFor sends the pairs whose tokens are summed up there, or those whose are not, in as many calls
// as the peer's limits need. A sum is in one of them.
func (r *run) askFor(s *session, peer int32, now time.Time, sums extent, summed bool) {
	c := r.call
	mostPairs := min(s.offer.MaxPairs, MaxFrame/(4*c.OutWidth))
	var p *part
	last, mine := int32(-1), true
	for i, pair := range r.pending {
		if sums == sumsOfWhole && r.beginsToken(i) {
			mine = (r.together(i, peer) == c.Used) == summed
		}
		if r.choice[i] != peer || !mine {
			continue
		}
		from, n := c.source(pair), 1 // pairs that this call must have room for
		switch {
		case summed && from != last:
			n = r.together(i, peer)
		case summed:
			n = 0
		}
		if p != nil && (len(p.pairs)+n > mostPairs || from != last &&
			(p.rows == s.offer.MaxRows || callSize(F32, p.rows+1, len(p.pairs)+n, c.RowWidth, summed) > MaxFrame)) {
			r.send(p, now)
			p = nil
		}
		if p == nil {
			p, last = r.newPart(s), -1
			p.sums = summed
		}
		if from != last {
			p.rows++
			last = from
		}
		p.pairs = append(p.pairs, pair)
	}
	if p != nil {
		r.send(p, now)
	}
}

func (r *run) newPart(s *session) *part {
	var p *part
	if n := len(r.free); n > 0 {
		p, r.free = r.free[n-1], r.free[:n-1]
	} else {
		p = &part{run: r}
	}
	p.s, p.pairs, p.rows = s, p.pairs[:0], 0
	p.twin, p.hedged = r.hedging, r.hedging
	return p
}

func (r *run) send(p *part, now time.Time) {
	if r.race.on {
		for _, pair := range p.pairs {
			r.race.asked[pair]++
		}
	}
	r.left.Add(1)
	if err := p.send(now); err != nil {
		r.left.Add(-1)
		r.isBusy(p.s, now, false)
		r.note(p.s, err)
		if r.race.on {
			for _, pair := range p.pairs {
				r.race.asked[pair]--
			}
		}
		r.rest = append(r.rest, p.pairs...)
		r.recycle(p)
		return
	}
	if !p.twin {
		r.d.hedges.earn()
	}
	r.parts = append(r.parts, p)
}

// localProgram is a program on the backbone's own copy.
type localProgram struct {
	once    sync.Once
	tried   atomic.Bool // it was given to the kernel, which took it or refused
	ready   atomic.Bool // the kernel took it
	number  int
	refused string
}

// localScratch gathers a call for the local kernel.
type localScratch struct {
	row, expert []int32
	out         []float32
}

// introduce gives a program to the local kernel.
func (d *Dispatcher) introduce(p *program) {
	p.local.once.Do(func() {
		d.local.Lock()
		defer d.local.Unlock()
		defer p.local.tried.Store(true)
		number, rowWidth, outWidth, err := d.cfg.Local.Kernel.SetProgram(p.layer, p.bytes)
		if err == nil && (rowWidth != p.rowWidth || outWidth != p.outWidth) {
			err = fmt.Errorf("it maps rows of %d to %d, the backbone %d to %d",
				rowWidth, outWidth, p.rowWidth, p.outWidth)
		}
		if err != nil {
			p.local.refused = err.Error()
			return
		}
		p.local.number = number
		p.local.ready.Store(true)
	})
}

// takeLocal moves the pairs that the backbone holds itself from list to here.
func (r *run) takeLocal(list []int32) []int32 {
	p := r.program
	held := r.d.held.set.Load()
	if r.localFailed || !held.some(p.layer) {
		return list
	}
	if !p.local.ready.Load() {
		r.d.introduce(p)
	}
	if !p.local.ready.Load() {
		return list
	}
	return slices.DeleteFunc(list, func(pair int32) bool {
		if !held.holds(p.layer, r.call.IDs[pair]) {
			return false
		}
		r.here = append(r.here, pair)
		return true
	})
}

// computeHere computes the pairs in here with the local kernel. Those of a failure are pending
// again, for workers only.
func (r *run) computeHere() {
	if len(r.here) == 0 {
		return
	}
	c, d := r.call, r.d
	d.local.Lock()
	defer d.local.Unlock()
	b := &d.scratch
	b.row, b.expert = b.row[:0], b.expert[:0]
	for _, pair := range r.here {
		b.row = append(b.row, c.source(pair))
		b.expert = append(b.expert, c.IDs[pair])
	}
	w := c.OutWidth
	b.out = slices.Grow(b.out[:0], len(r.here)*w)[:len(r.here)*w]
	if err := d.cfg.Local.Kernel.Compute(r.program.local.number, c.Rows, b.row, b.expert, b.out); err != nil {
		r.localFailed = true
		r.pending = append(r.pending, r.here...)
		slices.Sort(r.pending) // a token's pairs lie together: see sumsFrom
		if len(r.reasons) < maxReasons {
			r.reasons = append(r.reasons, fmt.Sprintf("own copy: %v", err))
		}
		return
	}
	for i, pair := range r.here {
		copy(c.Out[int(pair)*w:][:w], b.out[i*w:])
		if r.race.on {
			r.race.filled[pair] = true
		}
	}
	if !c.Draft {
		d.ownPairs.Add(uint64(len(r.here)))
		r.share("", len(r.here))
	}
}
