package market

import (
	"errors"
	"time"

	"kvasird/ggml/gguf"
)

// StageDecision is what a node is to do now with its window.
type StageDecision struct {
	Load gguf.Range // download, load and prove, told once; then call Done or Failed. Empty: nothing
	// Drop is to be stopped, unloaded and deleted; what the window that is claimed now needs may
	// stay. Then call Dropped: it is told until then, and nothing is loaded. Empty: nothing.
	Drop     gguf.Range
	Announce bool      // what Windows and Room return has changed: publish it, then call Announced
	Next     time.Time // call Decide again no later than this
}

// Stager decides for one node which window of one model to hold. It is a state machine like
// Volunteer, with one window instead of many parts, and not safe for concurrent use.
//
// The rule. Windows of different nodes serve together only where one begins exactly where another
// ends. So what is scarce is not layers but the chain that is next to be complete: the one that
// lacks the fewest layers beside as many disjoint complete chains as there are. A node takes the
// window that leaves that chain the fewest layers lacking; one laid against a bound of the model
// or of another's window goes before one that splits a gap in two; of equals the longest goes
// first, so that a node that is larger than a gap takes more, if that is aligned to the others'
// bounds too, and the whole model where it can; then rendezvous hash decides. A node that cannot
// help that chain helps the one after it.
//
// A window is first claimed, which is only told, with the room that the node gives. Rivals rank by
// rendezvous hash; each places those before it by the same rule, by their room, and then itself.
// Where no chain is complete without them, they are placed so that one is, if any placement of the
// largest 12 of them does it. After Policy.Settle a claim is loaded, or taken elsewhere before a
// byte is downloaded.
//
// A node that serves moves where that brings the next chain nearer to complete, as long as there
// are fewer than Policy.Target, by the part Policy.Margin of the window, or else of all; once that was so for
// Policy.Dwell to twice that, a quarter of it where no chain is complete. It claims the other
// window, tells that it leaves its own, and deletes that only if after Policy.Settle a chain of
// others serves without it, or none served with it. Every move raises what all nodes see as the
// worth of the whole, so they come to an end.
type Stager struct {
	id     string
	rank   uint64
	policy Policy
	fit    *fit

	own     *stage     // held, or claimed to be
	next    *stage     // claimed, to be held instead of own; nil: no move
	gone    gguf.Range // to be deleted
	room    Footprint  // that is told
	pause   time.Duration
	until   time.Time // nothing is claimed before, after a failure
	turns   int       // times that the claim was changed before it stood
	changed bool
	urge    time.Time     // since when a move looks worth it; zero: it does not
	dwell   time.Duration // that it must look so
	looked  time.Time     // for a better place, the last time
	drawn   uint64        // jitters so far
	rest    rest
}

// stage is a window of one's own.
type stage struct {
	layers gguf.Range
	state  State
	onDisk bool      // bytes of it may be there
	told   time.Time // when the state was first announced; zero: not yet
}

// steady is how often a claim is changed before it stands whatever others claim, so that rivals
// that change theirs all the time do not keep a node from its work.
const steady = 8

// glance is how often a node that serves looks for a better place: in a large swarm something
// changes all the time, and a look takes some milliseconds.
const glance = 5 * time.Second

// NewStager returns a stager that holds nothing. id is the author of its announcements.
func NewStager(id string, p Policy, m StageModel) (*Stager, error) {
	if id == "" {
		return nil, errors.New("market: a stager needs an identity")
	}
	if err := p.validate(); err != nil {
		return nil, err
	}
	f, err := newFit(m)
	if err != nil {
		return nil, err
	}
	return &Stager{id: id, rank: rank(hash(id), hashID(m.ID), 0), policy: p, fit: f}, nil
}

// Restore tells of a window that is on disk when the node starts: complete and proven, or half
// downloaded. It is kept if it still helps. One that may not be cut so is refused: delete it.
func (s *Stager) Restore(w gguf.Range, complete bool) error {
	if _, _, ok := s.fit.legal(w); !ok {
		return refuse(NoSuch, "window %v of model %v, which may begin and end at %v", w, s.fit.ID, s.fit.at)
	}
	if s.own != nil {
		return refuse(Overlap, "window %v beside %v", w, s.own.layers)
	}
	s.own = &stage{layers: w, state: Claimed, onDisk: true}
	if complete {
		s.own.state = Serving
	}
	s.changed, s.rest = true, rest{}
	return nil
}

// Done tells that the window of StageDecision.Load is loaded and has passed its canary.
func (s *Stager) Done(w gguf.Range) {
	if s.own != nil && s.own.layers == w && s.own.state == Loading {
		s.own.become(Serving)
		s.pause, s.changed, s.rest = 0, true, rest{}
	}
}

// Failed tells that a window could not be downloaded or loaded, or has not passed its canary, at
// any time. The node is told to delete it, and claims nothing for a while, the longer the more
// often it failed.
func (s *Stager) Failed(w gguf.Range, now time.Time) {
	if s.own == nil || s.own.layers != w {
		return
	}
	s.give()
	s.next = nil
	s.pause = min(max(2*s.pause, backoffMin), backoffMax)
	s.until = now.Add(s.jitter(s.pause))
}

// Dropped tells that the window of StageDecision.Drop is deleted.
func (s *Stager) Dropped(w gguf.Range) {
	if s.gone == w {
		s.gone, s.rest = gguf.Range{}, rest{}
	}
}

// Windows returns what to announce; slots and times are the caller's to add.
func (s *Stager) Windows() (list []WindowHolding) {
	for _, x := range []*stage{s.own, s.next} {
		if x == nil {
			continue
		}
		w := WindowHolding{Layers: x.layers, State: x.state}
		switch x.state {
		case Claimed:
			w.Lease = claimLease
		case Loading:
			w.Lease = MaxLease
		}
		list = append(list, w)
	}
	return list
}

// Takes is what a window takes, nothing where the model may not be cut so. Unlike the other methods
// it may be called at any time.
func (s *Stager) Takes(w gguf.Range) Footprint {
	i, j, ok := s.fit.legal(w)
	if !ok {
		return Footprint{}
	}
	return s.fit.takes(i, j)
}

// Room returns what to announce beside Windows: nothing while the node drains or pauses.
func (s *Stager) Room() Footprint { return s.room }

// Announced tells that Windows and Room were published.
func (s *Stager) Announced(now time.Time) {
	s.changed = false
	for _, x := range []*stage{s.own, s.next} {
		if x != nil && x.told.IsZero() {
			x.told, s.rest = now, rest{}
		}
	}
}

func (x *stage) become(state State) { x.state, x.told = state, time.Time{} }

// give gives up the window that is held or claimed.
func (s *Stager) give() {
	if s.own.onDisk {
		s.gone = s.own.layers
	}
	s.own, s.changed, s.rest = nil, true, rest{}
}

// jitter returns d to 2d, drawn from the identity.
func (s *Stager) jitter(d time.Duration) time.Duration {
	s.drawn++
	return d + time.Duration(mix(s.rank, s.drawn)%uint64(d+1))
}
