package p2p

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"golang.org/x/time/rate"
)

// A ready peer may say hello again this often: when what it can do changes, and over
// further connections.
const (
	helloRate  = 2 // a second
	helloBurst = 64
)

// ErrNotAdmitted says that a peer has not passed the hello, or is gone since.
var ErrNotAdmitted = errors.New("peer has not passed the hello")

// Peer is a peer that passed the hello. It is immutable: a later hello of the same peer
// makes another Peer with the same Done channel.
type Peer struct {
	Hello
	Addr string // multiaddr where it is connected

	lane string // host:port of its lane listener, "" when it cannot be reached so
	stay *stay

	admission admission // what this node grants it
}

// Rights are those that this node grants the peer.
func (p *Peer) Rights() Rights { return p.admission.rights }

// stay is the time from a peer's first hello to its loss.
type stay struct {
	done   chan struct{}
	told   bool          // the watchers know of it; guarded by notifier.mu
	dead   deadWays      // where its lanes were found unreachable
	hellos *rate.Limiter // those that the peer says again
	pulse  pulse
}

// Path says how a peer is connected.
type Path string

const (
	Direct  Path = "direct"
	Relayed Path = "relayed" // through a third node
)

// Path says how the peer is connected. Streams opened from now on go that way.
func (p *Peer) Path() Path {
	if strings.Contains(p.Addr, "/p2p-circuit") {
		return Relayed
	}
	return Direct
}

// Done is closed when the peer is lost.
func (p *Peer) Done() <-chan struct{} { return p.stay.done }

// member is a stream or lane that ends with its peer.
type member interface {
	Conn
	// bind says to whose stay it belongs, before it is used.
	bind(s *stay)
	// drop ends it at once, without a word to the other side.
	drop()
}

// entry is what is known of one peer. It exists while something in it is set.
type entry struct {
	ready   *Peer                     // nil: not passed
	links   map[network.Conn]struct{} // connections over which it passed
	via     network.Conn              // the best of links, that of ready.Addr
	direct  time.Time                 // since when via is not relayed
	pending int                       // hellos under way
	changed chan struct{}
	members map[member]struct{}
	inLanes int // inbound lanes among the members
}

// registry holds the peers that passed the hello and what is open to them.
type registry struct {
	events *notifier

	mu    sync.Mutex // guards peers and everything in the entries
	peers map[peer.ID]*entry
}

func newRegistry(events *notifier) *registry {
	return &registry{events: events, peers: make(map[peer.ID]*entry)}
}

func (r *registry) entryLocked(id peer.ID) *entry {
	e := r.peers[id]
	if e == nil {
		e = &entry{
			links: make(map[network.Conn]struct{}), changed: make(chan struct{}),
			members: make(map[member]struct{}),
		}
		r.peers[id] = e
	}
	return e
}

// changedLocked wakes who waits for e, and forgets e when nothing is left in it.
func (r *registry) changedLocked(id peer.ID, e *entry) {
	close(e.changed)
	e.changed = make(chan struct{})
	if e.ready == nil && e.pending == 0 {
		delete(r.peers, id)
	}
}

// begin says that a hello with id is under way until the returned function is called, so
// that a stream which overtakes the end of the hello waits for it.
func (r *registry) begin(id peer.ID) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entryLocked(id)
	e.pending++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		e.pending--
		r.changedLocked(id, e)
	}
}

// pass makes the peer that said theirs over c ready, or renews what is known of it, and
// reports whether a stay begins. The caller is within begin and end.
func (r *registry) pass(theirs Hello, a admission, c network.Conn) (p *Peer, fresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entryLocked(theirs.ID)
	p = &Peer{Hello: theirs, admission: a}
	if e.ready != nil {
		p.stay = e.ready.stay
	} else {
		p.stay = &stay{done: make(chan struct{}), hellos: rate.NewLimiter(helloRate, helloBurst)}
		fresh = true
	}
	if theirs.Heartbeats {
		p.stay.watch()
	}
	e.links[c] = struct{}{}
	r.setReadyLocked(e, p, bestLink(e.links, c))
	return p, fresh
}

// setReadyLocked makes p, connected by via, what is known of e's peer.
func (r *registry) setReadyLocked(e *entry, p *Peer, via network.Conn) {
	addr := via.RemoteMultiaddr()
	p.Addr, p.lane = addr.String(), laneAddr(addr, p.LanePort)
	switch {
	case isRelayed(via):
		e.direct = time.Time{}
	case e.direct.IsZero():
		e.direct = time.Now()
	}
	e.ready, e.via = p, via
	r.events.ready(p)
	r.changedLocked(p.ID, e)
}

