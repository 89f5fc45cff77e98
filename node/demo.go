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

// demoMemory is what each volunteer has for experts: about half of them.
const demoMemory = "8MB"

// demoSwarm is a network of processes: one with the whole model, which answers
// alone and gives weights; a backbone without experts; and three volunteers that
// begin with nothing.
type demoSwarm struct {
	dir      string
	out      io.Writer
	file     string // of the network
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

// start writes the files, starts the processes, and waits until they have found
// each other and shared out the experts.
func (d *demoSwarm) start(ctx context.Context) error {
	whole, err := tiny.Write(d.dir)
	if err != nil {
		return err
	}
	d.file = filepath.Join(d.dir, "demo.toml")
	if err := CreateNetwork(NewNetwork{Name: "demo", Replicas: 1, Out: d.file}, io.Discard); err != nil {
		return err
	}
	if d.alone, err = d.join("alone", "--role", "backbone", "--model", whole, "--experts", ExpertsHere); err != nil {
		return err
	}
	st, err := d.alone.await(ctx, serving)
	if err != nil {
		return err
	}
	if err := d.meetAt(localAddr(st)); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "model      pid %-7d has the whole model: answers alone, and gives weights to the network\n", d.alone.cmd.Process.Pid)
	began := time.Now()
	if err := d.startBackbone(ctx, whole); err != nil {
		return err
	}
	for i := range 3 {
		w, err := d.join(fmt.Sprintf("volunteer-%d", i+1), "--memory", demoMemory, "--disk", "1GB")
		if err != nil {
			return err
		}
		d.workers = append(d.workers, w)
		fmt.Fprintf(d.out, "volunteer  pid %-7d has the network file and %s for experts\n", w.cmd.Process.Pid, demoMemory)
	}
	if _, err := d.backbone.await(ctx, serving); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "%.1f s later every expert is served\n", time.Since(began).Seconds())
	for i, w := range d.workers {
		st, err := w.client().Status(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(d.out, "volunteer %d took layers/experts", i+1)
		for _, s := range st.Slices {
			fmt.Fprintf(d.out, "  %d:%d/%d:%d", s.LayerBegin, s.LayerEnd, s.ExpertBegin, s.ExpertEnd)
		}
		fmt.Fprintln(d.out)
	}
	return nil
}

// join starts a node of the network on this machine only.
func (d *demoSwarm) join(name string, args ...string) (*child, error) {
	return d.children.start(d.dir, name, append([]string{"--network", d.file, "--listen", "/ip4/127.0.0.1/tcp/0",
		"--http", Off, "--mdns", Off, "--threads", "1"}, args...)...)
}

// meetAt has nodes that start from now on come in by an address: the demo also runs
// where there is no multicast.
func (d *demoSwarm) meetAt(addr string) error {
	g, err := ReadNetwork(d.file)
	if err != nil {
		return err
	}
	g.Contact.Bootstrap = []string{addr}
	return replaceFile(d.file, []byte(g.String()))
}

func (d *demoSwarm) startBackbone(ctx context.Context, whole string) error {
	m, err := gguf.OpenModel(whole)
	if err != nil {
		return err
	}
	defer m.Close()
	path := filepath.Join(d.dir, "backbone.gguf")
	if err := gguf.WriteBackbone(ctx, path, m); err != nil {
		return err
	}
	if d.backbone, err = d.join("backbone", "--role", "backbone", "--model", path, "--wait", "60"); err != nil {
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
			return fmt.Errorf("the swarm: %w\n%s", err, d.backbone.lastWords())
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

// table prints the rows that each volunteer computed in each layer.
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
		fmt.Fprintf(t, "volunteer %d\t", i+1)
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
