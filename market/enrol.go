package market

import (
	"slices"
	"time"

	"kvasird/ggml/gguf"
)

// class orders models: those that a backbone runs first. Without a list every model whose header
// was verified is one to volunteer for.
func (r *round) classes() (lists [2][]*board) {
	ids := r.v.policy.Models
	if len(ids) == 0 {
		ids = r.t.Verified()
	}
	for _, id := range ids {
		b := r.board(id)
		if b == nil || r.now.Before(r.v.failures[id].until) {
			if b != nil {
				r.wake(r.v.failures[id].until)
			}
			continue
		}
		if b.backbones > 0 {
			lists[0] = append(lists[0], b)
		} else {
			lists[1] = append(lists[1], b)
		}
	}
	return lists
}

// maxClaims bounds what one call claims.
const maxClaims = 64

// enrol claims what is scarcest while there is room, then replicas beyond the target up to the
// ceiling.
func (r *round) enrol() {
	v := r.v
	for range maxClaims {
		room := r.room()
		if room <= 0 || len(v.own) >= MaxHoldings/2 {
			return
		}
		b, f, ok := r.scarcest(room, false)
		if !ok {
			if b, f, ok = r.scarcest(room, true); !ok {
				return
			}
		}
		h := &held{model: b.id, layer: f.layer, experts: f.experts, size: v.sizes(b.id, f.layer)}
		h.become(Claimed, r.now)
		v.own = append(v.own, h)
		v.changed = true
	}
}

// room is how many bytes may be claimed now: what the budget leaves, no more at once than one
// piece, of which one expert may always be.
func (r *round) room() int64 {
	left := r.budget.bytes() - r.v.Used()
	if r.budget.Bandwidth <= 0 || left <= 0 {
		return left
	}
	piece := r.budget.Bandwidth * int64(r.v.policy.Piece/time.Second)
	busy := false
	for _, h := range r.v.own {
		if h.state == Claimed || h.state == Loading {
			piece, busy = piece-h.bytes(), true
		}
	}
	if !busy {
		return min(left, max(piece, r.largestExpert()))
	}
	return min(left, piece)
}

// largestExpert returns the bytes of the largest expert of any model that may be claimed.
func (r *round) largestExpert() (n int64) {
	for _, list := range r.classes() {
		for _, b := range list {
			for _, run := range b.shape.MoE {
				for l := run.Begin; l < run.End; l++ {
					n = max(n, r.v.sizes(b.id, l))
				}
			}
		}
	}
	return n
}

// scarcest finds what to claim with so many bytes: of the first class that has something scarce,
// or, with spare, something below its ceiling.
func (r *round) scarcest(bytes int64, spare bool) (best *board, found found, ok bool) {
	v := r.v
	for _, list := range r.classes() {
		for _, b := range list {
			s := search{peer: v.hash, spread: true, own: v.mask(b), room: v.fits(b, bytes), limit: b.scarce}
			if spare {
				s.limit = func(i int) bool { return b.total(i) < v.policy.ceiling(int(b.target[i])) }
			}
			for _, x := range b.bids {
				s.supply += x.slice.Layers.Len() * x.slice.Experts.Len()
			}
			if f, hit := b.pick(&s); hit && (!ok || f.key < found.key) {
				best, found, ok = b, f, true
			}
		}
		if ok {
			return best, found, true
		}
	}
	return nil, found, false
}

// fits returns how many experts of a layer fit in so many bytes.
func (v *Volunteer) fits(b *board, bytes int64) func(layer int) int {
	return func(layer int) int {
		size := v.sizes(b.id, layer)
		if size <= 0 {
			return 0
		}
		return int(min(bytes/size, MaxExperts))
	}
}

