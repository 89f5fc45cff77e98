//go:build cgo

package ggml

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"kvasird/ggml/tensor"
)

func TestTypesAgree(t *testing.T) {
	for _, d := range tensor.DTypes() {
		got := typeTraits{d.String(), d.BlockSize(), d.BlockBytes()}
		if want := traitsOf(d); got != want {
			t.Errorf("type %d is %+v, ggml: %+v", d, got, want)
		}
	}
	const count = 43 // GGML_TYPE_COUNT of llama.cpp v0.5.0
	for n := range uint32(count) {
		if got, want := tensor.DType(n).Valid(), traitsOf(tensor.DType(n)).elems > 0; got != want {
			t.Errorf("type %d: valid is %v, for ggml %v", n, got, want)
		}
	}
}

// Every block is random bytes: all quants, scales and minima occur, also infinities
// and NaNs of the f16 scales.
func TestDequantizersAgree(t *testing.T) {
	const blocks = 4096
	rng := rand.NewChaCha8([32]byte{1})
	for _, d := range tensor.Dequantisable() {
		if d == tensor.F32 {
			continue // ggml has no conversion for it
		}
		src := make([]byte, blocks*d.BlockBytes())
		rng.Read(src)
		got := make([]float32, blocks*d.BlockSize())
		want := make([]float32, len(got))
		if err := d.Dequantize(got, src); err != nil {
			t.Fatal(err)
		}
		dequantize(d, want, src)
		compareFloats(t, d, got, want)
	}
	// All numbers of the two-byte floats, in order.
	for _, d := range []tensor.DType{tensor.F16, tensor.BF16} {
		var src []byte
		for n := range 1 << 16 {
			src = binary.LittleEndian.AppendUint16(src, uint16(n))
		}
		got, want := make([]float32, 1<<16), make([]float32, 1<<16)
		if err := d.Dequantize(got, src); err != nil {
			t.Fatal(err)
		}
		dequantize(d, want, src)
		compareFloats(t, d, got, want)
	}
}

// compareFloats wants equal bits, NaN being equal to NaN. Where ggml is compiled with
// fused multiply-add, types with a minimum may differ by the rounding of the product:
// there, 1e-6 of the block's largest element is allowed.
func compareFloats(t *testing.T, d tensor.DType, got, want []float32) {
	t.Helper()
	size := int(d.BlockSize())
	for i := range got {
		g, w := float64(got[i]), float64(want[i])
		if math.Float32bits(got[i]) == math.Float32bits(want[i]) || math.IsNaN(g) && math.IsNaN(w) {
			continue
		}
		block := want[i/size*size:][:size]
		if runtime.GOARCH != "amd64" && math.Abs(g-w) <= 1e-6*float64(max(slices.Max(block), -slices.Min(block))) {
			continue
		}
		t.Errorf("%v: element %d is %v, ggml: %v", d, i, got[i], want[i])
		return
	}
}
