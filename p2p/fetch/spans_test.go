package fetch

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// set is the reference: one bool for each unit.
type set [64]bool

func (s set) spans() (out []Span) {
	for i := range s {
		if s[i] {
			out = merge(append(out, Span{int64(i), 1}))
		}
	}
	return out
}

func setOf(spans []Span) (s set) {
	for _, t := range spans {
		for i := t.Off; i < t.End(); i++ {
			s[i] = true
		}
	}
	return s
}

func TestSpans(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func() (s set) {
		for range rng.IntN(6) {
			off := rng.IntN(60)
			for i := range rng.IntN(12) {
				s[min(off+i, 63)] = true
			}
		}
		return s
	}
	for range 20000 {
		a, b := random(), random()
		as, bs := a.spans(), b.spans()
		var minus, both set
		for i := range a {
			minus[i] = a[i] && !b[i]
			both[i] = a[i] && b[i]
		}
		if got := subtract(as, bs); !slices.Equal(got, minus.spans()) {
			t.Fatalf("%v without %v: %v", as, bs, got)
		}
		limit := 1 + rng.Int64N(8)
		got, ok := first(as, bs, limit)
		want := both.spans()
		if ok != (len(want) > 0) || ok && (got.Off != want[0].Off || got.Len != min(limit, want[0].Len)) {
			t.Fatalf("first %d of %v and %v: %v", limit, as, bs, got)
		}
		s := Span{rng.Int64N(60), 1 + rng.Int64N(4)}
		if got, want := covers(as, s), subtract([]Span{s}, as) == nil; got != want {
			t.Fatalf("%v covers %v: %v", as, s, got)
		}
		if got := setOf(merge(append(slices.Clone(as), bs...))); got != setOf(append(slices.Clone(as), bs...)) {
			t.Fatalf("merge %v and %v: %v", as, bs, got)
		}
	}
}

func TestAlign(t *testing.T) {
	const size = 4*Group + 7
	tests := []struct {
		name     string
		in, want []Span
	}{
		{"nothing", nil, nil},
		{"empty", []Span{{5, 0}, {5, -1}}, nil},
		{"one byte", []Span{{Group, 1}}, []Span{{Group, Group}}},
		{"two that meet", []Span{{2 * Group, 1}, {1, Group}}, []Span{{0, 3 * Group}}},
		{"the end", []Span{{size - 1, 1}}, []Span{{4 * Group, 7}}},
		{"behind the end", []Span{{size, 1}, {math.MaxInt64, math.MaxInt64}}, nil},
		{"beyond the end", []Span{{3 * Group, math.MaxInt64}}, []Span{{3 * Group, Group + 7}}},
		{"before the start", []Span{{-5, 6}}, []Span{{0, Group}}},
		{"all before the start", []Span{{-5, 5}}, nil},
	}
	for _, tt := range tests {
		if got := align(tt.in, size); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
