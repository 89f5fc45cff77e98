//go:build cgo

package ggml

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
)

const tinyPath = "tiny/kvasir-tiny-q4_k_m.gguf"

func openRuntime(t testing.TB) *Runtime {
	t.Helper()
	rt, err := Open(Config{})
	if err != nil {
		t.Fatal(err)
	}
	return rt
}

// TestMain ends with no C object alive: every test closes what it made.
func TestMain(m *testing.M) {
	if os.Getenv(probeEnv) != "" {
		os.Exit(serveProbe())
	}
	code := m.Run()
	if left := Live(); len(left) > 0 && code == 0 {
		println("not closed:\n" + strings.Join(left, "\n"))
		code = 1
	}
	os.Exit(code)
}

// kernels splits the experts of a file over k kernels of uneven ranges and
// answers calls through them: what a set of workers does, without a network.
type kernels struct {
	list  []*Kernel
	begin []int
	calls map[int]int // by layer
	sums  int         // calls that go on with a sum
}

func newKernels(t testing.TB, rt *Runtime, path string, k int, cfg KernelConfig) *kernels {
	t.Helper()
	m, err := gguf.OpenModel(path)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ks := &kernels{calls: map[int]int{}}
	for i := range k {
		begin, end := unevenCut(m.Experts(), k, i), unevenCut(m.Experts(), k, i+1)
		kernel, err := rt.NewKernel(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kernel.Close() })
		for _, layer := range m.ExpertLayers() {
			if err := kernel.Load(m, layer, gguf.Range{Begin: begin, End: end}); err != nil {
				t.Fatal(err)
			}
		}
		ks.list = append(ks.list, kernel)
		ks.begin = append(ks.begin, begin)
	}
	return ks
}

// unevenCut is the i-th of k+1 cuts of n experts: every range has one, the rest
// goes to the ranges in the proportion k : k-1 : … : 1.
func unevenCut(n, k, i int) int {
	return i + (n-k)*(i*k-i*(i-1)/2)/(k*(k+1)/2)
}

func (ks *kernels) compute(_ context.Context, call *ExpertCall) error {
	ks.calls[call.Layer]++
	for w := range ks.list {
		end := int32(math.MaxInt32)
		if w+1 < len(ks.list) {
			end = int32(ks.begin[w+1])
		}
		var row, expert, pair []int32
		for p, e := range call.IDs {
			if e >= int32(ks.begin[w]) && e < end {
				r := p
				if call.RowsPerToken == 1 {
					r = p / call.Used
				}
				row, expert, pair = append(row, int32(r)), append(expert, e), append(pair, int32(p))
			}
		}
		if len(row) == 0 {
			continue
		}
		prog, _, out, err := ks.list[w].SetProgram(call.Layer, call.Program)
		if err != nil {
			return err
		}
		res := make([]float32, len(row)*out)
		if err := ks.list[w].Compute(prog, call.Rows, row, expert, res); err != nil {
			return err
		}
		for i, p := range pair {
			copy(call.Out[int(p)*out:], res[i*out:(i+1)*out])
		}
	}
	if call.Sum != nil {
		ks.sums++
		if (ks.sums+ks.calls[call.Layer])%2 == 0 { // else the device does
			sum(call)
		}
	}
	return nil
}

// sum weights and sums the rows of a call.
func sum(call *ExpertCall) {
	for p, weight := range call.Weights {
		to := call.Sum[p/call.Used*call.OutWidth:][:call.OutWidth]
		for i, x := range call.Out[p*call.OutWidth:][:call.OutWidth] {
			if x *= weight; p%call.Used == 0 {
				to[i] = x
			} else {
				to[i] += x
			}
		}
	}
	call.Summed = true
}

// run feeds prompt in one batch and then single tokens, and returns the logits
// of every token.
func run(t testing.TB, m *Model, prompt []Token, single int) [][]float32 {
	t.Helper()
	c, err := m.NewContext(ContextConfig{Tokens: 256, Batch: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var all [][]float32
	b := NewBatch(64)
	n := len(prompt) - single
	for i, tok := range prompt[:n] {
		b.Add(tok, i, 0, true)
	}
	decode(t, c, b, &all)
	for i, tok := range prompt[n:] {
		b.Reset()
		b.Add(tok, n+i, 0, true)
		decode(t, c, b, &all)
	}
	return all
}

func decode(t testing.TB, c *Context, b *Batch, all *[][]float32) {
	t.Helper()
	if err := c.Decode(context.Background(), b); err != nil {
		t.Fatal(err)
	}
	for i := range b.Len() {
		*all = append(*all, slices.Clone(c.Logits(i)))
	}
}

// maxAbs is the largest difference; NaN anywhere gives +Inf.
func maxAbs(a, b [][]float32) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	worst := 0.0
	for i := range a {
		if len(a[i]) != len(b[i]) || len(a[i]) == 0 {
			return math.Inf(1)
		}
		for j := range a[i] {
			d := math.Abs(float64(a[i][j]) - float64(b[i][j]))
			if math.IsNaN(d) {
				return math.Inf(1)
			}
			worst = max(worst, d)
		}
	}
	return worst
}

func loadModel(t testing.TB, rt *Runtime, cfg ModelConfig) *Model {
	t.Helper()
	m, err := rt.LoadModel(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestSwarmEqualsAlone(t *testing.T) {
	rt := openRuntime(t)
	alone := loadModel(t, rt, ModelConfig{Path: tinyPath})
	prompt, err := alone.Tokenize("The capital of France is Paris. A worker holds a slice of the experts.", true, true)
	if err != nil {
		t.Fatal(err)
	}
	want := run(t, alone, prompt, 5)
	for _, k := range []int{1, 2, 4, 7, 32} {
		ks := newKernels(t, rt, tinyPath, k, KernelConfig{Threads: 1})
		swarm := loadModel(t, rt, ModelConfig{Path: tinyPath, Experts: ks.compute})
		got := run(t, swarm, prompt, 5)
		if d := maxAbs(want, got); d != 0 {
			t.Errorf("%d workers: max |Δ| of the logits is %g, want 0", k, d)
		}
		for layer := range alone.Layers() {
			if ks.calls[layer] != 6 {
				t.Errorf("%d workers: layer %d: %d expert calls, want 6: one split per ubatch", k, layer, ks.calls[layer])
			}
		}
	}
}

func TestExpertErrorFailsThatDecodeOnly(t *testing.T) {
	rt := openRuntime(t)
	ks := newKernels(t, rt, tinyPath, 1, KernelConfig{})
	boom := errors.New("worker is gone")
	fail, crash := false, false
	m := loadModel(t, rt, ModelConfig{Path: tinyPath, Experts: func(ctx context.Context, call *ExpertCall) error {
		if call.Layer == 2 && fail {
			return boom
		}
		if call.Layer == 2 && crash {
			panic("in a callback")
		}
		return ks.compute(ctx, call)
	}})
	c, err := m.NewContext(ContextConfig{Tokens: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := NewBatch(4)
	b.Add(5, 0, 0, true)
	fail = true
	if err := c.Decode(context.Background(), b); !errors.Is(err, boom) {
		t.Fatalf("got %v, want the expert error", err)
	}
	fail, crash = false, true
	c.SeqRemove(0, -1, -1)
	if err := c.Decode(context.Background(), b); err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Fatalf("got %v, want an error about the panic", err)
	}
	crash = false
	c.SeqRemove(0, -1, -1)
	if err := c.Decode(context.Background(), b); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Decode(ctx, b); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}
}
