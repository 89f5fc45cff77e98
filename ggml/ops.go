//go:build cgo

package ggml

// #include "ops.h"
import "C"

import "fmt"

// RowOp computes one operation on each row of x, [·*width], on a device; "" is the CPU.
func (rt *Runtime) RowOp(device string, op RowOp, x []float32, width int) ([]float32, error) {
	if err := checkRows(op, x, width); err != nil {
		return nil, err
	}
	dev, err := rt.Device(device)
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(x))
	rc := C.kv_op_run(C.size_t(dev.Index), C.int(op), C.int(width), C.int(len(x)/width), (*C.float)(&x[0]), (*C.float)(&out[0]))
	if rc != 0 {
		return nil, fmt.Errorf("%s on %s failed with status %d", op, dev.Name, int(rc))
	}
	return out, nil
}
