//go:build cgo

package engine

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"kvasird/ggml"
)

// swarm stands where the dispatcher does: an ExpertFunc whose experts add
// nothing, so that what the model says depends on it alone, and which can lose
// experts, fail and hang.
type swarm struct {
	mu      sync.Mutex // guards what follows
	missing map[[2]int]bool
	seen    map[[2]int]bool // layer and expert of every pair since it was made
	failAt  int             // fail the n-th call from now; 0 = never
	hang    bool            // wait for the end of the call's context
	hung    chan struct{}   // closed when a call hangs
}

type missingError struct{ layer, expert int }

func (e *missingError) Error() string { return "an expert is nowhere" }

func (s *swarm) compute(ctx context.Context, call *ggml.ExpertCall) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failAt > 0 {
		if s.failAt--; s.failAt == 0 {
			return &missingError{call.Layer, -1}
		}
	}
	for _, id := range call.IDs {
		pair := [2]int{call.Layer, int(id)}
		if s.missing[pair] {
			return &missingError{call.Layer, int(id)}
		}
		if s.seen != nil {
			s.seen[pair] = true
		}
	}
	clear(call.Out)
	if s.hang {
		close(s.hung)
		s.hang = false
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return ctx.Err()
	}
	return nil
}

func (s *swarm) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// openSwarm makes an engine over a model whose experts are s's.
func openSwarm(t *testing.T, sequences int) (*Engine, *swarm) {
	t.Helper()
	s := &swarm{}
	m, err := runtime.LoadModel(ggml.ModelConfig{Path: tinyPath, Experts: s.compute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return open(t, Config{Model: m, Sequences: sequences, Chunk: 4}), s
}

// TestExpertFailure: the error of the expert call ends the request, in the
// middle of its answer, and the next request is answered.
func TestExpertFailure(t *testing.T) {
	e, s := openSwarm(t, 1)
	if err := e.Canary(t.Context()); err != nil {
		t.Fatal(err)
	}
	want, err := read(t.Context(), start(t, t.Context(), e, endless(t, e, questions[0], 20)))
	if err != nil || want == "" {
		t.Fatalf("%q, %v", want, err)
	}
	layers := e.cfg.Model.Layers()
	s.set(func() { s.failAt = 10*layers + 2 })
	got, err := read(t.Context(), start(t, t.Context(), e, endless(t, e, questions[0], 20)))
	var missing *missingError
	if !errors.As(err, &missing) || got == "" || !strings.HasPrefix(want, got) {
		t.Errorf("%q, %v; want the beginning of %q and the expert call's error", got, err, want)
	}
	if err := e.Ready(); !errors.As(err, &missing) {
		t.Errorf("ready after a failure: %v", err)
	}
	got, err = read(t.Context(), start(t, t.Context(), e, endless(t, e, questions[0], 20)))
	if err != nil || got != want {
		t.Errorf("the next request: %q, %v; want %q", got, err, want)
	}
	if err := e.Canary(t.Context()); err != nil || e.Ready() != nil {
		t.Errorf("canary: %v, ready: %v", err, e.Ready())
	}
	if st := e.Stats(); st.Failed != 1 || st.Running != 0 {
		t.Errorf("%+v, want one failed request", st)
	}
}

// TestInnocentsGoOn: of two sequences in one batch only the one whose expert is
// missing fails.
func TestInnocentsGoOn(t *testing.T) {
	e, s := openSwarm(t, 2)
	prompts := []string{questions[0], questions[5]}
	var used [2]map[[2]int]bool
	var want [2]string
	for i, p := range prompts {
		used[i] = map[[2]int]bool{}
		s.set(func() { s.seen = used[i] })
		var err error
		if want[i], err = read(t.Context(), start(t, t.Context(), e, endless(t, e, p, 30))); err != nil {
			t.Fatal(err)
		}
	}
	missing := map[[2]int]bool{}
	for pair := range used[0] {
		if !used[1][pair] {
			missing[pair] = true
		}
	}
	if len(missing) == 0 {
		t.Fatal("both prompts use the same experts: the test needs others")
	}
	s.set(func() { s.seen, s.missing = nil, missing })
	guilty := start(t, t.Context(), e, endless(t, e, prompts[0], 30))
	innocent := start(t, t.Context(), e, endless(t, e, prompts[1], 30))
	var lost *missingError
	if _, err := read(t.Context(), guilty); !errors.As(err, &lost) || !missing[[2]int{lost.layer, lost.expert}] {
		t.Errorf("the request without its expert ends with %v", err)
	}
	if got, err := read(t.Context(), innocent); err != nil || got != want[1] {
		t.Errorf("the other: %q, %v; want %q", got, err, want[1])
	}
}

// TestCancelAbortsDecode: a decode that hangs in an expert call ends when all
// its requests are gone.
func TestCancelAbortsDecode(t *testing.T) {
	e, s := openSwarm(t, 2)
	s.set(func() { s.hang, s.hung = true, make(chan struct{}) })
	ctx, cancel := context.WithCancel(t.Context())
	g := start(t, ctx, e, endless(t, e, questions[0], 20))
	<-s.hung
	cancel()
	if _, err := read(t.Context(), g); !errors.Is(err, context.Canceled) {
		t.Errorf("the request ends with %v", err)
	}
	waitFor(t, "the sequence is free", func() bool { return e.Stats().Running == 0 })
	if err := e.Canary(t.Context()); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// TestCloseAbortsDecode: Close does not wait for a hanging expert call.
func TestCloseAbortsDecode(t *testing.T) {
	e, s := openSwarm(t, 1)
	s.set(func() { s.hang, s.hung = true, make(chan struct{}) })
	g := start(t, t.Context(), e, endless(t, e, questions[0], 20))
	<-s.hung
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := read(t.Context(), g); !errors.Is(err, ErrClosed) {
		t.Errorf("the request ends with %v", err)
	}
}
