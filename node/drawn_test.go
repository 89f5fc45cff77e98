package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"kvasird/experts"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/meter"
	"kvasird/node/pay"
	"kvasird/p2p"
	"kvasird/settle"
)

// TestPaidAnswersAreDrawn has replicas drawn as long as a paid request lasts.
func TestPaidAnswersAreDrawn(t *testing.T) {
	dispatcher, err := experts.NewDispatcher(experts.Config{Model: experts.ModelID(gguf.ModelID{1}.String()), Dialer: laneDialer{}})
	if err != nil {
		t.Fatal(err)
	}
	defer dispatcher.Close()
	d := &dispatchPart{Dispatcher: dispatcher}
	one, endOne := context.WithCancel(t.Context())
	two, endTwo := context.WithCancel(t.Context())
	defer endTwo()
	d.drawFor(one, pay.Paid{Seed: settle.Hash{1}})
	d.drawFor(two, pay.Paid{Seed: settle.Hash{2}})
	endOne()
	time.Sleep(10 * time.Millisecond)
	if !d.Drawn() {
		t.Error("nothing is drawn, though one of two requests runs")
	}
	endTwo()
	for range 1000 {
		if !d.Drawn() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("drawn after the last request")
}

// TestDrawnCountsWallets has three nodes serve a model: two that one wallet has the pay of count
// once, as soon as that is looked at, and who was paid next to nothing does not count beside who was
// paid.
func TestDrawnCountsWallets(t *testing.T) {
	table, err := market.NewTable(market.Policy{})
	if err != nil {
		t.Fatal(err)
	}
	shape := market.Shape{Layers: 2, Experts: 4, MoE: []gguf.Range{{Begin: 0, End: 2}}}
	id, now := gguf.ModelID{5}, time.Now()
	var nodes []settle.Node
	for seq := range 3 {
		identity, err := p2p.NewIdentity()
		if err != nil {
			t.Fatal(err)
		}
		node, err := meter.NodeOf(identity.ID().String())
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, node)
		a := market.Announcement{Models: []market.ModelNews{{ID: id, Shape: shape, Holdings: []market.Holding{{
			Slice: gguf.Slice{Layers: gguf.Range{End: 2}, Experts: gguf.Range{End: 4}}, State: market.Serving,
		}}}}}
		body, err := a.Encode()
		if err == nil {
			_, err = table.Update(market.Record{From: identity.ID().String(), Seq: uint64(seq + 1), Issued: now, Validity: time.Hour, Body: body}, now)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	standings := map[settle.Node]settle.Standing{}
	d := newDrawn(table, func(n settle.Node) (settle.Standing, error) { return standings[n], nil })
	count := func(name string, want ...int) {
		t.Helper()
		if err := d.look(now); err != nil {
			t.Fatal(err)
		}
		for i, n := range nodes {
			if got := d.Among(id.String(), settle.Hash{}, n); got != want[i] {
				t.Errorf("%s: node %d: drawn from %d, want %d", name, i, got, want[i])
			}
		}
	}
	stand := func(wallets, pays [3]int) {
		for i, n := range nodes {
			standings[n] = settle.Standing{Wallet: settle.Wallet{byte(wallets[i])}, Pay: settle.Amount(pays[i])}
		}
	}
	count("nobody has anything to lose", 0, 0, 0)
	stand([3]int{1, 2, 3}, [3]int{8000, 70_000, 9000})
	count("three wallets", 2, 2, 3) // the first earned less than an eighth of the second's
	stand([3]int{1, 2, 1}, [3]int{8000, 8000, 8000})
	count("two of one", 2, 2, 2)
	stand([3]int{1, 2, 3}, [3]int{8000, 1, 1})
	count("two that were made up", 1, 2, 2)
	standings[nodes[0]] = settle.Standing{}
	count("one does not stand", 0, 2, 2)
	if got := d.Among("nonsense", settle.Hash{}, nodes[0]); got != 0 {
		t.Errorf("of no model: %d", got)
	}
	d.standing = func(settle.Node) (settle.Standing, error) { return settle.Standing{}, errClosedBooks }
	if err := d.look(now); err == nil {
		t.Error("what the books refuse is no error")
	}
}

var errClosedBooks = errors.New("the books are closed")

func TestAmong(t *testing.T) {
	peers := map[string]string{}
	var first settle.Node
	for _, name := range []string{"a1", "b1", "b2", "c1", "x1"} {
		id, err := p2p.NewIdentity()
		if err != nil {
			t.Fatal(err)
		}
		peers[name] = id.ID().String()
		if name == "a1" {
			if first, err = meter.NodeOf(id.ID().String()); err != nil {
				t.Fatal(err)
			}
		}
	}
	owner := func(peer string) (string, bool) {
		for name, id := range peers {
			if id == peer {
				return name[:1], name[:1] != "x"
			}
		}
		return "", false
	}
	serves := func(peer string, state market.State, from, to int) market.Holder {
		return market.Holder{Peer: peers[peer], News: &market.ModelNews{Holdings: []market.Holding{{
			Slice: gguf.Slice{Layers: gguf.Range{Begin: 0, End: 4}, Experts: gguf.Range{Begin: from, End: to}}, State: state,
		}}}}
	}
	runs := serves("a1", market.Serving, 0, 64)
	runs.News.Backbone = true
	answers := serves("a1", market.Serving, 0, 64)
	answers.News.Service.Slots = 2
	a, b, c := serves("a1", market.Serving, 0, 64), serves("b1", market.Serving, 0, 64), serves("c1", market.Serving, 0, 64)
	tests := []struct {
		name string
		list []market.Holder
		want int
	}{
		{"nobody", nil, 0},
		{"others only", []market.Holder{b, c}, 0},
		{"alone", []market.Holder{a}, 1},
		{"three", []market.Holder{a, b, c}, 3},
		{"two of one owner", []market.Holder{a, b, serves("b2", market.Serving, 0, 64)}, 2},
		{"one is nobody's", []market.Holder{a, b, serves("x1", market.Serving, 0, 64)}, 2},
		{"one is leaving", []market.Holder{a, b, serves("c1", market.Leaving, 0, 64)}, 2},
		{"one has not loaded yet", []market.Holder{a, b, serves("c1", market.Loading, 0, 64)}, 2},
		{"one holds less", []market.Holder{a, b, serves("c1", market.Serving, 1, 64)}, 2},
		{"more than it serves itself", []market.Holder{serves("a1", market.Serving, 0, 8), b, serves("c1", market.Serving, 0, 9)}, 3},
		{"it runs the model", []market.Holder{runs, b, c}, 0},
		{"it answers for others", []market.Holder{answers, b, c}, 0},
		{"it only loads", []market.Holder{serves("a1", market.Loading, 0, 64), b, c}, 0},
	}
	for _, tt := range tests {
		if got := among(tt.list, first, owner); got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, got, tt.want)
		}
	}
}
