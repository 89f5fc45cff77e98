package node

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/kv"
	"kvasird/node/meter"
	"kvasird/p2p"
	"kvasird/ring"
	"kvasird/settle"
)

const (
	// statementsName is the folder of what this node signed, in the data folder.
	statementsName = "statements"
	// statementsAge is above the epochs within which a request can be settled.
	statementsAge   = 30 * 24 * time.Hour
	statementsBytes = 64 << 20
)

// metering is who did what for whom, in a network with a token. Its methods return hooks for
// those who compute; of a nil one, and for a model whose parts cannot be told from its
// file, they are nil: nothing is counted.
type metering struct {
	*meter.Meter
	signer *meter.Signer
	grants *meter.Grants
	host   *p2p.Host // set before anybody asks
	log    *slog.Logger
}

// openMetering makes the metering of a network with a token.
func (n *Node) openMetering(identity p2p.Identity) error {
	if n.cfg.Genesis == nil || n.cfg.Genesis.Token == nil {
		return nil
	}
	const name = "signed"
	db, err := kv.Open(kv.Config{
		Path: filepath.Join(n.cfg.Data, statementsName), Logger: n.log,
		Spaces: map[string]kv.Bounds{name: {Age: statementsAge, Bytes: statementsBytes}},
	})
	if err != nil {
		return err
	}
	n.onStop(db.Close)
	m := &metering{log: n.log}
	network, self, key := settle.Hash(n.cfg.Genesis.Hash()), identity.ID().String(), identity.PrivateKey()
	m.signer, err = meter.NewSigner(meter.SignerConfig{Network: network, Self: self, Key: key, Keep: db.Space(name), Logger: n.log})
	if err != nil {
		return err
	}
	own, err := p2p.KeyOf(identity.ID())
	if err == nil {
		m.grants, err = n.openGrants(own)
	}
	if err != nil {
		return err
	}
	m.Meter, err = meter.New(meter.Config{Signer: m.signer, Dialer: m, Grants: m.grants, Workers: n.dispatchedTo, Logger: n.log})
	n.metering = m
	return err
}

// serveMetering answers peers who may infer here for what they had computed.
func (n *Node) serveMetering() error {
	m := n.metering
	if m == nil {
		return nil
	}
	m.host = n.host
	n.onStop(m.Close)
	return n.host.HandleStream(meter.Protocol, func(p *p2p.Peer, c p2p.Conn) {
		err := n.admit(p.ID)
		if err == nil {
			err = m.Serve(p.ID.String(), c)
		}
		if err != nil {
			n.log.Info("nothing was signed for a peer", "peer", p.ID.String(), "error", err)
		}
	})
}

// Dial makes metering a meter.Dialer.
func (m *metering) Dial(ctx context.Context, peerID string) (meter.Conn, error) {
	id, err := meet(ctx, m.host, peerID)
	if err != nil {
		return nil, err
	}
	return m.host.OpenStream(ctx, id, meter.Protocol)
}

// model is what is counted of a model; nil: nothing.
func (m *metering) model(id gguf.ModelID, g *gguf.Model) *meter.Model {
	if m == nil {
		return nil
	}
	model, err := meter.NewModel(id.String(), g)
	if err != nil {
		m.log.Warn("what is computed of a model is not counted, and so not paid", "model", id.String(), "error", err)
		return nil
	}
	return model
}

// own counts rows that this node served itself for its own requests, with their experts if
// those are here.
func (m *metering) own(id gguf.ModelID, g *gguf.Model, experts bool) func(computed, cached int) {
	model := m.model(id, g)
	if model == nil {
		return nil
	}
	pool := m.Pool(model)
	return func(computed, cached int) {
		pool.Own(computed, experts)
		pool.Own(cached, true)
	}
}

// pairs counts what workers computed for this node's requests.
func (m *metering) pairs(id gguf.ModelID, g *gguf.Model) func(peerID string, layer, pairs int) {
	if model := m.model(id, g); model != nil {
		return m.Pool(model).Pairs
	}
	return nil
}

// forfeit takes from a worker what it did for requests of this node that have not ended.
func (m *metering) forfeit(id gguf.ModelID, peerID string) {
	if m != nil {
		m.Meter.Forfeit(id.String(), peerID)
	}
}

// chains counts what stages computed for this node's requests. A stage has the experts of
// its layers computed as it likes, and is who is paid for them.
func (m *metering) chains(id gguf.ModelID, g *gguf.Model) func(chain ring.Chain, rows int) {
	model := m.model(id, g)
	if model == nil {
		return nil
	}
	pool := m.Pool(model)
	return func(chain ring.Chain, rows int) {
		for _, h := range chain {
			pool.Window(h.Peer, h.Layers, rows)
		}
	}
}

// carried counts what other nodes answered for this node's requests. They say who computed it.
func (m *metering) carried(id gguf.ModelID, g *gguf.Model) func(peerID string, rows int) {
	model := m.model(id, g)
	if model == nil {
		return nil
	}
	return m.Pool(model).Carried
}

// computed counts what this node's experts computed for others.
func (m *metering) computed(id gguf.ModelID, g *gguf.Model) func(peerID string, layer, pairs int) {
	if model := m.model(id, g); model != nil {
		return m.signer.Counts(model).Pairs
	}
	return nil
}

// window counts what a stage of this node computed for others.
func (m *metering) window(id gguf.ModelID, g *gguf.Model, layers gguf.Range) func(entry string, rows int) {
	model := m.model(id, g)
	if model == nil {
		return nil
	}
	counts := m.signer.Counts(model)
	return func(entry string, rows int) { counts.Window(entry, layers, rows) }
}
