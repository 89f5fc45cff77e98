package ggml

import (
	"fmt"
	"math"
)

// RowOp is an operation of a backbone on one row by itself, which is no part of an
// expert Program. It is here to be measured.
type RowOp int

// The operations, each with epsilon 1e-6 where it has one.
const (
	RowSoftmax RowOp = iota + 1
	RowNorm
	RowRMSNorm
)

func (op RowOp) String() string {
	return [...]string{"", "softmax", "norm", "rms_norm"}[op]
}

const rowEpsilon = float64(float32(1e-6))

func checkRows(op RowOp, x []float32, width int) error {
	if op < RowSoftmax || op > RowRMSNorm || width <= 0 || len(x) == 0 || len(x)%width != 0 {
		return fmt.Errorf("row operation %d of %d f32 in rows of %d", op, len(x), width)
	}
	return nil
}

// ReferenceRowOp computes Runtime.RowOp in plain Go with sums in float64.
func ReferenceRowOp(op RowOp, x []float32, width int) ([]float32, error) {
	if err := checkRows(op, x, width); err != nil {
		return nil, err
	}
	out := make([]float32, len(x))
	for at := 0; at < len(x); at += width {
		row, to := x[at:at+width], out[at:at+width]
		var top, sum, squares, exps = math.Inf(-1), 0.0, 0.0, 0.0
		for _, v := range row {
			top, sum, squares = max(top, float64(v)), sum+float64(v), squares+float64(v)*float64(v)
		}
		n := float64(width)
		mean := sum / n
		spread := 0.0
		for _, v := range row {
			exps += math.Exp(float64(v) - top)
			spread += (float64(v) - mean) * (float64(v) - mean)
		}
		for i, v := range row {
			switch op {
			case RowSoftmax:
				to[i] = float32(math.Exp(float64(v)-top) / exps)
			case RowNorm:
				to[i] = float32((float64(v) - mean) / math.Sqrt(spread/n+rowEpsilon))
			case RowRMSNorm:
				to[i] = float32(float64(v) / math.Sqrt(squares/n+rowEpsilon))
			}
		}
	}
	return out, nil
}
