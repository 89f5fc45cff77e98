package node_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/p2p"
	"kvasird/p2p/sim"
)

// The swarm of these tests is the real gossip and the real market of many nodes, over libp2p on a
// network in memory. Only the time, the lines and the downloads are made up.

const (
	simExpert = 5_300_000 // bytes
	simRoom   = 32        // experts, of the smallest node
)

var (
	simModel = gguf.ModelID{1}
	simShape = market.Shape{Layers: 8, Experts: 64, MoE: []gguf.Range{{Begin: 0, End: 8}}}
)

// simNode is one node: what package node does with a volunteer, without the disk.
type simNode struct {
	host   *p2p.Host
	addr   string
	topic  *p2p.Topic
	budget market.Budget
	stop   chan struct{}
	wake   chan struct{} // capacity 1

	mu    sync.Mutex // guards what follows
	vol   *market.Volunteer
	table *market.Table
	pace  market.Pace
	say   market.ModelNews // demand
	fresh bool             // say has not been said
	sent  int              // bytes of bodies
	loads int              // experts
	moves int              // experts given up
}

func (n *simNode) PeerReady(p *p2p.Peer) { n.table.Met(string(p.ID), time.Now()) }
func (n *simNode) PeerLost(p *p2p.Peer)  { n.table.Lost(string(p.ID), time.Now()) }

func (n *simNode) hear(e p2p.Envelope) {
	// What is refused was judged by Check before.
	_, _ = n.table.Update(record(e), time.Now())
}

func (n *simNode) renew(e p2p.Envelope) {
	_, _ = n.table.Renew(record(e), e.Issued.Add(e.Renewed), time.Now())
}

func record(e p2p.Envelope) market.Record {
	return market.Record{From: string(e.From), Seq: e.Seq, Issued: e.Issued, Validity: e.Validity + e.Renewed, Body: e.Body}
}

