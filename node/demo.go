package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/api"
)

const demoTime = 3 * time.Minute

// demoQuestions are asked of the swarm and of the same model alone.
var demoQuestions = []api.AskRequest{
	{Prompt: "The capital of France is", Raw: true, MaxTokens: 64},
	{Prompt: "What is 6 plus 7?", MaxTokens: 64},
	{Prompt: "What does a worker hold?", MaxTokens: 64},
}

// demoCuts are the expert ranges of the three workers.
var demoCuts = []gguf.Range{{Begin: 0, End: 11}, {Begin: 11, End: 22}, {Begin: 22, End: 32}}

// demoSwarm is a backbone without experts and three workers, each a process,
// and one process with the whole model.
type demoSwarm struct {
	dir      string
	out      io.Writer
	children family
	workers  []*child
	backbone *child
	alone    *child
}

// Demo starts the swarm, asks it, compares every token with the same model
// alone, and says who computed what. A token that differs is an error.
func Demo(ctx context.Context, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, demoTime)
	defer cancel()
	dir, err := os.MkdirTemp("", "kvasir-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	d := &demoSwarm{dir: dir, out: out}
	defer func() { err = errors.Join(err, d.children.stop()) }()
	if err = d.start(ctx); err == nil {
		err = d.ask(ctx)
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		err = errors.New("interrupted")
	}
	return err
}

// start writes the files and starts the processes.
func (d *demoSwarm) start(ctx context.Context) error {
	whole, err := tiny.Write(d.dir)
	if err != nil {
		return err
	}
	m, err := gguf.OpenModel(whole)
	if err != nil {
		return err
	}
	defer m.Close()
	var peers []string
	for i, cut := range demoCuts {
		w, err := d.startWorker(ctx, m, i, cut)
		if err != nil {
			return err
		}
		st, err := w.await(ctx, serving)
		if err != nil {
			return err
		}
		peers = append(peers, "--peer", localAddr(st))
		fmt.Fprintf(d.out, "worker %d   pid %-7d experts %v of every layer\n", i+1, w.cmd.Process.Pid, cut)
	}
	if err := d.startBackbone(ctx, m, peers); err != nil {
		return err
	}
	d.alone, err = d.children.start(d.dir, "alone", "--model", whole, "--experts", ExpertsHere,
		"--role", "backbone", "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0")
	if err != nil {
		return err
	}
	_, err = d.alone.await(ctx, serving)
	return err
}

func (d *demoSwarm) startWorker(ctx context.Context, m *gguf.Model, i int, cut gguf.Range) (*child, error) {
	path := filepath.Join(d.dir, fmt.Sprintf("slice-%d.gguf", i+1))
	image, err := m.SliceImage(ctx, gguf.Slice{Layers: gguf.Range{End: m.Layers()}, Experts: cut})
	if err == nil {
		err = image.WriteFile(ctx, path)
	}
	if err != nil {
		return nil, err
	}
	w, err := d.children.start(d.dir, fmt.Sprintf("worker-%d", i+1), "--model", path, "--role", "worker", "--http", Off,
		"--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0")
	d.workers = append(d.workers, w)
	return w, err
}

func (d *demoSwarm) startBackbone(ctx context.Context, m *gguf.Model, peers []string) error {
	path := filepath.Join(d.dir, "backbone.gguf")
	if err := gguf.WriteBackbone(ctx, path, m); err != nil {
		return err
	}
	args := append([]string{"--model", path, "--role", "backbone", "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0"}, peers...)
	var err error
	if d.backbone, err = d.children.start(d.dir, "backbone", args...); err != nil {
		return err
	}
	if _, err := d.backbone.await(ctx, serving); err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "backbone   pid %-7d its model file: %.1f MB long, %.1f MB on disk, no expert in it\n",
		d.backbone.cmd.Process.Pid, float64(info.Size())/1e6, float64(bytesOnDisk(info))/1e6)
	return nil
}

// ask asks both and compares.
func (d *demoSwarm) ask(ctx context.Context) error {
	var tokens, equal int
	var swarm, alone []api.AskDone
	for _, q := range demoQuestions {
		fmt.Fprintf(d.out, "\n> %s\n  ", q.Prompt)
		got, done, err := askTokens(ctx, d.backbone.client(), q, d.out)
		if err != nil {
			return fmt.Errorf("the swarm: %w", err)
		}
		want, alonedone, err := askTokens(ctx, d.alone.client(), q, io.Discard)
		if err != nil {
			return fmt.Errorf("the model alone: %w", err)
		}
		fmt.Fprintln(d.out)
		swarm, alone = append(swarm, done), append(alone, alonedone)
		tokens += max(len(got), len(want))
		for i := range min(len(got), len(want)) {
			if got[i] == want[i] {
				equal++
			}
		}
	}
	if err := d.table(ctx); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\ntokens/s   swarm %.0f, alone %.0f (one thread each, %d cores shared by all)\n", speed(swarm), speed(alone), runtime.NumCPU())
	fmt.Fprintf(d.out, "tokens     %d/%d equal to the same model alone\n", equal, tokens)
	if equal != tokens || tokens == 0 {
		return errors.New("the swarm's answer differs from the model's")
	}
	return nil
}

// speed is tokens per second over several answers, without the first tokens.
func speed(list []api.AskDone) float64 {
	tokens, seconds := 0, 0.0
	for _, d := range list {
		if d.Tokens > 1 {
			tokens += d.Tokens - 1
			seconds += d.Seconds - d.FirstTokenSec
		}
	}
	if seconds <= 0 {
		return 0
	}
	return float64(tokens) / seconds
}

// table prints the rows that each worker computed in each layer.
func (d *demoSwarm) table(ctx context.Context) error {
	t := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "\nrows computed\t")
	rows := make([]map[int]uint64, len(d.workers))
	var layers []int
	for i, w := range d.workers {
		st, err := w.client().Status(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(t, "worker %d\t", i+1)
		rows[i] = map[int]uint64{}
		for _, r := range st.Rows {
			rows[i][r.Layer] = r.Rows
			if !slices.Contains(layers, r.Layer) {
				layers = append(layers, r.Layer)
			}
		}
	}
	slices.Sort(layers)
	for _, l := range layers {
		fmt.Fprintf(t, "\nlayer %d\t", l)
		for i := range d.workers {
			fmt.Fprintf(t, "%d\t", rows[i][l])
		}
	}
	fmt.Fprintln(t)
	return t.Flush()
}
