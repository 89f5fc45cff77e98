package market

import (
	"math"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// stageRound is one call of Stager.Decide.
type stageRound struct {
	s    *Stager
	t    *Table
	b    Budget
	now  time.Time
	next time.Time
	view *view
	out  StageDecision
}

// Decide looks at what others hold and says what to do. The model's shape must be set in the
// table; until then nothing is claimed.
func (s *Stager) Decide(t *Table, b Budget, now time.Time) StageDecision {
	r := stageRound{s: s, t: t, b: b, now: now, next: now.Add(patience)}
	if version := t.Version(now); s.rest.version == version && s.rest.budget == b && now.Before(s.rest.until) {
		r.next = s.rest.until
	} else {
		s.rest = rest{version: version, budget: b}
		if r.look() {
			r.step()
		}
		s.rest.until = r.next
	}
	r.out.Drop, r.out.Announce = s.gone, s.changed
	r.wake(now.Add(idle))
	r.out.Next = r.next
	return r.out
}

func (r *stageRound) wake(at time.Time) {
	if at.Before(r.next) {
		r.next = at
	}
}

// look tells what room there is and makes the view of the others, if the table can tell.
func (r *stageRound) look() bool {
	s := r.s
	room := Footprint{max(0, min(r.b.Disk, MaxHint)), max(0, min(r.b.Memory, MaxHint))}
	switch {
	case r.b.Drain:
		room = Footprint{}
	case r.now.Before(s.until):
		r.wake(s.until)
		room = Footprint{}
	}
	if room != s.room {
		s.room, s.changed = room, true
	}
	all, ok := r.t.stagers(s.fit, r.now)
	r.view = newView(s.fit, stager{peer: s.id, rank: s.rank, room: room}, all)
	return ok
}

// step takes the window as far as it may go now.
func (r *stageRound) step() {
	s := r.s
	if s.own != nil && !r.b.Drain && !s.fit.fits(s.own.layers, Footprint{r.b.Disk, r.b.Memory}) {
		s.give() // the budget became smaller
		s.next = nil
	}
	if r.b.Drain {
		r.drain()
		return
	}
	if s.own == nil {
		r.claim(nil)
		return
	}
	switch s.own.state {
	case Claimed:
		r.settleClaim()
	case Serving:
		r.serve()
	case Leaving:
		r.leave()
	}
}

// claim claims the best window; instead of one that was claimed before, if any.
func (r *stageRound) claim(before *stage) {
	s := r.s
	w, _ := r.view.choose()
	if before != nil {
		s.turns++
		s.give()
	} else {
		s.turns = 0
	}
	if w.Len() > 0 {
		s.own = &stage{layers: w, state: Claimed}
		s.changed = true
	}
}

// settled reports whether a state was told long enough ago that others have answered.
func (r *stageRound) settled(x *stage) bool {
	if x.told.IsZero() {
		return false
	}
	settle := r.s.policy.Settle
	if r.t.Peers(r.now) <= smallSwarm {
		settle /= 3
	}
	at := x.told.Add(settle)
	if r.now.Before(at) {
		r.wake(at)
		return false
	}
	return true
}

// settleClaim loads a claim that stands, or takes it elsewhere.
func (r *stageRound) settleClaim() {
	s := r.s
	if !r.settled(s.own) || s.gone.Len() > 0 {
		return
	}
	if !r.stands(s.own) {
		r.claim(s.own)
		return
	}
	s.own.become(Loading)
	s.own.onDisk, s.changed = true, true
	r.out.Load = s.own.layers
}

// stands reports whether there is no better window to claim. One that is half on disk
// must only help, one that was changed often stands.
func (r *stageRound) stands(x *stage) bool {
	best, g := r.view.choose()
	if best == x.layers {
		return true
	}
	if best.Len() == 0 {
		return false
	}
	with := worthWith(g, x.layers)
	if x.onDisk {
		return with > worthWith(g, gguf.Range{})
	}
	return r.s.turns >= steady || with >= worthWith(g, best)
}

// worthWith is the worth of a graph with one window more; an empty one is none.
func worthWith(g *tiling, w gguf.Range) float64 {
	c := g.clone()
	if w.Len() > 0 {
		c.add(w)
	}
	return c.worth()
}

// drain gives up what is not needed; a chain that others cannot serve is kept until the node ends.
func (r *stageRound) drain() {
	s := r.s
	s.next, s.urge = nil, time.Time{}
	switch {
	case s.own == nil:
	case s.own.state == Serving:
		s.own.become(Leaving)
		s.changed = true
	case s.own.state == Leaving:
		if r.settled(s.own) && r.spared() {
			s.give()
		}
	default:
		s.give()
	}
}

// spared reports whether a chain of others serves without this node, or none serves with it.
// Others that leave count only where they move, and yield to this node: they look so too.
func (r *stageRound) spared() bool {
	var serving []gguf.Range
	for i := range r.view.others {
		o := &r.view.others[i]
		serving = append(serving, o.has(Serving)...)
		if len(o.has(Claimed)) > 0 && !o.before(&r.view.me) {
			serving = append(serving, o.has(Leaving)...)
		}
	}
	g := newTiling(r.view.at, serving)
	if g.fill(1) > 0 {
		return true
	}
	g.add(r.s.own.layers)
	return g.fill(1) == 0
}

// serve looks whether there is a better place, and goes on with a move that was claimed.
func (r *stageRound) serve() {
	s := r.s
	if s.next != nil {
		if !r.settled(s.next) {
			return
		}
		if r.better(s.next.layers) {
			s.own.become(Leaving)
		} else {
			s.next = nil
		}
		s.changed = true
		return
	}
	if again := s.looked.Add(glance); r.now.Before(again) {
		r.wake(again)
		return
	}
	s.looked = r.now
	w, ok := r.move()
	if !ok {
		s.urge = time.Time{}
		return
	}
	if s.urge.IsZero() {
		s.urge, s.dwell = r.now, s.jitter(s.policy.Dwell)
	}
	dwell := s.dwell
	if r.others() < 1 {
		dwell /= 4
	}
	if due := s.urge.Add(dwell); r.now.Before(due) {
		r.wake(due)
		return
	}
	s.urge = time.Time{}
	s.next, s.changed = &stage{layers: w, state: Claimed}, true
}

// leave gives up the window that was left for another, or stays.
func (r *stageRound) leave() {
	s := r.s
	if s.next == nil { // drained, and not any more
		s.own.become(Serving)
		s.changed = true
		return
	}
	if !r.settled(s.own) {
		return
	}
	if !r.better(s.next.layers) || !r.spared() {
		s.own.become(Serving)
		s.next, s.changed = nil, true
		return
	}
	next := s.next
	s.give()
	s.own, s.next, s.turns = next, nil, 0
}

// others counts the complete chains with the window where it is.
func (r *stageRound) others() int {
	g := r.graph()
	g.add(r.s.own.layers)
	return g.fill(math.MaxInt)
}

// graph is of the windows that others hold or will.
func (r *stageRound) graph() *tiling {
	g := newTiling(r.view.at, r.view.fixed)
	for _, o := range r.view.free { // that begin are not in the way of who serves
		for _, w := range o.has(Claimed) {
			g.add(w)
		}
	}
	return g
}

// move returns a better place for a window that serves.
func (r *stageRound) move() (gguf.Range, bool) {
	if r.s.gone.Len() > 0 || !r.spared() {
		return gguf.Range{}, false
	}
	if w := r.view.pick(r.graph(), &r.view.me); w.Len() > 0 && w != r.s.own.layers && r.better(w) {
		return w, true
	}
	if r.others() > 0 {
		return gguf.Range{}, false
	}
	w := r.rearranged()
	return w, w.Len() > 0 && w != r.s.own.layers
}

// better reports whether a move to a window is worth it.
func (r *stageRound) better(w gguf.Range) bool {
	stay, there := worthWith(r.graph(), r.s.own.layers), worthWith(r.graph(), w)
	least := r.s.policy.Margin * there
	if stay < float64(r.s.policy.Target) {
		least = r.s.policy.Margin * float64(w.Len()) / float64(len(r.view.Layers))
	}
	return there > stay && there-stay >= least || stay < 1 && r.rearranged() == w
}

// rearranged returns the place of this node if all, also those that serve, were placed anew so
// that a chain is complete; empty if it has none then, or there is no such chain.
func (r *stageRound) rearranged() gguf.Range {
	nodes := []stager{r.view.me}
	var fixed []gguf.Range
	for _, o := range r.view.others {
		if o.room != (Footprint{}) {
			nodes = append(nodes, o)
		} else {
			fixed = append(fixed, o.has(Serving, Loading)...)
		}
	}
	slices.SortFunc(nodes, func(a, b stager) int {
		if a.before(&b) {
			return -1
		}
		return 1
	})
	return r.view.complete(fixed, nodes)[r.view.me.peer]
}
