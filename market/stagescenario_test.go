package market

import (
	"bytes"
	"fmt"
	"testing"
	"time"
)

// stageScenario is one course of a simulation, and what must hold of it.
type stageScenario struct {
	name string
	play func(x *stageSummary)
}

type stageSummary struct {
	*stageSim
	out bytes.Buffer
}

func (x *stageSummary) line(format string, args ...any) { fmt.Fprintf(&x.out, format+"\n", args...) }

// reach runs until there are so many chains.
func (x *stageSummary) reach(chains int, most time.Duration) {
	d, ok := x.until(chains, most)
	if !ok {
		x.t.Errorf("not %d chains within %v: %d", chains, most, x.chains())
	}
	x.line("%d complete chains after %v", chains, d)
}

// quiet runs for a while in which nothing may be downloaded or given up.
func (x *stageSummary) quiet(d time.Duration) {
	x.report(&x.out)
	loads := x.loads
	x.run(d)
	x.line("then %v: %d downloads", d, x.loads-loads)
	if x.loads != loads {
		x.t.Errorf("it does not come to rest: %d downloads in %v", x.loads-loads, d)
	}
}

// mixed adds nodes: of ten, one can hold the model, two a half, three a third, three a cut, and
// one only a single layer, which is no window.
func (x *stageSummary) mixed(n int, apart time.Duration) {
	rooms := [10]float64{4, 18, 26, 4, 18, 60, 4, 26, 18, 1}
	sum := 0
	for i := range n {
		node := x.add(rooms[i%10]+0.5, time.Duration(i)*apart)
		most := 0
		f, _ := newFit(x.model)
		for b := range f.at {
			most = max(most, f.at[f.reach(b, node.room)]-f.at[b])
		}
		sum += most
	}
	x.line("%d nodes with room for %d layers at most, %.1f times the model", n, sum, float64(sum)/float64(len(x.model.Layers)))
}

var stageScenarios = []stageScenario{
	{"stages-3", func(x *stageSummary) {
		for range 3 {
			x.add(20, 0)
		}
		x.reach(1, 5*time.Minute)
		x.run(10 * time.Minute)
		x.quiet(30 * time.Minute)
	}},
	{"stages-3-in-turn", func(x *stageSummary) {
		for i, room := range []float64{6, 40, 14} { // the first of them must not be in the way
			x.add(room, time.Duration(i)*time.Minute)
		}
		x.reach(1, 10*time.Minute)
		x.run(10 * time.Minute)
		x.quiet(30 * time.Minute)
		x.nodes[1].restart(20 * time.Second)
		x.line("one is started again:")
		x.run(10 * time.Second)
		x.reach(1, 5*time.Minute)
		x.quiet(30 * time.Minute)
	}},
	{"stages-10", func(x *stageSummary) {
		x.mixed(10, 0)
		x.reach(1, 5*time.Minute)
		x.reach(2, 10*time.Minute)
		x.run(20 * time.Minute)
		x.quiet(30 * time.Minute)
	}},
	{"stages-100", func(x *stageSummary) {
		x.mixed(100, 0)
		x.reach(1, 5*time.Minute)
		x.reach(10, 10*time.Minute)
		x.run(10 * time.Minute)
		x.quiet(10 * time.Minute)
	}},
	{"stages-100-in-turn", func(x *stageSummary) {
		x.mixed(100, 5*time.Second)
		x.reach(1, 5*time.Minute)
		x.reach(10, 20*time.Minute)
		x.run(10 * time.Minute)
		x.quiet(10 * time.Minute)
	}},
	{"stages-100-small", func(x *stageSummary) {
		for i := range 100 { // nobody holds much, one in five an end
			x.add([]float64{4.5, 4.5, 4.5, 4.5, 6.5}[i%5], 0)
		}
		x.reach(1, 20*time.Minute)
		x.run(10 * time.Minute)
		x.quiet(10 * time.Minute)
	}},
	{"stages-churn", stageChurn},
}

// restart kills and starts a node that keeps its disk.
func (n *stageNode) restart(after time.Duration) {
	n.kill()
	disk := n.stager.own
	n.s.after(after, func() {
		if !n.up {
			n.begin(disk)
		}
	})
}

// stageChurn has nodes leave, die, start again and come back all the time.
func stageChurn(x *stageSummary) {
	x.mixed(40, 0)
	x.reach(4, 10*time.Minute)
	x.run(10 * time.Minute)
	x.report(&x.out)
	least, without := 1<<10, 0
	for range 120 {
		for range 15 {
			x.run(time.Second)
			n := x.chains()
			if least = min(least, n); n == 0 {
				without++
			}
		}
		n := x.nodes[x.rng.IntN(len(x.nodes))]
		switch {
		case !n.up:
			n.begin(nil)
		case n.drain:
		case x.rng.IntN(3) == 0:
			n.leave()
		case x.rng.IntN(2) == 0:
			n.kill()
		default:
			n.restart(time.Duration(1+x.rng.IntN(60)) * time.Second)
		}
	}
	x.line("30 minutes with a change every 15s: at least %d chains, %ds without one", least, without)
	x.run(15 * time.Minute)
	x.quiet(10 * time.Minute)
}

func TestStageScenarios(t *testing.T) {
	for _, sc := range stageScenarios {
		t.Run(sc.name, func(t *testing.T) {
			begin := time.Now()
			x := &stageSummary{stageSim: newStageSim(t, hash(sc.name), layered(48, 4))}
			sc.play(x)
			t.Logf("%v\n%s", time.Since(begin).Round(time.Millisecond), x.out.String())
			golden(t, sc.name, x.out.Bytes())
		})
	}
}
