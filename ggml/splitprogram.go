//go:build cgo

package ggml

/*
#include "ggml-backend-impl.h"
#include "kernel.h"
#include "swarm.h"
*/
import "C"

import (
	"fmt"
	"math"
	"unsafe"
)

// swarmABI is the version of ggml's backend interface that the device is built on.
const swarmABI = C.GGML_BACKEND_API_VERSION

// The numbers of ggml's enums belong to a release; those of a Program do not.
var gluActs = map[C.int32_t]Activation{
	C.GGML_GLU_OP_SWIGLU: ActSwiGLU, C.GGML_GLU_OP_GEGLU: ActGeGLU, C.GGML_GLU_OP_REGLU: ActReGLU,
	C.GGML_GLU_OP_SWIGLU_OAI: ActSwiGLUOAI, C.GGML_GLU_OP_GEGLU_ERF: ActGeGLUErf,
	C.GGML_GLU_OP_GEGLU_QUICK: ActGeGLUQuick, C.GGML_GLU_OP_SWIGLU_CLAMP: ActSwiGLUClamp,
}

var unaryActs = map[C.int32_t]Activation{
	C.GGML_UNARY_OP_SILU: ActSiLU, C.GGML_UNARY_OP_GELU: ActGELU, C.GGML_UNARY_OP_RELU: ActReLU,
	C.GGML_UNARY_OP_TANH: ActTanh, C.GGML_UNARY_OP_SIGMOID: ActSigmoid,
	C.GGML_UNARY_OP_GELU_ERF: ActGELUErf, C.GGML_UNARY_OP_GELU_QUICK: ActGELUQuick,
}

var splitOps = map[C.int32_t]OpCode{
	C.GGML_OP_MUL_MAT_ID: OpMatMul, C.GGML_OP_ADD_ID: OpBias, C.GGML_OP_GET_ROWS: OpPick,
	C.GGML_OP_GLU: OpGLU, C.GGML_OP_UNARY: OpUnary, C.GGML_OP_MUL: OpMul,
	C.GGML_OP_SCALE: OpScale, C.GGML_OP_CLAMP: OpClamp, C.GGML_OP_SQR: OpSqr, C.GGML_OP_VIEW: OpView,
}

// programOf turns a split into a checked program.
func programOf(s *C.struct_kv_split) (*Program, error) {
	p := &Program{Version: programVersion, RowWidth: uint32(s.row_width)}
	for i := range s.ops[:s.n_ops] {
		op, err := opOf(&s.ops[i], s)
		if err != nil {
			return nil, fmt.Errorf("layer %d, operation %d: %w", s.layer, i, err)
		}
		p.Ops = append(p.Ops, op)
	}
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("layer %d: %w", s.layer, err)
	}
	return p, nil
}

func opOf(c *C.struct_kv_op, s *C.struct_kv_split) (Op, error) {
	code, ok := splitOps[c.op]
	if !ok {
		return Op{}, fmt.Errorf("%w: ggml operation %d is not in the set", ErrProgram, c.op)
	}
	op := Op{Code: code, A: uint8(c.a), B: uint8(c.b), Offset: uint32(c.offset), Width: uint32(c.width)}
	if c.weight >= 0 {
		op.Weight = C.GoString(&s.weights[c.weight][0])
	}
	switch code {
	case OpMatMul:
		op.Prec = [2]uint8{uint8(c.params[0]), uint8(c.params[3])}
	case OpGLU:
		op.Act, op.Fused = gluActs[c.params[0]], c.b == 0
		op.Swap = op.Fused && c.params[1] != 0
		op.F = [2]uint32{uint32(c.params[2]), uint32(c.params[3])}
	case OpUnary:
		op.Act = unaryActs[c.params[0]]
	case OpScale, OpClamp:
		op.F = [2]uint32{uint32(c.params[0]), uint32(c.params[1])}
	}
	return op, nil
}

// layerProgram is a program as it was read once, with the bytes it was read from.
type layerProgram struct {
	key     []byte // the split's ops and names
	encoded []byte
}

// program gives the encoded program of a split; it is read anew only when the
// split differs from the layer's last one.
func (m *Model) program(s *C.struct_kv_split) ([]byte, error) {
	ops := unsafe.Slice((*byte)(unsafe.Pointer(&s.ops[0])), int(s.n_ops)*int(unsafe.Sizeof(s.ops[0])))
	names := unsafe.Slice((*byte)(unsafe.Pointer(&s.weights[0][0])), int(s.n_weights)*int(unsafe.Sizeof(s.weights[0])))
	if int(s.layer) < 0 || int(s.layer) >= len(m.programs) {
		return nil, fmt.Errorf("layer %d of a model with %d", s.layer, len(m.programs))
	}
	slot := &m.programs[s.layer]
	if have := slot.Load(); have != nil && sameKey(have.key, ops, names) {
		return have.encoded, nil
	}
	p, err := programOf(s)
	if err != nil {
		return nil, err
	}
	encoded, err := p.Marshal()
	if err != nil {
		return nil, err
	}
	slot.Store(&layerProgram{key: append(append([]byte(nil), ops...), names...), encoded: encoded})
	return encoded, nil
}

func sameKey(key, ops, names []byte) bool {
	return len(key) == len(ops)+len(names) && string(key[:len(ops)]) == string(ops) && string(key[len(ops):]) == string(names)
}

// stepsOf turns a program into what the kernel runs; weights are indices into the bank.
func stepsOf(p *Program, index map[string]int) []C.struct_kv_step {
	codes := map[OpCode]C.int32_t{}
	for c, op := range splitOps {
		codes[op] = c
	}
	acts := map[Activation]C.int32_t{}
	for c, a := range gluActs {
		acts[a] = c
	}
	for c, a := range unaryActs {
		acts[a] = c
	}
	steps := make([]C.struct_kv_step, len(p.Ops))
	for i, o := range p.Ops {
		s := C.struct_kv_step{
			op: codes[o.Code], a: C.int32_t(o.A), b: C.int32_t(o.B), weight: -1,
			offset: C.int32_t(o.Offset), width: C.int32_t(o.Width), act: acts[o.Act],
		}
		if o.Weight != "" {
			s.weight = C.int32_t(index[o.Weight])
		}
		if o.Fused {
			s.fused = 1
		}
		if o.Swap {
			s.swap = 1
		}
		for j := range o.F {
			s.f[j] = C.float(math.Float32frombits(o.F[j]))
		}
		s.prec = [2]C.int32_t{C.int32_t(o.Prec[0]), C.int32_t(o.Prec[1])}
		steps[i] = s
	}
	return steps
}
