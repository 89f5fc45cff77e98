//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "kernel.h"
*/
import "C"

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"unsafe"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// maxChunkBytes bounds the activations of one graph; larger calls run in pieces.
const maxChunkBytes = 256 << 20

// maxLayerPrograms bounds the programs of one layer that are set at a time. A
// model has one; who sets those of others keeps each of them far below this.
const maxLayerPrograms = 64

// Kernel computes expert programs over the layers that were loaded into it.
type Kernel struct {
	c        *C.struct_kv_kernel
	cfg      KernelConfig
	log      *slog.Logger
	release  func() bool
	banks    map[int]*bank   // by layer
	programs []kernelProgram // by number; a number without a bank is free
	local    []int32         // scratch: ids within the bank
}

// bank is a layer's experts, stacked in the order of the ranges.
type bank struct {
	c       *C.struct_kv_bank
	layer   int
	ranges  []gguf.Range
	index   []int32 // expert id → row of the bank, -1 = not held
	stacked int     // rows of the bank
	weight  map[string]int
	shapes  map[string]WeightShape
}

type kernelProgram struct {
	bank     *bank
	encoded  string
	c        *C.struct_kv_program
	rowWidth int
	outWidth int
	maxPairs int // per graph
}

// NewKernel starts a kernel without experts.
func (rt *Runtime) NewKernel(cfg KernelConfig) (*Kernel, error) {
	dev, err := rt.Device(cfg.Device)
	if err != nil {
		return nil, err
	}
	cfg.Threads = max(cfg.Threads, 1)
	k := &Kernel{cfg: cfg, log: rt.log, banks: map[int]*bank{}}
	if k.c = C.kv_kernel_new(C.size_t(dev.Index), C.int(cfg.Threads)); k.c == nil {
		return nil, fmt.Errorf("device %s cannot be used", dev.Name)
	}
	k.release = track(k, "kernel on "+dev.Name, rt.log)
	return k, nil
}

// Close frees the kernel and its experts. It may be called again.
func (k *Kernel) Close() error {
	if !k.release() {
		return nil
	}
	for _, p := range k.programs {
		C.kv_program_free(p.c)
	}
	for _, b := range k.banks {
		C.kv_bank_free(b.c)
	}
	C.kv_kernel_free(k.c)
	return nil
}

// Load reads the experts of some ranges of a layer from an opened model, slice
// or backbone file. A layer is loaded once.
func (k *Kernel) Load(m *gguf.Model, layer int, ranges ...gguf.Range) error {
	if k.banks[layer] != nil {
		return fmt.Errorf("layer %d is loaded already", layer)
	}
	b := &bank{layer: layer, ranges: ranges, index: make([]int32, m.Experts()), weight: map[string]int{}, shapes: map[string]WeightShape{}}
	for i := range b.index {
		b.index[i] = -1
	}
	parts, err := b.plan(m)
	if err != nil {
		return err
	}
	if err := k.alloc(b, parts, max(m.ExpertsUsed(), 1)); err != nil {
		return err
	}
	if err := b.read(parts); err != nil {
		C.kv_bank_free(b.c)
		return err
	}
	k.banks[layer] = b
	return nil
}

// LoadSlices reads every MoE layer of some slices, which may overlap.
func (k *Kernel) LoadSlices(m *gguf.Model, slices ...gguf.Slice) error {
	for _, layer := range m.ExpertLayers() {
		var ranges []gguf.Range
		for _, s := range slices {
			if s.Layers.Contains(layer) {
				ranges = append(ranges, s.Experts)
			}
		}
		if ranges = mergeRanges(ranges); len(ranges) == 0 {
			continue
		}
		if err := k.Load(m, layer, ranges...); err != nil {
			return err
		}
	}
	if len(k.banks) == 0 {
		return fmt.Errorf("%w: no MoE layer is in the slices %v", ErrNotLoaded, slices)
	}
	return nil
}

// mergeRanges gives the same indices in ascending ranges that do not touch.
func mergeRanges(ranges []gguf.Range) []gguf.Range {
	slices.SortFunc(ranges, func(a, b gguf.Range) int { return a.Begin - b.Begin })
	var out []gguf.Range
	for _, r := range ranges {
		if n := len(out); n > 0 && r.Begin <= out[n-1].End {
			out[n-1].End = max(out[n-1].End, r.End)
			continue
		}
		out = append(out, r)
	}
	return out
}

