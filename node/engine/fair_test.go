//go:build cgo

package engine

import (
	"errors"
	"testing"
)

// TestFair: one owner's fifty waiting requests delay another's single one by no
// more than one turn.
func TestFair(t *testing.T) {
	e := open(t, Config{Sequences: 1, Queue: 60})
	ask := func(owner string) *Generation {
		req := endless(t, e, questions[0], 20)
		req.Owner = owner
		return start(t, t.Context(), e, req)
	}
	var many []*Generation
	for range 51 { // one of them runs
		many = append(many, ask("many"))
	}
	single, other := ask("single"), ask("other")
	served := func() (n int) {
		for _, g := range many {
			if !g.generatedNone() {
				n++
			}
		}
		return n
	}
	before := served() // while they were queued
	for name, g := range map[string]*Generation{"single": single, "other": other} {
		if _, err := g.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := served() - before; n > 3 { // the one that ran, its turn, and one that came while this test looked
			t.Errorf("%s is served after %d of the others", name, n)
		}
	}
	for _, g := range append(many, single, other) {
		answerOf(t, g)
	}
}

// TestQueueShare: one owner cannot fill the queue; with others it may be full.
func TestQueueShare(t *testing.T) {
	e := open(t, Config{Sequences: 1, Queue: 3, Context: 2048})
	ask := func(owner string) error {
		req := endless(t, e, questions[0], 0)
		req.Owner = owner
		_, err := e.Start(t.Context(), req)
		return err
	}
	if err := ask("a"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first runs", func() bool { return e.Stats().Running == 1 })
	for _, tt := range []struct {
		owner     string
		full, own bool
	}{{"a", false, false}, {"a", false, false}, {"a", true, true}, {"b", false, false}, {"c", true, false}, {"a", true, false}} {
		err := ask(tt.owner)
		var full *QueueFullError
		if errors.As(err, &full) != tt.full || tt.full && full.Own != tt.own || !tt.full && err != nil {
			t.Errorf("%s, %+v waiting: %v", tt.owner, e.Stats().Waiting, err)
		}
	}
	if err := e.Canary(t.Context()); err != nil || e.Stats().Running != 1 {
		t.Errorf("a canary beside a full queue: %v, %d run", err, e.Stats().Running)
	}
}
