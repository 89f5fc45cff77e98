package plan

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

// every returns the layers at multiples of n below layers.
func every(n, layers int) (cuts []int) {
	for i := n; i < layers; i += n {
		cuts = append(cuts, i)
	}
	return cuts
}

// same makes nodes a0, a1, … that give the same.
func same(n int, name string, node Node) (list []Node) {
	for i := range n {
		node.Name = fmt.Sprint(name, i)
		list = append(list, node)
	}
	return list
}

// dense is a model without experts, of so many layers of 100 MB.
func dense(layers int) Model {
	m := Model{Arch: "llama", Width: 4096, Vocab: 32000, Embedding: 100e6, Head: 100e6}
	for range layers {
		m.Layers = append(m.Layers, Layer{Dense: 100e6, KV: 4096})
	}
	m.Files, _ = m.Bytes()
	return m
}

var (
	ram = func(n int64, rate float64) Node {
		return Node{RAM: n * gib, Disk: 200 * gib, CPU: Speed{Bytes: rate, Batch: 4 * rate, Layer: 30 * time.Microsecond},
			Up: 100e6, Down: 100e6, Call: 200 * time.Microsecond}
	}
	gpu = func(n, vram int64) Node {
		g := ram(n, 40e9)
		g.VRAM, g.GPU = vram*gib, Speed{Bytes: 800e9, Batch: 20e12, Layer: 20 * time.Microsecond}
		return g
	}
)

func TestPlanGolden(t *testing.T) {
	big := describe122B(t)
	cuts := every(4, 49)
	fixed := func(d time.Duration) func(a, b string) (time.Duration, bool) {
		return func(a, b string) (time.Duration, bool) { return d, true }
	}
	lan, wan := fixed(300*time.Microsecond), fixed(20*time.Millisecond)
	tests := []struct {
		name string
		q    Query
	}{
		{"one node that holds it", Query{Model: dense(32), Nodes: same(1, "a", ram(16, 20e9)), Cuts: every(1, 32)}},
		{"a dense model on two nodes on a LAN: the split loses for one stream", Query{Model: dense(32), Nodes: same(2, "a", ram(16, 20e9)), Cuts: every(1, 32), RTT: lan}},
		{"the same with a slow line: refused", Query{Model: dense(32), Nodes: same(2, "a", ram(16, 20e9)), Cuts: every(1, 32), RTT: wan, Sequences: 2}},
		{"a fast server and two laptops: splits are refused", Query{Model: big, Nodes: append(same(1, "server", ram(128, 150e9)), same(2, "laptop", ram(64, 30e9))...), Cuts: cuts, RTT: lan}},
		{"three machines, none of which holds it", Query{Model: big, Nodes: same(3, "box", ram(48, 40e9)), Cuts: cuts, RTT: lan}},
		{"the same with 20 ms between them", Query{Model: big, Nodes: same(3, "box", ram(48, 40e9)), Cuts: cuts, RTT: wan}},
		{"a small backbone and phones that hold less than a window", Query{Model: big, Nodes: append(same(1, "pc", ram(16, 40e9)), same(30, "phone", ram(4, 15e9))...), Cuts: cuts, RTT: lan}},
		{"the dense part fits nowhere: a ring of backbones", Query{Model: big, Nodes: same(16, "box", ram(8, 20e9)), Cuts: cuts, RTT: lan}},
		{"one GPU and RAM beside it", Query{Model: big, Nodes: same(1, "gpu", gpu(96, 24)), Cuts: cuts}},
		{"a GPU too small for the dense part", Query{Model: big, Nodes: same(1, "gpu", gpu(96, 6)), Cuts: cuts}},
		{"a GPU node and RAM nodes", Query{Model: big, Nodes: append(same(1, "gpu", gpu(16, 48)), same(2, "box", ram(32, 40e9))...), Cuts: cuts, RTT: lan}},
		{"too little of everything", Query{Model: big, Nodes: same(3, "box", ram(8, 20e9)), Cuts: cuts, RTT: lan}},
		{"a context that does not fit", Query{Model: big, Nodes: same(1, "box", ram(80, 40e9)), Cuts: cuts, Context: 1 << 20}},
		{"no room on disk", Query{Model: big, Nodes: []Node{{Name: "box", RAM: 96 * gib, Disk: 20 * gib}}, Cuts: cuts}},
		{"an architecture that is not proved to be cut rightly", Query{Model: big, Nodes: same(2, "box", ram(48, 40e9)), NoCuts: "llama.cpp does not compute a part of it as it computes the whole", RTT: lan}},
		{"nothing is known of nodes and links", Query{Model: big, Nodes: []Node{{Name: "a", RAM: 64 * gib, Disk: 100 * gib, Cores: 8}, {Name: "b", RAM: 64 * gib, Disk: 100 * gib, Cores: 2}}, Cuts: cuts}},
	}
	var out bytes.Buffer
	for _, tt := range tests {
		if tt.q.Context == 0 {
			tt.q.Context = 16384
		}
		if tt.q.Sequences == 0 {
			tt.q.Sequences = 8
		}
		fmt.Fprintf(&out, "%s\n", tt.name)
		began := time.Now()
		p, err := Make(tt.q)
		if took := time.Since(began); took > time.Second {
			t.Logf("%s: %v", tt.name, took)
		}
		if err != nil {
			fmt.Fprintf(&out, "  error: %v\n", err)
			continue
		}
		for _, c := range p.Candidates {
			writeCandidate(&out, c)
		}
		for _, n := range p.Notes {
			fmt.Fprintf(&out, "  note: %s\n", n)
		}
	}
	golden(t, "plan.golden", out.Bytes())
}

func writeCandidate(out *bytes.Buffer, c Candidate) {
	fmt.Fprintf(out, "  %s", c.Kind)
	if c.Refused != "" {
		fmt.Fprintf(out, ": %s", c.Refused)
	}
	fmt.Fprintln(out)
	if len(c.Places) == 0 {
		return
	}
	fmt.Fprintf(out, "    one %.1f/s by %s; all %.1f/s by %s\n", c.One.TokensPerSecond, c.One.Limit, c.Many.TokensPerSecond, c.Many.Limit)
	for i, p := range c.Places {
		if i >= 6 {
			fmt.Fprintf(out, "    and %d more\n", len(c.Places)-i)
			break
		}
		fmt.Fprintf(out, "    %s %s layers %v", p.Node, p.Role, p.Layers)
		if p.Experts.Len() > 0 {
			fmt.Fprintf(out, " experts %v", p.Experts)
		}
		fmt.Fprintf(out, " ram %.2f vram %.2f kv %.2f disk %.2f", float64(p.RAM)/gib, float64(p.VRAM)/gib, float64(p.KV)/gib, float64(p.Disk)/gib)
		if len(p.Rules) > 0 {
			fmt.Fprintf(out, " rules %d: %s", len(p.Rules), strings.Join(p.Rules[:1], ""))
		}
		fmt.Fprintln(out)
	}
}
