package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// dequantisers turn one block of src into one block of dst.
var dequantisers = map[DType]func(dst []float32, src []byte){
	F32: dequantF32, F16: dequantF16, BF16: dequantBF16,
	Q4_0: dequantQ4_0, Q4_1: dequantQ4_1, Q5_0: dequantQ5_0, Q5_1: dequantQ5_1, Q8_0: dequantQ8_0,
	Q2_K: dequantQ2K, Q3_K: dequantQ3K, Q4_K: dequantQ4K, Q5_K: dequantQ5K, Q6_K: dequantQ6K,
	MXFP4: dequantMXFP4, NVFP4: dequantNVFP4,
}

// Dequantisable returns the types that Dequantize knows, in the order of their numbers.
func Dequantisable() []DType {
	var list []DType
	for t := range dequantisers {
		list = append(list, t)
	}
	slices.Sort(list)
	return list
}

// Dequantize turns src, whole blocks of type t, into float32 elements; len(dst) is
// the number of elements. It is the oracle of the kernels, written to be read and not
// to be fast. Its results are ggml's own bit for bit where ggml's code is compiled
// without fused multiply-add (x86-64); elsewhere the types with a minimum (Q4_1, Q5_1,
// Q2_K, Q4_K, Q5_K) differ by the rounding of their product.
func (t DType) Dequantize(dst []float32, src []byte) error {
	block, ok := dequantisers[t]
	if !ok {
		return fmt.Errorf("tensor: no dequantiser for type %v", t)
	}
	n, err := t.RowBytes(int64(len(dst)))
	if err != nil {
		return err
	}
	if int64(len(src)) != n {
		return fmt.Errorf("tensor: %d bytes for %d elements of type %v, want %d", len(src), len(dst), t, n)
	}
	elems, bytes := int(t.BlockSize()), int(t.BlockBytes())
	for len(dst) > 0 {
		block(dst[:elems], src[:bytes])
		dst, src = dst[elems:], src[bytes:]
	}
	return nil
}

// half reads an IEEE 754 binary16 number.
func half(b []byte) float32 {
	h := uint32(binary.LittleEndian.Uint16(b))
	sign, exponent, fraction := h>>15<<31, h>>10&0x1f, h&0x3ff
	switch exponent {
	case 0: // zero and subnormal numbers: fraction × 2^-24, which is exact
		return math.Float32frombits(sign | math.Float32bits(float32(fraction)*0x1p-24))
	case 0x1f: // infinity and NaN
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
}

func dequantF32(dst []float32, src []byte) {
	dst[0] = math.Float32frombits(binary.LittleEndian.Uint32(src))
}

func dequantF16(dst []float32, src []byte) { dst[0] = half(src) }

func dequantBF16(dst []float32, src []byte) {
	dst[0] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src)) << 16)
}
