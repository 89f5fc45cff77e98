package experts

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	firstBackoff = 200 * time.Millisecond
	lastBackoff  = 5 * time.Second
	// settledAfter is how long a session must have lasted for the next dial to be prompt.
	settledAfter = 10 * time.Second
)

// keeper keeps a session to one peer.
type keeper struct {
	d      *Dispatcher
	peer   string
	tally  *tally
	cancel context.CancelFunc

	// Guarded by Dispatcher.mu.
	session *session // nil: not connected
	trouble string   // why not; empty when connected
	pinned  bool     // added by AddPeer, not only by SetHolders
	before  *keeper  // its session serves until this one's does; nil: none (move.go)
	last    bool     // no session follows this one's
	again   bool     // to be moved again after this move
}

// run dials the peer again and again until ctx ends. Its goroutine is also the reader of the
// session.
func (k *keeper) run(ctx context.Context) {
	backoff := firstBackoff
	for {
		began := time.Now()
		err := k.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > settledAfter {
			backoff = firstBackoff
		}
		if k.isLast() {
			return
		}
		k.d.cfg.Logger.Info("expert session ended", "peer", k.peer, "error", err, "retry_in", backoff)
		k.note(nil, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff/2 + rand.N(backoff)):
		}
		backoff = min(2*backoff, lastBackoff)
		var wrong *WrongModelError
		var refused *RemoteError
		if errors.As(err, &wrong) || errors.As(err, &refused) && refused.Code == CodeRights {
			backoff = lastBackoff
		}
	}
}

func (k *keeper) isLast() bool {
	k.d.mu.Lock()
	defer k.d.mu.Unlock()
	return k.last
}

// servingLocked is the session that serves, which may be the one before; nil: none.
func (k *keeper) servingLocked() *session {
	if k.session == nil && k.before != nil {
		return k.before.session
	}
	return k.session
}

func (k *keeper) note(s *session, err error) {
	k.d.mu.Lock()
	defer k.d.mu.Unlock()
	k.session, k.trouble = s, ""
	if err != nil {
		k.trouble = err.Error()
	}
}

// serve runs one session from the dial to its end and returns why it ended.
func (k *keeper) serve(ctx context.Context) error {
	greeting, cancel := context.WithTimeout(ctx, k.d.cfg.DialTimeout)
	defer cancel()
	conn, err := k.d.cfg.Dialer.Dial(greeting, k.peer)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	s := newSession(k.d, k.peer, k.tally, conn)
	defer s.stopWriter()
	if err := s.handshake(greeting); err != nil {
		return s.refuse(err)
	}
	s.startWriter(nil)
	s.ping(time.Now())
	k.d.cfg.Logger.Info("expert session", "peer", k.peer, "slices", len(s.offer.Slices))
	k.d.join(s)
	k.note(s, nil)
	trying, stopTrying := context.WithCancel(ctx)
	var prover sync.WaitGroup
	prover.Go(func() { s.prove(trying) })
	err = s.refuse(s.read())
	if errors.Is(err, ErrProtocol) {
		k.d.cfg.Fault(k.peer, err)
	}
	err = fmt.Errorf("session ended: %w", err)
	k.note(nil, err)
	k.d.leave(s)
	s.abandon(err)
	stopTrying()
	prover.Wait()
	return err
}

// PeerStatus is what the dispatcher knows of one peer.
type PeerStatus struct {
	ID        string
	Connected bool
	Trouble   string // why it is not connected, or why some of what it offers is not used
	Suspect   bool   // was late or wrong: others are preferred, or it is not asked at all
	Leaving   bool   // will stop: others are preferred
	Slices    []Slice
	Precision Precision     // of rows to and from it, where they fit; 0 while it is not connected
	RoundTrip time.Duration // smoothed, of heartbeats
	Rows      []LayerRows   // (row, expert) pairs that it computed for this dispatcher
	Failed    uint64        // calls that it failed, answered wrongly or too late
	Hedged    uint64        // calls of it that others were asked for too, since it was late
	Waiting   int           // pairs sent and not answered
	Standing  string        // what audits of its answers say of it, for people; empty while there were none
	Out       bool          // for that it gets no calls now
}

// Peers returns the state of all peers, ordered by id.
func (d *Dispatcher) Peers() []PeerStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	var list []PeerStatus
	now := time.Now()
	for _, id := range slices.Sorted(maps.Keys(d.keepers)) {
		k := d.keepers[id]
		st := PeerStatus{ID: id, Trouble: k.trouble, Rows: k.tally.layers(), Failed: k.tally.failed.Load(), Hedged: k.tally.hedged.Load()}
		st.Standing, st.Out = k.tally.standing.Text(now), k.tally.isOut(now)
		if s := k.servingLocked(); s != nil {
			st.Connected, st.Slices, st.Precision = true, s.offer.Slices, s.precision
			st.Suspect = trust(s.trust.Load()) != trusted || s.isDoubted()
			st.Leaving = s.leavingSoon.Load()
			st.Trouble = s.troubleLocked()
			st.RoundTrip = time.Duration(load(&s.lat.base))
			st.Waiting = int(s.queued.Load())
		}
		list = append(list, st)
	}
	return list
}

// troubleLocked is why some of what a worker offers is not used; Dispatcher.mu is held.
func (s *session) troubleLocked() string {
	layer, text := maxCount, ""
	for p, st := range s.programs {
		if why := st.refused + st.trouble; why != "" && p.layer < layer {
			layer, text = p.layer, why
		}
	}
	return text
}
