package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/engine"
)

// wirePrecisions are compared, the exact one first.
var wirePrecisions = []experts.Precision{experts.F32, experts.F16, experts.BF16, experts.Q8}

// wireLineRTT is the round trip of the lines: that of a LAN.
const wireLineRTT = time.Millisecond

// wires measures what the precision of rows and sums in their place save in bytes and time, and
// what they cost in logits.
func (b *bench) wires() error {
	if err := b.wireTimes(); err != nil {
		return err
	}
	return b.wireLogits()
}

// wireBackbone is a model whose experts a worker in this process computes over a line.
type wireBackbone struct {
	id     experts.ModelID
	kernel *ggml.Kernel
	worker *experts.Worker
	model  *ggml.Model

	rate        float64 // of the line, bytes a second; 0: any number
	there, back atomic.Int64
	dispatcher  *experts.Dispatcher
	serving     sync.WaitGroup
	calls       []time.Duration
}

func (b *bench) openWireBackbone(path string) (w *wireBackbone, err error) {
	file, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	id, err := file.ID(b.ctx)
	if err != nil {
		return nil, err
	}
	w = &wireBackbone{id: experts.ModelID(id.String())}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	var all gguf.Slice
	if w.kernel, all, err = b.wholeKernel(file); err != nil {
		return w, err
	}
	if w.worker, err = experts.NewWorker(experts.WorkerConfig{Model: w.id, Kernel: w.kernel, Slices: wireSlices([]gguf.Slice{all})}); err != nil {
		return w, err
	}
	w.model, err = b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: w.compute})
	return w, err
}

func (w *wireBackbone) compute(ctx context.Context, call *ggml.ExpertCall) error {
	start := time.Now()
	err := w.dispatcher.Compute(ctx, (*experts.Call)(call))
	w.calls = append(w.calls, time.Since(start))
	return err
}

// Dial makes wireBackbone an experts.Dialer.
func (w *wireBackbone) Dial(context.Context, string) (net.Conn, error) {
	near, far, err := linePair(wireLineRTT, w.rate)
	if err != nil {
		return nil, err
	}
	w.serving.Go(func() {
		w.worker.Serve(context.Background(), far) // how a session ended is of no interest here
	})
	return countedConn{near, w}, nil
}

// countedConn counts the bytes of a connection.
type countedConn struct {
	net.Conn
	of *wireBackbone
}

func (c countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.of.there.Add(int64(n))
	return n, err
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.of.back.Add(int64(n))
	return n, err
}

// dial connects the backbone to the worker over another line.
func (w *wireBackbone) dial(ctx context.Context, p experts.Precision, sums experts.Sums, rate float64) (err error) {
	w.hangUp()
	w.rate = rate
	w.dispatcher, err = experts.NewDispatcher(experts.Config{
		Model: w.id, Dialer: w, Precision: p, Sums: sums, Heartbeat: time.Minute, DeadAfter: time.Hour, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	w.dispatcher.AddPeer("worker")
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return awaitWorkers(ctx, w.dispatcher, 1)
}

func (w *wireBackbone) hangUp() {
	if w.dispatcher != nil {
		w.dispatcher.Close()
		w.dispatcher = nil
	}
	w.serving.Wait()
}

func (w *wireBackbone) Close() error {
	w.hangUp()
	var errs []error
	if w.model != nil {
		errs = append(errs, w.model.Close())
	}
	if w.worker != nil {
		errs = append(errs, w.worker.Close())
	}
	if w.kernel != nil {
		errs = append(errs, w.kernel.Close())
	}
	return errors.Join(errs...)
}

// wireTimes prints the bytes and the time of a call for one token of real widths.
func (b *bench) wireTimes() error {
	path, err := b.realModel()
	if err != nil {
		return err
	}
	w, err := b.openWireBackbone(path)
	if err != nil {
		return err
	}
	defer w.Close()
	d, err := newDecoder(w.model, 1, b.Threads)
	if err != nil {
		return err
	}
	defer d.ctx.Close()
	fmt.Fprintf(b.out, "\nwire: one MoE layer of one token, rows of 3072, 8 of 64 experts, all at one worker, round trip of %v, %d thread(s): p50 of a call, and of that in f32\n", wireLineRTT, b.Threads)
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "line\trows\tsums\tbytes there\tback\tms\tof f32\t\n")
	for _, mbit := range []float64{20, 100, 1000, 0} {
		line := "no limit"
		if mbit > 0 {
			line = fmt.Sprintf("%.0f Mbit/s", mbit)
		}
		var exact time.Duration
		for _, p := range wirePrecisions {
			for _, sums := range []experts.Sums{experts.SumsOff, experts.SumsOn, experts.SumsAuto} {
				took, there, back, err := b.wireCall(w, d, p, sums, mbit)
				if err != nil {
					return err
				}
				if exact == 0 {
					exact = took
				}
				fmt.Fprintf(t, "%s\t%v\t%v\t%d\t%d\t%.2f\t%.2f\t\n", line, p, sums, there, back, took.Seconds()*1000, float64(took)/float64(exact))
			}
		}
	}
	return t.Flush()
}

// wireCall is the median time of a call over a line, and its bytes, headers of frames
// included.
func (b *bench) wireCall(w *wireBackbone, d *decoder, p experts.Precision, sums experts.Sums, mbit float64) (took time.Duration, there, back int64, err error) {
	if err := w.dial(b.ctx, p, sums, mbit*1e6/8); err != nil {
		return 0, 0, 0, err
	}
	if _, err := d.steps(b.ctx, 2); err != nil { // with the programs and canaries
		return 0, 0, 0, err
	}
	w.calls = w.calls[:0]
	there, back = w.there.Load(), w.back.Load()
	steps := 16 * b.Rounds
	if mbit == 20 {
		steps = 4 * b.Rounds
	}
	if _, err := d.steps(b.ctx, steps); err != nil {
		return 0, 0, 0, err
	}
	n := int64(len(w.calls))
	return median(w.calls), (w.there.Load() - there) / n, (w.back.Load() - back) / n, nil
}

// wireLogits prints how far the logits lie from those of exact rows.
func (b *bench) wireLogits() error {
	fmt.Fprint(b.out, "\nwire: logits against those with rows in f32, which are those of the model alone\n")
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "model\trows\ttokens\trms Δ\tlargest |Δ|\tmean KL\tlargest KL\tsame best token\t\n")
	for _, m := range []struct {
		name   string
		path   func() (string, error)
		tokens func(*ggml.Model) ([]int32, error)
	}{{"shipped, its corpus", b.tinyModel, corpusTokens}, {"real shapes, random weights and tokens", b.realModel, drawnTokens}} {
		path, err := m.path()
		if err != nil {
			return err
		}
		w, err := b.openWireBackbone(path)
		if err != nil {
			return err
		}
		err = b.wireLogitsOf(t, m.name, w, m.tokens)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
	}
	return t.Flush()
}

