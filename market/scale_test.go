//go:build sim

package market

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// The simulation of a large swarm: every node has its own Volunteer and Pace, but the nodes share
// scaleViews tables, each of which hears every announcement at a time of its own, since ten
// thousand tables of ten thousand authors do not fit. A node that dies is noticed only when what
// it said is over: a contact sees it sooner.
const scaleViews = 8

// What gossip costs a node, as BenchmarkGossipAtRest of package p2p measures it: an announcement
// so many times its sealed size, and a renewal so many bytes.
const (
	sealedMore   = 170 // bytes of an envelope beyond its body
	meshCopies   = 5.4
	renewalCosts = 116
)

// nearTold is how many neighbours a volunteer for experts tells, as package node has it do.
const nearTold = 4

type scale struct {
	*sim                     // clock, rng, shape, policy
	views                    []*Table
	volunteers               []*scaleNode
	sent, sentBytes, renewed int
	loadsOf, given           int
	hints                    int // bytes of an announcement that tell of its machine and neighbours
}

type scaleNode struct {
	id     string
	view   *Table
	vol    *Volunteer
	pace   Pace
	budget Budget
	up     bool
	seq    uint64
	busy   time.Time
	woken  time.Time
}

func newScale(t *testing.T, nodes int) *scale {
	// Room for three and a half replicas of everything: see join.
	l := max(1, int(math.Round(float64(nodes)*2.2/3.5/32)))
	s := &scale{sim: newSim(t, uint64(nodes), Policy{}, layers(l, 32), expertBytes, simNet{})}
	for range min(nodes, scaleViews) {
		s.views = append(s.views, newTable(t, s.policy, modelA, s.shape))
	}
	a := &Announcement{Machine: &Machine{Cores: 8, Bytes: 20e9, Batch: 200e9, Layer: 20 * time.Microsecond, Up: 5e6, Down: 20e6, Call: time.Millisecond}}
	s.hints = -len(encode(t, &Announcement{}))
	for i := range nearTold {
		a.Near = append(a.Near, Neighbour{fmt.Sprintf("%02d%050d", i, i), 20 * time.Millisecond}) // as long as a peer id
	}
	s.hints += len(encode(t, a))
	return s
}

// join starts a node.
func (s *scale) join(within time.Duration) {
	i := len(s.volunteers)
	experts, rate := 1, int64(5*mega) // of ten nodes six phones, three laptops, one server
	switch {
	case i%10 == 9:
		experts, rate = 10, 50*mega
	case i%10 >= 6:
		experts, rate = 2, 20*mega
	}
	n := &scaleNode{id: fmt.Sprintf("node-%d", i), view: s.views[i%len(s.views)], up: true}
	n.budget = Budget{Disk: int64(experts) * s.size, Memory: int64(experts) * s.size, Bandwidth: rate}
	var err error
	if n.vol, err = NewVolunteer(n.id, s.policy, func(gguf.ModelID, int) int64 { return s.size }); err != nil {
		s.t.Fatal(err)
	}
	s.volunteers = append(s.volunteers, n)
	s.wakeAt(n, s.now.Add(time.Duration(s.rng.Int64N(int64(within)))))
}

func (s *scale) wakeAt(n *scaleNode, at time.Time) {
	n.woken = at
	s.after(max(0, at.Sub(s.now)), func() {
		if n.up && n.woken.Equal(at) {
			s.wake(n)
		}
	})
}

func (s *scale) wake(n *scaleNode) {
	d := n.vol.Decide(n.view, n.budget, s.now)
	next := d.Next
	for _, p := range d.Drop {
		s.given += p.Slice.Experts.Len()
		n.vol.Dropped(p)
		next = s.now.Add(100 * time.Millisecond)
	}
	for _, p := range d.Load {
		s.load(n, p)
	}
	peers := n.view.Peers(s.now)
	due := n.pace.Next(n.id, peers, d.Announce)
	if !s.now.Before(due) {
		s.announce(n, peers)
		due = n.pace.Next(n.id, peers, false)
	}
	if due.Before(next) {
		next = due
	}
	s.wakeAt(n, next)
}

