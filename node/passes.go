package node

import (
	"context"

	"kvasird/ggml/gguf"
	"kvasird/node/cashier"
	"kvasird/node/meter"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
)

// openGrants is what this node computes for others, in a network with a token. Who settles is
// asked about it once the node has a way to it.
func (n *Node) openGrants(self settle.Node) (*meter.Grants, error) {
	t, err := readToken(n.cfg.Genesis)
	if err != nil {
		return nil, err
	}
	desk, err := p2p.KeyOf(t.peer)
	if err != nil {
		return nil, err
	}
	return meter.NewGrants(meter.GrantsConfig{
		Network: t.authority.Network, Self: self, Settlement: desk, Params: t.authority.Params, Logger: n.log,
		Credits: func(ctx context.Context, ids []settle.QuoteID) (out []meter.Credit, err error) {
			list, err := n.settlement.service.Credits(ctx, ids[:min(len(ids), cashier.MaxCredits)])
			for _, c := range list {
				out = append(out, meter.Credit(c))
			}
			return out, err
		},
	})
}

// dispatchedTo are the workers that compute a model for this node.
func (n *Node) dispatchedTo(model string) []string {
	if d := n.dispatching(); d != nil && d.file.id.String() == model {
		return d.connectedPeers()
	}
	return nil
}

func (d *dispatchPart) connectedPeers() (peers []string) {
	for _, p := range d.Peers() {
		if p.Connected {
			peers = append(peers, p.ID)
		}
	}
	return peers
}

// show shows those who will compute that the request which ctx is of is paid, if it is. It waits longer
// where each of them is needed.
func (m *metering) show(ctx context.Context, peers []string, needed bool) {
	if m == nil || len(peers) == 0 {
		return
	}
	if paid, ok := pay.From(ctx); ok && len(paid.Pass) > 0 {
		m.Show(ctx, paid.Pass, peers, needed)
	}
}

// unpaid shows a worker that asks for it what runs and is paid.
func (m *metering) unpaid(id gguf.ModelID) func(peerID string) {
	if m == nil {
		return nil
	}
	return func(peerID string) { m.ShowMore(id.String(), peerID) }
}

// allows is what this node's experts compute for whom.
func (m *metering) allows(id gguf.ModelID, g *gguf.Model) func(peerID string, layer, pairs int) error {
	if model := m.model(id, g); model != nil {
		return m.grants.Pairs(model)
	}
	return nil
}

// allowsRows is what rows this node computes for whom: with their experts, if it is paid for those,
// and some without a pass, if free.
func (m *metering) allowsRows(id gguf.ModelID, g *gguf.Model, layers gguf.Range, experts, free bool) func(entry string, rows int) error {
	if model := m.model(id, g); model != nil {
		return m.grants.Window(model, layers, experts, free)
	}
	return nil
}
