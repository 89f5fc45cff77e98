package market

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden summaries in testdata")

// usual is a network in which one delivery in fifty is late and one in 500 is lost.
var usual = simNet{late: 20, lost: 2, contacts: 64}

const (
	expertBytes = 5_300_000 // of the 122B model
	mega        = 1_000_000
)

// summary is what a scenario found, and what must hold of it.
type summary struct {
	*sim
	out  bytes.Buffer
	fail func(format string, args ...any)
}

func (x *summary) line(format string, args ...any) { fmt.Fprintf(&x.out, format+"\n", args...) }

// until runs until a condition holds, looking every second, at most so long.
func (x *summary) until(what string, most time.Duration, ok func(least, most int) bool) {
	begin := x.now
	for x.now.Sub(begin) < most {
		x.run(time.Second)
		if ok(spread(x.sim)) {
			x.line("%s after %v", what, x.now.Sub(begin).Round(time.Second))
			return
		}
	}
	low, high := spread(x.sim)
	x.fail("%s: not within %v, replicas %d to %d", what, most, low, high)
}

// spread returns the least and the most replicas of all cells.
func spread(s *sim) (least, most int) {
	count := s.truth()
	least = 1 << 30
	for _, r := range s.shape.MoE {
		for _, n := range count[s.shape.cell(r.Begin, 0):s.shape.cell(r.End, 0)] {
			least, most = min(least, n), max(most, n)
		}
	}
	return least, most
}

// atLeast is the condition that every cell has n replicas.
func atLeast(n int) func(int, int) bool { return func(least, _ int) bool { return least >= n } }

// report writes what everything cost so far.
func (x *summary) report() {
	least, most := spread(x.sim)
	up, used := 0, 0
	for _, n := range x.nodes {
		if n.up {
			if up++; len(n.vol.own) > 0 {
				used++
			}
		}
	}
	x.line("  replicas %d to %d; %d of %d nodes hold something", least, most, used, up)
	x.line("  downloads %d experts, %.1f GB; given up: %d experts served, %d unserved; last replicas given up: %d",
		x.loads, float64(x.downloaded)/1e9, x.moved, x.wasted, x.lastDropped)
	if x.lastDropped > 0 {
		x.fail("%d last replicas were given up", x.lastDropped)
	}
}

// quiet runs for a while in which nothing may be downloaded or moved.
func (x *summary) quiet(d time.Duration) {
	loads, moved, gossip := x.loads, x.moved, x.gossip
	x.run(d)
	up := 0
	for _, n := range x.nodes {
		if n.up {
			up++
		}
	}
	x.line("then %v: %d experts downloaded, %d given up, announcements of %d bytes per node and minute",
		d, x.loads-loads, x.moved-moved, int((x.gossip-gossip)/int64(d/time.Minute)))
	if x.loads != loads || x.moved != moved {
		x.fail("it does not come to rest: %d experts downloaded, %d given up in %v", x.loads-loads, x.moved-moved, d)
	}
}

// mixed adds nodes of all sizes: of ten, six phones, three laptops, one server.
func (x *summary) mixed(n int, unit int, within time.Duration) {
	for i := range n {
		experts, rate := unit, int64(5*mega)
		switch {
		case i%10 == 9:
			experts, rate = 12*unit, 50*mega
		case i%10 >= 6:
			experts, rate = 4*unit, 20*mega
		}
		x.add(experts, rate, within)
	}
}

type scenario struct {
	name   string
	policy Policy
	shape  Shape
	size   int64
	net    simNet
	play   func(x *summary)
}

func layers(n, experts int) Shape {
	return Shape{Layers: n, Experts: experts, MoE: []gguf.Range{{Begin: 0, End: n}}}
}

