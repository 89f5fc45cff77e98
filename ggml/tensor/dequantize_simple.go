package tensor

import "encoding/binary"

// The blocks of 32 elements. In the 4 and 5 bit types, byte j of the quants holds
// element j in its low nibble and element j+16 in its high one. Conversions such as
// float32(q*d) keep the compiler from fusing a product with the sum after it.

// Q4_0: f16 d, 16 bytes of quants; (q-8)·d.
func dequantQ4_0(dst []float32, src []byte) {
	d := half(src)
	for j, q := range src[2:18] {
		dst[j] = float32(int(q&0xf)-8) * d
		dst[j+16] = float32(int(q>>4)-8) * d
	}
}

// Q4_1: f16 d, f16 m, 16 bytes of quants; q·d + m.
func dequantQ4_1(dst []float32, src []byte) {
	d, m := half(src), half(src[2:])
	for j, q := range src[4:20] {
		dst[j] = float32(float32(q&0xf)*d) + m
		dst[j+16] = float32(float32(q>>4)*d) + m
	}
}

// fifthBits returns bit 4 of the elements j and j+16.
func fifthBits(high uint32, j int) (lo, hi byte) {
	return byte(high>>j&1) << 4, byte(high>>(j+16)&1) << 4
}

// Q5_0: f16 d, u32 of fifth bits, 16 bytes of quants; (q-16)·d.
func dequantQ5_0(dst []float32, src []byte) {
	d, high := half(src), binary.LittleEndian.Uint32(src[2:])
	for j, q := range src[6:22] {
		lo, hi := fifthBits(high, j)
		dst[j] = float32(int(q&0xf|lo)-16) * d
		dst[j+16] = float32(int(q>>4|hi)-16) * d
	}
}

// Q5_1: f16 d, f16 m, u32 of fifth bits, 16 bytes of quants; q·d + m.
func dequantQ5_1(dst []float32, src []byte) {
	d, m, high := half(src), half(src[2:]), binary.LittleEndian.Uint32(src[4:])
	for j, q := range src[8:24] {
		lo, hi := fifthBits(high, j)
		dst[j] = float32(float32(q&0xf|lo)*d) + m
		dst[j+16] = float32(float32(q>>4|hi)*d) + m
	}
}

// Q8_0: f16 d, 32 signed bytes; q·d.
func dequantQ8_0(dst []float32, src []byte) {
	d := half(src)
	for j, q := range src[2:34] {
		dst[j] = float32(int8(q)) * d
	}
}
