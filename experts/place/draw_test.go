package place

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestRank holds the ranks to literal numbers, which sha256sum gave.
func TestRank(t *testing.T) {
	var seed Seed
	for i := range seed {
		seed[i] = 1
	}
	tests := []struct {
		layer int32
		peer  string
		want  uint64
	}{
		{3, "ana", 0xe5134440f5bca47b},
		{4, "ana", 0x0abd0e22d3f52afa},
		{3, "12D3KooWGRUVh7Xk3pGkNNtv9gmnJ7pX3n5gUuKfLQnq9uYw1kVb", 0x49681fde8b02dc4b},
	}
	for _, tt := range tests {
		if got := Rank(&seed, tt.layer, tt.peer); got != tt.want {
			t.Errorf("layer %d, peer %s: got %#x, want %#x", tt.layer, tt.peer, got, tt.want)
		}
	}
}

// drawn makes so many equal holders of all experts, those with an odd index slower.
func drawn(n int) (peers []Peer, replicas []Replica) {
	for i := range n {
		peers = append(peers, Peer{Base: 100 + 50*float32(i%2), PerPair: 20})
		replicas = append(replicas, Replica{Peer: int32(i), From: 0, To: 256})
	}
	return peers, replicas
}

func rankAll(peers []Peer, seed *Seed, layer int32) {
	for i := range peers {
		peers[i].Rank = Rank(seed, layer, fmt.Sprint("peer", i))
	}
}

// TestDrawIsEven has every one of the best be drawn equally often over seeds, and over layers of
// one seed, and nobody else.
func TestDrawIsEven(t *testing.T) {
	peers, replicas := drawn(8)
	var p Planner
	rng := rand.New(rand.NewPCG(5, 6))
	count := make([]int, len(peers))
	choice := make([]int32, 1)
	const rounds = 40_000
	var seed Seed
	for i := range rounds {
		if i%4 == 0 {
			for k := range seed {
				seed[k] = byte(rng.Uint32())
			}
		}
		rankAll(peers, &seed, int32(i%4))
		p.Draw(4, peers, replicas, []int32{7}, choice)
		count[choice[0]]++
	}
	for i, n := range count {
		want := 0
		if i%2 == 0 { // the four fast ones
			want = rounds / 4
		}
		if n < want*95/100 || n > want*105/100 {
			t.Errorf("peer %d was drawn %d times, want about %d", i, n, want)
		}
	}
}

// TestDrawInvariants compares with Plan and with a slow reference: what is covered is the same,
// and each expert goes to the highest rank among the best of its holders.
func TestDrawInvariants(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	var p, q Planner
	for range 2000 {
		peers, replicas, experts := randomCall(rng)
		replicas = append(replicas, replicas[rng.IntN(len(replicas))]) // a peer that says a thing twice
		rankAll(peers, &Seed{byte(rng.Uint32()), byte(rng.Uint32())}, rng.Int32N(9))
		most := 1 + rng.IntN(6)
		choice, plain := make([]int32, len(experts)), make([]int32, len(experts))
		missing := p.Draw(most, peers, replicas, experts, choice)
		if want := q.Plan(peers, replicas, experts, plain); missing != want {
			t.Fatalf("%d missing, a plan has %d", missing, want)
		}
		for i, e := range experts {
			pairs := 0
			for _, o := range experts {
				if o == e {
					pairs++
				}
			}
			if want := slowDraw(most, peers, replicas, e, pairs); choice[i] != want {
				t.Fatalf("expert %d went to %d, want %d", e, choice[i], want)
			}
		}
	}
}

func slowDraw(most int, peers []Peer, replicas []Replica, expert int32, pairs int) int32 {
	var list []int32
	for i := range peers {
		if expert >= 0 && expert < MaxExpert && !peers[i].Avoid && slices.ContainsFunc(replicas, func(r Replica) bool {
			return r.Peer == int32(i) && r.From <= expert && expert < r.To
		}) {
			list = append(list, int32(i))
		}
	}
	at := func(i int32) float32 { return peers[i].Base + peers[i].PerPair*float32(peers[i].Queued+int32(pairs)) }
	slices.SortStableFunc(list, func(a, b int32) int {
		switch {
		case at(a) < at(b):
			return -1
		case at(a) > at(b):
			return 1
		}
		return 0
	})
	list = list[:min(most, len(list))]
	if len(list) == 0 {
		return Missing
	}
	return slices.MaxFunc(list, func(a, b int32) int {
		if peers[a].Rank < peers[b].Rank {
			return -1
		}
		return 1
	})
}

