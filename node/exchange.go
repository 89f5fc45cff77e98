package node

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/p2p"
)

const (
	// stepGap is the least time between two looks at the swarm, however much is heard.
	stepGap = 200 * time.Millisecond
	// learnAtOnce bounds the models whose headers are fetched at a time, and
	// learnModels those that a node knows of beside its own.
	learnAtOnce = 2
	learnModels = 16
	// seekEvery is how often the network is asked for who has what nobody near has,
	// and seekPeers how many of those are met.
	seekEvery = 15 * time.Second
	seekPeers = 8
	// maxServed bounds the lost peers of which it is kept what they served.
	maxServed = 4096
	// hungAfter is how long run takes no step, or a worker computes one batch, until the node
	// is not said to be there any more: far longer than either takes on a slow machine.
	hungAfter = 2 * time.Minute
)

// exchange is this node in its network: what it hears and says of who holds what,
// and, when it is a volunteer, what it takes on. One goroutine, run, decides;
// downloads run beside it.
type exchange struct {
	self    peer.ID
	host    *p2p.Host
	table   *market.Table
	topic   *p2p.Topic
	weights *weights
	policy  market.Policy
	log     *slog.Logger

	volunteer *volunteer                                   // nil: it holds what it was told to
	stager    *stager                                      // nil: it runs no window of layers
	rings     *rings                                       // nil: nobody asks here for the models of rings
	prices    *prices                                      // nil: the network has no token
	runs      func(now time.Time) (market.ModelNews, bool) // the model that this node runs for clients; may be nil
	machine   func(*market.Announcement)                   // adds what this node gives and computes with
	onPeer    func()                                       // a peer is ready, or said something new
	onDirect  func(peer.ID)                                // a peer that was reached by a relay is now without one
	onHeard   func()                                       // what others hold has changed; called by run
	hangs     func() bool                                  // a worker of this node is stuck

	wake chan struct{} // something changed; holds one
	// only used as the host's watcher:
	served  map[peer.ID][]string // models of lost peers
	relayed map[peer.ID]bool     // ready peers that are reached by a relay

	// of run alone
	pace     market.Pace
	said     []byte // the latest announcement
	learning map[gguf.ModelID]bool
	learned  chan learned
	retry    map[gguf.ModelID]time.Time // when to try again to learn of it
	sought   map[gguf.ModelID]time.Time // when the network was asked who has it
	provided []string                   // keys that this node is found by
	loops    sync.WaitGroup

	latest  atomic.Pointer[market.Announcement] // what this node says now; nil before it has looked
	stepped atomic.Int64                        // when run last took a step, unix ns
	hung    atomic.Bool                         // it hung when well was asked last

	mu    sync.Mutex                        // guards shown
	shown map[gguf.ModelID][]market.Holding // what news said last that is held, for the status
}

// learned says how the attempt to learn a model's header ended.
type learned struct {
	id  gguf.ModelID
	g   *gguf.Model
	err error
}

func newExchange(host *p2p.Host, w *weights, policy market.Policy, log *slog.Logger) (*exchange, error) {
	table, err := market.NewTable(policy)
	if err != nil {
		return nil, err
	}
	s := &exchange{
		self: host.ID(), host: host, table: table, weights: w, policy: policy, log: log, wake: make(chan struct{}, 1),
		onPeer: func() {}, onHeard: func() {}, onDirect: func(peer.ID) {}, machine: func(*market.Announcement) {}, hangs: func() bool { return false },
		served: map[peer.ID][]string{}, relayed: map[peer.ID]bool{},
		learning: map[gguf.ModelID]bool{}, learned: make(chan learned), retry: map[gguf.ModelID]time.Time{},
		sought: map[gguf.ModelID]time.Time{},
	}
	w.holders = s.holders
	s.topic, err = host.JoinTopic(p2p.TopicConfig{
		Name: market.Topic, MaxBody: market.MaxBody, Check: s.check, Handle: s.hear, Renew: s.renew, Well: s.well,
	})
	if err != nil {
		return nil, err
	}
	host.Watch(s)
	return s, nil
}

