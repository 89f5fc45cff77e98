//go:build cgo

package engine

import (
	"slices"
	"sync/atomic"
	"testing"
)

// TestServed: a request's rows are told once, computed or cached, but for the last token of
// its answer, which has none; canaries are not told.
func TestServed(t *testing.T) {
	var computed, cached atomic.Int64
	e := open(t, Config{Context: 512, Sequences: 2, Served: func(c, k int) { computed.Add(int64(c)); cached.Add(int64(k)) }})
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	if computed.Load()+cached.Load() != 0 {
		t.Errorf("%d rows of a canary were told", computed.Load()+cached.Load())
	}
	prompt := slices.Concat(tokensOf(t, tools), tokensOf(t, questions[0]))
	var answers []*Generation
	want := int64(0)
	for range 2 { // together, then with a prefix that is there
		for _, more := range []int{5, 20} {
			req := Request{Prompt: prompt, MaxTokens: more}
			answers = append(answers, start(t, t.Context(), e, req))
		}
		for _, g := range answers {
			answerOf(t, g)
			want += int64(len(prompt) + g.Generated() - 1)
		}
		answers = nil
	}
	if got := computed.Load() + cached.Load(); got != want || cached.Load() == 0 || cached.Load() != e.Stats().Cached {
		t.Errorf("%d rows computed and %d cached were told, want %d", computed.Load(), cached.Load(), want)
	}
}