// plan lists the tensors of the bank: parts[i][r] is the part of tensor i that
// belongs to range r.
func (b *bank) plan(m *gguf.Model) ([][]gguf.ExpertTensor, error) {
	var parts [][]gguf.ExpertTensor
	next := int32(0)
	for _, r := range b.ranges {
		tensors, err := m.ExpertTensors(b.layer, r)
		if err != nil {
			return nil, err
		}
		for e := r.Begin; e < r.End; e++ {
			if b.index[e] >= 0 {
				return nil, fmt.Errorf("layer %d: expert %d is in two ranges", b.layer, e)
			}
			b.index[e] = next
			next++
		}
		for _, t := range tensors {
			name, ok := bankWeight(t.Name, b.layer)
			if !ok {
				continue
			}
			if strings.HasSuffix(name, ".weight") && !multiplies(t.DType) {
				return nil, fmt.Errorf("%s is of type %v: experts must be of a type that can be multiplied", t.Name, t.DType)
			}
			parts = b.add(parts, name, t)
		}
	}
	if len(parts) == 0 || len(parts) > C.KV_KERNEL_MAX_WEIGHTS {
		return nil, fmt.Errorf("layer %d has %d expert tensors, 1 to %d can be used", b.layer, len(parts), int(C.KV_KERNEL_MAX_WEIGHTS))
	}
	b.stacked = int(next)
	if next == 1 && m.Experts() > 1 {
		b.stacked = 2 // backends have other layouts and sums for a matrix that is not stacked: it is held twice
	}
	return parts, nil
}

func (b *bank) add(parts [][]gguf.ExpertTensor, name string, t gguf.ExpertTensor) [][]gguf.ExpertTensor {
	if i, ok := b.weight[name]; ok {
		parts[i] = append(parts[i], t)
		return parts
	}
	b.weight[name] = len(parts)
	b.shapes[name] = weightShape(name, t)
	return append(parts, []gguf.ExpertTensor{t})
}

// bankWeight is the name after "blk.L." of a tensor that programs can read.
func bankWeight(name string, layer int) (string, bool) {
	rest, ok := strings.CutPrefix(name, fmt.Sprintf("blk.%d.", layer))
	return rest, ok && !strings.Contains(rest, "_chexps.") && !strings.HasSuffix(rest, ".input_scale")
}

// multiplies says whether t is a type of weights. The CPU backend says of every
// type that it supports it, and calls a nil function for the others.
func multiplies(t tensor.DType) bool {
	return t == tensor.F32 || C.ggml_get_type_traits(C.enum_ggml_type(t)).to_float != nil
}

func weightShape(name string, t gguf.ExpertTensor) WeightShape {
	switch {
	case strings.HasSuffix(name, ".weight"):
		return WeightShape{In: int(t.Shape[0]), Out: int(t.Shape[1]), Dims: 3}
	case t.DType != tensor.F32: // ggml adds and picks from f32 only
		return WeightShape{}
	case strings.HasSuffix(name, ".bias"):
		return WeightShape{In: 1, Out: int(t.Shape[0]), Dims: 2}
	}
	return WeightShape{In: 1, Out: 1, Dims: 1}
}

// expertDims is the number of dimensions of a tensor by what it is for.
func expertDims(t gguf.ExpertTensor) int {
	switch {
	case strings.HasSuffix(t.Name, ".weight"):
		return 3
	case strings.HasSuffix(t.Name, ".bias"):
		return 2
	}
	return 1
}

func (k *Kernel) alloc(b *bank, parts [][]gguf.ExpertTensor, used int) error {
	descs := make([]C.struct_kv_weight_desc, len(parts))
	for i, tensors := range parts {
		t := tensors[0]
		dims := expertDims(t)
		descs[i] = C.struct_kv_weight_desc{name: C.CString(t.Name), _type: C.int32_t(t.DType), n_dims: C.int32_t(dims)}
		defer C.free(unsafe.Pointer(descs[i].name))
		for d := range dims {
			descs[i].ne[d] = C.int64_t(t.Shape[d])
		}
		descs[i].ne[dims-1] = C.int64_t(b.stacked)
	}
	// the descriptors hold C strings, so the array itself must be C memory
	size := C.size_t(len(descs)) * C.sizeof_struct_kv_weight_desc
	array := (*C.struct_kv_weight_desc)(C.malloc(size))
	defer C.free(unsafe.Pointer(array))
	copy(unsafe.Slice(array, len(descs)), descs)
	b.c = C.kv_bank_new(k.c, array, C.int(len(descs)), C.int(used), C.bool(!k.cfg.NoRepack))
	if b.c == nil {
		return fmt.Errorf("no memory for the experts of layer %d on this device", b.layer)
	}
	return nil
}

// held is the number of experts in the ranges.
func (b *bank) held() int {
	n := 0
	for _, r := range b.ranges {
		n += r.Len()
	}
	return n
}

// read fills the bank, tensor by tensor, through one buffer.
func (b *bank) read(parts [][]gguf.ExpertTensor) error {
	var buf []byte
	for i, tensors := range parts {
		var total int64
		for _, t := range tensors {
			total += t.Bytes
		}
		total *= int64(b.stacked) / int64(b.held())
		if int64(cap(buf)) < total {
			buf = make([]byte, total)
		}
		buf = buf[:total]
		at := int64(0)
		for _, t := range tensors {
			if err := t.ReadInto(buf[at : at+t.Bytes]); err != nil {
				return err
			}
			at += t.Bytes
		}
		if b.stacked > b.held() {
			copy(buf[at:], buf[:at])
		}
		C.kv_bank_set(b.c, C.int(i), unsafe.Pointer(&buf[0]), C.size_t(total))
	}
	return nil
}

