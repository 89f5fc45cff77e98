package meter

import (
	"sync"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

const (
	mostPeers = 1024    // that something was computed for
	mostCells = 1 << 20 // parts of all of them
)

// Counts is what this node computed of one model for each peer that asked, and did not
// sign yet.
type Counts struct {
	self string
	now  func() time.Time

	mu       sync.Mutex // guards what follows
	accounts accounts
}

func newCounts(m *Model, self string, now func() time.Time) *Counts {
	return &Counts{self: self, now: now, accounts: newAccounts(m, min(mostPeers, mostCells/len(m.parts)))}
}

// Pairs adds (row, expert) pairs that a peer asked for and was answered.
func (c *Counts) Pairs(peerID string, layer, pairs int) {
	if part, ok := c.accounts.model.expertPart(layer); ok {
		c.add(peerID, func(put func(int, uint64)) { put(part, uint64(pairs)) })
	}
}

// Window adds rows that were computed by a window of layers for an entry, experts
// included.
func (c *Counts) Window(peerID string, layers gguf.Range, rows int) {
	m := c.accounts.model
	c.add(peerID, func(put func(int, uint64)) {
		m.eachDense(layers, func(part int) { put(part, uint64(rows)) })
		m.eachExpert(layers, func(part int) { put(part, uint64(rows)*m.parts[part].PerToken) })
	})
}

// add puts units into the account of a peer, up to what is kept of a part. Nothing is
// counted for this node itself: it signs its own work as it draws it.
func (c *Counts) add(peerID string, each func(put func(part int, units uint64))) {
	if peerID == c.self {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.accounts.open(peerID, c.now())
	if a == nil {
		return
	}
	each(func(part int, units uint64) {
		if c.accounts.model.counted(part) {
			c.accounts.put(a, part, min(units, c.accounts.limit(part)-a.units[part]))
		}
	})
}

// take takes units of a peer's account: of each line what there is, and at most what it says.
func (c *Counts) take(peerID string, lines []settle.Line) []settle.Line {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.accounts.by[peerID]
	if a == nil {
		return nil
	}
	var got []settle.Line
	for _, l := range lines {
		if n := min(l.Units, a.units[l.Part]); n > 0 {
			c.accounts.take(a, int(l.Part), n)
			got = append(got, settle.Line{Part: l.Part, Units: n})
		}
	}
	return got
}

// giveBack undoes take.
func (c *Counts) giveBack(peerID string, lines []settle.Line) {
	c.add(peerID, func(put func(int, uint64)) {
		for _, l := range lines {
			put(int(l.Part), l.Units)
		}
	})
}
