package place

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

func TestKeep(t *testing.T) {
	for _, c := range []struct {
		name   string
		sizes  []int64
		budget int64
		use    [][]float64
		held   [][]int32
		want   [][]int32
	}{
		{"nothing was used", []int64{10}, 100, nil, nil, [][]int32{nil}},
		{"all that was used fits", []int64{10}, 100, [][]float64{{1, 0, 3}}, nil, [][]int32{{0, 2}}},
		{"the most used", []int64{10}, 20, [][]float64{{1, 4, 3, 2}}, nil, [][]int32{{1, 2}}},
		{"of all layers", []int64{10, 10}, 40, [][]float64{{9, 1, 8}, {2, 7, 6}}, nil, [][]int32{{0, 2}, {1, 2}}},
		{"one of a layer takes two", []int64{10, 10}, 39, [][]float64{{9, 1, 8}, {2, 7, 6}}, nil, [][]int32{{0, 1, 2}, nil}},
		{"not even one", []int64{10}, 19, [][]float64{{9, 9}}, nil, [][]int32{nil}},
		{"most used for its bytes", []int64{30, 10}, 60, [][]float64{{12, 12, 12}, {5, 5, 5}}, nil, [][]int32{nil, {0, 1, 2}}},
		{"layers without experts", []int64{0, 10}, 20, [][]float64{{9}, {1, 2, 3}}, nil, [][]int32{nil, {1, 2}}},
		{"a little more is not enough", []int64{10}, 20, [][]float64{{100, 100, 120, 140}}, [][]int32{{0, 1}}, [][]int32{{0, 1}}},
		{"a lot more is", []int64{10}, 20, [][]float64{{100, 100, 150, 140}}, [][]int32{{0, 1}}, [][]int32{{0, 2}}},
		{"few counts say little", []int64{10}, 20, [][]float64{{4, 4, 8}}, [][]int32{{0, 1}}, [][]int32{{0, 1}}},
		{"what is unused stays while there is room", []int64{10}, 30, [][]float64{{0, 5, 0, 7}}, [][]int32{{0, 2}}, [][]int32{{0, 1, 3}}},
		{"held beyond what was counted", []int64{10}, 30, [][]float64{{1}}, [][]int32{{7, 9}}, [][]int32{{0, 7, 9}}},
		{"a smaller budget", []int64{10}, 20, [][]float64{{3, 2, 1}}, [][]int32{{0, 1, 2}}, [][]int32{{0, 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Room{c.sizes, c.budget}
			got := r.Keep(c.use, c.held)
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("kept %v, want %v", got, c.want)
			}
			if n := r.Bytes(got); n > c.budget {
				t.Errorf("%d bytes, budget %d", n, c.budget)
			}
		})
	}
}

// TestKeepComesToRest: with the same use, what was chosen is chosen again, and no budget is passed.
func TestKeepComesToRest(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 2000 {
		r := Room{Budget: rng.Int64N(3000)}
		var use [][]float64
		for range 1 + rng.IntN(6) {
			r.Sizes = append(r.Sizes, rng.Int64N(60))
			var row []float64
			for range rng.IntN(40) {
				row = append(row, float64(rng.IntN(3)*rng.IntN(100)))
			}
			use = append(use, row)
		}
		first := r.Keep(use, nil)
		if n := r.Bytes(first); n > r.Budget {
			t.Fatalf("%d: %d bytes, budget %d", i, n, r.Budget)
		}
		second := r.Keep(use, first)
		if third := r.Keep(use, second); !reflect.DeepEqual(second, third) {
			t.Fatalf("%d: %v, then %v", i, second, third)
		}
	}
}

// TestKeepUnderNoise: experts that are all used alike are fetched once, and hardly ever again; when
// the router moves on, the cache follows.
func TestKeepUnderNoise(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const experts = 64
	r := Room{Sizes: []int64{1}, Budget: experts / 4}
	use, fetched := make([]float64, experts), 0
	var held [][]int32
	round := func(pick func() int) (hit float64) {
		for e := range use {
			use[e] *= 0.9
		}
		n := 0
		for range 800 {
			e := pick()
			use[e]++
			if len(held) > 0 && slices.Contains(held[0], int32(e)) {
				n++
			}
		}
		next := r.Keep([][]float64{use}, held)
		for _, e := range next[0] {
			if len(held) == 0 || !slices.Contains(held[0], e) {
				fetched++
			}
		}
		held = next
		return float64(n) / 800
	}
	for range 200 {
		round(func() int { return rng.IntN(experts) })
	}
	even := fetched
	if even > 2*experts/4 {
		t.Errorf("%d experts fetched for %d places although all are used alike", even, experts/4)
	}
	var hit float64
	for range 30 {
		hit = round(func() int { return 40 + rng.IntN(experts/4) })
	}
	if hit < 1 {
		t.Errorf("hit rate %.2f after the router moved on", hit)
	}
	t.Logf("%d fetched under even use, %d after it moved on", even, fetched-even)
}
