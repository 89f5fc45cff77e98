package market

import (
	"time"

	"kvasird/ggml/gguf"
)

// Want is what somebody can take on.
type Want struct {
	Peer       string // spreads equally scarce ranges over peers; empty: the first of them
	Models     []gguf.ModelID
	MaxExperts int                                            // 0: no limit
	MaxBytes   int64                                          // 0: no limit
	Bytes      func(model gguf.ModelID, layer int) int64      // of one expert, 0 not known: nothing fits; nil: none is known
	Held       func(model gguf.ModelID) (slices []gguf.Slice) // what Peer holds already; may be nil
}

// Choice is a range to hold: the contiguous experts of one layer.
type Choice struct {
	Model    gguf.ModelID
	Layer    int
	Experts  gguf.Range
	Scarcity float64 // max(0, 1 - Replicas/Target)
	Replicas int     // that serve, of the least covered expert
	Target   int
}

// Assign returns the scarcest range of the models, clipped to what is wanted, false if no model
// has a scarce one that fits. What others have claimed counts as covered. Only models of
// verified shape are looked at; a model that a backbone runs goes before one that none runs,
// then the order of Models decides.
func (t *Table) Assign(w Want, now time.Time) (Choice, bool) {
	var best Choice
	rank := 3.0
	for _, id := range w.Models {
		b := t.board(id, "", now)
		if b == nil {
			continue
		}
		f, ok := b.pick(&search{peer: hash(w.Peer), spread: w.Peer != "", own: b.mask(w.held(id)),
			room: func(layer int) int { return w.room(id, layer) }, limit: b.scarce})
		if !ok {
			continue
		}
		key := f.key // below 1: scarce
		if b.backbones == 0 {
			key++
		}
		if key < rank {
			rank, best = key, b.choice(f)
		}
	}
	return best, rank < 3
}

func (w *Want) held(id gguf.ModelID) []gguf.Slice {
	if w.Held == nil {
		return nil
	}
	return w.Held(id)
}

// room is how many experts of a layer fit.
func (w *Want) room(id gguf.ModelID, layer int) int {
	n := MaxExperts
	if w.MaxExperts > 0 {
		n = min(n, w.MaxExperts)
	}
	if w.MaxBytes > 0 {
		var size int64
		if w.Bytes != nil {
			size = w.Bytes(id, layer)
		}
		if size <= 0 {
			return 0
		}
		n = int(min(int64(n), w.MaxBytes/size))
	}
	return n
}

// scarce reports whether a cell lacks replicas, counting claims.
func (b *board) scarce(cell int) bool { return b.total(cell) < int(b.target[cell]) }

// mask marks the cells of slices; slices that do not exist are ignored.
func (b *board) mask(list []gguf.Slice) []bool {
	if len(list) == 0 {
		return nil
	}
	m := make([]bool, len(b.serving))
	for _, s := range list {
		if !b.shape.Has(s) {
			continue
		}
		b.shape.eachRow(s, func(begin, end int) {
			for i := begin; i < end; i++ {
				m[i] = true
			}
		})
	}
	return m
}

func (b *board) choice(f found) Choice {
	c := Choice{Model: b.id, Layer: f.layer, Experts: f.experts}
	least := -1
	for e := f.experts.Begin; e < f.experts.End; e++ {
		if i := b.shape.cell(f.layer, e); least < 0 || b.serving[i] < b.serving[least] {
			least = i
		}
	}
	c.Replicas, c.Target = int(b.serving[least]), int(b.target[least])
	c.Scarcity = scarcity(c.Replicas, c.Target)
	return c
}
