package p2p

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pubsub "github.com/libp2p/go-libp2p-pubsub"
	pb "github.com/libp2p/go-libp2p-pubsub/pb"
	bus "github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/libp2p/go-libp2p/p2p/host/eventbus"
	"golang.org/x/time/rate"
)

// Gossip carries envelopes to all nodes that joined a topic. Ready peers pass them on by
// libp2p's gossipsub, and pull from each other what they missed, since gossip drops
// silently: see gossip_pull.go. What still holds is renewed instead of said again: see
// renewal.go and gossip_renew.go.
//
// Gossipsub's own signatures are off, as the envelope has one that also holds in a
// snapshot: two would say the same and cost 110 bytes a message. What gossipsub would
// have checked with them, the validator checks before anything is passed on.
//
// The protocol id names the network, so a topic on the wire is its bare name.
const (
	maxTopics = 16
	// gossipQueue is how many messages wait for a slow peer, or to be judged.
	gossipQueue = 256
	// maxRPC bounds one message of gossipsub.
	maxRPC = 64 << 10
	// messageIDBytes of a hash name a message.
	messageIDBytes = 16

	// meshDegree is to how many peers a message goes on.
	meshDegree = 4
	// dontWantBytes is the size from which peers are told that they need not send a message
	// again; more than all the ids that this takes.
	dontWantBytes = 256

	sweepTopics = 30 * time.Second

	// How often one author may speak on a topic. Others allow a little more, so that who
	// keeps to it is not blamed for what a line held back and let go at once.
	publishPause  = 2 * time.Second
	publishBurst  = 20
	tolerantPause = 1500 * time.Millisecond
	tolerantBurst = 30
	maxAuthors    = 32768    // of a topic, those that are gone for MaxValidity too
	maxTopicBytes = 64 << 20 // of all envelopes of a topic
	// One peer can not fill the table with authors that it made up: it may bring in this
	// part of it.
	viaShare = 4
)

// ErrTooOften says that a topic was published to more often than peers accept.
var ErrTooOften = fmt.Errorf("published too often: after %d at once, one every %v", publishBurst, publishPause)

// TopicConfig says what a topic carries.
type TopicConfig struct {
	Name    string // a-z 0-9 -, 1 to 32 bytes
	MaxBody int    // bytes, 1 to MaxBody
	// Check judges what an author that is what it says it is says. An error costs the
	// author standing, and the envelope is not passed on, so it must not depend on what
	// only this node knows. nil: all is well.
	Check func(Envelope) error
	// Handle takes an envelope that is newer than all before of its author. Calls come one
	// at a time; Handle should return soon. Own envelopes do not come. May be nil.
	Handle func(Envelope)
	// Renew takes an envelope that Handle was given, whose author has renewed it. Calls come
	// one at a time with those of Handle. May be nil.
	Renew func(Envelope)
	// Well is asked before what Keep told is renewed: a node that hangs, but for its lines,
	// is not said to be there. nil: it always is. It should return at once.
	Well func() bool
}

func (c *TopicConfig) validate() error {
	switch {
	case !topicPattern.MatchString(c.Name):
		return fmt.Errorf("p2p: topic %q: want 1 to 32 of a-z 0-9 -", c.Name)
	case c.MaxBody < 1 || c.MaxBody > MaxBody:
		return fmt.Errorf("p2p: topic %s: body of at most %d bytes: want 1 to %d", c.Name, c.MaxBody, MaxBody)
	}
	return nil
}

// GossipStats counts envelopes and messages since the start.
type GossipStats struct {
	Published uint64            // own
	Accepted  uint64            // of others, also by pulling
	Pulled    uint64            // of those, by pulling
	Renewed   uint64            // renewals of envelopes of others
	Refused   map[string]uint64 // by reason
	Authors   map[string]int    // with an envelope that counts, by topic
}

// gossip is what a host gossips.
type gossip struct {
	h     *Host
	ready bus.Emitter // tells gossipsub of ready peers
	own   bus.Bus     // events for gossipsub only

	rpcs        *paces // messages of gossipsub, by sender
	useless     *paces // envelopes that were no news, by sender
	pulls       *paces // snapshots, by who asks
	tells       *paces // lists of renewals, by who sends them
	pullTimeout time.Duration
	pulling     chan struct{}     // a token for each own pull under way
	pulled      atomic.Uint64     // own pulls that were answered
	stays       map[peer.ID]*stay // whom the watcher knows; only used by it

	mu      sync.Mutex // guards what follows
	ps      *pubsub.PubSub
	topics  map[string]*Topic
	streams map[peer.ID]*gossipStream
	subs    map[peer.ID]map[string]struct{}
	stats   GossipStats
}

