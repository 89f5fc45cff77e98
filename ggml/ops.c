//go:build cgo

// One operation by itself, on one device.
#include "ops.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

static struct ggml_tensor * build(struct ggml_context * ctx, int op, struct ggml_tensor * x) {
    switch (op) {
        case KV_OP_SOFTMAX:
            return ggml_soft_max(ctx, x);
        case KV_OP_NORM:
            return ggml_norm(ctx, x, KV_OP_EPSILON);
        default:
            return ggml_rms_norm(ctx, x, KV_OP_EPSILON);
    }
}

static int compute(ggml_backend_t backend, struct ggml_context * ctx, int op, int width, int rows, const float * in, float * out) {
    struct ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, rows);
    struct ggml_tensor * y = build(ctx, op, x);
    struct ggml_cgraph * g = ggml_new_graph(ctx);
    if (!ggml_backend_supports_op(backend, y)) {
        return -2;
    }
    ggml_build_forward_expand(g, y);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (!buffer) {
        return -1;
    }
    ggml_backend_tensor_set(x, in, 0, ggml_nbytes(x));
    const int rc = ggml_backend_graph_compute(backend, g);
    if (rc == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(y, out, 0, ggml_nbytes(y));
    }
    ggml_backend_buffer_free(buffer);
    return rc;
}

// The library's default number of threads fights its neighbours.
static ggml_backend_t start(ggml_backend_dev_t dev) {
    ggml_backend_t backend = ggml_backend_dev_init(dev, NULL);
    ggml_backend_set_n_threads_t set_n = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
    if (backend && set_n) {
        set_n(backend, 1);
    }
    return backend;
}

int kv_op_run(size_t device, int op, int width, int rows, const float * in, float * out) {
    struct ggml_init_params params = { .mem_size = 8 * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true };
    ggml_backend_t          backend = start(ggml_backend_dev_get(device));
    struct ggml_context *   ctx     = ggml_init(params);
    const int rc = backend && ctx ? compute(backend, ctx, op, width, rows, in, out) : -1;
    if (ctx) {
        ggml_free(ctx);
    }
    if (backend) {
        ggml_backend_free(backend);
    }
    return rc;
}
