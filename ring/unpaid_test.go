package ring

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestUnpaid: a stage that wants to know who pays is left for another one, and where there is
// none the answer ends with what it said. It computed no more than it allowed.
func TestUnpaid(t *testing.T) {
	for name, rows := range map[string]int64{"in the prompt": 0, "in the answer": 30} {
		for at := range 3 {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f := newFleet(t)
					var left, computed atomic.Int64
					left.Store(rows)
					made := 0
					change := func(c *StageConfig, d *double) {
						d.delay = time.Millisecond
						if made++; made-1 != at {
							return
						}
						c.Computed = func(_ string, n int) { computed.Add(int64(n)) }
						c.Allow = func(_ string, n int) error {
							if left.Add(-int64(n)) < 0 {
								left.Add(int64(n))
								return errors.New("who pays is not known")
							}
							return nil
						}
					}
					chain := f.ring(3, change)
					replan := f.spares(chain, change)
					e := f.entry()
					req := request(rand.New(rand.NewPCG(7, 1)))
					req.MaxTokens += 40
					if err := ask(t, e, chain, req, replan); err != nil {
						t.Errorf("with others: %v", err)
					}
					left.Store(0)
					err := ask(t, e, chain, req, nil)
					var stage *StageError
					if !errors.As(err, &stage) || stage.Code != CodeUnpaid || !strings.Contains(err.Error(), "who pays is not known") {
						t.Errorf("alone: %v", err)
					}
					if n := computed.Load(); n > rows {
						t.Errorf("%d rows were computed, %d were allowed", n, rows)
					}
					f.free()
					f.close(e)
				})
			})
		}
	}
}
