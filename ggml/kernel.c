//go:build cgo

#define _GNU_SOURCE
// The expert kernel. A pair is a row with one expert, and a token's experts may be
// spread unevenly over workers. Where every row has the same number u of pairs the
// graph is llama.cpp's own: rows [width, 1, n/u], ids [u, n/u]. Else every pair is
// given a copy of its row, u = 1. The sums are the same, since a matrix-vector
// product does not depend on the rows beside it.
#include "kernel.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <unistd.h>

#include "ggml-alloc.h"
#include "ggml-cpu.h"

struct kv_kernel {
    ggml_backend_t          backend;
    ggml_backend_dev_t      dev;
    ggml_threadpool_t       pool;
    void (*pool_free)(ggml_threadpool_t);
    ggml_backend_buffer_t   scratch;    // the activations of one compute
    int64_t                 generation; // of scratch: graphs placed in an older one are void
};

// A graph of one size: n pairs, u for each row.
struct kv_graph {
    int                   n, u;
    int64_t               generation;
    struct ggml_context * ctx;
    void *                meta; // ggml's bookkeeping of it
    struct ggml_cgraph *  graph;
    struct ggml_tensor *  x;
    struct ggml_tensor *  ids;
    struct ggml_tensor *  out;
};

// Sizes above KEPT_PAIRS are rare and their compute is long: they share one slot.
enum { KEPT = 8, KEPT_PAIRS = 64 };

struct kv_program {
    struct kv_kernel * kernel;
    struct kv_bank *   bank;
    struct kv_step     steps[KV_KERNEL_MAX_OPS];
    int                n_steps;
    int                row_width;
    struct kv_graph    kept[KEPT + 1];
    int                next; // of kept to give up
};

struct kv_bank {
    struct ggml_context * ctx;
    struct ggml_tensor *  weight[KV_KERNEL_MAX_WEIGHTS];
    ggml_backend_buffer_t buffer[KV_KERNEL_MAX_WEIGHTS];
    int                   n;
    int                   repacked;
};

// ---- kernel ----

// The CPU backend would make threads for every graph; one pool is kept instead.
static void set_threads(struct kv_kernel * k, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(k->dev);
    ggml_backend_set_n_threads_t set_n =
        (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set_n) {
        set_n(k->backend, n_threads);
    }
    struct ggml_threadpool * (*pool_new)(struct ggml_threadpool_params *) =
        (struct ggml_threadpool * (*)(struct ggml_threadpool_params *)) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new");
    void (*set_pool)(ggml_backend_t, ggml_threadpool_t) =
        (void (*)(ggml_backend_t, ggml_threadpool_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_threadpool");
    k->pool_free = (void (*)(ggml_threadpool_t)) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free");
    if (ggml_backend_dev_type(k->dev) != GGML_BACKEND_DEVICE_TYPE_CPU || !pool_new || !set_pool || !k->pool_free) {
        return;
    }
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    k->pool = pool_new(&params);
    if (k->pool) {
        set_pool(k->backend, k->pool);
    }
}

struct kv_kernel * kv_kernel_new(size_t device, int n_threads) {
    if (device >= ggml_backend_dev_count()) {
        return NULL;
    }
    struct kv_kernel * k = calloc(1, sizeof(*k));
    if (!k) {
        return NULL;
    }
    k->dev     = ggml_backend_dev_get(device);
    k->backend = ggml_backend_dev_init(k->dev, NULL);
    if (!k->backend) {
        kv_kernel_free(k);
        return NULL;
    }
    set_threads(k, n_threads);
    return k;
}

void kv_kernel_free(struct kv_kernel * k) {
    if (!k) {
        return;
    }
    ggml_backend_buffer_free(k->scratch);
    if (k->backend) {
        ggml_backend_free(k->backend);
    }
    if (k->pool) {
        k->pool_free(k->pool);
    }
    free(k);
}

// ---- weights ----

// Whether the backend multiplies w when it lies in buffers of this type.
static bool can_hold(struct kv_kernel * k, ggml_backend_buffer_type_t buft, const struct kv_weight_desc * w, int used) {
    struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * 8, .no_alloc = true };
    struct ggml_context *   ctx    = ggml_init(params);
    if (!ctx) {
        return false;
    }
    struct ggml_tensor * t   = ggml_new_tensor_3d(ctx, w->type, w->ne[0], w->ne[1], w->ne[2]);
    struct ggml_tensor * x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w->ne[0], used, 512);
    struct ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, 512);
    struct ggml_tensor * op  = ggml_mul_mat_id(ctx, t, x, ids);
    t->buffer = ggml_backend_buft_alloc_buffer(buft, 0);
    const bool ok = t->buffer && ggml_backend_dev_supports_op(k->dev, op);
    ggml_backend_buffer_free(t->buffer);
    ggml_free(ctx);
    return ok;
}

