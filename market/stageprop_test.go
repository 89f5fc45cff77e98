package market

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// feasible reports whether some order of some nodes tiles the model, by trying all.
func feasible(f *fit, rooms []Footprint, at int) bool {
	if at == len(f.at)-1 {
		return true
	}
	for i, room := range rooms {
		if j := f.reach(at, room); j > at && feasible(f, slices.Delete(slices.Clone(rooms), i, i+1), j) {
			return true
		}
	}
	return false
}

// randomSim has a model of uneven layers and a few nodes, often with barely enough room in all.
func randomSim(t *testing.T, seed uint64) (*stageSim, []Footprint) {
	r := rand.New(rand.NewPCG(seed, 3))
	layers := 6 + r.IntN(20)
	m := StageModel{ID: modelA, First: Footprint{r.Int64N(4000), r.Int64N(4000)}, Last: Footprint{r.Int64N(4000), r.Int64N(4000)}}
	if r.IntN(3) == 0 {
		m.Shared = Footprint{min(m.First.Disk, m.Last.Disk), min(m.First.Memory, m.Last.Memory)}
	}
	var total int64
	for l := range layers {
		size := 1000 + r.Int64N(1+r.Int64N(1500))
		m.Layers = append(m.Layers, Footprint{size, size + r.Int64N(300)})
		total += size
		if l > 0 && r.IntN(3) > 0 {
			m.Cuts = append(m.Cuts, l)
		}
	}
	s := newStageSim(t, seed, m)
	nodes := 1 + r.IntN(7)
	turn := time.Duration(r.IntN(3)) * time.Minute
	var rooms []Footprint
	total += m.First.Disk + m.Last.Disk
	for i := range nodes {
		size := total * (60 + r.Int64N(140)) / 100 / int64(nodes)
		n := s.add(0, time.Duration(i)*turn+time.Duration(r.IntN(1000))*time.Millisecond)
		n.room = Footprint{size, size + r.Int64N(2000)}
		rooms = append(rooms, n.room)
	}
	return s, rooms
}

// TestCompleteWheneverPossible: nodes of any rooms, that start in any order, come to a complete
// chain if there is one, and to rest.
func TestCompleteWheneverPossible(t *testing.T) {
	const seeds = 400
	possible, moved, needless := 0, 0, 0
	for seed := range uint64(seeds) {
		s, rooms := randomSim(t, seed)
		f, err := newFit(s.model)
		if err != nil {
			t.Fatal(err)
		}
		can := feasible(f, rooms, 0)
		for range 40 {
			if s.run(time.Minute); s.chains() > 0 && s.now.Sub(t0) > 25*time.Minute {
				break
			}
		}
		what := fmt.Sprintf("seed %d: cuts %v, rooms %v, windows %v", seed, f.at, rooms, s.windows())
		if got := s.chains() > 0; got != can {
			t.Errorf("%s: a chain is %v, possible %v", what, got, can)
		}
		if can {
			possible++
		}
		if s.broken > 0 {
			t.Errorf("%s: the last chain was given up", what)
		}
		loads := s.loads
		s.run(20 * time.Minute)
		if s.loads != loads {
			t.Errorf("%s: %d downloads after it settled, now %v", what, s.loads-loads, s.windows())
		}
		if loads > len(rooms) {
			if moved++; !can {
				needless++
			}
		}
	}
	t.Logf("%d of %d possible; in %d a node moved, %d of them in vain", possible, seeds, moved, needless)
}
