package experts

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/experts/place"
)

// Hedging: a part that is later than nineteen of twenty of its worker's are is asked of others
// too. The first answer to a pair is kept, and what is not needed any more is cancelled. Each
// call sent earns a tenth of a hedge, so that a slow swarm gets a tenth more work at most.
const (
	hedgeCost   = 10
	mostCredit  = 100 // ten hedges in a row
	firstCredit = 20
)

// hedges counts calls as they are sent: CALL frames, of which a Compute may need several.
type hedges struct {
	credit                    atomic.Int64
	sent, asked, won, refused atomic.Uint64
}

func (h *hedges) earn() {
	h.sent.Add(1)
	if h.credit.Load() < mostCredit {
		h.credit.Add(1)
	}
}

func (h *hedges) spend() bool {
	if h.credit.Add(-hedgeCost) >= 0 {
		return true
	}
	h.credit.Add(hedgeCost)
	h.refused.Add(1)
	return false
}

// HedgeStats counts since the dispatcher was made.
type HedgeStats struct {
	Sent    uint64 // calls sent to workers, without hedges
	Hedged  uint64 // calls that others were asked for too, at most a tenth of Sent and 2
	Won     uint64 // of these, answered by the others first
	Refused uint64 // not hedged because that was a tenth already
}

// Hedges returns the counters of hedging.
func (d *Dispatcher) Hedges() HedgeStats {
	h := &d.hedges
	return HedgeStats{Sent: h.sent.Load(), Hedged: h.asked.Load(), Won: h.won.Load(), Refused: h.refused.Load()}
}

// race is what a run with hedges knows of its pairs.
type race struct {
	on     bool
	asked  []int32 // live parts with the pair
	filled []bool  // Call.Out has it

	mu     sync.Mutex // held while a hedged part fills; guards claims
	claims []bool     // a part filled it
}

// begin starts the race of a call in which every pair is with one part, pending or filled.
func (c *race) begin(pairs int, parts []*part, pending []int32) {
	c.on = true
	c.asked = slices.Grow(c.asked[:0], pairs)[:pairs]
	c.filled = slices.Grow(c.filled[:0], pairs)[:pairs]
	c.claims = slices.Grow(c.claims[:0], pairs)[:pairs]
	clear(c.claims)
	for i := range pairs {
		c.asked[i], c.filled[i] = 0, true
	}
	for _, p := range parts {
		for _, pair := range p.pairs {
			c.asked[pair], c.filled[pair] = 1, false
		}
	}
	for _, pair := range pending {
		c.filled[pair] = false
	}
}

// claim is for one row of an answer, which some pairs are in: it says how many of these nobody has
// filled yet. If there is one the row is taken, in place of what was filled of the others. That is
// whole rows and sums: who is asked for some pairs of a part that is late, or for what was lost, is
// asked for nothing else of their token that others have, so of two sums one is in the other, or
// they have no pair in common.
func (c *race) claim(pairs []int32) (fresh int) {
	for _, pair := range pairs {
		if !c.claims[pair] {
			c.claims[pair] = true
			fresh++
		}
	}
	return fresh
}

// settle takes in that a part is done, and returns the pairs of it that nobody has now.
func (c *race) settle(p *part, lost []int32) []int32 {
	for _, pair := range p.pairs {
		c.asked[pair]--
		if p.err == nil {
			c.filled[pair] = true
		} else if c.asked[pair] == 0 && !c.filled[pair] {
			lost = append(lost, pair)
		}
	}
	return lost
}

// over says whether others have answered all pairs of a part.
func (c *race) over(p *part) bool {
	return !slices.ContainsFunc(p.pairs, func(pair int32) bool { return !c.filled[pair] })
}

// hedge asks others for the pairs of a part that is late, if they have them all.
func (r *run) hedge(p *part, now time.Time) {
	if p.s == nil {
		return // it is over
	}
	p.probe = p.s.ping(now) // so that it is known whether it lives when another one answers
	if r.d.cfg.NoHedge || r.only != nil || len(r.pending) > 0 || p.hedged {
		return
	}
	routes := r.program.routes.Load()
	r.pending, r.except = append(r.pending, p.pairs...), p.s
	defer func() { r.pending, r.except = r.pending[:0], nil }()
	r.plan(routes, now, trusted)
	if slices.Contains(r.choice, place.Missing) || !r.d.hedges.spend() {
		return
	}
	if !r.race.on {
		r.race.begin(len(r.call.IDs), r.parts, nil)
	}
	if !p.race() {
		return // answered meanwhile
	}
	r.d.hedges.asked.Add(1)
	p.s.tally.hedged.Add(1)
	r.rest = r.rest[:0] // what could not be sent: the part itself has it still
	r.hedging = true
	for i, s := range routes.sessions {
		if !r.peers[i].Avoid {
			r.ask(s, int32(i), now)
		}
	}
	r.hedging = false
}

// race has a part fill only the pairs that it claims; false if it was done before.
func (p *part) race() bool {
	p.mu.Lock() // the reader fills under it
	defer p.mu.Unlock()
	p.hedged = true
	return !p.done.Load()
}

// endRaces cancels the parts of which others have answered all pairs.
func (r *run) endRaces(now time.Time) {
	r.parts = slices.DeleteFunc(r.parts, func(p *part) bool {
		if !r.race.over(p) {
			return false
		}
		if p.revoke() {
			r.outrun(p, now)
		} else if p.err == nil {
			r.share(p.s.peer, p.filled)
		}
		r.lost = r.race.settle(p, r.lost[:0])
		r.recycle(p)
		return true
	})
}

// outrun takes in that others answered first.
func (r *run) outrun(p *part, now time.Time) {
	p.err = fmt.Errorf("another worker was faster")
	if p.twin {
		return // it was asked later
	}
	r.d.hedges.won.Add(1)
	p.s.lat.outrun(now.Sub(p.sent), p.ahead, len(p.pairs))
	p.s.doubted.Store(p.probe)
}
