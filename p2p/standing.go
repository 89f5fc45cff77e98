package p2p

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/libp2p/go-libp2p/core/control"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// Fault is what a peer did wrong. Only what this node saw itself counts, or what the peer
// signed: nothing that a third one says.
type Fault uint8

const (
	Malformed    Fault = iota // sent what is not the protocol
	Forged                    // passed on what its author did not sign
	Invalid                   // signed what can not be true
	Flood                     // sent more than is allowed
	WrongData                 // served bytes that are not those asked for
	WrongNetwork              // spoke for another network
	FutureDated               // signed with a clock that is ahead
	Unresponsive              // let a deadline pass
	faultKinds
)

// faultWeights is the score of one fault. A score of cutOffScore cuts the peer off. What
// can not happen to an honest peer weighs much; what a slow line, a wrong clock or a
// mistyped address does, little: who tries again every few seconds is still told why.
var faultWeights = [faultKinds]float64{
	Malformed: 25, Forged: 50, Invalid: 20, Flood: 5, WrongData: 50, WrongNetwork: 1, FutureDated: 2, Unresponsive: 2,
}

var faultNames = [faultKinds]string{
	"malformed", "forged", "invalid", "flood", "wrong data", "wrong network", "future-dated", "unresponsive",
}

func (f Fault) String() string {
	if f >= faultKinds {
		return fmt.Sprintf("fault %d", uint8(f))
	}
	return faultNames[f]
}

const (
	cutOffScore      = 100
	cutOffTime       = 10 * time.Minute
	standingHalfLife = 5 * time.Minute // of a score; so at the end of cutOffTime at most a half is left
	maxStandings     = 16384           // peers with a score
	// tellPause is how often a peer that is cut off may connect to be told so.
	tellPause = 10 * time.Second
)

// Standing is how this node regards a peer. The zero value is a peer without a fault.
type Standing struct {
	ID     peer.ID
	Score  float64   // of its faults; halves every five minutes; at 100 the peer is cut off
	CutOff bool      // neither connected to nor let in
	Until  time.Time // end of the cut; zero unless CutOff
	Last   Fault     // the latest, and why
	Reason string
}

// standings keeps the scores. It is safe for concurrent use.
type standings struct {
	mu     sync.Mutex // guards what follows
	peers  map[peer.ID]*standing
	counts [faultKinds]uint64
}

type standing struct {
	score  float64 // at the time at
	at     time.Time
	until  time.Time // end of the cut, if not zero
	told   time.Time // when it last was let in to hear so
	last   Fault
	reason string
}

func newStandings() *standings { return &standings{peers: make(map[peer.ID]*standing)} }

func (s *standing) scoreAt(now time.Time) float64 {
	return s.score * math.Exp2(-float64(now.Sub(s.at))/float64(standingHalfLife))
}

// blame adds a fault and reports whether it cut the peer off.
func (s *standings) blame(id peer.ID, f Fault, reason string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[f]++
	p := s.peers[id]
	if p == nil {
		s.makeRoomLocked(now)
		p = &standing{}
		s.peers[id] = p
	}
	p.score = min(p.scoreAt(now)+faultWeights[f], 2*cutOffScore)
	p.at, p.last, p.reason = now, f, printable(reason)
	// Rounded: two faults of 50 within seconds are 100.
	if math.Round(p.score) < cutOffScore || now.Before(p.until) {
		return false
	}
	p.until = now.Add(cutOffTime)
	return true
}

// printable makes a reason fit for a verdict and a log line.
func printable(s string) string {
	return clip(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '.'
		}
		return r
	}, strings.ToValidUTF8(s, ".")))
}

// makeRoomLocked forgets the better half when the table is full.
func (s *standings) makeRoomLocked(now time.Time) {
	if len(s.peers) < maxStandings {
		return
	}
	ids := make([]peer.ID, 0, len(s.peers))
	for id := range s.peers {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b peer.ID) int {
		return cmp.Compare(s.peers[a].scoreAt(now), s.peers[b].scoreAt(now))
	})
	for _, id := range ids[:len(ids)/2] {
		delete(s.peers, id)
	}
}

