package gguf

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"kvasird/ggml/tensor"
)

// ErrNotHeld is wrapped when bytes are asked for that this file does not hold.
var ErrNotHeld = errors.New("the bytes are not in this file")

// ErrNoExperts is wrapped when a layer or a whole model has no expert tensors.
var ErrNoExperts = errors.New("no expert tensors")

// ExpertTensor is the part of one stacked tensor that belongs to a range of experts.
type ExpertTensor struct {
	Name  string
	DType tensor.DType
	Shape tensor.Shape // the expert dimension, the outermost, is Rows.Len()
	// Rows says which rows of the whole model's tensor these are. They are the
	// experts asked for, but for the chunk experts of grovemoe (…_chexps), where
	// several experts share a row.
	Rows   Range
	Bytes  int64
	Part   int   // file of the model, see Model.Parts
	Offset int64 // in bytes, from the start of that file

	file io.ReaderAt
}

// ReadInto fills dst, which must have exactly Bytes bytes, with the slabs in order.
func (t ExpertTensor) ReadInto(dst []byte) error {
	if int64(len(dst)) != t.Bytes {
		return fmt.Errorf("gguf: %s: buffer of %d bytes for %d", t.Name, len(dst), t.Bytes)
	}
	if err := readAt(t.file, dst, t.Offset); err != nil {
		return fmt.Errorf("gguf: read %s: %w", t.Name, err)
	}
	return nil
}

// expertName is a tensor name of the form
//
//	blk.L.ffn_(up|gate|down|gate_up)_(ch|)exps.(weight|bias|scale|input_scale)
type expertName struct {
	layer int
	chunk bool // …_chexps: one row for every experts_per_group experts
	field string
}

// expertDims holds the expert dimension of each field. Weights are matrices, biases
// vectors, and scales one number per expert.
var expertDims = map[string]int{"weight": 2, "bias": 1, "scale": 0, "input_scale": 0}

func parseExpertName(name string) (e expertName, ok bool) {
	layer, rest, ok := blockName(name)
	if !ok {
		return e, false
	}
	base, field, _ := strings.Cut(rest, ".")
	base, ok = strings.CutPrefix(base, "ffn_")
	if _, known := expertDims[field]; !ok || !known {
		return e, false
	}
	e = expertName{layer: layer, field: field}
	if base, ok = strings.CutSuffix(base, "_exps"); !ok {
		base, ok = strings.CutSuffix(base, "_chexps")
		e.chunk = true
	}
	switch base {
	case "up", "gate", "down", "gate_up":
		return e, ok
	}
	return e, false
}

// isHoled reports whether a backbone leaves this tensor out. The scales stay, since
// they are small, and so do chunk experts, which the backbone computes itself: their
// ids are not the router's.
func (e expertName) isHoled() bool {
	return !e.chunk && (e.field == "weight" || e.field == "bias")
}

// InBackbone reports whether a backbone holds the tensor of that name; the others are
// the weights and biases of experts.
func InBackbone(tensorName string) bool {
	e, ok := parseExpertName(tensorName)
	return !ok || !e.isHoled()
}

// blockName splits "blk.L.rest"; L is decimal without leading zeros.
func blockName(name string) (layer int, rest string, ok bool) {
	s, ok := strings.CutPrefix(name, "blk.")
	if !ok {
		return 0, "", false
	}
	num, rest, _ := strings.Cut(s, ".")
	layer, err := strconv.Atoi(num)
	if err != nil || layer < 0 || layer > maxIndex || strconv.Itoa(layer) != num {
		return 0, "", false
	}
	return layer, rest, true
}

// expertRef is an expert tensor of an opened model.
type expertRef struct {
	expertName
	Located
	rows Range // held, in the numbering of the whole model
}

// indexExperts finds the expert tensors and checks their expert dimension.
func (m *Model) indexExperts() error {
	for _, t := range m.tensors {
		name, ok := parseExpertName(t.Name)
		if !ok {
			continue
		}
		ref := expertRef{name, t, Range{}}
		held := Range{0, m.experts}
		if m.kind == ExpertSlice {
			held = m.slice.Experts
		}
		ref.rows = m.rows(name, held)
		if err := m.checkExpert(ref); err != nil {
			return err
		}
		m.expertRefs[name.layer] = append(m.expertRefs[name.layer], ref)
	}
	return nil
}

func (m *Model) checkExpert(ref expertRef) error {
	dim := expertDims[ref.field]
	switch {
	case ref.layer >= m.layers:
		return fmt.Errorf("gguf: %s: the model has %d layers", ref.Name, m.layers)
	case m.experts == 0:
		return fmt.Errorf("gguf: %s: metadata has no %s.expert_count", ref.Name, m.arch)
	case ref.chunk && (m.perGroup < 1 || m.experts%m.perGroup != 0):
		return fmt.Errorf("gguf: %s: %d experts in groups of %d (%s.experts_per_group)", ref.Name, m.experts, m.perGroup, m.arch)
	case m.kind == ExpertSlice && !m.slice.Layers.Contains(ref.layer):
		return fmt.Errorf("gguf: %s is outside of the slice's layers %v", ref.Name, m.slice.Layers)
	case ref.Shape[dim] != int64(ref.rows.Len()):
		return fmt.Errorf("gguf: %s has shape %v: dimension %d is %d, want %d experts", ref.Name, ref.Shape, dim, ref.Shape[dim], ref.rows.Len())
	case dim == 0 && ref.DType.BlockSize() != 1:
		return fmt.Errorf("gguf: %s: a scale per expert of type %v", ref.Name, ref.DType)
	}
	for i := dim + 1; i < tensor.MaxDims; i++ {
		if ref.Shape[i] != 1 {
			return fmt.Errorf("gguf: %s has shape %v: experts must be the outermost dimension", ref.Name, ref.Shape)
		}
	}
	return nil
}

