package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
)

// BenchWorkerOptions says what BenchWorker measures.
type BenchWorkerOptions struct {
	Backends string // comma-separated CPU variants and devices; "" = see benchVariants
	Batches  string // comma-separated tokens per call
	Models   string // comma-separated names of benchModels
	Dir      string // where large models are made and kept
	Rounds   int    // calls of each batch
	Threads  int
	CSV, SVG string // files to write; "" = none

	Child string // set in the child that measures one backend
}

// benchVariants are the CPU variants that are measured unless others are named, beside
// the best one here and every GPU: each adds what the one before it lacks.
var benchVariants = []string{"sse42", "sandybridge", "haswell", "skylakex", "zen4"}

// BenchWorkerFlags adds the options to a command's flags.
func BenchWorkerFlags(set *flag.FlagSet) *BenchWorkerOptions {
	o := &BenchWorkerOptions{}
	set.StringVar(&o.Backends, "backends", "", "comma-separated `names` of CPU variants and devices (default: the best variant here, "+strings.Join(benchVariants, ", ")+" and every GPU)")
	set.StringVar(&o.Batches, "batches", "1,2,4,8,16,32,64,128,256,512", "comma-separated `numbers` of tokens in a call")
	set.StringVar(&o.Models, "models", "shipped,122b", "comma-separated `names` of shipped (the model that ships) and 122b (64 experts with the widths of Qwen3.5-122B-A10B's)")
	set.StringVar(&o.Dir, "dir", filepath.Join(os.TempDir(), "kvasir-bench"), "`folder` for the generated models (1 GB), which are made once and kept")
	set.IntVar(&o.Rounds, "rounds", 5, "`calls` of each batch; medians are given")
	set.IntVar(&o.Threads, "threads", 1, "compute `threads`")
	set.StringVar(&o.CSV, "csv", "", "`file` to write the table to")
	set.StringVar(&o.SVG, "svg", "", "`file` to draw the tokens per second in")
	set.StringVar(&o.Child, "child", "", "measure this `backend` in this process (started by bench worker)")
	return o
}

// workerRow is one line of the table: calls of one MoE layer.
type workerRow struct {
	Backend string
	Model   string
	Batch   int     // tokens of a call
	Seconds float64 // of a call
	Bytes   int64   // of the weights of the experts that a call needs
	Flops   float64 // of the matrix multiplications of a call
	Memory  float64 // measured, bytes/s
	Peak    float64 // measured, flops/s
}

// TokensPerSecond is how many tokens pass the layer.
func (r workerRow) TokensPerSecond() float64 { return float64(r.Batch) / r.Seconds }

// Roofline is the share of what the memory and the arithmetic allow, and which of them
// is the bound: "memory" or "compute". It is above 1 where weights come from a cache.
func (r workerRow) Roofline() (share float64, bound string) {
	memory, compute := float64(r.Bytes)/r.Memory, r.Flops/r.Peak
	if memory > compute {
		return memory / r.Seconds, "memory"
	}
	return compute / r.Seconds, "compute"
}

