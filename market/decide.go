package market

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// Budget is what a node gives, and never exceeded: half-done downloads and what is not yet
// deleted count.
type Budget struct {
	Disk      int64 // bytes that parts may take on disk; 0: nothing is held
	Memory    int64 // bytes that they may take in memory; 0: nothing is held
	Bandwidth int64 // bytes per second of downloads; 0: not known, downloads are not held back
	Drain     bool  // the node wants to stop: nothing new, and what others serve is given up
}

func (b Budget) bytes() int64 {
	if b.Drain {
		return 0
	}
	return max(0, min(b.Disk, b.Memory))
}

// Sizes returns the bytes of one expert of a layer; 0 while the model's header is not verified.
// It must not change its mind.
type Sizes func(model gguf.ModelID, layer int) int64

// Decision is what a node is to do now.
type Decision struct {
	Load []Part // download, load and prove; then call Done or Failed
	// Drop is to be stopped, unloaded and deleted; then call Dropped. It may be a piece of what
	// was loaded, and may still be loading. A part is listed until Dropped was called.
	Drop     []Part
	Announce bool      // what Holdings returns has changed: publish it, then call Announced
	Next     time.Time // call Decide again no later than this
}

// Volunteer decides for one node what to hold. It is a state machine: it acts by its Decision,
// and learns by Restore, Done, Failed, Dropped and Announced what became of it. It is not safe for
// concurrent use.
//
// A part is first claimed, which is only told. Rivals for one cell rank by rendezvous hash; after
// Policy.Settle whoever is one too many takes its claim elsewhere before a byte is downloaded.
// When nothing fits any more, a node moves: it claims what is scarcer by Policy.Margin than what
// it would leave, once that was so for Policy.Dwell to twice that, or a quarter where nobody has
// it; then it tells that it leaves the other, and deletes that only if after Policy.Settle others
// still serve it.
type Volunteer struct {
	id       string
	hash     uint64
	policy   Policy
	sizes    Sizes
	own      []*held
	failures map[gguf.ModelID]failure
	changed  bool
	urge     time.Time     // since when a move looks worth it; zero: it does not
	dwell    time.Duration // that it must look so
	moves    int           // begun so far
	drawn    uint64        // jitters so far
	rest     rest
}

type failure struct {
	pause time.Duration
	until time.Time
}

// rest is when a decision need not be made again: nothing has changed since the last.
type rest struct {
	version uint64
	budget  Budget
	until   time.Time // zero: it must be made
}

// idle is how often a volunteer with nothing to do looks again.
const idle = 10 * time.Second

// NewVolunteer returns a volunteer that holds nothing. id is the author of its announcements.
func NewVolunteer(id string, p Policy, sizes Sizes) (*Volunteer, error) {
	if id == "" || sizes == nil {
		return nil, errors.New("market: a volunteer needs an identity and the sizes of experts")
	}
	if err := p.validate(); err != nil {
		return nil, err
	}
	return &Volunteer{id: id, hash: hash(id), policy: p, sizes: sizes, failures: map[gguf.ModelID]failure{}}, nil
}

// jitter returns d to 2d, drawn from the identity.
func (v *Volunteer) jitter(d time.Duration) time.Duration {
	v.drawn++
	return d + time.Duration(mix(v.hash, v.drawn)%uint64(d+1))
}

// Decide looks at what others hold and says what to do.
func (v *Volunteer) Decide(t *Table, b Budget, now time.Time) Decision {
	r := round{v: v, t: t, budget: b, now: now, next: now.Add(patience), boards: map[gguf.ModelID]*board{}}
	if version := t.Version(now); v.rest.version == version && v.rest.budget == b && now.Before(v.rest.until) {
		r.next = v.rest.until
	} else {
		v.rest = rest{version: version, budget: b}
		r.shrink()
		r.settleClaims()
		r.settleLeaving()
		r.enrol()
		r.move()
		v.rest.until = r.next
	}
	for _, h := range v.own {
		if h.dropped {
			r.out.Drop = append(r.out.Drop, h.part())
		}
	}
	r.out.Announce = v.changed
	r.wake(now.Add(idle))
	r.out.Next = r.next
	return r.out
}

// round is one call of Decide.
type round struct {
	v      *Volunteer
	t      *Table
	budget Budget
	now    time.Time
	next   time.Time
	boards map[gguf.ModelID]*board
	out    Decision
}

func (r *round) wake(at time.Time) {
	if at.Before(r.next) {
		r.next = at
	}
}

// board returns what others hold of a model, nil if its header was not verified.
func (r *round) board(id gguf.ModelID) *board {
	b, ok := r.boards[id]
	if !ok {
		b = r.t.board(id, r.v.id, r.now)
		r.boards[id] = b
	}
	return b
}

// drop has a part deleted, or forgets it if nothing of it is on disk.
func (r *round) drop(h *held) {
	r.v.changed = true
	if h.onDisk {
		h.dropped = true
		return
	}
	r.v.own = slices.DeleteFunc(r.v.own, func(o *held) bool { return o == h })
}

// shrink gets below a budget that became smaller: first what does not serve, then what others
// serve best.
func (r *round) shrink() {
	v := r.v
	if r.budget.Drain {
		for _, h := range slices.Clone(v.own) {
			switch {
			case h.dropped || h.state == Leaving:
			case h.state == Serving:
				h.become(Leaving, r.now)
				h.swap = 0
				v.changed = true
			default:
				r.drop(h)
			}
		}
		return
	}
	over := v.Used() - r.budget.bytes()
	for _, h := range v.own {
		if h.dropped { // is on its way out already
			over -= h.bytes()
		}
	}
	order := slices.Clone(v.own)
	slices.SortStableFunc(order, func(a, b *held) int {
		return cmp.Or(cmp.Compare(a.state, b.state), -cmp.Compare(r.others(a, a.experts), r.others(b, b.experts)))
	})
	for _, h := range order {
		if over > 0 && h.counts() && !h.dropped {
			over -= h.bytes()
			r.drop(h)
		}
	}
}

