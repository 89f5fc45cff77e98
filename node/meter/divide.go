package meter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// divideTries are for an answer that was lost on its way: the same one comes again.
	divideTries = 2
	// mostTold bounds the bytes of divisions that are kept to be said again.
	mostTold = 16 << 20
)

// room is what a receipt can take of one division.
type room struct{ workers, lines int }

// roomBeside divides what a receipt can take beside some work, among so many.
func roomBeside(work []settle.Work, among int) room {
	r := room{settle.MaxWorkers - len(work), mostLines}
	for _, w := range work {
		r.lines -= len(w.Lines)
	}
	among = max(1, among)
	return room{r.workers / among, r.lines / among}
}

// carriedBy is what a peer carried of a request, by who did it. Where it does not say, or not
// well, all of it is its own.
func (m *Meter) carriedBy(ctx context.Context, about question, w settle.Work, most room) []share {
	asking, cancel := context.WithTimeout(ctx, 2*m.cfg.Wait) // it asks others meanwhile
	defer cancel()
	about.Lines = w.Lines
	var err error
	for range divideTries {
		var record []byte
		if record, err = m.ask(asking, w.Worker, frameDivide, about); err != nil {
			continue
		}
		var shares []share
		if shares, err = decodeDivision(record); err == nil {
			err = checkDivision(about, shares, most)
		}
		if err == nil {
			return shares
		}
		break
	}
	m.cfg.Logger.Info("a node that answered does not say who computed", "peer", p2p.PeerOf(w.Worker).String(), "request", about.Request.String(), "error", err)
	return m.statements(ctx, about, "", []settle.Work{w})
}

// checkDivision names the workers of shares, and refuses more than the question was about, a
// worker twice, and what no receipt takes.
func checkDivision(about question, shares []share, most room) error {
	left := unitsOf(about.Lines)
	seen := map[settle.Node]bool{}
	for i := range shares {
		worker, err := signerOf(about, shares[i].statement)
		if err != nil {
			return fmt.Errorf("share %d: %w", i, err)
		}
		if seen[worker] {
			return fmt.Errorf("worker %s has two shares", worker)
		}
		seen[worker] = true
		shares[i].work.Worker = worker
		most.lines -= len(shares[i].work.Lines)
		for _, l := range shares[i].work.Lines {
			if l.Units > left[l.Part] {
				return fmt.Errorf("worker %s: %d units of part %d, of which %d are left", worker, l.Units, l.Part, left[l.Part])
			}
			left[l.Part] -= l.Units
		}
	}
	if len(shares) > most.workers || most.lines < 0 {
		return fmt.Errorf("%d workers are more than the receipt can take", len(shares))
	}
	return nil
}

// join adds up shares by worker, ascending, and lists their statements.
func join(lists ...[]share) (work []settle.Work, statements [][]byte) {
	units := map[settle.Node]map[uint32]uint64{}
	for _, s := range slices.Concat(lists...) {
		if units[s.work.Worker] == nil {
			units[s.work.Worker] = map[uint32]uint64{}
		}
		for _, l := range s.work.Lines {
			units[s.work.Worker][l.Part] += l.Units
		}
		if s.statement != nil {
			statements = append(statements, s.statement)
		}
	}
	nodes := slices.SortedFunc(maps.Keys(units), func(a, b settle.Node) int { return bytes.Compare(a[:], b[:]) })
	for _, n := range nodes {
		work = append(work, settle.Work{Worker: n, Lines: linesOf(units[n])})
	}
	return work, statements
}

// asked is who asked for a division of what.
type asked struct {
	peerID  string
	request settle.QuoteID
}

// told is a division, once done is closed.
type told struct {
	done   chan struct{}
	answer []byte
	err    error
}

// divisions are those that were told, or are made now. Those being made are as many as
// streams are open.
type divisions struct {
	by    map[asked]*told
	order []asked // that are kept, oldest first
	bytes int     // of them
}

// divide says who computed what this node answered for a peer. The same question has the same
// answer.
func (m *Meter) divide(ctx context.Context, peerID string, q question) ([]byte, error) {
	key := asked{peerID, q.Request}
	m.mu.Lock()
	t := m.told.by[key]
	first := t == nil
	if first {
		t = &told{done: make(chan struct{})}
		m.told.by[key] = t
	}
	m.mu.Unlock()
	if !first {
		select {
		case <-t.done:
			return t.answer, t.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	t.answer, t.err = m.divideNow(ctx, peerID, q)
	close(t.done)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.told.keep(key, t)
	return t.answer, t.err
}

// keep keeps a division to be said again, in place of the oldest ones. What failed is asked
// for anew.
func (d *divisions) keep(key asked, t *told) {
	if t.err != nil {
		delete(d.by, key)
		return
	}
	d.order, d.bytes = append(d.order, key), d.bytes+len(t.answer)
	for d.bytes > mostTold {
		d.bytes -= len(d.by[d.order[0]].answer)
		delete(d.by, d.order[0])
		d.order = d.order[1:]
	}
}

// divideNow takes what was computed for the peer out of what is to be signed for it, and as much
// out of the pool, where it is with what was done for this node's own requests.
func (m *Meter) divideNow(ctx context.Context, peerID string, q question) ([]byte, error) {
	counts, err := m.cfg.Signer.countsOf(q)
	if err != nil {
		return nil, err
	}
	pool := m.pool(q.Model)
	if pool == nil {
		return nil, fmt.Errorf("nothing is answered here with model %s", q.Model)
	}
	got := counts.take(peerID, q.Lines)
	if len(got) == 0 {
		return nil, errors.New("nothing was answered here for this peer that is not divided already")
	}
	need := unitsOf(got)
	direct, carried := pool.draw(func(part int) uint64 { return need[uint32(part)] })
	work, _ := join(sharesOf(direct), sharesOf(carried))
	d := division{Version: version}
	for _, s := range m.statements(ctx, q, peerID, work) {
		if s.statement != nil {
			d.Shares = append(d.Shares, shareOf(s))
		}
	}
	if len(d.Shares) == 0 {
		counts.giveBack(peerID, got)
		return nil, errors.New("nobody states what was computed")
	}
	return encodeDivision(d), nil
}

func sharesOf(work []settle.Work) (shares []share) {
	for _, w := range work {
		shares = append(shares, share{work: w})
	}
	return shares
}
