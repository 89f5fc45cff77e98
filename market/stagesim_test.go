package market

import (
	"bytes"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// The simulation of stagers: every node has its own Table, Stager and Pace; what is made up is
// time, the network (as in sim_test.go) and downloads. It is deterministic.

type stageSim struct {
	t      *testing.T
	rng    *rand.Rand
	now    time.Time
	queue  events
	serial uint64
	net    simNet
	model  StageModel
	shape  Shape
	policy Policy
	nodes  []*stageNode
	loads  int // windows whose download began
	moves  int // windows given up that served
	wasted int // windows given up that did not
	broken int // times that the last chain was given up by choice
}

type stageNode struct {
	s      *stageSim
	i      int
	id     string
	room   Footprint
	up     bool
	life   int
	seq    uint64
	drain  bool
	table  *Table
	stager *Stager
	pace   Pace
	woken  time.Time
	serves gguf.Range
	drops  gguf.Range
}

const layerBytes = 1000

// layered is a model of equal layers with a cut at every so many, whose ends take two layers more.
func layered(layers, every int) StageModel {
	m := StageModel{ID: modelA, First: Footprint{2 * layerBytes, 2 * layerBytes}, Last: Footprint{2 * layerBytes, 2 * layerBytes}}
	for l := range layers {
		m.Layers = append(m.Layers, Footprint{layerBytes, layerBytes})
		if l > 0 && l%every == 0 {
			m.Cuts = append(m.Cuts, l)
		}
	}
	return m
}

func newStageSim(t *testing.T, seed uint64, m StageModel) *stageSim {
	return &stageSim{t: t, rng: rand.New(rand.NewPCG(seed, 7)), now: t0, net: usual, model: m, shape: Shape{Layers: len(m.Layers)}}
}

func (s *stageSim) after(d time.Duration, do func()) {
	s.serial++
	heap.Push(&s.queue, event{s.now.Add(d), s.serial, do})
}

func (s *stageSim) run(d time.Duration) {
	end := s.now.Add(d)
	for len(s.queue) > 0 && s.queue[0].at.Before(end) {
		e := heap.Pop(&s.queue).(event)
		s.now = e.at
		e.do()
	}
	s.now = end
}

// add makes a node with room for so many layers, which starts after a while.
func (s *stageSim) add(layers float64, after time.Duration) *stageNode {
	bytes := int64(layers * layerBytes)
	n := &stageNode{s: s, i: len(s.nodes), id: fmt.Sprintf("node-%d", len(s.nodes)), room: Footprint{bytes, bytes}}
	s.nodes = append(s.nodes, n)
	s.after(after, func() { n.begin(nil) })
	return n
}

func (n *stageNode) begin(disk *stage) {
	s := n.s
	var err error
	n.up, n.drain, n.life, n.pace, n.woken = true, false, n.life+1, Pace{}, time.Time{}
	n.serves, n.drops = gguf.Range{}, gguf.Range{}
	n.table = newTable(s.t, s.policy, modelA, s.shape)
	if n.stager, err = NewStager(n.id, s.policy, s.model); err != nil {
		s.t.Fatal(err)
	}
	if disk != nil && disk.onDisk {
		if err := n.stager.Restore(disk.layers, disk.state >= Serving); err != nil {
			s.t.Fatal(err)
		}
		if disk.state >= Serving {
			n.serves = disk.layers
		}
	}
	for _, o := range s.nodes { // a newcomer asks one for all that it knows
		if o != n && o.up {
			n.copyOf(o)
			break
		}
	}
	n.wakeAt(s.now)
}

func (n *stageNode) copyOf(o *stageNode) {
	for _, id := range sortedAuthors(o.table) {
		if x := o.table.authors[id]; x.present && id != n.id {
			n.hear(Record{From: id, Seq: x.seq, Issued: x.issued, Validity: x.expires.Sub(x.issued)}, x.news)
		}
	}
}

func sortedAuthors(t *Table) []string {
	var ids []string
	for id := range t.authors {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (n *stageNode) hear(r Record, a *Announcement) {
	if _, err := n.table.update(r, a, n.s.now); err != nil && err.(*RefusedError).AuthorsFault() {
		n.s.t.Fatal(err)
	}
}

func (n *stageNode) wakeAt(at time.Time) {
	life := n.life
	n.s.after(max(0, at.Sub(n.s.now)), func() {
		if n.up && n.life == life && (n.woken.IsZero() || !n.woken.After(n.s.now)) {
			n.wake()
		}
	})
}

func (n *stageNode) wake() {
	s, life := n.s, n.life
	d := n.stager.Decide(n.table, Budget{Disk: n.room.Disk, Memory: n.room.Memory, Drain: n.drain}, s.now)
	next := d.Next
	if d.Drop.Len() > 0 && d.Drop != n.drops {
		n.dropping(d.Drop)
		s.after(3*time.Second, func() {
			if n.up && n.life == life {
				n.drops = gguf.Range{}
				n.stager.Dropped(d.Drop)
				n.wake()
			}
		})
	}
	if d.Load.Len() > 0 {
		if !n.stager.fit.fits(d.Load, n.room) {
			s.t.Fatalf("%s loads %v, which does not fit", n.id, d.Load)
		}
		s.loads++
		s.after(time.Duration(d.Load.Len())*time.Second, func() {
			if n.up && n.life == life {
				n.serves = d.Load
				n.stager.Done(d.Load)
				n.wake()
			}
		})
	}
	due := n.pace.Next(n.id, n.table.Peers(s.now), d.Announce)
	if !s.now.Before(due) {
		n.announce(false)
		due = n.pace.Next(n.id, n.table.Peers(s.now), false)
	}
	if due.Before(next) {
		next = due
	}
	n.woken = next
	n.wakeAt(next)
}

// dropping counts what is given up.
func (n *stageNode) dropping(w gguf.Range) {
	s := n.s
	if n.drops = w; w != n.serves {
		s.wasted++
		return
	}
	s.moves++
	n.serves = gguf.Range{}
	if s.chains() == 0 && Chains(append(s.windows(), w), len(s.model.Layers), 1) > 0 {
		s.broken++
	}
}

func (n *stageNode) announce(away bool) {
	s := n.s
	a := &Announcement{Away: away}
	if !away {
		a.Models = []ModelNews{{ID: modelA, Shape: s.shape, Windows: n.stager.Windows(), Room: n.stager.Room()}}
	}
	encode(s.t, a)
	n.seq++
	peers := n.table.Peers(s.now)
	r := Record{From: n.id, Seq: n.seq, Issued: s.now, Validity: Validity(peers)}
	n.pace.Sent(s.now, peers, a)
	n.stager.Announced(s.now)
	n.hear(r, a)
	for _, o := range s.nodes {
		if o == n || !o.up {
			continue
		}
		delay := hops[s.rng.IntN(len(hops))] * time.Millisecond
		switch x := s.rng.IntN(1000); {
		case x < s.net.lost:
			continue
		case x < s.net.lost+s.net.late:
			delay = lateBy
		}
		life := o.life
		s.after(delay, func() {
			if o.up && o.life == life {
				o.hear(r, a)
			}
		})
	}
}

// kill ends a node without a word; all see it within six seconds.
func (n *stageNode) kill() {
	s := n.s
	n.up = false
	for _, o := range s.nodes {
		if o.up {
			s.after(time.Second+time.Duration(s.rng.Int64N(int64(5*time.Second))), func() {
				if o.up && !n.up {
					o.table.Lost(n.id, s.now)
				}
			})
		}
	}
}

// leave stops a node politely, and at once if nobody needs it, else after two minutes.
func (n *stageNode) leave() {
	n.drain = true
	n.s.after(2*time.Minute, func() {
		if n.up && n.drain {
			n.announce(true)
			n.up = false
		}
	})
}

// windows lists what really serves.
func (s *stageSim) windows() (list []gguf.Range) {
	for _, n := range s.nodes {
		if n.up && n.stager.own != nil && n.stager.own.state >= Serving {
			list = append(list, n.stager.own.layers)
		}
	}
	return list
}

func (s *stageSim) chains() int { return Chains(s.windows(), len(s.model.Layers), 1<<20) }

// until runs until there are so many chains, and returns how long that took.
func (s *stageSim) until(chains int, most time.Duration) (time.Duration, bool) {
	begin := s.now
	for s.now.Sub(begin) < most {
		s.run(time.Second)
		if s.chains() >= chains {
			return s.now.Sub(begin), true
		}
	}
	return most, false
}

// report writes who holds what.
func (s *stageSim) report(out *bytes.Buffer) {
	var held, idle int
	byLen := map[int]int{}
	for _, n := range s.nodes {
		if !n.up {
			continue
		}
		if n.stager.own == nil {
			idle++
			continue
		}
		held++
		byLen[n.stager.own.layers.Len()]++
	}
	var lens []int
	for l := range byLen {
		lens = append(lens, l)
	}
	slices.Sort(lens)
	fmt.Fprintf(out, "  %d chains; %d nodes hold a window, %d none;", s.chains(), held, idle)
	for _, l := range lens {
		fmt.Fprintf(out, " %d×%d", byLen[l], l)
	}
	fmt.Fprintf(out, "; %d downloads, %d given up that served, %d that did not\n", s.loads, s.moves, s.wasted)
	if s.broken > 0 {
		s.t.Errorf("%d times the last chain was given up", s.broken)
	}
}
