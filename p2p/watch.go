package p2p

import (
	"slices"
	"sync"
)

// Watcher learns which peers can be worked with. Its calls come one at a time and in
// order; they should return soon and must not close the host.
type Watcher interface {
	// PeerReady reports a peer that passed the hello, and the same peer again when it
	// says something new of itself.
	PeerReady(p *Peer)
	// PeerLost reports the end of a peer that was reported ready: its streams and lanes
	// end too.
	PeerLost(p *Peer)
}

type event struct {
	peer *Peer
	lost bool
}

// notifier carries events to the watchers. Its queue holds at most two events of a peer,
// however slow a watcher is: what came and went unseen is not reported.
type notifier struct {
	wake chan struct{} // capacity 1

	mu       sync.Mutex // guards what follows
	queue    []event
	watchers []Watcher
}

func newNotifier() *notifier { return &notifier{wake: make(chan struct{}, 1)} }

func (n *notifier) watch(w Watcher) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watchers = append(n.watchers, w)
}

func (n *notifier) ready(p *Peer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropReadyLocked(p)
	n.pushLocked(event{peer: p})
}

func (n *notifier) lost(p *Peer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropReadyLocked(p)
	if p.stay.told {
		n.pushLocked(event{peer: p, lost: true})
	}
}

// dropReadyLocked takes what is queued of p's stay out of the queue.
func (n *notifier) dropReadyLocked(p *Peer) {
	n.queue = slices.DeleteFunc(n.queue, func(e event) bool { return !e.lost && e.peer.stay == p.stay })
}

func (n *notifier) pushLocked(e event) {
	n.queue = append(n.queue, e)
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// run delivers until stop is closed, then what is left.
func (n *notifier) run(stop <-chan struct{}) {
	for {
		select {
		case <-n.wake:
			n.deliver()
		case <-stop:
			n.deliver()
			return
		}
	}
}

func (n *notifier) deliver() {
	for {
		n.mu.Lock()
		if len(n.queue) == 0 {
			n.mu.Unlock()
			return
		}
		e := n.queue[0]
		n.queue = n.queue[1:]
		watchers := n.watchers
		e.peer.stay.told = true
		n.mu.Unlock()
		for _, w := range watchers {
			if e.lost {
				w.PeerLost(e.peer)
			} else {
				w.PeerReady(e.peer)
			}
		}
	}
}
