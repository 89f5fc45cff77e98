package node

import (
	"cmp"
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
	Nodes   string // file that describes nodes; "": this machine, and the peers of its daemon
	JSON    bool
	Measure bool // measure this machine first, or do only that when no model is named
}

// PlanFlags adds the options to a command's flags.
func PlanFlags(set *flag.FlagSet) *PlanOptions {
	o := &PlanOptions{}
	set.StringVar(&o.Nodes, "nodes", "", "`file` that describes the nodes (default: this machine and the peers of its daemon)")
	set.BoolVar(&o.JSON, "json", false, "print it as JSON")
	set.BoolVar(&o.Measure, "measure", false, "measure the speed of this machine first, and keep it in the data folder")
	return o
}

// PlanModel prints the ways in which a model could run. It reads the model's header
// only. The model is a file, or one of the store or of the network by its name or id; ""
// is the node's. While a daemon runs here, it plans for itself and its peers.
func PlanModel(ctx context.Context, cfg Config, opts PlanOptions, model string, out io.Writer) error {
	if opts.Measure {
		if err := measureHere(ctx, cfg, out, opts.JSON); err != nil || model == "" {
			return err
		}
	}
	var spec string
	if opts.Nodes != "" {
		var err error
		if spec, err = readPlanSpec(opts.Nodes); err != nil {
			return err
		}
	}
	done, err := planByDaemon(ctx, cfg, model, spec)
	if err == nil && done == nil {
		done, err = planHere(ctx, cfg, model, spec)
	}
	if err != nil {
		return err
	}
	if !opts.JSON {
		_, err = io.WriteString(out, printable(done.Text))
		return err
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(done.Plan)
}

// planByDaemon has the daemon make the plan; nil when none runs, or when what only it
// knows is not needed.
func planByDaemon(ctx context.Context, cfg Config, model, spec string) (*api.PlanResult, error) {
	model = cmp.Or(model, cfg.Model.Path)
	_, err := os.Stat(model)
	if isFile := err == nil; isFile && spec != "" || !isFile && looksLikeFile(model) {
		return nil, nil
	} else if isFile {
		if model, err = filepath.Abs(model); err != nil { // the daemon works in another folder
			return nil, err
		}
	}
	done, err := client.New(cfg.Control).Plan(ctx, api.PlanRequest{
		Model: model, Context: cfg.Model.Context, Sequences: cfg.Model.Sequences, Nodes: spec,
	})
	if errors.Is(err, client.ErrNoDaemon) {
		return nil, nil
	}
	return done, err
}

// planHere plans without a daemon: for described nodes, or for this machine alone.
func planHere(ctx context.Context, cfg Config, model, spec string) (*api.PlanResult, error) {
	name, g, done, err := openForPlan(ctx, cfg, model)
	if err != nil {
		return nil, err
	}
	defer done()
	q, err := planQuery(name, g, cfg.Model.Context, cfg.Model.Sequences)
	if err != nil {
		return nil, err
	}
	var notes []string
	if spec != "" {
		q.Nodes, q.RTT, err = parsePlanSpec([]byte(spec))
	} else {
		var here plan.Node
		here, notes, err = thisMachine(cfg)
		here.Has = g.Kind() == gguf.Full
		q.Nodes = []plan.Node{here}
		notes = append(notes, "no daemon runs here, so only this machine was looked at: `kvasird run` has it know its network, --nodes FILE describes other nodes")
	}
	if err != nil {
		return nil, err
	}
	return makePlan(name, q, notes, nil)
}

// planQuery asks about the model of a header, without nodes yet.
func planQuery(name string, g *gguf.Model, context, sequences int) (q plan.Query, err error) {
	q = plan.Query{Context: context, Sequences: sequences, FullWindows: true}
	if q.Model, err = plan.Describe(g); err != nil {
		return q, fmt.Errorf("%s: %w", name, err)
	}
	if q.Cuts, err = g.Cuts(); err != nil {
		q.NoCuts = err.Error()
	}
	// A plan numbers the layers that compute.
	q.Cuts = slices.DeleteFunc(q.Cuts, func(c int) bool { return c >= len(q.Model.Layers) })
	return q, nil
}

// makePlan plans, and writes that for people and programs. peers are nodes of a network
// as they tell of themselves, those that are not planned with too.
func makePlan(name string, q plan.Query, notes []string, peers []planPeer) (*api.PlanResult, error) {
	p, err := plan.Make(q)
	if err != nil {
		return nil, err
	}
	p.Notes = append(notes, p.Notes...)
	text, err := json.Marshal(struct {
		Model     string     `json:"model"`
		Context   int        `json:"context"`
		Sequences int        `json:"sequences"`
		Nodes     []planPeer `json:"nodes,omitempty"`
		*plan.Plan
	}{name, q.Context, q.Sequences, peers, p})
	if err != nil {
		return nil, err
	}
	return &api.PlanResult{Text: planText(name, q, p, peers), Plan: text}, nil
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
		return nameOf(model), g, func() { g.Close() }, nil
	}
	if !errors.Is(err, os.ErrNotExist) || looksLikeFile(model) {
		return "", nil, nil, err
	}
	return openStored(ctx, cfg, model)
}

// looksLikeFile says whether what a person calls a model can only be a file.
func looksLikeFile(model string) bool {
	return strings.ContainsRune(model, filepath.Separator) || strings.HasSuffix(model, ".gguf")
}

// openStored opens a model of the store, of which the header is held at the least.
func openStored(ctx context.Context, cfg Config, model string) (name string, g *gguf.Model, done func(), err error) {
	data, err := OpenData(cfg.Data)
	if errors.Is(err, ErrDataBusy) {
		return "", nil, nil, fmt.Errorf("%q is no file, and the store is in use by a kvasird that does not answer at %s: name the model's file, or try again when it is started", model, cfg.Control)
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
