package experts

import (
	"fmt"
	"slices"

	"kvasird/p2p"
)

// offersPerBeat bounds the changes of an offer that a worker may make between two heartbeats:
// those above it are only taken with the next one.
const offersPerBeat = 16

// offering is what a session keeps of the worker's later offers.
type offering struct {
	id, taken uint64 // the last one, and the last one that the worker was told is taken
	credit    int    // how many may be taken until the next heartbeat
	needed    bool   // as the worker was told
}

// reoffer takes in what the worker offers from now on.
func (s *session) reoffer(f p2p.Frame) error {
	o, err := decodeOffer(f.Payload)
	if err != nil {
		return violation(err)
	}
	s.mu.Lock()
	last := s.offering
	s.offering.id = f.ID
	s.mu.Unlock()
	switch {
	case f.ID <= last.id:
		return violation(fmt.Errorf("offer %d after offer %d", f.ID, last.id))
	case last.id != last.taken:
		return violation(fmt.Errorf("offer %d before offer %d was taken", f.ID, last.id))
	case o.Model != s.offer.Model:
		return violation(&WrongModelError{Offered: o.Model, Wanted: s.offer.Model})
	case o.MaxRows != s.offer.MaxRows || o.MaxPairs != s.offer.MaxPairs || o.Queue != s.offer.Queue ||
		!slices.Equal(o.Precisions, s.offer.Precisions):
		return violation(fmt.Errorf("offer %d has other limits than the first one", f.ID))
	}
	s.d.reoffer(s, o.Slices, o.State)
	s.takeOffer()
	return nil
}

// reoffer has a session serve these slices and no others.
func (d *Dispatcher) reoffer(s *session, list []Slice, state workerState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := s.offer.Slices
	s.offer.Slices = list
	s.leavingSoon.Store(state == leaving)
	for _, layer := range *d.programs.Load() {
		for _, p := range layer {
			st := s.programs[p]
			if st == nil || st.refused != "" {
				s.askLocked(p)
			} else {
				before, offered := spansOf(old, p.layer), spansOf(list, p.layer)
				st.proved = intersect(st.proved, offered)
				if !slices.Equal(before, offered) { // what stays may have been loaded anew with the rest
					st.again = st.proved
				}
				st.again = intersect(st.again, st.proved)
				st.failed = intersect(st.failed, offered)
			}
			d.routeLocked(p)
		}
	}
	s.tellProver()
	d.announceLocked()
	d.cfg.Logger.Info("expert worker offers", "peer", s.peer, "slices", len(list), "leaving", state == leaving)
}

// takeOffer tells the worker that its last offer is known, or that it is needed or not, if that
// is news.
func (s *session) takeOffer() {
	needed := s.d.needs(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	o := &s.offering
	switch {
	case o.id != o.taken && o.credit > 0:
		o.credit--
	case o.id != o.taken || o.needed == needed:
		return
	}
	o.taken, o.needed = o.id, needed
	payload := []byte{0}
	if needed {
		payload[0] = 1
	}
	s.post(outFrame{typ: frameTaken, id: o.taken, payload: payload})
}

// needs says whether a worker that is leaving is the only one for something that was computed.
func (d *Dispatcher) needs(s *session) bool {
	if !s.leavingSoon.Load() {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for p, st := range s.programs {
		left := st.proved
		for _, o := range d.sessions {
			if other := o.programs[p]; other != nil && !o.leavingSoon.Load() {
				left = subtract(left, other.proved)
			}
		}
		if local := d.cfg.Local; local != nil && !local.First { // a cache may give up what it has
			left = subtract(left, spansOf(d.held.set.Load().slices, p.layer))
		}
		if len(left) > 0 {
			return true
		}
	}
	return false
}
