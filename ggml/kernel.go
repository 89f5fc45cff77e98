//go:build cgo

package ggml

/*
#include "kernel.h"
*/
import "C"

import (
	"fmt"
	"slices"
	"sync"
)

// maxChunkBytes bounds the activations of one graph; larger calls run in pieces.
const maxChunkBytes = 256 << 20

// maxLayerPrograms bounds the programs of one layer that are set at a time. A
// model has one; who sets those of others keeps each of them far below this.
const maxLayerPrograms = 64

// Kernel computes expert programs over the slices that are loaded into it, which
// may come and go while it computes.
//
// It is safe for concurrent use. SetProgram, Forget and Compute hold mu, so that
// one call computes at a time; loading and dropping hold loading, and mu only to
// take in or leave out what was loaded. So a slice is read while others compute, a
// call under way ends on the experts that it began with, and a slice is freed when
// no call uses it.
type Kernel struct {
	c       *C.struct_kv_kernel
	cfg     KernelConfig
	release func() bool

	loading sync.Mutex // held to change banks; guards used; taken before mu
	used    int        // experts per token of the model

	mu       sync.Mutex      // guards the rest
	banks    map[int][]*bank // by layer; changed with loading held too
	programs []kernelProgram // by number; a number without a Program is free
	scratch  pairScratch
}

// kernelProgram is a program on the banks of its layer.
type kernelProgram struct {
	*Program
	layer    int
	encoded  string
	on       []programOn
	maxPairs int // per graph
}

type programOn struct {
	bank *bank
	c    *C.struct_kv_program
}

// pairScratch gathers the pairs of a bank.
type pairScratch struct {
	pair, row, local []int32 // position in the call, row, row of the bank
	out              []float32
}

// NewKernel starts a kernel without experts.
func (rt *Runtime) NewKernel(cfg KernelConfig) (*Kernel, error) {
	dev, err := rt.Device(cfg.Device)
	if err != nil {
		return nil, err
	}
	cfg.Threads = max(cfg.Threads, 1)
	k := &Kernel{cfg: cfg, banks: map[int][]*bank{}}
	if k.c = C.kv_kernel_new(C.size_t(dev.Index), C.int(cfg.Threads)); k.c == nil {
		return nil, fmt.Errorf("device %s cannot be used", dev.Name)
	}
	k.release = track(k, "kernel on "+dev.Name, rt.log)
	return k, nil
}

// Close frees the kernel and its experts, once no call is under way. It may be
// called again; nothing else may be called afterwards.
func (k *Kernel) Close() error {
	k.loading.Lock()
	defer k.loading.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.release() {
		return nil
	}
	for i := range k.programs {
		k.forgetLocked(i)
	}
	for _, banks := range k.banks {
		freeBanks(banks)
	}
	clear(k.banks)
	C.kv_kernel_free(k.c)
	C.kv_memory_trim()
	return nil
}

// Bytes is the memory that holds experts.
func (k *Kernel) Bytes() int64 {
	return k.sum(func(b *bank) int64 { return int64(C.kv_bank_bytes(b.c)) })
}

// Repacked is the number of weights in a layout of the backend's own.
func (k *Kernel) Repacked() int {
	return int(k.sum(func(b *bank) int64 { return int64(C.kv_bank_repacked(b.c)) }))
}

func (k *Kernel) sum(of func(*bank) int64) (n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, banks := range k.banks {
		for _, b := range banks {
			n += of(b)
		}
	}
	return n
}

// SetProgram checks an encoded program against the weights of a layer and
// returns its number for Compute and its widths in f32. The error names what
// does not fit. It stays set until Forget, whatever is loaded and dropped.
func (k *Kernel) SetProgram(layer int, program []byte) (prog, rowWidth, outWidth int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.banks[layer]) == 0 {
		return 0, 0, 0, fmt.Errorf("layer %d is not loaded here", layer)
	}
	prog, same := len(k.programs), 0
	for i, have := range k.programs {
		switch {
		case have.Program == nil:
			prog = i
		case have.layer == layer && have.encoded == string(program):
			return i, int(have.RowWidth), have.OutWidth(), nil
		case have.layer == layer:
			same++
		}
	}
	if same >= maxLayerPrograms {
		return 0, 0, 0, fmt.Errorf("layer %d: %d programs are set already", layer, same)
	}
	p, err := k.newProgram(layer, program)
	if err != nil {
		return 0, 0, 0, err
	}
	if prog == len(k.programs) {
		k.programs = append(k.programs, kernelProgram{})
	}
	k.programs[prog] = p
	return prog, int(p.RowWidth), p.OutWidth(), nil
}