// bestLink prefers direct links, and newest among equals.
func bestLink(links map[network.Conn]struct{}, newest network.Conn) network.Conn {
	best := newest
	for c := range links {
		if best == nil || c != newest && isRelayed(best) && !isRelayed(c) && !c.IsClosed() {
			best = c
		}
	}
	return best
}

// lose forgets the link c of a peer, or all when c is nil. With its last link the peer is
// lost.
func (r *registry) lose(id peer.ID, c network.Conn) {
	r.mu.Lock()
	e := r.peers[id]
	if e == nil || e.ready == nil {
		r.mu.Unlock()
		return
	}
	if c == nil {
		clear(e.links)
	} else if _, ok := e.links[c]; !ok {
		r.mu.Unlock()
		return
	}
	delete(e.links, c)
	if len(e.links) > 0 {
		if c == e.via {
			p := *e.ready
			r.setReadyLocked(e, &p, bestLink(e.links, nil))
		}
		r.mu.Unlock()
		return
	}
	members := slices.Collect(maps.Keys(e.members))
	lost := e.ready
	e.ready, e.via, e.direct, e.inLanes = nil, nil, time.Time{}, 0
	clear(e.members)
	close(lost.stay.done)
	r.events.lost(lost)
	r.changedLocked(id, e)
	r.mu.Unlock()
	for _, m := range members {
		m.drop()
	}
}

// passed reports whether the hello passed over c.
func (r *registry) passed(c network.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.peers[c.RemotePeer()]
	if e == nil {
		return false
	}
	_, ok := e.links[c]
	return ok
}

// via returns the best link of a ready peer, or nil.
func (r *registry) via(id peer.ID) network.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.peers[id]; e != nil {
		return e.via
	}
	return nil
}

// drained lists the relayed links of peers that have had a direct one for a time, on which
// no stream is left.
func (r *registry) drained(after time.Duration) []network.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []network.Conn
	for _, e := range r.peers {
		if len(e.links) < 2 || e.direct.IsZero() || time.Since(e.direct) < after {
			continue
		}
		busy := make(map[network.Conn]bool)
		for m := range e.members {
			if s, ok := m.(*streamConn); ok {
				busy[s.Conn()] = true
			}
		}
		for c := range e.links {
			if isRelayed(c) && !busy[c] {
				out = append(out, c)
			}
		}
	}
	return out
}

// loseAll ends all.
func (r *registry) loseAll() {
	for _, p := range r.list() {
		r.lose(p.ID, nil)
	}
}

// get returns a ready peer, or nil.
func (r *registry) get(id peer.ID) *Peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.peers[id]; e != nil {
		return e.ready
	}
	return nil
}

// await returns a ready peer, waiting for a hello that is under way.
func (r *registry) await(ctx context.Context, id peer.ID) (*Peer, error) {
	for {
		r.mu.Lock()
		e := r.peers[id]
		if e == nil || e.ready == nil && e.pending == 0 {
			r.mu.Unlock()
			return nil, fmt.Errorf("%w: %s", ErrNotAdmitted, id)
		}
		ready, changed := e.ready, e.changed
		r.mu.Unlock()
		if ready != nil {
			return ready, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// attach ties m to p. It fails when p is lost, or when m is an inbound lane (maxLanes > 0)
// and p has maxLanes of them.
func (r *registry) attach(p *Peer, m member, maxLanes int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.peers[p.ID]
	if e == nil || e.ready == nil || e.ready.stay != p.stay {
		return fmt.Errorf("%w: %s", ErrNotAdmitted, p.ID)
	}
	if maxLanes > 0 {
		if e.inLanes >= maxLanes {
			return fmt.Errorf("peer %s has %d lanes already", p.ID, e.inLanes)
		}
		e.inLanes++
	}
	e.members[m] = struct{}{}
	m.bind(p.stay)
	return nil
}

// detach undoes attach; it may be called again, and after the peer was lost.
func (r *registry) detach(m member, inLane bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.peers[m.Remote()]
	if e == nil {
		return
	}
	if _, ok := e.members[m]; !ok {
		return
	}
	delete(e.members, m)
	if inLane {
		e.inLanes--
	}
}

// count is the number of ready peers.
func (r *registry) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, e := range r.peers {
		if e.ready != nil {
			n++
		}
	}
	return n
}

// list returns the ready peers.
func (r *registry) list() []*Peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*Peer
	for _, e := range r.peers {
		if e.ready != nil {
			out = append(out, e.ready)
		}
	}
	return out
}

// open counts the streams and lanes of a peer, in both directions.
func (r *registry) open(id peer.ID) (streams, lanes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.peers[id]
	if e == nil {
		return 0, 0
	}
	for m := range e.members {
		if m.Lane() {
			lanes++
		} else {
			streams++
		}
	}
	return streams, lanes
}
