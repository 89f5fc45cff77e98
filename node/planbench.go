package node

import (
	"fmt"
	"runtime"
	"text/tabwriter"

	"kvasird/ggml"
	"kvasird/ring/plan"
)

// planSequences are the numbers of streams that predictions are compared for.
var planSequences = []int{1, 4, 8}

// deepModel has more and narrower layers than the one with real shapes.
var deepModel = ggml.GenerateConfig{
	Arch: "qwen2moe", Layers: 8, Experts: 16, ExpertsUsed: 4, Embedding: 1024, FeedForward: 512,
	Heads: 8, Vocab: 4096, Type: "Q4_K", Threads: 1,
}

// planned compares what the planner predicts with what runs. The speed of the
// machine is measured with the shipped model and a small generated one, in turns
// with what is predicted from it, since the speed of a shared machine drifts.
func (b *bench) planned() error {
	real, err := b.realModel()
	if err != nil {
		return err
	}
	deep, err := b.generated("deep-q4_k.gguf", "140 MB", deepModel)
	if err != nil {
		return err
	}
	small, err := b.tinyModel()
	if err != nil {
		return err
	}
	c, err := b.openCalibration()
	if err != nil {
		return err
	}
	defer c.Close()
	var ways []*timed
	var rows []*planRow
	for _, m := range []struct{ name, path string }{
		{"shipped", small}, {"real shapes", real}, {"eight layers", deep},
	} {
		for _, far := range []bool{false, true} {
			t, err := b.openTimed(m.path, far, planSequences...)
			if err != nil {
				return err
			}
			defer t.Close()
			ways = append(ways, t)
			for _, n := range planSequences {
				rows = append(rows, &planRow{name: m.name, far: far, sequences: n, timed: t})
			}
		}
	}
	for range 4 * b.Rounds {
		if err := c.round(); err != nil {
			return err
		}
		for _, t := range ways {
			if err := t.round(b.ctx); err != nil {
				return err
			}
		}
	}
	m, err := c.result()
	if err != nil {
		return err
	}
	return b.writePlanned(m, rows)
}

// planRow is one prediction.
type planRow struct {
	name      string
	far       bool // a backbone, and a worker on this machine
	sequences int
	timed     *timed
}

// predict is the planner's tokens per second.
func (r *planRow) predict(m Measured) (plan.Rate, error) {
	kind := plan.WholeReplica
	if r.far {
		kind = plan.ExpertWorkers
	}
	return m.predict(kind, plan.Query{Model: r.timed.desc, NoCuts: "not asked for",
		Context: r.sequences * 2 * measureFilled, Sequences: r.sequences, Filled: measureFilled, RTT: planRTT{{}: 0}.between})
}

// predict is the rate of all sequences of a query by a kind of plan on this machine,
// which is there twice for the kinds that take two.
func (m Measured) predict(kind plan.Kind, q plan.Query) (plan.Rate, error) {
	const room = 1 << 40
	one := plan.Node{Name: "backbone", RAM: room, Disk: room, Has: true, CPU: m.Speed, Call: m.Call, Up: m.Rate, Down: m.Rate}
	q.Nodes = []plan.Node{one}
	if kind != plan.WholeReplica {
		other := one
		other.Name = "worker"
		q.Nodes = append(q.Nodes, other)
	}
	p, err := plan.Make(q)
	if err != nil {
		return plan.Rate{}, err
	}
	for _, c := range p.Candidates {
		if c.Kind == kind {
			return c.Many, nil
		}
	}
	return plan.Rate{}, fmt.Errorf("no %s in the plan", kind)
}

func (b *bench) writePlanned(m Measured, rows []*planRow) error {
	fmt.Fprintf(b.out, "\nplan: predicted and measured tokens/s, %d thread(s), %d cores (within 25 %% wanted)\n", b.Threads, runtime.NumCPU())
	fmt.Fprintf(b.out, "machine: %.1f GB/s of weights for one row, %.1f for further ones, %v per layer; %v per call, %.0f MB/s to a worker\n",
		m.Speed.Bytes/1e9, m.Speed.Batch/1e9, m.Speed.Layer, m.Call, m.Rate/1e6)
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "model\tway\tstreams\tpredicted\tmeasured\tratio\tlimited by\n")
	for _, r := range rows {
		got := float64(r.sequences) / r.timed.step(r.sequences)
		predicted, err := r.predict(m)
		if err != nil {
			return err
		}
		want := predicted.TokensPerSecond
		way := "whole"
		if r.far {
			way = "backbone + worker"
		}
		mark := ""
		if want/got > 1.25 || want/got < 0.8 {
			mark = " !"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%.0f\t%.0f\t%.2f%s\t%s\n", r.name, way, r.sequences, want, got, want/got, mark, predicted.Limit)
	}
	return t.Flush()
}
