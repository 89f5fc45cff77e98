package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/tensor"
	"kvasird/ggml/tiny"
)

const childEnv = "KVASIR_TEST_VERIFY_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := Serve(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// testConfig has plain Go, the oldest CPU variant and the best one that runs here.
func testConfig(t *testing.T) *Config {
	t.Helper()
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	all, err := Backends("")
	if err != nil {
		t.Fatal(err)
	}
	names := []string{tolerance.Reference, rt.Variant()}
	for _, b := range all {
		if b.Name == "cpu-sse42" || b.Name == "cpu-armv8.0_1" {
			names = append(names, b.Name)
		}
	}
	backends, err := Choose(all, names)
	if err != nil {
		t.Fatal(err)
	}
	return &Config{
		Child: func(ctx context.Context, _ Backend) *exec.Cmd {
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), childEnv+"=1")
			return cmd
		},
		Backends: backends, Shapes: Shapes[:1], Quants: []tensor.DType{tensor.F32, tensor.Q4_K, tensor.Q8_0}, Rows: 1,
	}
}

// TestVerify measures backends of this machine in processes of their own: they agree, and the
// report of it is what its readers take.
func TestVerify(t *testing.T) {
	cfg := testConfig(t)
	var r Report
	var err error
	if r.Operations, err = MeasureOperations(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	path, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	m := &ModelConfig{Path: path, Base: cfg.Backends[1], Prompts: Prompts[:2], Greedy: 8, Text: "The capital of France is Paris."}
	if r.Model, err = MeasureModel(t.Context(), cfg, m); err != nil {
		t.Fatal(err)
	}
	r.Judge()
	var text, drawn bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if !r.Within {
		t.Errorf("not within the tolerance:\n%s", &text)
	}
	differ := 0
	for _, p := range r.Operations.Pairs {
		if p.Largest.L2 > 0 {
			differ++
		}
	}
	// Plain Go and a CPU never round alike.
	if differ < 10 || len(r.Operations.Table("test")) == 0 {
		t.Errorf("only %d of %d comparisons show a difference", differ, len(r.Operations.Pairs))
	}
	for _, p := range r.Model.Pairs {
		if p.Trouble != "" || p.Differ != 0 && p.Backend != tolerance.Reference || p.Perplexity < 1 || p.Top1 < 0.9 {
			t.Errorf("model: %+v", p)
		}
	}
	if err := r.WriteSVG(&drawn); err != nil {
		t.Fatal(err)
	}
	dec := xml.NewDecoder(&drawn)
	for err = nil; err == nil; _, err = dec.Token() {
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("SVG: %v", err)
	}
	line, err := json.Marshal(&r)
	if err != nil {
		t.Fatal(err)
	}
	var again Report
	if err := json.Unmarshal(line, &again); err != nil || len(again.Operations.Pairs) != len(r.Operations.Pairs) {
		t.Errorf("JSON: %v", err)
	}
}

// TestVerifyFinds: a backend that computes one value otherwise, or rounds sums to f16, is outside.
func TestVerifyFinds(t *testing.T) {
	cfg := testConfig(t)
	cfg.Backends, cfg.Quants = cfg.Backends[1:2], []tensor.DType{tensor.Q4_K}
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		t.Fatal(err)
	}
	job := task{Backend: cfg.Backends[0]}
	if job.Samples, job.Ops, err = cfg.inputs(rt, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	honest, err := cfg.ask(t.Context(), &job)
	if err != nil {
		t.Fatal(err)
	}
	for name, wrong := range map[string]func(rows []float32){
		"one value":     func(rows []float32) { rows[len(rows)/2] += 1 + rows[len(rows)/2] },
		"scaled":        func(rows []float32) { scale(rows, 1.05) },
		"another order": func(rows []float32) { slices.Reverse(rows) },
	} {
		for n, s := range job.Samples {
			if s.Op != opFFN {
				continue
			}
			liar := *honest
			liar.Rows = slices.Clone(honest.Rows)
			rows := slices.Clone(honest.Rows[n][0])
			wrong(rows)
			liar.Rows[n] = [][]float32{rows}
			r := Report{Operations: &Operations{
				Backends: []Measured{{Backend: "cpu-haswell"}, {Backend: "cpu-zen4"}},
				Pairs:    comparePairs(&job, []computed{{"cpu-haswell", honest}, {"cpu-zen4", &liar}}),
			}}
			if r.Judge(); r.Within || !strings.Contains(r.Verdicts[1], "outside the tolerance") {
				t.Errorf("%s is not found: %q", name, r.Verdicts)
			}
		}
	}
}

func scale(rows []float32, by float32) {
	for i := range rows {
		rows[i] *= by
	}
}

func TestChoose(t *testing.T) {
	all := []Backend{{Name: "reference"}, {Name: "cpu-zen4", Variant: "zen4"}, {Name: "vulkan", Device: "Vulkan0"}}
	got, err := Choose(all, []string{"zen4", "Vulkan0", "cpu-zen4"})
	if err != nil || !slices.Equal(got, all[1:]) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := Choose(all, []string{"zen5"}); err == nil || !strings.Contains(err.Error(), `no backend "zen5" here; there are: reference, cpu-zen4, vulkan`) {
		t.Errorf("%v", err)
	}
}

// TestLostChild: a child that dies, and one that cannot open its backend, are told of by name.
func TestLostChild(t *testing.T) {
	cfg := testConfig(t)
	cfg.Backends = []Backend{{Name: "cpu-none", Variant: "none"}}
	o, err := MeasureOperations(t.Context(), cfg)
	if err != nil || len(o.Backends) != 1 || !strings.Contains(o.Backends[0].Trouble, "none") {
		t.Errorf("%+v, %v", o, err)
	}
	cfg.Child = func(ctx context.Context, _ Backend) *exec.Cmd { return exec.CommandContext(ctx, "false") }
	if o, err = MeasureOperations(t.Context(), cfg); err != nil || !strings.Contains(o.Backends[0].Trouble, "its process ended") {
		t.Errorf("%+v, %v", o, err)
	}
}
