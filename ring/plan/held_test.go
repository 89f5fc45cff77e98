package plan

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"kvasird/ggml/gguf"
)

// piece is that of a stage that has its experts.
func piece(begin, end, experts int) []Piece {
	return []Piece{{Layers: gguf.Range{Begin: begin, End: end}, Dense: true, Experts: gguf.Range{End: experts}}}
}

// downloads writes who is to hold what, and the MB to download for it.
func downloads(c Candidate) (list []string) {
	for _, p := range c.Places {
		list = append(list, fmt.Sprintf("%s %v %v %.0f", p.Node, p.Layers, p.Experts, float64(p.Download)/1e6))
	}
	return list
}

// find returns the candidate of a kind.
func find(t *testing.T, q Query, kind Kind) Candidate {
	t.Helper()
	q.Context, q.Sequences = 4096, 4
	q.RTT = func(a, b string) (time.Duration, bool) { return 300 * time.Microsecond, true }
	p, err := Make(q)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(p.Candidates, func(c Candidate) bool { return c.Kind == kind })
	if i < 0 {
		t.Fatalf("no %s in %+v", kind, p.Candidates)
	}
	return p.Candidates[i]
}

// TestHeldIsNotDownloaded: what nodes have stays where it is when that is as fast, and
// the rest alone is downloaded.
func TestHeldIsNotDownloaded(t *testing.T) {
	moe := dense(4)
	moe.Experts = 16
	for i := range moe.Layers {
		moe.Layers[i].Expert, moe.Layers[i].Used = 10e6, 2
	}
	moe.Files, _ = moe.Bytes()
	tied := dense(4)
	tied.Tied = true
	tied.Files, _ = tied.Bytes()
	boxes := func(model Model, n int, bytes int64, held ...[]Piece) Query {
		q := Query{Model: model, Nodes: same(n, "n", ram(1, 20e9)), Cuts: every(1, len(model.Layers))}
		for i := range q.Nodes {
			q.Nodes[i].RAM = q.Overhead() + bytes
			if i < len(held) {
				q.Nodes[i].Held = held[i]
			}
		}
		return q
	}
	for _, tt := range []struct {
		name string
		q    Query
		kind Kind
		want []string
	}{
		{"nothing is held", boxes(dense(12), 3, 650e6), Ring, []string{"n0 0:2 0:0 300", "n1 2:8 0:0 600", "n2 8:12 0:0 500"}},
		{"a ring that runs", boxes(dense(12), 3, 650e6, piece(4, 9, 0), piece(9, 12, 0), piece(0, 4, 0)), Ring,
			[]string{"n2 0:4 0:0 0", "n0 4:9 0:0 0", "n1 9:12 0:0 0"}},
		{"one that lacks a stage", boxes(dense(12), 3, 650e6, piece(4, 9, 0), nil, piece(0, 4, 0)), Ring,
			[]string{"n2 0:4 0:0 0", "n0 4:9 0:0 0", "n1 9:12 0:0 400"}},
		{"the whole of it in one place", boxes(dense(4), 2, 2e9, nil, piece(0, 4, 0)), WholeReplica, []string{"n1 0:4 0:0 0", "n0 0:4 0:0 600"}},
		{"a table that is the head too", boxes(tied, 2, 2e9, nil, piece(0, 4, 0)), WholeReplica, []string{"n1 0:4 0:0 0", "n0 0:4 0:0 500"}},
		{"the last layers with such a table", boxes(tied, 2, 2e9, nil, piece(3, 4, 0)), WholeReplica, []string{"n1 0:4 0:0 300", "n0 0:4 0:0 500"}},
		{"experts of others", boxes(moe, 3, 700e6, nil, []Piece{{Layers: gguf.Range{End: 4}, Experts: gguf.Range{Begin: 8, End: 16}}},
			[]Piece{{Layers: gguf.Range{End: 2}, Experts: gguf.Range{End: 8}}}), ExpertWorkers,
			[]string{"n0 0:4 0:0 600", "n2 0:4 0:8 160", "n1 0:4 8:16 0"}},
	} {
		if got := downloads(find(t, tt.q, tt.kind)); !slices.Equal(got, tt.want) {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, tt.want)
		}
	}
}

// TestHeldTakesNoOtherDisk: what is held is on disk already.
func TestHeldTakesNoOtherDisk(t *testing.T) {
	q := Query{Model: dense(4), Context: 1024, Sequences: 1}
	n := ram(4, 20e9)
	n.Name, n.Disk, n.Held = "a", 100e6, piece(0, 3, 0)
	if p, err := Fit(q, n); err == nil || p.Download != 0 {
		t.Errorf("600 MB with room for 500: %+v", p)
	}
	n.Disk = 200e6
	if p, err := Fit(q, n); err != nil || p.Disk != 600e6 || p.Download != 200e6 {
		t.Errorf("600 MB of which 400 are held: %+v, %v", p, err)
	}
}
