//go:build cgo && linux

package audit_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvasird/experts/audit"
	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
	"kvasird/ggml/tiny"
)

// The answers that are judged here are those of the real kernels: of each CPU variant that this
// machine can run, in a process of its own, with the shipped model's weights of one layer (K types).
const (
	width, used, experts, layer = 256, 4, 32, 1
	calibrated                  = 400  // calls that bands are measured with
	judged                      = 5200 // other ones
	headroom                    = 2    // of a band over the largest distance that was measured
	childEnv                    = "KVASIR_AUDIT_KERNEL"
)

var variants = []string{"sse42", "sandybridge", "haswell", "skylakex", "zen4"}

func TestMain(m *testing.M) {
	if job := os.Getenv(childEnv); job != "" {
		if err := child(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// call is a row with its experts.
type call struct {
	row []float32
	ids []int32
}

// calls are the same in every process.
func calls() (list []call) {
	rng := rand.New(rand.NewPCG(7, 7))
	for range calibrated + judged {
		c := call{row: make([]float32, width)}
		for i := range c.row {
			c.row[i] = float32(rng.NormFloat64())
		}
		for _, e := range rng.Perm(experts)[:used] {
			c.ids = append(c.ids, int32(e))
		}
		list = append(list, c)
	}
	return list
}

// computer is a kernel, or the plain Go one.
type computer interface {
	SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error)
	Compute(prog int, rows []float32, row, expert []int32, out []float32) error
}

// compute is the answer to some calls, with expert ids as instead has them.
func compute(k computer, list []call, instead func(int32) int32) ([][]float32, error) {
	program, err := (&ggml.Program{Version: 1, RowWidth: width, Ops: []ggml.Op{
		{Code: ggml.OpMatMul, Weight: "ffn_gate_exps.weight", Width: width},
		{Code: ggml.OpMatMul, Weight: "ffn_up_exps.weight", Width: width},
		{Code: ggml.OpGLU, A: 1, B: 2, Act: ggml.ActSwiGLU, Width: width},
		{Code: ggml.OpMatMul, A: 3, Weight: "ffn_down_exps.weight", Width: width},
	}}).Marshal()
	if err != nil {
		return nil, err
	}
	prog, _, _, err := k.SetProgram(layer, program)
	var out [][]float32
	for i := 0; err == nil && i < len(list); i++ {
		ids := slices.Clone(list[i].ids)
		for j := range ids {
			ids[j] = instead(ids[j])
		}
		rows := make([]float32, used*width)
		err = k.Compute(prog, list[i].row, make([]int32, used), ids, rows)
		out = append(out, rows)
	}
	return out, err
}

func same(e int32) int32 { return e }

// swapped has two experts in each other's place.
func swapped(e int32) int32 {
	switch e {
	case 3:
		return 4
	case 4:
		return 3
	}
	return e
}

// child computes all calls with a CPU variant and a file: "variant swap file", to stdout.
func child(job string) error {
	var variant, file string
	var swap bool
	if _, err := fmt.Sscan(job, &variant, &swap, &file); err != nil {
		return err
	}
	rt, err := ggml.Open(ggml.Config{Variant: variant})
	if err != nil {
		return err
	}
	m, err := gguf.OpenModel(file)
	if err != nil {
		return err
	}
	k, err := rt.NewKernel(ggml.KernelConfig{Threads: 1})
	if err == nil {
		err = k.LoadSlices(m, whole)
	}
	if err != nil {
		return err
	}
	instead := same
	if swap {
		instead = swapped
	}
	out, err := compute(k, calls(), instead)
	if err == nil {
		_, err = io.Copy(os.Stdout, bytes.NewReader(audit.RowBytes(slices.Concat(out...))))
	}
	return err
}

var whole = gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: gguf.Range{End: experts}}

// answersOf has a child compute; nil: this machine cannot run the variant.
func answersOf(t *testing.T, variant string, swap bool, file string) [][]float32 {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %v %s", childEnv, variant, swap, file))
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Logf("%s does not run here: %v %s", variant, err, strings.TrimSpace(errs.String()))
		return nil
	}
	rows := make([]float32, out.Len()/4)
	for i := range rows {
		rows[i] = math.Float32frombits(binary.LittleEndian.Uint32(out.Bytes()[4*i:]))
	}
	if len(rows) != (calibrated+judged)*used*width {
		t.Fatalf("%s: %d elements", variant, len(rows))
	}
	return slices.Collect(slices.Chunk(rows, used*width))
}

// world is who computes, and what they may differ by.
type world struct {
	names   []string
	answers map[string][][]float32
	bands   map[[2]string]float64
}

