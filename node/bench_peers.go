package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/node/engine"
)

const peerStreams = 16

var peerLines = []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond}

// peers measures this program against llama.cpp's RPC backend, against the bound of
// one round trip for each layer, and against itself with more workers and with bad
// ones. Each process computes with b.Threads threads.
func (b *bench) peers() error {
	if b.Server == "" || b.RPC == "" {
		return errors.New("it needs --server and --rpc, the paths of llama.cpp's llama-server and ggml-rpc-server: make bench-peers builds both")
	}
	for _, m := range []struct {
		name    string
		path    func() (string, error)
		prompts bool
	}{{"shipped", b.tinyModel, true}, {"real shapes", b.realModel, false}} {
		path, err := m.path()
		if err != nil {
			return err
		}
		c, err := b.openContest(m.name, path, m.prompts, 1)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		err = errors.Join(c.against(), c.bound())
		if err := errors.Join(err, c.Close()); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return errors.Join(b.moreWorkers(), b.badWorkers(), b.callCost(), b.downloads())
}

// contest is one model, run in several ways.
type contest struct {
	*sweep
	crew  *crew
	swarm *ggml.Model // whose experts the workers compute
	by    atomic.Pointer[experts.Dispatcher]
	turn  engine.Turn // of the engines over swarm
}

func (b *bench) openContest(name, path string, prompts bool, workers int) (_ *contest, err error) {
	s, err := b.openSweep(name, path, prompts, peerStreams)
	if err != nil {
		return nil, err
	}
	c := &contest{sweep: s}
	if c.crew, err = b.openCrew(path, workers); err == nil {
		c.swarm, err = b.rt.LoadModel(ggml.ModelConfig{Path: path, Experts: engine.Experts(c.compute)})
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *contest) compute(ctx context.Context, call *ggml.ExpertCall) error {
	return c.by.Load().Compute(ctx, (*experts.Call)(call))
}

func (c *contest) Close() error {
	var errs []error
	if c.swarm != nil {
		errs = append(errs, c.swarm.Close())
	}
	if c.crew != nil {
		errs = append(errs, c.crew.Close())
	}
	return errors.Join(append(errs, c.sweep.Close())...)
}

// contestant is one way to answer texts, n tokens each: what it gives is the answers and
// the tokens per second of all of them behind the first ones.
type contestant struct {
	name  string
	exact bool // its answers are those of the model alone, to the bit
	run   func(texts []*rttText, n int) (answers [][]int32, rate float64, err error)
}

// turns has each way answer the texts in turn, checks every answer, and gives each way's
// rates by round.
func (c *contest) turns(l line, texts []*rttText, ways []contestant) ([][]float64, error) {
	n := rttTokens
	if wait := time.Duration(2*len(c.desc.Layers)) * l.rtt; wait > 0 {
		n = min(n, max(rttFewest, int(rttRun/wait)))
	}
	rates := make([][]float64, len(ways))
	began := time.Now()
	for round := 0; round < c.Rounds && (round == 0 || time.Since(began) < 2*rttEnough); round++ {
		for i, w := range ways {
			answers, rate, err := w.run(texts, n)
			if err != nil {
				return nil, fmt.Errorf("%s, round trip %v, %d streams: %w", w.name, l.rtt, len(texts), err)
			}
			// What is drafted is verified beside other rows, and these are rounded otherwise.
			row := rttRow{way: w.name, line: l.rtt, streams: len(texts), drafts: !w.exact}
			for j, a := range answers {
				if err := c.checkAnswer(row, texts[j], a, n); err != nil {
					return nil, fmt.Errorf("%s, round trip %v, %d streams: %w", w.name, l.rtt, len(texts), err)
				}
			}
			rates[i] = append(rates[i], rate)
		}
	}
	return rates, nil
}

// openEngine makes an engine as a node has one. drafts are those of a backbone; nil: none.
func (c *contest) openEngine(m *ggml.Model, drafts *engine.Drafts) (*engine.Engine, error) {
	return c.openLanes(m, 0, drafts)
}

// openLanes is openEngine with so many contexts; 0: as a node has them.
func (c *contest) openLanes(m *ggml.Model, lanes int, drafts *engine.Drafts) (*engine.Engine, error) {
	return engine.Open(engine.Config{
		Model: m, Context: rttContext, Sequences: peerStreams, Queue: peerStreams, Threads: c.Threads, Drafts: drafts,
		Lanes: lanes, Spare: func() bool { return true }, Turn: &c.turn,
	})
}

// byEngine answers by an engine.
func (c *contest) byEngine(e *engine.Engine) func([]*rttText, int) ([][]int32, float64, error) {
	return func(texts []*rttText, n int) ([][]int32, float64, error) {
		answers := make([][]int32, len(texts))
		rates, errs := make([]float64, len(texts)), make([]error, len(texts))
		var wg sync.WaitGroup
		for i, t := range texts {
			wg.Go(func() { answers[i], rates[i], errs[i] = engineAnswer(c.ctx, e, t, n, strconv.Itoa(i)) })
		}
		wg.Wait()
		sum := 0.0
		for _, one := range rates {
			sum += one
		}
		return answers, sum, errors.Join(errs...)
	}
}

func engineAnswer(ctx context.Context, e *engine.Engine, t *rttText, n int, owner string) (answer []int32, rate float64, err error) {
	g, err := e.Start(ctx, engine.Request{Prompt: t.prompt, MaxTokens: n, LogitBias: t.sampling.LogitBias, Owner: owner})
	if err != nil {
		return nil, 0, err
	}
	var first, last time.Time
	for {
		token, _, err := g.NextToken(ctx)
		if err == io.EOF {
			return answer, float64(len(answer)-1) / last.Sub(first).Seconds(), nil
		}
		if err != nil {
			return nil, 0, err
		}
		if last = time.Now(); len(answer) == 0 {
			first = last
		}
		answer = append(answer, int32(token))
	}
}

// benchTable is a table in markdown.
type benchTable struct{ *tabwriter.Writer }

func newTable(out io.Writer, columns ...string) benchTable {
	t := benchTable{tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)}
	t.row(columns...)
	rule := make([]string, len(columns))
	for i := range rule {
		rule[i] = "---"
	}
	t.row(rule...)
	return t
}

func (t benchTable) row(cells ...string) { fmt.Fprintf(t, "| %s\t|\n", strings.Join(cells, "\t| ")) }

// atLeast and atMost are the two last cells of a row: what is wanted, and whether it is.
func atLeast(got, want float64) []string { return wanted("≥", want, got >= want) }
func atMost(got, want float64) []string  { return wanted("≤", want, got <= want) }

func wanted(sign string, want float64, met bool) []string {
	verdict := "short"
	if met {
		verdict = "met"
	}
	return []string{fmt.Sprintf("%s %.3g", sign, want), verdict}
}

// notWanted are the two last cells of a row that nothing is wanted of.
var notWanted = []string{"-", "-"}
