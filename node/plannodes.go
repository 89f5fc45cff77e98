package node

import (
	"cmp"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/node/api"
	"kvasird/ring/plan"
)

// peerProcess is what a worker's process is taken to have beside its experts.
const peerProcess = 256 << 20

func microseconds(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// thisMachine is what this node may give: its budget where that is set, else what
// is free.
func thisMachine(cfg Config) (plan.Node, []string, error) {
	n := plan.Node{Name: hereName, RAM: cfg.Budget.limits.memory, Disk: cfg.Budget.limits.disk, Cores: cfg.Threads,
		Up: float64(cfg.Budget.limits.upload), Down: float64(cfg.Budget.limits.download)}
	var err error
	if n.RAM == 0 {
		if n.RAM, err = availableMemory(); err != nil {
			return n, nil, err
		}
	}
	if n.Disk == 0 {
		dir := cfg.Data
		for _, err := os.Stat(dir); err != nil && dir != filepath.Dir(dir); _, err = os.Stat(dir) {
			dir = filepath.Dir(dir) // the data folder may not be there yet
		}
		if n.Disk, err = freeDisk(dir); err != nil {
			return n, nil, err
		}
	}
	rt, err := ggml.Open(ggml.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return n, []string{"the runtime does not open, so no GPU is counted: " + err.Error()}, nil
	}
	for _, d := range rt.Devices() {
		if onGPU(d) {
			n.VRAM = max(n.VRAM, int64(d.FreeBytes))
		}
	}
	if v := cfg.Budget.limits.vram; v > 0 {
		n.VRAM = min(n.VRAM, v)
	}
	if m, ok := loadMeasured(cfg.Data, rt.Release(), cfg.Threads); ok {
		n.CPU, n.Call = m.Speed, m.Call
		return n, nil, nil
	}
	return n, []string{"this machine was not measured: `kvasir plan --measure` does that"}, nil
}

// servingNodes are the peers that serve experts of a model now.
func servingNodes(g *gguf.Model, cover api.CoverageMap, st *api.Status) []plan.Node {
	var nodes []plan.Node
	for _, h := range cover.Holders {
		if h.Peer == st.PeerID || len(h.Serving) == 0 {
			continue
		}
		bytes := int64(peerProcess)
		for _, s := range h.Serving {
			list, err := g.PlanSlice(gguf.Slice{
				Layers:  gguf.Range{Begin: s.LayerBegin, End: s.LayerEnd},
				Experts: gguf.Range{Begin: s.ExpertBegin, End: s.ExpertEnd},
			})
			if err != nil {
				continue // it announced what the model does not have
			}
			for _, t := range list {
				bytes += t.Bytes
			}
		}
		nodes = append(nodes, plan.Node{Name: h.Peer, RAM: bytes, Disk: bytes, Has: true})
	}
	slices.SortFunc(nodes, func(a, b plan.Node) int { return cmp.Or(cmp.Compare(b.RAM, a.RAM), cmp.Compare(a.Name, b.Name)) })
	return nodes[:min(len(nodes), plan.MaxNodes-1)]
}
