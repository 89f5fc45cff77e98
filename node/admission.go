package node

import (
	"errors"
	"fmt"
	"log/slog"
	"math"

	"kvasird/ring/plan"
)

// admit refuses a model that does not fit the memory that is free, in bytes, before
// anything is allocated: what must be in memory is more. Weights that are mapped from the file
// need not, but it is told when they will be read again and again. Layers on a GPU are
// not looked at: the library refuses those that do not fit.
func (m *modelFile) admit(cfg Config, remote bool, free int64, log *slog.Logger) error {
	if cfg.Model.GPULayers != 0 {
		return nil
	}
	place, _, err := m.place(cfg, remote)
	if errors.Is(err, errNotDescribed) {
		log.Info("what the model takes in memory is not known", "reason", err)
		return nil
	}
	if err != nil {
		return err
	}
	must := place.KV
	if remote {
		place.RAM += cfg.Model.cacheBudget()
		must = place.RAM // it is read, not mapped
	}
	switch {
	case must > free:
		return fmt.Errorf("%s takes %s of memory with a context of %d tokens (%s of cache), and %s are free: give it a smaller --context or --cache, or leave layers to others (`kvasir plan`)",
			m.name, bytesText(must), cfg.Model.Context, bytesText(place.KV), bytesText(free))
	case place.RAM > free:
		log.Warn("the model is larger than the memory that is free, and will be read from disk again and again: `kvasir plan` says how others can hold a part",
			"model", m.name, "bytes", place.RAM, "free", free)
	}
	return nil
}

// errNotDescribed means that a model's header does not say what it takes.
var errNotDescribed = errors.New("the model is not described")

// place is what a model takes on a machine that holds all of it, or all but the
// experts; overhead is what of the memory is neither weights nor caches.
func (m *modelFile) place(cfg Config, remote bool) (p plan.Place, overhead int64, err error) {
	d, err := plan.Describe(m.Model)
	if err != nil {
		return p, 0, fmt.Errorf("%w: %w", errNotDescribed, err)
	}
	if remote {
		for i := range d.Layers {
			d.Layers[i].Expert = 0
		}
	}
	q := plan.Query{Model: d, Context: cfg.Model.Context, Sequences: cfg.Model.Sequences, FullWindows: true}
	p, err = plan.Fit(q, plan.Node{Name: hereName, RAM: math.MaxInt64 / 4, Disk: math.MaxInt64 / 4})
	return p, q.Overhead(), err
}

// takes is the memory of a model that is loaded, without what any process has, and how much of it is
// for the tokens of sequences; 0: not known, as of one that lies on a GPU in part.
func (m *modelFile) takes(cfg Config, remote bool) (all, caches int64) {
	p, overhead, err := m.place(cfg, remote)
	if err != nil || cfg.Model.GPULayers != 0 {
		return 0, 0
	}
	if remote {
		p.RAM += cfg.Model.cacheBudget()
	}
	return max(0, p.RAM-overhead), p.KV
}