// newProgram builds a program on every bank of a layer; k.mu is held.
func (k *Kernel) newProgram(layer int, encoded []byte) (kernelProgram, error) {
	parsed, err := ParseProgram(encoded)
	if err != nil {
		return kernelProgram{}, err
	}
	widths := int64(parsed.RowWidth)
	for _, op := range parsed.Ops {
		widths += int64(op.Width)
	}
	p := kernelProgram{
		Program: parsed, layer: layer, encoded: string(encoded), maxPairs: int(max(1, maxChunkBytes/(4*widths))),
	}
	for _, b := range k.banks[layer] {
		c, err := k.build(parsed, b)
		if err != nil {
			p.free()
			return kernelProgram{}, fmt.Errorf("layer %d: %w", layer, err)
		}
		p.on = append(p.on, programOn{b, c})
	}
	return p, nil
}

// build makes a program on one bank, or says what does not fit.
func (k *Kernel) build(p *Program, b *bank) (*C.struct_kv_program, error) {
	if err := p.CheckWeights(b.shapes); err != nil {
		return nil, err
	}
	steps := stepsOf(p, b.weight)
	c := C.kv_program_new(k.c, b.c, &steps[0], C.int(len(steps)), C.int(p.RowWidth))
	if n := int(C.kv_program_check(c)); n != len(steps) {
		C.kv_program_free(c)
		return nil, fmt.Errorf("%w: this device cannot compute operation %d of %d", ErrProgram, n, len(steps))
	}
	return c, nil
}

func (p *kernelProgram) free() {
	for _, o := range p.on {
		C.kv_program_free(o.c)
	}
	*p = kernelProgram{}
}

// Forget frees a program that SetProgram returned, however often it did. Its
// number may be given to another one. A number that is not set is passed over.
func (k *Kernel) Forget(prog int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgetLocked(prog)
}

func (k *Kernel) forgetLocked(prog int) {
	if prog >= 0 && prog < len(k.programs) {
		k.programs[prog].free()
	}
}

// Compute fills out[i] = program(rows[row[i]], expert[i]); rows is
// [·*rowWidth], out [len(row)*outWidth]. Expert ids are the model's.
func (k *Kernel) Compute(prog int, rows []float32, row, expert []int32, out []float32) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if prog < 0 || prog >= len(k.programs) || k.programs[prog].Program == nil {
		return fmt.Errorf("program %d is not set", prog)
	}
	p := &k.programs[prog]
	in, width := int(p.RowWidth), p.OutWidth()
	if len(expert) != len(row) || len(out) != len(row)*width || len(rows)%in != 0 {
		return fmt.Errorf("layer %d: %d rows, %d experts, %d floats in and %d out do not fit", p.layer, len(row), len(expert), len(rows), len(out))
	}
	for i, r := range row {
		if r < 0 || int(r) >= len(rows)/in {
			return fmt.Errorf("layer %d: row %d of %d", p.layer, r, len(rows)/in)
		}
		if !p.holds(expert[i]) {
			return fmt.Errorf("layer %d: %w: %d", p.layer, ErrNotLoaded, expert[i])
		}
	}
	for i := range p.on {
		if err := k.computeOn(p, &p.on[i], rows, row, expert, out); err != nil {
			return err
		}
	}
	return nil
}

func (b *bank) holds(expert int32) bool {
	return expert >= 0 && int(expert) < len(b.index) && b.index[expert] >= 0
}

func (p *kernelProgram) holds(expert int32) bool {
	for i := range p.on {
		if p.on[i].bank.holds(expert) {
			return true
		}
	}
	return false
}

// computeOn computes the pairs whose experts are in one bank.
func (k *Kernel) computeOn(p *kernelProgram, on *programOn, rows []float32, row, expert []int32, out []float32) error {
	s := &k.scratch
	s.pair, s.row, s.local = s.pair[:0], s.row[:0], s.local[:0]
	for i, e := range expert {
		if on.bank.holds(e) {
			s.pair, s.row, s.local = append(s.pair, int32(i)), append(s.row, row[i]), append(s.local, on.bank.index[e])
		}
	}
	width := p.OutWidth()
	to, some := out, len(s.pair) < len(row)
	if some {
		s.out = slices.Grow(s.out[:0], len(s.pair)*width)[:len(s.pair)*width]
		to = s.out
	}
	for at := 0; at < len(s.pair); at += p.maxPairs {
		n := min(p.maxPairs, len(s.pair)-at)
		rc := C.kv_program_compute(on.c, (*C.float)(&rows[0]), (*C.int32_t)(&s.row[at]), (*C.int32_t)(&s.local[at]),
			C.int(n), (*C.float)(&to[at*width]))
		if rc != 0 {
			return fmt.Errorf("layer %d: the backend failed with status %d", p.layer, int(rc))
		}
	}
	if some {
		for i, pair := range s.pair {
			copy(out[int(pair)*width:][:width], s.out[i*width:])
		}
	}
	return nil
}
