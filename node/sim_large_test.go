//go:build sim

package node_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/market"
)

var rewriteSim = flag.Bool("rewrite", false, "rewrite the golden summary in testdata")

// TestSim has a swarm of KVASIR_SIM nodes live through all that a swarm has to (`make sim`), and
// compares what that cost with testdata/sim-NODES.golden, if there is one; `make sim
// GOTESTFLAGS=-rewrite=true` writes it.
func TestSim(t *testing.T) {
	nodes, err := strconv.Atoi(os.Getenv("KVASIR_SIM"))
	if err != nil || nodes < 30 {
		t.Fatalf("KVASIR_SIM=%q: want how many nodes, 30 or more", os.Getenv("KVASIR_SIM"))
	}
	var figures []figure
	calm := 0 // how many of them are of a swarm to which nothing happened
	synctest.Test(t, func(t *testing.T) {
		s := newSimSwarm(t)
		s.form(nodes)
		s.burst(nodes / 3)
		calm = len(s.figures)
		s.hotExperts()
		s.partition()
		s.churn(5 * time.Minute)
		s.killed()
		s.close()
		figures = s.figures
	})
	if !t.Failed() {
		compareFigures(t, filepath.Join("testdata", fmt.Sprintf("sim-%d.golden", nodes)), figures, calm)
	}
}

// form has nodes that hold nothing start together.
func (s *simSwarm) form(nodes int) {
	s.grow(nodes)
	s.until("from nothing: every expert served", 5*time.Minute, s.atLeast(1))
	s.until("two replicas of every expert", 5*time.Minute, s.atLeast(2))
	s.until("every node sees the coverage that is", 5*time.Minute, s.agree)
	s.rest(2*time.Minute, 2*time.Minute)
	s.note(s.total(func(n *simNode) int { return n.loads }), "experts", "loaded so far")
}

// burst has newcomers start together, of whom nobody has need.
func (s *simSwarm) burst(nodes int) {
	work := func(n *simNode) int { return n.loads + n.moves }
	before := s.total(work)
	s.grow(nodes)
	s.until("a third more nodes: every node sees the coverage that is", 5*time.Minute, s.agree)
	s.rest(2*time.Minute, 2*time.Minute)
	s.note(s.total(work)-before, "experts", "loaded or given up")
}

// hotExperts has one node tell that its router picks four experts of each layer more than others.
func (s *simSwarm) hotExperts() {
	const first, last = 8, 12
	meter, err := market.NewMeter(simShape)
	if err != nil {
		s.t.Fatal(err)
	}
	for l := range simShape.Layers {
		for e := range simShape.Experts {
			pairs := 100
			if first <= e && e < last {
				pairs = 900
			}
			meter.Add(l, e, pairs, time.Now())
		}
	}
	hot := func() (least int) {
		count := count(s.nodes)
		least = slices.Max(count)
		for l := range simShape.Layers {
			least = min(least, slices.Min(count[l*simShape.Experts+first:l*simShape.Experts+last]))
		}
		return least
	}
	n := s.nodes[0]
	before := hot()
	n.mu.Lock()
	n.say = market.ModelNews{Backbone: true, Demand: meter.Demand(time.Now())}
	n.fresh = true
	n.mu.Unlock()
	s.until("four experts of each layer are hot: two replicas more", 10*time.Minute, func() bool { return hot() >= before+2 })
	s.until("every node sees it", 5*time.Minute, s.agree)
	n.mu.Lock()
	n.say, n.fresh = market.ModelNews{}, true
	n.mu.Unlock()
}

// partition parts the nodes into halves for a while.
func (s *simSwarm) partition() {
	side := make(map[string]int)
	var half [2][]*simNode
	for i, n := range s.nodes {
		side[string(n.host.ID())] = i % 2
		half[i%2] = append(half[i%2], n)
	}
	s.net.Split(side)
	time.Sleep(2 * time.Minute)
	s.until("two minutes in halves: two replicas in each", 10*time.Minute, func() bool {
		return slices.Min(count(half[0])) >= 2 && slices.Min(count(half[1])) >= 2
	})
	s.net.Split(nil)
	s.until("healed: every node sees the coverage that is", 5*time.Minute, s.agree)
	s.rest(2*time.Minute, 2*time.Minute)
}

// churn ends a node at random and starts another, every ten seconds.
func (s *simSwarm) churn(d time.Duration) {
	least := 1 << 30
	for end := time.Now().Add(d); time.Now().Before(end); {
		gone := s.rng.IntN(len(s.nodes))
		s.shrink(func(i int) bool { return i == gone })
		s.grow(1)
		for range 10 {
			low, _ := s.served()
			least = min(least, low)
			time.Sleep(time.Second)
		}
	}
	s.note(least, "replicas", "one node in ten seconds replaced by another: the least")
	if least < 1 {
		s.t.Error("one node after the other went, and an expert was not served")
	}
	s.until("every node sees the coverage that is", 10*time.Minute, s.agree)
}

// killed ends a third of the nodes at once.
func (s *simSwarm) killed() {
	s.shrink(func(int) bool { return s.rng.IntN(3) == 0 })
	least, _ := s.served()
	s.note(least, "replicas", "a third is gone: the least")
	s.until("two replicas of every expert", 10*time.Minute, s.atLeast(2))
	s.until("every node sees the coverage that is", 10*time.Minute, s.agree)
	s.rest(2*time.Minute, 2*time.Minute)
}

// slack is by how much a figure may differ from the golden one, beside a third of it: goroutines
// do not run in the same order twice. After a blow it matters more who was hit.
var (
	calmSlack = map[string]int{"s": 15, "replicas": 0, "bytes": 500, "experts": 64}
	slack     = map[string]int{"s": 120, "replicas": 2, "bytes": 500, "experts": 64}
)

func compareFigures(t *testing.T, path string, figures []figure, calm int) {
	t.Helper()
	if *rewriteSim {
		var b bytes.Buffer
		for _, f := range figures {
			fmt.Fprintf(&b, "%s: %d %s\n", f.what, f.value, f.unit)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Logf("nothing to compare with: %v", err)
		return
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	if len(lines) != len(figures) {
		t.Fatalf("%d figures, %d in %s: run with -rewrite", len(figures), len(lines), path)
	}
	for i, f := range figures {
		rest, ok := bytes.CutPrefix(lines[i], []byte(f.what+": "))
		var want int
		if _, err := fmt.Sscan(string(rest), &want); err != nil || !ok {
			t.Fatalf("%s, line %d is %q, not of %q: run with -rewrite", path, i+1, lines[i], f.what)
		}
		give := slack
		if i < calm {
			give = calmSlack
		}
		if d := f.value - want; max(d, -d) > want/3+give[f.unit] {
			t.Errorf("%s: %d %s, the golden summary has %d", f.what, f.value, f.unit, want)
		}
	}
}
