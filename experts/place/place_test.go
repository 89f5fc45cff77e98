package place

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden placements in testdata")

// scenario is a golden file: its input lines, and the placement below the line "---".
type scenario struct {
	planner  Planner
	names    []string
	peers    []Peer
	replicas []Replica
	experts  []int32
	draw     int // of so many; 0: no draw
}

func (s *scenario) parse(line string) error {
	f := strings.Fields(line)
	switch f[0] {
	case "touch":
		v, err := strconv.ParseFloat(f[1], 32)
		s.planner.TouchCost = float32(v)
		return err
	case "peer": // peer name base pair queued [avoid]
		var p Peer
		if _, err := fmt.Sscan(strings.Join(f[2:5], " "), &p.Base, &p.PerPair, &p.Queued); err != nil {
			return err
		}
		p.Avoid = len(f) > 5 && f[5] == "avoid"
		s.names, s.peers = append(s.names, f[1]), append(s.peers, p)
		return nil
	case "replica": // replica name from to
		r := Replica{Peer: int32(slices.Index(s.names, f[1]))}
		_, err := fmt.Sscan(f[2]+" "+f[3], &r.From, &r.To)
		s.replicas = append(s.replicas, r)
		return err
	case "draw": // draw most seed layer, after all peers
		var seed Seed
		seed[0] = f[2][0]
		layer, err := strconv.Atoi(f[3])
		if err != nil {
			return err
		}
		for i, name := range s.names {
			s.peers[i].Rank = Rank(&seed, int32(layer), name)
		}
		s.draw, err = strconv.Atoi(f[1])
		return err
	case "experts":
		for _, w := range f[1:] {
			e, err := strconv.Atoi(w)
			if err != nil {
				return err
			}
			s.experts = append(s.experts, int32(e))
		}
		return nil
	}
	return fmt.Errorf("unknown line %q", line)
}

func (s *scenario) run() string {
	choice := make([]int32, len(s.experts))
	var missing int
	if s.draw > 0 {
		missing = s.planner.Draw(s.draw, s.peers, s.replicas, s.experts, choice)
	} else {
		missing = s.planner.Plan(s.peers, s.replicas, s.experts, choice)
	}
	var out strings.Builder
	for i, name := range s.names {
		if !slices.Contains(choice, int32(i)) {
			continue
		}
		out.WriteString(name)
		for k, c := range choice {
			if c == int32(i) {
				fmt.Fprintf(&out, " %d", s.experts[k])
			}
		}
		out.WriteString("\n")
	}
	fmt.Fprintf(&out, "missing %d\n", missing)
	return out.String()
}

func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, _ := bytes.Cut(data, []byte("---\n"))
			var s scenario
			for line := range strings.Lines(string(input)) {
				if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
					continue
				}
				if err := s.parse(line); err != nil {
					t.Fatal(err)
				}
			}
			got := s.run()
			if *rewrite {
				out := append(append(slices.Clone(input), "---\n"...), got...)
				if err := os.WriteFile(file, out, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("got\n%swant\n%s", got, want)
			}
			if again := s.run(); again != got {
				t.Errorf("a second plan with the same planner differs:\n%s", again)
			}
		})
	}
}

// randomCall makes a swarm of uneven, overlapping replicas and a call over it.
func randomCall(rng *rand.Rand) (peers []Peer, replicas []Replica, experts []int32) {
	for i := range 1 + rng.IntN(20) {
		peers = append(peers, Peer{
			Base: rng.Float32() * 1000, PerPair: rng.Float32() * 50,
			Queued: rng.Int32N(30), Avoid: rng.IntN(4) == 0,
		})
		from := rng.Int32N(256)
		replicas = append(replicas, Replica{Peer: int32(i), From: from, To: from + 1 + rng.Int32N(256)})
	}
	for range 1 + rng.IntN(64) {
		experts = append(experts, rng.Int32N(258)-1)
	}
	return peers, replicas, experts
}

func TestPlanInvariants(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	planner := Planner{TouchCost: 30}
	for range 2000 {
		peers, replicas, experts := randomCall(rng)
		choice := make([]int32, len(experts))
		missing := planner.Plan(peers, replicas, experts, choice)
		of := map[int32]int32{}
		for i, e := range experts {
			covered := slices.ContainsFunc(replicas, func(r Replica) bool {
				return e >= 0 && r.From <= e && e < r.To && !peers[r.Peer].Avoid
			})
			if covered != (choice[i] != Missing) {
				t.Fatalf("expert %d: covered %v, choice %d", e, covered, choice[i])
			}
			if !covered {
				missing--
				continue
			}
			holds := slices.ContainsFunc(replicas, func(r Replica) bool {
				return r.Peer == choice[i] && r.From <= e && e < r.To
			})
			if !holds || peers[choice[i]].Avoid {
				t.Fatalf("expert %d went to peer %d, which does not hold it or is avoided", e, choice[i])
			}
			if before, ok := of[e]; ok && before != choice[i] {
				t.Fatalf("expert %d went to peers %d and %d", e, before, choice[i])
			}
			of[e] = choice[i]
		}
		if missing != 0 {
			t.Fatalf("missing count is off by %d", missing)
		}
	}
}

func TestExpertOutOfBounds(t *testing.T) {
	var planner Planner
	choice := make([]int32, 2)
	missing := planner.Plan([]Peer{{}}, []Replica{{From: 0, To: 1 << 30}}, []int32{MaxExpert, -5}, choice)
	if missing != 2 || choice[0] != Missing || choice[1] != Missing {
		t.Errorf("got missing %d, choice %v", missing, choice)
	}
}

// decode is one token of a 256-expert layer over ten peers, every expert twice.
func decode() (*Planner, []Peer, []Replica, []int32, []int32) {
	var peers []Peer
	var replicas []Replica
	for i := range int32(10) {
		peers = append(peers, Peer{Base: 100, PerPair: 20})
		from := i % 5 * 52
		replicas = append(replicas, Replica{Peer: i, From: from, To: from + 52})
	}
	experts := []int32{3, 77, 150, 31, 255, 90, 12, 201}
	return &Planner{TouchCost: 30}, peers, replicas, experts, make([]int32, len(experts))
}

func TestPlanDoesNotAllocate(t *testing.T) {
	planner, peers, replicas, experts, choice := decode()
	if n := testing.AllocsPerRun(100, func() { planner.Plan(peers, replicas, experts, choice) }); n != 0 {
		t.Errorf("%v allocations per plan", n)
	}
}

func BenchmarkPlanOneToken(b *testing.B) {
	planner, peers, replicas, experts, choice := decode()
	b.ReportAllocs()
	for b.Loop() {
		planner.Plan(peers, replicas, experts, choice)
	}
}
