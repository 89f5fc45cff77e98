package tensor

import (
	"math"
	"slices"
	"strings"
	"testing"
)

func TestHalf(t *testing.T) {
	for bits, want := range map[uint16]float32{
		0x0000: 0, 0x3c00: 1, 0xc000: -2, 0x3555: 0.33325195, 0x7bff: 65504, 0xfbff: -65504,
		0x0400: 0x1p-14, 0x03ff: 0x3ffp-24, 0x0001: 0x1p-24, 0x8001: -0x1p-24,
		0x7c00: float32(math.Inf(1)), 0xfc00: float32(math.Inf(-1)),
	} {
		if got := half([]byte{byte(bits), byte(bits >> 8)}); got != want {
			t.Errorf("half(%#04x) = %v, want %v", bits, got, want)
		}
	}
	if got := half([]byte{0x01, 0x7e}); got == got {
		t.Errorf("half(NaN) = %v", got)
	}
	if got := half([]byte{0x00, 0x80}); got != 0 || !math.Signbit(float64(got)) {
		t.Errorf("half(-0) = %v", got)
	}
}

// Blocks whose elements can be worked out by hand. Package ggml compares all types
// with ggml's own code over random blocks.
func TestDequantizeByHand(t *testing.T) {
	one, two := "\x00\x3c", "\x00\x40" // f16
	fill := func(n int, x float32) []float32 { return slices.Repeat([]float32{x}, n) }
	tests := []struct {
		dtype DType
		src   string
		want  []float32
	}{
		{F32, "\x00\x00\xc0\x3f", []float32{1.5}},
		{F16, one + two, []float32{1, 2}},
		{BF16, "\xc0\x3f\x80\xbf", []float32{1.5, -1}},
		{Q8_0, two + strings.Repeat("\xff", 32), fill(32, -2)},
		{Q4_0, two + strings.Repeat("\xf0", 16), append(fill(16, -16), fill(16, 14)...)},
		{Q4_1, two + one + strings.Repeat("\xf0", 16), append(fill(16, 1), fill(16, 31)...)},
		{Q5_0, one + "\x00\x00\xff\xff" + strings.Repeat("\x10", 16), append(fill(16, -16), fill(16, 1)...)},
		{Q5_1, one + two + "\xff\xff\x00\x00" + strings.Repeat("\x10", 16), append(fill(16, 18), fill(16, 3)...)},
		{MXFP4, "\x80" + strings.Repeat("\x7f", 16), append(fill(16, -12), fill(16, 12)...)},
		{NVFP4, "\x38\x40\x00\x7f" + strings.Repeat("\x12", 32), slices.Concat(fill(8, 1), fill(8, 0.5), fill(8, 2), fill(8, 1), fill(32, 0))},
		{Q2_K, strings.Repeat("\x12", 16) + strings.Repeat("\xff", 64) + one + two, fill(256, 4)},
		{Q3_K, strings.Repeat("\xff", 32) + strings.Repeat("\xff", 64) + strings.Repeat("\x11", 8) + strings.Repeat("\xaa", 4) + one, fill(256, 3)},
		{Q4_K, two + one + "\x03\x03\x03\x03\x01\x01\x01\x01\x13\x13\x13\x13" + strings.Repeat("\x55", 128), fill(256, 29)},
		{Q5_K, two + one + "\x03\x03\x03\x03\x01\x01\x01\x01\x13\x13\x13\x13" + strings.Repeat("\xff", 32) + strings.Repeat("\x55", 128), fill(256, 125)},
		{Q6_K, strings.Repeat("\x11", 128) + strings.Repeat("\xaa", 64) + strings.Repeat("\xfd", 16) + two, fill(256, -6)},
	}
	for _, tt := range tests {
		got := make([]float32, len(tt.want))
		if err := tt.dtype.Dequantize(got, []byte(tt.src)); err != nil {
			t.Errorf("%v: %v", tt.dtype, err)
			continue
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%v = %v, want %v", tt.dtype, got, tt.want)
		}
	}
	if got := len(tests); got != len(Dequantisable()) {
		t.Errorf("%d of %d types are tested", got, len(Dequantisable()))
	}
}

func TestDequantizeRefuses(t *testing.T) {
	for _, tt := range []struct {
		name  string
		dtype DType
		elems int
		bytes int
	}{
		{"no dequantiser", IQ1S, 256, 50},
		{"unknown type", 99, 1, 1},
		{"part of a block", Q4_0, 31, 18},
		{"too few bytes", Q4_0, 64, 35},
		{"too many bytes", Q4_0, 32, 19},
	} {
		if err := tt.dtype.Dequantize(make([]float32, tt.elems), make([]byte, tt.bytes)); err == nil {
			t.Errorf("%s: no error", tt.name)
		}
	}
	if err := Q4_K.Dequantize(nil, nil); err != nil {
		t.Errorf("nothing: %v", err)
	}
}