func (w *world) add(name string, answers [][]float32) {
	w.names = append(w.names, name)
	w.answers[name] = answers
	for _, o := range w.names {
		most := audit.RoundingStep / headroom
		for i := range calibrated {
			for p := range used {
				most = max(most, tolerance.Between(answers[i][p*width:][:width], w.answers[o][i][p*width:][:width]).Max)
			}
		}
		w.bands[[2]string{name, o}], w.bands[[2]string{o, name}] = headroom*most, headroom*most
	}
}

// backend is what is before a '#': there are several workers of one.
func backend(by string) string { b, _, _ := strings.Cut(by, "#"); return b }

func (w *world) band(a, b string) float64 { return w.bands[[2]string{backend(a), backend(b)}] }

// judge audits an answer by a second worker and, if they differ, a third one.
func (w *world) judge(by string, rows []float32, i int, second, third string) []audit.Finding {
	list := []audit.Answer{{By: by, Rows: rows}, {By: second, Rows: w.answers[backend(second)][i]}}
	found := audit.Judge(width, list, w.band)
	if len(found) > 0 {
		list = append(list, audit.Answer{By: third, Rows: w.answers[backend(third)][i]})
		found = audit.Judge(width, list, w.band)
	}
	return found
}

// shared is the world of all tests here.
var shared *world

func newWorld(t *testing.T, file string) *world {
	if shared != nil {
		return shared
	}
	w := &world{answers: map[string][][]float32{}, bands: map[[2]string]float64{}}
	for _, v := range variants {
		if a := answersOf(t, v, false, file); a != nil {
			w.add(v, a)
		}
	}
	if len(w.names) < 2 {
		t.Fatalf("only %v run here", w.names)
	}
	for _, a := range w.names {
		for _, b := range w.names {
			if a < b {
				t.Logf("%s and %s may differ by %.2g", a, b, w.band(a, b))
			}
		}
	}
	shared = w
	return w
}

