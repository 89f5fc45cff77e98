package meter

import (
	"bytes"
	"cmp"
	"math/bits"
	"slices"
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// mostLines bounds the lines of a draw, so that a receipt of them is not above
// settle.MaxReport: a line takes 16 bytes at most, a worker 48.
const mostLines = 12 << 10

// Pool is what was done of one model for the requests of this node, by whom, and was not
// drawn yet.
type Pool struct {
	self string // peer id of this node
	now  func() time.Time

	mu       sync.Mutex // guards what follows
	accounts accounts
}

func newPool(m *Model, self string, now func() time.Time) *Pool {
	return &Pool{self: self, now: now, accounts: newAccounts(m, min(settle.MaxWorkers, mostLines/len(m.parts)))}
}

// Own adds rows that this node served itself: of the dense parts, and of the experts where
// those are here, or the rows were in its cache.
func (p *Pool) Own(rows int, experts bool) {
	if rows <= 0 {
		return
	}
	m := p.accounts.model
	p.add(p.self, func(put func(int, uint64)) {
		all := gguf.Range{End: m.layers}
		m.eachDense(all, func(part int) { put(part, uint64(rows)) })
		if experts {
			m.eachExpert(all, func(part int) { put(part, uint64(rows)*m.parts[part].PerToken) })
		}
	})
}

// Window adds rows that went through a peer's window of layers, experts included.
func (p *Pool) Window(peerID string, layers gguf.Range, rows int) {
	m := p.accounts.model
	p.add(peerID, func(put func(int, uint64)) {
		m.eachDense(layers, func(part int) { put(part, uint64(rows)) })
		m.eachExpert(layers, func(part int) { put(part, uint64(rows)*m.parts[part].PerToken) })
	})
}

// Carried adds rows that a peer answered with the whole model. It says itself who computed them.
func (p *Pool) Carried(peerID string, rows int) {
	p.Window(carriedName+peerID, gguf.Range{End: p.accounts.model.layers}, rows)
}

// Pairs adds (row, expert) pairs of a peer that were accepted into the combine; "" is
// this node.
func (p *Pool) Pairs(peerID string, layer, pairs int) {
	part, ok := p.accounts.model.expertPart(layer)
	if ok {
		p.add(cmp.Or(peerID, p.self), func(put func(int, uint64)) { put(part, uint64(pairs)) })
	}
}

// Forfeit takes from a peer all that it has in the pool: what it computed was wrong, and whose
// requests it was for is not told apart.
func (p *Pool) Forfeit(peerID string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.accounts.by[peerID] != nil {
		p.accounts.drop(peerID)
	}
}

// add puts units into the account of a peer.
func (p *Pool) add(peerID string, each func(put func(part int, units uint64))) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.accounts.open(peerID, p.now())
	if a == nil {
		return
	}
	each(func(part int, units uint64) {
		if p.accounts.model.counted(part) {
			p.putLocked(a, part, units)
		}
	})
}

// putLocked adds units of a part. A part that is full loses half of what every worker has
// of it: what was not drawn for so long belongs to no answer.
func (p *Pool) putLocked(a *account, part int, units uint64) {
	most := p.accounts.limit(part)
	units = min(units, most)
	for p.accounts.total[part]+units > most {
		for _, o := range p.accounts.by {
			p.accounts.take(o, part, o.units[part]-o.units[part]/2)
		}
	}
	p.accounts.put(a, part, units)
}

// tokens is what so many tokens need of a part.
func (p *Pool) tokens(n uint64) (need func(part int) uint64) {
	return func(part int) uint64 { return min(n, mostTokens) * p.accounts.model.parts[part].PerToken }
}

// draw takes what is needed of each part, and no more than there is: of need
// T out of P units, a worker whose units are those from number c to d, by worker
// ascending, gives ⌊T·d/P⌋ − ⌊T·c/P⌋. So the sum is min(T, P) exactly, nobody gives more
// than it has, and what rounding leaves goes to the worker at whose units it arises.
// What a worker has that did nothing for ten minutes is dropped. What peers carried is apart.
func (p *Pool) draw(need func(part int) uint64) (direct, carried []settle.Work) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []*account
	before := p.now().Add(-staleAfter)
	for name, a := range p.accounts.by {
		if a.at.Before(before) {
			p.accounts.drop(name)
			continue
		}
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b *account) int { return bytes.Compare(a.node[:], b.node[:]) })
	work := make([]settle.Work, len(list))
	for i, a := range list {
		work[i].Worker = a.node
	}
	for part, have := range p.accounts.total {
		if n := min(need(part), have); n > 0 {
			p.drawLocked(list, work, part, n, have)
		}
	}
	for i, w := range work {
		switch {
		case len(w.Lines) == 0:
		case list[i].carried:
			carried = append(carried, w)
		default:
			direct = append(direct, w)
		}
	}
	return direct, carried
}

// drawLocked takes need of have units of a part.
func (p *Pool) drawLocked(list []*account, work []settle.Work, part int, need, have uint64) {
	var sum, given uint64
	for i, a := range list {
		sum += a.units[part]
		hi, lo := bits.Mul64(need, sum)
		upTo, _ := bits.Div64(hi, lo, have) // need <= have, so it fits
		if take := upTo - given; take > 0 {
			work[i].Lines = append(work[i].Lines, settle.Line{Part: uint32(part), Units: take})
			p.accounts.take(a, part, take)
		}
		given = upTo
	}
}