var scenarios = []scenario{
	{name: "from-nothing-100", shape: layers(49, 256), play: func(x *summary) {
		x.mixed(100, 128, 30*time.Second)
		x.until("every expert served", 30*time.Minute, atLeast(1))
		x.until("two replicas of every expert", 30*time.Minute, atLeast(2))
		x.run(20 * time.Minute)
		x.report()
		x.quiet(10 * time.Minute)
	}},
	{name: "from-nothing-300-then-killed", shape: layers(8, 128), play: func(x *summary) {
		x.mixed(300, 8, 30*time.Second)
		x.until("every expert served", 30*time.Minute, atLeast(1))
		x.until("two replicas of every expert", 30*time.Minute, atLeast(2))
		x.run(3 * time.Minute)
		x.report()
		x.killSome(30)
		x.until("every expert served", 30*time.Minute, atLeast(1))
		x.until("two replicas of every expert", 30*time.Minute, atLeast(2))
		x.report()
	}},
	{name: "burst-100", policy: Policy{Target: 25, Ceiling: 25}, shape: layers(1, 256), play: func(x *summary) { burst(x, 100) }},
	{name: "burst-1000", policy: Policy{Target: 250, Ceiling: 250}, shape: layers(1, 256), play: func(x *summary) { burst(x, 1000) }},
	{name: "burst-300-scarce-layer", shape: layers(4, 256), play: scarceLayer},
	{name: "burst-100-uneven", policy: Policy{Target: 1000, Ceiling: 1000}, shape: layers(1, 256), play: func(x *summary) {
		for i := range 100 { // from 16 to 112 experts each
			x.add(16+32*(i%4), 20*mega, 0)
		}
		x.until("every expert served", 10*time.Minute, atLeast(1))
		x.run(2 * Validity(100))
		x.report()
		x.quiet(10 * time.Minute)
	}},
	{name: "full-nodes-move", shape: layers(8, 64), play: fullNodes},
	{name: "hot-experts", policy: Policy{Ceiling: 2}, shape: layers(4, 64), play: hotExperts},
	{name: "killed-100", shape: layers(8, 128), play: func(x *summary) {
		x.mixed(100, 16, 10*time.Second)
		x.until("two replicas of every expert", 10*time.Minute, atLeast(2))
		x.run(5 * time.Minute)
		x.report()
		x.killSome(30)
		x.until("every expert served", 10*time.Minute, atLeast(1))
		x.until("two replicas of every expert", 10*time.Minute, atLeast(2))
		x.run(5 * time.Minute)
		x.report()
		x.quiet(10 * time.Minute)
	}},
	{name: "partition", shape: layers(8, 128), play: partition},
	{name: "churn", shape: layers(8, 64), net: simNet{late: 50, lost: 10, contacts: 64}, play: churn},
	{name: "slow-downloads", shape: layers(8, 64), play: func(x *summary) {
		for i := range 90 { // a third are slow, a third never come to an end
			x.add(32, []int64{20 * mega, mega / 10, 20 * mega}[i%3], 5*time.Second).stuck = i%3 == 2
		}
		x.until("every expert served", 30*time.Minute, atLeast(1))
		x.until("two replicas of every expert", 60*time.Minute, atLeast(2))
		x.report()
	}},
}

// killSome kills so many of 100 nodes at one instant.
func (x *summary) killSome(percent int) {
	for _, n := range x.nodes {
		if n.up && x.rng.IntN(100) < percent {
			n.kill()
		}
	}
	least, most := spread(x.sim)
	x.line("%d%% killed: replicas %d to %d", percent, least, most)
}

// fullNodes has every node full of the first half of the layers: there is no room for the second
// but by moving.
func fullNodes(x *summary) {
	for i := range 64 {
		n := x.add(16, 20*mega, 0)
		n.budget.Disk = 0
		x.after(time.Second, func() {
			n.budget.Disk = n.budget.Memory
			layer, first := i/4%4, 16*(i%4)
			if err := n.vol.Restore(Part{modelA, slice(layer, layer+1, first, first+16)}, true, x.now); err != nil {
				x.t.Fatal(err)
			}
		})
	}
	x.run(10 * time.Second)
	least, most := spread(x.sim)
	x.line("at the start: replicas %d to %d", least, most)
	x.until("every expert served", 30*time.Minute, atLeast(1))
	x.until("two replicas of every expert", 60*time.Minute, atLeast(2))
	x.run(10 * time.Minute)
	x.report()
	x.quiet(10 * time.Minute)
}

// hotExperts has a backbone whose router picks four experts of each layer more than the others,
// and later four others.
func hotExperts(x *summary) {
	x.mixed(100, 4, 10*time.Second)
	backbone := x.add(0, mega, 0)
	x.run(5 * time.Minute)
	x.report()
	for _, first := range []int{8, 40} {
		meter, err := NewMeter(x.shape)
		if err != nil {
			x.t.Fatal(err)
		}
		for l := range x.shape.Layers {
			for e := range x.shape.Experts {
				pairs := 100
				if first <= e && e < first+4 {
					pairs = 900
				}
				meter.Add(l, e, pairs, x.now)
			}
		}
		backbone.say = ModelNews{Backbone: true, Demand: meter.Demand(x.now)}
		backbone.announce(false)
		hot := func() (low, high int) {
			count := x.truth()
			low, high = 1<<30, 0
			for l := range x.shape.Layers {
				for _, n := range count[x.shape.cell(l, first):x.shape.cell(l, first+4)] {
					low, high = min(low, n), max(high, n)
				}
			}
			return low, high
		}
		target := int(func() uint16 {
			return backbone.table.board(modelA, "", x.now).target[first]
		}())
		low, high := hot()
		x.line("experts %d to %d of each layer become hot: target %d, replicas %d to %d", first, first+3, target, low, high)
		x.until("the hot ones at their target", time.Hour, func(int, int) bool { low, _ := hot(); return low >= target })
		x.run(5 * time.Minute)
		x.report()
		x.quiet(5 * time.Minute)
	}
}

