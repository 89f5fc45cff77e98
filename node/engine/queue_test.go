package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestQueueTurns: owners take turns, each one's requests stay in their order.
func TestQueueTurns(t *testing.T) {
	tests := []struct{ script, want string }{ // A1 pushes, - pops, A1! is gone
		{"A1 A2 A3 - - - -", "A1 A2 A3 nil"},
		{"A1 A2 A3 B1 C1 - - - - -", "A1 B1 C1 A2 A3"},
		{"A1 A2 - B1 - -", "A1 A2 B1"},
		{"A1 A2 B1 - A3 B2 - - - -", "A1 B1 A2 B2 A3"},
		{"A1 B1 - A2 - -", "A1 B1 A2"},
		{"A1 A2 B1 C1 A1! C1! - - -", "A2 B1 nil"},
		{"A1 B1 A1! A2 - -", "B1 A2"},
		{"A1 A1! - A2 -", "nil A2"},
	}
	for _, tt := range tests {
		var q queue[*Generation]
		var got []string
		made := map[string]*Generation{}
		for _, step := range strings.Fields(tt.script) {
			name, gone := strings.CutSuffix(step, "!")
			switch {
			case step == "-":
				if g := q.pop(); g == nil {
					got = append(got, "nil")
				} else {
					got = append(got, g.finish)
				}
			case gone:
				q.drop(func(g *Generation) bool { return g == made[name] })
			default:
				made[step] = &Generation{owner: step[:1], finish: step}
				q.push(made[step])
			}
		}
		if want := strings.Fields(tt.want); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", tt.script, got, want)
		}
		if n := q.of("A") + q.of("B") + q.of("C"); n != q.n {
			t.Errorf("%s: %d requests, counted %d", tt.script, n, q.n)
		}
	}
}

// TestQueueDelay: whoever comes with one request is served after at most one of
// every other owner, however many those have.
func TestQueueDelay(t *testing.T) {
	for others := 1; others <= 4; others++ {
		var q queue[*Generation]
		for i := range 50 {
			for o := range others {
				q.push(&Generation{owner: fmt.Sprint(o), left: i})
			}
		}
		for range 3 {
			q.pop()
		}
		single := &Generation{owner: "single"}
		q.push(single)
		for turn := 0; q.pop() != single; turn++ {
			if turn == others {
				t.Fatalf("with %d others the single one waits longer than %d turns", others, turn)
			}
		}
	}
}
