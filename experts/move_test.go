package experts

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvasird/p2p"
)

// The only worker, and no call waits for one to come back: not one may be without.
func TestMovePeer(t *testing.T) { bothReaders(t, movePeer) }

func movePeer(t *testing.T, noLead bool) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) {
		c.NoLead, c.MinDeadline, c.MaxDeadline = noLead, patient, patient
	})
	waitFor(t, d, "connected", connected)
	c := startBusy(t, d, 3)
	for moved := 1; moved <= 5; moved++ {
		c.more(20)
		d.MovePeer("a")
		if moved == 3 {
			d.MovePeer("a") // again, while a move is under way
		}
		if !d.Peers()[0].Connected {
			t.Fatal("not connected while it moves")
		}
		within(t, patient, "the old session ends", func() bool {
			a.mu.Lock()
			conns := len(a.conns)
			a.mu.Unlock()
			return conns > moved && a.worker.Stats().Sessions == 1
		})
	}
	c.more(20)
	c.end()
	d.MovePeer("nowhere")
	if ids := d.PeerIDs(); len(ids) != 1 {
		t.Errorf("peers %v", ids)
	}
}

// The better path may be none. The old one serves until its session ends, or the peer is dropped.
func TestMovePeerInVain(t *testing.T) {
	w := newSwarm(t)
	a := w.start("a", newFFN(testWidth, testHidden, layerSlice(0, testExperts)), nil)
	d := w.dispatcher(func(c *Config) { c.MinDeadline, c.MaxDeadline = patient, patient })
	waitFor(t, d, "connected", connected)
	c := startBusy(t, d, 2)
	w.mu.Lock()
	w.addrs["a"] = ""
	w.mu.Unlock()
	d.MovePeer("a")
	within(t, patient, "the dial fails", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return strings.Contains(d.keepers["a"].trouble, "no route")
	})
	c.more(50)
	c.end()
	d.RemovePeer("a")
	within(t, patient, "no session is left", func() bool { return a.worker.Stats().Sessions == 0 })
}

// pathLog tells of a peer's path and moves its session when that becomes direct.
type pathLog struct {
	d       atomic.Pointer[Dispatcher]
	relayed atomic.Bool
	direct  atomic.Bool
}

func (l *pathLog) PeerReady(p *p2p.Peer) {
	switch d := l.d.Load(); {
	case len(p.Models) == 0: // the relay
	case p.Path() == p2p.Relayed:
		l.relayed.Store(true)
	case d != nil && l.relayed.Load() && l.direct.CompareAndSwap(false, true):
		d.MovePeer(p.ID.String())
	}
}

func (l *pathLog) PeerLost(*p2p.Peer) {}

// A session that began through a relay goes on directly: no call fails or is answered
// differently, and in the end nothing of it goes through the relay.
func TestSessionLeavesTheRelay(t *testing.T) {
	kernel := newFFN(testWidth, testHidden, layerSlice(0, testExperts))
	worker, err := NewWorker(WorkerConfig{Model: testModel, Kernel: kernel, Slices: kernel.slices})
	if err != nil {
		t.Fatal(err)
	}
	refuse := func(c net.Conn) { c.Close() }
	relay := startHostWith(t, refuse, func(c *p2p.Config) { c.Relay, c.Capabilities = true, p2p.Capabilities{} })
	there := startHostWith(t, func(c net.Conn) { worker.Serve(context.Background(), c) }, func(c *p2p.Config) {
		c.Reach, c.Relays = p2p.ReachPrivate, relay.Addrs()
	})
	t.Cleanup(func() { worker.Close() })
	paths := &pathLog{}
	here := startHostWith(t, refuse, func(c *p2p.Config) {
		c.Reach, c.Relays, c.Listen = p2p.ReachPrivate, relay.Addrs(), []string{}
	}, paths)
	var circuit string
	within(t, patient, "the worker is reached by the relay", func() bool {
		for _, a := range there.Addrs() {
			if strings.Contains(a, "/p2p-circuit") {
				circuit = a
			}
		}
		return circuit != "" && here.Peer(relay.ID()) != nil
	})
	to, err := p2p.ParsePeer(circuit)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := here.Hello(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	d, err := NewDispatcher(Config{Model: testModel, Dialer: hostDialer{here}, MinDeadline: patient, MaxDeadline: patient, ProgramWait: patient})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	d.AddPeer(there.ID().String())
	waitFor(t, d, "connected", connected)
	paths.d.Store(d)
	if here.Peer(there.ID()).Path() == p2p.Direct && !paths.direct.Load() {
		d.MovePeer(there.ID().String()) // it was faster than this test
	}
	c := startBusy(t, d, 2)
	within(t, patient, "a direct path, and the relayed one is given up", func() bool {
		r := relay.Report().Serving
		return here.Peer(there.ID()).Path() == p2p.Direct && r.Circuits == 0 && worker.Stats().Sessions == 1
	})
	c.more(50)
	c.end()
	t.Logf("%d calls, the longest took %v", c.calls.Load(), time.Duration(c.longest.Load()).Round(time.Millisecond))
}
