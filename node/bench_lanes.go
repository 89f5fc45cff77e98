package node

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"kvasird/experts"
	"kvasird/ggml"
	"kvasird/node/engine"
)

// laneCounts are the contexts among which a backbone's sequences are split.
var laneCounts = []int{1, 2, 4}

// lanePatience is how long a call may take: a worker of this machine may have to wait for the others.
const lanePatience = 10 * time.Second

var laneLines = []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond}

// middleModel takes about as long to compute 16 tokens as a line of 5 ms takes to bring them.
var middleModel = ggml.GenerateConfig{
	Arch: "qwen3moe", Layers: 4, Experts: 32, ExpertsUsed: 8,
	Embedding: 1024, FeedForward: 512, Heads: 8, Vocab: 2048,
	Type: "Q4_K", Threads: 1,
}

// lanes measures what a backbone gains whose sequences are split among several contexts, so that
// one computes while the rows of another are on their way: the tokens per second of all streams.
func (b *bench) lanes() error {
	for _, m := range []struct {
		name    string
		path    func() (string, error)
		prompts bool
	}{{"shipped", b.tinyModel, true}, {"middle widths", b.middleModel, false}} {
		path, err := m.path()
		if err != nil {
			return err
		}
		c, err := b.openContest(m.name, path, m.prompts, 1)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		fmt.Fprintf(b.out, "\n### Contexts of a backbone: %s, %d streams, one worker\n\n", m.name, peerStreams)
		t := newTable(b.out, "RTT", "contexts", "tok/s", "of one context", "predicted", "of llama.cpp RPC")
		for _, rtt := range laneLines {
			if err = c.lanesOver(t, line{rtt: rtt}); err != nil {
				break
			}
		}
		if err := errors.Join(err, t.Flush(), c.Close()); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return nil
}

func (b *bench) middleModel() (string, error) {
	return b.generated("middle-widths-q4_k.gguf", "120 MB", middleModel)
}

func (c *contest) lanesOver(t benchTable, l line) error {
	d, err := c.crew.dispatch(c.ctx, experts.Config{MinDeadline: lanePatience}, c.crew.names, func(string) line { return l })
	if err != nil {
		return err
	}
	defer d.Close()
	c.by.Store(d)
	var ways []contestant
	if c.Server != "" && c.RPC != "" && c.prompts {
		rpc, err := c.openRPC(c.path, peerStreams, l)
		if err != nil {
			return err
		}
		defer rpc.Close()
		ways = append(ways, contestant{"llama.cpp RPC", false, c.byRPC(rpc)})
	}
	first := len(ways)
	for _, n := range slices.Concat(laneCounts, []int{0}) {
		name, drafts := strconv.Itoa(n), (*engine.Drafts)(nil)
		if n == 0 {
			name, drafts = "as a node has them, drafts", &engine.Drafts{Resident: d.Resident}
		}
		e, err := c.openLanes(c.swarm, n, drafts)
		if err != nil {
			return err
		}
		defer e.Close()
		ways = append(ways, contestant{name, false, c.byEngine(e)})
	}
	for _, w := range ways { // programs are learned, and what is made at first use is made
		if _, _, err := w.run(c.texts, 4); err != nil {
			return err
		}
	}
	rates, err := c.turns(l, c.texts, ways)
	if err != nil {
		return err
	}
	for i, w := range ways {
		predicted, ofRPC := "-", "-"
		if at := i - first; at >= 0 && at < len(laneCounts) {
			predicted = fmt.Sprintf("%.2f", c.lanesGain(l, median(rates[first]), laneCounts[at]))
		}
		if first > 0 {
			ofRPC = fmt.Sprintf("%.2f", medianRatio(rates[i], rates[0]))
		}
		t.row(msText(l.rtt), w.name, rttRate(median(rates[i])), fmt.Sprintf("%.2f", medianRatio(rates[i], rates[first])), predicted, ofRPC)
	}
	return nil
}

// lanesGain predicts the tokens per second of n contexts by those of one, of a step of which all but the
// line is computed row by row: in 1/n of that time for 1/n of the streams, while others wait. Here and at
// the worker something is always computed at most.
func (c *contest) lanesGain(l line, one float64, n int) float64 {
	step := peerStreams / one
	wait := min(step, float64(len(c.desc.Layers))*l.rtt.Seconds())
	compute := step - wait
	return step / max(wait+compute/float64(n), compute/min(2, float64(n)))
}