func newGossip(h *Host) *gossip {
	g := &gossip{
		h: h, own: eventbus.NewBus(), pullTimeout: pullTimeout, pulling: make(chan struct{}, pullsAtOnce),
		rpcs:    newPaces(500, 5000),
		useless: newPaces(50, 1000),
		pulls:   newPaces(rate.Every(5*time.Second), 2*maxTopics),
		tells:   newPaces(rate.Every(2*time.Second), 2*maxTopics),
		stays:   make(map[peer.ID]*stay),
		topics:  make(map[string]*Topic), streams: make(map[peer.ID]*gossipStream),
		subs:  make(map[peer.ID]map[string]struct{}),
		stats: GossipStats{Refused: make(map[string]uint64)},
	}
	g.ready = must(g.own.Emitter(new(bus.EvtPeerProtocolsUpdated)))
	return g
}

// meshProtocol is gossipsub 1.2 among the nodes of one network. Version 2 has envelopes that
// are renewed.
func (g *gossip) meshProtocol() protocol.ID { return g.h.protocolID("mesh/2") }

// start runs gossipsub until ctx ends.
func (g *gossip) start(ctx context.Context) error {
	silent := slog.New(slog.DiscardHandler)
	ps, err := pubsub.NewGossipSub(ctx, &gossipHost{gated: gated{g.h.node, g.h}, g: g},
		pubsub.WithGossipSubProtocols([]protocol.ID{g.meshProtocol()}, meshFeatures),
		pubsub.WithGossipSubParams(meshParams()),
		pubsub.WithMessageSignaturePolicy(pubsub.StrictNoSign),
		pubsub.WithNoAuthor(),
		pubsub.WithMessageIdFn(messageID),
		pubsub.WithMaxMessageSize(maxRPC),
		pubsub.WithMaxControlMessageSize(maxRPC),
		pubsub.WithPeerOutboundQueueSize(gossipQueue),
		pubsub.WithValidateQueueSize(gossipQueue),
		pubsub.WithFloodPublish(true),
		pubsub.WithSubscriptionFilter(g),
		pubsub.WithAppSpecificRpcInspector(g.inspect),
		pubsub.WithLogger(silent), pubsub.WithRPCLogger(silent),
	)
	if err != nil {
		return fmt.Errorf("gossip: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ps = ps
	for _, t := range g.topics {
		if err := t.attach(ps); err != nil {
			return err
		}
	}
	return nil
}

// meshParams are for small messages that are repeated soon, and pulled when they got lost:
// fewer copies than gossipsub sends by default.
func meshParams() pubsub.GossipSubParams {
	p := pubsub.DefaultGossipSubParams()
	p.D, p.Dlo, p.Dhi, p.Dscore, p.Dout = meshDegree, meshDegree-1, 2*meshDegree, meshDegree-1, 1
	p.Dlazy = meshDegree
	p.IDontWantMessageThreshold = dontWantBytes
	return p
}

// meshFeatures: no peer exchange, which would have third parties say whom to connect to.
func meshFeatures(f pubsub.GossipSubFeature, _ protocol.ID) bool {
	return f == pubsub.GossipSubFeatureMesh || f == pubsub.GossipSubFeatureIdontwant
}

func messageID(m *pb.Message) string {
	sum := sha256.Sum256(m.GetData())
	return string(sum[:messageIDBytes])
}

// JoinTopic has this node take part in a topic, until the host is closed. It may be
// called before Start and after.
func (h *Host) JoinTopic(cfg TopicConfig) (*Topic, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	g := h.gossip
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.topics[cfg.Name] != nil:
		return nil, fmt.Errorf("p2p: topic %s was joined already", cfg.Name)
	case len(g.topics) == maxTopics:
		return nil, fmt.Errorf("p2p: topic %s: %d topics are joined already", cfg.Name, maxTopics)
	}
	t := newTopic(g, cfg)
	g.topics[cfg.Name] = t
	if g.ps == nil {
		return t, nil
	}
	if err := t.attach(g.ps); err != nil {
		delete(g.topics, cfg.Name)
		return nil, err
	}
	for _, p := range h.peers.list() {
		g.pullSoon(p.ID)
	}
	return t, nil
}

// GossipStats counts what was gossiped.
func (h *Host) GossipStats() GossipStats {
	g := h.gossip
	g.mu.Lock()
	out := g.stats
	out.Refused = maps.Clone(g.stats.Refused)
	topics := slices.Collect(maps.Values(g.topics))
	g.mu.Unlock()
	out.Authors = make(map[string]int)
	for _, t := range topics {
		out.Authors[t.cfg.Name] = len(t.Latest())
	}
	return out
}

// count notes that something was refused.
func (g *gossip) count(why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.Refused[why]++
}

func (g *gossip) countAccepted(pulled bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stats.Accepted++
	if pulled {
		g.stats.Pulled++
	}
}

func (g *gossip) topic(name string) *Topic {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.topics[name]
}

func (g *gossip) joined() []*Topic {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(g.topics))
}

// Topic is a topic that this node joined. It is safe for concurrent use, also by its
// Handle.
type Topic struct {
	g   *gossip
	cfg TopicConfig

	// order is held from the judging of an envelope to the end of Handle, so that an
	// author's envelopes are handled in order. It is taken before mu.
	order sync.Mutex

	mu      sync.Mutex // guards what follows; not held while calling out
	mesh    *pubsub.Topic
	pace    *rate.Limiter // of own envelopes
	seq     uint64        // of the latest own one, ever
	authors map[peer.ID]*author
	byHash  map[uint64]peer.ID  // of authors, by authorHash
	renews  renewals            // of the latest own envelope, when it is renewed
	fresh   map[peer.ID]peer.ID // authors of renewals not yet passed on, and who sent them
	bytes   int                 // of all envelopes
	via     map[peer.ID]*share
	swept   time.Time
}

