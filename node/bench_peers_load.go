package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

const (
	loadCallers = 16 // at the same time
	loadTime    = 4 * time.Second
	loadRTT     = 5 * time.Millisecond
	// coresFull is the share of the machine's time from which on there is no core left.
	coresFull = 0.9
)

// wideModel is one layer of real widths, so that four workers load it soon.
var wideModel = ggml.GenerateConfig{
	Arch: "qwen3moe", Layers: 1, Experts: 16, ExpertsUsed: 4,
	Embedding: 3072, FeedForward: 1024, Heads: 24, Vocab: 2048,
	Type: "Q4_K", Threads: 1,
}

// moreWorkers measures what 1, 2 and 4 workers, each with all experts, compute for one
// dispatcher that many callers use. What the router picks is drawn here.
func (b *bench) moreWorkers() error {
	path, err := b.generated("wide-q4_k.gguf", "110 MB", wideModel)
	if err != nil {
		return err
	}
	c, err := b.openCrew(path, 4)
	if err != nil {
		return err
	}
	defer c.Close()
	k, err := b.localKernel(path)
	if err != nil {
		return err
	}
	defer k.Close()
	call, err := b.aCall(path, k.compute)
	if err != nil {
		return err
	}
	count, err := expertsOf(path)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\n### More workers: real widths, %v, %d callers of one token each\n\n"+
		"One MoE layer, %d of %d experts for each token: picked evenly, or the n-th of them in proportion to 1/n (skewed). %d cores; "+
		"\"cores\" counts those that the workers and this process had.\n\n",
		loadRTT, loadCallers, call.Used, count, runtime.NumCPU())
	t := newTable(b.out, "routing", "workers", "tokens/s of a layer", "cores", "of the machine in use", "of linear", "wanted", "")
	for _, skewed := range []bool{false, true} {
		if err := b.moreWorkersOn(t, c, k, call, count, skewed); err != nil {
			return err
		}
	}
	return t.Flush()
}

func (b *bench) moreWorkersOn(t benchTable, c *crew, k *localKernel, call experts.Call, count int, skewed bool) error {
	routing := "even"
	if skewed {
		routing = "skewed"
	}
	var one float64
	for _, n := range []int{1, 2, 4} {
		l := &load{template: call, experts: count, skewed: skewed, check: k}
		d, err := c.dispatch(b.ctx, experts.Config{}, c.names[:n], func(string) line { return line{rtt: loadRTT} })
		if err != nil {
			return err
		}
		rate, used, busy, err := l.measure(b.ctx, d, c)
		if err := errors.Join(err, d.Close()); err != nil {
			return fmt.Errorf("%d workers, %s: %w", n, routing, err)
		}
		if n == 1 {
			one = rate
		}
		linear := rate / one / float64(n)
		verdict := notWanted
		if n > 1 {
			verdict = atLeast(linear, 0.8)
			if linear < 0.8 && busy >= coresFull {
				verdict[1] = "cores full"
			}
		}
		t.row(append([]string{routing, strconv.Itoa(n), rttRate(rate), fmt.Sprintf("%.1f", used),
			fmt.Sprintf("%.0f %%", 100*busy), fmt.Sprintf("%.2f", linear)}, verdict...)...)
	}
	return nil
}

// aCall is a call of one token as a model makes it, which compute computes.
func (b *bench) aCall(path string, compute ggml.ExpertFunc) (call experts.Call, err error) {
	seen := false
	m, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(ctx context.Context, c *ggml.ExpertCall) error {
		if !seen {
			seen, call = true, experts.Call(*c)
			call.Program, call.Rows, call.IDs = slices.Clone(c.Program), slices.Clone(c.Rows), slices.Clone(c.IDs) // ggml's memory
			call.Out, call.Weights, call.Sum = make([]float32, len(c.Out)), nil, nil                               // nobody adds up
		}
		return compute(ctx, c)
	}})
	if err != nil {
		return call, err
	}
	defer m.Close()
	d, err := newDecoder(m, 1, b.Threads)
	if err != nil {
		return call, err
	}
	defer d.ctx.Close()
	_, err = d.steps(b.ctx, 1)
	return call, err
}

