package draft

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestLookUp(t *testing.T) {
	for _, tt := range []struct {
		name       string
		tokens     []int32
		at, length int
	}{
		{"empty", nil, 0, 0},
		{"nothing repeats", []int32{1, 2, 3, 4}, 0, 0},
		{"one token is not enough", []int32{1, 2, 3, 2}, 0, 0},
		{"two", []int32{1, 2, 3, 4, 1, 2}, 2, 2},
		{"the latest of equal length", []int32{1, 2, 3, 1, 2, 4, 1, 2}, 5, 2},
		{"the longest", []int32{9, 1, 2, 3, 1, 2, 4, 9, 1, 2}, 3, 3},
		{"overlaps itself", []int32{5, 5, 5}, 2, 2},
		{"no longer than needed", []int32{1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6}, 6, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if at, n := LookUp(tt.tokens); at != tt.at || n != tt.length {
				t.Errorf("got position %d, length %d, want %d, %d", at, n, tt.at, tt.length)
			}
		})
	}
}

func TestDraftRepeatsPeriod(t *testing.T) {
	d := Drafter{base: 1e6, extra: 1}
	got := d.Draft([]int32{7, 1, 2, 3, 1, 2, 3, 1}, 7)
	if want := []int32{2, 3, 1, 2, 3, 1, 2}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestDraftBounds(t *testing.T) {
	d := Drafter{base: 1e6, extra: 1}
	text := []int32{1, 2, 1, 2, 1, 2}
	for _, most := range []int{-1, 0} {
		if got := d.Draft(text, most); len(got) != 0 {
			t.Errorf("%d drafts where %d are allowed", len(got), most)
		}
	}
	for range 50 {
		d.Observe(Most, Most, time.Millisecond)
	}
	if got := d.Draft(text, 1000); len(got) != Most {
		t.Errorf("%d drafts, want %d", len(got), Most)
	}
	if got := new(Drafter).Draft(text, 5); len(got) != 0 {
		t.Errorf("%d drafts before a round was measured", len(got))
	}
}

// Simulated rounds: what a draft costs and how often it is right decide how many there are.
func TestDraftPays(t *testing.T) {
	for _, tt := range []struct {
		name        string
		accept      float64 // of each draft
		extra       float64 // time of a draft, of that of a round
		least, most float64 // drafts per round in the end
	}{
		{"free and right", 1, 0, 14, 16},
		{"free and often right", 0.8, 0.01, 6, 16},
		{"costly and right", 0.99, 0.3, 4, 16},
		{"costly and seldom right", 0.2, 0.3, 0, 0.6},
		{"never right", 0, 0.05, 0, 0.6},
		{"a draft costs a round", 0.9, 1, 0, 0.6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			var d Drafter
			text := []int32{1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3}
			drafted, tokens, spent := 0, 0, 0.0
			const rounds = 400
			for i := range 2 * rounds {
				k := len(d.Draft(text, Most))
				n := 0
				for n < k && r.Float64() < tt.accept {
					n++
				}
				took := 1 + tt.extra*float64(k)
				d.Observe(k, n, time.Duration(took*1e6))
				if i >= rounds {
					drafted, tokens, spent = drafted+k, tokens+n+1, spent+took
				}
			}
			if mean := float64(drafted) / rounds; mean < tt.least || mean > tt.most {
				t.Errorf("%.2f drafts per round, want %v to %v", mean, tt.least, tt.most)
			}
			if speed := float64(tokens) / spent; speed < 0.93 {
				t.Errorf("%.2f times the speed of no drafts", speed)
			}
		})
	}
}
