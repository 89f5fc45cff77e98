package p2p

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestRefusalsAreLoggedOnceAMinute(t *testing.T) {
	var log lockedBuffer
	now := time.Unix(1e9, 0)
	r := newRefusals(slog.New(slog.NewTextHandler(&log, nil)))
	r.now = func() time.Time { return now }
	network := &RefusedError{Field: "network", Want: "a", Got: "b"}
	lines := func() int { return strings.Count(log.String(), "\n") }
	for i := range 100 {
		network.Got = fmt.Sprint(i) // what the peer says makes no new reason
		r.note("hello failed", "p1", "addr", network)
	}
	r.note("hello failed", "p1", "addr", errors.New("EOF"))
	r.note("hello failed", "p2", "addr", network)
	if lines() != 3 {
		t.Fatalf("%d lines of two peers and two reasons:\n%s", lines(), log.String())
	}
	now = now.Add(refusalEvery)
	r.sweep()
	if lines() != 4 || !strings.Contains(log.String(), "peer=p1 addr=addr times=99") {
		t.Fatalf("the rest is not counted:\n%s", log.String())
	}
	now = now.Add(refusalEvery)
	r.sweep()
	if lines() != 4 || len(r.lines) != 0 {
		t.Errorf("%d lines, %d peers are kept though they stay away", lines(), len(r.lines))
	}
}

// Whoever makes up names gets no line for each, and no memory.
func TestRefusalsAreBounded(t *testing.T) {
	var log lockedBuffer
	r := newRefusals(slog.New(slog.NewTextHandler(&log, nil)))
	for i := range 3 * maxRefusals {
		r.note("hello failed", fmt.Sprint(i), "", errors.New("x"))
	}
	if got := strings.Count(log.String(), "\n"); got > maxRefusals+1 || len(r.lines) > maxRefusals+1 {
		t.Errorf("%d lines, %d kept", got, len(r.lines))
	}
}

// A peer of another network that tries every moment.
func TestRefusedHellosDoNotFloodTheLog(t *testing.T) {
	var log lockedBuffer
	b := startHost(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	a := startHost(t, func(c *Config) { c.Pack = "other" })
	for range 5 {
		if _, err := a.Hello(t.Context(), infoOf(t, b)); err == nil {
			t.Fatal("not refused")
		}
	}
	eventually(t, "all are counted", func() bool { return b.Refusals()["runtime pack"] >= 5 })
	if n := strings.Count(log.String(), "runtime pack"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}
