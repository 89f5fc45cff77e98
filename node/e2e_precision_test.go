//go:build cgo && linux

package node

import (
	"testing"

	"kvasird/node/api"
)

// TestPrecisions: with rows in q8 the answers of which the model is sure are those of the model
// alone, and the status says how rows travel; a worker needs no setting for it.
func TestPrecisions(t *testing.T) {
	s := newSwarm(t)
	s.worker("w1", "--slice", "0:4/0:13")
	s.worker("w2", "--slice", "0:4/13:32")
	s.run("--precision", "q8")
	for _, q := range questions {
		s.sameSureAnswer(q)
	}
	_, err := s.backbone.await(s.ctx, func(st *api.Status) bool {
		for _, p := range st.Peers {
			if p.Precision != "q8" || len(p.Rows) == 0 {
				return false
			}
		}
		return len(st.Peers) == 2
	})
	if err != nil {
		t.Errorf("rows in q8 from two workers: %v", err)
	}
}
