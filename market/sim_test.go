package market

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// The simulation: every node has its own Table, Volunteer and Pace, as a real one has; what is
// made up is time, the network between them, and downloads. It is deterministic.

// simNet is how announcements travel: most arrive within two seconds, some late, some never.
type simNet struct {
	late, lost int // of 1,000 deliveries
	contacts   int // how many peers a node is connected to: those see it die
}

// hops are the delays of a flood, as that of gossip among 1,000 nodes.
var hops = [...]time.Duration{60, 150, 300, 600, 1000, 1600}

const lateBy = 4 * time.Second

// renewHops are the delays with which a renewal arrives, the last for one in fifty who had to ask,
// and renewLife for how long a record is renewed: as p2p does it.
var renewHops = [...]time.Duration{5 * time.Second, 15 * time.Second, 35 * time.Second}

const renewLife = 24 * time.Hour

type sim struct {
	t      *testing.T
	net    simNet
	policy Policy
	shape  Shape
	size   int64 // of an expert
	rng    *rand.Rand
	now    time.Time
	start  time.Time
	queue  events
	serial uint64
	nodes  []*simNode
	watch  func()

	loads, moved, wasted int   // cells whose download began; given up when served; given up before
	downloaded           int64 // bytes
	gossip               int64 // bytes published
	renewals             int   // published
	lastDropped          int   // cells whose last replica was given up by choice
}

type simNode struct {
	s      *sim
	i      int
	id     string
	up     bool
	life   int // counts starts: events of an earlier life are void
	group  int // of the partition
	seq    uint64
	budget Budget
	table  *Table
	vol    *Volunteer
	pace   Pace
	busy   time.Time // until when the line is used
	stuck  bool      // its downloads never end
	say    ModelNews // backbone, demand
	woken  time.Time
}

type event struct {
	at time.Time
	n  uint64
	do func()
}

type events []event

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].n < q[j].n
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*q = old[:len(old)-1]
	return e
}

func newSim(t *testing.T, seed uint64, p Policy, s Shape, size int64, net simNet) *sim {
	if err := p.validate(); err != nil {
		t.Fatal(err)
	}
	return &sim{t: t, net: net, policy: p, shape: s, size: size, rng: rand.New(rand.NewPCG(seed, 1)), now: t0, start: t0}
}

func (s *sim) after(d time.Duration, do func()) {
	s.serial++
	heap.Push(&s.queue, event{s.now.Add(d), s.serial, do})
}

// run lets time pass. watch, if set, is called every second of it.
func (s *sim) run(d time.Duration) {
	end := s.now.Add(d)
	tick := s.now.Truncate(time.Second).Add(time.Second)
	for {
		next := end
		if len(s.queue) > 0 && s.queue[0].at.Before(end) {
			next = s.queue[0].at
		}
		for ; s.watch != nil && !tick.After(next); tick = tick.Add(time.Second) {
			s.now = tick
			s.watch()
		}
		if s.now = next; next.Equal(end) {
			return
		}
		heap.Pop(&s.queue).(event).do()
	}
}

// add makes a node with room for so many experts; it starts within the given time.
func (s *sim) add(experts int, rate int64, within time.Duration) *simNode {
	n := &simNode{s: s, i: len(s.nodes), id: fmt.Sprintf("node-%d", len(s.nodes))}
	n.budget = Budget{Disk: int64(experts) * s.size, Memory: int64(experts) * s.size, Bandwidth: rate}
	s.nodes = append(s.nodes, n)
	s.after(time.Duration(s.rng.Int64N(int64(within)+1)), func() { n.begin(nil) })
	return n
}