// move claims something scarcer than what would be left behind for it.
func (r *round) move() {
	v := r.v
	if r.budget.Drain || len(v.own) > MaxHoldings-2 ||
		slices.ContainsFunc(v.own, func(h *held) bool { return h.state != Serving || h.dropped }) {
		v.urge = time.Time{}
		return
	}
	give, out, b, f, ok := r.worthMoving()
	if !ok {
		v.urge = time.Time{}
		return
	}
	if v.urge.IsZero() {
		v.urge, v.dwell = r.now, v.jitter(v.policy.Dwell)
	}
	dwell := v.dwell
	if f.key == 0 { // nobody has it: answers wait
		dwell /= 4
	}
	if due := v.urge.Add(dwell); r.now.Before(due) {
		r.wake(due)
		return
	}
	v.urge = time.Time{}
	v.moves++
	v.cut(give, out).swap = v.moves
	h := &held{model: b.id, layer: f.layer, experts: f.experts, size: v.sizes(b.id, f.layer), swap: v.moves}
	h.become(Claimed, r.now)
	v.own = append(v.own, h)
	v.changed = true
}

// worthMoving finds what to give up and what to claim for it.
func (r *round) worthMoving() (give *held, out gguf.Range, b *board, f found, ok bool) {
	var most int64
	for _, h := range r.v.own {
		most = max(most, h.bytes())
	}
	if b, f, ok = r.scarcest(most, false); !ok {
		return nil, out, nil, f, false
	}
	size := r.v.sizes(b.id, f.layer)
	gain := r.v.policy.Margin
	for _, h := range r.v.own {
		experts := min(f.experts.Len(), int(h.bytes()/size))
		if experts < 1 {
			continue
		}
		n := int((int64(experts)*size + h.size - 1) / h.size)
		for at := h.experts.Begin; at+n <= h.experts.End; at += n {
			x := gguf.Range{Begin: at, End: at + n}
			cost := r.cost(h, x)
			if from := r.board(h.model); from != nil && from.backbones == 0 && b.backbones > 0 {
				cost = 0
			}
			if g := 1 - f.key - cost; r.others(h, x) > 0 && g > gain {
				gain, give, out = g, h, x
			}
		}
	}
	if give == nil {
		return nil, out, nil, f, false
	}
	f.experts.End = f.experts.Begin + min(f.experts.Len(), int(int64(out.Len())*give.size/size))
	return give, out, b, f, true
}

// given returns what is given up for a claim, nil if it is deleted already.
func (v *Volunteer) given(claim *held) *held {
	for _, h := range v.own {
		if h.swap == claim.swap && h != claim {
			return h
		}
	}
	return nil
}

// settleMove goes on with a move whose claim was told: leaves what is given up, or stays.
func (r *round) settleMove(claim *held, stands bool) {
	give := r.v.given(claim)
	switch {
	case give == nil:
		if stands && r.v.Used()+claim.bytes() <= r.budget.bytes() {
			claim.swap = 0
			r.load(claim)
		} else {
			r.drop(claim)
		}
	case give.dropped: // not yet deleted
	case !stands:
		r.stay(give, claim)
	case give.state == Serving:
		give.become(Leaving, r.now)
		r.v.changed = true
	}
}

// stay calls a move off.
func (r *round) stay(give, claim *held) {
	give.swap = 0
	if give.state == Leaving {
		give.become(Serving, r.now)
	}
	r.v.changed = true
	if claim != nil {
		r.drop(claim)
	}
}

// settleLeaving gives up what others still serve after they were told. Others that leave too do
// not count: of two that both leave each other alone, both stay.
func (r *round) settleLeaving() {
	v := r.v
	for _, h := range slices.Clone(v.own) {
		if h.state != Leaving || h.dropped || !r.settled(h) {
			continue
		}
		n := r.others(h, h.experts)
		if h.swap == 0 {
			if n > 0 && r.budget.Drain {
				r.drop(h)
			} else if !r.budget.Drain {
				r.stay(h, nil)
			}
			continue
		}
		claim := v.given(h)
		if claim == nil || n == 0 || r.lessGain(h, claim) {
			r.stay(h, claim)
			continue
		}
		r.drop(h)
	}
}

// lessGain reports whether a move is not worth it any more.
func (r *round) lessGain(give, claim *held) bool {
	b := r.board(claim.model)
	if b == nil {
		return true
	}
	i := b.shape.cell(claim.layer, claim.experts.Begin)
	return scarcity(int(b.fixed[i]), int(b.target[i]))-r.cost(give, give.experts) <= r.v.policy.Margin
}
