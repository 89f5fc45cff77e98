package experts

import (
	"math/rand/v2"
	"testing"
)

// TestSpans compares the operations with sets.
func TestSpans(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	random := func() (list []span) {
		for range rng.IntN(5) {
			from := rng.Int32N(30)
			list = append(list, span{from, from + 1 + rng.Int32N(8)})
		}
		return union(list, nil)
	}
	for range 5000 {
		a, b := random(), random()
		or, and, not := union(a, b), intersect(a, b), subtract(a, b)
		for e := int32(-1); e < 40; e++ {
			x, y := contains(a, e), contains(b, e)
			if contains(or, e) != (x || y) || contains(and, e) != (x && y) || contains(not, e) != (x && !y) {
				t.Fatalf("%v and %v: union %v, intersection %v, difference %v at %d", a, b, or, and, not, e)
			}
		}
		for _, list := range [][]span{or, and, not} {
			for i, s := range list {
				if s.from >= s.to || i > 0 && s.from < list[i-1].to {
					t.Fatalf("%v and %v: %v is not a list of spans", a, b, list)
				}
			}
		}
	}
}
