package experts

import (
	"context"
	"slices"
	"time"

	"kvasird/experts/place"
)

// Holder is a peer that is said to hold slices of the model.
type Holder struct {
	Peer   string
	Slices []Slice
	RTT    time.Duration // round trip, as far as it is known
}

// unknownRTT is what a holder's round trip is taken for while it is not known.
const unknownRTT = 200 * time.Millisecond

// SetHolders says which peers hold slices of the model now, as they announce, and what the whole
// model is, so that what is announced beyond it counts nothing: sessions are kept
// to all of them while they are no more than Config.MostPeers, else to those nearest that give
// every expert Config.Replicas. Peers that have a session keep it if they are about as good.
// Peers of AddPeer stay whatever this says. What a peer really offers is asked of the peer.
func (d *Dispatcher) SetHolders(whole Slice, list []Holder) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	chosen := map[string]bool{}
	for _, i := range place.Choose(d.candidatesLocked(whole, list), d.cfg.Replicas, d.cfg.MostPeers) {
		chosen[list[i].Peer] = true
		d.keepLocked(list[i].Peer)
	}
	for id, k := range d.keepers {
		if !k.pinned && !chosen[id] {
			d.dropLocked(id)
		}
	}
}

// candidatesLocked is what is known of the holders.
func (d *Dispatcher) candidatesLocked(whole Slice, list []Holder) []place.Candidate {
	const leave = 2 // a session is given up for a peer that is so much nearer
	var out []place.Candidate
	for _, h := range list {
		c := place.Candidate{Cost: float32(h.RTT)}
		if h.RTT <= 0 {
			c.Cost = float32(unknownRTT)
		}
		k := d.keepers[h.Peer]
		switch {
		case k == nil:
		case k.servingLocked() != nil && trust(k.servingLocked().trust.Load()) == trusted:
			c.Cost /= leave
		case k.trouble != "":
			c.Cost *= leave
		}
		for _, s := range h.Slices {
			b := place.Block{
				FromLayer: int32(max(s.FirstLayer, whole.FirstLayer)), ToLayer: int32(min(s.EndLayer, whole.EndLayer)),
				From: int32(max(s.FirstExpert, whole.FirstExpert)), To: int32(min(s.EndExpert, whole.EndExpert)),
			}
			if b.FromLayer < b.ToLayer && b.From < b.To {
				c.Blocks = append(c.Blocks, b)
			}
		}
		out = append(out, c)
	}
	return out
}

// AddPeer keeps a session to a peer from now on. Adding it again changes nothing.
func (d *Dispatcher) AddPeer(peerID string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if k := d.keepLocked(peerID); k != nil {
		k.pinned = true
	}
}

// RemovePeer ends the session to a peer; its calls move to other replicas.
func (d *Dispatcher) RemovePeer(peerID string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dropLocked(peerID)
}

// PeerIDs returns the peers that sessions are kept to, in order.
func (d *Dispatcher) PeerIDs() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []string
	for id := range d.keepers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// keepLocked returns the keeper of a peer, nil after Close.
func (d *Dispatcher) keepLocked(peerID string) *keeper {
	if k := d.keepers[peerID]; k != nil || d.closed {
		return k
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &keeper{d: d, peer: peerID, tally: d.tallyLocked(peerID), cancel: cancel}
	d.keepers[peerID] = k
	d.loops.Go(func() { k.run(ctx) })
	return k
}

func (d *Dispatcher) dropLocked(peerID string) {
	if k := d.keepers[peerID]; k != nil {
		k.cancel()
		delete(d.keepers, peerID)
		d.announceLocked() // a move of it is over
	}
}