// others is how many others serve the least covered cell of a range of a part.
func (r *round) others(h *held, experts gguf.Range) int {
	b := r.board(h.model)
	if b == nil {
		return 0
	}
	n := 1 << 16
	for e := experts.Begin; e < experts.End; e++ {
		n = min(n, int(b.serving[b.shape.cell(h.layer, e)]))
	}
	return n
}

// cost is the scarcity that giving up a range would leave behind.
func (r *round) cost(h *held, experts gguf.Range) float64 {
	b := r.board(h.model)
	if b == nil {
		return 0
	}
	var c float64
	for e := experts.Begin; e < experts.End; e++ {
		i := b.shape.cell(h.layer, e)
		c = max(c, scarcity(int(b.serving[i]), int(b.target[i])))
	}
	return c
}

// smallSwarm is how many peers still hear of a claim at once, in one or two hops.
const smallSwarm = 16

// settle is how long others take to answer: a third of the policy's time in a small swarm.
func (r *round) settle() time.Duration {
	if r.t.Peers(r.now) <= smallSwarm {
		return r.v.policy.Settle / 3
	}
	return r.v.policy.Settle
}

// settled reports whether a state was told long enough ago that others have answered.
func (r *round) settled(h *held) bool {
	if h.told.IsZero() {
		return false
	}
	at := h.told.Add(r.settle())
	if r.now.Before(at) {
		r.wake(at)
		return false
	}
	return true
}

// settleClaims begins the downloads of claims that stand, and withdraws the others.
func (r *round) settleClaims() {
	v := r.v
	for _, h := range slices.Clone(v.own) {
		if h.state != Claimed || h.dropped || !r.settled(h) {
			continue
		}
		b := r.board(h.model)
		if b == nil {
			continue
		}
		runs := r.standing(b, h)
		if h.swap != 0 {
			r.settleMove(h, len(runs) == 1 && runs[0] == h.experts)
			continue
		}
		if len(runs) == 0 {
			r.drop(h)
			continue
		}
		v.split(h, runs, r)
	}
}

// split loads the runs of a claim, and withdraws the rest.
func (v *Volunteer) split(h *held, runs []gguf.Range, r *round) {
	lost := *h
	whole := h.experts
	h.experts = runs[0]
	parts := []*held{h}
	for _, run := range runs[1:] {
		x := lost
		x.experts = run
		parts = append(parts, &x)
		v.own = append(v.own, &x)
	}
	if lost.onDisk { // what lost of a half-done download is to be deleted
		at := whole.Begin
		for _, run := range append(runs, gguf.Range{Begin: whole.End, End: whole.End}) {
			if x := lost; run.Begin > at {
				x.experts, x.dropped = gguf.Range{Begin: at, End: run.Begin}, true
				v.own = append(v.own, &x)
			}
			at = run.End
		}
	}
	for _, x := range parts {
		r.load(x)
	}
}

func (r *round) load(h *held) {
	h.become(Loading, r.now)
	h.onDisk = true
	r.v.changed = true
	r.out.Load = append(r.out.Load, h.part())
}

// standing returns the runs of a claim that its rivals leave to it. A cell is lost where rivals
// of higher rank bring it to its ceiling; or, above the level that all claims together can
// reach, where another cell would be covered worse with all of its claims than this one by those
// of higher rank.
func (r *round) standing(b *board, h *held) (runs []gguf.Range) {
	v := r.v
	mine := rank(v.hash, b.hash, h.layer)
	higher := make([]int, h.experts.Len())
	supply := v.pendingCells(b.id)
	for _, x := range b.bids {
		supply += x.slice.Layers.Len() * x.slice.Experts.Len()
		both := x.slice.Experts.Intersect(h.experts)
		if !x.slice.Layers.Contains(h.layer) || both.Len() == 0 || rank(x.peer, b.hash, h.layer) >= mine {
			continue
		}
		for e := both.Begin; e < both.End; e++ {
			higher[e-h.experts.Begin]++
		}
	}
	level := b.level(supply)
	elsewhere, _ := b.scarcest(&search{own: v.mask(b), room: func(layer int) int {
		return int(h.bytes() / max(1, v.sizes(b.id, layer)))
	}, limit: func(cell int) bool { return true }}, 0)
	for e := h.experts.Begin; e < h.experts.End; e++ {
		i := b.shape.cell(h.layer, e)
		n := int(b.fixed[i]) + higher[e-h.experts.Begin]
		if n >= v.policy.ceiling(int(b.target[i])) || n >= b.quota(i, level) && elsewhere < b.key(i, n) {
			continue
		}
		if k := len(runs); k > 0 && runs[k-1].End == e {
			runs[k-1].End++
		} else {
			runs = append(runs, gguf.Range{Begin: e, End: e + 1})
		}
	}
	return runs
}

// pendingCells counts the cells of a model that one has claimed oneself.
func (v *Volunteer) pendingCells(id gguf.ModelID) (n int) {
	for _, h := range v.own {
		if h.model == id && h.state == Claimed {
			n += h.experts.Len()
		}
	}
	return n
}

// mask marks one's own cells.
func (v *Volunteer) mask(b *board) []bool {
	var list []gguf.Slice
	for _, h := range v.own {
		if h.model == b.id {
			list = append(list, h.part().Slice)
		}
	}
	return b.mask(list)
}
