// Reading the rows between two layers while a batch is decoded.
#ifndef KVASIR_BOUNDARY_H
#define KVASIR_BOUNDARY_H

#include "llama.h"

enum { KV_NAME_MAX = 64 };

// What one decode leaves: the rows of the named node, ubatch after ubatch, in the order
// in which the library took the tokens.
struct kv_boundary {
    char      name[KV_NAME_MAX];
    float *   rows;     // [capacity * width]
    int32_t * pos;      // [capacity] as the graph has them, -1 where it does not show them
    int64_t   width, capacity;
    int64_t   n;        // rows so far; set to 0 before a decode
    int64_t   n_pos;    // positions so far
    int32_t   pos_per_token;
    int32_t   error;    // the node is not [width, tokens] f32, or there are more than capacity
};

void kv_set_boundary(struct llama_context_params * params, struct kv_boundary * b);

#endif