// startSim starts a node that is kept connected to a few others.
func startSim(t *testing.T, net *sim.Network, experts int, peers []string) *simNode {
	t.Helper()
	key, err := p2p.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	n := &simNode{stop: make(chan struct{}), wake: make(chan struct{}, 1)}
	n.budget = market.Budget{Disk: int64(experts) * simExpert, Memory: int64(experts) * simExpert, Bandwidth: 20_000_000}
	if n.table, err = market.NewTable(market.Policy{}); err == nil {
		err = n.table.SetShape(simModel, simShape)
	}
	if err == nil {
		n.vol, err = market.NewVolunteer(string(key.ID()), market.Policy{}, func(gguf.ModelID, int) int64 { return simExpert })
	}
	if err == nil {
		n.host, n.addr, err = net.Host(p2p.Config{Identity: key, Network: "sim", Pack: "sim", Peers: peers})
	}
	if err != nil {
		t.Fatal(err)
	}
	n.host.Watch(n)
	n.topic, err = n.host.JoinTopic(p2p.TopicConfig{Name: market.Topic, MaxBody: market.MaxBody, Handle: n.hear, Renew: n.renew,
		Check: func(e p2p.Envelope) error { return n.table.Check(record(e)) }})
	if err == nil {
		err = n.host.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// run is the loop of a node, until stop is closed.
func (n *simNode) run(t *testing.T) {
	for {
		pause := time.Until(n.step(t))
		select {
		case <-n.stop:
			return
		case <-n.wake:
		case <-time.After(min(max(pause, 10*time.Millisecond), 5*time.Second)):
		}
	}
}

func (n *simNode) step(t *testing.T) (next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	d := n.vol.Decide(n.table, n.budget, now)
	for _, p := range d.Drop {
		n.moves += p.Slice.Experts.Len()
		n.vol.Dropped(p)
		d.Next = now
	}
	for _, p := range d.Load {
		n.loads += p.Slice.Experts.Len()
		bytes := p.Slice.Experts.Len() * simExpert
		time.AfterFunc(time.Second*time.Duration(bytes)/time.Duration(n.budget.Bandwidth), func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.vol.Done(p, time.Now())
			select {
			case n.wake <- struct{}{}:
			default:
			}
		})
	}
	if used := n.vol.Used(); used > n.budget.Disk {
		t.Errorf("a node holds %d of %d bytes", used, n.budget.Disk)
	}
	peers := n.table.Peers(now)
	due := n.pace.Next(n.host.ID().String(), peers, d.Announce || n.fresh)
	if now.Before(due) {
		return earlier(due, d.Next)
	}
	m := n.say
	m.ID, m.Shape, m.Holdings = simModel, simShape, n.vol.Holdings()[simModel]
	a := &market.Announcement{Models: []market.ModelNews{m}}
	body, err := a.Encode()
	if err == nil {
		err = n.topic.Keep(body, market.Validity(peers), market.RenewEvery(peers))
	}
	if err != nil {
		t.Errorf("announce: %v", err)
	}
	n.sent += len(body)
	n.fresh = false
	n.pace.Sent(now, peers, a)
	n.vol.Announced(now)
	return d.Next
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// simSwarm is all nodes of a test.
type simSwarm struct {
	t       *testing.T // of the bubble
	net     *sim.Network
	rng     *rand.Rand
	nodes   []*simNode
	wg      sync.WaitGroup
	figures []figure
}

// figure is something that was measured.
type figure struct {
	what  string
	value int
	unit  string
}

func newSimSwarm(t *testing.T) *simSwarm {
	return &simSwarm{t: t, net: sim.New(20 * time.Millisecond), rng: rand.New(rand.NewPCG(3, 3))}
}

// grow starts nodes of three sizes, all at once.
func (s *simSwarm) grow(nodes int) {
	begin := len(s.nodes)
	for i := begin; i < begin+nodes; i++ {
		var peers []string
		for _, j := range []int{i - 1, i - 2, s.rng.IntN(i + 1), s.rng.IntN(i + 1)} {
			if 0 <= j && j < i { // of two neighbours one survives what comes
				peers = append(peers, s.nodes[j].addr)
			}
		}
		slices.Sort(peers)
		s.nodes = append(s.nodes, startSim(s.t, s.net, simRoom<<(i%3), slices.Compact(peers)))
	}
	for _, n := range s.nodes[begin:] {
		s.wg.Go(func() { n.run(s.t) })
	}
}

// shrink ends the nodes of which gone is true.
func (s *simSwarm) shrink(gone func(i int) bool) {
	var left []*simNode
	for i, n := range s.nodes {
		if gone(i) {
			s.end(n)
		} else {
			left = append(left, n)
		}
	}
	s.nodes = left
}

// close ends all nodes.
func (s *simSwarm) close() {
	s.shrink(func(int) bool { return true })
	s.wg.Wait()
}

func (s *simSwarm) note(value int, unit, format string, args ...any) {
	f := figure{fmt.Sprintf(format, args...), value, unit}
	s.figures = append(s.figures, f)
	s.t.Logf("%s: %d %s", f.what, f.value, f.unit)
}

// count returns how many of some nodes really serve each expert.
func count(nodes []*simNode) []int {
	count := make([]int, simShape.Layers*simShape.Experts)
	for _, n := range nodes {
		n.mu.Lock()
		held := n.vol.Holdings()[simModel]
		n.mu.Unlock()
		for _, h := range held {
			if h.State != market.Serving {
				continue
			}
			for l := h.Slice.Layers.Begin; l < h.Slice.Layers.End; l++ {
				for e := h.Slice.Experts.Begin; e < h.Slice.Experts.End; e++ {
					count[l*simShape.Experts+e]++
				}
			}
		}
	}
	return count
}

func (s *simSwarm) served() (least, most int) {
	count := count(s.nodes)
	return slices.Min(count), slices.Max(count)
}

// atLeast is the condition that every expert has n replicas.
func (s *simSwarm) atLeast(n int) func() bool {
	return func() bool { least, _ := s.served(); return least >= n }
}

// until waits for a condition, in the time of the bubble.
func (s *simSwarm) until(what string, most time.Duration, ok func() bool) {
	s.t.Helper()
	begin := time.Now()
	for time.Since(begin) < most {
		if ok() {
			s.note(int(time.Since(begin).Round(time.Second)/time.Second), "s", "%s", what)
			return
		}
		time.Sleep(time.Second)
	}
	low, high := s.served()
	s.t.Errorf("%s: not within %v; replicas %d to %d", what, most, low, high)
}

// agree reports whether every node sees what is really there.
func (s *simSwarm) agree() bool {
	truth := count(s.nodes)
	for _, n := range s.nodes {
		own := count([]*simNode{n}) // its table has what others say
		c, _ := n.table.Coverage(simModel, time.Now())
		for _, l := range c.Layers {
			for _, g := range l.Segments {
				for e := g.Experts.Begin; e < g.Experts.End; e++ {
					if i := l.Layer*simShape.Experts + e; truth[i] != g.Replicas+own[i] {
						return false
					}
				}
			}
		}
	}
	return true
}

func (s *simSwarm) total(f func(*simNode) int) (sum int) {
	for _, n := range s.nodes {
		n.mu.Lock()
		sum += f(n)
		n.mu.Unlock()
	}
	return sum
}

// end stops a node, as a killed process does: its connections end.
func (s *simSwarm) end(n *simNode) {
	close(n.stop)
	if err := n.host.Close(); err != nil {
		s.t.Error(err)
	}
}

// rest passes time in which nothing may move, and measures what it costs.
func (s *simSwarm) rest(settle, d time.Duration) {
	s.t.Helper()
	time.Sleep(settle)
	work := func(n *simNode) int { return n.loads + n.moves }
	sent := func(n *simNode) int { return n.sent }
	before, bodies, wire := s.total(work), s.total(sent), s.net.Bytes()
	time.Sleep(d)
	least, most := s.served()
	each := len(s.nodes) * int(d/time.Minute)
	s.note(least, "replicas", "at rest, the least")
	s.note(most, "replicas", "at rest, the most")
	s.note((s.total(sent)-bodies)/each, "bytes", "announced by a node in a minute")
	s.note(int(s.net.Bytes()-wire)/each, "bytes", "sent by a node in a minute, for all purposes")
	if moved := s.total(work) - before; moved != 0 {
		s.t.Errorf("%d experts were loaded or given up at rest", moved)
	}
}
