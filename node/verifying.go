package node

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
	"kvasird/ggml/tensor"
	"kvasird/ggml/tiny"
	"kvasird/node/verify"
)

// VerifyOptions says what Verify measures and where it writes.
type VerifyOptions struct {
	Model    string // "": the shipped one; "none": operations only
	Against  string // backend that the model's others are compared with; "": the best for this CPU
	Backends string // comma-separated; "": all of this machine
	Shapes   string
	Quants   string
	Rows     int
	Greedy   int
	Prompts  string // file, a prompt a line
	Text     string // file
	JSON     string // file; "-" is the output
	SVG      string // file
	Table    string // file for lines of the table of tolerances
	LibDir   string
	Child    bool // serve a task, for a parent
}

// VerifyFlags adds the options to a command's flags.
func VerifyFlags(set *flag.FlagSet) *VerifyOptions {
	o := &VerifyOptions{}
	set.StringVar(&o.Model, "model", "", "GGUF `file` to run on each backend (default: the shipped model; none: operations only)")
	set.StringVar(&o.Against, "against", "", "`backend` that the model's runs are compared with (default: the best CPU variant for this machine)")
	set.StringVar(&o.Backends, "backends", "", "comma-separated `backends`, such as reference,haswell,Vulkan0 (default: all of this machine)")
	set.StringVar(&o.Shapes, "shapes", "", "comma-separated `shapes` of experts (default: tiny,122B)")
	set.StringVar(&o.Quants, "quants", "", "comma-separated `types` of weights (default: f32,f16,q8_0,q6_K,q4_K,q4_0,mxfp4)")
	set.IntVar(&o.Rows, "rows", 8, "`rows` of the largest shape; of smaller ones as many more as take as long")
	set.IntVar(&o.Greedy, "greedy", 32, "`tokens` that each prompt is continued by")
	set.StringVar(&o.Prompts, "prompts", "", "`file` with a prompt on each line (default: eight short ones)")
	set.StringVar(&o.Text, "text", "", "`file` to measure the perplexity on, its first 1024 tokens (default: it is not measured)")
	set.StringVar(&o.JSON, "json", "", "write the report as JSON to this `file`; - prints it instead of the text")
	set.StringVar(&o.SVG, "svg", "", "draw heat maps of the pairs into this `file`")
	set.StringVar(&o.Table, "table", "", "write what was measured as lines of the table of tolerances to this `file`")
	set.StringVar(&o.LibDir, "lib", "", "`folder` of llama.cpp's backends (default: beside the linked library)")
	set.BoolVar(&o.Child, "child", false, "compute for a kvasird verify that started this process")
	return o
}

// ErrOutside is returned by Verify when something is outside its tolerance; the report
// says what.
var ErrOutside = errors.New("outside the tolerance, see above")

// Verify measures this machine's backends against each other and prints the verdicts.
// Progress goes to progress.
func Verify(ctx context.Context, o *VerifyOptions, out, progress io.Writer) error {
	if o.Child {
		return verify.Serve(ctx, os.Stdin, out)
	}
	cfg, err := o.config(progress)
	if err != nil {
		return err
	}
	var report verify.Report
	if report.Operations, err = verify.MeasureOperations(ctx, cfg); err != nil {
		return err
	}
	if o.Model != "none" {
		if report.Model, err = o.measureModel(ctx, cfg); err != nil {
			return err
		}
	}
	report.Judge()
	if err := o.write(&report, out); err != nil {
		return err
	}
	if !report.Within {
		return ErrOutside
	}
	return nil
}

