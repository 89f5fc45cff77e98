package meter

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/settle"
)

// poolOf is a pool with a clock that tests set.
func poolOf(m *Model) (*Pool, *time.Time) {
	now := time.Unix(1_000_000, 0)
	return newPool(m, peerOf("entry"), func() time.Time { return now }), &now
}

// drawn is what a request of so many tokens takes.
func drawn(p *Pool, tokens uint64) []settle.Work {
	work, _ := p.draw(p.tokens(tokens))
	return work
}

// workOf is the lines of a node in a draw.
func workOf(work []settle.Work, name string) []settle.Line {
	i := slices.IndexFunc(work, func(w settle.Work) bool { return w.Worker == node(name) })
	if i < 0 {
		return nil
	}
	return work[i].Lines
}

func TestDraw(t *testing.T) {
	window := func(from, to int) gguf.Range { return gguf.Range{Begin: from, End: to} }
	tests := []struct {
		name   string
		fill   func(p *Pool)
		tokens uint64
		want   map[string][]settle.Line
	}{
		{"nothing was done", func(p *Pool) {}, 10, nil},
		{"no tokens", func(p *Pool) { p.Own(10, true) }, 0, nil},
		{"this node did all", func(p *Pool) { p.Own(10, true) }, 10,
			map[string][]settle.Line{"entry": lines(0, 10, 1, 10, 2, 40, 3, 10, 5, 10, 6, 40, 7, 10)}},
		{"more than the tokens need is left", func(p *Pool) { p.Own(10, true) }, 3,
			map[string][]settle.Line{"entry": lines(0, 3, 1, 3, 2, 12, 3, 3, 5, 3, 6, 12, 7, 3)}},
		{"workers have the experts", func(p *Pool) {
			p.Own(10, false)
			p.Pairs(peerOf("a"), 0, 30)
			p.Pairs(peerOf("b"), 0, 10)
			p.Pairs("", 2, 5)
			p.Pairs(peerOf("b"), 2, 35)
		}, 10, map[string][]settle.Line{
			"entry": lines(0, 10, 1, 10, 3, 10, 5, 10, 6, 5, 7, 10), "a": lines(2, 30), "b": lines(2, 10, 6, 35)}},
		{"in proportion", func(p *Pool) {
			p.Pairs(peerOf("a"), 0, 300)
			p.Pairs(peerOf("b"), 0, 100)
		}, 10, map[string][]settle.Line{"a": lines(2, 30), "b": lines(2, 10)}},
		{"a ring", func(p *Pool) {
			p.Window(peerOf("a"), window(0, 1), 7)
			p.Window(peerOf("b"), window(1, 3), 7)
		}, 8, map[string][]settle.Line{"a": lines(0, 7, 1, 7, 2, 28), "b": lines(3, 7, 5, 7, 6, 28, 7, 7)}},
		{"from the cache", func(p *Pool) {
			p.Own(1, false)
			p.Own(3, true)
			p.Pairs(peerOf("a"), 0, 4)
		}, 4, map[string][]settle.Line{"entry": lines(0, 4, 1, 4, 2, 12, 3, 4, 5, 4, 6, 12, 7, 4), "a": lines(2, 4)}},
		{"what was wrong is not paid", func(p *Pool) {
			p.Pairs(peerOf("a"), 0, 30)
			p.Pairs(peerOf("b"), 0, 10)
			p.Forfeit(peerOf("a"))
			p.Forfeit(peerOf("c"))
			p.Pairs(peerOf("a"), 2, 5)
		}, 10, map[string][]settle.Line{"a": lines(6, 5), "b": lines(2, 10)}},
		{"layers that there are not, peers without a key", func(p *Pool) {
			p.Pairs(peerOf("a"), 3, 4)
			p.Pairs(peerOf("a"), -1, 4)
			p.Pairs("nobody", 0, 4)
			p.Window(peerOf("a"), window(-5, 1<<40), 0)
		}, 4, nil},
	}
	for _, tt := range tests {
		p, _ := poolOf(testModel())
		tt.fill(p)
		work := drawn(p, tt.tokens)
		if len(work) != len(tt.want) {
			t.Errorf("%s: %d workers, want %d", tt.name, len(work), len(tt.want))
		}
		for name, want := range tt.want {
			if got := workOf(work, name); !slices.Equal(got, want) {
				t.Errorf("%s: %s did %v, want %v", tt.name, name, got, want)
			}
		}
	}
}

