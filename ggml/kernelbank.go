//go:build cgo

package ggml

/*
#include <stdlib.h>
#include "kernel.h"
*/
import "C"

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"kvasird/ggml/gguf"
	"kvasird/ggml/tensor"
)

// bank is some of a layer's experts, stacked in the order of the ranges. It is
// loaded and dropped in one piece and does not change in between.
type bank struct {
	c       *C.struct_kv_bank
	layer   int
	ranges  []gguf.Range
	index   []int32 // expert id → row of the bank, -1 = not held
	stacked int     // rows of the bank
	weight  map[string]int
	shapes  map[string]WeightShape
	parts   [][]gguf.ExpertTensor // by weight: the part of each range
}

// planBank lists what a bank of some ranges of a layer would hold.
func planBank(m *gguf.Model, layer int, ranges []gguf.Range) (*bank, error) {
	b := &bank{layer: layer, ranges: ranges, index: make([]int32, m.Experts()), weight: map[string]int{}, shapes: map[string]WeightShape{}}
	for i := range b.index {
		b.index[i] = -1
	}
	next := int32(0)
	for _, r := range ranges {
		tensors, err := expertTensors(m, layer, r)
		if err != nil {
			return nil, err
		}
		for e := r.Begin; e < r.End; e++ {
			if b.index[e] >= 0 {
				return nil, fmt.Errorf("layer %d: expert %d is in two ranges", layer, e)
			}
			b.index[e] = next
			next++
		}
		if err := b.add(tensors); err != nil {
			return nil, err
		}
	}
	if len(b.parts) == 0 || len(b.parts) > C.KV_KERNEL_MAX_WEIGHTS {
		return nil, fmt.Errorf("layer %d has %d expert tensors, 1 to %d can be used", layer, len(b.parts), int(C.KV_KERNEL_MAX_WEIGHTS))
	}
	b.stacked = int(next)
	if next == 1 && m.Experts() > 1 {
		b.stacked = 2 // backends have other layouts and sums for a matrix that is not stacked: it is held twice
	}
	return b, nil
}

// expertTensors is where a range of experts lies. Of a model that is not whole yet
// also those may be asked for that are still to come: reading them fails then.
func expertTensors(m *gguf.Model, layer int, r gguf.Range) ([]gguf.ExpertTensor, error) {
	if m.Kind() == gguf.Partial {
		return m.PlanSlice(gguf.Slice{Layers: gguf.Range{Begin: layer, End: layer + 1}, Experts: r})
	}
	return m.ExpertTensors(layer, r)
}

// add takes in the tensors of one range.
func (b *bank) add(tensors []gguf.ExpertTensor) error {
	for _, t := range tensors {
		name, ok := bankWeight(t.Name, b.layer)
		if !ok {
			continue
		}
		if strings.HasSuffix(name, ".weight") && !multiplies(t.DType) {
			return fmt.Errorf("%s is of type %v: experts must be of a type that can be multiplied", t.Name, t.DType)
		}
		i, ok := b.weight[name]
		if !ok {
			i = len(b.parts)
			b.weight[name], b.shapes[name] = i, weightShape(name, t)
			b.parts = append(b.parts, nil)
		}
		b.parts[i] = append(b.parts[i], t)
	}
	return nil
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

// describe gives use the weights as C knows them, for as long as it runs.
func (b *bank) describe(use func(descs *C.struct_kv_weight_desc, n C.int)) {
	descs := make([]C.struct_kv_weight_desc, len(b.parts))
	for i, tensors := range b.parts {
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
	use(array, C.int(len(descs)))
}

// bytes is what k needs to hold the bank.
func (b *bank) bytes(k *Kernel) (n int64) {
	b.describe(func(descs *C.struct_kv_weight_desc, count C.int) {
		n = int64(C.kv_bank_plan(k.c, descs, count, C.int(k.used), C.bool(!k.cfg.NoRepack)))
	})
	return n
}

// alloc makes room for the bank.
func (b *bank) alloc(k *Kernel) error {
	b.describe(func(descs *C.struct_kv_weight_desc, count C.int) {
		b.c = C.kv_bank_new(k.c, descs, count, C.int(k.used), C.bool(!k.cfg.NoRepack))
	})
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

// tensorBytes is the size of weight i in the file's layout.
func (b *bank) tensorBytes(i int) (total int64) {
	for _, t := range b.parts[i] {
		total += t.Bytes
	}
	return total * int64(b.stacked) / int64(b.held())
}

// largest is the size of the largest weight, in the file's layout.
func (b *bank) largest() (most int64) {
	for i := range b.parts {
		most = max(most, b.tensorBytes(i))
	}
	return most
}

// filled is a weight of a bank whose bytes were read.
type filled struct {
	bank   *bank
	weight int
	space  unsafe.Pointer // of the bytes
	err    error
}

// fillers is the number of buffers through which banks are read: while the backend takes
// one in, which may lay it out anew, the next is read.
const fillers = 2

// fillSpace is the size of each.
func fillSpace(banks []*bank) (most int64) {
	for _, b := range banks {
		most = max(most, b.largest())
	}
	return most
}

// readBanks fills banks, weight by weight. The buffers are C memory, so that they are
// given back when they are no longer used.
func readBanks(ctx context.Context, banks []*bank) error {
	size := fillSpace(banks)
	spare := make(chan unsafe.Pointer, fillers)
	for range fillers {
		space := C.malloc(C.size_t(size))
		if space == nil {
			return fmt.Errorf("no memory to read experts: %d bytes", size)
		}
		defer C.free(space)
		spare <- space
	}
	full := make(chan filled)
	var reading sync.WaitGroup
	defer reading.Wait()
	inner, stop := context.WithCancel(ctx)
	defer stop()
	reading.Go(func() {
		defer close(full)
		for _, b := range banks {
			for i := range b.parts {
				select {
				case space := <-spare:
					full <- filled{b, i, space, b.readWeight(inner, i, space)}
				case <-inner.Done():
					return
				}
			}
		}
	})
	return takeFilled(ctx, full, spare, stop)
}

// takeFilled has the backend take in what was read, to the end of full.
func takeFilled(ctx context.Context, full <-chan filled, spare chan<- unsafe.Pointer, stop func()) (err error) {
	for f := range full {
		if err == nil && f.err == nil {
			C.kv_bank_set(f.bank.c, C.int(f.weight), f.space, C.size_t(f.bank.tensorBytes(f.weight)))
			spare <- f.space
			continue
		}
		if err == nil {
			err = f.err
		}
		stop()
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

// readWeight reads weight i, in the file's layout.
func (b *bank) readWeight(ctx context.Context, i int, space unsafe.Pointer) error {
	buf := unsafe.Slice((*byte)(space), b.tensorBytes(i))
	at := int64(0)
	for _, t := range b.parts[i] {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := t.ReadInto(buf[at : at+t.Bytes]); err != nil {
			return err
		}
		at += t.Bytes
	}
	if b.stacked > b.held() {
		copy(buf[at:], buf[:at])
	}
	return nil
}

func freeBanks(banks []*bank) {
	for _, b := range banks {
		C.kv_bank_free(b.c)
		b.c = nil
	}
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
