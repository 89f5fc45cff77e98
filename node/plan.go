package node

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/tiny"
	"kvasird/node/api"
	"kvasird/node/client"
	"kvasird/ring/plan"
)

// PlanOptions says what PlanModel prints, beside the settings of the node.
type PlanOptions struct {
	Nodes   string // file that describes nodes; "": this machine, and what its daemon knows of others
	JSON    bool
	Measure bool // measure this machine first, or do only that when no model is named
}

// PlanFlags adds the options to a command's flags.
func PlanFlags(set *flag.FlagSet) *PlanOptions {
	o := &PlanOptions{}
	set.StringVar(&o.Nodes, "nodes", "", "`file` that describes the nodes (default: this machine and who serves the model now)")
	set.BoolVar(&o.JSON, "json", false, "print it as JSON")
	set.BoolVar(&o.Measure, "measure", false, "measure the speed of this machine first, and keep it in the data folder")
	return o
}

// PlanModel prints the ways in which a model could run. It reads the model's header
// only. The model is a file, or one of the store by its name or id; "" is the
// node's.
func PlanModel(ctx context.Context, cfg Config, opts PlanOptions, model string, out io.Writer) error {
	if opts.Measure {
		if err := measureHere(ctx, cfg, out, opts.JSON); err != nil || model == "" {
			return err
		}
	}
	name, g, done, err := openForPlan(ctx, cfg, model)
	if err != nil {
		return err
	}
	defer done()
	q := plan.Query{Context: cfg.Model.Context, Sequences: cfg.Model.Sequences, FullWindows: true}
	if q.Model, err = plan.Describe(g); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if q.Cuts, err = g.Cuts(); err != nil {
		q.NoCuts = err.Error()
	}
	// A plan numbers the layers that compute.
	q.Cuts = slices.DeleteFunc(q.Cuts, func(c int) bool { return c >= len(q.Model.Layers) })
	var rtt planRTT
	var notes []string
	if opts.Nodes != "" {
		q.Nodes, rtt, err = readPlanSpec(opts.Nodes)
	} else {
		q.Nodes, rtt, notes, err = liveNodes(ctx, cfg, g, name)
	}
	if err != nil {
		return err
	}
	q.RTT = rtt.between
	p, err := plan.Make(q)
	if err != nil {
		return err
	}
	p.Notes = append(notes, p.Notes...)
	if opts.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(struct {
			Model     string `json:"model"`
			Context   int    `json:"context"`
			Sequences int    `json:"sequences"`
			*plan.Plan
		}{name, q.Context, q.Sequences, p})
	}
	return writePlan(out, name, q, p)
}

// openForPlan opens a model's header. A name that is no file is looked for in the
// store.
func openForPlan(ctx context.Context, cfg Config, model string) (name string, g *gguf.Model, done func(), err error) {
	if model == "" {
		model = cfg.Model.Path
	}
	if model == "" {
		dir, err := os.MkdirTemp("", "kvasir-plan-")
		if err != nil {
			return "", nil, nil, err
		}
		defer os.RemoveAll(dir) // the open file stays readable
		if model, err = tiny.Write(dir); err != nil {
			return "", nil, nil, err
		}
	}
	g, err = gguf.OpenModel(model)
	if err == nil {
		return strings.TrimSuffix(filepath.Base(model), ".gguf"), g, func() { g.Close() }, nil
	}
	if !errors.Is(err, os.ErrNotExist) || strings.ContainsRune(model, filepath.Separator) || strings.HasSuffix(model, ".gguf") {
		return "", nil, nil, err
	}
	return openStored(ctx, cfg, model)
}

// openStored opens a model of the store, of which the header is held at the least.
func openStored(ctx context.Context, cfg Config, model string) (name string, g *gguf.Model, done func(), err error) {
	data, err := OpenData(cfg.Data)
	if errors.Is(err, ErrDataBusy) {
		return "", nil, nil, fmt.Errorf("%q is no file, and the store is in use by the daemon: name the model's file", model)
	}
	if err != nil {
		return "", nil, nil, err
	}
	st, err := openStore(cfg)
	if err != nil {
		data.Close()
		return "", nil, nil, err
	}
	closeAll := func() { st.Close(); data.Close() }
	m, err := findModel(st, model)
	if err == nil {
		g, err = m.GGUF(ctx)
	}
	if err != nil {
		closeAll()
		return "", nil, nil, fmt.Errorf("%q is no file: %w", model, err)
	}
	return m.Name(), g, func() { g.Close(); closeAll() }, nil
}

// measureHere measures this machine and prints what a description of it says.
func measureHere(ctx context.Context, cfg Config, out io.Writer, quiet bool) error {
	rt, err := ggml.Open(ggml.Config{})
	if err != nil {
		return err
	}
	m, err := Measure(ctx, rt, cfg.Data, cfg.Threads)
	if err != nil || quiet {
		return err
	}
	_, err = fmt.Fprintf(out, `Measured with %d threads, and kept in %s. In a description of nodes:

memory_bandwidth = "%.1f GB/s"
batch_bandwidth = "%.1f GB/s"
layer_time = "%dus"
call_time = "%dus"

`, m.Threads, filepath.Join(cfg.Data, measuredName), m.Speed.Bytes/1e9, m.Speed.Batch/1e9, m.Speed.Layer.Microseconds(), m.Call.Microseconds())
	return err
}

// hereName is this machine in a plan.
const hereName = "this machine"

// liveNodes are this machine and, when a daemon runs here, the peers that serve
// experts of the model, with what they serve: that much they have. What is not
// known comes back in words.
func liveNodes(ctx context.Context, cfg Config, g *gguf.Model, name string) ([]plan.Node, planRTT, []string, error) {
	here, notes, err := thisMachine(cfg)
	if err != nil {
		return nil, nil, nil, err
	}
	here.Has = g.Kind() == gguf.Full
	rtt := planRTT{}
	c := client.New(cfg.Control)
	st, err := c.Status(ctx)
	if errors.Is(err, client.ErrNoDaemon) {
		return []plan.Node{here}, rtt, append(notes, "no daemon runs here, so this plan is for this machine alone: --nodes FILE describes others"), nil
	}
	if err != nil {
		return nil, nil, nil, err
	}
	maps, err := c.Coverage(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	i := slices.IndexFunc(maps, func(m api.CoverageMap) bool { return m.Model == name })
	if i < 0 {
		return []plan.Node{here}, rtt, append(notes, "no peer is known to serve this model, so this plan is for this machine alone"), nil
	}
	peers := servingNodes(g, maps[i], st)
	for _, p := range st.Peers {
		if p.RTTMicro > 0 {
			rtt.set(hereName, p.ID, microseconds(p.RTTMicro))
		}
	}
	if len(peers) > 0 {
		notes = append(notes, "of a peer it is only known what it serves now, and its round trip to this machine")
	}
	return append([]plan.Node{here}, peers...), rtt, notes, nil
}