// damage is a copy of the model with other bytes in the layer's experts.
func damage(t *testing.T, file, name string, change func(tensor string, expert int, b []byte)) string {
	t.Helper()
	m, err := gguf.OpenModel(file)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tensors, err := m.SliceTensors(whole)
	if err != nil {
		t.Fatal(err)
	}
	model := bytes.Clone(tiny.GGUF)
	for _, ts := range tensors {
		data := make([]byte, ts.Bytes)
		if err := ts.ReadInto(data); err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(model, data)
		if at < 0 {
			t.Fatalf("%s is not in the file", ts.Name)
		}
		size := len(data) / ts.Rows.Len()
		for e := range ts.Rows.Len() {
			change(ts.Name, e, model[at+e*size:][:size])
		}
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, model, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// roundHalf is x with the 11 bits of mantissa of an f16.
func roundHalf(x float32) float32 {
	b := math.Float32bits(x)
	return math.Float32frombits((b + 0xfff + b>>13&1) &^ 0x1fff)
}

// goFFN computes as the CPU's K kernels do, in plain Go: rows are rounded to 8 bits, and sums are
// made in f32, or in f16.
type goFFN struct {
	weights map[string][][]float32 // by tensor and expert
	half    bool
}

func newGoFFN(t *testing.T, file string) *goFFN {
	m, err := gguf.OpenModel(file)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tensors, err := m.SliceTensors(whole)
	if err != nil {
		t.Fatal(err)
	}
	g := &goFFN{weights: map[string][][]float32{}}
	for _, ts := range tensors {
		data := make([]byte, ts.Bytes)
		if err := ts.ReadInto(data); err != nil {
			t.Fatal(err)
		}
		rows := make([]float32, experts*width*width)
		dequantize(t, ts.DType, rows, data)
		_, name, _ := strings.Cut(ts.Name, "ffn_")
		g.weights[name] = slices.Collect(slices.Chunk(rows, width*width))
	}
	return g
}

func dequantize(t *testing.T, dt tensor.DType, dst []float32, src []byte) {
	if err := dt.Dequantize(dst, src); err != nil {
		t.Fatal(err)
	}
}

func (g *goFFN) mul(m, x []float32) []float32 {
	q := eightBits(x)
	out := make([]float32, width)
	for i := range out {
		var sum float32
		for j, w := range m[i*width:][:width] {
			if sum += w * q[j]; g.half {
				sum = roundHalf(sum)
			}
		}
		out[i] = sum
	}
	return out
}

// eightBits rounds a block of 256 as Q8_K does.
func eightBits(x []float32) []float32 {
	var most float32
	for _, v := range x {
		if math.Abs(float64(v)) > math.Abs(float64(most)) {
			most = v
		}
	}
	out := make([]float32, len(x))
	for i, v := range x {
		if most != 0 {
			out[i] = float32(min(127, math.RoundToEven(float64(-127/most*v)))) * (1 / (-127 / most))
		}
	}
	return out
}

func (g *goFFN) compute(c call) (out []float32) {
	for _, e := range c.ids {
		h, up := g.mul(g.weights["gate_exps.weight"][e], c.row), g.mul(g.weights["up_exps.weight"][e], c.row)
		for i, x := range h {
			h[i] = x / (1 + float32(math.Exp(-float64(x)))) * up[i]
		}
		out = append(out, g.mul(g.weights["down_exps.weight"][e], h)...)
	}
	return out
}

// TestNobodyHonestIsBlamed audits 10⁵ calls of honest workers of all variants by each other.
func TestNobodyHonestIsBlamed(t *testing.T) {
	file, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, file)
	rng := rand.New(rand.NewPCG(1, 2))
	most := 0.0
	for n := range 100_000 {
		i := calibrated + n%judged
		pick := func() string { return w.names[rng.IntN(len(w.names))] }
		by, second, third := pick()+"#1", pick()+"#2", pick()+"#3"
		rows := w.answers[backend(by)][i]
		for p := range used {
			if d := tolerance.Between(rows[p*width:][:width], w.answers[backend(second)][i][p*width:][:width]).Max / w.band(by, second); d > most {
				most = d
			}
		}
		if found := w.judge(by, rows, i, second, third); found != nil {
			t.Fatalf("call %d: %s beside %s and %s: %+v", n, by, second, third, found)
		}
	}
	t.Logf("no finding in 100,000 audited calls; the largest distance was %.2g of its band", most)
}

// TestFaults has a worker be wrong in each way: it is found, and nobody else, within so many audited
// calls. At one audit in 64 calls that is 64 times as many calls, in expectation.
func TestFaults(t *testing.T) {
	file, err := tiny.Write(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, file)
	list, liar := calls(), w.names[len(w.names)-1]
	honest := w.answers[liar]
	flipped := answersOf(t, liar, false, damage(t, file, "flipped.gguf", func(name string, e int, b []byte) {
		if e == 3 && strings.Contains(name, "gate") {
			for i := 100 * 144; i < 101*144; i++ { // a block of Q4_K
				b[i] ^= 0xff
			}
			b[100*144+1] &= 0x3b // whose scales stay finite
			b[100*144+3] &= 0x3b
		}
	}))
	stale := answersOf(t, liar, false, damage(t, file, "stale.gguf", func(_ string, _ int, b []byte) {
		for i := 20; i < len(b); i += 144 { // quants, some of which are a step off
			b[i] ^= 0x11
		}
	}))
	swap := answersOf(t, liar, true, file)
	slow := newGoFFN(t, file)
	slow.half = true
	rng := rand.New(rand.NewPCG(3, 4))
	scaled := func(by float32) func(int, []float32) []float32 {
		return func(_ int, rows []float32) []float32 {
			for i := range rows {
				rows[i] *= by
			}
			return rows
		}
	}
	for _, fault := range []struct {
		name   string
		within int // audited calls
		answer func(i int, rows []float32) []float32
	}{
		{"one flipped block of one expert", 100, func(i int, _ []float32) []float32 { return flipped[i] }},
		{"two experts swapped", 40, func(i int, _ []float32) []float32 { return swap[i] }},
		{"weights of another revision", 2, func(i int, _ []float32) []float32 { return stale[i] }},
		{"rows in the wrong order", 1, func(_ int, rows []float32) []float32 { return slices.Concat(rows[width:], rows[:width]) }},
		{"sums in f16", 10, func(i int, _ []float32) []float32 { return slow.compute(list[i]) }},
		{"scaled by 1.05", 2, scaled(1.05)},
		{"not a number", 1, func(_ int, rows []float32) []float32 { rows[77] = float32(math.NaN()); return rows }},
		{"the answer to another request", 1, func(i int, _ []float32) []float32 { return honest[(i+1)%len(honest)] }},
		{"a lie in 100", 1500, func(_ int, rows []float32) []float32 {
			if rng.IntN(100) == 0 {
				return scaled(-1)(0, rows)
			}
			return rows
		}},
	} {
		t.Run(fault.name, func(t *testing.T) {
			most, rounds := 0, 20
			for round := range rounds {
				n := 0
				for found := false; !found; n++ {
					if n == fault.within {
						t.Fatalf("round %d: not found in %d audited calls", round, n)
					}
					i := calibrated + rng.IntN(judged)
					others := rng.Perm(len(w.names))
					second, third := w.names[others[0]]+"#2", w.names[others[1]]+"#3"
					for _, f := range w.judge(liar+"#1", fault.answer(i, slices.Clone(honest[i])), i, second, third) {
						if f.Outcome != audit.Open && f.Culprit != liar+"#1" {
							t.Fatalf("%+v: want the liar", f)
						}
						found = found || f.Outcome != audit.Open
					}
				}
				most = max(most, n)
			}
			t.Logf("found within %d audited calls in each of %d rounds, %d are allowed", most, rounds, fault.within)
		})
	}
}
