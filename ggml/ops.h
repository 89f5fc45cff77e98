// One operation by itself: see ops.go.
#ifndef KVASIR_OPS_H
#define KVASIR_OPS_H

#include <stddef.h>

enum { KV_OP_SOFTMAX = 1, KV_OP_NORM = 2, KV_OP_RMS_NORM = 3 };
#define KV_OP_EPSILON 1e-6f

// out = op(in), both [rows][width]. Returns 0, -1 without memory or device, -2 where the
// device does not compute it, or a ggml_status.
int kv_op_run(size_t device, int op, int width, int rows, const float * in, float * out);

#endif
