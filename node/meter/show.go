package meter

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// showTime bounds showing a pass: the answer waits for it. Who shows it on has half of that.
	showTime = 3 * time.Second
	// mostShown bounds the passes that are remembered, to be shown to who asks for them.
	mostShown = 1024
	// mostShownOn bounds the passes of one entry that are shown on in a minute.
	mostShownOn, shownOnIn = 512, time.Minute
)

// shown is a pass of a request that runs, of this node or lent to it.
type shown struct {
	pass   settle.Pass
	record []byte
	lent   settle.Signature // by the entry to this node; of a pass of this node zero
}

// showing are the passes that run, the oldest first.
type showing struct {
	mu    sync.Mutex // guards what follows
	list  []*shown
	peers map[string]bool     // that are being shown what runs
	on    map[settle.Node]int // passes that were shown on, by entry
	since time.Time           // that on counts
}

// Show shows the pass of a request of this node to those who will compute for it, and waits until
// they know it or the time for that is over: who does not is asked all the same, and may refuse.
// Until ctx ends, ShowMore shows it to others.
func (m *Meter) Show(ctx context.Context, record []byte, peers []string) {
	p, err := settle.ParsePass(record)
	if err != nil || p.Entry != m.self {
		m.cfg.Logger.Warn("what was given as the pass of a request is none", "error", err)
		return
	}
	one := &shown{pass: p, record: record}
	if m.running.add(one, m.cfg.Now()) {
		context.AfterFunc(ctx, func() { m.running.remove(p.Request) })
	}
	m.showAll(ctx, peers, []*shown{one}, showTime)
}

// ShowMore shows a peer, in the background, all that runs of a model: it computes nothing more
// before. It does not wait.
func (m *Meter) ShowMore(model, peerID string) {
	list := m.running.begin(model, peerID, m.cfg.Now())
	if len(list) == 0 {
		return
	}
	go func() {
		defer m.running.done(peerID)
		m.showAll(context.Background(), []string{peerID}, list, showTime)
	}()
}

func (m *Meter) showAll(ctx context.Context, peers []string, list []*shown, within time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	each(len(peers), func(i int) {
		if err := m.show(ctx, peers[i], list); err != nil && ctx.Err() == nil {
			m.cfg.Logger.Debug("a peer takes no pass", "peer", peers[i], "error", err)
		}
	})
}

// show shows passes to a peer.
func (m *Meter) show(ctx context.Context, peerID string, list []*shown) error {
	to, err := NodeOf(peerID)
	if err != nil || to == m.self {
		return err
	}
	s := show{Version: version}
	for _, one := range list {
		lent := one.lent
		if one.pass.Entry == m.self {
			lent = one.pass.Lend(m.cfg.Signer.cfg.Key, to)
		}
		s.Passes = append(s.Passes, lentPass{one.record, lent})
	}
	c, err := m.cfg.Dialer.Dial(ctx, peerID)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	_, err = exchange(c, frameShow, encodeAsk(s), frameShown, 0)
	return err
}

// take takes what a peer shows, and shows on what is lent to this node.
func (m *Meter) take(peerID string, s show) error {
	if m.cfg.Grants == nil {
		return errors.New("nothing is asked of passes here")
	}
	on := map[string][]*shown{} // by model
	var errs []error
	for i, l := range s.Passes {
		p, err := m.cfg.Grants.Take(peerID, l.Record, l.Lent)
		if err != nil {
			errs = append(errs, fmt.Errorf("pass %d: %w", i, err))
			continue
		}
		if p2p.PeerOf(p.Entry).String() == peerID { // else it goes no further
			on[p.Model] = append(on[p.Model], &shown{p, slices.Clone(l.Record), l.Lent})
		}
	}
	for model, list := range on {
		peers := m.cfg.Workers(model)
		if len(peers) == 0 {
			continue
		}
		fresh, err := m.running.addLent(list, m.cfg.Now())
		if err != nil {
			errs = append(errs, err)
		}
		if len(fresh) > 0 {
			m.showAll(context.Background(), peers, fresh, showTime/2)
		}
	}
	return errors.Join(errs...)
}

// addLent remembers passes of one entry, and returns those that were not known. Error: there are too
// many of them now.
func (r *showing) addLent(list []*shown, now time.Time) (fresh []*shown, err error) {
	for _, one := range list {
		if !r.countOn(one.pass.Entry, now, 0) {
			return fresh, fmt.Errorf("%d passes of %s were shown on in %v: show the others later", mostShownOn, one.pass.Entry, shownOnIn)
		}
		if r.add(one, now) {
			r.countOn(one.pass.Entry, now, 1)
			fresh = append(fresh, one)
		}
	}
	return fresh, nil
}

// countOn counts passes of an entry that are shown on; false: there were too many before.
func (r *showing) countOn(entry settle.Node, now time.Time, n int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.since) >= shownOnIn {
		clear(r.on)
		r.since = now
	}
	if r.on[entry] >= mostShownOn {
		return false
	}
	r.on[entry] += n
	return true
}

// add remembers a pass, in place of the oldest where there are many; false: it is there.
func (r *showing) add(one *shown, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = slices.DeleteFunc(r.list, func(o *shown) bool { return (&grant{pass: o.pass}).over(now) })
	if slices.ContainsFunc(r.list, func(o *shown) bool { return o.pass.Request == one.pass.Request }) {
		return false
	}
	if len(r.list) >= mostShown {
		r.list = slices.Delete(r.list, 0, 1)
	}
	r.list = append(r.list, one)
	return true
}

func (r *showing) remove(id settle.QuoteID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = slices.DeleteFunc(r.list, func(o *shown) bool { return o.pass.Request == id })
}

// begin takes the newest passes of a model to be shown to a peer, unless it is being shown some.
func (r *showing) begin(model, peerID string, now time.Time) (list []*shown) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.peers[peerID] {
		return nil
	}
	for i := len(r.list) - 1; i >= 0 && len(list) < mostLent; i-- {
		if one := r.list[i]; one.pass.Model == model {
			list = append(list, one)
		}
	}
	if len(list) > 0 {
		r.peers[peerID] = true
	}
	return list
}

func (r *showing) done(peerID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peers, peerID)
}
