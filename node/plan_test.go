//go:build cgo && linux

package node

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/tiny"
	"kvasird/ring/plan"
)

const planSpecText = `
rtt = "1 ms"

[[node]]
name = "a"
ram = "2 GB"
disk = "100 GB"
memory_bandwidth = "20 GB/s"
batch_bandwidth = "40 GB/s"
layer_time = "20us"
upload = "100 MB/s"
download = "50 MB/s"
call_time = "150us"

[[node]]
name = "b"
ram = "1 GB"
vram = "8 GiB"
gpu_bandwidth = "500 GB/s"
gpu_layer_time = "15us"
has_model = true
cores = 4

[[link]]
between = ["b", "a"]
rtt = "20ms"
`

func TestPlanSpec(t *testing.T) {
	nodes, rtt, err := parsePlanSpec([]byte(planSpecText))
	if err != nil {
		t.Fatal(err)
	}
	want := []plan.Node{
		{Name: "a", RAM: 2e9, Disk: 100e9, CPU: plan.Speed{Bytes: 20e9, Batch: 40e9, Layer: 20 * time.Microsecond}, Up: 100e6, Down: 50e6, Call: 150 * time.Microsecond},
		{Name: "b", RAM: 1e9, VRAM: 8 << 30, Disk: unlimitedDisk, Has: true, Cores: 4, GPU: plan.Speed{Bytes: 500e9, Layer: 15 * time.Microsecond}},
	}
	if !reflect.DeepEqual(nodes, want) {
		t.Errorf("nodes %+v, want %+v", nodes, want)
	}
	for _, tt := range []struct {
		a, b string
		want time.Duration
	}{{"a", "b", 20 * time.Millisecond}, {"b", "a", 20 * time.Millisecond}, {"a", "c", time.Millisecond}} {
		if d, ok := rtt(tt.a, tt.b); !ok || d != tt.want {
			t.Errorf("round trip %s - %s: %v, %v, want %v", tt.a, tt.b, d, ok, tt.want)
		}
	}
}

