package p2p

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
)

// Pause between attempts to reach a peer: it doubles from the first to the second. A
// bootstrap or relay has many that want to reach it: to the third.
const (
	firstBackoff   = 200 * time.Millisecond
	maxBackoff     = 5 * time.Second
	maxBackoffFind = 20 * time.Second
)

// State is where the connection to a peer stands.
type State string

const (
	Connecting  State = "connecting"  // first attempt, or again after a loss
	Connected   State = "connected"   // passed the hello
	Refused     State = "refused"     // PeerStatus.Err is a *RefusedError
	Unreachable State = "unreachable" // PeerStatus.Err says why
)

// PeerStatus is what is known of a peer that is connected or configured.
type PeerStatus struct {
	ID         peer.ID
	Configured bool
	State      State
	Err        error         // why not connected, of the latest attempt; nil before it
	Since      time.Time     // of State, for configured peers
	Peer       *Peer         // nil unless connected
	Path       Path          // "" unless connected
	RTT        time.Duration // smoothed; 0: not measured yet
	Streams    int           // open, both directions
	Lanes      int
}

// keeper connects to a configured peer, a bootstrap or a relay for ever.
type keeper struct {
	h          *Host
	target     peer.AddrInfo
	configured bool // in Config.Peers
	maxPause   time.Duration

	mu    sync.Mutex // guards what follows
	state State
	err   error
	since time.Time
}

// addKeepers adds one for each peer that has none yet.
func (h *Host) addKeepers(list []peer.AddrInfo, configured bool) {
	for _, ai := range list {
		if k := h.keeperOf(ai.ID); k != nil {
			k.target.Addrs = append(k.target.Addrs, ai.Addrs...)
			continue
		}
		k := &keeper{h: h, target: ai, configured: configured, maxPause: maxBackoff, state: Connecting, since: time.Now()}
		if !configured {
			k.maxPause = maxBackoffFind
		}
		h.keepers = append(h.keepers, k)
	}
}

func (h *Host) keeperOf(id peer.ID) *keeper {
	for _, k := range h.keepers {
		if k.target.ID == id {
			return k
		}
	}
	return nil
}

func (k *keeper) run(ctx context.Context) {
	pause := firstBackoff
	for ctx.Err() == nil {
		p, err := k.h.Hello(ctx, k.target)
		if err == nil {
			k.set(Connected, nil)
			select {
			case <-p.Done():
			case <-ctx.Done():
				return
			}
			k.set(Connecting, errors.New("connection lost"))
			pause = firstBackoff
		} else if ctx.Err() == nil {
			var refused *RefusedError
			if errors.As(err, &refused) {
				k.set(Refused, err)
			} else {
				k.set(Unreachable, err)
			}
		}
		select {
		case <-time.After(jitter(pause, rand.Float64())):
		case <-ctx.Done():
		}
		pause = min(2*pause, k.maxPause)
	}
}

// jitter takes up to half off a pause, so that peers do not come back in step; r in [0,1).
func jitter(pause time.Duration, r float64) time.Duration {
	return pause - time.Duration(r*float64(pause)/2)
}

// set records the state and logs when it is a new one.
func (k *keeper) set(s State, err error) {
	k.mu.Lock()
	changed := k.state != s
	if changed {
		k.since = time.Now()
	}
	k.state, k.err = s, err
	k.mu.Unlock()
	if changed {
		k.h.cfg.Logger.Info("kept peer", "peer", k.target.ID, "state", s, "err", err)
	}
}

func (k *keeper) status() PeerStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	return PeerStatus{ID: k.target.ID, Configured: k.configured, State: k.state, Err: k.err, Since: k.since}
}

// Peers lists the configured and the connected peers, by id.
func (h *Host) Peers() []PeerStatus {
	byID := make(map[peer.ID]PeerStatus)
	for _, k := range h.keepers {
		if k.configured {
			byID[k.target.ID] = k.status()
		}
	}
	for _, p := range h.peers.list() {
		s := byID[p.ID]
		s.ID, s.State, s.Err, s.Peer, s.Path = p.ID, Connected, nil, p, p.Path()
		s.RTT = p.RTT()
		s.Streams, s.Lanes = h.peers.open(p.ID)
		byID[p.ID] = s
	}
	out := make([]PeerStatus, 0, len(byID))
	for _, s := range byID {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b PeerStatus) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return out
}

// Peer returns a ready peer, or nil.
func (h *Host) Peer(id peer.ID) *Peer { return h.peers.get(id) }
