package engine

import (
	"context"
	"sync"
	"time"

	"kvasird/ggml"
)

// Turn has one of an engine's contexts, and whatever else takes it, compute at a time. A context has the
// turn while it decodes, but for its expert calls (Experts): then another one computes. So what a
// process computes with stays what it is for one context: threads of several would wait for each other on
// the same cores. The zero value is ready; a nil Turn is not waited for.
type Turn struct{ mu sync.Mutex }

func (t *Turn) take() {
	if t != nil {
		t.mu.Lock()
	}
}

func (t *Turn) pass() {
	if t != nil {
		t.mu.Unlock()
	}
}

// Compute has f compute in its turn. It is for what an expert call computes here: an expert call of
// Experts does not have the turn, a decode has.
func (t *Turn) Compute(f func() error) error {
	t.take()
	defer t.pass()
	return f()
}

// turnUse is a decode that takes turns. Its own goroutine alone uses it.
type turnUse struct {
	*Turn
	now      func() time.Time
	began    time.Time     // the turn in progress
	computed time.Duration // within turns
	waited   time.Duration // for expert calls
}

type turnKey struct{}

func (u *turnUse) begin() {
	u.take()
	u.began = u.now()
}

func (u *turnUse) end() {
	u.computed += u.now().Sub(u.began)
	u.pass()
}

// turn calls f in its turn, and says how long it computed and waited for expert calls.
func (l *lane) turn(ctx context.Context, f func(context.Context) error) (*turnUse, error) {
	u := &turnUse{Turn: l.cfg.Turn, now: l.cfg.Now}
	u.begin()
	defer u.end()
	return u, f(context.WithValue(ctx, turnKey{}, u))
}

// Experts is f for the models of engines: during a call others may compute.
func Experts(f ggml.ExpertFunc) ggml.ExpertFunc {
	return func(ctx context.Context, call *ggml.ExpertCall) error {
		u, _ := ctx.Value(turnKey{}).(*turnUse)
		if u == nil {
			return f(ctx, call)
		}
		u.end()
		began := u.now()
		defer func() {
			u.waited += u.now().Sub(began)
			u.begin()
		}()
		return f(ctx, call)
	}
}
