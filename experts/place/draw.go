package place

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// Where work is paid for, who pays must not be able to tell who does it: work that one sends to
// oneself would move the price for everybody. So among the holders that are expected to answer
// first, one is drawn by a number that nobody knew before it was paid.
const (
	// MostDrawn bounds from how many holders is drawn.
	MostDrawn = 16

	drawDomain = "kvasird replica draw 1\n"
)

// Seed is what replicas are drawn by.
type Seed [sha256.Size]byte

// Rank is the place of a peer in the draw of a layer: of those that are drawn from, the one with
// the highest rank computes. It is the first eight bytes, big-endian, of SHA-256 over
// "kvasird replica draw 1\n", the seed, the layer (4 bytes, big-endian), and the peer's id. All
// experts of a layer have the same ranks, so that a call stays on few peers.
func Rank(seed *Seed, layer int32, peer string) uint64 {
	var buf [160]byte // more than any peer id needs, so that nothing is allocated
	b := append(buf[:0], drawDomain...)
	b = append(b, seed[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(layer))
	b = append(b, peer...)
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

// Draw is Plan with the choice left to the ranks of the peers: every expert goes, of the most
// peers (1 to MostDrawn) that hold it and are expected to answer first, to the one of highest
// rank. A peer that is to be avoided is not among them, so what is lost falls to the next. Of
// peers with one rank the first computes.
func (p *Planner) Draw(most int, peers []Peer, replicas []Replica, experts, choice []int32) (missing int) {
	p.begin(len(peers), experts)
	for i := range p.distinct {
		p.distinct[i].peer = draw(min(max(most, 1), MostDrawn), peers, replicas, &p.distinct[i])
	}
	return p.fill(experts, choice)
}

// draw returns the peer that computes an expert.
func draw(most int, peers []Peer, replicas []Replica, d *demand) int32 {
	type holder struct {
		at   float32 // when it is expected to be done
		peer int32
	}
	var buf [MostDrawn]holder
	best := buf[:0] // by at
	for _, r := range replicas {
		if d.expert < r.From || d.expert >= r.To || peers[r.Peer].Avoid ||
			slices.ContainsFunc(best, func(h holder) bool { return h.peer == r.Peer }) {
			continue
		}
		peer := &peers[r.Peer]
		at := peer.Base + peer.PerPair*float32(peer.Queued+d.pairs)
		i := len(best)
		for i > 0 && at < best[i-1].at {
			i--
		}
		if len(best) == most {
			if i == most {
				continue
			}
			best = best[:most-1]
		}
		best = slices.Insert(best, i, holder{at, r.Peer})
	}
	chosen := Missing
	for _, h := range best {
		if chosen == Missing || peers[h.peer].Rank > peers[chosen].Rank ||
			peers[h.peer].Rank == peers[chosen].Rank && h.peer < chosen {
			chosen = h.peer
		}
	}
	return chosen
}

// Holder is who holds blocks of a model. Holders of one Owner are no choice among each other.
type Holder struct {
	Owner  string
	Blocks []Block
}

// Among says from how many independent holders the experts of a block can be drawn: the fewest,
// over its layers and experts, of holders with different owners; 0 for an empty block. It is what
// whoever settles computes from what is announced, so it may be more than who draws was connected
// to.
func Among(holders []Holder, b Block) int {
	if b.FromLayer >= b.ToLayer || b.From >= b.To {
		return 0
	}
	fewest := len(holders)
	for _, layer := range layerEdges(holders, b.FromLayer, b.ToLayer) {
		fewest = min(fewest, owners(holders, layer, b.From, b.To))
	}
	return fewest
}

// layerEdges are the layers of [from, to) at which the holders may change: from itself, and where
// blocks begin and end.
func layerEdges(holders []Holder, from, to int32) []int32 {
	at := []int32{from}
	for _, h := range holders {
		for _, o := range h.Blocks {
			for _, x := range [2]int32{o.FromLayer, o.ToLayer} {
				if from < x && x < to {
					at = append(at, x)
				}
			}
		}
	}
	slices.Sort(at)
	return slices.Compact(at)
}

// owners is of how many owners there are holders of each of the experts [from, to) of a layer, at
// the least.
func owners(holders []Holder, layer, from, to int32) int {
	type edge struct {
		at    int32
		owner string
		by    int // blocks that begin; less than 0: end
	}
	var edges []edge
	for _, h := range holders {
		for _, o := range h.Blocks {
			begin, end := max(o.From, from), min(o.To, to)
			if o.FromLayer <= layer && layer < o.ToLayer && begin < end {
				edges = append(edges, edge{begin, h.Owner, 1}, edge{end, h.Owner, -1})
			}
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	fewest, at, blocks := len(holders), from, map[string]int{}
	for _, e := range edges {
		if e.at > at { // since at, nothing has changed
			fewest, at = min(fewest, len(blocks)), e.at
		}
		if blocks[e.owner] += e.by; blocks[e.owner] == 0 {
			delete(blocks, e.owner)
		}
	}
	if at < to {
		fewest = min(fewest, len(blocks))
	}
	return fewest
}
