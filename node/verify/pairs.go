package verify

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/tensor"
)

// Config says what is measured.
type Config struct {
	// Child makes the command of a child for a backend, which ends in Serve. For one of
	// another architecture it starts an emulator.
	Child    func(ctx context.Context, b Backend) *exec.Cmd
	LibDir   string // of the backends; "" = where the linked library lies
	Backends []Backend
	Shapes   []Shape
	Quants   []tensor.DType
	Rows     int                           // of the 122B's width; of others as many as take as long
	Progress func(format string, a ...any) // nil: quiet
}

func (c *Config) say(format string, a ...any) {
	if c.Progress != nil {
		c.Progress(format, a...)
	}
}

// Measured is what came of a backend.
type Measured struct {
	Backend  string   `json:"backend"`
	Features []string `json:"features,omitempty"`
	Trouble  string   `json:"trouble,omitempty"` // why it could not be measured
}

// Pair is how far two backends lie apart in one operation.
type Pair struct {
	A       string          `json:"a"`
	B       string          `json:"b"`
	Op      string          `json:"op"`
	Shape   string          `json:"shape"`
	Quant   string          `json:"quant"`
	Largest tolerance.Delta `json:"largest"` // over all rows
	Typical float64         `json:"typical"` // median of L2
	// Band is what the table allows, for whole experts and what is part of them.
	Band   tolerance.Band `json:"band"`
	Within bool           `json:"within"`
}

// Operations is the first part of a report.
type Operations struct {
	Release  string     `json:"release"`
	Rows     int        `json:"rows"`
	Backends []Measured `json:"backends"`
	Pairs    []Pair     `json:"pairs"`
}

// MeasureOperations has every backend compute the same rows, and compares each with each.
// A backend with itself is compared too: rows together and one by one.
func MeasureOperations(ctx context.Context, c *Config) (*Operations, error) {
	dir, err := os.MkdirTemp("", "kvasir-verify-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	rt, err := ggml.Open(ggml.Config{LibDir: c.LibDir})
	if err != nil {
		return nil, err
	}
	t := task{LibDir: c.LibDir}
	if t.Samples, t.Ops, err = c.inputs(rt, dir); err != nil {
		return nil, err
	}
	report := &Operations{Release: rt.Release(), Rows: c.Rows}
	var done []computed
	for _, b := range c.Backends {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c.say("computing on %s", b.Name)
		t.Backend = b
		o, err := c.ask(ctx, &t)
		m := Measured{Backend: b.Name}
		if err == nil && o.Release != "" && o.Release != report.Release {
			err = fmt.Errorf("it has %s, and not %s", o.Release, report.Release)
		}
		if err != nil {
			m.Trouble = err.Error()
		} else {
			m.Features = o.Features
			done = append(done, computed{b.Name, o})
		}
		report.Backends = append(report.Backends, m)
	}
	report.Pairs = comparePairs(&t, done)
	return report, ctx.Err()
}

type computed struct {
	name string
	*outcome
}

// inputs are the samples of every shape and quantisation. A GLU knows no quantisation.
func (c *Config) inputs(rt *ggml.Runtime, dir string) (samples []sample, ops []opInput, err error) {
	for _, s := range c.Shapes {
		for _, q := range c.Quants {
			path, err := generate(rt, dir, s, q)
			if err != nil {
				return nil, nil, err
			}
			of := sample{Path: path, Shape: s, Quant: q, Rows: s.rows(c.Rows), Seed: 1}
			for _, op := range []string{opMatMul, opFFN, opGLU} {
				if of.Op = op; op != opGLU || q == tensor.F32 {
					of.Separate = op == opFFN
					samples = append(samples, of)
				}
			}
		}
		for _, op := range []ggml.RowOp{ggml.RowSoftmax, ggml.RowNorm, ggml.RowRMSNorm} {
			ops = append(ops, opInput{op, c.Rows, s.Width, 2})
		}
	}
	return samples, ops, nil
}

func comparePairs(t *task, done []computed) (pairs []Pair) {
	for i, a := range done {
		for _, b := range done[i:] {
			for n, s := range t.Samples {
				if a.name != b.name || s.Separate {
					pairs = append(pairs, compareSample(a, b, n, s))
				}
			}
			for n, in := range t.Ops {
				if a.name != b.name {
					p := Pair{A: a.name, B: b.name, Op: in.Op.String(), Shape: fmt.Sprint(in.Width), Quant: tensor.F32.String()}
					p.judge(plainBand, deltas(nil, a.Ops[n], b.Ops[n], in.Width))
					pairs = append(pairs, p)
				}
			}
		}
	}
	return pairs
}

// compareSample compares every way in which one computed with every way of the other.
func compareSample(a, b computed, n int, s sample) Pair {
	p := Pair{A: a.name, B: b.name, Op: s.Op, Shape: s.Shape.Name, Quant: s.Quant.String()}
	var all []tolerance.Delta
	for _, x := range a.Rows[n] {
		for _, y := range b.Rows[n] {
			all = deltas(all, x, y, s.outWidth())
		}
	}
	band := plainBand
	if s.Op != opGLU {
		band = tolerance.Tolerance(p.A, p.B, s.Quant)
	}
	p.judge(band, all)
	return p
}

// plainBand is that of operations without weights: f32 sums are rounded, and exp is a
// polynomial of each backend's own. Of 13 CPU variants and plain Go the largest were 6.9e-6
// and 1.8e-7 (kvasird verify --rows 24 --model none).
var plainBand = tolerance.Band{Delta: tolerance.Delta{Max: 2e-5, L2: 1e-6}, Measured: true}

func (p *Pair) judge(band tolerance.Band, rows []tolerance.Delta) {
	for _, d := range rows {
		p.Largest = p.Largest.Wider(d)
	}
	slices.SortFunc(rows, func(x, y tolerance.Delta) int { return cmp.Compare(x.L2, y.L2) })
	p.Typical = rows[len(rows)/2].L2
	p.Band = band
	p.Within = p.Band.Holds(p.Largest)
}

// deltas appends those of the rows of two results.
func deltas(to []tolerance.Delta, a, b []float32, width int) []tolerance.Delta {
	for at := 0; at < len(a); at += width {
		to = append(to, tolerance.Between(a[at:at+width], b[at:at+width]))
	}
	return to
}

// Table makes the lines of the table of tolerances out of what was measured: whole
// experts, the widest over the shapes and over variants that are alike.
func (o *Operations) Table(command string) []tolerance.Row {
	type key struct{ a, b, quant string }
	widest := map[key]tolerance.Row{}
	for _, p := range o.Pairs {
		if p.Op != opFFN {
			continue
		}
		a, b := tolerance.Class(p.A), tolerance.Class(p.B)
		if b < a {
			a, b = b, a
		}
		k := key{a, b, p.Quant}
		r := widest[k]
		r.Largest, r.Typical = r.Largest.Wider(p.Largest), max(r.Typical, p.Typical)
		widest[k] = r
	}
	var rows []tolerance.Row
	for k, r := range widest {
		quant, err := tensor.ParseDType(k.quant)
		if err != nil {
			panic(err) // it came from String
		}
		r.A, r.B, r.Quant, r.Command = k.a, k.b, quant, command
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(x, y tolerance.Row) int {
		return cmp.Or(cmp.Compare(x.A, y.A), cmp.Compare(x.B, y.B), cmp.Compare(slices.Index(Quants, x.Quant), slices.Index(Quants, y.Quant)))
	})
	return rows
}
