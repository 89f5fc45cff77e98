package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"text/tabwriter"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
)

// kernel compares the expert kernel with llama.cpp computing the same layer of
// the same model for the same tokens, in alternating decodes. llama.cpp's time
// is that from the end of the routing weights to the end of the down projection.
func (b *bench) kernel() error {
	path, err := b.realModel()
	if err != nil {
		return err
	}
	k, err := b.localKernel(path)
	if err != nil {
		return err
	}
	defer k.Close()
	var spent time.Duration
	alone, err := b.rt.LoadModel(ggml.ModelConfig{Path: path})
	if err != nil {
		return err
	}
	defer alone.Close()
	swarm, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(ctx context.Context, call *ggml.ExpertCall) error {
		start := time.Now()
		err := k.compute(ctx, call)
		spent += time.Since(start)
		return err
	}})
	if err != nil {
		return err
	}
	defer swarm.Close()
	fmt.Fprintf(b.out, "\nkernel: tokens/s through one layer, 3072 × 1024, 8 of 64 experts, Q4_K, %d thread(s) (0.95 of llama.cpp wanted)\n", b.Threads)
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "batch\tllama.cpp\tkernel\tratio\t\n")
	for _, n := range []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512} {
		own, theirs, err := b.kernelPair(alone, swarm, &spent, n)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.2f\t\n", n, theirs, own, own/theirs)
	}
	return t.Flush()
}

// kernelPair gives the tokens/s through a layer for batches of n tokens.
func (b *bench) kernelPair(alone, swarm *ggml.Model, spent *time.Duration, n int) (own, theirs float64, err error) {
	cfg := ggml.ContextConfig{Tokens: max(n, 64), Batch: n, Threads: b.Threads}
	near, err := swarm.NewContext(cfg)
	if err != nil {
		return 0, 0, err
	}
	defer near.Close()
	cfg.Watch = [2]string{"ffn_moe_weights_norm", "ffn_moe_down"}
	far, err := alone.NewContext(cfg)
	if err != nil {
		return 0, 0, err
	}
	defer far.Close()
	batch := ggml.NewBatch(n)
	for i := range n {
		batch.Add(ggml.Token(i*7%alone.VocabSize()), i, 0, true)
	}
	var ownTimes, theirTimes []time.Duration
	for i := range b.Rounds*max(1, 32/n) + 1 {
		before, _ := far.Watched()
		if err := far.Decode(b.ctx, batch); err != nil {
			return 0, 0, err
		}
		after, laps := far.Watched()
		if laps == 0 {
			return 0, 0, errors.New("llama.cpp's graph has other names than expected")
		}
		*spent = 0
		if err := near.Decode(b.ctx, batch); err != nil {
			return 0, 0, err
		}
		far.SeqRemove(0, -1, -1)
		near.SeqRemove(0, -1, -1)
		if i > 0 { // the first one warms up
			ownTimes, theirTimes = append(ownTimes, *spent), append(theirTimes, after-before)
		}
	}
	perLayer := func(list []time.Duration) float64 { // two layers in each decode
		return 2 * float64(n) / median(list).Seconds()
	}
	return perLayer(ownTimes), perLayer(theirTimes), nil
}

// memory compares what a backbone process holds beyond one without a model with
// the bytes of the model's dense tensors.
func (b *bench) memory() error {
	whole, err := b.realModel()
	if err != nil {
		return err
	}
	m, err := gguf.OpenModel(whole)
	if err != nil {
		return err
	}
	defer m.Close()
	sparse := filepath.Join(b.dir, "backbone.gguf")
	if err := gguf.WriteBackbone(b.ctx, sparse, m); err != nil {
		return err
	}
	holes := map[string]bool{}
	var all, experts int64
	for _, layer := range m.ExpertLayers() {
		list, err := m.ExpertTensors(layer, gguf.Range{End: m.Experts()})
		if err != nil {
			return err
		}
		for _, t := range list {
			holes[t.Name] = true
		}
	}
	for _, t := range m.Tensors() {
		all += t.Bytes
		if holes[t.Name] {
			experts += t.Bytes
		}
	}
	dense := all - experts
	held, kv, err := b.backboneMemory(sparse)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nmemory: backbone of a model of %.0f MB, %.0f MB of it dense: %.0f MB beyond an empty process, %.0f of them KV cache and compute buffers: %.2f of dense + KV (1.2 wanted)\n",
		mb(all), mb(dense), mb(held), mb(kv), float64(held-kv)/float64(dense))
	return nil
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// backboneMemory loads the file in a child process as a backbone does and gives
// its resident bytes beyond the start, and those that came with the context.
func (b *bench) backboneMemory(path string) (held, context int64, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, 0, err
	}
	out, err := exec.CommandContext(b.ctx, self, "bench", "--resident", path).Output()
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(out), &held, &context); err != nil {
		return 0, 0, fmt.Errorf("child said %q: %w", out, err)
	}
	return held, context, nil
}

// resident is the child of backboneMemory.
func (b *bench) resident(path string) error {
	start, err := residentBytes()
	if err != nil {
		return err
	}
	m, err := b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: func(_ context.Context, call *ggml.ExpertCall) error {
		clear(call.Out)
		return nil
	}})
	if err != nil {
		return err
	}
	defer m.Close()
	loaded, err := residentBytes()
	if err != nil {
		return err
	}
	d, err := newDecoder(m, 4, b.Threads)
	if err != nil {
		return err
	}
	defer d.ctx.Close()
	if _, err := d.steps(b.ctx, 8); err != nil {
		return err
	}
	end, err := residentBytes()
	if err != nil {
		return err
	}
	fmt.Fprintln(b.out, end-start, end-loaded)
	return nil
}

// residentBytes is VmRSS of this process.
func residentBytes() (int64, error) {
	kib, err := procNumber("/proc/self/status", "VmRSS:")
	return kib << 10, err
}