// author is what is known of an author on a topic.
type author struct {
	seq    uint64    // of the newest envelope, whatever became of it
	issued time.Time // of that envelope
	env    *Envelope // nil when it no longer counts, or never did; replaced, not changed
	raw    []byte    // env as it was sealed
	last   renewal   // of env, the latest
	asked  time.Time // when others were asked for a later one
	wrong  bool      // Check refused the newest envelope
	pace   *rate.Limiter
	via    peer.ID // who brought the author in; "" when that is the author itself
}

// share is how much of the table came through one peer.
type share struct{ authors, bytes int }

func newTopic(g *gossip, cfg TopicConfig) *Topic {
	return &Topic{
		g: g, cfg: cfg, pace: rate.NewLimiter(rate.Every(publishPause), publishBurst),
		authors: make(map[peer.ID]*author), via: make(map[peer.ID]*share),
		byHash: make(map[uint64]peer.ID), fresh: make(map[peer.ID]peer.ID),
	}
}

// attach joins the topic's mesh.
func (t *Topic) attach(ps *pubsub.PubSub) error {
	err := ps.RegisterTopicValidator(t.cfg.Name, t.validate, pubsub.WithValidatorInline(true))
	var mesh *pubsub.Topic
	if err == nil {
		mesh, err = ps.Join(t.cfg.Name)
	}
	if err == nil {
		_, err = mesh.Relay() // in the mesh without a queue: validate hands over
	}
	if err != nil {
		return fmt.Errorf("join topic %s: %w", t.cfg.Name, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mesh = mesh
	return nil
}

// validate is gossipsub's question whether to pass a message on.
func (t *Topic) validate(_ context.Context, src peer.ID, m *pubsub.Message) pubsub.ValidationResult {
	if src == t.g.h.ID() {
		return pubsub.ValidationAccept
	}
	return t.take(src, m.GetData(), false)
}

// Publish seals body and sends it to all who joined the topic; it counts for validity, or
// until the next. That nobody is connected is no error: peers that come later pull it.
func (t *Topic) Publish(body []byte, validity time.Duration) error {
	return t.publish(body, Envelope{Validity: validity}, renewals{})
}

// Keep is Publish of what this node means until it says something else: it renews the envelope
// every step by as much, which costs little, until the next, while the topic's Well says so, at
// most so that it counts for MaxLife.
func (t *Topic) Keep(body []byte, validity, step time.Duration) error {
	r, err := newRenewals(validity, step)
	if err != nil {
		return fmt.Errorf("publish to %s: %w", t.cfg.Name, err)
	}
	anchor := r.at(0)
	return t.publish(body, Envelope{Validity: validity, Step: step, Anchor: anchor.value[:]}, r)
}

func (t *Topic) publish(body []byte, e Envelope, r renewals) error {
	if len(body) > t.cfg.MaxBody {
		return fmt.Errorf("publish to %s: %w: body of %d bytes, at most %d", t.cfg.Name, ErrOversized, len(body), t.cfg.MaxBody)
	}
	e.Body = slices.Clone(body)
	raw, mesh, err := t.seal(e, r)
	if err != nil {
		return fmt.Errorf("publish to %s: %w", t.cfg.Name, err)
	}
	if err := mesh.Publish(context.Background(), raw); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("publish to %s: %w", t.cfg.Name, err)
	}
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.stats.Published++
	return nil
}

// seal makes the own latest envelope out of what is set of e.
func (t *Topic) seal(e Envelope, r renewals) ([]byte, *pubsub.Topic, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.mesh == nil {
		return nil, nil, errNotUp
	}
	if !t.pace.AllowN(now, 1) {
		return nil, nil, ErrTooOften
	}
	id := t.g.h.cfg.Identity
	e.Topic, e.From, e.Seq, e.Issued = t.cfg.Name, id.ID(), max(uint64(now.UnixMicro()), afterMark(t.seq)), now.Round(0) // by the wall clock, which goes on while a machine sleeps
	raw, err := id.Seal(t.g.h.cfg.Network, e)
	if err != nil {
		return nil, nil, err
	}
	t.seq, t.renews = e.Seq, r
	a := t.authors[e.From]
	if a == nil {
		a = &author{}
		t.addLocked(e.From, a)
	}
	t.setLocked(a, &e, raw)
	return raw, t.mesh, nil
}

// Latest returns the newest envelope of each author, this node too, unless its time is
// over. The bodies must not be changed.
func (t *Topic) Latest() []Envelope {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	var out []Envelope
	for _, a := range t.authors {
		if a.counts(now) {
			out = append(out, *a.env)
		}
	}
	return out
}

func (a *author) counts(now time.Time) bool { return a.env != nil && now.Before(a.env.Expires()) }
