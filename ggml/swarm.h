// The swarm device: a ggml backend to which llama.cpp's scheduler hands the
// expert part of each layer. See swarm.c.
#ifndef KVASIR_SWARM_H
#define KVASIR_SWARM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"

enum {
    KV_MAX_OPS     = 32,
    KV_MAX_WEIGHTS = 16,
    KV_NAME        = 64,
};

// One operation of a split. Values: 0 is the input row, i+1 the result of ops[i].
// The layout has no padding, so that two splits compare with memcmp.
struct kv_op {
    int32_t op;        // enum ggml_op
    int32_t a, b;      // values
    int32_t weight;    // index into kv_split.weights, or -1
    int32_t width;     // f32 per pair of the result
    int32_t offset;    // GGML_OP_VIEW: first f32
    int32_t params[4]; // the first op_params
};

// A split: the expert part of one layer and one ubatch.
struct kv_split {
    uintptr_t model;   // handle of the Go model
    uintptr_t context; // handle of the Go context, 0 outside Decode
    int32_t   layer;
    int32_t   n_ops;
    int32_t   n_weights;
    int32_t   row_width;
    int32_t   rows_per_token;
    int32_t   used;
    int32_t   tokens;
    int32_t   out_width;
    const float *   rows; // [tokens * rows_per_token * row_width]
    const int32_t * ids;  // [tokens * used]
    float *         out;  // [tokens * used * out_width]
    const float *   router; // [tokens * used] weights of the sum, NULL: the split ends with out
    float *         sum;    // [tokens * out_width]
    int32_t         summed; // Go filled sum and not out
    int32_t         unused;
    struct kv_op    ops[KV_MAX_OPS];
    char            weights[KV_MAX_WEIGHTS][KV_NAME]; // after "blk.L."
    char            error[192]; // why the split cannot be read, or empty
};

// Registers the device once per process.
void kv_swarm_register(void);

// A buffer type for the experts of one model; free it after the model. With holes none of
// their bytes are read while the model is loaded: kv_swarm_buft_loaded says when it is.
ggml_backend_buffer_type_t kv_swarm_buft_new(uintptr_t model, bool holes);
void                       kv_swarm_buft_loaded(ggml_backend_buffer_type_t buft);
void                       kv_swarm_buft_free(ggml_backend_buffer_type_t buft);

// The context that the next llama_init_from_model belongs to. Callers hold a lock.
void kv_swarm_set_context(uintptr_t context);

#endif
