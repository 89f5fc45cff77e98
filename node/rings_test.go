package node

import (
	"errors"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ring"
	"kvasird/ring/plan"
)

func testWindow(peer string, begin, end, free int) plan.Window {
	return plan.Window{Peer: peer, Layers: gguf.Range{Begin: begin, End: end}, Slots: 4, Free: free}
}

// TestReplanned: of the stages that were lost the last one is never asked, the others only
// where there is no chain without them.
func TestReplanned(t *testing.T) {
	all := []plan.Window{testWindow("a", 0, 2, 1), testWindow("b", 2, 4, 1), testWindow("c", 2, 4, 1), testWindow("d", 2, 4, 1)}
	hops := chainOf(all)
	query := func(known []plan.Window) func([]ring.Hop) plan.ChainQuery {
		return func(avoid []ring.Hop) plan.ChainQuery {
			q := plan.ChainQuery{Layers: 4, Entry: "e", Windows: known}
			for _, h := range avoid {
				q.Avoid = append(q.Avoid, h.Peer)
			}
			return q
		}
	}
	for _, tt := range []struct {
		known []plan.Window
		lost  []ring.Hop
		want  string // second stage, or "" for none
	}{
		{all, hops[1:2], "c"},
		{all, hops[1:3], "d"},
		{all[:3], hops[1:3], "b"},
		{all, hops[1:4], "b"},
		{all[:2], hops[1:2], ""},
		{all[:1], hops[1:4], ""},
	} {
		got, err := replanned(query(tt.known), ring.Chain{hops[0], tt.lost[len(tt.lost)-1]}, tt.lost)
		if tt.want == "" && err != nil {
			continue
		}
		if err != nil || len(got) != 2 || got[1].Peer != tt.want {
			t.Errorf("%d known, lost %v: got %v, %v, want %q", len(tt.known), tt.lost, got, err, tt.want)
		}
	}
}

// TestChainWhereAllIsTaken: slots that were announced as taken are no reason not to ask, and
// are avoided where others are free.
func TestChainWhereAllIsTaken(t *testing.T) {
	q := plan.ChainQuery{Layers: 4, Entry: "e", Windows: []plan.Window{testWindow("a", 0, 2, 1), testWindow("b", 2, 4, 0), testWindow("c", 2, 4, 0)}, Avoid: []string{"b"}}
	chain, err := chainFor(q)
	if err != nil || len(chain) != 2 || chain[1].Peer != "c" {
		t.Errorf("got %v, %v: want a and c", chain, err)
	}
	if q.Windows[1].Free != 0 {
		t.Error("the query was changed")
	}
	q.Windows[1].Free, q.Avoid = 2, nil
	if chain, err := chainFor(q); err != nil || chain[1].Peer != "b" {
		t.Errorf("got %v, %v: want a and b, which has room", chain, err)
	}
	// The layers can all be had, and only together with a full stage do they make a chain.
	q.Windows = []plan.Window{testWindow("a", 0, 2, 0), testWindow("b", 2, 4, 1), testWindow("d", 0, 3, 1)}
	if chain, err := chainFor(q); err != nil || chain[0].Peer != "a" {
		t.Errorf("got %v, %v: want a and b", chain, err)
	}
	q.Layers = 5
	var none *plan.NoChainError
	if chain, err := chainFor(q); !errors.As(err, &none) || len(none.Missing) != 1 {
		t.Errorf("got %v, %v: nobody holds layer 4", chain, err)
	}
}
