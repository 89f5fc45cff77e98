package node

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvasird/ggml"
	"kvasird/ggml/gguf"
	"kvasird/market"
	"kvasird/ring/plan"
)

// hereName is this machine in a plan.
const hereName = "this machine"

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

// planPeer is a node of a network in a plan, as it tells of itself. Sizes are in bytes,
// and are what it gives to the model: what is free, and what the model has there.
type planPeer struct {
	Name     string  `json:"name"`
	Peer     string  `json:"peer"` // id
	Memory   int64   `json:"memory"`
	VRAM     int64   `json:"vram,omitempty"`
	Disk     int64   `json:"disk"`                       // beside what it has
	Speed    float64 `json:"speed,omitempty"`            // bytes of weights per second of its CPU; 0: guessed
	RTTMicro int64   `json:"rtt_microseconds,omitempty"` // to this machine
	Has      string  `json:"has,omitempty"`              // of the model
	LeftOut  string  `json:"left_out,omitempty"`         // why it is not planned with
}

// planSubject is what announcements are read for.
type planSubject struct {
	id       gguf.ModelID // zero: not known, so that nobody is known to have it
	shape    market.Shape
	layers   int   // that compute
	experts  int   // in a layer
	overhead int64 // see plan.Query.Overhead
}

// planNodes turns what nodes tell of themselves into nodes of a plan, self first, and
// says of each what it gives or why it is left out. A node whose News is nil has told
// nothing.
func (about planSubject) planNodes(self string, authors []market.Author) (nodes []plan.Node, peers []planPeer) {
	authors = slices.Clone(authors)
	slices.SortStableFunc(authors, func(a, b market.Author) int {
		return cmp.Or(-cmp.Compare(intOf(a.Peer == self), intOf(b.Peer == self)), -cmp.Compare(gives(a.News), gives(b.News)))
	})
	seen := map[string]bool{hereName: true}
	for _, a := range authors {
		p := planPeer{Name: hereName, Peer: a.Peer}
		if a.Peer != self {
			if p.Name = shortPeer(a.Peer); seen[p.Name] {
				p.Name = a.Peer
			}
			seen[p.Name] = true
		}
		switch {
		case a.News == nil:
			p.LeftOut = "it has announced nothing yet"
		case a.News.Machine == nil:
			p.LeftOut = "it says nothing of its memory: its kvasird is older than this one"
		default:
			n := about.planNode(p.Name, a.News)
			p.Memory, p.VRAM, p.Disk, p.Speed, p.Has = n.RAM-about.overhead, n.VRAM, n.Disk, n.CPU.Bytes, about.has(n)
			switch {
			case p.Memory == 0 && p.VRAM == 0:
				p.LeftOut = "it gives no memory that is free"
			case len(nodes) == plan.MaxNodes:
				p.LeftOut = fmt.Sprintf("a plan takes at most %d nodes, and others give more", plan.MaxNodes)
			default:
				nodes = append(nodes, n)
			}
		}
		peers = append(peers, p)
	}
	return nodes, peers
}

// gives orders nodes by what they give.
func gives(a *market.Announcement) uint64 {
	if a == nil || a.Machine == nil {
		return 0
	}
	return a.Capacity.FreeMemory + a.Machine.VRAM
}

// planNode is a node that told of its machine.
func (about planSubject) planNode(name string, a *market.Announcement) plan.Node {
	m := a.Machine
	n := plan.Node{
		Name: name, RAM: about.overhead + int64(a.Capacity.FreeMemory), VRAM: int64(m.VRAM), Disk: int64(a.Capacity.FreeDisk),
		Cores: m.Cores, CPU: plan.Speed{Bytes: float64(m.Bytes), Batch: float64(m.Batch), Layer: m.Layer},
		Up: float64(m.Up), Down: float64(m.Down), Call: m.Call,
	}
	for i := range a.Models {
		news := &a.Models[i]
		if about.id == (gguf.ModelID{}) || news.ID != about.id || !news.Shape.Equal(about.shape) {
			continue
		}
		n.Has, n.Held = news.Full, about.pieces(news)
		if n.VRAM > 0 {
			n.VRAM += int64(news.Memory)
		} else {
			n.RAM += int64(news.Memory)
		}
	}
	return n
}

// pieces are what a node has of the model, when it does not have all of it.
func (about planSubject) pieces(news *market.ModelNews) (list []plan.Piece) {
	here := func(s market.State) bool { return s == market.Serving || s == market.Leaving }
	clip := func(r gguf.Range) gguf.Range { return r.Intersect(gguf.Range{End: about.layers}) }
	if news.Backbone {
		list = append(list, plan.Piece{Layers: gguf.Range{End: about.layers}, Dense: true})
	}
	for _, w := range news.Windows {
		if !here(w.State) {
			continue
		}
		p := plan.Piece{Layers: clip(w.Layers), Dense: true}
		if !news.Dense {
			p.Experts.End = about.experts
		}
		list = append(list, p)
	}
	for _, h := range news.Holdings {
		if here(h.State) {
			list = append(list, plan.Piece{Layers: clip(h.Slice.Layers), Experts: h.Slice.Experts})
		}
	}
	return slices.DeleteFunc(list, func(p plan.Piece) bool { return p.Layers.Len() == 0 })
}

// has says what a node has of the model.
func (about planSubject) has(n plan.Node) string {
	if n.Has {
		return "all"
	}
	const most = 4
	var texts []string
	for _, p := range n.Held {
		text := fmt.Sprintf("layers %v", p.Layers)
		switch {
		case !p.Dense:
			text = fmt.Sprintf("experts %v of layers %v", p.Experts, p.Layers)
		case p.Experts.Len() < about.experts:
			text = fmt.Sprintf("dense part of layers %v", p.Layers)
		}
		texts = append(texts, text)
	}
	if more := len(texts) - most; more > 0 {
		texts = append(texts[:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

// shortPeer is the end of a peer id, which is where ids differ, as `kvasir status`
// shows it.
func shortPeer(id string) string { return "…" + id[max(0, len(id)-8):] }
