//go:build cgo

#include "trace.h"

#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"

// Exported by Go.
extern void kvTrace(uintptr_t handle, char * name, int is_int, int64_t width, int64_t rows, void * data);

static bool wanted(const char * name) {
    return strncmp(name, "l_out-", 6) == 0 || strncmp(name, "ffn_moe_topk-", 13) == 0;
}

// The experts that a router chose are a view of all of them: row by row.
static bool take(struct ggml_tensor * t, bool ask, void * data) {
    if (ask || !wanted(t->name)) {
        return wanted(t->name);
    }
    const int64_t width = t->ne[0], rows = t->ne[1];
    const size_t  bytes = (size_t) width * 4;
    if ((t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_I32) || ggml_nrows(t) != rows || t->nb[0] != 4) {
        return true;
    }
    char * copy = malloc(bytes * rows + 1);
    if (copy) {
        for (int64_t r = 0; r < rows; r++) {
            ggml_backend_tensor_get(t, copy + r * bytes, r * t->nb[1], bytes);
        }
        kvTrace((uintptr_t) data, t->name, t->type == GGML_TYPE_I32, width, rows, copy);
        free(copy);
    }
    return true;
}

void kv_set_trace(struct llama_context_params * params, uintptr_t handle) {
    params->cb_eval           = take;
    params->cb_eval_user_data = (void *) handle;
}
