package tensor

// The K types: super-blocks of 256 elements in groups of 16 or 32, each group with
// its own small scale (and minimum), all scales with one f16 scale d. Conversions
// such as float32(d*q) keep the compiler from fusing a product with the sum after it.

// Q2_K: 16 bytes of 4-bit scale (low) and minimum (high), 64 bytes of quants, f16 d,
// f16 dmin. Each 32 bytes of quants hold 128 elements, two bits at a time.
func dequantQ2K(dst []float32, src []byte) {
	scales, quants := src[:16], src[16:80]
	d, dmin := half(src[80:]), half(src[82:])
	for i := range dst {
		group, within := i/16, i%128
		scale := d * float32(scales[group]&0xf)
		low := dmin * float32(scales[group]>>4)
		q := quants[i/128*32+within%32] >> (within / 32 * 2) & 3
		dst[i] = float32(scale*float32(q)) - low
	}
}

// Q3_K: 32 bytes of high bits, 64 bytes of low bit pairs laid out as in Q2_K, 12 bytes
// of 6-bit scales, f16 d. A clear high bit means minus 4.
func dequantQ3K(dst []float32, src []byte) {
	high, quants, scales := src[:32], src[32:96], src[96:108]
	d := half(src[108:])
	for i := range dst {
		group, within := i/16, i%128
		q := int(quants[i/128*32+within%32] >> (within / 32 * 2) & 3)
		if high[i%32]>>(i/32)&1 == 0 {
			q -= 4
		}
		dst[i] = d * float32(scaleQ3K(scales, group)) * float32(q)
	}
}

// scaleQ3K returns scale i of 16, less 32: its low four bits are a nibble of the first
// eight bytes, its high two bits are in the last four.
func scaleQ3K(b []byte, i int) int {
	low := b[i%8] >> (i / 8 * 4) & 0xf
	return int(low|b[8+i%4]>>(i/4*2)&3<<4) - 32
}

// scaleMinK returns the 6-bit scale and minimum i of 8 of Q4_K and Q5_K. The last four
// keep their high two bits in the top of the first four's bytes.
func scaleMinK(b []byte, i int) (scale, low float32) {
	if i < 4 {
		return float32(b[i] & 63), float32(b[i+4] & 63)
	}
	return float32(b[i+4]&0xf | b[i-4]>>6<<4), float32(b[i+4]>>4 | b[i]>>6<<4)
}

// Q4_K: f16 d, f16 dmin, 12 bytes of scales and minima, 128 bytes of quants. Each 32
// bytes of quants hold 32 elements in their low and the next 32 in their high nibbles.
func dequantQ4K(dst []float32, src []byte) {
	d, dmin := half(src), half(src[2:])
	scales, quants := src[4:16], src[16:144]
	for i := range dst {
		scale, low := scaleMinK(scales, i/32)
		q := quants[i/64*32+i%32] >> (i / 32 % 2 * 4) & 0xf
		dst[i] = float32(float32(d*scale)*float32(q)) - float32(dmin*low)
	}
}

// Q5_K: as Q4_K with 32 bytes of fifth bits before the quants; bit g of byte j belongs
// to element j of group g.
func dequantQ5K(dst []float32, src []byte) {
	d, dmin := half(src), half(src[2:])
	scales, high, quants := src[4:16], src[16:48], src[48:176]
	for i := range dst {
		scale, low := scaleMinK(scales, i/32)
		q := quants[i/64*32+i%32] >> (i / 32 % 2 * 4) & 0xf
		q |= high[i%32] >> (i / 32) & 1 << 4
		dst[i] = float32(float32(d*scale)*float32(q)) - float32(dmin*low)
	}
}

// Q6_K: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 d.
// Of each 128 elements, the first 64 are in the low nibbles of 64 bytes, the others in
// the high ones; the high bits are laid out as the quants of Q2_K. (q-32)·scale·d.
func dequantQ6K(dst []float32, src []byte) {
	low, high, scales := src[:128], src[128:192], src[192:208]
	d := half(src[208:])
	for i := range dst {
		within := i % 128
		q := low[i/128*64+within%64] >> (within / 64 * 4) & 0xf
		q |= high[i/128*32+within%32] >> (within / 32 * 2) & 3 << 4
		dst[i] = d * float32(int8(scales[i/16])) * float32(int(q)-32)
	}
}
