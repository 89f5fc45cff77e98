package p2p

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	libp2pevent "github.com/libp2p/go-libp2p/core/event"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/client"
	pbv2 "github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/pb"
	ma "github.com/multiformats/go-multiaddr"
)

const (
	// RelayKey is what relays provide in the DHT.
	RelayKey = "relay"

	relaysHeld     = 2 // reservations at a time
	reserveTick    = 250 * time.Millisecond
	reserveTimeout = 15 * time.Second
	// A relay that did not take this node in is asked again after firstReserve, then after
	// twice that and so on.
	firstReserve = time.Second
	maxReserve   = time.Minute

	relaysFound    = 8 // of one answer of the DHT
	maxRelayAddrs  = 8 // of one relay
	maxRelayChoice = 32
)

// reserver has relays take this node in while nobody can connect to it directly, and tells
// the addresses that follow. libp2p's own does the same, but leaves out relays of a local
// network, does not say what a relay answered, and knows nothing of the hello.
type reserver struct {
	h       *Host
	emitter libp2pevent.Emitter // of the addresses
	look    time.Time           // when to ask the DHT again; of run alone
	pause   time.Duration

	mu    sync.Mutex // guards what follows
	known map[peer.ID]*relayChoice
}

// relayChoice is a relay that could take this node in.
type relayChoice struct {
	info  peer.AddrInfo
	addrs []ma.Multiaddr // circuits that lead here; nil: no reservation
	next  time.Time      // of the attempt, or of the renewal
	pause time.Duration
	ready bool  // connected, when last looked at
	err   error // of the latest attempt
}

func newReserver(h *Host) (*reserver, error) {
	emitter, err := h.node.EventBus().Emitter(new(libp2pevent.EvtAutoRelayAddrsUpdated))
	if err != nil {
		return nil, err
	}
	r := &reserver{h: h, emitter: emitter, pause: firstLookup, known: make(map[peer.ID]*relayChoice)}
	for _, ai := range h.cfg.relays {
		r.add(ai)
	}
	return r, nil
}

func (r *reserver) add(ai peer.AddrInfo) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[ai.ID] == nil && len(r.known) < maxRelayChoice {
		r.known[ai.ID] = &relayChoice{info: ai, pause: firstReserve}
	}
}

func (r *reserver) run(ctx context.Context) {
	defer r.emitter.Close()
	tick := time.NewTicker(reserveTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		needed := r.h.needsRelay()
		if r.dropLost(!needed) {
			r.tell()
		}
		if !needed {
			continue
		}
		r.lookUp(ctx, time.Now())
		var wg sync.WaitGroup
		for _, c := range r.due(time.Now()) {
			wg.Go(func() { r.reserve(ctx, c) })
		}
		wg.Wait()
	}
}

// dropLost forgets the reservations, all or those at relays that are gone, and reports
// whether there were any. A relay that has come back is asked at once.
func (r *reserver) dropLost(all bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	dropped := false
	for id, c := range r.known {
		was := c.ready
		c.ready = r.h.peers.get(id) != nil
		switch {
		case c.addrs != nil && (all || !c.ready):
			c.addrs, c.next, c.pause = nil, time.Time{}, firstReserve
			if !all {
				c.err = errors.New("the connection to it was lost")
			}
			r.h.cfg.Logger.Info("no longer reached through relay", "peer", id, "needed", !all)
			dropped = true
		case c.addrs == nil && c.ready && !was:
			c.next, c.pause = time.Time{}, firstReserve
		}
	}
	return dropped
}

// lookUp asks the DHT for relays while there are too few.
func (r *reserver) lookUp(ctx context.Context, now time.Time) {
	if r.h.dht == nil || r.h.dht.RoutingTable().Size() == 0 || now.Before(r.look) || len(r.held()) >= relaysHeld {
		return
	}
	r.look = now.Add(jitter(r.pause, rand.Float64()))
	r.pause = min(2*r.pause, maxLookup)
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	found, err := r.h.FindProviders(ctx, RelayKey, relaysFound)
	if err != nil {
		r.h.cfg.Logger.Debug("lookup of relays", "err", err)
	}
	for _, ai := range found {
		r.add(ai)
	}
}

// held are the relays that have taken this node in.
func (r *reserver) held() []peer.ID {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []peer.ID
	for id, c := range r.known {
		if c.addrs != nil {
			out = append(out, id)
		}
	}
	return out
}

// due are the relays to be asked now: to renew, and as many more as are wanted.
func (r *reserver) due(now time.Time) []*relayChoice {
	r.mu.Lock()
	defer r.mu.Unlock()
	missing := relaysHeld
	var renew, ask []*relayChoice
	for _, c := range r.known {
		if c.addrs != nil {
			missing--
		}
		switch {
		case c.next.After(now):
		case c.addrs != nil:
			renew = append(renew, c)
		default:
			ask = append(ask, c)
		}
	}
	return append(renew, ask[:min(len(ask), max(missing, 0))]...)
}