// The layouts of the backend's own come first, as in llama.cpp's loader: with
// the same layout as the whole model's the sums are the same bit for bit.
static ggml_backend_buffer_type_t choose_buft(struct kv_kernel * k, const struct kv_weight_desc * w, int used, bool repack) {
    ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(k->dev), "ggml_backend_dev_get_extra_bufts");
    if (repack && w->n_dims == 3 && extra) {
        for (ggml_backend_buffer_type_t * b = extra(k->dev); b && *b; b++) {
            if (can_hold(k, *b, w, used)) {
                return *b;
            }
        }
    }
    return ggml_backend_dev_buffer_type(k->dev);
}

// Experts are read once per token from end to end, tens of megabytes of them: with
// large pages a core spends less of that time on address translation.
static void use_large_pages(struct kv_kernel * k, ggml_backend_buffer_t buffer) {
#ifdef MADV_HUGEPAGE
    if (ggml_backend_dev_type(k->dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t base  = (uintptr_t) ggml_backend_buffer_get_base(buffer);
        const uintptr_t begin = (base + page - 1) & ~(page - 1);
        const uintptr_t end   = (base + ggml_backend_buffer_get_size(buffer)) & ~(page - 1);
        if (end > begin) {
            madvise((void *) begin, end - begin, MADV_HUGEPAGE); // advice: refusal costs speed only
        }
    }
#else
    (void) k;
    (void) buffer;
#endif
}

// The bytes to ask of a buffer for t; padding, since kernels may read past the last row.
static size_t weight_bytes(ggml_backend_buffer_type_t buft, const struct ggml_tensor * t) {
    return ggml_backend_buft_get_alloc_size(buft, t) + 512;
}

size_t kv_bank_plan(struct kv_kernel * k, const struct kv_weight_desc * w, int n, int used, bool repack) {
    struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * (n + 1), .no_alloc = true };
    struct ggml_context *   ctx    = ggml_init(params);
    if (!ctx) {
        return 0;
    }
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        bytes += weight_bytes(choose_buft(k, &w[i], used, repack), ggml_new_tensor(ctx, w[i].type, w[i].n_dims, w[i].ne));
    }
    ggml_free(ctx);
    return bytes;
}

struct kv_bank * kv_bank_new(struct kv_kernel * k, const struct kv_weight_desc * w, int n, int used, bool repack) {
    if (n > KV_KERNEL_MAX_WEIGHTS) {
        return NULL;
    }
    struct kv_bank *        b      = calloc(1, sizeof(*b));
    struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * (n + 1), .no_alloc = true };
    if (!b || !(b->ctx = ggml_init(params))) {
        kv_bank_free(b);
        return NULL;
    }
    for (int i = 0; i < n; i++) {
        struct ggml_tensor * t = ggml_new_tensor(b->ctx, w[i].type, w[i].n_dims, w[i].ne);
        ggml_set_name(t, w[i].name);
        ggml_backend_buffer_type_t buft = choose_buft(k, &w[i], used, repack);
        b->buffer[i] = ggml_backend_buft_alloc_buffer(buft, weight_bytes(buft, t));
        b->weight[i] = t;
        b->n         = i + 1;
        if (!b->buffer[i]) {
            kv_bank_free(b);
            return NULL;
        }
        use_large_pages(k, b->buffer[i]);
        ggml_backend_buffer_set_usage(b->buffer[i], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        if (ggml_backend_tensor_alloc(b->buffer[i], t, ggml_backend_buffer_get_base(b->buffer[i])) != GGML_STATUS_SUCCESS) {
            kv_bank_free(b);
            return NULL;
        }
        b->repacked += t->extra != NULL;
    }
    return b;
}

