//go:build cgo

#include "boundary.h"

#include <string.h>

#include "ggml-backend.h"

// The positions are an input of the graph, so they are there before anything is
// computed; the first rotary operation of a ubatch shows them.
static void take_positions(struct kv_boundary * b, const struct ggml_tensor * t) {
    const struct ggml_tensor * pos = t->src[1];
    if (t->op != GGML_OP_ROPE || b->n_pos != b->n || !pos || pos->type != GGML_TYPE_I32 || !pos->data ||
        !pos->buffer || !ggml_backend_buffer_is_host(pos->buffer)) {
        return;
    }
    const int64_t tokens = ggml_nelements(pos) / b->pos_per_token;
    if (ggml_nelements(pos) != tokens * b->pos_per_token || tokens > b->capacity - b->n_pos) {
        return;
    }
    // of several positions per token the first ones lie together
    memcpy(b->pos + b->n_pos, pos->data, tokens * sizeof(int32_t));
    b->n_pos += tokens;
}

static bool take_rows(struct ggml_tensor * t, bool ask, void * data) {
    struct kv_boundary * b = data;
    const bool           here = strcmp(t->name, b->name) == 0;
    if (ask) {
        take_positions(b, t);
        return here;
    }
    const int64_t rows = ggml_nrows(t);
    if (t->type != GGML_TYPE_F32 || t->ne[0] != b->width || !ggml_is_contiguous(t) || rows > b->capacity - b->n) {
        b->error = 1;
        return true;
    }
    ggml_backend_tensor_get(t, b->rows + b->n * b->width, 0, ggml_nbytes(t));
    b->n += rows;
    for (; b->n_pos < b->n; b->n_pos++) {
        b->pos[b->n_pos] = -1; // this graph shows none
    }
    return true;
}

void kv_set_boundary(struct llama_context_params * params, struct kv_boundary * b) {
    params->cb_eval           = take_rows;
    params->cb_eval_user_data = b;
}
