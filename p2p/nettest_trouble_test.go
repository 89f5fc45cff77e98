//go:build nettest && linux

package p2p_test

import (
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvasird/p2p"
)

// A router gives UDP another port than the node, which has a public address, listens on. The
// port that the node sees itself is told to nobody, and peers get through.
func TestNetRemappedPort(t *testing.T) {
	t.Parallel()
	s := newSwarm(t)
	at := s.remapping("remap", line)
	a := at.start(s.member(viaTCP, viaQUIC))
	b := s.nat("nat", cone, line).host("b").start(s.member(viaTCP, viaQUIC))
	for _, name := range []string{"pub1", "pub2", "pub3"} {
		spec := s.member(viaTCP, viaQUIC)
		spec.Reach = p2p.ReachPublic
		s.public(name, link{}).start(spec)
	}
	direct := b.meets(a, p2p.Direct)
	t.Logf("direct at %s", direct.Addr)
	echoes(a, b)
	if err := a.call("provide", "remapped", nil); err != nil {
		t.Fatal(err)
	}
	wrong := "/ip4/" + at.addr + "/udp/4001/"
	start, good := time.Now(), 0 // seconds in a row
	var told time.Duration
	for good < 5 && time.Since(start) < patience {
		time.Sleep(time.Second)
		good++
		for _, asked := range []struct {
			*node
			op string
		}{{a, "addrs"}, {b, "find"}, {s.relay, "find"}} {
			var addrs []string
			if err := asked.call(asked.op, "remapped", &addrs); err != nil {
				t.Fatal(err)
			}
			if slices.ContainsFunc(addrs, func(addr string) bool { return strings.HasPrefix(addr, wrong) }) {
				good, told = 0, time.Since(start)
			}
		}
	}
	t.Logf("told for %v", told)
	if good < 5 {
		t.Errorf("%s… is still told as an address of %s after %v, and nothing gets through there", wrong, a.name, patience)
	}
}

// The network is cut for all, and everybody comes back unaided when it is mended; what was
// published meanwhile arrives.
func TestNetOutage(t *testing.T) {
	t.Parallel()
	s := newSwarm(t)
	a := s.nat("nata", symmetric, line).host("a").start(s.member(viaTCP, viaQUIC))
	b := s.nat("natb", symmetric, line).host("b").start(s.member(viaTCP, viaQUIC))
	c := s.public("pub", line).start(s.member(viaTCP, viaQUIC))
	for _, pair := range [][2]*node{{a, b}, {b, a}, {a, c}, {c, a}, {b, c}, {c, b}} {
		pair[0].meets(pair[1], "")
	}

	cut := time.Now()
	mend := s.cut()
	for _, pair := range [][2]*node{{a, b}, {b, a}, {a, c}, {b, c}, {c, a}, {a, s.relay}, {b, s.relay}, {c, s.relay}} {
		lost := pair[0].loses(pair[1], cut)
		t.Logf("%s lost %s after %v", pair[0].name, pair[1].name, lost.At.Sub(cut))
	}
	if err := a.call("publish", "a was here", nil); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Second) // the outage itself: pauses between attempts grow
	mended := time.Now()
	mend()
	for _, pair := range [][2]*node{{a, s.relay}, {b, s.relay}, {c, s.relay}, {a, c}, {c, a}, {b, c}, {a, b}, {b, a}} {
		back := pair[0].meetsSince(pair[1], "", mended)
		t.Logf("%s and %s are back (%s) after %v", pair[0].name, pair[1].name, back.Path, back.At.Sub(mended))
	}
	for _, n := range []*node{b, c, s.relay} {
		heard := n.hears(a, "a was here", mended)
		t.Logf("%s heard %s after %v", n.name, a.name, heard.At.Sub(mended))
	}
	echoes(a, b)
	echoes(a, c)
}