void kv_bank_set(struct kv_bank * b, int i, const void * data, size_t size) {
    ggml_backend_tensor_set(b->weight[i], data, 0, size);
}

size_t kv_bank_bytes(const struct kv_bank * b) {
    size_t n = 0;
    for (int i = 0; i < b->n; i++) {
        n += ggml_backend_buffer_get_size(b->buffer[i]);
    }
    return n;
}

int kv_bank_repacked(const struct kv_bank * b) {
    return b->repacked;
}

void kv_bank_free(struct kv_bank * b) {
    if (!b) {
        return;
    }
    for (int i = 0; i < b->n; i++) {
        ggml_backend_buffer_free(b->buffer[i]);
    }
    if (b->ctx) {
        ggml_free(b->ctx);
    }
    free(b);
}

void kv_memory_trim(void) {
#ifdef __GLIBC__
    malloc_trim(0); // the C library keeps freed blocks of up to 32 MB for itself otherwise
#endif
}

// ---- compute ----

struct build {
    struct ggml_context * ctx;
    struct ggml_tensor *  ids;
    struct ggml_tensor *  value[KV_KERNEL_MAX_OPS + 1];
};

static struct ggml_tensor * unary(struct ggml_context * ctx, struct ggml_tensor * a, int act) {
    return ggml_unary(ctx, a, (enum ggml_unary_op) act);
}

static struct ggml_tensor * glu(struct build * g, const struct kv_step * s) {
    struct ggml_tensor * a = g->value[s->a];
    struct ggml_tensor * b = g->value[s->b];
    if (s->fused) {
        return ggml_glu(g->ctx, a, (enum ggml_glu_op) s->act, s->swap);
    }
    switch (s->act) {
        case GGML_GLU_OP_SWIGLU_OAI:
            return ggml_swiglu_oai(g->ctx, a, b, s->f[0], s->f[1]);
        case GGML_GLU_OP_SWIGLU_CLAMP:
            return ggml_swiglu_clamp(g->ctx, a, b, s->f[1]);
        default:
            return ggml_glu_split(g->ctx, a, b, (enum ggml_glu_op) s->act);
    }
}

static struct ggml_tensor * matmul(struct build * g, const struct kv_step * s, struct ggml_tensor * w) {
    struct ggml_tensor * t = ggml_mul_mat_id(g->ctx, w, g->value[s->a], g->ids);
    if (s->prec[0]) {
        ggml_prec_set_acc(t, (enum ggml_prec) s->prec[0]);
    }
    if (s->prec[1]) {
        ggml_prec_set_src(t, (enum ggml_prec) s->prec[1], 1);
    }
    return t;
}

