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
	ma "github.com/multiformats/go-multiaddr"
)

const (
	// Pause between attempts to meet a peer. Who refused is asked again after meetRefused:
	// it may have been updated.
	firstMeet   = time.Second
	maxMeet     = 2 * time.Minute
	meetRefused = 5 * time.Minute
	meetFails   = 40 // attempts in vain after which a peer is forgotten

	meetTick      = 250 * time.Millisecond
	maxMeeting    = 8 // hellos at a time
	maxCandidates = 1024
	maxUnmet      = 32 // in a report

	// The DHT is asked for members after firstLookup, then after twice that and so on.
	firstLookup   = time.Second
	maxLookup     = 3 * time.Minute
	lookupMembers = 64 // of one answer
	lookupTimeout = 30 * time.Second
)

// candidate is a peer to be met.
type candidate struct {
	info  peer.AddrInfo
	next  time.Time
	pause time.Duration
	fails int
	busy  bool
	err   error // of the latest attempt
}

// meeter connects to peers that it is told of, in whatever way they were found, and again
// to those that were lost.
type meeter struct {
	h *Host

	alone bool // all peers were lost; only used by the watcher

	mu    sync.Mutex // guards what follows
	known map[peer.ID]*candidate
	busy  int
}

func newMeeter(h *Host) *meeter { return &meeter{h: h, known: make(map[peer.ID]*candidate)} }

// add is told of a peer. Addresses heard anew replace those that did not work, and are
// tried at once.
func (m *meeter) add(ai peer.AddrInfo) { m.addAt(ai, time.Time{}) }

// addAt is add for a peer that is not to be met before next.
func (m *meeter) addAt(ai peer.AddrInfo, next time.Time) {
	if ai.ID == m.h.ID() || len(ai.Addrs) == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.known[ai.ID]; c != nil {
		if !c.busy && !sameAddrs(c.info.Addrs, ai.Addrs) {
			c.info, c.next, c.pause = ai, time.Time{}, firstMeet
		}
		return
	}
	if len(m.known) >= maxCandidates && !m.evictLocked() {
		return
	}
	m.known[ai.ID] = &candidate{info: ai, next: next, pause: firstMeet}
}

func sameAddrs(a, b []ma.Multiaddr) bool {
	lacks := func(list []ma.Multiaddr) func(ma.Multiaddr) bool {
		return func(x ma.Multiaddr) bool { return !slices.ContainsFunc(list, x.Equal) }
	}
	return !slices.ContainsFunc(a, lacks(b)) && !slices.ContainsFunc(b, lacks(a))
}

// evictLocked forgets the candidate that failed most.
func (m *meeter) evictLocked() bool {
	var worst *candidate
	for _, c := range m.known {
		if !c.busy && (worst == nil || c.fails > worst.fails) {
			worst = c
		}
	}
	if worst == nil || worst.fails == 0 {
		return false
	}
	delete(m.known, worst.info.ID)
	return true
}

// PeerReady notes the end of an outage: what was provided may be forgotten by now.
func (m *meeter) PeerReady(*Peer) {
	if m.alone {
		m.alone = false
		m.h.providers.renew()
	}
}

// PeerLost has a lost peer met again, a moment later: the other side does the same.
func (m *meeter) PeerLost(p *Peer) {
	m.alone = len(m.h.peers.list()) == 0
	if node, err := m.h.up(); err == nil {
		again := time.Now().Add(jitter(firstMeet, rand.Float64()))
		m.addAt(peer.AddrInfo{ID: p.ID, Addrs: addrsOf(node, p.ID, maxRememberedAddrs)}, again)
	}
}

func (m *meeter) run(ctx context.Context) {
	tick := time.NewTicker(meetTick)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			ready := len(m.h.peers.list())
			for _, c := range m.due(now, ready) {
				m.h.wg.Go(func() { m.meet(ctx, c) })
			}
		case <-ctx.Done():
			return
		}
	}
}

// due takes the candidates to be met now, with ready peers there already. Who is ready is
// none any more.
func (m *meeter) due(now time.Time, ready int) []*candidate {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*candidate
	for id, c := range m.known {
		switch {
		case c.busy:
		case m.h.peers.get(id) != nil:
			delete(m.known, id)
		case !c.next.After(now) && m.busy < maxMeeting && ready+m.busy < m.h.cfg.MaxPeers:
			c.busy = true
			m.busy++
			out = append(out, c)
		}
	}
	return out
}

// meet says hello to a candidate.
func (m *meeter) meet(ctx context.Context, c *candidate) {
	_, err := m.h.Hello(ctx, c.info)
	m.mu.Lock()
	defer m.mu.Unlock()
	c.busy = false
	m.busy--
	if err == nil {
		delete(m.known, c.info.ID)
		return
	}
	c.fails++
	c.err = err
	if c.fails >= meetFails {
		delete(m.known, c.info.ID)
	}
	pause := c.pause
	c.pause = min(2*c.pause, maxMeet)
	var refused *RefusedError
	if errors.As(err, &refused) {
		pause = meetRefused
	}
	c.next = time.Now().Add(jitter(pause, rand.Float64()))
	m.h.cfg.Logger.Debug("did not meet a peer", "peer", c.info.ID, "addrs", c.info.Addrs, "err", err)
}

// unmet lists the peers that were found and not met yet, with the reasons.
func (m *meeter) unmet() []KeptPeer {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []KeptPeer
	for id, c := range m.known {
		if c.err == nil || m.h.peers.get(id) != nil || len(out) == maxUnmet {
			continue
		}
		k := KeptPeer{ID: id, State: Unreachable, Err: c.err.Error()}
		var refused *RefusedError
		if errors.As(c.err, &refused) {
			k.State = Refused
		}
		for _, a := range c.info.Addrs {
			k.Addrs = append(k.Addrs, a.String())
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b KeptPeer) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return out
}

// lookup asks the DHT for members: often at first, and again when all peers were lost.
func (m *meeter) lookup(ctx context.Context) {
	pause := firstLookup
	for {
		select {
		case <-time.After(jitter(pause, rand.Float64())):
		case <-ctx.Done():
			return
		}
		if m.h.dht.RoutingTable().Size() == 0 {
			pause = firstLookup
			continue
		}
		pause = min(2*pause, maxLookup)
		if len(m.h.peers.list()) >= m.h.cfg.MaxPeers {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
		found, err := m.h.FindProviders(ctx, MemberKey, lookupMembers)
		cancel()
		if err != nil {
			m.h.cfg.Logger.Debug("lookup of members", "err", err)
		}
		for _, ai := range found {
			m.add(ai)
		}
	}
}
