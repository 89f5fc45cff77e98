package node_test

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/p2p"
	"kvasird/p2p/sim"
)

// The swarm of this test is the real gossip and the real market of many nodes, over real QUIC
// connections of a simulated network. Only the time, the lines and the downloads are made up.

const simExpert = 5_300_000 // bytes

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
	sent  int // bytes of bodies
	loads int // experts
	moves int // experts given up
}

func (n *simNode) PeerReady(p *p2p.Peer) { n.table.Met(string(p.ID), time.Now()) }
func (n *simNode) PeerLost(p *p2p.Peer)  { n.table.Lost(string(p.ID)) }

func (n *simNode) hear(e p2p.Envelope) {
	// What is refused was judged by Check before.
	_, _ = n.table.Update(record(e), time.Now())
}

func record(e p2p.Envelope) market.Record {
	return market.Record{From: string(e.From), Seq: e.Seq, Issued: e.Issued, Validity: e.Validity, Body: e.Body}
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
	n.topic, err = n.host.JoinTopic(p2p.TopicConfig{Name: market.Topic, MaxBody: market.MaxBody, Handle: n.hear,
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
	due := n.pace.Next(n.host.ID().String(), peers, d.Announce)
	if now.Before(due) {
		return earlier(due, d.Next)
	}
	m := market.ModelNews{ID: simModel, Shape: simShape, Holdings: n.vol.Holdings()[simModel]}
	body, err := (&market.Announcement{Models: []market.ModelNews{m}}).Encode()
	if err == nil {
		err = n.topic.Publish(body, market.Validity(peers))
	}
	if err != nil {
		t.Errorf("announce: %v", err)
	}
	n.sent += len(body)
	n.pace.Sent(now, peers)
	n.vol.Announced(now)
	return d.Next
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// simSwarm is all nodes of the test.
type simSwarm struct {
	t     *testing.T // of the bubble
	nodes []*simNode
	wg    sync.WaitGroup
}

// count returns how many really serve each expert.
func (s *simSwarm) count() []int {
	count := make([]int, simShape.Layers*simShape.Experts)
	for _, n := range s.nodes {
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
	count := s.count()
	return slices.Min(count), slices.Max(count)
}

// until waits for a condition, in the time of the bubble.
func (s *simSwarm) until(what string, most time.Duration, ok func() bool) {
	s.t.Helper()
	begin := time.Now()
	for time.Since(begin) < most {
		if ok() {
			s.t.Logf("%s after %v", what, time.Since(begin).Round(time.Second))
			return
		}
		time.Sleep(time.Second)
	}
	low, high := s.served()
	s.t.Errorf("%s: not within %v; replicas %d to %d", what, most, low, high)
}

// agree reports whether every node sees what is really there.
func (s *simSwarm) agree() bool {
	truth := s.count()
	for _, n := range s.nodes {
		// The table of a volunteer has what others say; here what it says itself counts too.
		for _, e := range n.topic.Latest() {
			_, _ = n.table.Update(record(e), time.Now())
		}
		c, _ := n.table.Coverage(simModel, time.Now())
		for _, l := range c.Layers {
			for _, g := range l.Segments {
				for e := g.Experts.Begin; e < g.Experts.End; e++ {
					if truth[l.Layer*simShape.Experts+e] != g.Replicas {
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

// TestSwarmOverGossip has nodes start with nothing, cover a model, and recover when a third of
// them is gone.
func TestSwarmOverGossip(t *testing.T) {
	const nodes, experts = 30, 32
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(3, 3))
		net := sim.New(20*time.Millisecond, 100_000_000)
		s := &simSwarm{t: t}
		for i := range nodes {
			var peers []string
			for _, j := range []int{i - 1, i - 2, rng.IntN(i + 1), rng.IntN(i + 1)} {
				if 0 <= j && j < i { // of two neighbours one survives what comes
					peers = append(peers, s.nodes[j].addr)
				}
			}
			slices.Sort(peers)
			peers = slices.Compact(peers)
			n := startSim(t, net, experts<<(i%3), peers)
			s.nodes = append(s.nodes, n)
		}
		for _, n := range s.nodes {
			s.wg.Go(func() { n.run(t) })
		}
		s.until("every expert served", 5*time.Minute, func() bool { least, _ := s.served(); return least >= 1 })
		s.until("two replicas of every expert", 5*time.Minute, func() bool { least, _ := s.served(); return least >= 2 })
		s.until("every node sees the coverage that is", 5*time.Minute, s.agree)
		s.rest(2 * time.Minute)

		var left []*simNode
		for i, n := range s.nodes {
			if i%3 == 1 {
				s.end(n)
			} else {
				left = append(left, n)
			}
		}
		s.nodes = left
		least, most := s.served()
		t.Logf("a third is gone: replicas %d to %d", least, most)
		s.until("two replicas of every expert again", 10*time.Minute, func() bool { least, _ := s.served(); return least >= 2 })
		s.until("every node sees it again", 5*time.Minute, s.agree)
		for _, n := range s.nodes {
			s.end(n)
		}
		s.wg.Wait()
		net.Close()
	})
}

// rest passes time in which nothing may move, and measures what it costs.
func (s *simSwarm) rest(d time.Duration) {
	time.Sleep(time.Minute)
	work := func(n *simNode) int { return n.loads + n.moves }
	sent := func(n *simNode) int { return n.sent }
	before, bytes := s.total(work), s.total(sent)
	time.Sleep(d)
	least, most := s.served()
	s.t.Logf("at rest: replicas %d to %d; %d experts were loaded; announcements of %d bytes per node and minute",
		least, most, s.total(func(n *simNode) int { return n.loads }), (s.total(sent)-bytes)/int(d/time.Minute))
	if moved := s.total(work) - before; moved != 0 {
		s.t.Errorf("%d experts were loaded or given up at rest", moved)
	}
}