// TestDrawIsExact: whatever was done by whom, a draw is what the tokens need or all there
// is, nobody gives more than it did, and a settlement takes it.
func TestDrawIsExact(t *testing.T) {
	names := []string{"entry", "a", "b", "c", "d"}
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 7))
		m := testModel()
		p, _ := poolOf(m)
		did, gave, total, taken := map[unit]uint64{}, map[unit]uint64{}, make([]uint64, 8), make([]uint64, 8)
		for range 60 {
			if name := names[r.IntN(len(names))]; r.IntN(3) > 0 {
				layer, n := 2*r.IntN(2), r.IntN(50)
				p.Pairs(peerOf(name), layer, n)
				did[unit{node(name), uint32(gguf.ExpertPart(layer))}] += uint64(n)
				total[gguf.ExpertPart(layer)] += uint64(n)
				continue
			}
			tokens := uint64(r.IntN(20))
			work := drawn(p, tokens)
			if _, _, err := settle.Shares(m.parts, tokens, work); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			got := make([]uint64, 8)
			for _, w := range work {
				for _, l := range w.Lines {
					gave[unit{w.Worker, l.Part}] += l.Units
					got[l.Part] += l.Units
				}
			}
			for part := range got {
				if want := min(tokens*m.parts[part].PerToken, total[part]-taken[part]); got[part] != want {
					t.Fatalf("seed %d: %d units of part %d, want %d", seed, got[part], part, want)
				}
				taken[part] += got[part]
			}
		}
		for u, n := range gave {
			if n > did[u] {
				t.Fatalf("seed %d: %s gave %d units of part %d and did %d", seed, u.node, n, u.part, did[u])
			}
		}
	}
}

type unit struct {
	node settle.Node
	part uint32
}

func TestPoolIsBounded(t *testing.T) {
	p, now := poolOf(testModel())
	for range mostTokens / 100 { // drafts that were not accepted, ten times what is kept
		p.Pairs(peerOf("a"), 0, 3000)
		p.Pairs(peerOf("b"), 0, 1000)
	}
	work := drawn(p, 1<<60)
	a, b := workOf(work, "a")[0].Units, workOf(work, "b")[0].Units
	if a+b > 4*mostTokens || a+b < 2*mostTokens-4000 || a < 2*b || a > 4*b {
		t.Errorf("%d and %d pairs are kept of %d, in proportion 3 to 1", a, b, 4*mostTokens)
	}
	for i := range 3 * settle.MaxWorkers {
		*now = now.Add(time.Second / 4)
		p.Pairs(peerOf(fmt.Sprint(i)), 0, 1)
	}
	if n := len(p.accounts.by); n != settle.MaxWorkers {
		t.Errorf("%d workers are kept", n)
	}
	*now = now.Add(time.Second)
	p.Pairs(peerOf("late"), 0, 1)
	*now = now.Add(staleAfter)
	p.Pairs(peerOf("new"), 0, 1)
	if work := drawn(p, 1000); len(work) != 2 || workOf(work, "late") == nil || workOf(work, "new") == nil {
		t.Errorf("%d workers after ten minutes, want the two that did something in them", len(work))
	}
}

// TestFullReceipt: the largest draw fits a receipt.
func TestFullReceipt(t *testing.T) {
	for _, layers := range []int{1, 50, 2000} {
		m := &Model{ID: "m", layers: layers}
		for range gguf.HeadPart(layers) + 1 {
			m.parts = append(m.parts, settle.Part{Weight: 1, PerToken: 8})
		}
		p, now := poolOf(m)
		for i := range settle.MaxWorkers {
			*now = now.Add(time.Millisecond)
			p.Window(peerOf(fmt.Sprint(i)), gguf.Range{End: layers}, 1<<11)
		}
		work := drawn(p, mostTokens)
		r := settle.Report{Role: settle.Receipt, Network: testNetwork, Request: testRequest, Signer: node("entry"), Seq: 1, Tokens: mostTokens, Work: work}
		b, err := r.Sign(keyOf("entry"))
		if err != nil || len(work) == 0 {
			t.Errorf("%d layers: %d workers: %v", layers, len(work), err)
		}
		if !slices.IsSortedFunc(work, func(a, b settle.Work) int { return bytes.Compare(a.Worker[:], b.Worker[:]) }) {
			t.Error("workers are not in order")
		}
		t.Logf("%d layers: %d workers, %d bytes", layers, len(work), len(b))
	}
}

func BenchmarkPairs(b *testing.B) {
	p, _ := poolOf(testModel())
	a := peerOf("a")
	for b.Loop() {
		p.Pairs(a, 2, 8)
	}
}
