package settle

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func randomParts(r *rand.Rand) []Part {
	parts := make([]Part, 1+r.IntN(120))
	for i := range parts {
		parts[i] = Part{Weight: r.Uint64N(1 << (1 + r.IntN(40))), PerToken: 1 + r.Uint64N(8)}
	}
	parts[r.IntN(len(parts))].Weight++
	return parts
}

// Test 2: the shares of any manifest sum to one, however its parts are cut.
func TestSharesSumToOne(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 3000 {
		parts := randomParts(r)
		whole, err := PartShares(parts)
		if err != nil {
			t.Fatal(err)
		}
		var sum Share
		for _, s := range whole {
			sum += s
		}
		if sum != Whole {
			t.Fatalf("%v sum to %d", parts, sum)
		}
		// A window cut anywhere is worth its two sides, as the manifest's own cut shows.
		i := r.IntN(len(parts))
		a := r.Uint64N(parts[i].Weight + 1)
		cut := append(append([]Part(nil), parts[:i]...), Part{a, 1}, Part{parts[i].Weight - a, 1})
		finer, err := PartShares(append(cut, parts[i+1:]...))
		if err != nil || finer[i]+finer[i+1] != whole[i] {
			t.Fatalf("part %d of share %d cut in %d + %d: %v", i, whole[i], finer[i], finer[i+1], err)
		}
	}
}

func randomWork(r *rand.Rand, parts []Part, tokens uint64, nodes int) []Work {
	work := make([]Work, nodes)
	for i := range work {
		work[i].Worker = Node{byte(i), 1}
	}
	for p := range parts {
		left := tokens * parts[p].PerToken
		for i := range work {
			if units := r.Uint64N(left + 1); units > 0 && r.IntN(3) > 0 {
				work[i].Lines = append(work[i].Lines, Line{uint32(p), units})
				left -= units
			}
		}
	}
	return work
}

// Test 2 again: one identity that splits into many never has more.
func TestSplittingAnIdentityGainsNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	for range 2000 {
		parts := randomParts(r)
		tokens := 1 + r.Uint64N(1<<(1+r.IntN(20)))
		work := randomWork(r, parts, tokens, 1+r.IntN(6))
		before, rest, err := Shares(parts, tokens, work)
		if err != nil {
			t.Fatal(err)
		}
		sum := rest
		for _, s := range before {
			sum += s.Share
		}
		if sum != Whole {
			t.Fatalf("sum %d", sum)
		}
		split := work[0] // its lines go to three nodes, each line cut anywhere
		sybils := []Work{{Worker: Node{200}}, {Worker: Node{0}}, {Worker: Node{100}}}
		for _, l := range split.Lines {
			a := r.Uint64N(l.Units + 1)
			b := r.Uint64N(l.Units - a + 1)
			for i, u := range []uint64{a, b, l.Units - a - b} {
				if u > 0 {
					sybils[i].Lines = append(sybils[i].Lines, Line{l.Part, u})
				}
			}
		}
		after, _, err := Shares(parts, tokens, append(sybils, work[1:]...))
		if err != nil {
			t.Fatal(err)
		}
		var one, many Share
		for _, s := range before {
			if s.Worker == split.Worker {
				one = s.Share
			}
		}
		for _, s := range after {
			if s.Worker == sybils[0].Worker || s.Worker == sybils[1].Worker || s.Worker == sybils[2].Worker {
				many += s.Share
			}
		}
		if many > one {
			t.Fatalf("%d as one, %d as three", one, many)
		}
	}
}

func TestSharesGolden(t *testing.T) {
	// Embedding with the head 10, then a layer: dense 30, experts 60 (4 used per token).
	parts := []Part{{10, 1}, {30, 1}, {60, 4}}
	backbone, a, b := Node{1}, Node{2}, Node{3}
	work := []Work{
		{b, []Line{{2, 300}}},
		{backbone, []Line{{0, 100}, {1, 100}}},
		{a, []Line{{2, 100}}},
	}
	got, rest, err := Shares(parts, 100, work)
	if err != nil || rest != 0 || len(got) != 3 ||
		got[0] != (WorkShare{backbone, 400_000_000}) || got[1] != (WorkShare{a, 150_000_000}) || got[2] != (WorkShare{b, 450_000_000}) {
		t.Errorf("%v, rest %d, %v", got, rest, err)
	}
	// Work that is not shown goes to the pool, and to nobody who showed theirs.
	if got, rest, err := Shares(parts, 100, work[:1]); err != nil || rest != 550_000_000 || got[0].Share != 450_000_000 {
		t.Errorf("%v, rest %d, %v", got, rest, err)
	}
}

func TestSharesRefuse(t *testing.T) {
	good := []Part{{1, 1}, {1, 1}}
	for _, tt := range []struct {
		parts []Part
		lines []Line
		want  error
	}{
		{nil, nil, ErrParts}, {make([]Part, MaxParts+1), nil, ErrParts}, {[]Part{{0, 1}}, nil, ErrParts},
		{[]Part{{1 << 63, 1}, {1 << 63, 1}}, nil, ErrParts}, {[]Part{{1, 0}}, nil, ErrParts}, {[]Part{{1, MaxPerToken + 1}}, nil, ErrParts},
		{good, []Line{{2, 1}}, ErrLines}, {good, []Line{{^uint32(0), 1}}, ErrLines}, {good, []Line{{1, 1}, {0, 1}}, ErrLines},
		{good, []Line{{1, 1}, {1, 1}}, ErrLines}, {good, []Line{{0, 0}}, ErrLines},
		{good, []Line{{0, 9}}, nil}, {good, []Line{{0, 10}}, ErrTooMuchWork}, {good, []Line{{0, ^uint64(0)}}, ErrTooMuchWork},
	} {
		if _, _, err := Shares(tt.parts, 9, []Work{{Node{1}, tt.lines}}); !errors.Is(err, tt.want) {
			t.Errorf("%d parts, %v: %v", len(tt.parts), tt.lines, err)
		}
	}
	twice := []Work{{Node{1}, []Line{{0, 5}}}, {Node{2}, []Line{{0, 5}}}}
	if _, _, err := Shares(good, 9, twice); !errors.Is(err, ErrTooMuchWork) {
		t.Errorf("10 units of 9 tokens: %v", err)
	}
	if _, _, err := Shares(good, 2*MaxTokens+1, nil); !errors.Is(err, ErrTooMuchWork) {
		t.Errorf("too many tokens: %v", err)
	}
}
