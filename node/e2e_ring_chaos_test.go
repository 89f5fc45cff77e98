//go:build cgo && linux && chaos

package node

import (
	"syscall"
	"testing"
	"time"
)

// TestRingChaos: ten clients ask without a pause while every stage of two rings is
// killed, stopped and cut off in turn. No answer is lost, none is different, and after
// each blow both rings form again. Like TestChaos it runs in a network namespace of its
// own.
func TestRingChaos(t *testing.T) {
	// Stages of two layers and of one, so that rings have two to four of them.
	r := newBlown(t, 9*time.Minute, 2, "21MB", "15MB", "15MB", "21MB", "15MB", "15MB")
	c := &chaos{network: r.network}
	c.blackHole()
	kill := func(i int) func() {
		r.stages[i].cmd.Process.Kill()
		<-r.stages[i].exited
		return func() { r.begin(i) }
	}
	stop := func(i int) func() {
		r.stages[i].cmd.Process.Signal(syscall.SIGSTOP)
		return func() { r.stages[i].cmd.Process.Signal(syscall.SIGCONT) }
	}
	cut := func(i int) func() { return c.cutOff(r.stages[i].addr) }
	r.hold(2)
	for _, s := range r.stages {
		t.Logf("%s serves layers %d:%d", s.name, s.window.Begin, s.window.End)
	}
	a := r.asking(10)
	for _, blow := range []struct {
		name   string
		strike func(i int) (mend func())
	}{{"kill -9", kill}, {"SIGSTOP", stop}, {"black hole", cut}} {
		began, longest, back := time.Now(), time.Duration(0), time.Duration(0)
		before, _ := a.through(r)
		for i := range r.stages {
			mend := blow.strike(i)
			_, gap := a.through(r)
			longest = max(longest, gap)
			mend()
			mended := time.Now()
			r.hold(2)
			back = max(back, time.Since(mended))
			if t.Failed() {
				t.Fatalf("after %s of stage %d", blow.name, i)
			}
		}
		answers, _ := a.through(r)
		t.Logf("%s of each of %d stages, %v: %d answers, none lost or different, the longest gap %v; both rings are back %v later at most", blow.name,
			len(r.stages), time.Since(began).Round(time.Second), answers-before, longest.Round(time.Millisecond), back.Round(time.Millisecond))
	}
	a.end()
	r.freed()
}