// TestDrawLosesOnlyWhatIsLost: without a peer, nothing moves but what it had.
func TestDrawLosesOnlyWhatIsLost(t *testing.T) {
	peers, replicas := drawn(4)
	experts := []int32{1, 2, 3}
	before, after := make([]int32, 3), make([]int32, 3)
	var p Planner
	for i := range 200 {
		rankAll(peers, &Seed{byte(i)}, 0)
		p.Draw(4, peers, replicas, experts, before)
		for lost := range peers {
			peers[lost].Avoid = true
			p.Draw(4, peers, replicas, experts, after)
			peers[lost].Avoid = false
			if moved := !slices.Equal(before, after); moved != (before[0] == int32(lost)) {
				t.Fatalf("peer %d was lost: %v became %v", lost, before, after)
			}
		}
	}
}

func TestAmong(t *testing.T) {
	whole := Block{0, 4, 0, 64}
	all := []Block{whole}
	tests := []struct {
		name    string
		holders []Holder
		of      Block
		want    int
	}{
		{"nobody", nil, whole, 0},
		{"nothing", []Holder{{"a", all}}, Block{}, 0},
		{"three", []Holder{{"a", all}, {"b", all}, {"c", all}}, whole, 3},
		{"two of one owner", []Holder{{"a", all}, {"b", all}, {"b", all}}, whole, 2},
		{"one lacks an expert", []Holder{{"a", all}, {"b", all}, {"c", []Block{{0, 4, 0, 63}}}}, whole, 2},
		{"one lacks a layer", []Holder{{"a", all}, {"b", all}, {"c", []Block{{0, 3, 0, 64}}}}, whole, 2},
		{"outside of what is asked", []Holder{{"a", all}, {"b", all}, {"c", []Block{{0, 3, 0, 64}}}}, Block{1, 3, 0, 64}, 3},
		{"in pieces", []Holder{{"a", all}, {"b", []Block{{0, 4, 0, 32}, {0, 2, 32, 64}, {2, 4, 32, 64}}}}, whole, 2},
		{"a hole inside", []Holder{{"a", all}, {"b", []Block{{0, 4, 0, 30}, {0, 4, 31, 64}}}}, whole, 1},
		{"one owner in blocks that overlap", []Holder{{"a", all}, {"a", []Block{{0, 4, 8, 16}}}, {"b", all}}, whole, 2},
		{"the last expert of one only", []Holder{{"a", all}, {"b", []Block{{0, 4, 0, 63}}}}, Block{0, 4, 63, 64}, 1},
		{"before the first", []Holder{{"a", []Block{{0, 4, 1, 64}}}}, whole, 0},
		{"beyond the model", []Holder{{"a", []Block{{-5, 1 << 30, -5, 1 << 30}}}}, whole, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Among(tt.holders, tt.of); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

// TestAmongEqualsCounting compares with counting every expert of every layer.
func TestAmongEqualsCounting(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 4))
	span := func(n int32) (from, to int32) { from = rng.Int32N(n); return from, from + rng.Int32N(n) }
	for range 500 {
		var holders []Holder
		for range rng.IntN(6) {
			h := Holder{Owner: string(rune('a' + rng.IntN(4)))}
			for range 1 + rng.IntN(3) {
				var b Block
				b.FromLayer, b.ToLayer = span(4)
				b.From, b.To = span(8)
				h.Blocks = append(h.Blocks, b)
			}
			holders = append(holders, h)
		}
		var of Block
		of.FromLayer, of.ToLayer = span(4)
		of.From, of.To = span(8)
		want := -1
		for l := of.FromLayer; l < of.ToLayer; l++ {
			for e := of.From; e < of.To; e++ {
				have := map[string]bool{}
				for _, h := range holders {
					for _, b := range h.Blocks {
						if b.FromLayer <= l && l < b.ToLayer && b.From <= e && e < b.To {
							have[h.Owner] = true
						}
					}
				}
				if want < 0 || len(have) < want {
					want = len(have)
				}
			}
		}
		if got := Among(holders, of); got != max(want, 0) {
			t.Fatalf("%+v of %+v: got %d, want %d", of, holders, got, max(want, 0))
		}
	}
}

func TestDrawDoesNotAllocate(t *testing.T) {
	planner, peers, replicas, experts, choice := decode()
	seed := &Seed{1}
	if n := testing.AllocsPerRun(100, func() {
		for i := range peers {
			peers[i].Rank = Rank(seed, 2, "12D3KooWGRUVh7Xk3pGkNNtv9gmnJ7pX3n5gUuKfLQnq9uYw1kVb")
		}
		planner.Draw(4, peers, replicas, experts, choice)
	}); n != 0 {
		t.Errorf("%v allocations per draw", n)
	}
}

func BenchmarkDrawOneToken(b *testing.B) {
	planner, peers, replicas, experts, choice := decode()
	seed := &Seed{1}
	b.ReportAllocs()
	for b.Loop() {
		for i := range peers {
			peers[i].Rank = Rank(seed, 2, "12D3KooWGRUVh7Xk3pGkNNtv9gmnJ7pX3n5gUuKfLQnq9uYw1kVb")
		}
		planner.Draw(4, peers, replicas, experts, choice)
	}
}
