package p2p

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
)

const (
	// sweepEvery is how often connections are looked over.
	sweepEvery = time.Second
	// drainAfter is how long a relayed connection is kept beside a direct one: by then the
	// other side has learned of the direct one too and opens its streams there.
	drainAfter = 3 * time.Second
)

// errLimited explains what libp2p reports as a bare EOF.
var errLimited = errors.New("the other side may be limiting connections from this address, or is shutting down")

// explainDial adds to a failed dial what its words do not tell.
func explainDial(err error) error {
	if errors.Is(err, io.EOF) || strings.Contains(err.Error(), "security protocol: EOF") {
		return fmt.Errorf("%w: %w", err, errLimited)
	}
	return err
}

// isRelayed reports whether c goes through a third node.
func isRelayed(c network.Conn) bool {
	return isCircuit(c.RemoteMultiaddr())
}

// newestConn is the newest open connection, direct ones first; nil when there is none.
// libp2p lists the oldest first.
func newestConn(conns []network.Conn) network.Conn {
	var best network.Conn
	for _, c := range conns {
		if !c.IsClosed() && (best == nil || isRelayed(best) || !isRelayed(c)) {
			best = c
		}
	}
	return best
}

// greetings are the hellos that this side says, one at a time on a connection.
type greetings struct {
	mu       sync.Mutex // guards what follows
	underWay map[network.Conn]*greeting
	kept     map[peer.ID]int // peers whose new connections Host.Hello greets itself
	left     func(peer.ID)   // called when the last Host.Hello of a peer ends
}

// greeting is one of them. Its result may be read when done is closed.
type greeting struct {
	done  chan struct{}
	peer  *Peer
	err   error
	again bool // to be repeated: what it says is old already; guarded by greetings.mu
}

// keepFor leaves the greeting of a peer's new connections to the caller, who learns the
// outcome that way, until the returned function is called.
func (g *greetings) keepFor(id peer.ID) (leave func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.kept[id]++
	return func() {
		g.mu.Lock()
		g.kept[id]--
		last := g.kept[id] == 0
		if last {
			delete(g.kept, id)
		}
		g.mu.Unlock()
		if last {
			g.left(id)
		}
	}
}

func (g *greetings) isKept(id peer.ID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.kept[id] > 0
}

// repeat has the greeting that is under way on c followed by another. It reports whether
// there is one.
func (g *greetings) repeat(c network.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.underWay[c]
	if now != nil {
		now.again = true
	}
	return now != nil
}

// greet says hello over c, or waits for a hello that is under way there.
func (h *Host) greet(ctx context.Context, c network.Conn) (*Peer, error) {
	g, err := h.beginGreeting(c)
	if err != nil {
		return nil, err
	}
	select {
	case <-g.done:
		return g.peer, g.err
	case <-ctx.Done():
		return nil, fmt.Errorf("hello to peer %s: %w", c.RemotePeer(), ctx.Err())
	}
}

// beginGreeting says hello over c in the background.
func (h *Host) beginGreeting(c network.Conn) (*greeting, error) {
	gs := &h.greetings
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if g := gs.underWay[c]; g != nil {
		return g, nil
	}
	leave, err := h.enter()
	if err != nil {
		return nil, err
	}
	g := &greeting{done: make(chan struct{})}
	gs.underWay[c] = g
	go func() {
		defer leave()
		ctx, cancel := context.WithTimeout(context.Background(), h.cfg.HelloTimeout)
		defer cancel()
		g.peer, g.err = h.sayHello(ctx, c)
		gs.mu.Lock()
		delete(gs.underWay, c)
		again := g.again
		gs.mu.Unlock()
		close(g.done)
		if again && g.err == nil {
			h.greetInBackground(c)
		}
	}()
	return g, nil
}

// greetInBackground says hello over c and logs when it fails.
func (h *Host) greetInBackground(c network.Conn) {
	g, err := h.beginGreeting(c)
	if err != nil {
		return
	}
	leave, err := h.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		if <-g.done; g.err != nil {
			h.refused.tell(c, "hello failed", g.err)
		}
	}()
}

// connected greets whoever this side connected to, for whatever reason: a lookup in the
// DHT, a relay, a hole punched.
func (h *Host) connected(_ network.Network, c network.Conn) {
	if c.Stat().Direction == network.DirOutbound && !h.greetings.isKept(c.RemotePeer()) {
		h.greetInBackground(c)
	}
}

// greetLeft greets what Host.Hello dialled and did not greet: more than one connection, or
// one that came up after its time.
func (h *Host) greetLeft(id peer.ID) {
	node, err := h.up()
	if err != nil {
		return
	}
	for _, c := range node.Network().ConnsToPeer(id) {
		if c.Stat().Direction == network.DirOutbound && !h.peers.passed(c) && !c.IsClosed() {
			h.greetInBackground(c)
		}
	}
}

// rehello tells a ready peer, in the background, what this node is.
func (h *Host) rehello(id peer.ID) {
	if c := h.peers.via(id); c != nil && !h.greetings.repeat(c) {
		h.greetInBackground(c)
	}
}

// disconnected takes a closed connection from its peer.
func (h *Host) disconnected(_ network.Network, c network.Conn) { h.peers.lose(c.RemotePeer(), c) }

// sweep disconnects who came and did not say hello in time, and what a direct connection
// has replaced.
func (h *Host) sweep(ctx context.Context) {
	tick := time.NewTicker(max(min(h.cfg.HelloTimeout/2, sweepEvery), time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for _, c := range h.node.Network().Conns() {
			if time.Since(c.Stat().Opened) > h.cfg.HelloTimeout && !h.peers.passed(c) {
				c.Close()
			}
		}
		h.refused.sweep()
		for _, c := range h.peers.drained(drainAfter) {
			h.cfg.Logger.Info("relayed connection replaced by a direct one", "peer", c.RemotePeer())
			c.Close()
		}
	}
}
