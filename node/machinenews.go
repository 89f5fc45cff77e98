package node

import (
	"kvasird/ggml/gguf"
	"kvasird/market"
)

// nearTold is how many neighbours a node tells that is no stage: enough to plan with.
const nearTold = 4

// tellsMachine adds to announcements what this node gives, in so far as nothing uses it
// yet, and what it computes with.
func (n *Node) tellsMachine() func(*market.Announcement) {
	vram := n.freeVRAM()
	return func(a *market.Announcement) {
		l := n.cfg.Budget.limits
		used := uint64(0)
		for i := range a.Models {
			m := &a.Models[i]
			counted, beside := n.loaded(m.ID)
			m.Memory = told(counted + beside)
			used += uint64(counted)
		}
		m := &market.Machine{VRAM: told(vram), Cores: n.cfg.Threads, Up: told(l.upload), Down: told(l.download)}
		a.Capacity.FreeMemory = told(l.memory)
		if onGPU(n.device) {
			m.VRAM = minus(m.VRAM, used)
		} else {
			a.Capacity.FreeMemory = minus(a.Capacity.FreeMemory, used)
		}
		stored, reserved := n.store.Used()
		a.Capacity.FreeDisk = minus(told(l.disk), uint64(stored+reserved))
		if free, err := freeDisk(n.cfg.Data); err == nil {
			a.Capacity.FreeDisk = min(a.Capacity.FreeDisk, uint64(free))
		}
		if s, ok := loadMeasured(n.cfg.Data, n.rt.Release(), n.cfg.Threads); ok {
			m.Bytes, m.Batch, m.Layer, m.Call = told(int64(s.Speed.Bytes)), told(int64(s.Speed.Batch)), s.Speed.Layer, s.Call
		}
		a.Machine = m
		near := nearTold
		if n.exchange.stager != nil {
			near = market.MaxNear
		}
		a.Near = n.neighbours(near)
	}
}

// told is a size or a rate within what can be told.
func told(n int64) uint64 { return uint64(max(0, min(n, market.MaxHint))) }

func minus(a, b uint64) uint64 { return a - min(a, b) }

// freeVRAM is what this node gives of the memory of its GPU, before it loads anything.
func (n *Node) freeVRAM() (free int64) {
	if onGPU(n.device) {
		return n.cfg.Budget.limits.vram
	}
	for _, d := range n.rt.Devices() {
		if onGPU(d) {
			free = max(free, int64(d.FreeBytes))
		}
	}
	return free
}

// loaded is the memory that a model is loaded in here: as it counts against the budget,
// and beside it.
func (n *Node) loaded(id gguf.ModelID) (counted, beside int64) {
	for _, w := range n.workers.list() {
		if w.id == id {
			counted += w.kernel.Bytes()
		}
	}
	counted += n.exchange.stager.loaded(id)
	if b := n.backbone.Load(); b != nil && b.file.id == id {
		beside = b.takes + b.second.Load()
	}
	return counted, beside
}
