package node

import (
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"kvasird/market"
)

func TestAmong(t *testing.T) {
	serves := func(peer string, state market.State, from, to int) market.Holder {
		return market.Holder{Peer: peer, News: &market.ModelNews{Holdings: []market.Holding{{
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
		{"one is leaving", []market.Holder{a, b, serves("c1", market.Leaving, 0, 64)}, 2},
		{"one has not loaded yet", []market.Holder{a, b, serves("c1", market.Loading, 0, 64)}, 2},
		{"one holds less", []market.Holder{a, b, serves("c1", market.Serving, 1, 64)}, 2},
		{"more than it serves itself", []market.Holder{serves("a1", market.Serving, 0, 8), b, serves("c1", market.Serving, 0, 9)}, 3},
		{"it runs the model", []market.Holder{runs, b, c}, 0},
		{"it answers for others", []market.Holder{answers, b, c}, 0},
		{"it only loads", []market.Holder{serves("a1", market.Loading, 0, 64), b, c}, 0},
	}
	for _, tt := range tests {
		if got := among(tt.list, "a1", func(peer string) string { return strings.TrimRight(peer, "0123456789") }); got != tt.want {
			t.Errorf("%s: got %d, want %d", tt.name, got, tt.want)
		}
	}
}
