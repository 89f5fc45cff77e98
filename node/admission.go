package node

import (
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
	d, err := plan.Describe(m.Model)
	if err != nil {
		log.Info("what the model takes in memory is not known", "reason", err)
		return nil
	}
	if remote {
		for i := range d.Layers {
			d.Layers[i].Expert = 0
		}
	}
	place, err := plan.Fit(plan.Query{
		Model: d, Context: cfg.Model.Context, Sequences: cfg.Model.Sequences, FullWindows: true,
	}, plan.Node{Name: "this machine", RAM: math.MaxInt64 / 4, Disk: math.MaxInt64 / 4})
	if err != nil {
		return err
	}
	must := place.KV
	if remote {
		must = place.RAM // it is read, not mapped
	}
	switch {
	case must > free:
		return fmt.Errorf("%s takes %s of memory with a context of %d tokens (%s of cache), and %s are free: give it a smaller --context, or leave layers to others (`kvasir plan`)",
			m.name, bytesText(must), cfg.Model.Context, bytesText(place.KV), bytesText(free))
	case place.RAM > free:
		log.Warn("the model is larger than the memory that is free, and will be read from disk again and again: `kvasir plan` says how others can hold a part",
			"model", m.name, "bytes", place.RAM, "free", free)
	}
	return nil
}
