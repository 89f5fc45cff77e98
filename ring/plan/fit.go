package plan

import (
	"fmt"

	"kvasird/ggml/gguf"
)

// What a process takes beside weights and caches.
const (
	processBytes = 100 << 20 // a node without a model
	deviceBytes  = 512 << 20 // a GPU's driver and its buffers
	deviceFree   = 1 << 30   // of a GPU's memory that stays free, as llama.cpp leaves it
	batchTokens  = 512       // of one step, for which compute buffers are made
	rowsAlive    = 16        // rows of activations that exist at a time, for each token
)

// Role is what a node does in a plan.
type Role string

// The roles.
const (
	Whole    Role = "whole"    // runs all of the model
	Stage    Role = "stage"    // of a ring, with its experts
	Backbone Role = "backbone" // all or a window of the model but for the experts
	Worker   Role = "worker"   // computes experts
)

// Place is what one node holds. Sizes are in bytes.
type Place struct {
	Node    string     `json:"node"`
	Role    Role       `json:"role"`
	Layers  gguf.Range `json:"layers"`           // whose dense part it runs; of a worker: those whose experts it has
	Experts gguf.Range `json:"experts,omitzero"` // in each MoE layer of them; empty: none

	// GPULayers is how many of the layers, counted from the last, lie on the GPU,
	// with the output head when it is all of them. Rules keep experts of theirs in
	// RAM, as llama.cpp's --override-tensor takes them; of such a node only.
	GPULayers int      `json:"gpu_layers,omitempty"`
	Rules     []string `json:"rules,omitempty"`

	RAM      int64 `json:"ram"` // all that it takes, the KV cache among it
	VRAM     int64 `json:"vram,omitempty"`
	KV       int64 `json:"kv"` // cache and recurrent state at the context asked for
	Disk     int64 `json:"disk"`
	Download int64 `json:"download"`
}

// NoRoomError says what does not fit.
type NoRoomError struct {
	Node    string // "": all of them together
	What    string
	Missing int64 // bytes
}

func (e *NoRoomError) Error() string {
	where := "on " + e.Node
	if e.Node == "" {
		where = "on all nodes together"
	}
	return fmt.Sprintf("%s missing for %s %s", size(e.Missing), e.What, where)
}

func size(n int64) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// load is what a node is to hold.
type load struct {
	role    Role
	window  gguf.Range
	experts bool
}

func (q *Query) first(l load) bool { return l.window.Begin == 0 }
func (q *Query) last(l load) bool  { return l.window.End == len(q.Model.Layers) }

// kv is what a layer remembers of the context.
func (q *Query) kv(l Layer) int64 {
	cells := q.Context
	if l.Slide > 0 && !q.FullWindows {
		cells = min(cells, q.Sequences*(l.Slide+batchTokens))
	}
	return int64(cells)*l.KV + int64(q.Sequences)*l.State
}

// scratch are the compute buffers of a step: activations and, on the last stage,
// logits.
func (q *Query) scratch(last bool) int64 {
	n := rowsAlive * q.Model.Width
	if last {
		n += q.Model.Vocab
	}
	return int64(n) * batchTokens * 4
}

// Overhead is what a node takes of memory at most beside weights and caches, which a
// daemon does not count against what it gives.
func (q *Query) Overhead() int64 { return processBytes + q.scratch(true) }

// fitted is a load on a node: where each part of it lies.
type fitted struct {
	Place
	node   Node
	load   load
	gpu    int // layers from here on lie on the GPU, the head too when that is all
	spread int // experts of layers from here on lie in RAM, whatever gpu says
}

// headOnGPU says where the output head is.
func (f *fitted) headOnGPU() bool { return f.gpu == f.load.window.Begin }

// Fit places all of a model on one node: a check before anything is loaded. The
// error is a *NoRoomError when it does not fit.
func Fit(q Query, node Node) (Place, error) {
	if err := q.check(); err != nil {
		return Place{}, err
	}
	f, err := q.fit(node.guess().index(&q.Model), q.everything())
	if err != nil {
		return Place{}, err
	}
	return f.Place, nil
}

// fit places a load with as many layers on the GPU as have room for their dense
// part, then as many of their experts.
func (q *Query) fit(node Node, l load) (*fitted, error) {
	disk := q.disk(l)
	if room := node.Disk + q.held(node, q.everything()); disk > room && !node.Has {
		return nil, &NoRoomError{node.Name, "weights on disk", disk - room}
	}
	w := l.window
	for gpu := w.Begin; gpu <= w.End; gpu++ {
		if gpu < w.End && node.device() == 0 {
			continue
		}
		f := q.lay(node, l, gpu)
		if f.VRAM > node.device() {
			continue
		}
		if f.RAM > node.RAM {
			return nil, &NoRoomError{node.Name, q.what(l), f.RAM - node.RAM}
		}
		f.Disk, f.Download = disk, disk-q.held(node, l)
		if node.Has {
			f.Download = 0
		}
		f.Rules = q.rules(f)
		return f, nil
	}
	panic("plan: a load without a GPU part takes no VRAM")
}

