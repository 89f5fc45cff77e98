package node

import (
	"log/slog"
	"testing"
	"time"
)

// What a node said of itself holds while it takes steps and no worker of it is stuck.
func TestHungNodeIsNotWell(t *testing.T) {
	stuck := false
	s := &exchange{log: slog.New(slog.DiscardHandler), hangs: func() bool { return stuck }}
	tests := []struct {
		name  string
		since time.Duration
		stuck bool
		want  bool
	}{
		{"steps", hungAfter / 4, false, true},
		{"no step", hungAfter, false, false},
		{"a worker is stuck", 0, true, false},
		{"again", 0, false, true},
	}
	for _, tt := range tests {
		stuck = tt.stuck
		s.stepped.Store(time.Now().Add(-tt.since).UnixNano())
		if ok := s.well(); ok != tt.want {
			t.Errorf("%s: well %v, want %v", tt.name, ok, tt.want)
		}
	}
}