func (b *bench) wireLogitsOf(t io.Writer, name string, w *wireBackbone, tokensOf func(*ggml.Model) ([]int32, error)) error {
	tokens, err := tokensOf(w.model)
	if err != nil {
		return err
	}
	var exact [][]float32
	compare := func(p experts.Precision, sums experts.Sums, what string, at int) error {
		if err := w.dial(b.ctx, p, sums, 0); err != nil {
			return err
		}
		got, err := b.logitsOf(w.model, tokens, at)
		if err != nil {
			return err
		}
		if exact == nil {
			exact = got
			return nil
		}
		d := compareLogits(exact, got)
		_, err = fmt.Fprintf(t, "%s\t%v%s\t%d\t%.3f\t%.3f\t%.2g\t%.2g\t%.1f %%\t\n", name, p, what, len(tokens), d.rms, d.largest, d.meanKL, d.mostKL, 100*d.sameBest)
		return err
	}
	var errs []error
	for _, p := range wirePrecisions {
		errs = append(errs, compare(p, experts.SumsOff, "", len(tokens)), compare(p, experts.SumsOn, ", sums", len(tokens)))
	}
	return errors.Join(append(errs, compare(experts.F32, experts.SumsOff, ", one token at a time", 1))...)
}

// logitsOf are those after each token, of which so many are decoded at a time.
func (b *bench) logitsOf(m *ggml.Model, tokens []int32, at int) (out [][]float32, err error) {
	c, err := m.NewContext(ggml.ContextConfig{Tokens: len(tokens) + 32, Batch: len(tokens), Threads: b.Threads})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	batch := ggml.NewBatch(len(tokens))
	for i, t := range tokens {
		batch.Add(ggml.Token(t), i, 0, true)
		if batch.Len() < at {
			continue
		}
		if err := c.Decode(b.ctx, batch); err != nil {
			return nil, err
		}
		for j := range batch.Len() {
			out = append(out, append([]float32(nil), c.Logits(j)...))
		}
		batch.Reset()
	}
	return out, nil
}

func corpusTokens(m *ggml.Model) (out []int32, err error) {
	for _, prompt := range rttPrompts {
		list, err := engine.Tokenize(m, prompt)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
	}
	return out, nil
}

func drawnTokens(m *ggml.Model) ([]int32, error) {
	return randomTokens(rand.New(rand.NewPCG(7, 8)), m.VocabSize(), 128), nil
}

// logitsDiff says how far logits lie from exact ones: KL is that of the distributions, in nats.
type logitsDiff struct{ rms, largest, meanKL, mostKL, sameBest float64 }

func compareLogits(exact, got [][]float32) (d logitsDiff) {
	for i := range exact {
		a, b := distribution(exact[i]), distribution(got[i])
		kl, bestA, bestB := 0.0, 0, 0
		for j := range a {
			delta := float64(exact[i][j]) - float64(got[i][j])
			d.largest = max(d.largest, math.Abs(delta))
			d.rms += delta * delta / float64(len(exact)*len(a))
			if a[j] > 0 && b[j] > 0 {
				kl += a[j] * math.Log(a[j]/b[j])
			}
			if exact[i][j] > exact[i][bestA] {
				bestA = j
			}
			if got[i][j] > got[i][bestB] {
				bestB = j
			}
		}
		kl = max(0, kl)
		d.meanKL += kl / float64(len(exact))
		d.mostKL = max(d.mostKL, kl)
		if bestA == bestB {
			d.sameBest += 1 / float64(len(exact))
		}
	}
	d.rms = math.Sqrt(d.rms)
	return d
}

func distribution(logits []float32) []float64 {
	most := math.Inf(-1)
	for _, x := range logits {
		most = max(most, float64(x))
	}
	sum, out := 0.0, make([]float64, len(logits))
	for i, x := range logits {
		out[i] = math.Exp(float64(x) - most)
		sum += out[i]
	}
	for i := range out {
		out[i] /= sum
	}
	return out
}
