package node_test

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestSwarmOverGossip has nodes start with nothing, cover a model, and recover when a third of
// them is gone.
func TestSwarmOverGossip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimSwarm(t)
		s.grow(30)
		s.until("every expert served", 5*time.Minute, s.atLeast(1))
		s.until("two replicas of every expert", 5*time.Minute, s.atLeast(2))
		s.until("every node sees the coverage that is", 5*time.Minute, s.agree)
		s.rest(time.Minute, time.Minute)
		s.shrink(func(i int) bool { return i%3 == 1 })
		s.until("a third is gone: two replicas of every expert", 10*time.Minute, s.atLeast(2))
		s.until("every node sees it again", 5*time.Minute, s.agree)
		s.close()
	})
}
