package plan

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"testing"
)

const gib = 1 << 30

func describe122B(t *testing.T) Model {
	t.Helper()
	m, err := Describe(qwen122B(t))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestQwen122BOnOneGPU: the model of 77.6 GB on one machine with a GPU of 64 GB.
func TestQwen122BOnOneGPU(t *testing.T) {
	m := describe122B(t)
	all, experts := m.Bytes()
	if math.Abs(float64(m.Files)-77.6e9) > 0.4e9 || math.Abs(float64(experts)/float64(all)-0.86) > 0.01 {
		t.Fatalf("the header says %.2f GB, %.1f %% of it experts; want 77.6 GB, 86 %%", float64(m.Files)/1e9, 100*float64(experts)/float64(all))
	}
	q := Query{Model: m, Context: 65536, Sequences: 4}
	node := Node{Name: "gpu", RAM: 32 * gib, VRAM: 64 * gib, Disk: 100 * gib}
	p, err := Fit(q, node)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("VRAM %.1f GiB, RAM %.1f GiB, cache %.2f GiB, %d rules", float64(p.VRAM)/gib, float64(p.RAM)/gib, float64(p.KV)/gib, len(p.Rules))
	if len(p.Rules) < 9 || len(p.Rules) > 11 || p.GPULayers != 49 {
		t.Errorf("%d layers have their experts in RAM, %d lie on the GPU; want about 10, and all 49", len(p.Rules), p.GPULayers)
	}
	if math.Abs(float64(p.VRAM)/gib-62.6) > 1.4 || math.Abs(float64(p.RAM)/gib-14.2) > 1.4 {
		t.Errorf("VRAM %.1f GiB, RAM %.1f GiB; want about 62.6 and 14.2", float64(p.VRAM)/gib, float64(p.RAM)/gib)
	}
	rule := regexp.MustCompile(`^blk\\\.(\d+)\\\.ffn_\(up\|down\|gate\)_\(ch\|\)exps=CPU$`)
	for i, r := range p.Rules {
		if !rule.MatchString(r) {
			t.Errorf("rule %q", r)
		}
		pattern, device, err := ParseRule(r)
		if err != nil || device != "CPU" {
			t.Fatalf("rule %q: device %q, %v", r, device, err)
		}
		layer := 49 - len(p.Rules) + i
		for l := range 49 {
			for _, name := range []string{"ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_exps.weight"} {
				got := regexp.MustCompile(pattern).MatchString(fmt.Sprintf("blk.%d.%s", l, name))
				if got != (l == layer) {
					t.Errorf("rule %q and blk.%d.%s: %v", r, l, name, got)
				}
			}
		}
	}

	// Without enough RAM beside it, it says how much is missing, before anything is loaded.
	node.RAM = 8 * gib
	var no *NoRoomError
	if _, err := Fit(q, node); !errors.As(err, &no) || no.Missing != p.RAM-node.RAM {
		t.Errorf("with 8 GiB of RAM: %v; want %d bytes missing", err, p.RAM-node.RAM)
	}
}
