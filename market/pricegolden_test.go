package market

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// scriptedLoad is a market in integers: 200 epochs each of ten times the supply, a tenth of the
// demand, ten times the demand, a whale that comes and goes, and a crash of the token, with
// epochs that are silent or left out. Supply follows the price of two days before.
func scriptedLoad(epoch uint64, prices []Price) (l Load, skipped bool) {
	demand, nodes := uint64(600_000), uint64(1_000_000)
	switch part, in := epoch/200, epoch%200; {
	case part == 0 && in > 20:
		nodes = 10_000_000
	case part == 1:
		demand = 60_000
	case part == 2:
		demand = 6_000_000
	case part == 3 && in/36%2 == 0:
		demand += 500_000
	case part == 4:
		demand, nodes = demand/2, nodes*4/5
	}
	if n := len(prices); n > 48 {
		nodes = nodes / 1000 * uint64(prices[n-48]/1_000_000_000) // ×1 at one fiat unit
	}
	demand += epoch * 7919 % 101 * demand / 1000
	l = Load{Counted: demand, Capacity: nodes, Heard: epoch%97 != 0}
	if epoch%83 == 0 {
		l.Capacity = 0
	}
	return l, epoch%71 == 0
}

func goldenChain(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	out.WriteString("epoch,counted,capacity,heard,price,smooth,no_data,cost_of_1000_tokens,hash\n")
	chain, p := NewPriceChain(priceNet, priceModel, publisher), firstPrice()
	var prices []Price
	for epoch := uint64(1); epoch <= 1000; epoch++ {
		if err := chain.Append(sign(t, p)); err != nil {
			t.Fatalf("epoch %d: %v", p.State.Epoch, err)
		}
		cost, err := p.State.Price.Amount(1000, p.Ref.PerFiat)
		if err != nil {
			t.Fatal(err)
		}
		_, hash := chain.Last()
		fmt.Fprintf(&out, "%d,%d,%d,%v,%d,%d,%v,%s,%x\n", p.State.Epoch, p.Load.Counted, p.Load.Capacity, p.Load.Heard,
			p.State.Price, p.State.Smooth, p.State.NoData, cost, hash)
		prices = append(prices, p.State.Price)
		l, skipped := scriptedLoad(epoch, prices)
		if skipped {
			continue
		}
		before := p.State
		p = p.after(t, epoch, l)
		switch epoch {
		case 801, 826, 851: // the token loses four fifths, and governance follows
			p.Ref = Reference{PerFiat: min(p.Ref.PerFiat*2, 25_000_000), Set: p.Issued}
		case 500: // a lower band
			p.Sequence, p.Rules.Ceiling = 2, 2_000_000_000_000
			if p.State, err = p.Rules.Next(before, epoch, l); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out.Bytes()
}

// The golden chain of 1,000 epochs: a change of the rules cannot move money unseen, and every
// processor computes the same bytes.
func TestGoldenPrices(t *testing.T) {
	path := filepath.Join("testdata", "prices.csv")
	got := goldenChain(t)
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v: run the test with -rewrite", err)
	}
	g, w := bytes.Split(got, []byte("\n")), bytes.Split(want, []byte("\n"))
	for i := range max(len(g), len(w)) {
		if i >= len(g) || i >= len(w) || !bytes.Equal(g[i], w[i]) {
			t.Fatalf("line %d of %s: got %d lines, want %d; %s", i+1, path, len(g), len(w), bytes.Join([][]byte{g[min(i, len(g)-1)], w[min(i, len(w)-1)]}, []byte(" for ")))
		}
	}
}
