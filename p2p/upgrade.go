package p2p

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

const (
	// A relayed peer is dialled directly after firstUpgrade, then after twice that and so
	// on: it may be on the same local network, or one of both may not be behind NAT after
	// all. If that fails, holes are punched.
	firstUpgrade = time.Second
	maxUpgrade   = 2 * time.Minute

	upgradeTick    = 500 * time.Millisecond
	upgradeTimeout = 5 * time.Second
)

// upgrade is the time of the next attempt to reach a relayed peer directly.
type upgrade struct {
	next  time.Time
	pause time.Duration
}

// upgradeLoop tries to replace relayed connections by direct ones.
func (h *Host) upgradeLoop(ctx context.Context) {
	tick := time.NewTicker(upgradeTick)
	defer tick.Stop()
	tries := make(map[*stay]*upgrade)
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		relayed := make(map[*stay]*upgrade)
		for _, p := range h.peers.list() {
			if p.Path() != Relayed {
				continue
			}
			u := tries[p.stay]
			if u == nil {
				u = &upgrade{next: time.Now().Add(jitter(firstUpgrade, rand.Float64())), pause: firstUpgrade}
			}
			relayed[p.stay] = u
			if time.Now().After(u.next) {
				u.pause = min(2*u.pause, maxUpgrade)
				u.next = time.Now().Add(jitter(u.pause, rand.Float64()))
				h.wg.Go(func() { h.upgradePath(ctx, p) })
			}
		}
		tries = relayed
	}
}

// upgradePath connects to a relayed peer beside its relay. The hello on the new connection
// makes it the peer's.
func (h *Host) upgradePath(ctx context.Context, p *Peer) {
	err := h.dialDirect(ctx, p)
	if c := h.peers.via(p.ID); err != nil && h.puncher != nil && c != nil && isRelayed(c) {
		if errPunch := h.puncher.punch(c); errPunch != nil {
			err = fmt.Errorf("%w; %w", err, errPunch)
		}
	}
	if err != nil {
		h.cfg.Logger.Debug("relayed peer not reached directly", "peer", p.ID, "err", err)
	}
}

// dialDirect dials the addresses that are known of a relayed peer.
func (h *Host) dialDirect(ctx context.Context, p *Peer) error {
	addrs := p.directAddrs()
	for _, a := range h.node.Peerstore().Addrs(p.ID) {
		if !isCircuit(a) {
			addrs = append(addrs, a)
		}
	}
	if len(addrs) == 0 {
		return errors.New("no direct address of the peer is known")
	}
	ctx, cancel := context.WithTimeout(network.WithForceDirectDial(ctx, "upgrade"), upgradeTimeout)
	defer cancel()
	clearBackoff(h.node, p.ID)
	return h.node.Connect(ctx, peer.AddrInfo{ID: p.ID, Addrs: addrs})
}

// directAddrs are the addresses of this node without relays, as many as a hello takes, for
// a peer that is as far as the relay, or further.
func (h *Host) directAddrs(far scope) []string {
	var out []string
	for _, a := range within(far, h.node.Addrs()) {
		if s := a.String(); !isCircuit(a) && len(s) <= maxText && len(out) < maxAddrs {
			out = append(out, s)
		}
	}
	return out
}

// directAddrs are the addresses that a relayed peer told of itself, and that can be its own.
func (p *Peer) directAddrs() []ma.Multiaddr {
	via, err := ma.NewMultiaddr(p.Addr)
	if err != nil {
		return nil
	}
	var out []ma.Multiaddr
	for _, s := range p.Addrs {
		a, err := ma.NewMultiaddr(s)
		if err == nil && !isCircuit(a) {
			out = append(out, a)
		}
	}
	return within(scopeOf(via), out)
}
