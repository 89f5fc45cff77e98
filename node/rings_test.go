package node

import (
	"errors"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/ring/plan"
)

// TestChainWhereAllIsTaken: slots that were announced as taken are no reason not to ask, and
// are avoided where others are free.
func TestChainWhereAllIsTaken(t *testing.T) {
	window := func(peer string, begin, end, free int) plan.Window {
		return plan.Window{Peer: peer, Layers: gguf.Range{Begin: begin, End: end}, Slots: 4, Free: free}
	}
	q := plan.ChainQuery{Layers: 4, Entry: "e", Windows: []plan.Window{window("a", 0, 2, 1), window("b", 2, 4, 0), window("c", 2, 4, 0)}, Avoid: []string{"b"}}
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
	q.Windows = []plan.Window{window("a", 0, 2, 0), window("b", 2, 4, 1), window("d", 0, 3, 1)}
	if chain, err := chainFor(q); err != nil || chain[0].Peer != "a" {
		t.Errorf("got %v, %v: want a and b", chain, err)
	}
	q.Layers = 5
	var none *plan.NoChainError
	if chain, err := chainFor(q); !errors.As(err, &none) || len(none.Missing) != 1 {
		t.Errorf("got %v, %v: nobody holds layer 4", chain, err)
	}
}