func (s *scale) load(n *scaleNode, p Part) {
	s.loadsOf += p.Slice.Experts.Len()
	if n.busy.Before(s.now) {
		n.busy = s.now
	}
	bytes := float64(p.Slice.Experts.Len()) * float64(s.size)
	n.busy = n.busy.Add(time.Duration(bytes / float64(n.budget.Bandwidth) * float64(time.Second)))
	s.after(n.busy.Sub(s.now)+time.Second, func() {
		if n.up {
			n.vol.Done(p, s.now)
			s.wake(n)
		}
	})
}

func (s *scale) announce(n *scaleNode, peers int) {
	a := &Announcement{Models: []ModelNews{{ID: modelA, Name: "simulated", Shape: s.shape, Holdings: n.vol.Holdings()[modelA]}}}
	s.sent++
	s.sentBytes += len(encode(s.t, a)) + sealedMore + s.hints
	n.seq++
	r := Record{From: n.id, Seq: n.seq, Issued: s.now, Validity: Validity(peers)}
	n.pace.Sent(s.now, peers, a)
	n.vol.Announced(s.now)
	salt := s.rng.Uint64()
	s.reach(len(hops), func(i int) int { return int(mix(salt, uint64(i)) % uint64(len(hops))) },
		func(k int) time.Duration { return hops[k] * time.Millisecond },
		func(view *Table) { s.hearIn(view, r, a) })
	s.renew(n, r, a, RenewEvery(peers))
}

// reach has every view do something, each after the delay of its hop.
func (s *scale) reach(hops int, hop func(view int) int, delay func(hop int) time.Duration, do func(*Table)) {
	for k := range hops {
		s.after(delay(k), func() {
			for i, view := range s.views {
				if hop(i) == k {
					do(view)
				}
			}
		})
	}
}

func (s *scale) hearIn(view *Table, r Record, a *Announcement) {
	if _, err := view.update(r, a, s.now); err != nil && err.(*RefusedError).AuthorsFault() {
		s.t.Fatal(err)
	}
}

func (s *scale) renew(n *scaleNode, r Record, a *Announcement, step time.Duration) {
	s.after(step, func() {
		if !n.up || n.seq != r.Seq || r.Validity+step > renewLife {
			return
		}
		r.Validity += step
		s.renewed++
		at, salt := s.now, s.rng.Uint64()
		s.reach(len(renewHops), func(i int) int { return renewHop(mix(salt, uint64(i))) },
			func(k int) time.Duration { return renewHops[k] },
			func(view *Table) {
				if x := view.authors[r.From]; x == nil || x.seq < r.Seq {
					s.hearIn(view, r, a)
				} else if _, err := view.Renew(r, at, s.now); err != nil {
					s.t.Fatal(err)
				}
			})
		s.renew(n, r, a, step)
	})
}

// replicas counts who really serves each cell.
func (s *scale) replicas() []int {
	count := make([]int, s.shape.Layers*s.shape.Experts)
	for _, n := range s.volunteers {
		if !n.up {
			continue
		}
		for _, h := range n.vol.own {
			if !h.dropped && (h.state == Serving || h.state == Leaving) {
				s.shape.eachRow(h.part().Slice, func(begin, end int) {
					for i := begin; i < end; i++ {
						count[i]++
					}
				})
			}
		}
	}
	return count
}

// until runs until every cell has so many replicas.
func (s *scale) until(least int, most time.Duration) {
	begin := s.now
	for s.now.Sub(begin) < most {
		s.run(5 * time.Second)
		if slices.Min(s.replicas()) >= least {
			s.t.Logf("every expert served by %d: after %v", least, s.now.Sub(s.start))
			return
		}
	}
	s.t.Errorf("every expert served by %d: not within %v", least, most)
}

