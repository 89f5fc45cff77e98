package node

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/ring/plan"
)

// moeShape is that of the model which TestPlanNodes plans for: the last of its layers
// does not compute.
var moeShape = market.Shape{Layers: 9, Experts: 16, MoE: []gguf.Range{{End: 9}}}

func layers(begin, end int) gguf.Range { return gguf.Range{Begin: begin, End: end} }

// TestPlanNodes: what announcements become in a plan.
func TestPlanNodes(t *testing.T) {
	id, other := gguf.ModelID{1}, gguf.ModelID{2}
	about := planSubject{id: id, shape: moeShape, layers: 8, experts: 16, overhead: 100}
	says := func(memory, disk uint64, m market.Machine, models ...market.ModelNews) *market.Announcement {
		return &market.Announcement{Capacity: market.Capacity{FreeMemory: memory, FreeDisk: disk}, Machine: &m, Models: models}
	}
	news := market.ModelNews{ID: id, Shape: moeShape, Memory: 30}
	window := news
	window.Windows = []market.WindowHolding{
		{Layers: layers(5, 9), State: market.Serving}, {Layers: layers(0, 2), State: market.Claimed, Lease: time.Minute},
	}
	without := window
	without.Dense = true
	experts := news
	experts.Holdings = []market.Holding{
		{Slice: gguf.Slice{Layers: layers(0, 9), Experts: layers(4, 8)}, State: market.Leaving},
		{Slice: gguf.Slice{Layers: layers(8, 9), Experts: layers(8, 9)}, State: market.Serving}, // of no layer that computes
		{Slice: gguf.Slice{Layers: layers(0, 1), Experts: layers(8, 9)}, State: market.Loading, Lease: time.Minute},
	}
	backbone := news
	backbone.Backbone = true
	full := news
	full.Full = true
	liar := window
	liar.Shape.Layers = 10
	stranger := window
	stranger.ID = other
	fast := market.Machine{Cores: 4, Bytes: 5e9, Batch: 6e9, Layer: 7 * time.Microsecond, Up: 10, Down: 20, Call: time.Millisecond}
	for _, tt := range []struct {
		name string
		a    *market.Announcement
		want plan.Node
		has  string
	}{
		{"memory and speed", says(50, 60, fast), plan.Node{RAM: 150, Disk: 60, Cores: 4, Up: 10, Down: 20, Call: time.Millisecond,
			CPU: plan.Speed{Bytes: 5e9, Batch: 6e9, Layer: 7 * time.Microsecond}}, ""},
		{"a window", says(50, 60, market.Machine{}, window), plan.Node{RAM: 180, Disk: 60,
			Held: []plan.Piece{{Layers: layers(5, 8), Dense: true, Experts: layers(0, 16)}}}, "layers 5:8"},
		{"a window without experts", says(0, 60, market.Machine{}, without), plan.Node{RAM: 130, Disk: 60,
			Held: []plan.Piece{{Layers: layers(5, 8), Dense: true}}}, "dense part of layers 5:8"},
		{"experts", says(0, 60, market.Machine{}, experts), plan.Node{RAM: 130, Disk: 60,
			Held: []plan.Piece{{Layers: layers(0, 8), Experts: layers(4, 8)}}}, "experts 4:8 of layers 0:8"},
		{"a backbone", says(0, 60, market.Machine{}, backbone), plan.Node{RAM: 130, Disk: 60,
			Held: []plan.Piece{{Layers: layers(0, 8), Dense: true}}}, "dense part of layers 0:8"},
		{"on a GPU", says(50, 60, market.Machine{VRAM: 70}, full), plan.Node{RAM: 150, VRAM: 100, Disk: 60, Has: true}, "all"},
		{"a model of another shape", says(50, 60, market.Machine{}, liar), plan.Node{RAM: 150, Disk: 60}, ""},
		{"another model", says(50, 60, market.Machine{}, stranger), plan.Node{RAM: 150, Disk: 60}, ""},
	} {
		tt.want.Name = "…12345678"
		nodes, peers := about.planNodes("me", []market.Author{{Peer: "12D3KooW12345678", News: tt.a}})
		if len(nodes) != 1 || !reflect.DeepEqual(nodes[0], tt.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", tt.name, nodes, tt.want)
		}
		if len(peers) != 1 || peers[0].Has != tt.has || peers[0].Memory != tt.want.RAM-100 || peers[0].LeftOut != "" {
			t.Errorf("%s: %+v, want it to have %q", tt.name, peers, tt.has)
		}
	}
	about.id = gguf.ModelID{}
	zero := window
	zero.ID = gguf.ModelID{}
	if nodes, _ := about.planNodes("me", []market.Author{{Peer: "peer", News: says(50, 60, market.Machine{}, zero)}}); nodes[0].Held != nil {
		t.Errorf("of a model that nobody knows %+v is held", nodes[0].Held)
	}
}