// A node that remembers good peers comes back when its first contact is gone for good.
func TestNetRemembered(t *testing.T) {
	s := newSwarm(t)
	a := s.public("a", line).start(s.member(viaTCP, viaQUIC))
	at := s.public("b", line)
	spec := s.member(viaTCP, viaQUIC)
	spec.Remember = filepath.Join(at.dir(), "remember")
	b := at.start(spec)
	b.meets(a, p2p.Direct)
	b.measures(a)
	b.stop()
	a.loses(b, time.Time{})
	s.relay.kill()

	spec.Bootstrap, spec.Relays = nil, nil
	start := time.Now()
	b = at.start(spec)
	met := b.meets(a, p2p.Direct)
	t.Logf("met again after %v", met.At.Sub(start))
	echoes(a, b)
}

// A peer that is frozen or killed is lost long before the transports would notice, and
// one that thaws comes back.
func TestNetFrozenAndKilled(t *testing.T) {
	t.Parallel()
	for _, via := range []string{viaTCP, viaQUIC} {
		t.Run(strings.Split(via, "/")[1], func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			spec := nodeSpec{Listen: []string{"/ip4/0.0.0.0" + via}}
			a := w.public("a", link{}).start(spec)
			spec.Peers = []string{a.at(via)}
			b := w.public("b", line).start(spec)
			met := a.meets(b, p2p.Direct)
			t.Logf("round trip %v", a.measures(b))

			frozen := time.Now()
			b.signal(syscall.SIGSTOP)
			lost := a.loses(b, met.At)
			t.Logf("frozen: lost after %v", lost.At.Sub(frozen))
			if took := lost.At.Sub(frozen); took > 20*time.Second { // 6 s on an idle machine
				t.Errorf("a frozen peer was lost after %v only", took)
			}
			thawed := time.Now()
			b.signal(syscall.SIGCONT)
			back := a.meetsSince(b, p2p.Direct, thawed)
			t.Logf("thawed: back after %v", back.At.Sub(thawed))
			a.measures(b)

			killed := time.Now()
			b.kill()
			lost = a.loses(b, killed)
			t.Logf("killed: lost after %v", lost.At.Sub(killed))
			if took := lost.At.Sub(killed); took > 20*time.Second {
				t.Errorf("a killed peer was lost after %v only", took)
			}
		})
	}
}

// A relay that restarts has its members back, and they reach each other through it.
func TestNetRelayRestart(t *testing.T) {
	s := newSwarm(t)
	a := s.nat("nata", symmetric, line).host("a").start(s.member(viaTCP))
	b := s.nat("natb", symmetric, line).host("b").start(s.member(viaTCP))
	a.meets(b, p2p.Relayed)
	b.meets(a, p2p.Relayed)

	killed := time.Now()
	s.relay.kill()
	a.loses(b, killed)
	b.loses(a, killed)
	restarted := time.Now()
	s.relay = s.relay.site.start(s.relaySpec)
	for _, n := range []*node{a, b} {
		back := n.meetsSince(s.relay, p2p.Direct, restarted)
		t.Logf("%s: relay back after %v", n.name, back.At.Sub(restarted))
	}
	again := a.meetsSince(b, p2p.Relayed, restarted)
	b.meetsSince(a, p2p.Relayed, restarted)
	t.Logf("relayed again after %v", again.At.Sub(restarted))
	echoes(a, b)
}

// Two hundred nodes behind one address get in.
func TestNetCrowdBehindOneAddress(t *testing.T) {
	const crowd = 200
	w := newWorld(t)
	a := w.public("a", link{}).start(nodeSpec{})
	start := time.Now()
	w.nat("nat", cone, line).host("many").start(nodeSpec{
		Listen: []string{"/ip4/0.0.0.0/tcp/0"}, NoLane: true, Peers: []string{a.at(viaTCP)}, Crowd: crowd - 1,
	})
	var last time.Time
	ready := make(map[string]bool)
	ok := a.wait(2*patience, func() bool {
		clear(ready)
		for _, e := range a.events {
			switch e.What {
			case "ready":
				ready[string(e.Peer)], last = true, e.At
			case "lost":
				delete(ready, string(e.Peer))
			}
		}
		return len(ready) == crowd
	})
	if !ok {
		t.Fatalf("%d of %d got in", len(ready), crowd)
	}
	t.Logf("%d got in within %v", crowd, last.Sub(start))
}