// measure runs for a while, looking every 5 s, and tells what that cost a node and did.
func (s *scale) measure(what string, nodes int, d time.Duration) {
	sent, bytes, renewed, loads, given := s.sent, s.sentBytes, s.renewed, s.loadsOf, s.given
	uncovered, below, least := 0, 0, math.MaxInt
	for end := s.now.Add(d); s.now.Before(end); {
		s.run(5 * time.Second)
		low := slices.Min(s.replicas())
		least = min(least, low)
		if low < 1 {
			uncovered++
		}
		if low < 2 {
			below++
		}
	}
	count, sum, squares := s.replicas(), 0., 0.
	for _, n := range count {
		sum += float64(n)
		squares += float64(n * n)
	}
	mean := sum / float64(len(count))
	sec := d.Seconds()
	news := float64(s.sentBytes-bytes) * meshCopies / sec
	renewals := float64(s.renewed-renewed) * renewalCosts / sec
	s.t.Logf("%s, %v: a node sends %.0f B/s (announcements %.0f, renewals %.0f); %.2f announcements and %.2f renewals per node and minute",
		what, d, news+renewals, news, renewals, float64(s.sent-sent)/float64(nodes)/sec*60, float64(s.renewed-renewed)/float64(nodes)/sec*60)
	s.t.Logf("  replicas %d to %d, mean %.2f, deviation %.2f; at least %d; %d s with an expert uncovered, %d s with one below two",
		slices.Min(count), slices.Max(count), mean, math.Sqrt(max(0, squares/float64(len(count))-mean*mean)), least, 5*uncovered, 5*below)
	s.t.Logf("  %d experts downloaded, %d given up, of %d; %.1f kB per node and second",
		s.loadsOf-loads, s.given-given, int(sum), float64(s.loadsOf-loads)*float64(s.size)/float64(nodes)/sec/1e3)
}

// compare tells what a swarm at rest costs a node in the long run, and what it would if nothing
// were renewed and every announcement was sent again every 30 s, or in a larger swarm in that
// time for each 100 nodes, 10 min at most: as it was before there were renewals.
func (s *scale) compare(nodes int) {
	size := float64(s.sentBytes) / float64(s.sent) * meshCopies * float64(nodes)
	again := min(30*time.Second*time.Duration(max(nodes, 100))/100, 10*time.Minute)
	after := size/AnnounceEvery(nodes).Seconds() + renewalCosts*float64(nodes)/RenewEvery(nodes).Seconds()
	before := size / again.Seconds()
	s.t.Logf("in the long run a node sends %.0f B/s, without renewals %.0f: %.1f times as much", after, before, before/after)
}

// churn replaces nodes, each after a life of so long on average, without a word.
func (s *scale) churn(nodes int, life, d time.Duration) {
	end := s.now.Add(d)
	var next func()
	next = func() {
		if s.now.After(end) {
			return
		}
		for {
			n := s.volunteers[s.rng.IntN(len(s.volunteers))]
			if n.up {
				n.up = false
				break
			}
		}
		s.join(time.Second)
		s.after(time.Duration(s.rng.ExpFloat64()*float64(life)/float64(nodes)), next)
	}
	next()
	s.measure(fmt.Sprintf("a node lives for %v", life), nodes, d)
}

// TestScale has swarms of the sizes in KVASIR_SCALE come from nothing, rest, and live through
// churn (`make sim-scale`).
func TestScale(t *testing.T) {
	list := os.Getenv("KVASIR_SCALE")
	if list == "" {
		list = "100"
	}
	for size := range strings.SplitSeq(list, ",") {
		nodes, err := strconv.Atoi(size)
		if err != nil || nodes < 50 {
			t.Fatalf("KVASIR_SCALE=%q: want numbers of nodes, 50 or more", list)
		}
		t.Run(size, func(t *testing.T) {
			begin := time.Now()
			s := newScale(t, nodes)
			for range nodes {
				s.join(30 * time.Second)
			}
			s.until(1, time.Hour)
			s.until(2, time.Hour)
			s.run(2 * time.Minute)
			s.measure("at rest", nodes, 2*time.Minute)
			s.compare(nodes)
			s.churn(nodes, 4*time.Hour, max(10*time.Minute, 3*Validity(nodes)/2))
			t.Logf("%d nodes, %v of a model: %v", nodes, s.shape, time.Since(begin).Round(time.Second))
		})
	}
}
