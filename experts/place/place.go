// Package place decides which replica computes which expert of one call.
//
// It is pure: no clock, no network, no randomness, so the same input gives the same
// placement. It knows nothing of rows or programs, only of experts, of the peers that hold
// them and of how soon each is expected to answer.
//
// A Planner keeps scratch memory and allocates nothing once it has seen the largest call,
// because it runs once per layer and token. It is not safe for concurrent use; use one per
// goroutine. The zero value is ready.
package place

import "slices"

// Missing is the choice for an expert that no usable replica covers.
const Missing int32 = -1

// MaxExpert bounds expert ids, so that scratch memory is bounded too.
const MaxExpert = 1 << 16

// Peer is what the caller knows of one peer at this instant. Times share any one unit.
type Peer struct {
	Base    float32 // expected time of a call without work: the smoothed round trip
	PerPair float32 // expected time of one (row, expert) pair
	Queued  int32   // pairs that the peer has been sent and has not answered
	Avoid   bool    // suspect, draining or already failed for this call: covers nothing
	Rank    uint64  // in a draw, see Rank
}

// Replica says that a peer (an index into the peers of the call) holds the experts [From, To)
// of the layer.
type Replica struct {
	Peer     int32
	From, To int32
}

// Planner chooses replicas. TouchCost is what every further peer of a call costs, in the unit
// of Peer: the frame to build and the answer to wake up for. It keeps a call on few peers
// unless spreading it is worth more.
type Planner struct {
	TouchCost float32

	slot     []int32 // by expert: index+1 into distinct during Plan, else 0
	distinct []demand
	load     []int32 // by peer: pairs given to it in this call
	touched  int
	worst    float32 // latest expected completion so far
}

// demand is one expert of the call.
type demand struct {
	expert, pairs int32
	peer          int32 // chosen peer, or Missing
	open          bool  // more than one candidate: decided in the second pass
}

// Plan fills choice[i] with the index of the peer that computes experts[i], or Missing, and
// returns how many of them are Missing. All pairs of one expert go to one peer, so that its
// weights are read once. Experts with a single candidate are settled first; the others then
// go, largest first, where the completion of the whole call is expected soonest, and to a
// peer already in use when that makes no difference. Expert ids must lie in [0, MaxExpert),
// others are Missing. choice must be as long as experts.
func (p *Planner) Plan(peers []Peer, replicas []Replica, experts, choice []int32) (missing int) {
	p.begin(len(peers), experts)
	open := 0
	for i := range p.distinct {
		d := &p.distinct[i]
		var candidates int
		d.peer, candidates = p.best(peers, replicas, d)
		if d.open = candidates > 1; d.open {
			open++
		} else if candidates == 1 {
			p.assign(peers, d)
		}
	}
	if open > 0 {
		p.settle(peers, replicas)
	}
	return p.fill(experts, choice)
}

// fill hands the peers of the distinct experts over to choice, and clears what begin made.
func (p *Planner) fill(experts, choice []int32) (missing int) {
	for i, e := range experts {
		choice[i] = Missing
		if e >= 0 && e < MaxExpert {
			choice[i] = p.distinct[p.slot[e]-1].peer
		}
		if choice[i] == Missing {
			missing++
		}
	}
	for _, d := range p.distinct {
		p.slot[d.expert] = 0
	}
	return missing
}

// begin collects the distinct experts of the call and clears the load of its peers.
func (p *Planner) begin(peers int, experts []int32) {
	p.distinct = p.distinct[:0]
	p.touched, p.worst = 0, 0
	if cap(p.load) < peers {
		p.load = make([]int32, peers)
	}
	p.load = p.load[:peers]
	clear(p.load)
	for _, e := range experts {
		if e < 0 || e >= MaxExpert {
			continue
		}
		if int(e) >= len(p.slot) {
			p.slot = append(p.slot, make([]int32, int(e)+1-len(p.slot))...)
		}
		if p.slot[e] == 0 {
			p.distinct = append(p.distinct, demand{expert: e, peer: Missing})
			p.slot[e] = int32(len(p.distinct))
		}
		p.distinct[p.slot[e]-1].pairs++
	}
}

// settle assigns the experts that have a choice, those with most pairs first.
func (p *Planner) settle(peers []Peer, replicas []Replica) {
	slices.SortFunc(p.distinct, func(a, b demand) int {
		if a.pairs != b.pairs {
			return int(b.pairs - a.pairs)
		}
		return int(a.expert - b.expert)
	})
	for i := range p.distinct {
		d := &p.distinct[i]
		p.slot[d.expert] = int32(i + 1)
		if d.open {
			d.peer, _ = p.best(peers, replicas, d)
			p.assign(peers, d)
		}
	}
}

// best returns the peer that completes the call soonest if it takes d, and the number of
// replicas that could.
func (p *Planner) best(peers []Peer, replicas []Replica, d *demand) (peer int32, candidates int) {
	peer = Missing
	var bestAt, bestCall float32
	for _, r := range replicas {
		if d.expert < r.From || d.expert >= r.To || peers[r.Peer].Avoid {
			continue
		}
		candidates++
		at := p.finish(&peers[r.Peer], r.Peer, d.pairs)
		call := max(at, p.worst)
		switch {
		case peer == Missing, call < bestCall:
		case call > bestCall:
			continue
		case p.load[r.Peer] > 0 != (p.load[peer] > 0):
			if p.load[r.Peer] == 0 {
				continue
			}
		case at >= bestAt:
			continue
		}
		peer, bestAt, bestCall = r.Peer, at, call
	}
	return peer, candidates
}

// finish is when a peer would be done with its load and pairs more. Frames are sent one after
// another, so a peer not yet in use starts later by TouchCost for each one that is.
func (p *Planner) finish(peer *Peer, index, pairs int32) float32 {
	at := peer.Base + peer.PerPair*float32(peer.Queued+p.load[index]+pairs)
	if p.load[index] == 0 {
		at += p.TouchCost * float32(p.touched)
	}
	return at
}

func (p *Planner) assign(peers []Peer, d *demand) {
	p.worst = max(p.worst, p.finish(&peers[d.peer], d.peer, d.pairs))
	if p.load[d.peer] == 0 {
		p.touched++
	}
	p.load[d.peer] += d.pairs
}
