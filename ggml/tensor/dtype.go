// Package tensor states the facts of ggml's tensor types: their numbers, names and
// block layouts, the byte sizes of shapes, and plain Go dequantisers that serve as
// the oracle of the kernels.
//
// It does not read files (see ggml/gguf) and does not compute with tensors (see
// ggml). It is pure Go, holds no state, and every function is safe for concurrent
// use. Sizes are int64 and checked: an invalid or overflowing shape is an error,
// never a wrapped number.
package tensor

import (
	"fmt"
	"strings"
)

// DType is a ggml tensor type; its value is the number that GGUF files store.
type DType uint32

// The types of llama.cpp v0.5.0. Numbers that are missing here were removed from
// ggml and are refused.
const (
	F32    DType = 0
	F16    DType = 1
	Q4_0   DType = 2
	Q4_1   DType = 3
	Q5_0   DType = 6
	Q5_1   DType = 7
	Q8_0   DType = 8
	Q8_1   DType = 9
	Q2_K   DType = 10
	Q3_K   DType = 11
	Q4_K   DType = 12
	Q5_K   DType = 13
	Q6_K   DType = 14
	Q8_K   DType = 15
	IQ2XXS DType = 16
	IQ2XS  DType = 17
	IQ3XXS DType = 18
	IQ1S   DType = 19
	IQ4NL  DType = 20
	IQ3S   DType = 21
	IQ2S   DType = 22
	IQ4XS  DType = 23
	I8     DType = 24
	I16    DType = 25
	I32    DType = 26
	I64    DType = 27
	F64    DType = 28
	IQ1M   DType = 29
	BF16   DType = 30
	TQ1_0  DType = 34
	TQ2_0  DType = 35
	MXFP4  DType = 39
	NVFP4  DType = 40
	Q1_0   DType = 41
	Q2_0   DType = 42
)

// traits describes the storage of one type: blocks of elems elements in bytes bytes.
type traits struct {
	name  string
	elems int64
	bytes int64
}

// superBlock is the block length of the K, IQ and TQ families (QK_K).
const superBlock = 256

// table is indexed by DType; a removed number has an empty name.
var table = [...]traits{
	F32:    {"f32", 1, 4},
	F16:    {"f16", 1, 2},
	Q4_0:   {"q4_0", 32, 2 + 16},
	Q4_1:   {"q4_1", 32, 4 + 16},
	Q5_0:   {"q5_0", 32, 2 + 4 + 16},
	Q5_1:   {"q5_1", 32, 4 + 4 + 16},
	Q8_0:   {"q8_0", 32, 2 + 32},
	Q8_1:   {"q8_1", 32, 4 + 32},
	Q2_K:   {"q2_K", superBlock, 16 + 64 + 4},
	Q3_K:   {"q3_K", superBlock, 32 + 64 + 12 + 2},
	Q4_K:   {"q4_K", superBlock, 4 + 12 + 128},
	Q5_K:   {"q5_K", superBlock, 4 + 12 + 32 + 128},
	Q6_K:   {"q6_K", superBlock, 128 + 64 + 16 + 2},
	Q8_K:   {"q8_K", superBlock, 4 + 256 + 32},
	IQ2XXS: {"iq2_xxs", superBlock, 2 + 64},
	IQ2XS:  {"iq2_xs", superBlock, 2 + 64 + 8},
	IQ3XXS: {"iq3_xxs", superBlock, 2 + 96},
	IQ1S:   {"iq1_s", superBlock, 2 + 32 + 16},
	IQ4NL:  {"iq4_nl", 32, 2 + 16},
	IQ3S:   {"iq3_s", superBlock, 2 + 64 + 8 + 32 + 4},
	IQ2S:   {"iq2_s", superBlock, 2 + 64 + 8 + 8},
	IQ4XS:  {"iq4_xs", superBlock, 2 + 2 + 4 + 128},
	I8:     {"i8", 1, 1},
	I16:    {"i16", 1, 2},
	I32:    {"i32", 1, 4},
	I64:    {"i64", 1, 8},
	F64:    {"f64", 1, 8},
	IQ1M:   {"iq1_m", superBlock, 32 + 16 + 8},
	BF16:   {"bf16", 1, 2},
	TQ1_0:  {"tq1_0", superBlock, 48 + 4 + 2},
	TQ2_0:  {"tq2_0", superBlock, 64 + 2},
	MXFP4:  {"mxfp4", 32, 1 + 16},
	NVFP4:  {"nvfp4", 64, 4 + 32},
	Q1_0:   {"q1_0", 128, 2 + 16},
	Q2_0:   {"q2_0", 64, 2 + 16},
}

// DTypes returns every known type in the order of its number.
func DTypes() []DType {
	var all []DType
	for i := range table {
		if DType(i).Valid() {
			all = append(all, DType(i))
		}
	}
	return all
}

// ParseDType reads a type by the name that String gives, in any letter case.
func ParseDType(name string) (DType, error) {
	for i := range table {
		if table[i].name != "" && strings.EqualFold(table[i].name, name) {
			return DType(i), nil
		}
	}
	return 0, fmt.Errorf("tensor: unknown type %q", name)
}

// Valid reports whether t is a type of llama.cpp v0.5.0.
func (t DType) Valid() bool { return int64(t) < int64(len(table)) && table[t].name != "" }

// String returns ggml's own name of the type, such as "q4_K".
func (t DType) String() string {
	if !t.Valid() {
		return fmt.Sprintf("dtype(%d)", uint32(t))
	}
	return table[t].name
}

// BlockSize returns the number of elements in one block; 0 for an invalid type.
func (t DType) BlockSize() int64 {
	if !t.Valid() {
		return 0
	}
	return table[t].elems
}

// BlockBytes returns the number of bytes of one block; 0 for an invalid type.
func (t DType) BlockBytes() int64 {
	if !t.Valid() {
		return 0
	}
	return table[t].bytes
}
