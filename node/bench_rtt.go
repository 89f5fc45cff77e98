package node

import (
	"errors"
	"fmt"
	"slices"
	"text/tabwriter"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ring/plan"
)

var rttSteps = []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond}

const (
	rttBatch  = 128
	rttTokens = 64 // of an answer; fewer where that would take longer than rttRun
	rttFewest = 24
	rttRun    = 4 * time.Second
	rttEnough = 6 * time.Second // a way is not run again after so long
)

// deepRealModel has real widths, and enough layers for a token to take as long as
// one of a large model on a good machine.
var deepRealModel = ggml.GenerateConfig{
	Arch: "qwen3moe", Layers: 8, Experts: 16, ExpertsUsed: 8,
	Embedding: 3072, FeedForward: 1024, Heads: 24, Vocab: 2048,
	Type: "Q4_K", Threads: 2,
}

// rtts measures rings and expert dispatch over lines of growing length, against the
// model alone and against what the planner predicts. All runs in this process, one
// compute thread for each stage, backbone and worker.
func (b *bench) rtts() error {
	c, err := b.openCalibration()
	if err != nil {
		return err
	}
	defer c.Close()
	for _, m := range []struct {
		name    string
		path    func() (string, error)
		prompts bool
	}{
		{"shipped, 4 layers", b.tinyModel, true}, {"real widths, 2 layers", b.realModel, false}, {"real widths, 8 layers", b.deepRealModel, false},
	} {
		path, err := m.path()
		if err != nil {
			return err
		}
		sweep, err := b.openSweep(m.name, path, m.prompts, rttStreams)
		if err != nil {
			return err
		}
		if err := sweep.openFar(); err != nil {
			return errors.Join(err, sweep.Close())
		}
		err = errors.Join(sweep.run(c), sweep.Close())
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		speed, err := c.result()
		if err != nil {
			return err
		}
		if err := sweep.write(speed); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) deepRealModel() (string, error) {
	return b.generated("deep-real-q4_k.gguf", "860 MB", deepRealModel)
}

// sweep is one model, loaded in every way that is measured.
type sweep struct {
	*bench
	name    string
	path    string
	streams int  // at most
	prompts bool // it has a tokenizer and answers rttPrompts; else random ones
	file    *gguf.Model
	desc    plan.Model
	id      string
	windows []gguf.Range
	alone   *wholeModel
	stages  []*stageCompute
	far     *rttExperts

	texts       []*rttText
	fresh, loop *rttText // of these, those that repeat themselves least and most
	rows        []rttRow
	checked     int             // answers
	near        int             // of these, those in which rounding chose another token
	right       map[string]bool // answers of these that were checked
}

// rttRow is a line of the table.
type rttRow struct {
	way     string
	line    time.Duration // round trip
	rtt     time.Duration // as it was measured
	kind    plan.Kind
	streams int
	rate    float64 // tokens per second, of all streams
	solo    float64 // that of the model alone with so many streams, at the same time
	drafts  bool
	drafted string // what became of them
}

// batched says whether several rows are computed at a time.
func (r *rttRow) batched() bool { return r.drafts || r.streams > 1 }

// openSweep loads a model whole and as two stages, for so many streams.
func (b *bench) openSweep(name, path string, prompts bool, streams int) (_ *sweep, err error) {
	s := &sweep{bench: b, name: name, path: path, prompts: prompts, streams: streams, right: map[string]bool{}}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	file, err := gguf.OpenModel(path)
	if err != nil {
		return nil, err
	}
	s.file = file // stages read single rows of it later
	if s.desc, err = plan.Describe(file); err != nil {
		return nil, err
	}
	id, err := file.ID(b.ctx)
	if err != nil {
		return nil, err
	}
	s.id = id.String()
	cuts, err := file.Cuts()
	if err != nil {
		return nil, err
	}
	all := gguf.Range{End: file.Layers()}
	cut := cuts[len(cuts)/2]
	s.windows = []gguf.Range{{End: cut}, {Begin: cut, End: all.End}}
	for _, w := range s.windows {
		c, err := s.load(w, nil)
		if err != nil {
			return nil, err
		}
		s.stages = append(s.stages, c)
	}
	c, err := s.load(all, nil)
	if err != nil {
		return nil, err
	}
	s.alone = &wholeModel{c}
	return s, s.chooseTexts()
}

// load loads a window, with its experts unless somebody else computes them.
func (s *sweep) load(w gguf.Range, experts ggml.ExpertFunc) (*stageCompute, error) {
	size := stageSize{s.streams * rttContext, s.streams, rttBatch, s.Threads}
	return openCompute(s.ctx, s.rt, s.path, s.file, w, experts, size)
}

// openFar loads a backbone whose experts a worker in this process computes.
func (s *sweep) openFar() error {
	s.far = &rttExperts{model: experts.ModelID(s.id)}
	kernel, slice, err := s.wholeKernel(s.file)
	if err != nil {
		return err
	}
	s.far.kernel = kernel
	s.far.worker, err = experts.NewWorker(experts.WorkerConfig{
		Model: s.far.model, Kernel: kernel, Slices: wireSlices([]gguf.Slice{slice}), Drain: time.Millisecond,
	})
	if err != nil {
		return err
	}
	c, err := s.load(slice.Layers, s.far.compute)
	if err != nil {
		return err
	}
	s.far.whole = &wholeModel{c}
	return nil
}

// Close frees the model.
func (s *sweep) Close() error {
	var errs []error
	for _, c := range s.stages {
		errs = append(errs, c.Close())
	}
	if s.alone != nil {
		errs = append(errs, s.alone.Close())
	}
	if s.far != nil {
		errs = append(errs, s.far.Close())
	}
	if s.file != nil {
		errs = append(errs, s.file.Close())
	}
	return errors.Join(errs...)
}

// run measures every way over every line.
func (s *sweep) run(c *calibration) error {
	for range 3 {
		if err := c.round(); err != nil {
			return err
		}
	}
	for _, line := range rttSteps {
		rtt, err := measureLine(line)
		if err != nil {
			return err
		}
		row := rttRow{line: line, rtt: rtt, kind: plan.WholeReplica, streams: 1, way: "alone"}
		alone := func(texts []*rttText, n int) ([][]int32, float64, error) { return s.alone.run(s.ctx, texts, n) }
		one, err := s.measure(row, []*rttText{s.fresh}, 0, alone)
		if err != nil {
			return err
		}
		row.streams = rttStreams
		many, err := s.measure(row, s.texts, 0, alone)
		if err != nil {
			return err
		}
		if err := s.rings(row); err != nil {
			return err
		}
		if err := s.dispatches(row); err != nil {
			return err
		}
		for i := range s.rows {
			if r := &s.rows[i]; r.line == line {
				if r.solo = one; r.streams > 1 {
					r.solo = many
				}
			}
		}
		if err := c.round(); err != nil {
			return err
		}
	}
	return nil
}

// rings measures a ring of two stages over the line of a row.
func (s *sweep) rings(row rttRow) error {
	r, err := openRing(row.line, s.id, s.streams, s.windows, s.stages)
	if err != nil {
		return err
	}
	defer r.Close()
	row.kind = plan.Ring
	for _, way := range []struct {
		name   string
		texts  []*rttText
		drafts bool
	}{
		{"ring, new text", []*rttText{s.fresh}, false},
		{"ring, drafts, new text", []*rttText{s.fresh}, true},
		{"ring, text that repeats itself", []*rttText{s.loop}, false},
		{"ring, drafts, text that repeats itself", []*rttText{s.loop}, true},
		{"ring", s.texts, false},
	} {
		row.way, row.streams, row.drafts = way.name, len(way.texts), way.drafts
		wait := row.line
		if way.drafts && way.texts[0] == s.loop {
			wait = 0 // that is a whole answer, so that drafting has settled
		}
		before := r.stages[0].Stats()
		if _, err := s.measure(row, way.texts, wait, func(texts []*rttText, n int) ([][]int32, float64, error) {
			return r.run(s.ctx, texts, n, way.drafts)
		}); err != nil {
			return err
		}
		if after := r.stages[0].Stats(); way.drafts {
			s.rows[len(s.rows)-1].drafted = fmt.Sprintf("%d of %d", after.Accepted-before.Accepted, after.Drafted-before.Drafted)
		}
	}
	return nil
}

// dispatches measures a backbone whose worker is at the other end of the line.
func (s *sweep) dispatches(row rttRow) error {
	if err := s.far.dial(s.ctx, row.line); err != nil {
		return err
	}
	defer s.far.hangUp()
	run := func(texts []*rttText, n int) ([][]int32, float64, error) { return s.far.whole.run(s.ctx, texts, n) }
	if _, _, err := run(s.texts[:1], 4); err != nil { // the worker learns what it is to compute
		return err
	}
	row.kind, row.way = plan.ExpertWorkers, "expert dispatch"
	wait := time.Duration(len(s.desc.Layers)) * row.line
	for _, texts := range [][]*rttText{{s.fresh}, s.texts} {
		row.streams = len(texts)
		if _, err := s.measure(row, texts, wait, run); err != nil {
			return err
		}
	}
	return nil
}

// measure runs some texts several times, adds the fastest run to the table, and fails
// if an answer is not what the model gives alone. A token is expected to wait so long.
func (s *sweep) measure(row rttRow, texts []*rttText, wait time.Duration, run func([]*rttText, int) ([][]int32, float64, error)) (float64, error) {
	n := rttTokens
	if wait > 0 {
		n = min(n, max(rttFewest, int(rttRun/wait)))
	}
	began := time.Now()
	for i := 0; i < s.Rounds && (i == 0 || time.Since(began) < rttEnough); i++ {
		answers, rate, err := run(texts, n)
		if err != nil {
			return 0, fmt.Errorf("%s at %v: %w", row.way, row.line, err)
		}
		for j, a := range answers {
			if err := s.checkAnswer(row, texts[j], a, n); err != nil {
				return 0, fmt.Errorf("%s at %v, %d streams: %w", row.way, row.line, len(texts), err)
			}
		}
		row.rate = max(row.rate, rate)
	}
	s.rows = append(s.rows, row)
	return row.rate, nil
}

// checkAnswer says whether an answer is the one that the model alone gives. Where
// several rows are computed at a time rounding may have chosen.
func (s *sweep) checkAnswer(row rttRow, t *rttText, got []int32, n int) error {
	s.checked++
	switch {
	case len(got) != n:
		return fmt.Errorf("an answer has %d tokens, not %d", len(got), n)
	case slices.Equal(got, t.answer[:n]):
		return nil
	case !row.batched():
		return fmt.Errorf("an answer is not that of the model alone:\n%v\n%v", got, t.answer[:n])
	}
	s.near++
	key := fmt.Sprint(t.prompt, got)
	if s.right[key] {
		return nil
	}
	s.right[key] = true
	return s.alone.check(s.ctx, t, got)
}

// predict is the planner's tokens per second for a row, which knows of no drafts.
func (s *sweep) predict(r rttRow, m Measured) (float64, error) {
	rate, err := m.predict(r.kind, plan.Query{Model: s.desc, Cuts: []int{s.windows[1].Begin}, Context: r.streams * rttContext,
		Sequences: r.streams, Filled: rttContext / 3, RTT: planRTT{{}: r.rtt}.between})
	return rate.TokensPerSecond, err
}

// write prints the table, as markdown.
func (s *sweep) write(m Measured) error {
	measured := slices.Clone(s.rows)
	order := func(r rttRow) int { // lines of one way together, in the order of the measurement
		return slices.IndexFunc(measured, func(o rttRow) bool { return o.way == r.way && o.streams == r.streams })
	}
	slices.SortStableFunc(s.rows, func(a, b rttRow) int { return order(a) - order(b) })
	fmt.Fprintf(s.out, "\n### %s\n\nNew text: %.0f %% of the answer repeats what came before; text that repeats itself: %.0f %%. "+
		"Of %d answers %d equal that of the model alone; the others, which were computed beside other rows, are its choice up to rounding.\n\n",
		s.name, 100*s.fresh.repeats, 100*s.loop.repeats, s.checked, s.checked-s.near)
	t := tabwriter.NewWriter(s.out, 0, 0, 1, ' ', 0)
	fmt.Fprint(t, "| way\t| streams\t| RTT\t| tok/s\t| of alone\t| predicted of alone\t| predicted tok/s\t| predicted/measured\t| drafts accepted\t|\n")
	fmt.Fprint(t, "|---\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|\n")
	for _, r := range s.rows {
		want, err := s.predict(r, m)
		if err != nil {
			return err
		}
		alone := r
		alone.kind = plan.WholeReplica
		whole, err := s.predict(alone, m)
		if err != nil {
			return err
		}
		share, expected, drafted := fmt.Sprintf("%.0f %%", 100*r.rate/r.solo), fmt.Sprintf("%.0f %%", 100*want/whole), "-"
		if r.kind == plan.WholeReplica {
			share, expected = "-", "-"
		}
		if r.drafts {
			drafted = r.drafted
		}
		fmt.Fprintf(t, "| %s\t| %d\t| %d ms\t| %s\t| %s\t| %s\t| %s\t| %.2f\t| %s\t|\n", r.way, r.streams,
			r.line.Milliseconds(), rttRate(r.rate), share, expected, rttRate(want), want/r.rate, drafted)
	}
	return t.Flush()
}

func rttRate(v float64) string {
	if v < 100 {
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