// TestPlanSpecExample reads the file that people copy.
func TestPlanSpecExample(t *testing.T) {
	text, err := readPlanSpec("../docs/plan/nodes.toml")
	if err != nil {
		t.Fatal(err)
	}
	nodes, rtt, err := parsePlanSpec([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if d, ok := rtt("desk", "laptop"); len(nodes) != 2 || !ok || d != 4*time.Millisecond {
		t.Errorf("%+v, %v", nodes, d)
	}
}

// TestPlanSpecRefuses has one text for each reason.
func TestPlanSpecRefuses(t *testing.T) {
	node := "[[node]]\nname = \"a\"\nram = \"1 GB\"\n"
	for _, tt := range []struct{ text, want string }{
		{"", "0 nodes"},
		{strings.Repeat(node, plan.MaxNodes+1), "65 nodes"},
		{"[[node]]\nram = \"1 GB\"", "no name"},
		{"[[node]]\nname = \"a\"", "no ram"},
		{node + "rma = \"1 GB\"", `4: unknown key "node.rma"; did you mean "node.ram"?`},
		{node + "ram = \"2 GB\"", "4:"},
		{"[[node]]\nname = \"a\"\nram = \"much\"", "ram \"much\""},
		{node + "vram = \"-1\"", "vram"},
		{node + "memory_bandwidth = \"fast\"", "want a rate"},
		{node + "layer_time = \"2 parsecs\"", "want a time"},
		{node + "call_time = \"-3ms\"", "want a time"},
		{node + "cores = -1", "cores = -1"},
		{"rtt = \"2h\"\n" + node, "rtt \"2h\""},
		{node + "[[link]]\nbetween = [\"a\"]\nrtt = \"1ms\"", "link 1: want between"},
		{node + "[[link]]\nbetween = [\"a\", \"aa\"]\nrtt = \"1ms\"", `no node is named "aa"`},
		{node + "[[link]]\nbetween = [\"a\", \"b\"]", "link 1: want between"},
		{"node = 3", "1:"},
	} {
		if _, _, err := parsePlanSpec([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
}

func FuzzPlanSpec(f *testing.F) {
	f.Add([]byte(planSpecText))
	f.Add([]byte("rtt = \"1ms\"\n[[node]]\nname = \"a\"\nram = \"1 GB\""))
	f.Fuzz(func(t *testing.T, text []byte) {
		nodes, rtt, err := parsePlanSpec(text)
		if err != nil {
			return
		}
		m := plan.Model{Arch: "a", Width: 64, Vocab: 64, Embedding: 1 << 20, Head: 1 << 20, Files: 1 << 23,
			Layers: slices.Repeat([]plan.Layer{{Dense: 1 << 20, KV: 64}}, 4)}
		if _, err := plan.Make(plan.Query{Model: m, Nodes: nodes, Cuts: []int{1, 2, 3}, Context: 64, Sequences: 2, RTT: rtt}); err != nil && !strings.Contains(err.Error(), "two nodes") {
			t.Errorf("what was read cannot be planned with: %v", err)
		}
	})
}

// planned runs `kvasird plan`.
func planned(t *testing.T, opts PlanOptions, model string, settings ...func(*Config)) (string, error) {
	t.Helper()
	cfg := Config{Data: filepath.Join(t.TempDir(), "data")}
	for _, set := range settings {
		set(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := PlanModel(t.Context(), cfg, opts, model, &out)
	return out.String(), err
}

func TestPlanModel(t *testing.T) {
	dir := t.TempDir()
	path, err := tiny.Write(dir)
	if err != nil {
		t.Fatal(err)
	}
	spec := filepath.Join(dir, "spec.toml")
	if err := os.WriteFile(spec, []byte(planSpecText), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := planned(t, PlanOptions{Nodes: spec}, path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"qwen3moe, 4 layers", "Best: whole replica", "slower than not splitting", "limited by", "to download"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	text, err = planned(t, PlanOptions{Nodes: spec, JSON: true}, path, func(c *Config) { c.Model.Context, c.Model.Sequences = 4096, 2 })
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Context, Sequences int
		Candidates         []plan.Candidate
	}
	if err := json.Unmarshal([]byte(text), &got); err != nil || got.Context != 4096 || got.Sequences != 2 || len(got.Candidates) < 4 {
		t.Errorf("%+v, %v of\n%s", got, err, text)
	}
	if text, err = planned(t, PlanOptions{}, ""); err != nil || !strings.Contains(text, "only this machine was looked at") || !strings.Contains(text, "was not measured") {
		t.Errorf("the node's own model, without a daemon: %v\n%s", err, text)
	}
	bad := filepath.Join(dir, "bad.gguf")
	if err := os.WriteFile(bad, []byte("no model"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ nodes, model, want string }{
		{"", filepath.Join(dir, "none.gguf"), "no such file"},
		{"", bad, "bad.gguf"},
		{"", "none", `no model "none" in the store`},
		{filepath.Join(dir, "none.toml"), path, "no such file"},
		{bad, path, "bad.gguf:1:"},
	} {
		if text, err := planned(t, PlanOptions{Nodes: tt.nodes}, tt.model); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s with %q: %q, %v, want %q", tt.model, tt.nodes, text, err, tt.want)
		}
	}
}

// TestMeasuredIsKept: a measurement is used again, for the same runtime and threads.
func TestMeasuredIsKept(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	m := Measured{Release: "r1", Threads: 2, Speed: plan.Speed{Bytes: 2e10, Batch: 3e10, Layer: 9 * time.Microsecond}, Call: 50 * time.Microsecond, Rate: 2e8}
	if _, ok := loadMeasured(data, "r1", 2); ok {
		t.Error("there is a measurement before the first")
	}
	if err := m.save(data); err != nil {
		t.Fatal(err)
	}
	if kept, ok := loadMeasured(data, "r1", 2); !ok || kept != m {
		t.Errorf("kept %+v, %v, want %+v", kept, ok, m)
	}
	for _, other := range []struct {
		release string
		threads int
	}{{"r1", 1}, {"r2", 2}} {
		if _, ok := loadMeasured(data, other.release, other.threads); ok {
			t.Errorf("the measurement is used for %+v", other)
		}
	}
	if err := os.WriteFile(filepath.Join(data, measuredName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, ok := loadMeasured(data, "r1", 2); ok {
		t.Error("a broken file is used")
	}
}