// Bytes is the memory that holds experts.
func (k *Kernel) Bytes() int64 {
	var n int64
	for _, b := range k.banks {
		n += int64(C.kv_bank_bytes(b.c))
	}
	return n
}

// Repacked is the number of weights in a layout of the backend's own.
func (k *Kernel) Repacked() int {
	n := 0
	for _, b := range k.banks {
		n += int(C.kv_bank_repacked(b.c))
	}
	return n
}

// SetProgram checks an encoded program against the weights of a layer and
// returns its number for Compute and its widths in f32. The error names what
// does not fit.
func (k *Kernel) SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error) {
	b := k.banks[layer]
	if b == nil {
		return 0, 0, 0, fmt.Errorf("layer %d is not loaded here", layer)
	}
	prog, same := len(k.programs), 0
	for i, have := range k.programs {
		switch {
		case have.bank == nil:
			prog = i
		case have.bank == b && have.encoded == string(program):
			return i, have.rowWidth, have.outWidth, nil
		case have.bank == b:
			same++
		}
	}
	if same >= maxLayerPrograms {
		return 0, 0, 0, fmt.Errorf("layer %d: %d programs are set already", layer, same)
	}
	p, err := ParseProgram(program)
	if err != nil {
		return 0, 0, 0, err
	}
	if err := p.CheckWeights(b.shapes); err != nil {
		return 0, 0, 0, fmt.Errorf("layer %d: %w", layer, err)
	}
	steps := stepsOf(p, b.weight)
	c := C.kv_program_new(k.c, b.c, &steps[0], C.int(len(steps)), C.int(p.RowWidth))
	if n := int(C.kv_program_check(c)); n != len(steps) {
		C.kv_program_free(c)
		return 0, 0, 0, fmt.Errorf("%w: layer %d: this device cannot compute operation %d of %d", ErrProgram, layer, n, len(steps))
	}
	widths := int64(p.RowWidth)
	for _, op := range p.Ops {
		widths += int64(op.Width)
	}
	if prog == len(k.programs) {
		k.programs = append(k.programs, kernelProgram{})
	}
	k.programs[prog] = kernelProgram{
		bank: b, encoded: string(program), c: c,
		rowWidth: int(p.RowWidth), outWidth: p.OutWidth(), maxPairs: int(max(1, maxChunkBytes/(4*widths))),
	}
	return prog, int(p.RowWidth), p.OutWidth(), nil
}

// Forget frees a program that SetProgram returned, however often it did. Its
// number may be given to another one. A number that is not set is passed over.
func (k *Kernel) Forget(prog int) {
	if prog < 0 || prog >= len(k.programs) {
		return
	}
	C.kv_program_free(k.programs[prog].c)
	k.programs[prog] = kernelProgram{}
}

// Compute fills out[i] = program(rows[row[i]], expert[i]); rows is
// [·*rowWidth], out [len(row)*outWidth]. Expert ids are the model's.
func (k *Kernel) Compute(prog int, rows []float32, row, expert []int32, out []float32) error {
	if prog < 0 || prog >= len(k.programs) || k.programs[prog].bank == nil {
		return fmt.Errorf("program %d is not set", prog)
	}
	p := &k.programs[prog]
	if len(expert) != len(row) || len(out) != len(row)*p.outWidth || len(rows)%p.rowWidth != 0 {
		return fmt.Errorf("layer %d: %d rows, %d experts, %d floats in and %d out do not fit", p.bank.layer, len(row), len(expert), len(rows), len(out))
	}
	k.local = k.local[:0]
	for i, e := range expert {
		if e < 0 || int(e) >= len(p.bank.index) || p.bank.index[e] < 0 {
			return fmt.Errorf("layer %d: %w: %d", p.bank.layer, ErrNotLoaded, e)
		}
		if r := row[i]; r < 0 || int(r) >= len(rows)/p.rowWidth {
			return fmt.Errorf("layer %d: row %d of %d", p.bank.layer, r, len(rows)/p.rowWidth)
		}
		k.local = append(k.local, p.bank.index[e])
	}
	for at := 0; at < len(row); at += p.maxPairs {
		n := min(p.maxPairs, len(row)-at)
		rc := C.kv_program_compute(p.c, (*C.float)(&rows[0]), (*C.int32_t)(&row[at]), (*C.int32_t)(&k.local[at]),
			C.int(n), (*C.float)(&out[at*p.outWidth]))
		if rc != 0 {
			return fmt.Errorf("layer %d: the backend failed with status %d", p.bank.layer, int(rc))
		}
	}
	return nil
}
