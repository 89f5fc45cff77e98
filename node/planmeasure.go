package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/market"
	"kvasird/ring/plan"
)

// Measured is how fast this machine is, for plans.
type Measured struct {
	Release string // of llama.cpp
	Threads int
	Speed   plan.Speed
	Call    time.Duration // of asking a worker process on this machine
	Rate    float64       // bytes per second of what goes there and back
}

// measuredName is the file in the data folder that keeps the last measurement.
const measuredName = "measured.json"

// measureModel is generated to measure with, beside the shipped model: large
// enough that its weights come from memory, and made in some seconds.
var measureModel = ggml.GenerateConfig{
	Arch: "qwen3moe", Layers: 2, Experts: 32, ExpertsUsed: 8,
	Embedding: 2048, FeedForward: 768, Heads: 16, Vocab: 2048,
	Type: "Q4_K", Threads: 1,
}

// measureFilled is the mean filling of a sequence of a decoder.
const measureFilled = benchPositions / 2

// measureRounds is how often each step is timed: shared machines drift.
const measureRounds = 7

// loadMeasured reads the last measurement, if it was of the same runtime.
func loadMeasured(dir, release string, threads int) (Measured, bool) {
	var m Measured
	text, err := os.ReadFile(filepath.Join(dir, measuredName))
	if err != nil || json.Unmarshal(text, &m) != nil {
		return Measured{}, false
	}
	s := m.Speed
	sound := s.Bytes > 0 && s.Bytes <= market.MaxHint && s.Batch >= 0 && s.Batch <= market.MaxHint &&
		s.Layer >= 0 && s.Layer <= time.Second && m.Call >= 0 && m.Call <= time.Second
	return m, sound && m.Release == release && m.Threads == threads
}

// Measure times the shipped and a generated model on this machine, alone and with
// their experts in a process of their own, and keeps what it found in the data
// folder. The steps themselves take some two seconds.
func Measure(ctx context.Context, rt *ggml.Runtime, data string, threads int) (Measured, error) {
	dir, err := os.MkdirTemp("", "kvasir-measure-")
	if err != nil {
		return Measured{}, err
	}
	defer os.RemoveAll(dir)
	b := &bench{ctx: ctx, rt: rt, dir: dir, BenchOptions: BenchOptions{Threads: threads}}
	c, err := b.openCalibration()
	if err != nil {
		return Measured{}, err
	}
	defer c.Close()
	for range measureRounds {
		if err := c.round(); err != nil {
			return Measured{}, err
		}
	}
	m, err := c.result()
	if err != nil {
		return Measured{}, err
	}
	m.Release, m.Threads = rt.Release(), threads
	return m, m.save(data)
}

func (m Measured) save(data string) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(data, 0o700); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	return os.WriteFile(filepath.Join(data, measuredName), text, 0o600)
}

// timed is a model that runs in one way, and the times of its steps.
type timed struct {
	model    *ggml.Model
	desc     plan.Model
	decoders map[int]*decoder // by sequences
	times    map[int][]float64
	close    []func() error
}

// openTimed loads a model; with far its experts are computed by a worker process.
func (b *bench) openTimed(path string, far bool, sequences ...int) (_ *timed, err error) {
	t := &timed{decoders: map[int]*decoder{}, times: map[int][]float64{}}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	file, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if t.desc, err = plan.Describe(file); err != nil {
		return nil, err
	}
	cfg := ggml.ModelConfig{Path: path}
	if far {
		r, err := b.openRemote(path)
		if err != nil {
			return nil, err
		}
		t.close = append(t.close, r.Close)
		cfg.Experts = r.compute
	}
	if t.model, err = b.rt.LoadModel(cfg); err != nil {
		return nil, err
	}
	t.close = append(t.close, t.model.Close)
	for _, n := range sequences {
		d, err := newDecoder(t.model, n, b.Threads)
		if err != nil {
			return nil, err
		}
		t.decoders[n] = d
		t.close = append(t.close, d.ctx.Close)
		if _, err := d.steps(b.ctx, 4); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Close frees all, the last first.
func (t *timed) Close() error {
	var errs []error
	for i := len(t.close) - 1; i >= 0; i-- {
		errs = append(errs, t.close[i]())
	}
	return errors.Join(errs...)
}

// turnTime is about how long each way is timed before the next one's turn.
const turnTime = 25 * time.Millisecond

// round times every number of sequences once more, step by step.
func (t *timed) round(ctx context.Context) error {
	for n, d := range t.decoders {
		for began := time.Now(); time.Since(began) < turnTime; {
			rate, err := d.steps(ctx, 1)
			if err != nil {
				return err
			}
			t.times[n] = append(t.times[n], float64(n)/rate)
		}
	}
	return nil
}

// fastest is the share of steps that were least disturbed by others on the machine.
const fastest = 0.1

// step is the time of a step that nothing disturbs, in seconds.
func (t *timed) step(n int) float64 { return quantile(t.times[n], fastest) }

// calibration is what speeds are told from.
type calibration struct {
	b                              *bench
	tiny, large, tinyFar, largeFar *timed
}

func (b *bench) openCalibration() (_ *calibration, err error) {
	c := &calibration{b: b}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	small, err := tiny.Write(b.dir)
	if err != nil {
		return nil, err
	}
	large := filepath.Join(b.dir, "measure.gguf")
	if _, err := os.Stat(large); errors.Is(err, fs.ErrNotExist) {
		if err := b.rt.GenerateModel(large, measureModel); err != nil {
			return nil, err
		}
	}
	for _, w := range []struct {
		to   **timed
		path string
		far  bool
		seqs []int
	}{
		{&c.tiny, small, false, []int{1, 8}}, {&c.large, large, false, []int{1, 8}},
		{&c.tinyFar, small, true, []int{1}}, {&c.largeFar, large, true, []int{1}},
	} {
		if *w.to, err = b.openTimed(w.path, w.far, w.seqs...); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *calibration) each() []*timed { return []*timed{c.tiny, c.large, c.tinyFar, c.largeFar} }

func (c *calibration) round() error {
	for _, t := range c.each() {
		if err := t.round(c.b.ctx); err != nil {
			return err
		}
	}
	return nil
}

// Close frees all.
func (c *calibration) Close() error {
	var errs []error
	for _, t := range c.each() {
		if t != nil {
			errs = append(errs, t.Close())
		}
	}
	return errors.Join(errs...)
}

// result tells the speeds from all rounds so far.
func (c *calibration) result() (Measured, error) {
	var samples []plan.Sample
	for _, t := range []*timed{c.tiny, c.large} {
		for _, n := range []int{1, 8} {
			samples = append(samples, plan.Sample{Model: t.desc, Rows: n, Filled: measureFilled, Seconds: t.step(n)})
		}
	}
	var m Measured
	var err error
	if m.Speed, err = plan.SpeedOf(samples); err != nil {
		return m, err
	}
	m.Call, m.Rate, err = plan.CallOf([]plan.CallSample{
		{Model: c.tiny.desc, Rows: 1, Alone: c.tiny.step(1), Remote: c.tinyFar.step(1)},
		{Model: c.large.desc, Rows: 1, Alone: c.large.step(1), Remote: c.largeFar.step(1)},
	})
	return m, err
}
