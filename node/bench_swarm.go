package node

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"text/tabwriter"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// dispatch measures what a MoE layer costs beyond its compute when another
// process on this machine computes it: one token, f32, one thread each. Tokens
// alternate between the worker and a kernel in this process.
func (b *bench) dispatch() error {
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(b.out, "\ndispatch: one MoE layer of one token on loopback, µs beyond the compute (p50 at most 150 wanted)\n")
	fmt.Fprint(t, "model\tcompute p50\tdispatch p50\tbeyond p50\tp90\tp99\t\n")
	for _, m := range []struct {
		name string
		path func() (string, error)
	}{{"shipped, 256 wide, 4 of 32", b.tinyModel}, {"real shapes, 3072 × 1024, 8 of 64", b.realModel}} {
		path, err := m.path()
		if err != nil {
			return err
		}
		local, far, err := b.dispatchTimes(path)
		if err != nil {
			return err
		}
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
		base := median(local)
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t\n", m.name, us(base), us(median(far)),
			us(median(far)-base), us(quantile(far, 0.9)-base), us(quantile(far, 0.99)-base))
	}
	return t.Flush()
}

func (b *bench) dispatchTimes(path string) (local, far []time.Duration, err error) {
	r, err := b.openRemote(path)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	k, err := b.localKernel(path)
	if err != nil {
		return nil, nil, err
	}
	defer k.Close()
	useLocal, warm := false, true
	m, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(ctx context.Context, call *ggml.ExpertCall) error {
		start := time.Now()
		if useLocal {
			err := k.compute(ctx, call)
			if !warm {
				local = append(local, time.Since(start))
			}
			return err
		}
		err := r.compute(ctx, call)
		if !warm {
			far = append(far, time.Since(start))
		}
		return err
	}})
	if err != nil {
		return nil, nil, err
	}
	defer m.Close()
	d, err := newDecoder(m, 1, b.Threads)
	if err != nil {
		return nil, nil, err
	}
	defer d.ctx.Close()
	for i := range 400 * b.Rounds / max(1, m.EmbeddingLength()/1024) {
		useLocal, warm = i%2 == 0, i < 40
		if _, err := d.steps(b.ctx, 1); err != nil {
			return nil, nil, err
		}
	}
	return local, far, nil
}

// localKernel holds a whole model's experts in this process.
type localKernel struct {
	*ggml.Kernel
	row []int32
}

func (b *bench) localKernel(path string) (*localKernel, error) {
	file, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	k, _, err := b.wholeKernel(file)
	if err != nil {
		return nil, err
	}
	return &localKernel{Kernel: k}, nil
}

// wholeKernel loads all experts of a file, and says which these are.
func (b *bench) wholeKernel(file *gguf.Model) (*ggml.Kernel, gguf.Slice, error) {
	all := gguf.Slice{Layers: gguf.Range{End: file.Layers()}, Experts: gguf.Range{End: file.Experts()}}
	k, err := b.rt.NewKernel(ggml.KernelConfig{Threads: b.Threads})
	if err != nil {
		return nil, all, err
	}
	if err := k.LoadSlices(file, all); err != nil {
		return nil, all, errors.Join(err, k.Close())
	}
	return k, all, nil
}

func (k *localKernel) compute(_ context.Context, call *ggml.ExpertCall) error {
	prog, _, _, err := k.SetProgram(call.Layer, call.Program)
	if err != nil {
		return err
	}
	k.row = k.row[:0]
	for p := range call.IDs {
		if call.RowsPerToken == 1 {
			p /= call.Used
		}
		k.row = append(k.row, int32(p))
	}
	return k.Compute(prog, call.Rows, k.row, call.IDs, call.Out)
}

// tokens compares the swarm with the same model alone, in alternating runs on
// the same cores.
func (b *bench) tokens() error {
	fmt.Fprintf(b.out, "\ntokens/s: swarm (a backbone and a worker process) and alone, %d thread(s) each, %d cores (0.9 of alone wanted for real shapes)\n",
		b.Threads, runtime.NumCPU())
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "model\tsequences\talone\tswarm\tratio\tin process\tratio\t\n")
	for _, m := range []struct {
		name  string
		path  func() (string, error)
		steps int
	}{{"shipped", b.tinyModel, 128}, {"real shapes", b.realModel, 16}} {
		path, err := m.path()
		if err != nil {
			return err
		}
		if err := b.tokensOf(t, m.name, path, m.steps); err != nil {
			return err
		}
	}
	return t.Flush()
}

func (b *bench) tokensOf(t *tabwriter.Writer, name, path string, steps int) error {
	r, err := b.openRemote(path)
	if err != nil {
		return err
	}
	defer r.Close()
	k, err := b.localKernel(path)
	if err != nil {
		return err
	}
	defer k.Close()
	var models []*ggml.Model
	for _, f := range []ggml.ExpertFunc{nil, r.compute, k.compute} {
		m, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: f})
		if err != nil {
			return err
		}
		defer m.Close()
		models = append(models, m)
	}
	for _, seqs := range []int{1, 8, 32} {
		rates, err := b.alternate(models, seqs, max(2, steps/seqs))
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%s\t%d\t%.0f\t%.0f\t%.2f\t%.0f\t%.2f\t\n", name, seqs, median(rates[0]),
			median(rates[1]), medianRatio(rates[1], rates[0]), median(rates[2]), medianRatio(rates[2], rates[0]))
	}
	return nil
}

// medianRatio is the median of the ratios of the runs of one round.
func medianRatio(a, b []float64) float64 {
	ratios := make([]float64, len(a))
	for i := range a {
		ratios[i] = a[i] / b[i]
	}
	return median(ratios)
}

// alternate runs each model in turn and gives each one's rates by round. The turns
// are short and many, since the speed of a shared machine drifts.
func (b *bench) alternate(models []*ggml.Model, seqs, steps int) ([][]float64, error) {
	rates := make([][]float64, len(models))
	var decoders []*decoder
	for _, m := range models {
		d, err := newDecoder(m, seqs, b.Threads)
		if err != nil {
			return nil, err
		}
		defer d.ctx.Close()
		if _, err := d.steps(b.ctx, 4); err != nil {
			return nil, err
		}
		decoders = append(decoders, d)
	}
	for round := range 8 * b.Rounds {
		for i := range decoders {
			i = (i + round) % len(decoders) // so that none always follows the same one
			rate, err := decoders[i].steps(b.ctx, steps)
			if err != nil {
				return nil, err
			}
			rates[i] = append(rates[i], rate)
		}
	}
	return rates, nil
}
