// The expert kernel: runs an expert program on any ggml backend. See kernel.c.
#ifndef KVASIR_KERNEL_H
#define KVASIR_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml-backend.h"
#include "ggml.h"

enum { KV_KERNEL_MAX_OPS = 32, KV_KERNEL_MAX_WEIGHTS = 16 };

struct kv_kernel;
struct kv_bank;
struct kv_program;

// One weight of a bank: [ne0, ne1, experts], [ne0, experts] or [experts].
struct kv_weight_desc {
    const char * name;
    int32_t      type; // enum ggml_type
    int32_t      n_dims;
    int64_t      ne[3];
};

// An operation, checked by Go against the bank before it comes here.
struct kv_step {
    int32_t op; // enum ggml_op; GGML_OP_GET_ROWS picks one f32 per expert
    int32_t a, b;
    int32_t weight;
    int32_t offset, width;
    int32_t act;   // enum ggml_unary_op or ggml_glu_op
    int32_t fused; // GLU on the halves of a
    int32_t swap;
    float   f[2];
    int32_t prec[2];
};

// A kernel on the device with this index. Returns NULL when the backend cannot start.
struct kv_kernel * kv_kernel_new(size_t device, int n_threads);
void               kv_kernel_free(struct kv_kernel * k);

// A bank holds one layer's slice of experts. repack allows the CPU's own layouts.
// used: experts per token, with which backends are asked whether they can.
struct kv_bank * kv_bank_new(struct kv_kernel * k, const struct kv_weight_desc * w, int n, int used, bool repack);
void             kv_bank_free(struct kv_bank * b);
// The bytes of such a bank, 0 without memory to tell.
size_t           kv_bank_plan(struct kv_kernel * k, const struct kv_weight_desc * w, int n, int used, bool repack);
// Gives memory that was freed back to the system.
void             kv_memory_trim(void);
// Sets all bytes of weight i.
void             kv_bank_set(struct kv_bank * b, int i, const void * data, size_t size);
size_t           kv_bank_bytes(const struct kv_bank * b);
// How many of the bank's weights are in a layout of the backend's own.
int              kv_bank_repacked(const struct kv_bank * b);

// A program over a bank; it keeps the graphs of the sizes that come often. Free it
// before its bank. NULL without memory.
struct kv_program * kv_program_new(struct kv_kernel * k, struct kv_bank * b, const struct kv_step * steps, int n_steps, int row_width);
void                kv_program_free(struct kv_program * p);

// The first step that the backend cannot compute, n_steps when it can all, -1 without memory.
int kv_program_check(struct kv_program * p);

// out[i] = program(rows[row[i]], expert[i]) for i < n; expert ids are the bank's.
// Returns 0, or -1 with no memory, or a ggml_status.
int kv_program_compute(struct kv_program * p, const float * rows, const int32_t * row, const int32_t * expert, int n, float * out);

#endif
