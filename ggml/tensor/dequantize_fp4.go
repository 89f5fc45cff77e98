package tensor

import "math"

// e2m1 holds twice the values of the 4-bit float E2M1; the scales are halved instead.
var e2m1 = [16]float32{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}

// MXFP4: one E8M0 scale, 16 bytes of E2M1; element j is in the low nibble of byte j,
// element j+16 in the high one. The scale byte 255, NaN in the standard, is 2^127.
func dequantMXFP4(dst []float32, src []byte) {
	d := float32(math.Ldexp(1, int(src[0])-128))
	for j, q := range src[1:17] {
		dst[j] = e2m1[q&0xf] * d
		dst[j+16] = e2m1[q>>4] * d
	}
}

// NVFP4: four groups of 16 elements; first a UE4M3 scale for each, then 8 bytes of
// E2M1 for each, element j in the low nibble of byte j, element j+8 in the high one.
func dequantNVFP4(dst []float32, src []byte) {
	for g := range 4 {
		d := ue4m3Half(src[g])
		group := dst[16*g:]
		for j, q := range src[4+8*g : 12+8*g] {
			group[j] = e2m1[q&0xf] * d
			group[j+8] = e2m1[q>>4] * d
		}
	}
}

// ue4m3Half returns half of an unsigned float of 4 exponent bits (bias 7) and 3
// mantissa bits. NaN (0x7f) counts as 0, as in ggml; the top bit is ignored, but for
// 0xff, which ggml reads as 480.
func ue4m3Half(b byte) float32 {
	if b == 0 || b == 0x7f {
		return 0
	}
	exponent, mantissa := int(b>>3&0xf), float64(b&7)
	if exponent == 0 {
		return float32(math.Ldexp(mantissa, -9-1))
	}
	return float32(math.Ldexp(1+mantissa/8, exponent-7-1))
}