// reserve passes the gate with a relay, without which it would refuse, and asks it.
func (r *reserver) reserve(ctx context.Context, c *relayChoice) {
	ctx, cancel := context.WithTimeout(ctx, reserveTimeout)
	defer cancel()
	addrs, expires, err := r.ask(ctx, c.info)
	r.mu.Lock()
	c.err = err
	if err != nil {
		c.next = time.Now().Add(jitter(c.pause, rand.Float64()))
		c.pause = min(2*c.pause, maxReserve)
		r.mu.Unlock()
		r.h.cfg.Logger.Info("relay does not take this node in", "peer", c.info.ID, "err", err)
		return
	}
	changed := !slices.EqualFunc(c.addrs, addrs, ma.Multiaddr.Equal)
	c.addrs, c.pause, c.next = addrs, firstReserve, time.Now().Add(time.Until(expires)/2)
	r.mu.Unlock()
	if changed {
		r.h.cfg.Logger.Info("reached through relay", "peer", c.info.ID)
		r.tell()
	}
}

func (r *reserver) ask(ctx context.Context, ai peer.AddrInfo) ([]ma.Multiaddr, time.Time, error) {
	if r.h.peers.get(ai.ID) == nil {
		if _, err := r.h.Hello(ctx, ai); err != nil {
			return nil, time.Time{}, err
		}
	}
	via := r.h.peers.via(ai.ID)
	if via == nil || isRelayed(via) {
		return nil, time.Time{}, errors.New("it is reached only through a relay itself")
	}
	rsvp, err := client.Reserve(network.WithNoDial(ctx, "reserve"), r.h.node, peer.AddrInfo{ID: ai.ID})
	if err != nil {
		return nil, time.Time{}, explainReserve(err)
	}
	addrs := circuits(ai.ID, rsvp.Addrs, via.RemoteMultiaddr())
	return addrs, rsvp.Expiration, nil
}

// explainReserve says what a relay meant.
func explainReserve(err error) error {
	var refused client.ReservationError
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Status {
	case pbv2.Status_PERMISSION_DENIED:
		return errors.New("it takes in only members that passed the hello with it")
	case pbv2.Status_RESERVATION_REFUSED, pbv2.Status_RESOURCE_LIMIT_EXCEEDED:
		return errors.New("it is full, or has taken in too many from this address")
	case pbv2.Status_CONNECTION_FAILED:
		return fmt.Errorf("it is no relay, or failed: %w", err)
	}
	return err
}

// circuits are the addresses by way of a relay: those it told, and the one by which this
// node reached it, but for those that are good only on the relay's machine or link.
func circuits(relay peer.ID, told []ma.Multiaddr, here ma.Multiaddr) []ma.Multiaddr {
	p2p, err := ma.NewComponent("p2p", relay.String())
	if err != nil {
		return nil
	}
	var out []ma.Multiaddr
	for _, a := range append([]ma.Multiaddr{here}, told...) {
		if scopeOf(a) > scopeOf(here) || len(out) >= maxRelayAddrs {
			continue
		}
		bare, id := peer.SplitAddr(a)
		if id != "" && id != relay || bare == nil || isCircuit(bare) {
			continue
		}
		circuit := append(append(slices.Clone(bare), *p2p), circuitComponent)
		if !slices.ContainsFunc(out, circuit.Equal) {
			out = append(out, circuit)
		}
	}
	return out
}

var circuitComponent = ma.StringCast("/p2p-circuit")[0]

// tell has the host know its addresses by way of relays.
func (r *reserver) tell() {
	r.mu.Lock()
	var addrs []ma.Multiaddr
	for _, c := range r.known {
		addrs = append(addrs, c.addrs...)
	}
	r.mu.Unlock()
	if err := r.emitter.Emit(libp2pevent.EvtAutoRelayAddrsUpdated{RelayAddrs: addrs}); err != nil {
		r.h.cfg.Logger.Warn("addresses at relays are not told", "err", err)
	}
}

// report adds to r what the relays answered, and those found in the DHT.
func (r *reserver) report(to *Report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, c := range r.known {
		i := slices.IndexFunc(to.Relays, func(k KeptPeer) bool { return k.ID == id })
		if i < 0 && c.addrs == nil {
			continue
		}
		if i < 0 {
			to.Relays = append(to.Relays, KeptPeer{ID: id, State: Connected})
			i = len(to.Relays) - 1
		}
		k := &to.Relays[i]
		k.Holds = c.addrs != nil
		if c.err != nil && k.Err == "" {
			k.Err = c.err.Error()
		}
	}
}
