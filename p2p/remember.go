package p2p

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// The file of good peers, version 1: JSON, so that people can read and mend it.
//
//	{"version": 1, "network": "home-…", "peers": [
//	  {"id": "12D3KooW…", "addrs": ["/ip4/192.168.1.5/tcp/4001"], "seen": "2026-01-02T15:04:05Z"}]}
//
// A file of another network or version, and entries that do not parse, are left aside: it
// only helps to find peers, and the hello decides about each.
const (
	rememberVersion    = 1
	maxRemembered      = 256
	maxRememberedAddrs = 8
	maxRememberFile    = 1 << 20
	rememberFor        = 30 * 24 * time.Hour
	rememberEvery      = time.Minute // how often the file is written
)

type rememberFile struct {
	Version int              `json:"version"`
	Network string           `json:"network"`
	Peers   []rememberedPeer `json:"peers"`
}

type rememberedPeer struct {
	ID    string    `json:"id"`
	Addrs []string  `json:"addrs"`
	Seen  time.Time `json:"seen"`
}

// goodPeer is a peer that passed the hello at Seen.
type goodPeer struct {
	info peer.AddrInfo
	seen time.Time
}

// parseRemembered reads the file of good peers of a network, newest first.
func parseRemembered(raw []byte, network string, now time.Time) ([]goodPeer, error) {
	if len(raw) > maxRememberFile {
		return nil, fmt.Errorf("larger than %d bytes", maxRememberFile)
	}
	var f rememberFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, err
	}
	if f.Version != rememberVersion || f.Network != network {
		return nil, fmt.Errorf("is of version %d and network %q, want %d and %q", f.Version, f.Network, rememberVersion, network)
	}
	var out []goodPeer
	for _, p := range f.Peers {
		id, err := peer.Decode(p.ID)
		old := now.Sub(p.Seen) > rememberFor || p.Seen.After(now.Add(time.Hour))
		if err != nil || old || slices.ContainsFunc(out, func(g goodPeer) bool { return g.info.ID == id }) {
			continue
		}
		g := goodPeer{info: peer.AddrInfo{ID: id}, seen: p.Seen}
		for _, s := range p.Addrs[:min(len(p.Addrs), maxRememberedAddrs)] {
			if a, err := ma.NewMultiaddr(s); err == nil {
				g.info.Addrs = append(g.info.Addrs, a)
			}
		}
		if len(g.info.Addrs) > 0 {
			out = append(out, g)
		}
		if len(out) == maxRemembered {
			break
		}
	}
	slices.SortStableFunc(out, func(a, b goodPeer) int { return b.seen.Compare(a.seen) })
	return out, nil
}

// readRemembered reads the file of good peers. That there is none is no error.
func readRemembered(path, network string) ([]goodPeer, error) {
	raw, err := readSmall(path, maxRememberFile)
	if raw == nil || err != nil {
		return nil, err
	}
	good, err := parseRemembered(raw, network, time.Now())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return good, nil
}

// writeRemembered replaces the file at once.
func writeRemembered(path, network string, good []goodPeer) error {
	f := rememberFile{Version: rememberVersion, Network: network}
	for _, g := range good {
		p := rememberedPeer{ID: g.info.ID.String(), Seen: g.seen.UTC().Truncate(time.Second)}
		for _, a := range g.info.Addrs {
			p.Addrs = append(p.Addrs, a.String())
		}
		f.Peers = append(f.Peers, p)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "\t")
	if err := enc.Encode(f); err != nil {
		return err
	}
	return writeAtomic(path, b.Bytes())
}

// merge puts the peers that are ready now before those remembered.
func merge(now, before []goodPeer) []goodPeer {
	out := now
	for _, g := range before {
		fresh := time.Since(g.seen) <= rememberFor
		if fresh && !slices.ContainsFunc(now, func(n goodPeer) bool { return n.info.ID == g.info.ID }) {
			out = append(out, g)
		}
	}
	return out[:min(len(out), maxRemembered)]
}

// memory keeps the file of good peers.
type memory struct {
	h    *Host
	good []goodPeer
}

// run writes the file now and then, and when ctx ends.
func (m *memory) run(ctx context.Context) {
	tick := time.NewTicker(rememberEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			m.save(m.h.goodPeers())
		case <-ctx.Done():
			return
		}
	}
}

func (m *memory) save(now []goodPeer) {
	if len(now) == 0 {
		return // alone: nothing new
	}
	m.good = merge(now, m.good)
	if err := writeRemembered(m.h.cfg.Remember, m.h.cfg.Network, m.good); err != nil {
		m.h.cfg.Logger.Warn("cannot remember good peers", "err", err)
	}
}

// goodPeers are the ready peers of which an address is known.
func (h *Host) goodPeers() []goodPeer {
	var out []goodPeer
	for _, p := range h.peers.list() {
		addrs := addrsOf(h.node, p.ID, maxRememberedAddrs)
		if len(addrs) > 0 {
			out = append(out, goodPeer{peer.AddrInfo{ID: p.ID, Addrs: addrs}, time.Now()})
		}
	}
	return out
}
