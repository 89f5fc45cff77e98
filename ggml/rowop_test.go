//go:build cgo

package ggml

import (
	"math"
	"testing"
)

// Each operation against plain Go, and against what it must be by its nature.
func TestRowOp(t *testing.T) {
	rt := openRuntime(t)
	const width = 300
	x := make([]float32, 3*width)
	for i := range x {
		x[i] = float32(math.Sin(float64(i))) * float32(1+i%7)
	}
	for _, op := range []RowOp{RowSoftmax, RowNorm, RowRMSNorm} {
		got, err := rt.RowOp("", op, x, width)
		if err != nil {
			t.Fatal(err)
		}
		want, err := ReferenceRowOp(op, x, width)
		if err != nil {
			t.Fatal(err)
		}
		if d := relativeL2(got, want); !(d < 1e-6) {
			t.Errorf("%s differs from plain Go by %g", op, d)
		}
		var sum, squares float64
		for _, v := range want[:width] {
			sum, squares = sum+float64(v), squares+float64(v)*float64(v)
		}
		nature := map[RowOp]float64{RowSoftmax: sum - 1, RowNorm: math.Abs(sum) + squares/width - 1, RowRMSNorm: squares/width - 1}[op]
		if math.Abs(nature) > 1e-4 {
			t.Errorf("%s: off by %g", op, nature)
		}
	}
	for _, bad := range []struct {
		op    RowOp
		x     []float32
		width int
	}{{0, x, width}, {9, x, width}, {RowNorm, x, 299}, {RowNorm, nil, width}, {RowNorm, x, 0}} {
		if _, err := rt.RowOp("", bad.op, bad.x, bad.width); err == nil {
			t.Errorf("operation %d of %d f32 in rows of %d was not refused", bad.op, len(bad.x), bad.width)
		}
	}
	if _, err := rt.RowOp("TPU7", RowNorm, x, width); err == nil {
		t.Error("an unknown device was not refused")
	}
}