// expertsOf is how many experts a layer of a model has.
func expertsOf(path string) (int, error) {
	file, err := gguf.OpenModel(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return file.Experts(), nil
}

// load is what callers ask a dispatcher for.
type load struct {
	template experts.Call
	experts  int
	skewed   bool
	check    *localKernel // computes the first call of each caller too
	mu       sync.Mutex   // guards check
}

// measure has callers ask for a while. It gives the tokens per second, the cores that
// the workers and this process had, and the share of the machine that was in use.
func (l *load) measure(ctx context.Context, d *experts.Dispatcher, c *crew) (rate, cores, busy float64, err error) {
	var done atomic.Int64
	end := make(chan struct{})
	errs := make([]error, loadCallers)
	var all, warm sync.WaitGroup
	warm.Add(loadCallers)
	for i := range loadCallers {
		all.Go(func() {
			errs[i] = l.caller(ctx, d, uint64(i), sync.OnceFunc(warm.Done), &done, end)
		})
	}
	warm.Wait()
	began, before := time.Now(), done.Load()
	own, machine, err := c.cpu()
	if err == nil {
		select {
		case <-ctx.Done():
		case <-time.After(loadTime):
		}
	}
	took, n := time.Since(began).Seconds(), done.Load()-before
	ownAfter, machineAfter, cpuErr := c.cpu()
	close(end)
	all.Wait()
	return float64(n) / took, (ownAfter - own).Seconds() / took, machineAfter.busySince(machine), errors.Join(append(errs, err, cpuErr, ctx.Err())...)
}

// caller asks until end is closed. It says when its first answers are there.
func (l *load) caller(ctx context.Context, d *experts.Dispatcher, seed uint64, warm func(), done *atomic.Int64, end chan struct{}) error {
	defer warm()
	rng := rand.New(rand.NewPCG(seed, 7))
	call := l.template
	call.IDs = make([]int32, call.Used)
	call.Rows = make([]float32, len(l.template.Rows))
	call.Out = make([]float32, call.Used*call.OutWidth)
	for i := range call.Rows {
		call.Rows[i] = float32(rng.NormFloat64())
	}
	for n := 0; ; n++ {
		select {
		case <-end:
			return nil
		default:
		}
		pickExperts(rng, call.IDs, l.experts, l.skewed)
		if err := d.Compute(ctx, &call); err != nil {
			return err
		}
		done.Add(1)
		switch n {
		case 0:
			if err := l.compare(ctx, &call); err != nil {
				return err
			}
		case 20:
			warm()
		}
	}
}

// compare says whether what was computed is what the kernel in this process computes, up
// to the rounding of a batch.
func (l *load) compare(ctx context.Context, call *experts.Call) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := ggml.ExpertCall(*call)
	own.Out = make([]float32, len(call.Out))
	if err := l.check.compute(ctx, &own); err != nil {
		return err
	}
	var most, off float64
	for i, v := range own.Out {
		most, off = max(most, math.Abs(float64(v))), max(off, math.Abs(float64(v-call.Out[i])))
	}
	if off > 1e-3*most || most == 0 {
		return fmt.Errorf("a worker's answer is off by %g of %g", off, most)
	}
	return nil
}

// pickExperts picks different experts: each as likely as any, or the n-th in proportion
// to 1/n.
func pickExperts(rng *rand.Rand, ids []int32, count int, skewed bool) {
	for i := range ids {
		for again := true; again; again = slices.Contains(ids[:i], ids[i]) {
			ids[i] = int32(rng.IntN(count))
			if skewed { // of a continuous 1/x the whole part falls so
				ids[i] = int32(math.Pow(float64(count+1), rng.Float64())) - 1
			}
		}
	}
}
