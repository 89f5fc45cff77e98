package experts

import (
	"sync/atomic"

	"kvasird/experts/audit"
)

const (
	// countedLayers bounds the memory of a tally; rows of later layers are not counted.
	countedLayers = 512
	// mostTallies bounds how many peers are remembered after they left.
	mostTallies = 1024
)

// tally counts what a peer did for this dispatcher, over all its sessions.
type tally struct {
	rows   [countedLayers]atomic.Uint64 // by layer
	failed atomic.Uint64                // calls that it failed, answered wrongly or too late
	hedged atomic.Uint64                // calls that others were asked for too

	outUntil atomic.Int64   // Unix ns until which it gets no calls, for what audits found; 0: it gets them
	standing audit.Standing // guarded by Dispatcher.mu
}

func (t *tally) computed(layer, pairs int) {
	if layer < countedLayers {
		t.rows[layer].Add(uint64(pairs))
	}
}

func (t *tally) layers() []LayerRows {
	var list []LayerRows
	for i := range t.rows {
		if n := t.rows[i].Load(); n > 0 {
			list = append(list, LayerRows{i, n})
		}
	}
	return list
}

// share is pairs of a call that one worker computed.
type share struct {
	peer  string // "": the backbone's own copy
	pairs int
}

// share notes pairs that were accepted into the output of the call.
func (r *run) share(peer string, pairs int) {
	if r.d.cfg.Served != nil && r.only == nil && pairs > 0 {
		r.shares = append(r.shares, share{peer, pairs})
	}
}

// tellServed tells who computed a call that is complete.
func (r *run) tellServed() {
	for _, s := range r.shares {
		r.d.cfg.Served(s.peer, r.call.Layer, s.pairs)
	}
}

// tallyLocked is the tally of a peer. Dispatcher.mu is held.
func (d *Dispatcher) tallyLocked(peer string) *tally {
	t := d.tallies[peer]
	if t == nil {
		t = &tally{}
		if len(d.tallies) < mostTallies {
			d.tallies[peer] = t
		}
	}
	return t
}
