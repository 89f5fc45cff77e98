package verify

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// Shape is that of an expert: rows of Width f32, FF in the middle.
type Shape struct {
	Name      string
	Width, FF int
}

// Shapes are the widths that are measured: of the shipped model, and of the experts of
// Qwen3.5-122B-A10B, with random weights.
var Shapes = []Shape{{"tiny", 256, 256}, {"122B", 3072, 1024}}

// rows is how many rows of this shape take as long as n of the largest.
func (s Shape) rows(n int) int { return n * (3072 * 1024) / (s.Width * s.FF) }

// Quants are the quantisations that are measured.
var Quants = []tensor.DType{tensor.F32, tensor.F16, tensor.Q8_0, tensor.Q6_K, tensor.Q4_K, tensor.Q4_0, tensor.MXFP4}

// Operations that are measured on a sample.
const (
	opMatMul = "matmul"
	opGLU    = "glu"
	opFFN    = "ffn" // the whole expert
)

// sampleExperts is the number of experts of a generated file.
const sampleExperts = 2

// sample is one operation over some rows with the first experts of a file.
type sample struct {
	Path     string
	Op       string
	Shape    Shape
	Quant    tensor.DType
	Layer    int
	Rows     int
	Seed     uint64
	Separate bool // also one pair at a time, by other kernels than many together
}

// generate makes the file of a shape and quantisation, unless it is in dir.
func generate(rt *ggml.Runtime, dir string, s Shape, q tensor.DType) (string, error) {
	path := filepath.Join(dir, fmt.Sprintf("%s-%s.gguf", s.Name, q))
	cfg := ggml.GenerateConfig{
		Arch: "qwen3moe", Seed: 8, Layers: 1, Experts: sampleExperts, ExpertsUsed: sampleExperts, Embedding: s.Width, FeedForward: s.FF,
		Heads: 1, Vocab: 64, Type: q.String(), Threads: 1,
		Overrides: map[string]any{"attention.key_length": uint32(256), "attention.value_length": uint32(256)}, // experts are what counts
	}
	return path, rt.GenerateModel(path, cfg)
}

// program is what a sample has computed.
func (s *sample) program() *ggml.Program {
	width, ff := uint32(s.Shape.Width), uint32(s.Shape.FF)
	p := &ggml.Program{Version: 1, RowWidth: width}
	switch s.Op {
	case opMatMul:
		p.Ops = []ggml.Op{{Code: ggml.OpMatMul, Weight: "ffn_up_exps.weight", Width: ff}}
	case opGLU:
		p.Ops = []ggml.Op{{Code: ggml.OpGLU, Act: ggml.ActSwiGLU, Fused: true, Width: width / 2}}
	case opFFN:
		p.Ops = []ggml.Op{
			{Code: ggml.OpMatMul, Weight: "ffn_gate_exps.weight", Width: ff},
			{Code: ggml.OpMatMul, Weight: "ffn_up_exps.weight", Width: ff},
			{Code: ggml.OpGLU, A: 1, B: 2, Act: ggml.ActSwiGLU, Width: ff},
			{Code: ggml.OpMatMul, A: 3, Weight: "ffn_down_exps.weight", Width: width},
		}
	}
	return p
}

// inputRows are rows as they come after a norm: of unit variance, some of them with few
// channels that are far larger than the others, as trained models have them.
func inputRows(n, width int, seed uint64) []float32 {
	rng := rand.New(rand.NewPCG(seed, uint64(width)))
	rows := make([]float32, n*width)
	for i := range rows {
		rows[i] = float32(rng.NormFloat64())
	}
	for r := 1; r < n; r += 2 {
		for range max(1, width/256) {
			rows[r*width+rng.IntN(width)] *= 20
		}
	}
	return rows
}

// kernel computes a Program: ggml.Kernel and ggml.Reference.
type kernel interface {
	SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error)
	Compute(prog int, rows []float32, row, expert []int32, out []float32) error
}

func (s *sample) open(rt *ggml.Runtime, b Backend) (k kernel, closing func(), err error) {
	file, err := gguf.OpenModel(s.Path)
	if err != nil {
		return nil, nil, err
	}
	defer file.Close()
	part := gguf.Slice{Layers: gguf.Range{Begin: s.Layer, End: s.Layer + 1}, Experts: gguf.Range{End: sampleExperts}}
	if b.Name == tolerance.Reference {
		r := ggml.NewReference()
		return r, func() {}, r.Load(file, part)
	}
	own, err := rt.NewKernel(ggml.KernelConfig{Device: b.Device, Threads: 1})
	if err != nil {
		return nil, nil, err
	}
	if err := own.LoadSlices(file, part); err != nil {
		own.Close()
		return nil, nil, err
	}
	return own, func() { own.Close() }, nil
}

// compute gives the rows of all pairs in one call, then, where asked, one call for each.
func (s *sample) compute(ctx context.Context, rt *ggml.Runtime, b Backend) (ways [][]float32, err error) {
	k, closing, err := s.open(rt, b)
	if err != nil {
		return nil, err
	}
	defer closing()
	program, err := s.program().Marshal()
	if err != nil {
		return nil, err
	}
	prog, width, outWidth, err := k.SetProgram(s.Layer, program)
	if err != nil {
		return nil, err
	}
	rows := inputRows(s.Rows, width, s.Seed)
	row, expert := make([]int32, s.Rows), make([]int32, s.Rows)
	for i := range row {
		row[i], expert[i] = int32(i), int32(i/2%sampleExperts)
	}
	together := make([]float32, s.Rows*outWidth)
	if err := k.Compute(prog, rows, row, expert, together); err != nil {
		return nil, err
	}
	ways = [][]float32{together}
	if !s.Separate || b.Name == tolerance.Reference {
		return ways, nil
	}
	one := make([]float32, s.Rows*outWidth)
	for i := range row {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := k.Compute(prog, rows[i*width:][:width], []int32{0}, expert[i:i+1], one[i*outWidth:][:outWidth]); err != nil {
			return nil, err
		}
	}
	return append(ways, one), nil
}

// outWidth is the f32 of a sample's result per pair.
func (s *sample) outWidth() int { return s.program().OutWidth() }

// opInput is one operation of a backbone on some rows.
type opInput struct {
	Op    ggml.RowOp
	Rows  int
	Width int
	Seed  uint64
}

func (in *opInput) compute(rt *ggml.Runtime, b Backend) ([]float32, error) {
	x := inputRows(in.Rows, in.Width, in.Seed)
	if b.Name == tolerance.Reference {
		return ggml.ReferenceRowOp(in.Op, x, in.Width)
	}
	return rt.RowOp(b.Device, in.Op, x, in.Width)
}