func recordOf(e p2p.Envelope) market.Record {
	return market.Record{From: e.From.String(), Seq: e.Seq, Issued: e.Issued, Validity: e.Validity + e.Renewed, Body: e.Body}
}

// check judges an announcement before it is passed on.
func (s *exchange) check(e p2p.Envelope) error {
	err := s.table.Check(recordOf(e))
	var refused *market.RefusedError
	if errors.As(err, &refused) && !refused.AuthorsFault() {
		return nil
	}
	return err
}

// hear takes an announcement in.
func (s *exchange) hear(e p2p.Envelope) {
	newer, err := s.table.Update(recordOf(e), time.Now())
	if err == nil && !newer && e.Renewed > 0 { // one that had run out here, and was renewed
		newer, err = s.table.Renew(recordOf(e), e.Issued.Add(e.Renewed), time.Now())
	}
	if err != nil {
		s.log.Info("announcement refused", "peer", e.From.String(), "error", err)
	} else if newer {
		s.changed()
	}
}

// renew takes in that an announcement still holds.
func (s *exchange) renew(e p2p.Envelope) {
	if changed, err := s.table.Renew(recordOf(e), e.Issued.Add(e.Renewed), time.Now()); err != nil {
		s.log.Info("announcement refused", "peer", e.From.String(), "error", err)
	} else if changed {
		s.changed()
	}
}

// well reports whether what this node said of itself may be renewed.
func (s *exchange) well() bool {
	ok := time.Since(time.Unix(0, s.stepped.Load())) < hungAfter && !s.hangs()
	if hung := s.hung.Swap(!ok); !ok && !hung {
		s.log.Warn("this node hangs: what it announced is not renewed, so that others go elsewhere; start it again if that lasts")
	}
	return ok
}

// changed has run look again.
func (s *exchange) changed() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// PeerReady and PeerLost make exchange a p2p.Watcher: what it saw by itself counts
// before what is said.
//
// A peer that comes back without the experts that it had was started anew: what it
// said before counts no more, and its next word comes soon.
func (s *exchange) PeerReady(p *p2p.Peer) {
	fewer := slices.ContainsFunc(s.served[p.ID], func(model string) bool { return !slices.Contains(p.Models, model) })
	if !fewer {
		s.table.Met(p.ID.String(), time.Now())
	}
	delete(s.served, p.ID)
	if p.Path() == p2p.Relayed {
		s.relayed[p.ID] = true
	} else if s.relayed[p.ID] {
		delete(s.relayed, p.ID)
		s.onDirect(p.ID)
	}
	s.onPeer()
	s.changed()
}

func (s *exchange) PeerLost(p *p2p.Peer) {
	if len(s.served) < maxServed {
		s.served[p.ID] = p.Models
	}
	delete(s.relayed, p.ID)
	s.table.Lost(p.ID.String(), time.Now())
	s.changed()
}

// holders names the peers from whom parts of a model can be fetched.
func (s *exchange) holders(id gguf.ModelID) []holder {
	var out []holder
	for _, h := range s.table.Holders(id, time.Now()) {
		p, err := peer.Decode(h.Peer)
		if err != nil || p == s.self {
			continue
		}
		out = append(out, holder{id: p, whole: h.News.Full, name: h.News.Name})
	}
	return out
}

