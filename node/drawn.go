package node

import (
	"context"
	"sync/atomic"
	"time"

	"kvasird/experts/place"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/meter"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
)

// ownersEvery is how often it is looked at whose the nodes are.
const ownersEvery = time.Minute

// drawFor has replicas drawn by the payment of a request, while ctx lasts: a payer cannot tell
// who computes.
func (d *dispatchPart) drawFor(ctx context.Context, paid pay.Paid) {
	context.AfterFunc(ctx, d.Draw(place.Seed(paid.Seed)))
}

// drawn says, to who settles on this node, from how many independent replicas work was drawn.
type drawn struct {
	table    *market.Table
	standing func(settle.Node) (settle.Standing, error)
	seen     atomic.Pointer[map[string]settle.Standing] // by peer, of those that have one
}

func newDrawn(t *market.Table, standing func(settle.Node) (settle.Standing, error)) *drawn {
	d := &drawn{table: t, standing: standing}
	d.seen.Store(&map[string]settle.Standing{})
	return d
}

// run looks at whose the nodes are until ctx ends.
func (d *drawn) run(ctx context.Context) error {
	for {
		if err := d.look(time.Now()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(ownersEvery):
		}
	}
}

// look asks how all holders stand.
func (d *drawn) look(now time.Time) error {
	seen := map[string]settle.Standing{}
	for _, id := range d.table.Models(now) {
		for _, h := range d.table.Holders(id, now) {
			node, err := meter.NodeOf(h.Peer)
			if err != nil {
				continue // it can have no pay either
			}
			s, err := d.standing(node)
			if err != nil {
				return err
			}
			if s != (settle.Standing{}) {
				seen[h.Peer] = s
			}
		}
	}
	d.seen.Store(&seen)
	return nil
}

// Among is cashier.DeskConfig's: it asks nothing of the books, and does not wait.
func (d *drawn) Among(model string, _ settle.Hash, node settle.Node) int {
	id, err := gguf.ParseModelID(model)
	if err != nil {
		return 0
	}
	seen := *d.seen.Load()
	its := seen[p2p.PeerOf(node).String()]
	return among(d.table.Holders(id, time.Now()), node, func(peer string) (string, bool) {
		s := seen[peer]
		return string(s.Wallet[:]), s.Beside(its)
	})
}

// among says from how many independent replicas what a node computes of a model is drawn, as they
// announce themselves: the fewest, over the experts that it serves, of holders with different
// owners. Holders without one, who lose nothing by what they announce, or were paid next to nothing
// beside it, or it beside them, do not count (settle.Standing). It is 0
// for who has no owner, for who runs the model for clients, since that one chooses by itself,
// and for who serves no experts: a ring's stages are chosen by their speed.
func among(holders []market.Holder, node settle.Node, owner func(peer string) (string, bool)) int {
	var all []place.Holder
	var its []place.Block
	for _, h := range holders {
		whose, ok := owner(h.Peer)
		if !ok {
			continue
		}
		blocks := servedBlocks(h.News.Holdings)
		if k, err := meter.NodeOf(h.Peer); err == nil && k == node {
			if h.News.Backbone || h.News.Service.Slots > 0 {
				return 0
			}
			its = blocks
		}
		all = append(all, place.Holder{Owner: whose, Blocks: blocks})
	}
	if len(its) == 0 {
		return 0
	}
	fewest := len(all)
	for _, b := range its {
		fewest = min(fewest, place.Among(all, b))
	}
	return fewest
}

// servedBlocks are the experts that are computed now.
func servedBlocks(list []market.Holding) (out []place.Block) {
	for _, h := range list {
		if h.State == market.Serving {
			out = append(out, place.Block{
				FromLayer: int32(h.Slice.Layers.Begin), ToLayer: int32(h.Slice.Layers.End),
				From: int32(h.Slice.Experts.Begin), To: int32(h.Slice.Experts.End),
			})
		}
	}
	return out
}
