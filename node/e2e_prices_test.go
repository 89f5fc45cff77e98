//go:build cgo && linux

package node

import (
	"path/filepath"
	"testing"
	"time"

	"kvasird/market"
	"kvasird/p2p"
	"kvasird/settle"
)

// TestPricesInANetwork has the node that a network file names as who settles tell a price: it
// shows it, and the others do, one that comes later too.
func TestPricesInANetwork(t *testing.T) {
	data := filepath.Join(t.TempDir(), "settles")
	id, err := p2p.LoadOrCreateIdentity(filepath.Join(data, "identity.key"))
	if err != nil {
		t.Fatal(err)
	}
	n := newNetwork(t, NewNetwork{Token: tokenSettings("settlement=" + id.ID().String())})
	who, _ := n.here("settles", "--data", data, "--role", "backbone", "--model", n.whole, "--experts", "here", "--http", Off)
	at := localAddr(must(who.Status(n.ctx))(t))
	near, _ := n.here("near", "--role", "entry", "--peer", at)

	model := who.backbone.Load().file.id
	rules, now := market.RulesOf(settle.DefaultParams()), uint64(time.Now().Unix())
	record := market.PriceRecord{Network: settle.Hash(who.cfg.Genesis.Hash()), Model: model, Rules: rules, Sequence: 1,
		State: rules.Start(0, 300_000_000_000), Ref: market.Reference{PerFiat: 5_000_000, Set: now - 60}, Issued: now}
	who.exchange.prices.Publish(must(record.Sign(id.PrivateKey()))(t))
	late, _ := n.here("late", "--role", "entry", "--peer", at)
	for name, node := range map[string]*Node{"near": near, "late": late} {
		for {
			maps := must(node.Coverage(n.ctx))(t)
			if len(maps) == 1 && maps[0].Price != nil {
				if p := maps[0].Price; p.Raw != 300_000_000_000 || p.Million != 1_500_000 || p.Trouble != "" {
					t.Errorf("%s: %+v", name, p)
				}
				break
			}
			select {
			case <-n.ctx.Done():
				t.Fatalf("%s knows no price: %+v", name, maps)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	if s := must(who.Status(n.ctx))(t); s.Model == nil || s.Model.Price == nil {
		t.Errorf("the status has no price: %+v", s.Model)
	}
}
