// The part of the model generator that must be C: see generate.c.
#ifndef KVASIR_GENERATE_H
#define KVASIR_GENERATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gguf.h"
#include "llama.h"

struct kv_made_tensor {
    char    name[GGML_MAX_NAME];
    int64_t ne[GGML_MAX_DIMS];
};

// What the library asked data for. The caller frees at.
struct kv_made_list {
    struct kv_made_tensor * at;
    size_t n, cap;
    bool   out_of_memory;
};

// Makes a model with this metadata, lists its tensors, and frees it. Its memory
// is reserved and never touched. False: the library refused; its log says why.
bool kv_made_tensors(struct gguf_context * meta, struct kv_made_list * out);

#endif