// partition cuts the swarm into halves that do not hear each other, and heals it.
func partition(x *summary) {
	x.mixed(100, 24, 10*time.Second)
	x.until("two replicas of every expert", 10*time.Minute, atLeast(2))
	x.run(5 * time.Minute)
	x.report()
	for _, n := range x.nodes {
		n.group = n.i / 10 % 2
		for _, o := range x.nodes {
			if o.i/10%2 != n.i/10%2 {
				n.table.Lost(o.id, x.now)
			}
		}
	}
	half := func() (least int) {
		least = 1 << 30
		for g := range 2 {
			for _, n := range x.nodes {
				n.up = n.group == g
			}
			low, _ := spread(x.sim)
			least = min(least, low)
		}
		for _, n := range x.nodes {
			n.up = true
		}
		return least
	}
	x.line("halves: at least %d replicas in each", half())
	x.until("two replicas in each half", 30*time.Minute, func(int, int) bool { return half() >= 2 })
	x.run(5 * time.Minute)
	x.report()
	for _, n := range x.nodes {
		n.group = 0
	}
	x.run(5 * time.Minute)
	x.line("healed:")
	x.report()
	x.quiet(10 * time.Minute)
}

// churn has nodes come, leave, die and start again all the time.
func churn(x *summary) {
	x.mixed(100, 16, 10*time.Second)
	x.until("two replicas of every expert", 10*time.Minute, atLeast(2))
	x.report()
	uncovered, below, worst := 0, 0, 1<<30
	x.watch = func() {
		least, _ := spread(x.sim)
		if worst = min(worst, least); least == 0 {
			uncovered++
		}
		if least < 2 {
			below++
		}
	}
	for range 120 {
		x.run(15 * time.Second)
		n := x.nodes[x.rng.IntN(len(x.nodes))]
		switch {
		case !n.up:
			n.budget.Drain = false
			n.begin(nil)
		case x.rng.IntN(3) == 0:
			n.leave()
		case x.rng.IntN(2) == 0:
			n.kill()
		default:
			n.restart(time.Duration(1+x.rng.IntN(60)) * time.Second)
		}
	}
	x.watch = nil
	x.line("30 minutes with a change every 15s: at least %d replicas; %ds with an expert uncovered, %ds with one below two",
		worst, uncovered, below)
	x.until("two replicas of every expert", 10*time.Minute, atLeast(2))
	x.run(10 * time.Minute)
	x.report()
	x.quiet(10 * time.Minute)
}

// burst has newcomers of equal size come at one instant to a layer that nobody serves.
func burst(x *summary, n int) {
	for range n {
		x.add(64, 20*mega, 0)
	}
	x.until("every expert served", 10*time.Minute, atLeast(1))
	x.run(Validity(n) * 2)
	x.line("after two epochs of %v:", Validity(n))
	x.report()
	if least, most := spread(x.sim); most-least > 1 {
		x.fail("replicas %d to %d after two epochs", least, most)
	}
	x.quiet(2 * time.Minute)
}

// scarceLayer has them come where three of four layers are served well.
func scarceLayer(x *summary) {
	for l := range 3 {
		for i := range 12 {
			n := x.add(64, 20*mega, 0)
			n.budget.Disk = 0 // nothing more than what it starts with
			x.after(time.Second, func() {
				n.budget.Disk = n.budget.Memory
				part := Part{modelA, slice(l, l+1, 64*(i%4), 64*(i%4)+64)}
				if err := n.vol.Restore(part, true, x.now); err != nil {
					x.t.Fatal(err)
				}
			})
		}
	}
	x.run(20 * time.Second)
	for range 300 {
		x.add(64, 20*mega, 0)
	}
	x.until("every expert served", 10*time.Minute, atLeast(1))
	x.run(Validity(300) * 2)
	x.line("after two epochs of %v:", Validity(300))
	x.report()
	least, most := spread(x.sim)
	if most > 5 {
		x.fail("replicas %d to %d where the ceiling is 4", least, most)
	}
	count := x.truth()[3*256:]
	if slices.Max(count)-slices.Min(count) > 1 {
		x.fail("replicas %d to %d of the scarce layer after two epochs", slices.Min(count), slices.Max(count))
	}
	x.quiet(2 * time.Minute)
}

func TestScenarios(t *testing.T) {
	old := debug.SetGCPercent(300) // a thousand tables are live, and there is memory
	t.Cleanup(func() { debug.SetGCPercent(old) })
	for _, sc := range scenarios {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			if sc.size == 0 {
				sc.size = expertBytes
			}
			if sc.net == (simNet{}) {
				sc.net = usual
			}
			x := &summary{sim: newSim(t, hash(sc.name), sc.policy, sc.shape, sc.size, sc.net), fail: t.Errorf}
			sc.play(x)
			t.Logf("%v\n%s", time.Since(begin).Round(time.Millisecond), x.out.String())
			golden(t, sc.name, x.out.Bytes())
		})
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *rewrite {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: run the test with -rewrite", err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s:\n%swant\n%s", file, got, want)
	}
}
