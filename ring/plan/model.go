package plan

import (
	"fmt"
	"strconv"
	"strings"

	"kvasird/ggml/gguf"
)

// Model is what a plan needs to know of a model: its header in numbers. Sizes are
// in bytes.
type Model struct {
	Arch    string
	Layers  []Layer // that compute, in order
	Extra   int     // layers after them, for multi-token prediction, which are not loaded
	Width   int     // of a row between layers
	Vocab   int
	Experts int // in a MoE layer; 0: a model without experts

	Embedding int64 // the table of the first stage, of which a token reads one row
	Head      int64 // what the last stage computes the logits with
	Tied      bool  // Head is the table itself
	Unused    int64 // the extra layers
	Files     int64 // everything, headers too
}

// Layer is one layer of a model.
type Layer struct {
	Dense  int64 // weights but for the routed experts
	Expert int64 // weights of one routed expert; 0: the layer has none
	Used   int   // routed experts of a token
	Fused  bool  // gate and up are one tensor

	KV    int64 // of the cache, for one token
	Slide int   // tokens that its attention looks back on; 0: all
	State int64 // of a recurrent layer, for one sequence of any length

	recurrent bool
}

// Describe reads a model's header; the weights need not be there.
func Describe(m *gguf.Model) (Model, error) {
	if m.Kind() != gguf.Full && m.Kind() != gguf.Partial && m.Kind() != gguf.Backbone {
		return Model{}, fmt.Errorf("a plan needs the header of the whole model, this is a %v", m.Kind())
	}
	r := reader{m: m, prefix: m.Arch() + "."}
	embd, ok := m.Tensor("token_embd.weight")
	extra := r.int("nextn_predict_layers", 0)
	layers := m.Layers() - extra
	if !ok || layers < 1 {
		return Model{}, fmt.Errorf("the model has no token_embd.weight or no layers")
	}
	d := Model{
		Arch: m.Arch(), Experts: m.Experts(), Width: int(embd.Shape[0]), Vocab: int(embd.Shape[1]),
		Layers: make([]Layer, layers), Extra: extra, Embedding: embd.Bytes,
	}
	for _, p := range m.Parts() {
		d.Files += p.Size
	}
	_, own := m.Tensor("output.weight")
	if d.Tied = !own; d.Tied {
		d.Head = d.Embedding
	}
	for _, t := range m.Tensors() {
		d.add(t)
	}
	whole := m.Pooling() != gguf.NoPooling // a model of embeddings runs on one node, experts and all
	if whole {
		d.Experts = 0
	}
	for i := range d.Layers {
		l := &d.Layers[i]
		if whole {
			l.Dense, l.Expert = l.Dense+l.Expert, 0
		}
		if l.Expert > 0 {
			l.Expert /= int64(max(1, d.Experts))
			l.Used = min(r.at("expert_used_count", i, m.ExpertsUsed()), d.Experts)
		}
		r.cache(i, layers, l)
		if err := l.check(i); err != nil {
			r.fail(err)
		}
	}
	if r.err != nil {
		return Model{}, fmt.Errorf("plan: %w", r.err)
	}
	return d, nil
}

// add counts a tensor where it belongs; the experts of a layer are summed.
func (d *Model) add(t gguf.Located) {
	layer, name := -1, ""
	if rest, ok := strings.CutPrefix(t.Name, "blk."); ok {
		number, rest, _ := strings.Cut(rest, ".")
		if n, err := strconv.Atoi(number); err == nil {
			layer, name = n, rest
		}
	}
	if layer >= 0 && layer < len(d.Layers) && isRecurrent(name) {
		d.Layers[layer].recurrent = true
	}
	switch {
	case layer >= len(d.Layers):
		d.Unused += t.Bytes
	case layer >= 0 && !gguf.InBackbone(t.Name):
		d.Layers[layer].Expert += t.Bytes
		d.Layers[layer].Fused = d.Layers[layer].Fused || strings.HasPrefix(name, "ffn_gate_up_exps")
	case layer >= 0:
		d.Layers[layer].Dense += t.Bytes
	case t.Name != "token_embd.weight":
		d.Head += t.Bytes
	}
}

// Bytes are all weights that are loaded, those of the experts among them.
func (d *Model) Bytes() (all, experts int64) {
	all = d.Embedding + d.Head
	if d.Tied {
		all -= d.Embedding
	}
	for i := range d.Layers {
		experts += d.expertBytes(i)
		all += d.Layers[i].Dense
	}
	return all + experts, experts
}

// Active are the bytes of weights that one token reads.
func (d *Model) Active() int64 {
	n := d.Head
	for _, l := range d.Layers {
		n += l.Dense + int64(l.Used)*l.Expert
	}
	return n
}

func (d *Model) expertBytes(layer int) int64 {
	return d.Layers[layer].Expert * int64(d.Experts)
}

// moe counts the MoE layers of a window.
func (d *Model) moe(w gguf.Range) (n int) {
	for _, l := range d.Layers[w.Begin:w.End] {
		if l.Expert > 0 {
			n++
		}
	}
	return n
}
