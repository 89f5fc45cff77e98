package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/ggml/store"
	"kvasird/ggml/tiny"
	"kvasird/node/api"
)

// probeTime bounds the child that tries out a model file.
const probeTime = 10 * time.Minute

// modelFile is the node's model on disk.
type modelFile struct {
	path string
	name string // what clients call it
	*gguf.Model
	id gguf.ModelID
}

// openModelFile opens the configured model, or the shipped one, and learns its id.
// With a store, a whole model is taken into that: it is hashed only once, and
// others can fetch it from here.
func openModelFile(ctx context.Context, cfg Config, st *store.Store, log *slog.Logger) (*modelFile, error) {
	path := cfg.Model.Path
	if path == "" {
		var err error
		if path, err = tiny.Write(cfg.Data); err != nil {
			return nil, err
		}
	}
	m, err := gguf.OpenModel(path)
	if err != nil {
		return nil, fmt.Errorf("%w: is it a whole GGUF file? --model names another one", err)
	}
	if st != nil && m.Kind() == gguf.Full {
		m.Close()
		return importModelFile(ctx, path, st, log)
	}
	id, err := m.ID(ctx)
	if err != nil {
		m.Close()
		return nil, err
	}
	return &modelFile{path: path, name: nameOf(path), Model: m, id: id}, nil
}

func importModelFile(ctx context.Context, path string, st *store.Store, log *slog.Logger) (*modelFile, error) {
	last := time.Now()
	stored, err := st.Import(ctx, []string{path}, func(done, total int64) {
		if now := time.Now(); now.Sub(last) > 10*time.Second {
			last = now
			log.Info("model is hashed, once", "path", path, "done_bytes", done, "bytes", total)
		}
	})
	if err != nil {
		return nil, err
	}
	m, err := stored.GGUF(ctx)
	if err != nil {
		return nil, err
	}
	return &modelFile{path: path, name: nameOf(path), Model: m, id: stored.ID()}, nil
}

// nameOf is what clients call the model of a file.
func nameOf(path string) string { return strings.TrimSuffix(filepath.Base(path), ".gguf") }

func (m *modelFile) status() *api.Model {
	return &api.Model{
		Name: m.name, ID: m.id.String(), Arch: m.Arch(), Layers: m.Layers(),
		MoELayers: len(m.ExpertLayers()), Experts: m.Experts(), Used: m.ExpertsUsed(),
	}
}

// remoteExperts says whether the backbone leaves its experts to workers, and
// whether it keeps a copy of its own as the last resort.
func (m *modelFile) remoteExperts(cfg Config) (remote, ownCopy bool, err error) {
	mode := cfg.Model.Experts
	sparse := m.Kind() == gguf.Backbone || m.Kind() == gguf.Partial && len(m.ExpertLayers()) > 0
	if p := m.Pooling(); p != gguf.NoPooling {
		if err := p.Check(); err != nil {
			return false, false, fmt.Errorf("%s: %w", m.path, err)
		}
		if mode != ExpertsAuto && mode != ExpertsHere || sparse {
			return false, false, fmt.Errorf("%s makes embeddings, which is done on one node with all of the model: leave model.experts at %q", m.path, ExpertsHere)
		}
		return false, false, nil
	}
	if mode == ExpertsAuto {
		switch {
		case len(m.ExpertLayers()) == 0:
			mode = ExpertsHere // a model without experts is a plain model
		case sparse:
			mode = ExpertsRemote
		case cfg.Genesis != nil && cfg.Budget.limits.memory > 0 && m.expertBytes() > cfg.Budget.limits.memory:
			mode = ExpertsRemote
		case cfg.Model.cacheBudget() > 0:
			mode = ExpertsRemote
		case len(cfg.Peers) > 0 || cfg.Genesis != nil:
			mode = ExpertsSwarm
		default:
			mode = ExpertsHere
		}
	}
	switch {
	case m.Kind() == gguf.ExpertSlice || m.Kind() == gguf.Stage:
		return false, false, fmt.Errorf("%s is a %v: a backbone needs the whole model or a backbone file (`kvasir gguf backbone`)", m.path, m.Kind())
	case mode != ExpertsHere && len(m.ExpertLayers()) == 0:
		return false, false, fmt.Errorf("%s has no experts: set model.experts to %q", m.path, ExpertsHere)
	case mode != ExpertsRemote && sparse:
		return false, false, fmt.Errorf("%s has holes where its experts are: set model.experts to %q", m.path, ExpertsRemote)
	}
	return mode != ExpertsHere, mode == ExpertsSwarm, nil
}

// expertBytes is the size of all experts.
func (m *modelFile) expertBytes() (n int64) {
	all := gguf.Slice{Layers: gguf.Range{End: m.Layers()}, Experts: gguf.Range{End: m.Experts()}}
	tensors, err := m.SliceTensors(all)
	if err != nil {
		return 0 // they are not in this file
	}
	for _, t := range tensors {
		n += t.Bytes
	}
	return n
}

// probe tries the file in a child process, unless this runtime is known to run it.
func (m *modelFile) probe(ctx context.Context, cfg Config, release string, remote bool) error {
	overrides, err := cfg.Model.overrides()
	if err != nil {
		return err
	}
	line := fmt.Sprintf("%s remote=%v gpu=%d %q %s", m.id, remote, cfg.Model.GPULayers, cfg.Model.Place, release)
	err = cfg.tryOut(ctx, line, ggml.ProbeRequest{
		Path: m.path, Backbone: remote, Threads: cfg.Threads, GPULayers: cfg.Model.GPULayers, Overrides: overrides,
	})
	if errors.Is(err, ggml.ErrProbe) {
		return fmt.Errorf("%w: get the file again, or name another one with --model", err)
	}
	return err
}

// tryOut has a child process load something and compute a token, unless a line says
// that this went well before.
func (c *Config) tryOut(ctx context.Context, line string, req ggml.ProbeRequest) error {
	known := filepath.Join(c.Data, "known-good")
	if text, err := os.ReadFile(known); err == nil && containsLine(string(text), line) {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	child := exec.Command(self, "probe")
	child.SysProcAttr = dieWithParent(syscall.SIGKILL) // a load cannot be interrupted otherwise
	if err := ggml.Probe(ctx, child, req); err != nil {
		return err
	}
	f, err := os.OpenFile(known, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("remember the probe: %w", err)
	}
	_, err = f.WriteString(line + "\n")
	return errors.Join(err, f.Close())
}

func containsLine(text, line string) bool {
	for have := range strings.Lines(text) {
		if strings.TrimSuffix(have, "\n") == line {
			return true
		}
	}
	return false
}