// rows returns the rows of a tensor that the experts of a range use. llama.cpp maps
// expert ids to chunk ids with a float32 multiplication and truncation, so this does
// too: for some group sizes the result differs from an integer division.
func (m *Model) rows(name expertName, experts Range) Range {
	if !name.chunk || m.perGroup < 1 || experts.Len() == 0 {
		return experts
	}
	scale := 1 / float32(m.perGroup)
	row := func(id int) int { return int(float32(id) * scale) }
	return Range{row(experts.Begin), row(experts.End-1) + 1}
}

// ExpertLayers returns the layers that have expert tensors in this file, ascending.
func (m *Model) ExpertLayers() []int {
	var layers []int
	for i, refs := range m.expertRefs {
		if len(refs) > 0 {
			layers = append(layers, i)
		}
	}
	return layers
}

// ExpertTensors returns what the experts of a range have in each expert tensor of a
// layer, in file order. It refuses ranges that this file does not hold in full
// (ErrNotHeld) and layers without experts (ErrNoExperts).
func (m *Model) ExpertTensors(layer int, experts Range) ([]ExpertTensor, error) {
	if layer < 0 || layer >= m.layers || !experts.within(m.experts) {
		return nil, fmt.Errorf("gguf: layer %d, experts %v: the model has %d layers and %d experts", layer, experts, m.layers, m.experts)
	}
	if m.kind == ExpertSlice && (!m.slice.Layers.Contains(layer) || !m.slice.Experts.Covers(experts)) {
		return nil, fmt.Errorf("gguf: layer %d, experts %v: %w, which is the slice %v", layer, experts, ErrNotHeld, m.slice)
	}
	for _, hole := range m.holes {
		if x := hole.Experts.Intersect(experts); hole.Layers.Contains(layer) && x.Len() > 0 {
			return nil, fmt.Errorf("gguf: layer %d, experts %v: %w: %v are a hole of the backbone", layer, experts, ErrNotHeld, x)
		}
	}
	list, err := m.layerTensors(layer, experts)
	if err != nil {
		return nil, err
	}
	for _, t := range list {
		if !m.parts[t.Part].holds(t.Offset, t.Bytes) {
			return nil, fmt.Errorf("gguf: layer %d, experts %v: %w: %s is still to be fetched", layer, experts, ErrNotHeld, t.Name)
		}
	}
	return list, nil
}

// layerTensors is ExpertTensors without the check that they are held.
func (m *Model) layerTensors(layer int, experts Range) ([]ExpertTensor, error) {
	if len(m.expertRefs[layer]) == 0 {
		return nil, fmt.Errorf("gguf: layer %d: %w", layer, ErrNoExperts)
	}
	list := make([]ExpertTensor, 0, len(m.expertRefs[layer]))
	for _, ref := range m.expertRefs[layer] {
		list = append(list, m.cutExpert(ref, m.rows(ref.expertName, experts)))
	}
	return list, nil
}

// cutExpert returns the given rows of an expert tensor; ref.rows.Covers(rows).
func (m *Model) cutExpert(ref expertRef, rows Range) ExpertTensor {
	slab := ref.Bytes / int64(ref.rows.Len())
	t := ExpertTensor{
		Name: ref.Name, DType: ref.DType, Shape: ref.Shape, Rows: rows,
		Bytes: slab * int64(rows.Len()), Part: ref.Part,
		Offset: ref.Offset + slab*int64(rows.Begin-ref.rows.Begin),
		file:   m.parts[ref.Part].file,
	}
	t.Shape[expertDims[ref.field]] = int64(rows.Len())
	return t
}

// SliceTensors returns the expert tensors of every layer of a slice that has any, in
// layer order: the byte ranges that make up the slice. It refuses what ExpertTensors
// refuses, but that layers without experts are left out.
func (m *Model) SliceTensors(s Slice) ([]ExpertTensor, error) {
	return m.sliceTensors(s, m.ExpertTensors)
}

// PlanSlice returns what SliceTensors returns, of a Full or Partial model whether its
// bytes are held or not: the byte ranges to fetch.
func (m *Model) PlanSlice(s Slice) ([]ExpertTensor, error) {
	if m.kind != Full && m.kind != Partial {
		return nil, fmt.Errorf("gguf: %s is a %v: what to fetch is planned with the whole model", m.parts[0].Path, m.kind)
	}
	return m.sliceTensors(s, m.layerTensors)
}

func (m *Model) sliceTensors(s Slice, ofLayer func(int, Range) ([]ExpertTensor, error)) ([]ExpertTensor, error) {
	if !s.Layers.within(m.layers) || !s.Experts.within(m.experts) {
		return nil, fmt.Errorf("gguf: slice %v: the model has %d layers and %d experts", s, m.layers, m.experts)
	}
	if m.kind == ExpertSlice && !m.slice.Layers.Covers(s.Layers) {
		return nil, fmt.Errorf("gguf: slice %v: %w, which is the slice %v", s, ErrNotHeld, m.slice)
	}
	var list []ExpertTensor
	for layer := s.Layers.Begin; layer < s.Layers.End; layer++ {
		tensors, err := ofLayer(layer, s.Experts)
		if errors.Is(err, ErrNoExperts) {
			continue // a dense layer
		}
		if err != nil {
			return nil, err
		}
		list = append(list, tensors...)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("gguf: slice %v: %w", s, ErrNoExperts)
	}
	return list, nil
}