// run announces, learns, and has the volunteer act, until ctx ends; then it says
// goodbye.
func (s *exchange) run(ctx context.Context) {
	defer s.loops.Wait()
	if s.prices != nil {
		s.loops.Go(func() { s.prices.run(ctx) })
	}
	defer s.rings.wait()
	defer s.volunteer.finish()
	defer s.stager.finish()
	if s.stager != nil {
		s.stager.begin(ctx)
	}
	for {
		now := time.Now()
		s.stepped.Store(now.UnixNano())
		next := earlier(s.step(ctx, now), now.Add(hungAfter/4))
		select {
		case <-ctx.Done():
			s.leave()
			return
		case l := <-s.learned:
			s.takeLearned(l)
		case <-s.wake:
		case r := <-s.volunteer.results():
			s.volunteer.take(r, time.Now())
		case do := <-s.stager.results():
			do(time.Now())
		case <-time.After(time.Until(next)):
		}
		select {
		case <-time.After(time.Until(now.Add(stepGap))):
		case <-ctx.Done():
		}
	}
}

// step does what is due and returns when to look again at the latest.
func (s *exchange) step(ctx context.Context, now time.Time) (next time.Time) {
	s.onHeard()
	s.learnMore(ctx, now)
	next = now.Add(market.AnnounceEvery(0))
	changed := false
	if s.volunteer != nil {
		d := s.volunteer.decide(ctx, s.table, now)
		changed, next = d.Announce, d.Next
	}
	if s.stager != nil {
		changed, next = s.stager.decide(ctx, s.table, now)
	}
	s.rings.look(ctx, now)
	for id, at := range s.retry {
		if at.After(now) {
			next = earlier(next, at)
		} else {
			delete(s.retry, id)
		}
	}
	news := s.news(now)
	s.latest.Store(news)
	body, err := news.Encode()
	if err != nil {
		s.log.Error("own announcement cannot be made", "error", err)
		return next
	}
	peers := s.table.Peers(now)
	still := steady(news)
	changed = changed || !bytes.Equal(still, s.said)
	due := s.pace.Next(s.self.String(), peers, changed)
	if due.After(now) {
		return earlier(next, due)
	}
	if err := s.topic.Keep(body, market.Validity(peers), market.RenewEvery(peers)); err != nil {
		s.log.Warn("announcement not sent", "error", err)
		return earlier(next, now.Add(time.Second))
	}
	s.said = still
	s.provide(ctx, news)
	s.pace.Sent(now, peers, news)
	s.volunteer.announced(now)
	s.stager.announced(now)
	if changed {
		return now // what was told settles from now on: look when that is
	}
	return earlier(next, s.pace.Next(s.self.String(), peers, false))
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// news is what this node says of itself.
func (s *exchange) news(now time.Time) *market.Announcement {
	a := &market.Announcement{}
	byID := map[gguf.ModelID]*market.ModelNews{}
	about := func(id gguf.ModelID) *market.ModelNews {
		if byID[id] == nil {
			byID[id] = &market.ModelNews{ID: id}
		}
		return byID[id]
	}
	if s.runs != nil {
		if n, ok := s.runs(now); ok {
			*about(n.ID) = n
		}
	}
	for _, m := range s.weights.store.Models() {
		if m.Complete() {
			n := about(m.ID())
			n.Full, n.Name = true, m.Name()
		}
	}
	holdings := s.volunteer.holdings()
	s.show(holdings)
	for id, list := range holdings {
		about(id).Holdings = list
	}
	if s.stager != nil && s.stager.market != nil {
		s.stager.news(about(s.stager.model))
	}
	for id, n := range byID {
		g := s.weights.known(id)
		if g == nil {
			continue // its header is not here yet, so its shape is not known
		}
		shape, err := market.ShapeOf(g)
		if err != nil {
			continue
		}
		n.Shape = shape
		if m := s.weights.store.Model(id); n.Name == "" && m != nil {
			n.Name = m.Name()
		}
		a.Models = append(a.Models, *n)
	}
	slices.SortFunc(a.Models, func(a, b market.ModelNews) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	a.Models = a.Models[:min(len(a.Models), market.MaxModels)]
	s.machine(a)
	return a
}

// steady is what an announcement says but for what changes all the time, which is
// told when there is something else to tell, and now and then.
func steady(a *market.Announcement) []byte {
	s := *a
	s.Near, s.Machine, s.Capacity = nil, nil, market.Capacity{}
	s.Models = slices.Clone(a.Models)
	for i := range s.Models {
		m := &s.Models[i]
		m.Memory = 0
		m.Windows = slices.Clone(m.Windows)
		for j := range m.Windows {
			m.Windows[j].Free, m.Windows[j].Token, m.Windows[j].Batched = 0, 0, 0
		}
		m.Service.Free, m.Service.Token = 0, 0
	}
	body, err := s.Encode()
	if err != nil {
		return nil // as the whole announcement, of which it is told
	}
	return body
}

// show keeps a copy of what is held, since the volunteer is run's alone.
func (s *exchange) show(holdings map[gguf.ModelID][]market.Holding) {
	shown := maps.Clone(holdings)
	for id, list := range shown {
		shown[id] = slices.Clone(list)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shown = shown
}

// leave says that this node goes.
func (s *exchange) leave() {
	body, err := (&market.Announcement{Away: true}).Encode()
	if err == nil {
		err = s.topic.Publish(body, market.Validity(s.table.Peers(time.Now())))
	}
	if err != nil {
		s.log.Info("left without a word", "error", err)
	}
}

// learnMore fetches the headers of models that others run, for a volunteer.
func (s *exchange) learnMore(ctx context.Context, now time.Time) {
	if s.volunteer == nil {
		return
	}
	known := s.table.Verified()
	for _, id := range s.table.Models(now) {
		if len(s.learning) >= learnAtOnce || len(known)+len(s.learning) >= learnModels {
			return
		}
		if slices.Contains(known, id) || s.learning[id] || now.Before(s.retry[id]) || !s.wanted(id) || !s.hasSource(ctx, id, now) {
			continue
		}
		s.learning[id] = true
		s.loops.Go(func() {
			_, g, err := s.weights.learn(ctx, id)
			select {
			case s.learned <- learned{id, g, err}:
			case <-ctx.Done():
			}
		})
	}
}

// wanted reports whether the network runs a model.
func (s *exchange) wanted(id gguf.ModelID) bool {
	return len(s.policy.Models) == 0 || slices.Contains(s.policy.Models, id)
}

// hasSource reports whether a connected peer has something of a model. If none
// has, the network is asked.
func (s *exchange) hasSource(ctx context.Context, id gguf.ModelID, now time.Time) bool {
	if len(s.weights.sources(id)) > 0 {
		return true
	}
	if now.Sub(s.sought[id]) >= seekEvery {
		s.sought[id] = now
		s.loops.Go(func() { s.seek(ctx, id) })
	}
	return false
}

// seek connects to peers that are said to have something of a model.
func (s *exchange) seek(ctx context.Context, id gguf.ModelID) {
	ctx, cancel := context.WithTimeout(ctx, seekEvery)
	defer cancel()
	found, err := s.host.FindProviders(ctx, modelKey(id), seekPeers)
	if err != nil {
		s.log.Info("nobody found who has the model", "model", id.String(), "error", err)
		return
	}
	for _, p := range found {
		if _, err := s.host.Hello(ctx, p); err != nil {
			s.log.Info("peer that has the model is not reached", "peer", p.ID.String(), "error", err)
		}
	}
}

func (s *exchange) takeLearned(l learned) {
	delete(s.learning, l.id)
	if l.err == nil {
		l.err = s.know(l.id, l.g)
	}
	if l.err != nil {
		s.retry[l.id] = time.Now().Add(fetchPause)
		s.log.Warn("model cannot be used", "model", l.id.String(), "error", l.err)
	}
}

// know takes in a model whose header is verified.
func (s *exchange) know(id gguf.ModelID, g *gguf.Model) error {
	shape, err := market.ShapeOf(g)
	if err != nil {
		return err
	}
	if s.volunteer != nil {
		if err := s.volunteer.size(id, g); err != nil {
			return err
		}
	}
	return s.table.SetShape(id, shape)
}
