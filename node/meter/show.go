package meter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"kvasird/p2p"
	"kvasird/settle"
)

const (
	// showTime bounds showing a pass to a peer.
	showTime = 3 * time.Second
	// showWait is how long an answer waits for workers to take its pass, neededWait for those that it
	// cannot do without. Who shows it on waits half of the former.
	showWait, neededWait = 300 * time.Millisecond, time.Second
	// lateFor is how long a peer is not waited for that did not take one within showWait.
	lateFor = 30 * time.Second
	// mostAtPeer bounds what a peer is being shown at a time; more it asks for.
	mostAtPeer = 16
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

// showing are the passes that run, the oldest first, and who is being shown some.
type showing struct {
	life context.Context // until Close
	end  context.CancelFunc
	all  sync.WaitGroup // what is shown in the background

	mu    sync.Mutex // guards what follows
	list  []*shown
	peers map[string]bool      // that are being shown what runs
	at    map[string]int       // shows to each peer now
	late  map[string]time.Time // until when a peer is not waited for
	on    map[settle.Node]int  // passes that were shown on, by entry
	since time.Time            // that on counts
}

func newShowing() *showing {
	r := &showing{peers: map[string]bool{}, at: map[string]int{}, late: map[string]time.Time{}, on: map[settle.Node]int{}}
	r.life, r.end = context.WithCancel(context.Background())
	return r
}

// Show shows the pass of a request of this node to those who will compute for it, and waits a little
// until they know it: longer where each of them is needed, and else not for those that were late
// before. The rest are shown it in the background. Who does not know it is asked all the same, and may
// refuse. Until ctx ends, ShowMore shows it to others.
func (m *Meter) Show(ctx context.Context, record []byte, peers []string, needed bool) {
	p, err := settle.ParsePass(record)
	if err != nil || p.Entry != m.self {
		m.cfg.Logger.Warn("what was given as the pass of a request is none", "error", err)
		return
	}
	one := &shown{pass: p, record: record}
	if m.running.add(one, m.cfg.Now()) {
		context.AfterFunc(ctx, func() { m.running.remove(p.Request) })
	}
	if needed {
		await(ctx, m.showAll(peers, []*shown{one}), neededWait)
		return
	}
	m.showSoon(ctx, peers, []*shown{one}, showWait)
}

// ShowMore shows a peer, in the background, all that runs of a model: it computes nothing more
// before. It does not wait.
func (m *Meter) ShowMore(model, peerID string) {
	list := m.running.begin(model, peerID, m.cfg.Now())
	if len(list) == 0 {
		return
	}
	done := m.showAll([]string{peerID}, list)
	go func() {
		<-done
		m.running.done(peerID)
	}()
}

// Close ends what is shown in the background, and waits for that.
func (m *Meter) Close() error {
	m.running.mu.Lock()
	m.running.end()
	m.running.mu.Unlock()
	m.running.all.Wait()
	return nil
}

// showSoon shows passes to peers, and waits for those that were not late before.
func (m *Meter) showSoon(ctx context.Context, peers []string, list []*shown, wait time.Duration) {
	late := m.running.lateOnes(time.Now())
	var quick, slow []string
	for _, p := range peers {
		if late[p] {
			slow = append(slow, p)
		} else {
			quick = append(quick, p)
		}
	}
	m.showAll(slow, list)
	await(ctx, m.showAll(quick, list), wait)
}

// await waits for done, at most so long.
func await(ctx context.Context, done <-chan struct{}, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// showAll shows passes to peers in the background, and closes what it returns after that. Some are
// shown them at a time, and one that is late takes the place of none.
func (m *Meter) showAll(peers []string, list []*shown) <-chan struct{} {
	done := make(chan struct{})
	r := m.running
	if len(peers) == 0 || !r.start() {
		close(done)
		return done
	}
	go func() {
		defer r.all.Done()
		defer close(done)
		ctx, cancel := context.WithTimeout(r.life, showTime)
		defer cancel()
		room := make(chan struct{}, askedAtOnce)
		var all sync.WaitGroup
		for _, peerID := range peers {
			room <- struct{}{}
			all.Go(func() {
				leave := sync.OnceFunc(func() { <-room })
				defer leave()
				slow := time.AfterFunc(showWait, func() {
					r.isLate(peerID, time.Now())
					leave()
				})
				defer slow.Stop()
				if err := m.show(ctx, peerID, list); err != nil && ctx.Err() == nil {
					m.cfg.Logger.Debug("a peer takes no pass", "peer", peerID, "error", err)
				}
			})
		}
		all.Wait()
	}()
	return done
}

// show shows passes to a peer.
func (m *Meter) show(ctx context.Context, peerID string, list []*shown) error {
	to, err := NodeOf(peerID)
	if err != nil || to == m.self {
		return err
	}
	if !m.running.enter(peerID) {
		return errors.New("it is being shown many")
	}
	defer m.running.leave(peerID)
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
			m.showSoon(context.Background(), peers, fresh, showWait/2)
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

// start is called before something is shown in the background; false: the meter is closed.
func (r *showing) start() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.life.Err() != nil {
		return false
	}
	r.all.Add(1)
	return true
}

// enter is called before a peer is shown something, and leave after; false: it is being shown many.
func (r *showing) enter(peerID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at[peerID] >= mostAtPeer {
		return false
	}
	r.at[peerID]++
	return true
}

func (r *showing) leave(peerID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at[peerID]--; r.at[peerID] == 0 {
		delete(r.at, peerID)
	}
}

// isLate notes that a peer did not take passes in time.
func (r *showing) isLate(peerID string, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.late[peerID] = now.Add(lateFor)
}

// lateOnes are the peers that were late.
func (r *showing) lateOnes(now time.Time) map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.late, func(_ string, until time.Time) bool { return !now.Before(until) })
	late := make(map[string]bool, len(r.late))
	for p := range r.late {
		late[p] = true
	}
	return late
}
