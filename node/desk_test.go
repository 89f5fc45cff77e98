package node

import (
	"fmt"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/node/cashier"
	"kvasird/settle"
)

// TestIsServed: what is wanted, loaded or only kept is not served.
func TestIsServed(t *testing.T) {
	slice := gguf.Slice{Layers: gguf.Range{End: 2}, Experts: gguf.Range{End: 4}}
	for name, tt := range map[string]struct {
		news market.ModelNews
		want bool
	}{
		"has every byte":        {market.ModelNews{Full: true}, false},
		"runs it":               {market.ModelNews{Backbone: true}, true},
		"answers for others":    {market.ModelNews{Service: market.Service{Slots: 1}}, true},
		"experts":               {market.ModelNews{Holdings: []market.Holding{{Slice: slice, State: market.Serving}}}, true},
		"experts, loading":      {market.ModelNews{Holdings: []market.Holding{{Slice: slice, State: market.Loading}}}, false},
		"a window":              {market.ModelNews{Windows: []market.WindowHolding{{Layers: gguf.Range{End: 1}, State: market.Serving}}}, true},
		"a window, claimed":     {market.ModelNews{Windows: []market.WindowHolding{{Layers: gguf.Range{End: 1}, State: market.Claimed}}}, false},
		"experts, on the leave": {market.ModelNews{Holdings: []market.Holding{{Slice: slice, State: market.Leaving}}}, false},
	} {
		if got := isServed([]market.Holder{{News: &market.ModelNews{Full: true}}, {News: &tt.news}}); got != tt.want {
			t.Errorf("%s: served %v, want %v", name, got, tt.want)
		}
	}
	if isServed(nil) {
		t.Error("nobody serves it")
	}
}

// TestModelBookForgets: models that were made up do not stay for ever.
func TestModelBookForgets(t *testing.T) {
	b := &modelBook{known: map[string]cashier.Model{}, finding: map[settle.Node]string{}, find: func(id string) (cashier.Model, error) { return cashier.Model{Name: id}, nil }}
	for i := range 2 * maxKnown {
		must(b.model(fmt.Sprint("made up ", i), settle.Node{1}))(t)
	}
	if len(b.known) != maxKnown {
		t.Errorf("%d models are remembered, at most %d", len(b.known), maxKnown)
	}
}