// BenchWorker measures the expert kernel of every backend, as a worker uses it, each in
// a process of its own since one holds one CPU variant.
func BenchWorker(ctx context.Context, o *BenchWorkerOptions, out io.Writer) error {
	if o.Child != "" {
		return benchWorkerChild(ctx, o, out)
	}
	if _, err := o.batches(); err != nil {
		return err
	}
	if o.Rounds < 1 || o.Threads < 1 {
		return errors.New("bench worker: rounds and threads are at least 1")
	}
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return err
	}
	b := &bench{ctx: ctx, out: out, rt: rt, BenchOptions: BenchOptions{Dir: o.Dir}}
	if err := b.workerModels(strings.Split(o.Models, ",")); err != nil {
		return err
	}
	var rows []workerRow
	for _, name := range o.backends(rt) {
		list, err := o.runChild(ctx, name)
		if err != nil && ctx.Err() == nil {
			fmt.Fprintf(out, "%s: not measured: %v\n", name, err)
			continue
		} else if err != nil {
			return err
		}
		rows = append(rows, list...)
	}
	if len(rows) == 0 {
		return errors.New("bench worker: no backend was measured")
	}
	if err := writeWorkerTable(out, o.Threads, rows); err != nil {
		return err
	}
	for path, write := range map[string]func(io.Writer, []workerRow) error{o.CSV: writeWorkerCSV, o.SVG: writeWorkerSVG} {
		if path == "" {
			continue
		}
		var text bytes.Buffer
		if err := write(&text, rows); err != nil {
			return err
		}
		if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (o *BenchWorkerOptions) batches() (list []int, err error) {
	for _, text := range strings.Split(o.Batches, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 4096 {
			return nil, fmt.Errorf("bench worker: batch %q: want a number from 1 to 4096", text)
		}
		list = append(list, n)
	}
	return list, nil
}

// backends lists what is measured: CPU variants, then devices.
func (o *BenchWorkerOptions) backends(rt *ggml.Runtime) []string {
	if o.Backends != "" {
		return strings.Split(o.Backends, ",")
	}
	var list []string
	for _, v := range append(slices.Clone(benchVariants), rt.Variant()) {
		if _, err := os.Stat(variantFile(rt, v)); err == nil && !slices.Contains(list, v) {
			list = append(list, v)
		}
	}
	for _, d := range rt.Devices() {
		if d.Kind == "gpu" || d.Kind == "igpu" {
			list = append(list, d.Name)
		}
	}
	return list
}

func variantFile(rt *ggml.Runtime, variant string) string {
	return filepath.Join(rt.LibDir(), "libggml-cpu-"+variant+".so")
}

// runChild measures one backend in a process of its own.
func (o *BenchWorkerOptions) runChild(ctx context.Context, backend string) ([]workerRow, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, "bench", "worker", "--child", backend, "--batches", o.Batches, "--models", o.Models,
		"--dir", o.Dir, "--rounds", fmt.Sprint(o.Rounds), "--threads", fmt.Sprint(o.Threads))
	var words bytes.Buffer
	cmd.Stderr = &words
	out, err := cmd.Output()
	if err != nil {
		said := strings.Split(strings.TrimSpace(words.String()), "\n")
		return nil, fmt.Errorf("%v: %s", err, said[len(said)-1])
	}
	var rows []workerRow
	return rows, json.Unmarshal(out, &rows)
}

// benchWorkerChild measures one backend and writes its rows as JSON.
func benchWorkerChild(ctx context.Context, o *BenchWorkerOptions, out io.Writer) error {
	batches, err := o.batches()
	if err != nil {
		return err
	}
	rt, err := ggml.Open(ggml.Config{Variant: o.Child})
	device := ""
	if errors.Is(err, os.ErrNotExist) { // no CPU variant: a device beside the best of them
		device = o.Child
		rt, err = ggml.Open(ggml.Config{})
	}
	if err != nil {
		return err
	}
	b := &bench{ctx: ctx, rt: rt, out: io.Discard, BenchOptions: BenchOptions{Dir: o.Dir, Threads: o.Threads, Rounds: o.Rounds}}
	roof, err := b.openWorker(rooflineModel, device)
	if err != nil {
		return err
	}
	memory, peak, err := roof.roofline()
	if err = errors.Join(err, roof.kernel.Close()); err != nil {
		return err
	}
	var rows []workerRow
	for _, name := range strings.Split(o.Models, ",") {
		w, err := b.openWorker(name, device)
		if err != nil {
			return err
		}
		_, own, err := w.roofline()
		for _, n := range batches {
			if err != nil || ctx.Err() != nil {
				break
			}
			row := workerRow{Backend: o.Child, Model: name, Batch: n, Memory: memory, Peak: max(peak, own)}
			if row.Seconds, row.Bytes, row.Flops, err = w.tokens(n); err == nil {
				rows = append(rows, row)
			}
		}
		if err = errors.Join(err, ctx.Err(), w.kernel.Close()); err != nil {
			return err
		}
	}
	return json.NewEncoder(out).Encode(rows)
}

// workerBench computes experts of the first MoE layer of a model.
type workerBench struct {
	kernel       *ggml.Kernel
	prog, rounds int
	width        int // f32 of a row
	experts      int // that are held
	used         int // for a token
	bytes        int64
	weights      float64 // of an expert, in numbers
}

// rooflineModel has few experts in F32, which are too large for most caches.
const rooflineModel = "roofline"

// benchModels are the generated models that workers compute, by name.
var benchModels = map[string]ggml.GenerateConfig{
	"122b": ggml.PresetRealShapes,
	rooflineModel: {
		Arch: "qwen3moe", Layers: 1, Experts: 8, ExpertsUsed: 8,
		Embedding: 3072, FeedForward: 1024, Heads: 24, Vocab: 256, Threads: 1,
	},
}