static struct ggml_tensor * step(struct build * g, const struct kv_step * s, struct kv_bank * b) {
    struct ggml_tensor * a = g->value[s->a];
    switch (s->op) {
        case GGML_OP_MUL_MAT_ID:
            return matmul(g, s, b->weight[s->weight]);
        case GGML_OP_ADD_ID:
            return ggml_add_id(g->ctx, a, b->weight[s->weight], g->ids);
        case GGML_OP_GET_ROWS: { // one f32 per expert: [1, experts] by [pairs] -> [1, u, pairs/u]
            struct ggml_tensor * w   = b->weight[s->weight];
            struct ggml_tensor * ids = ggml_reshape_1d(g->ctx, g->ids, ggml_nelements(g->ids));
            struct ggml_tensor * t   = ggml_get_rows(g->ctx, ggml_reshape_2d(g->ctx, w, 1, w->ne[0]), ids);
            return ggml_reshape_3d(g->ctx, t, 1, g->ids->ne[0], g->ids->ne[1]);
        }
        case GGML_OP_GLU:
            return glu(g, s);
        case GGML_OP_UNARY:
            return unary(g->ctx, a, s->act);
        case GGML_OP_MUL:
            return ggml_mul(g->ctx, a, g->value[s->b]);
        case GGML_OP_SCALE:
            return ggml_scale_bias(g->ctx, a, s->f[0], s->f[1]);
        case GGML_OP_CLAMP:
            return ggml_clamp(g->ctx, a, s->f[0], s->f[1]);
        case GGML_OP_SQR:
            return ggml_sqr(g->ctx, a);
        default: // GGML_OP_VIEW
            return ggml_view_3d(g->ctx, a, s->width, a->ne[1], a->ne[2], a->nb[1], a->nb[2], (size_t) s->offset * sizeof(float));
    }
}

// Places every tensor of the graph that has no memory yet, one after the other.
static bool place(struct kv_kernel * k, struct ggml_context * ctx) {
    ggml_backend_buffer_type_t buft  = ggml_backend_dev_buffer_type(k->dev);
    const size_t               align = ggml_backend_buft_get_alignment(buft);
    size_t                     need  = 0;
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (!t->view_src && !t->buffer) {
            need += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), align);
        }
    }
    if (!k->scratch || ggml_backend_buffer_get_size(k->scratch) < need) {
        ggml_backend_buffer_free(k->scratch);
        k->scratch = ggml_backend_buft_alloc_buffer(buft, need + need / 4 + align);
        k->generation++;
        if (!k->scratch) {
            return false;
        }
    }
    char * at = ggml_backend_buffer_get_base(k->scratch);
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        enum ggml_status st = GGML_STATUS_SUCCESS;
        if (t->view_src) {
            st = t->buffer ? st : ggml_backend_view_init(t);
        } else if (!t->buffer) {
            st = ggml_backend_tensor_alloc(k->scratch, t, at);
            at += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), align);
        }
        if (st != GGML_STATUS_SUCCESS) {
            return false;
        }
    }
    return true;
}

// How many pairs each row has, when it is the same number for all and they lie
// row by row; else 1.
static int pairs_per_row(const int32_t * row, int n) {
    int u = 1;
    while (u < n && row[u] == row[0]) {
        u++;
    }
    for (int i = u; i < n; i++) {
        if (i % u != 0 && row[i] != row[i - 1]) {
            return 1;
        }
    }
    return n % u == 0 ? u : 1;
}

// Gives x the rows of every u-th pair.
static void set_rows(struct ggml_tensor * x, const float * rows, int width, const int32_t * row, int u, int n) {
    const size_t bytes = (size_t) width * sizeof(float);
    if (ggml_backend_buffer_is_host(x->buffer)) {
        for (int i = 0; i < n; i += u) {
            memcpy((char *) x->data + i / u * bytes, rows + (size_t) row[i] * width, bytes);
        }
        return;
    }
    for (int i = 0; i < n; i += u) {
        ggml_backend_tensor_set(x, rows + (size_t) row[i] * width, i / u * bytes, bytes);
    }
}

static void graph_free(struct kv_graph * g) {
    ggml_free(g->ctx);
    free(g->meta);
    *g = (struct kv_graph) { 0 };
}