func (o *VerifyOptions) config(progress io.Writer) (*verify.Config, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if o.Rows < 1 || o.Rows > 1<<12 || o.Greedy < 1 || o.Greedy > 1<<12 {
		return nil, fmt.Errorf("rows = %d, greedy = %d: want 1 to %d", o.Rows, o.Greedy, 1<<12)
	}
	cfg := &verify.Config{
		LibDir: o.LibDir, Rows: o.Rows, Shapes: verify.Shapes, Quants: verify.Quants,
		Child: func(ctx context.Context, _ verify.Backend) *exec.Cmd {
			cmd := exec.CommandContext(ctx, self, "verify", "--child")
			cmd.SysProcAttr = dieWithParent(syscall.SIGKILL)
			return cmd
		},
		Progress: func(format string, a ...any) { fmt.Fprintf(progress, format+"\n", a...) },
	}
	if cfg.Backends, err = verify.Backends(o.LibDir); err != nil {
		return nil, err
	}
	if o.Backends != "" {
		if cfg.Backends, err = verify.Choose(cfg.Backends, strings.Split(o.Backends, ",")); err != nil {
			return nil, err
		}
	}
	if o.Shapes != "" {
		names := strings.Split(o.Shapes, ",")
		cfg.Shapes = slices.DeleteFunc(slices.Clone(cfg.Shapes), func(s verify.Shape) bool { return !slices.Contains(names, s.Name) })
		if len(cfg.Shapes) != len(names) {
			return nil, fmt.Errorf("shapes %q: there are tiny and 122B", o.Shapes)
		}
	}
	if o.Quants != "" {
		cfg.Quants = nil
		for _, name := range strings.Split(o.Quants, ",") {
			q, err := tensor.ParseDType(name)
			if err != nil {
				return nil, err
			}
			cfg.Quants = append(cfg.Quants, q)
		}
	}
	return cfg, nil
}

func (o *VerifyOptions) measureModel(ctx context.Context, cfg *verify.Config) (*verify.Model, error) {
	m := &verify.ModelConfig{Path: o.Model, Prompts: verify.Prompts, Greedy: o.Greedy}
	if o.Model == "" {
		dir, err := os.MkdirTemp("", "kvasir-verify-")
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		if m.Path, err = tiny.Write(dir); err != nil {
			return nil, err
		}
	}
	if o.Prompts != "" {
		text, err := os.ReadFile(o.Prompts)
		if err != nil {
			return nil, err
		}
		m.Prompts = strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' || r == '\r' })
	}
	if o.Text != "" {
		text, err := os.ReadFile(o.Text)
		if err != nil {
			return nil, err
		}
		m.Text = string(text)
	}
	rt, err := ggml.Open(ggml.Config{LibDir: o.LibDir})
	if err != nil {
		return nil, err
	}
	against := o.Against
	if against == "" {
		against = tolerance.Name("CPU", rt.Variant())
	}
	all, err := verify.Backends(o.LibDir)
	if err != nil {
		return nil, err
	}
	base, err := verify.Choose(all, []string{against})
	if err != nil {
		return nil, err
	}
	m.Base = base[0]
	return verify.MeasureModel(ctx, cfg, m)
}

func (o *VerifyOptions) write(r *verify.Report, out io.Writer) error {
	if o.JSON != "-" {
		if err := r.WriteText(out); err != nil {
			return err
		}
	}
	writeJSON := func(w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetIndent("", " ")
		return enc.Encode(r)
	}
	if o.JSON == "-" {
		return writeJSON(out)
	}
	table := func(w io.Writer) error {
		for _, row := range r.Operations.Table(o.command()) {
			if _, err := fmt.Fprintln(w, row); err != nil {
				return err
			}
		}
		return nil
	}
	for path, fill := range map[string]func(io.Writer) error{o.JSON: writeJSON, o.SVG: r.WriteSVG, o.Table: table} {
		if path == "" {
			continue
		}
		if err := writeTo(path, fill); err != nil {
			return err
		}
	}
	return nil
}

// command measures the same operations again.
func (o *VerifyOptions) command() string {
	c := fmt.Sprint("kvasird verify --model none --rows ", o.Rows)
	for _, f := range [][2]string{{"backends", o.Backends}, {"shapes", o.Shapes}, {"quants", o.Quants}} {
		if f[1] != "" {
			c += " --" + f[0] + " " + f[1]
		}
	}
	return c
}

func writeTo(path string, fill func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := fill(f); err != nil {
		f.Close()
		return fmt.Errorf("%s: %w", path, err)
	}
	return f.Close()
}