func (s *standings) get(id peer.ID, now time.Time) Standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.standingLocked(id, now)
}

func (s *standings) standingLocked(id peer.ID, now time.Time) Standing {
	p := s.peers[id]
	if p == nil {
		return Standing{ID: id}
	}
	out := Standing{ID: id, Score: p.scoreAt(now), Last: p.last, Reason: p.reason}
	if now.Before(p.until) {
		out.CutOff, out.Until = true, p.until
	}
	return out
}

// cutOff reports whether id is cut off.
func (s *standings) cutOff(id peer.ID) bool { return s.get(id, time.Now()).CutOff }

// refusal is the verdict on a peer that is cut off, or the empty one.
func (s *standings) refusal(id peer.ID) verdict {
	now := time.Now()
	st := s.get(id, now)
	if !st.CutOff {
		return verdict{}
	}
	left := max(st.Until.Sub(now).Round(time.Second), time.Second)
	return verdict{"standing", "good", clip(fmt.Sprintf("cut off for %v more: %s: %s", left, st.Last, st.Reason))}
}

// mayHear reports whether a peer that is cut off may connect now to be told so.
func (s *standings) mayHear(id peer.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, now := s.peers[id], time.Now()
	if p == nil || !now.Before(p.until) {
		return true
	}
	if now.Sub(p.told) < tellPause {
		return false
	}
	p.told = now
	return true
}

// Blame notes a fault of a peer, and why, for people. A peer with too many is cut off: it
// is disconnected, and refused for ten minutes; configured peers too. Its standing heals
// with time. Who calls it has seen the fault, or holds what the peer signed.
func (h *Host) Blame(id peer.ID, f Fault, reason string) {
	if id == h.ID() || f >= faultKinds {
		return
	}
	cut := h.standings.blame(id, f, reason, time.Now())
	h.cfg.Logger.Debug("fault of a peer", "peer", id, "fault", f.String(), "reason", reason)
	if !cut {
		return
	}
	h.cfg.Logger.Warn("peer cut off", "peer", id, "fault", f.String(), "reason", reason, "for", cutOffTime.String())
	h.disconnect(id)
}

// disconnect loses a peer at once; its connections close in the background.
func (h *Host) disconnect(id peer.ID) {
	h.peers.lose(id, nil)
	leave, err := h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		if node, err := h.up(); err == nil {
			node.Network().ClosePeer(id)
		}
	}()
}

// Standing says how this node regards a peer.
func (h *Host) Standing(id peer.ID) Standing { return h.standings.get(id, time.Now()) }

// Standings lists the peers that are cut off or have a score of at least 1, the worst
// first.
func (h *Host) Standings() []Standing {
	s, now := h.standings, time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Standing
	for id := range s.peers {
		if st := s.standingLocked(id, now); st.CutOff || st.Score >= 1 {
			out = append(out, st)
		}
	}
	slices.SortFunc(out, func(a, b Standing) int { return cmp.Compare(b.Score, a.Score) })
	return out
}

// Faults counts the faults of all peers since the start.
func (h *Host) Faults() map[Fault]uint64 {
	s := h.standings
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[Fault]uint64, faultKinds)
	for f, n := range s.counts {
		out[Fault(f)] = n
	}
	return out
}

// doorkeeper keeps out who is cut off, whoever made the connection.
type doorkeeper struct{ standings *standings }

func (d doorkeeper) InterceptPeerDial(id peer.ID) bool                 { return !d.standings.cutOff(id) }
func (d doorkeeper) InterceptAddrDial(id peer.ID, _ ma.Multiaddr) bool { return true }
func (d doorkeeper) InterceptAccept(network.ConnMultiaddrs) bool       { return true }

func (d doorkeeper) InterceptSecured(dir network.Direction, id peer.ID, _ network.ConnMultiaddrs) bool {
	return dir == network.DirOutbound || d.standings.mayHear(id)
}

func (d doorkeeper) InterceptUpgraded(network.Conn) (bool, control.DisconnectReason) { return true, 0 }
