package gguf

import (
	"fmt"
	"slices"
	"strings"
)

// WorkPart is one thing that computes of a model: the embedding, the dense part or the
// experts of a layer, the head.
type WorkPart struct {
	Params   uint64 // parameters that a token uses
	PerToken int    // the experts that a token uses; else 1
}

// EmbeddingPart is the place of the embedding in the list that WorkParts returns.
const EmbeddingPart = 0

// DensePart is the place of what all tokens use of a layer.
func DensePart(layer int) int { return 1 + 2*layer }

// ExpertPart is the place of a layer's experts.
func ExpertPart(layer int) int { return 2 + 2*layer }

// HeadPart is the place of the head of a model with so many layers.
func HeadPart(layers int) int { return 1 + 2*layers }

// WorkParts lists the parts of a model in the order in which they compute, from its
// headers: 2·Layers+2 of them, whatever a layer lacks. A layer without experts has an
// expert part of 0 parameters and 1 per token; layers for multi-token prediction, which
// llama.cpp does not run, and the head of a model for embeddings have none either.
//
// A token uses one row of an embedding, all of a dense tensor, and of the experts as many
// as the metadata say. Chunk experts (…_chexps), the shared expert and the router are
// dense: the backbone computes them. A head that is the token embedding weighs all of it.
func (m *Model) WorkParts() ([]WorkPart, error) {
	if m.kind == ExpertSlice || m.kind == Stage {
		return nil, fmt.Errorf("gguf: %s is a %v: the parts of a model are listed from all of its header", m.parts[0].Path, m.kind)
	}
	main, err := m.mainLayers()
	if err != nil {
		return nil, err
	}
	parts := make([]WorkPart, HeadPart(m.layers)+1)
	for i := range parts {
		parts[i].PerToken = 1
	}
	head := false
	for _, t := range m.tensors {
		n, err := elements(t)
		if err != nil {
			return nil, err
		}
		layer, _, isLayer := blockName(t.Name)
		switch {
		case isLayer && layer >= main:
		case isLayer:
			m.addLayerPart(parts, layer, t, n)
		case isHead(t.Name):
			parts[HeadPart(m.layers)].Params += n
			head = head || t.Name == "output.weight"
		case strings.HasSuffix(t.Name, "token_embd.weight"):
			parts[EmbeddingPart].Params += n / uint64(max(t.Shape[1], 1))
		default:
			parts[EmbeddingPart].Params += n
		}
	}
	embd, ok := m.Tensor("token_embd.weight")
	switch {
	case m.Pooling() != NoPooling:
		parts[HeadPart(m.layers)].Params = 0
	case !head && ok:
		tied, err := elements(embd)
		if err != nil {
			return nil, err
		}
		parts[HeadPart(m.layers)].Params += tied
	}
	return parts, nil
}

// elements is the number of a tensor's elements, small enough that those of all tensors of a
// model can be added.
func elements(t Located) (uint64, error) {
	n, err := t.Shape.Elements()
	if err == nil && n > maxParams {
		err = fmt.Errorf("%d elements, at most %d", n, int64(maxParams))
	}
	if err != nil {
		return 0, fmt.Errorf("gguf: %s: %w", t.Name, err)
	}
	return uint64(n), nil
}

// maxParams bounds the elements of one tensor.
const maxParams = 1 << 44

// isHead reports whether a tensor outside of layers is used after them.
func isHead(name string) bool {
	return slices.ContainsFunc([]string{"output", "cls", "dec.output"}, func(p string) bool {
		return name == p || strings.HasPrefix(name, p+".") || strings.HasPrefix(name, p+"_")
	})
}

// addLayerPart adds a tensor of a layer to the layer's parts.
func (m *Model) addLayerPart(parts []WorkPart, layer int, t Located, params uint64) {
	e, ok := parseExpertName(t.Name)
	if !ok {
		parts[DensePart(layer)].Params += params
		return
	}
	used := m.usedIn(layer)
	rows := uint64(t.Shape[expertDims[e.field]])
	params = params / max(rows, 1) * min(uint64(used), rows)
	if e.chunk {
		parts[DensePart(layer)].Params += params
		return
	}
	parts[ExpertPart(layer)].PerToken = used
	parts[ExpertPart(layer)].Params += params
}

// usedIn is the experts that a token uses in a layer, at least one.
func (m *Model) usedIn(layer int) int {
	used := m.used
	if list, err := m.Meta().Ints(m.arch + ".expert_used_count"); err == nil && layer < len(list) {
		used = int(min(max(list[layer], 0), maxIndex))
	}
	return max(used, 1)
}
