package experts

import "time"

// settleTick is how often it is looked whether all calls of an old session are answered.
const settleTick = 10 * time.Millisecond

// MovePeer has the session to a peer replaced by one that is dialled now, since there is a
// better path to it. The old one gets calls until the new one has proved what the old one
// serves; what it was asked is waited for, and it ends. So no call is lost, or waits for the
// change. For a peer without a session it dials at once.
func (d *Dispatcher) MovePeer(peerID string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := d.keepers[peerID]
	switch {
	case old == nil || d.closed:
	case old.before != nil:
		old.again = true
	default:
		d.moveLocked(old)
	}
}

func (d *Dispatcher) moveLocked(old *keeper) {
	delete(d.keepers, old.peer)
	k := d.keepLocked(old.peer)
	k.pinned = old.pinned
	if old.session == nil {
		old.cancel()
		return
	}
	old.last, k.before = true, old
	d.loops.Go(func() { d.move(old, k) })
}

// move ends the session of old when that of k has taken its place.
func (d *Dispatcher) move(old, k *keeper) {
	defer old.cancel()
	s := d.awaitMove(old, k)
	if s != nil {
		d.leave(s)
		s.settle(d.done, d.cfg.MaxDeadline)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	k.before = nil
	if k.again && d.keepers[k.peer] == k && !d.closed {
		d.moveLocked(k)
	}
}

// awaitMove returns the session of old when that of k serves the same. It returns nil if it
// ended, or the peer was dropped.
func (d *Dispatcher) awaitMove(old, k *keeper) *session {
	for {
		d.mu.Lock()
		s, changed := old.session, d.changed
		dropped, moved := d.keepers[k.peer] != k, false
		if s != nil && k.session != nil {
			moved = k.session.servesLocked(s)
			if moved && s.standing != 0 {
				k.session.standing = min(k.session.standing, s.standing) // it is the same worker
			}
		}
		d.mu.Unlock()
		switch {
		case s == nil || dropped:
			return nil
		case moved:
			return s
		}
		select {
		case <-changed:
		case <-d.done:
			return nil
		}
	}
}

// servesLocked reports whether s proved all that another session of the same peer did.
// Dispatcher.mu is held.
func (s *session) servesLocked(other *session) bool {
	for p, theirs := range other.programs {
		if len(theirs.proved) == 0 {
			continue
		}
		if mine := s.programs[p]; mine == nil || len(subtract(theirs.proved, mine.proved)) > 0 {
			return false
		}
	}
	return true
}

// settle waits until what a session was asked is answered.
func (s *session) settle(done <-chan struct{}, most time.Duration) {
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for end := time.Now().Add(most); time.Now().Before(end); {
		select {
		case <-tick.C: // first, for a call that was about to be sent when the routes changed
		case <-done:
			return
		}
		if s.queued.Load() == 0 {
			return
		}
	}
}