// workerModels makes the files that are not there yet.
func (b *bench) workerModels(names []string) error {
	for _, name := range append(names, rooflineModel) {
		if _, err := b.workerModel(name); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) workerModel(name string) (string, error) {
	switch name {
	case "122b":
		return b.realModel()
	case rooflineModel:
		return b.generated("roofline-f32.gguf", "330 MB", benchModels[name])
	case "shipped":
		if err := os.MkdirAll(b.Dir, 0o755); err != nil {
			return "", err
		}
		return tiny.Write(b.Dir)
	}
	return "", fmt.Errorf("bench worker: no model %q: there are shipped and 122b", name)
}

// openWorker loads the first MoE layer of a model.
func (b *bench) openWorker(name, device string) (_ *workerBench, err error) {
	path, err := b.workerModel(name)
	if err != nil {
		return nil, err
	}
	m, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	layer, all := m.ExpertLayers()[0], gguf.Range{End: m.Experts()}
	w := &workerBench{experts: m.Experts(), used: m.ExpertsUsed(), rounds: b.Rounds}
	list, err := m.ExpertTensors(layer, all)
	if err != nil {
		return nil, err
	}
	program := ggml.Program{Version: 1}
	var ff int
	for _, t := range list {
		w.bytes += t.Bytes / int64(w.experts)
		w.weights += float64(t.Shape[0] * t.Shape[1])
		if strings.HasSuffix(t.Name, "ffn_up_exps.weight") {
			w.width, ff = int(t.Shape[0]), int(t.Shape[1])
		}
	}
	program.RowWidth = uint32(w.width)
	program.Ops = []ggml.Op{
		{Code: ggml.OpMatMul, Weight: "ffn_gate_exps.weight", Width: uint32(ff)},
		{Code: ggml.OpMatMul, Weight: "ffn_up_exps.weight", Width: uint32(ff)},
		{Code: ggml.OpGLU, A: 1, B: 2, Act: ggml.ActSwiGLU, Width: uint32(ff)},
		{Code: ggml.OpMatMul, A: 3, Weight: "ffn_down_exps.weight", Width: uint32(w.width)},
	}
	encoded, err := program.Marshal()
	if err != nil {
		return nil, err
	}
	if w.kernel, err = b.rt.NewKernel(ggml.KernelConfig{Device: device, Threads: b.Threads}); err != nil {
		return nil, err
	}
	if err = w.kernel.Load(m, layer, all); err == nil {
		w.prog, _, _, err = w.kernel.SetProgram(layer, encoded)
	}
	if err != nil {
		return nil, errors.Join(err, w.kernel.Close())
	}
	return w, nil
}

// roofline measures bytes/s of reading all weights once, for one row each, and flops/s
// of many rows with one expert; the fastest call counts.
func (w *workerBench) roofline() (memory, peak float64, err error) {
	row, expert := make([]int32, w.experts), make([]int32, w.experts)
	for e := range expert {
		expert[e] = int32(e)
	}
	least, err := w.fastest(1, row, expert)
	if err != nil {
		return 0, 0, err
	}
	memory = float64(w.bytes) * float64(w.experts) / least
	const many = 64 // short, so that others on the machine disturb some calls and not all
	row, expert = make([]int32, many), make([]int32, many)
	for i := range row {
		row[i] = int32(i)
	}
	least, err = w.fastest(many, row, expert)
	return memory, 2 * w.weights * many / least, err
}

// tokens measures calls for n tokens, each of which uses its number of experts, drawn
// evenly.
func (w *workerBench) tokens(n int) (seconds float64, touched int64, flops float64, err error) {
	rng := rand.New(rand.NewPCG(uint64(n), 7))
	var row, expert []int32
	seen := map[int32]bool{}
	for token := range n {
		for _, e := range rng.Perm(w.experts)[:w.used] {
			row, expert = append(row, int32(token)), append(expert, int32(e))
			seen[int32(e)] = true
		}
	}
	times, err := w.times(w.rounds*max(1, 32/n), n, row, expert)
	if err != nil {
		return 0, 0, 0, err
	}
	return median(times), int64(len(seen)) * w.bytes, 2 * w.weights * float64(len(row)), nil
}

func (w *workerBench) fastest(rows int, row, expert []int32) (float64, error) {
	times, err := w.times(4*w.rounds, rows, row, expert)
	if err != nil {
		return 0, err
	}
	return slices.Min(times), nil
}

// times gives the seconds of count calls, of which a first one is not counted.
func (w *workerBench) times(count, rows int, row, expert []int32) ([]float64, error) {
	in, out := make([]float32, rows*w.width), make([]float32, len(row)*w.width)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range in {
		in[i] = float32(rng.NormFloat64())
	}
	var times []float64
	for i := range count + 1 {
		start := time.Now()
		if err := w.kernel.Compute(w.prog, in, row, expert, out); err != nil {
			return nil, err
		}
		if i > 0 {
			times = append(times, time.Since(start).Seconds())
		}
	}
	return times, nil
}