// Builds the program as a ggml graph. values, if given, gets the result of every step.
static bool graph_build(struct kv_graph * g, struct kv_program * p, int u, int n, struct ggml_tensor ** values) {
    const size_t size = ggml_tensor_overhead() * (4 * p->n_steps + 4) + ggml_graph_overhead_custom(2 * KV_KERNEL_MAX_OPS, false);
    g->meta = malloc(size);
    if (!g->meta) {
        return false;
    }
    struct ggml_init_params params = { .mem_size = size, .mem_buffer = g->meta, .no_alloc = true };
    g->ctx = ggml_init(params);
    if (!g->ctx) {
        return false;
    }
    g->x   = ggml_new_tensor_3d(g->ctx, GGML_TYPE_F32, p->row_width, 1, n / u);
    g->ids = ggml_new_tensor_2d(g->ctx, GGML_TYPE_I32, u, n / u);
    struct build b = { .ctx = g->ctx, .ids = g->ids };
    b.value[0] = g->x;
    for (int i = 0; i < p->n_steps; i++) {
        b.value[i + 1] = step(&b, &p->steps[i], p->bank);
    }
    if (values) {
        memcpy(values, b.value + 1, p->n_steps * sizeof(*values));
    }
    g->out   = b.value[p->n_steps];
    g->graph = ggml_new_graph_custom(g->ctx, 2 * KV_KERNEL_MAX_OPS, false);
    ggml_build_forward_expand(g->graph, g->out);
    g->n = n;
    g->u = u;
    return true;
}

// The graph for this size, placed in the kernel's scratch; NULL without memory.
static struct kv_graph * graph_for(struct kv_program * p, int u, int n) {
    struct kv_graph * g = &p->kept[KEPT];
    if (n <= KEPT_PAIRS) {
        for (int i = 0; i < KEPT; i++) {
            if (p->kept[i].n == n && p->kept[i].u == u && p->kept[i].generation == p->kernel->generation) {
                return &p->kept[i];
            }
        }
        g       = &p->kept[p->next];
        p->next = (p->next + 1) % KEPT;
    }
    graph_free(g);
    if (!graph_build(g, p, u, n, NULL) || !place(p->kernel, g->ctx)) {
        graph_free(g);
        return NULL;
    }
    g->generation = p->kernel->generation;
    return g;
}

struct kv_program * kv_program_new(struct kv_kernel * k, struct kv_bank * b, const struct kv_step * steps, int n_steps, int row_width) {
    struct kv_program * p = calloc(1, sizeof(*p));
    if (!p || n_steps > KV_KERNEL_MAX_OPS) {
        free(p);
        return NULL;
    }
    p->kernel    = k;
    p->bank      = b;
    p->n_steps   = n_steps;
    p->row_width = row_width;
    memcpy(p->steps, steps, n_steps * sizeof(*steps));
    return p;
}

void kv_program_free(struct kv_program * p) {
    if (p) {
        for (int i = 0; i <= KEPT; i++) {
            graph_free(&p->kept[i]);
        }
        free(p);
    }
}

int kv_program_check(struct kv_program * p) {
    if (!p) {
        return -1;
    }
    struct kv_graph      g = { 0 };
    struct ggml_tensor * values[KV_KERNEL_MAX_OPS];
    int unsupported = graph_build(&g, p, 2, 4, values) ? p->n_steps : -1;
    for (int i = 0; i < p->n_steps && unsupported == p->n_steps; i++) {
        if (values[i]->op != GGML_OP_VIEW && !ggml_backend_dev_supports_op(p->kernel->dev, values[i])) {
            unsupported = i;
        }
    }
    graph_free(&g);
    return unsupported;
}

int kv_program_compute(struct kv_program * p, const float * rows, const int32_t * row, const int32_t * expert, int n, float * out) {
    const int         u = pairs_per_row(row, n);
    struct kv_graph * g = graph_for(p, u, n);
    if (!g) {
        return -1;
    }
    set_rows(g->x, rows, p->row_width, row, u, n);
    ggml_backend_tensor_set(g->ids, expert, 0, (size_t) n * sizeof(int32_t));
    const int rc = ggml_backend_graph_compute(p->kernel->backend, g->graph);
    if (rc == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(g->out, out, 0, ggml_nbytes(g->out));
    }
    return rc;
}
