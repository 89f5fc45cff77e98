package place

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func block(fromLayer, toLayer, from, to int32) []Block {
	return []Block{{fromLayer, toLayer, from, to}}
}

func TestChoose(t *testing.T) {
	near, far := block(0, 2, 0, 8), block(0, 2, 4, 12)
	tests := []struct {
		name           string
		list           []Candidate
		replicas, most int
		want           []int
	}{
		{"none", nil, 2, 4, []int{}},
		{"all of few", []Candidate{{9, near}, {1, nil}, {5, near}}, 1, 3, []int{0, 1, 2}},
		{"the nearest of equals", []Candidate{{9, near}, {1, near}, {5, near}}, 1, 1, []int{1}},
		{"the far one that alone holds some", []Candidate{{1, near}, {2, near}, {900, far}}, 2, 2, []int{0, 2}},
		{"a second holder before a useless peer", []Candidate{{1, near}, {2, nil}, {3, near}, {4, near}}, 2, 2, []int{0, 2}},
		{"what is left by cost", []Candidate{{4, near}, {3, nil}, {2, nil}, {1, near}}, 1, 3, []int{1, 2, 3}},
		{"too few for all", []Candidate{{1, near}, {2, far}, {3, block(5, 6, 0, 1)}}, 1, 2, []int{0, 1}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := Choose(test.list, test.replicas, test.most); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// TestChooseCovers has every expert that somebody holds be held by a chosen one, where the number
// allows it.
func TestChooseCovers(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for range 300 {
		var list []Candidate
		for range 100 {
			from := rng.Int32N(56)
			list = append(list, Candidate{rng.Float32(), block(0, 3, from, from+8)})
		}
		chosen := Choose(list, 2, 64)
		if len(chosen) != 64 || !slices.IsSorted(chosen) {
			t.Fatalf("%d chosen: %v", len(chosen), chosen)
		}
		holds := func(i int, e int32) bool { b := list[i].Blocks[0]; return b.From <= e && e < b.To }
		for e := range int32(64) {
			held := slices.ContainsFunc(list, func(c Candidate) bool { return c.Blocks[0].From <= e && e < c.Blocks[0].To })
			if got := slices.ContainsFunc(chosen, func(i int) bool { return holds(i, e) }); got != held {
				t.Fatalf("expert %d: held %v, by a chosen one %v", e, held, got)
			}
		}
	}
}