func (q *Query) what(l load) string {
	switch l.role {
	case Whole:
		return fmt.Sprintf("the whole model with %d tokens of context", q.Context)
	case Backbone:
		return fmt.Sprintf("the dense part of layers %v with %d tokens of context", l.window, q.Context)
	}
	return fmt.Sprintf("layers %v with %d tokens of context", l.window, q.Context)
}

// lay sums up what a load takes when the dense part of the layers from gpu on is
// on the GPU.
func (q *Query) lay(node Node, l load, gpu int) *fitted {
	f := &fitted{node: node, load: l, gpu: gpu, spread: l.window.End,
		Place: Place{Node: node.Name, Role: l.role, Layers: l.window, GPULayers: l.window.End - gpu, RAM: processBytes}}
	if l.experts {
		f.Experts = gguf.Range{End: q.Model.Experts}
	}
	if gpu < l.window.End {
		f.VRAM = deviceBytes + q.scratch(q.last(l))
	} else {
		f.RAM += q.scratch(q.last(l))
	}
	if q.first(l) {
		f.RAM += q.Model.Embedding // a table to look up rows in: llama.cpp keeps it in RAM
	}
	if q.last(l) {
		switch {
		case f.headOnGPU() && gpu < l.window.End:
			f.VRAM += q.Model.Head
		case q.Model.Tied && q.first(l):
			f.RAM += q.Model.Head - q.Model.Embedding
		default:
			f.RAM += q.Model.Head
		}
	}
	for i := l.window.Begin; i < l.window.End; i++ {
		layer := q.Model.Layers[i]
		f.KV += q.kv(layer)
		if i < gpu {
			f.RAM += layer.Dense + q.kv(layer)
		} else {
			f.VRAM += layer.Dense + q.kv(layer)
		}
	}
	if l.experts {
		q.layExperts(f)
	}
	return f
}

// layExperts fills what is left of the GPU's memory with the experts of its layers,
// from the first on; the rest is in RAM.
func (q *Query) layExperts(f *fitted) {
	full := false
	for i := f.load.window.Begin; i < f.load.window.End; i++ {
		n := q.Model.expertBytes(i)
		if i >= f.gpu && !full && f.VRAM+n > f.node.device() {
			full, f.spread = true, i
		}
		if i < f.gpu || full {
			f.RAM += n
		} else {
			f.VRAM += n
		}
	}
}

// rules are the overrides that keep experts of GPU layers in RAM. Layers are
// numbered as in the file that is loaded, which a stage's begins at 0.
func (q *Query) rules(f *fitted) []string {
	var rules []string
	for i := max(f.spread, f.gpu); i < f.load.window.End; i++ {
		if f.load.experts && q.Model.Layers[i].Expert > 0 {
			rules = append(rules, Rule(i-f.load.window.Begin, q.Model.Layers[i].Fused))
		}
	}
	return rules
}

// everything is the load of a whole model.
func (q *Query) everything() load { return load{Whole, q.all(), true} }

// held is what of a load a node has on disk already.
func (q *Query) held(node Node, l load) (n int64) {
	if len(node.layers) == 0 {
		return 0
	}
	for i := l.window.Begin; i < l.window.End; i++ {
		if node.layers[i].dense {
			n += q.Model.Layers[i].Dense
		}
		if l.experts {
			n += q.Model.Layers[i].Expert * int64(node.layers[i].experts)
		}
	}
	if q.first(l) && node.layers[0].dense {
		n += q.Model.Embedding
	}
	if q.last(l) && node.layers[l.window.End-1].dense {
		if n += q.Model.Unused; !(q.first(l) && q.Model.Tied && node.layers[0].dense) {
			n += q.Model.Head
		}
	}
	return n
}

// disk is what of the model's files a load needs.
func (q *Query) disk(l load) int64 {
	if l.role == Whole {
		return q.Model.Files
	}
	var n int64
	for i := l.window.Begin; i < l.window.End; i++ {
		n += q.Model.Layers[i].Dense
		if l.experts {
			n += q.Model.expertBytes(i)
		}
	}
	if q.first(l) {
		n += q.Model.Embedding
	}
	if q.last(l) && !(q.first(l) && q.Model.Tied) {
		n += q.Model.Head
	}
	if q.last(l) {
		n += q.Model.Unused
	}
	return n
}
