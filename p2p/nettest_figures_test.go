//go:build nettest && linux

package p2p_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"kvasird/p2p"
)

// TestFigures prints what the README's table of the network says (make bench-net): how long
// nodes take to find each other, and what a round trip costs by each path.
func TestFigures(t *testing.T) {
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer out.Flush()
	fmt.Fprintf(out, "discovery\tmet\tdirect\n")
	for _, c := range []struct {
		name string
		run  func(*testing.T) (met, direct time.Duration)
	}{{"one LAN, multicast", discoverLAN}, {"two NATs, by a relay", discoverRelay}} {
		t.Run(c.name, func(t *testing.T) {
			met, direct := c.run(t)
			fmt.Fprintf(out, "%s\t%.2f s\t%.2f s\n", c.name, met.Seconds(), direct.Seconds())
		})
	}
	fmt.Fprintf(out, "\nround trip of 12 KiB, p50 (p99) ms\tTCP\tstream\tlane\tQUIC\trelayed\n")
	for _, c := range []struct {
		name string
		link link
	}{
		{"0 ms", link{}},
		{"40 ms", link{Delay: 20 * time.Millisecond}},
		{"40 ms, loss 1 % each way", link{Delay: 20 * time.Millisecond, Loss: 0.01}},
	} {
		t.Run(c.name, func(t *testing.T) {
			fmt.Fprintf(out, "%s\t%s\n", c.name, strings.Join(roundTrips(t, c.link), "\t"))
		})
	}
}

func discoverLAN(t *testing.T) (met, direct time.Duration) {
	lan := newWorld(t).nat("nat", cone, link{})
	hostA, hostB := lan.host("a"), lan.host("b")
	a := hostA.start(nodeSpec{MDNS: true})
	start := time.Now()
	found := a.meets(hostB.start(nodeSpec{MDNS: true}), p2p.Direct)
	return found.At.Sub(start), found.At.Sub(start)
}

func discoverRelay(t *testing.T) (met, direct time.Duration) {
	s := newSwarm(t)
	a := s.nat("nata", cone, line).host("a").start(s.member(viaTCP, viaQUIC))
	hostB := s.nat("natb", cone, line).host("b")
	a.meets(s.relay, "")
	start := time.Now()
	b := hostB.start(s.member(viaTCP, viaQUIC))
	return b.meets(a, "").At.Sub(start), b.meets(a, p2p.Direct).At.Sub(start)
}

// roundTrips measures between two public nodes with a line between one and the router, and
// between two nodes behind symmetric NATs with half the line each, through a relay.
func roundTrips(t *testing.T, l link) []string {
	const size, count, warm = 12 << 10, 120, 20
	w := newWorld(t)
	near, far := w.public("near", link{}), w.public("far", l)
	raw := rawEchoes(t, near, far, size, count)
	var stream, lane, quic []time.Duration
	for _, via := range []string{viaTCP, viaQUIC} {
		spec := nodeSpec{Listen: []string{"/ip4/0.0.0.0" + via}}
		a := near.start(spec)
		spec.Peers = []string{a.at(via)}
		b := far.start(spec)
		b.meets(a, p2p.Direct)
		if via == viaQUIC {
			quic = b.echo(a, size, count, false)
		} else {
			stream, lane = b.echo(a, size, count, false), b.echo(a, size, count, true)
		}
		a.stop()
		b.stop()
	}

	s := newSwarm(t)
	half := l
	half.Delay, half.Loss = l.Delay/2, l.Loss/2
	c := s.nat("natc", symmetric, half).host("c").start(s.member(viaTCP))
	d := s.nat("natd", symmetric, half).host("d").start(s.member(viaTCP))
	c.meets(d, p2p.Relayed)
	relayed := c.echo(d, size, count, false)

	var row []string
	for _, times := range [][]time.Duration{raw, stream, lane, quic, relayed} {
		times = times[warm:]
		slices.Sort(times)
		ms := func(share float64) float64 {
			return float64(times[int(share*float64(len(times)-1))].Microseconds()) / 1000
		}
		row = append(row, fmt.Sprintf("%.2f (%.2f)", ms(0.5), ms(0.99)))
	}
	return row
}

// rawEchoes are the round trips of a plain TCP connection.
func rawEchoes(t *testing.T, from, to *site, size, count int) []time.Duration {
	t.Helper()
	var l net.Listener
	if err := inNamespace(to.ns, func() (err error) { l, err = net.Listen("tcp4", ":4003"); return }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			io.Copy(c, c)
		}
	}()
	var times []time.Duration
	err := inNamespace(from.ns, func() error {
		c, err := net.DialTimeout("tcp4", to.addr+":4003", patience)
		if err != nil {
			return err
		}
		defer c.Close()
		times, err = echoTimes(c, size, count)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return times
}
