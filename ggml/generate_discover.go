//go:build cgo

package ggml

// #include <stdlib.h>
// #include "generate.h"
import "C"

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"unsafe"
)

// optional is a tensor that a layer may have if it has another one.
type optional struct{ name, beside string }

// The optional tensors that a generated model has wherever the architecture
// knows them. A few loaders call optional what their graphs cannot do without,
// even the experts.
var wantedTensors = []optional{
	{"ffn_gate_inp.weight", "attn_norm.weight"},
	{"ffn_up_exps.weight", "ffn_gate_inp.weight"},
	{"ffn_gate_exps.weight", "ffn_gate_inp.weight"},
	{"ffn_down_exps.weight", "ffn_gate_inp.weight"},
	{"exp_probs_b", "ffn_gate_inp.weight"},
	{"exp_probs_b.bias", "ffn_gate_inp.weight"},
	{"ffn_gate_shexp.weight", "ffn_gate_inp.weight"},
	{"ffn_up_shexp.weight", "ffn_gate_inp.weight"},
	{"ffn_down_shexp.weight", "ffn_gate_inp.weight"},
	{"attn_sinks.weight", "attn_norm.weight"},
	{"ssm_conv1d.bias", "ssm_conv1d.weight"},
	{"attn_qkv.weight", "ssm_conv1d.weight"},
	{"attn_gate.weight", "ssm_conv1d.weight"},
	{"indexer.k_norm.weight", "attn_kv_a_norm.weight"},
	{"indexer.k_norm.bias", "attn_kv_a_norm.weight"},
	{"indexer.proj.weight", "attn_kv_a_norm.weight"},
	{"indexer.attn_k.weight", "attn_kv_a_norm.weight"},
	{"indexer.attn_q_b.weight", "attn_kv_a_norm.weight"},
}

// Those of GenerateConfig's Biases, Fused and Scales.
var (
	biasTensors = []optional{
		{"attn_q.bias", "attn_q.weight"},
		{"attn_k.bias", "attn_k.weight"},
		{"attn_v.bias", "attn_v.weight"},
		{"attn_output.bias", "attn_output.weight"},
		{"ffn_gate_inp.bias", "ffn_gate_inp.weight"},
		{"ffn_gate_exps.bias", "ffn_gate_exps.weight"},
		{"ffn_up_exps.bias", "ffn_up_exps.weight"},
		{"ffn_down_exps.bias", "ffn_down_exps.weight"},
	}
	fusedTensors = []optional{{"ffn_gate_up_exps.weight", "ffn_down_exps.weight"}}
	scaleTensors = []optional{
		{"ffn_gate_exps.scale", "ffn_gate_exps.weight"},
		{"ffn_up_exps.scale", "ffn_up_exps.weight"},
		{"ffn_down_exps.scale", "ffn_down_exps.weight"},
		{"ffn_gate_up_exps.scale", "ffn_gate_up_exps.weight"},
	}
)

func (cfg GenerateConfig) wanted() []optional {
	wanted := slices.Clone(wantedTensors)
	if cfg.Biases {
		wanted = append(wanted, biasTensors...)
	}
	if cfg.Fused {
		wanted = append(wanted, fusedTensors...)
	}
	if cfg.Scales {
		wanted = append(wanted, scaleTensors...)
	}
	return wanted
}

// wrongCount is what the library says when the header lists other tensors
// than the model has.
var wrongCount = regexp.MustCompile(`tensors.*; expected (\d+), got (\d+)`)

// discover finds the tensors that the architecture has with this metadata.
//
// The library makes a model from metadata if its header lists as many tensors
// as the architecture creates. Required ones need not be among them: nameless
// stand-ins will do. Optional ones are created only if listed.
func (f *ggufFile) discover(layers int, cfg GenerateConfig, more []optional) ([]generated, error) {
	loadMu.Lock()
	defer loadMu.Unlock()
	var listed []string
	found, err := f.tensorsWith(nil)
	offer := func(names []string) {
		if err != nil || len(names) == 0 {
			return
		}
		var with map[string]generated
		if with, err = f.tensorsWith(slices.Concat(listed, names)); err != nil {
			return
		}
		found = with
		for _, name := range names {
			if _, ok := with[name]; ok {
				listed = append(listed, name)
			}
		}
	}
	offer([]string{"output.weight"})
	for _, o := range slices.Concat(cfg.wanted(), more) {
		var names []string
		for i := range layers {
			name := fmt.Sprintf("blk.%d.%s", i, o.name)
			_, has := found[name]
			if _, ok := found[fmt.Sprintf("blk.%d.%s", i, o.beside)]; ok && !has {
				names = append(names, name)
			}
		}
		offer(names)
	}
	return inFileOrder(found, cfg), err
}

// inFileOrder drops what cfg drops and puts the rest in one order.
func inFileOrder(found map[string]generated, cfg GenerateConfig) []generated {
	var tensors []generated
	for _, t := range found {
		if cfg.Drop == nil || !cfg.Drop.MatchString(t.name) {
			tensors = append(tensors, t)
		}
	}
	slices.SortFunc(tensors, func(a, b generated) int {
		return cmp.Or(cmp.Compare(a.layer(), b.layer()), cmp.Compare(a.name, b.name))
	})
	return tensors
}

// tensorsWith returns the model's tensors if the header lists these names.
// Names that the architecture does not know serve as stand-ins.
func (f *ggufFile) tensorsWith(listed []string) (map[string]generated, error) {
	found, err := f.probe(listed, 0)
	if err == nil {
		return found, nil
	}
	m := wrongCount.FindStringSubmatch(err.Error())
	if m == nil {
		return nil, err
	}
	created, _ := strconv.Atoi(m[2])
	if created < len(listed) {
		return nil, fmt.Errorf("llama.cpp creates %d tensors where %d were offered", created, len(listed))
	}
	return f.probe(listed, created-len(listed))
}

// probe makes the model once. Callers hold loadMu: the reason of a refusal is
// in the library's log.
func (f *ggufFile) probe(listed []string, standIns int) (map[string]generated, error) {
	header := newGGUF()
	defer header.free()
	C.gguf_set_kv(header.ctx, f.ctx)
	tensors := make([]generated, len(listed)+standIns)
	for i := range tensors {
		tensors[i] = generated{name: fmt.Sprintf("stand_in.%d", i), ne: [4]int64{1, 1, 1, 1}}
		if i < len(listed) {
			tensors[i].name = listed[i]
		}
	}
	if err := header.addTensors(tensors); err != nil {
		return nil, err
	}
	list := (*C.struct_kv_made_list)(C.calloc(1, C.sizeof_struct_kv_made_list))
	defer func() {
		C.free(unsafe.Pointer(list.at))
		C.free(unsafe.Pointer(list))
	}()
	logs.clear()
	if !C.kv_made_tensors(header.ctx, list) {
		return nil, logs.failure("llama.cpp refused the metadata")
	}
	found := map[string]generated{}
	for _, t := range unsafe.Slice(list.at, list.n) {
		g := generated{name: C.GoString(&t.name[0])}
		for i := range g.ne {
			g.ne[i] = int64(t.ne[i])
		}
		found[g.name] = g // tensors that layers share come several times
	}
	return found, nil
}
