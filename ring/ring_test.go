package ring

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Whatever the stages, the sessions at once, and who joins and leaves while others run, the answer
// is that of the unsplit model.
func TestEqualsUnsplit(t *testing.T) {
	for _, stages := range []int{1, 2, 3, 4} {
		for _, sessions := range []int{1, 4, 16} {
			for _, noDraft := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d stages, %d sessions, no drafts %v", stages, sessions, noDraft), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { equalsUnsplit(t, stages, sessions, noDraft) })
				})
			}
		}
	}
}

func equalsUnsplit(t *testing.T, stages, sessions int, noDraft bool) {
	f := newFleet(t)
	chain := f.ring(stages, func(c *StageConfig, d *double) { d.delay = time.Millisecond })
	e := f.entry()
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(stages), uint64(i)))
			for range 3 {
				time.Sleep(time.Duration(r.IntN(50)) * time.Millisecond)
				req := request(r)
				req.NoDraft = noDraft
				if err := ask(t, e, chain, req, nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	f.free()
	accepted := f.nodes["s0"].stage.Stats().Accepted
	if noDraft != (accepted == 0) {
		t.Errorf("%d drafts were accepted", accepted)
	}
	if sessions > 1 && f.nodes["s0"].double.mixed == 0 && stages == 1 {
		t.Error("no batch had rows of several sessions")
	}
	f.close(e)
}
