package verify

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"

	"kvasird/experts/tolerance"
	"kvasird/ggml"
)

// Backend is where a child computes.
type Backend struct {
	Name    string // as in package tolerance
	Variant string // CPU variant; "" is the best for this machine
	Device  string // a ggml device; "" is the CPU
}

// task is what a child is asked, and outcome what it answers, as gob.
type task struct {
	Backend Backend
	LibDir  string
	Samples []sample
	Ops     []opInput
	Model   *modelTask
}

type outcome struct {
	Err      string // why nothing was computed
	Release  string
	Features []string
	Rows     [][][]float32 // by sample and way, [pairs*width]
	Ops      [][]float32   // by task.Ops
	Model    *modelRun
}

// Serve is the child's side: a task from r, the outcome to w.
func Serve(ctx context.Context, r io.Reader, w io.Writer) error {
	var t task
	if err := gob.NewDecoder(r).Decode(&t); err != nil {
		return fmt.Errorf("read the task: %w", err)
	}
	o, err := t.run(ctx)
	if err != nil {
		o = &outcome{Err: err.Error()}
	}
	return gob.NewEncoder(w).Encode(o)
}

func (t *task) run(ctx context.Context) (o *outcome, err error) {
	var rt *ggml.Runtime
	if t.Backend.Name != tolerance.Reference || t.Model != nil {
		if rt, err = ggml.Open(ggml.Config{LibDir: t.LibDir, Variant: t.Backend.Variant}); err != nil {
			return nil, err
		}
	}
	o = &outcome{}
	if rt != nil {
		o.Release, o.Features = rt.Release(), rt.Features()
	}
	for _, s := range t.Samples {
		rows, err := s.compute(ctx, rt, t.Backend)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Base(s.Path), err)
		}
		o.Rows = append(o.Rows, rows)
	}
	for _, in := range t.Ops {
		out, err := in.compute(rt, t.Backend)
		if err != nil {
			return nil, err
		}
		o.Ops = append(o.Ops, out)
	}
	if t.Model != nil {
		o.Model, err = t.Model.run(ctx, rt, t.Backend)
	}
	return o, err
}

// ask has a child carry out a task.
func (c *Config) ask(ctx context.Context, t *task) (*outcome, error) {
	var in, out, words bytes.Buffer
	if err := gob.NewEncoder(&in).Encode(t); err != nil {
		return nil, err
	}
	cmd := c.Child(ctx, t.Backend)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &words
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		text := strings.TrimSpace(words.String())
		return nil, fmt.Errorf("its process ended: %v %s", exit, text[max(0, len(text)-500):])
	} else if err != nil {
		return nil, err
	}
	var o outcome
	if err := gob.NewDecoder(&out).Decode(&o); err != nil {
		return nil, fmt.Errorf("its answer cannot be read: %w", err)
	}
	if o.Err != "" {
		return nil, errors.New(o.Err)
	}
	return &o, nil
}