// begin starts a node, with what an earlier life left on its disk.
func (n *simNode) begin(disk []*held) {
	s := n.s
	var err error
	n.up, n.life, n.pace, n.busy = true, n.life+1, Pace{}, s.now
	n.table = newTable(s.t, s.policy, modelA, s.shape)
	if n.vol, err = NewVolunteer(n.id, s.policy, func(gguf.ModelID, int) int64 { return s.size }); err != nil {
		s.t.Fatal(err)
	}
	for _, h := range disk {
		if h.onDisk {
			if err := n.vol.Restore(h.part(), h.state == Serving || h.state == Leaving, s.now); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	n.pull()
	n.wakeAt(s.now)
}

// pull takes the snapshots of the node that everybody knows and of another, as a newcomer does.
func (n *simNode) pull() {
	s := n.s
	var from []*simNode
	for _, o := range s.nodes {
		if o != n && o.up && o.group == n.group {
			from = append(from, o)
		}
	}
	if len(from) == 0 {
		return
	}
	n.copyOf(from[0])
	n.copyOf(from[s.rng.IntN(len(from))])
}

func (n *simNode) copyOf(peer *simNode) {
	ids := make([]string, 0, len(peer.table.authors))
	for id, x := range peer.table.authors {
		if x.present && id != n.id {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	for _, id := range ids {
		x := peer.table.authors[id]
		n.hear(Record{From: id, Seq: x.seq, Issued: x.issued, Validity: x.expires.Sub(x.issued)}, x.news)
	}
}

func (n *simNode) hear(r Record, a *Announcement) {
	if _, err := n.table.update(r, a, n.s.now); err != nil && err.(*RefusedError).AuthorsFault() {
		n.s.t.Fatal(err)
	}
}

func (n *simNode) wakeAt(at time.Time) {
	s, life := n.s, n.life
	s.after(max(0, at.Sub(s.now)), func() {
		if n.up && n.life == life && (n.woken.IsZero() || !n.woken.After(s.now)) {
			n.wake()
		}
	})
}

// wake is the loop of a node: decide, do, announce.
func (n *simNode) wake() {
	s := n.s
	d := n.vol.Decide(n.table, n.budget, s.now)
	if used := n.vol.Used(); used > n.budget.bytes() && !n.budget.Drain && len(d.Drop) == 0 {
		s.t.Fatalf("%v: %s uses %d of %d bytes", s.now.Sub(s.start), n.id, used, n.budget.bytes())
	}
	for _, p := range d.Drop {
		n.drop(p)
	}
	for _, p := range d.Load {
		n.load(p)
	}
	next := d.Next
	if len(d.Drop) > 0 {
		next = s.now.Add(100 * time.Millisecond)
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

func (n *simNode) drop(p Part) {
	s := n.s
	for _, h := range n.vol.own {
		if !h.dropped || !h.within(p) {
			continue
		}
		if h.state != Serving && h.state != Leaving {
			s.wasted += h.experts.Len()
			continue
		}
		s.moved += h.experts.Len()
		truth := s.truth()
		s.shape.eachRow(p.Slice, func(begin, end int) {
			for _, c := range truth[begin:end] {
				if c == 0 { // the part itself is not counted any more
					s.lastDropped++
				}
			}
		})
	}
	n.vol.Dropped(p)
}

func (n *simNode) load(p Part) {
	s, life := n.s, n.life
	cells := p.Slice.Experts.Len()
	s.loads += cells
	bytes := int64(cells) * s.size
	s.downloaded += bytes
	if n.stuck {
		s.after(10*time.Minute, func() {
			if n.up && n.life == life {
				n.vol.Failed(p, s.now)
				n.wake()
			}
		})
		return
	}
	if n.busy.Before(s.now) {
		n.busy = s.now
	}
	n.busy = n.busy.Add(time.Duration(float64(bytes) / float64(n.budget.Bandwidth) * float64(time.Second)))
	s.after(n.busy.Sub(s.now)+time.Second, func() {
		if n.up && n.life == life {
			n.vol.Done(p, s.now)
			n.wake()
		}
	})
}

// announce publishes what the node holds.
func (n *simNode) announce(away bool) {
	s := n.s
	a := &Announcement{Away: away}
	if !away {
		m := n.say
		m.ID, m.Name, m.Shape, m.Holdings = modelA, "simulated", s.shape, n.vol.Holdings()[modelA]
		a.Models = []ModelNews{m}
	}
	body := encode(s.t, a)
	s.gossip += int64(len(body))
	n.seq++
	peers := n.table.Peers(s.now)
	r := Record{From: n.id, Seq: n.seq, Issued: s.now, Validity: Validity(peers)}
	n.pace.Sent(s.now, peers, a)
	n.vol.Announced(s.now)
	n.hear(r, a)
	salt := s.rng.Uint64()
	group := n.group
	reach := func(kind int, delay time.Duration) {
		s.after(delay, func() {
			for _, o := range s.nodes {
				if o != n && o.up && o.group == group && s.kind(salt, o.i) == kind {
					o.hear(r, a)
				}
			}
		})
	}
	for k, d := range hops {
		reach(k, d*time.Millisecond)
	}
	if s.net.late > 0 {
		reach(len(hops), lateBy)
	}
	if !away {
		n.renew(r, a, RenewEvery(peers))
	}
}

// renew renews a record every step, until the next.
func (n *simNode) renew(r Record, a *Announcement, step time.Duration) {
	s, life := n.s, n.life
	s.after(step, func() {
		if !n.up || n.life != life || n.seq != r.Seq || r.Validity+step > renewLife {
			return
		}
		r.Validity += step
		s.renewals++
		at, salt, group := s.now, s.rng.Uint64(), n.group
		for k, delay := range renewHops {
			s.after(delay, func() {
				for _, o := range s.nodes {
					if o.up && o.group == group && renewHop(mix(salt, uint64(o.i))) == k {
						o.hearRenewal(r, a, at)
					}
				}
			})
		}
		n.renew(r, a, step)
	})
}

// renewHop draws on which hop a renewal arrives, above the last never: one in a thousand.
func renewHop(h uint64) int {
	switch x := h % 1000; {
	case x < 1:
		return len(renewHops)
	case x < 20:
		return len(renewHops) - 1
	}
	return int(h >> 32 % 2)
}

func (n *simNode) hearRenewal(r Record, a *Announcement, at time.Time) {
	if x := n.table.authors[r.From]; x == nil || x.seq < r.Seq {
		n.hear(r, a) // who lacks what is renewed is shown it
	} else if _, err := n.table.Renew(r, at, n.s.now); err != nil {
		n.s.t.Fatal(err)
	}
}

// kind says by which hop an announcement reaches a node: len(hops) late, above never.
func (s *sim) kind(salt uint64, node int) int {
	h := mix(salt, uint64(node))
	switch x := int(h % 1000); {
	case x < s.net.lost:
		return len(hops) + 1
	case x < s.net.lost+s.net.late:
		return len(hops)
	}
	return int(h >> 32 % uint64(len(hops)))
}

// kill ends a node without a word. Its contacts see it within six seconds.
func (n *simNode) kill() {
	s := n.s
	n.up = false
	s.seen(n, func(o *simNode) { o.table.Lost(n.id, s.now) })
}

// seen has the contacts of a node notice something of it.
func (s *sim) seen(n *simNode, notice func(*simNode)) {
	s.after(time.Second+time.Duration(s.rng.Int64N(int64(5*time.Second))), func() {
		for _, o := range s.nodes {
			a, b := uint64(min(n.i, o.i)), uint64(max(n.i, o.i))
			if o != n && o.up && int(mix(a, b)%uint64(len(s.nodes))) < s.net.contacts {
				notice(o)
			}
		}
	})
}

// restart kills and starts a node that keeps its disk.
func (n *simNode) restart(after time.Duration) {
	n.kill()
	disk := n.vol.own
	n.s.after(after, func() {
		if !n.up {
			n.begin(disk)
		}
	})
}

// leave stops a node politely: it says that it leaves, waits up to two minutes for others to
// take over, and says that it is away.
func (n *simNode) leave() {
	s, life := n.s, n.life
	n.budget.Drain = true
	s.after(2*time.Minute, func() {
		if n.up && n.life == life {
			n.announce(true)
			n.up = false
		}
	})
}

// truth counts the replicas of every cell that really serve.
func (s *sim) truth() []int {
	count := make([]int, s.shape.Layers*s.shape.Experts)
	for _, n := range s.nodes {
		if !n.up {
			continue
		}
		for _, h := range n.vol.own {
			if h.dropped || h.state != Serving && h.state != Leaving {
				continue
			}
			s.shape.eachRow(h.part().Slice, func(begin, end int) {
				for i := begin; i < end; i++ {
					count[i]++
				}
			})
		}
	}
	return count
}
