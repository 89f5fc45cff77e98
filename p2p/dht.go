package p2p

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ipfs/go-cid"
	"github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p-kad-dht/records"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/multiformats/go-multihash"
)

const (
	// MemberKey is what every member that others can connect to provides.
	MemberKey = "member"

	// A provider record lives providerTTL and is renewed after renewAfter, less a jitter
	// of up to half.
	providerTTL     = 10 * time.Minute
	providerCleanup = time.Minute
	renewAfter      = 4 * time.Minute
	// What could not be provided is tried again after provideRetry, doubled each time up
	// to renewAfter. Before the node knows a peer nothing can be.
	provideRetry   = time.Second
	provideTimeout = 30 * time.Second

	maxKey      = 256 // bytes of a key
	maxProvided = 512 // keys
)

var errNoDHT = errors.New("p2p: the DHT is off: switch it on to provide and to find providers")

// newDHT makes the DHT of this network. Its records say who has what; they hold no values.
func newDHT(h *Host) (*dht.IpfsDHT, error) {
	mode := dht.ModeServer
	switch {
	case h.cfg.Reach == ReachPrivate:
		mode = dht.ModeClient
	case !h.cfg.isPublic():
		mode = dht.ModeAutoServer
	}
	return dht.New(gated{h.node, h},
		dht.ProtocolPrefix(protocol.ID("/kvasir/"+h.cfg.Network)),
		dht.Mode(mode),
		dht.DisableValues(),
		dht.OnRequestHook(h.requests.check),
		dht.AddressFilter(h.toldInDHT),
		dht.ProviderManagerOpts(records.ProvideValidity(providerTTL),
			records.ProviderAddrTTL(providerTTL), records.CleanupInterval(providerCleanup)))
}

// providers renews the records of what this node has.
type providers struct {
	wake chan struct{} // capacity 1

	mu   sync.Mutex // guards keys
	keys map[string]*provided
}

type provided struct {
	next  time.Time
	pause time.Duration
}

func newProviders() *providers {
	return &providers{wake: make(chan struct{}, 1), keys: make(map[string]*provided)}
}

// add has key provided from now on, first at once.
func (p *providers) add(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.keys[key] == nil && len(p.keys) >= maxProvided {
		return fmt.Errorf("p2p: %d keys are provided already", len(p.keys))
	}
	p.keys[key] = &provided{pause: provideRetry}
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

func (p *providers) remove(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.keys, key)
}

// due returns a key whose time has come, or how long none has.
func (p *providers) due(now time.Time) (string, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	wait := renewAfter
	for key, k := range p.keys {
		if !k.next.After(now) {
			return key, 0
		}
		wait = min(wait, k.next.Sub(now))
	}
	return "", wait
}

// renew has everything provided again, now.
func (p *providers) renew() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.keys {
		*k = provided{pause: provideRetry}
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// done notes the outcome of providing key.
func (p *providers) done(key string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.keys[key]
	if k == nil {
		return
	}
	if ok {
		k.pause = provideRetry
		k.next = time.Now().Add(jitter(renewAfter, rand.Float64()))
		return
	}
	k.next = time.Now().Add(jitter(k.pause, rand.Float64()))
	k.pause = min(2*k.pause, renewAfter)
}

// provideLoop renews what is due.
func (h *Host) provideLoop(ctx context.Context) {
	for ctx.Err() == nil {
		h.requests.prune(time.Now())
		key, wait := h.providers.due(time.Now())
		if wait == 0 {
			err := h.announce(ctx, key)
			if err != nil {
				h.cfg.Logger.Debug("not provided yet", "key", key, "err", err)
			}
			h.providers.done(key, err == nil)
			continue
		}
		select {
		case <-time.After(wait):
		case <-h.providers.wake:
		case <-ctx.Done():
		}
	}
}

// announce stores a record of this node under key at the peers nearest to it.
func (h *Host) announce(ctx context.Context, key string) error {
	c, err := h.keyID(key)
	if err != nil {
		return err
	}
	if h.dht.RoutingTable().Size() == 0 {
		return errors.New("no peer is known that could keep the record")
	}
	if !h.hasWayIn() {
		return errors.New("this node cannot be reached yet: no relay has taken it in")
	}
	ctx, cancel := context.WithTimeout(ctx, provideTimeout)
	defer cancel()
	return h.dht.Provide(ctx, c, true)
}

// keyID is the place of key in this network's DHT.
func (h *Host) keyID(key string) (cid.Cid, error) {
	if key == "" || len(key) > maxKey {
		return cid.Undef, fmt.Errorf("p2p: key of %d bytes, want 1 to %d", len(key), maxKey)
	}
	sum, err := multihash.Sum([]byte("/kvasir/"+h.cfg.Network+"/"+key), multihash.SHA2_256, -1)
	if err != nil {
		return cid.Undef, err
	}
	return cid.NewCidV1(cid.Raw, sum), nil
}

// Provide tells the network that this node has key, "model/<id>" say, and repeats it until
// Unprovide. It returns at once: while no peer is known, or this node cannot be reached,
// it is tried again and again.
func (h *Host) Provide(_ context.Context, key string) error {
	if !h.cfg.DHT {
		return errNoDHT
	}
	if _, err := h.keyID(key); err != nil {
		return err
	}
	return h.providers.add(key)
}

// Unprovide ends Provide. What was said before is forgotten within ten minutes.
func (h *Host) Unprovide(key string) { h.providers.remove(key) }

// FindProviders asks the network who has key: at most max peers, not this node. They have
// not passed the hello, and their word is not proved.
func (h *Host) FindProviders(ctx context.Context, key string, max int) ([]peer.AddrInfo, error) {
	if !h.cfg.DHT {
		return nil, errNoDHT
	}
	node, err := h.up()
	if err != nil {
		return nil, err
	}
	c, err := h.keyID(key)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var out []peer.AddrInfo
	// One more, for this node may be among them. 0 would mean all.
	for ai := range h.dht.FindProvidersAsync(ctx, c, max+1) {
		if ai.ID == h.ID() || len(out) >= max {
			continue
		}
		if len(ai.Addrs) == 0 {
			ai.Addrs = node.Peerstore().Addrs(ai.ID)
		}
		out = append(out, ai)
	}
	return out, ctx.Err()
}