// TestPlanLeavesOut: who cannot be planned with is named, with the reason.
func TestPlanLeavesOut(t *testing.T) {
	gives := func(n uint64) *market.Announcement {
		return &market.Announcement{Capacity: market.Capacity{FreeMemory: n}, Machine: &market.Machine{}}
	}
	authors := []market.Author{
		{Peer: "old-version", News: &market.Announcement{Capacity: market.Capacity{FreeMemory: 9}}},
		{Peer: "says-nothing"}, {Peer: "full-machine", News: gives(0)}, {Peer: "me", News: gives(1)},
		{Peer: "one-of-the-same-end", News: gives(5)}, {Peer: "two-of-the-same-end", News: gives(6)},
	}
	for i := range plan.MaxNodes {
		authors = append(authors, market.Author{Peer: fmt.Sprintf("crowd-%08d", i), News: gives(uint64(2000 - i))})
	}
	nodes, peers := planSubject{overhead: 100}.planNodes("me", authors)
	if len(nodes) != plan.MaxNodes || nodes[0].Name != hereName || nodes[1].Name != "…00000000" {
		t.Errorf("%d nodes, first %+v", len(nodes), nodes[:2])
	}
	if len(peers) != len(authors) {
		t.Errorf("%d of %d nodes are spoken of", len(peers), len(authors))
	}
	var text strings.Builder
	writePeers(&text, peers)
	for _, want := range []string{
		"…-version is left out: it says nothing of its memory", "…-nothing is left out: it has announced nothing",
		"…-machine is left out: it gives no memory", "…same-end is left out: a plan takes at most 64",
		"one-of-the-same-end is left out", "…00000063 is left out: a plan takes", "this machine  1 bytes",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	names := map[string]bool{}
	for _, p := range peers {
		if names[p.Name] {
			t.Errorf("two nodes are called %s", p.Name)
		}
		names[p.Name] = true
	}
}

func TestPickModel(t *testing.T) {
	a, b := gguf.ModelID{0xab, 0xcd, 1}, gguf.ModelID{0xab, 0xcd, 2}
	names := map[gguf.ModelID][]string{a: {"tiny", "small"}, b: {"", "large", "twin"}, {0xff}: {"twin"}}
	absent := gguf.ModelID{0xee}
	for _, tt := range []struct {
		name string
		want gguf.ModelID
		err  string
	}{
		{"tiny", a, ""}, {"small", a, ""}, {"large", b, ""}, {"abcd01", a, ""}, {b.String(), b, ""},
		{absent.String(), absent, ""}, // somebody may come who has it
		{"twin", a, "2 models"}, {"abcd", a, "2 models"}, {"abc", a, `no model "abc"`}, {"", a, `no model ""`},
	} {
		if tt.name == "" {
			delete(names, b) // a name that nobody told
		}
		got, err := pickModel(tt.name, names)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%q: %v, %v, want %q", tt.name, got, err, tt.err)
			}
		} else if err != nil || got != tt.want {
			t.Errorf("%q: %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
	if !slices.Contains(names[a], "tiny") {
		t.Error("names are changed")
	}
}
