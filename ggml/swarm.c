//go:build cgo

// The swarm device. Its method, measured for every MoE architecture of
// llama.cpp v0.5.0: expert weights live in a buffer type of ours, which only
// this device supports; so the scheduler gives it the operations over them, in
// one run per layer ("split"), whose only inputs are the rows, the chosen ids
// and the router's weights. The device reads the split as a short program and
// asks Go to compute it.
//
// Where the graph goes on with the product by those weights and the sum over a
// token's experts, the split has these too ("tail"): they are computed here,
// as the graph says, unless Go has done it.
//
// No expert is computed here. The weights' buffer is reserved address space.
//
// A load reads a tensor that is not in host memory into a new buffer of its size first:
// gigabytes of pages for experts that nobody looks at. So while a model is loaded whose
// experts are holes, its buffers say that they are host memory, and all of their tensors
// lie in one window, which is read into again and again.
#include "swarm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ggml-backend-impl.h"

// Exported by Go: 0 when out is filled.
extern int kvExperts(struct kv_split * split);

static const char * SWARM = "kvasir-swarm";

static struct ggml_backend_reg    swarm_reg;
static struct ggml_backend_device swarm_dev;
static uintptr_t                  next_context;

// ---- buffer type: addresses without memory ----

struct window {
    void * base;
    size_t size;
};

enum { MAX_WINDOWS = 8 }; // each is larger than those before it

struct swarm_buft {
    struct ggml_backend_buffer_type type; // first, so that a pointer to it is one to this
    bool          loading;                // its tensors lie in windows
    struct window window[MAX_WINDOWS];
    int           n_windows;
};

static const char * buft_name(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return SWARM;
}

static bool is_ours(const struct ggml_tensor * t) {
    const struct ggml_tensor * base = t->view_src ? t->view_src : t;
    return base->buffer && base->buffer->buft->iface.get_name == buft_name;
}

static void buffer_free(ggml_backend_buffer_t buffer) {
    munmap(buffer->context, buffer->size);
}

static void * buffer_base(ggml_backend_buffer_t buffer) {
    return buffer->context;
}

static void buffer_memset(ggml_backend_buffer_t b, struct ggml_tensor * t, uint8_t v, size_t off, size_t n) {
    (void) b; (void) t; (void) v; (void) off; (void) n;
}

static void buffer_set(ggml_backend_buffer_t b, struct ggml_tensor * t, const void * data, size_t off, size_t n) {
    (void) b; (void) t; (void) data; (void) off; (void) n;
}

// The bytes are elsewhere. NaN, so that a reader is noticed.
static void buffer_get(ggml_backend_buffer_t b, const struct ggml_tensor * t, void * data, size_t off, size_t n) {
    (void) b; (void) t; (void) off;
    memset(data, 0xff, n);
}

static void buffer_clear(ggml_backend_buffer_t b, uint8_t v) {
    (void) b; (void) v;
}

static void * reserve(size_t n, int prot) {
    void * base = mmap(NULL, n, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

// The window for a tensor of n bytes; NULL when there is no memory for one.
static void * window_of(struct swarm_buft * b, size_t n) {
    if (b->n_windows > 0 && b->window[b->n_windows - 1].size >= n) {
        return b->window[b->n_windows - 1].base;
    }
    void * base = b->n_windows < MAX_WINDOWS ? reserve(n, PROT_READ | PROT_WRITE) : NULL;
    if (base) {
        b->window[b->n_windows++] = (struct window) { base, n };
    }
    return base;
}

static enum ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * t) {
    struct swarm_buft * b = (struct swarm_buft *) buffer->buft;
    if (b->loading && !t->view_src) {
        void * base = window_of(b, ggml_nbytes(t));
        if (base) {
            t->data = base;
        } else {
            b->loading = false; // then they are read as those of a device are: slower, and as right
        }
    }
    return GGML_STATUS_SUCCESS;
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t n    = size ? size : 64;
    void *       base = reserve(n, PROT_NONE);
    if (!base) {
        return NULL;
    }
    const struct ggml_backend_buffer_i iface = {
        .free_buffer   = buffer_free,
        .get_base      = buffer_base,
        .init_tensor   = buffer_init_tensor,
        .memset_tensor = buffer_memset,
        .set_tensor    = buffer_set,
        .get_tensor    = buffer_get,
        .clear         = buffer_clear,
    };
    return ggml_backend_buffer_init(buft, iface, base, n);
}

static size_t buft_alignment(ggml_backend_buffer_type_t buft) {
    (void) buft;
    return 64;
}

static bool buft_is_host(ggml_backend_buffer_type_t buft) {
    return ((struct swarm_buft *) buft)->loading;
}

ggml_backend_buffer_type_t kv_swarm_buft_new(uintptr_t model, bool holes) {
    struct swarm_buft * b = calloc(1, sizeof(*b));
    if (!b) {
        return NULL;
    }
    b->type.iface = (struct ggml_backend_buffer_type_i) {
        .get_name      = buft_name,
        .alloc_buffer  = buft_alloc,
        .get_alignment = buft_alignment,
        .is_host       = buft_is_host,
    };
    b->type.device  = &swarm_dev;
    b->type.context = (void *) model;
    b->loading      = holes;
    return &b->type;
}

void kv_swarm_buft_loaded(ggml_backend_buffer_type_t buft) {
    struct swarm_buft * b = (struct swarm_buft *) buft;
    b->loading = false;
    for (int i = 0; i < b->n_windows; i++) {
        madvise(b->window[i].base, b->window[i].size, MADV_DONTNEED);
        mprotect(b->window[i].base, b->window[i].size, PROT_NONE); // a reader is noticed
    }
}

void kv_swarm_buft_free(ggml_backend_buffer_type_t buft) {
    struct swarm_buft * b = (struct swarm_buft *) buft;
    for (int i = 0; i < b->n_windows; i++) {
        munmap(b->window[i].base, b->window[i].size);
    }
    free(b);
}

// ---- which nodes are the experts' ----

// A node is the experts' when it is derived from their weights by operations
// per (row, expert) pair. What mixes pairs (the weighting by the router, the
// sum) has a source that is not, and so ends the chain.
static bool in_chain(const struct ggml_tensor * t) {
    if (!t) {
        return false;
    }
    const struct ggml_tensor * a = t->src[0];
    const struct ggml_tensor * b = t->src[1];
    switch (t->op) {
        case GGML_OP_NONE:
            return is_ours(t);
        case GGML_OP_MUL_MAT_ID:
            return is_ours(a);
        case GGML_OP_ADD_ID:
            return in_chain(a) && is_ours(b);
        case GGML_OP_GLU:
            return in_chain(a) && (!b || in_chain(b));
        case GGML_OP_UNARY:
        case GGML_OP_CLAMP:
        case GGML_OP_SCALE:
        case GGML_OP_SQR:
            return in_chain(a);
        case GGML_OP_MUL:
            return in_chain(a) && in_chain(b);
        case GGML_OP_VIEW: // the halves of a fused gate_up, not the slices that are summed
            return t->ne[0] < a->ne[0] && t->ne[1] == a->ne[1] && t->ne[2] == a->ne[2] && in_chain(a);
        case GGML_OP_RESHAPE: // only of a scale tensor
        case GGML_OP_REPEAT:
        case GGML_OP_GET_ROWS:
            return is_ours(a) || ((a->op == GGML_OP_RESHAPE || a->op == GGML_OP_REPEAT) && in_chain(a));
        default:
            return false;
    }
}

// ---- the tail: the rows of a token's experts, weighted and summed ----

// The product of rows [width, used, tokens] and the router's weights [1, used, tokens].
static bool is_weighted(const struct ggml_tensor * t) {
    const struct ggml_tensor * w = t->src[1];
    return t->op == GGML_OP_MUL && t->type == GGML_TYPE_F32 && t->ne[1] > 1 && t->ne[3] == 1 && ggml_is_contiguous(t) &&
           ggml_are_same_shape(t, t->src[0]) && in_chain(t->src[0]) && !in_chain(w) && w->type == GGML_TYPE_F32 &&
           w->ne[0] == 1 && w->ne[1] == t->ne[1] && w->ne[2] == t->ne[2] && w->ne[3] == 1 && ggml_is_contiguous(w);
}

// A token's k-th weighted row, for every token: the product, or NULL.
static const struct ggml_tensor * slice_of(const struct ggml_tensor * t, int64_t k) {
    const struct ggml_tensor * m = t->op == GGML_OP_VIEW ? t->src[0] : NULL;
    if (!m || !is_weighted(m) || t->type != GGML_TYPE_F32 || k >= m->ne[1] || t->ne[0] != m->ne[0] || t->ne[1] != m->ne[2] ||
        t->ne[2] != 1 || t->ne[3] != 1 || t->nb[0] != sizeof(float) || t->nb[1] != m->nb[2] ||
        t->view_offs != m->view_offs + k * m->nb[1]) {
        return NULL;
    }
    return m;
}

// The sum of the first n+1 slices in their order: the product, or NULL.
static const struct ggml_tensor * sum_of(const struct ggml_tensor * t, int64_t * n) {
    if (t->op != GGML_OP_ADD) {
        *n = 0;
        return slice_of(t, 0);
    }
    const struct ggml_tensor * m = t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) ? sum_of(t->src[0], n) : NULL;
    *n += 1;
    return m && slice_of(t->src[1], *n) == m ? m : NULL;
}

static bool in_tail(const struct ggml_tensor * t) {
    int64_t n;
    switch (t->op) {
        case GGML_OP_MUL:
            return is_weighted(t);
        case GGML_OP_ADD:
            return sum_of(t, &n) != NULL;
        default:
            return false;
    }
}

// ---- reading a split ----

struct reader {
    struct kv_split *          split;
    const struct ggml_tensor * rows;
    const struct ggml_tensor * ids;
    const struct ggml_tensor * node[KV_MAX_OPS]; // whose result is value i+1
    const struct ggml_tensor * weighted;         // the tail's product, or NULL
    const struct ggml_tensor * sum;              // the last addition of it
};

static bool refuse(struct kv_split * s, const struct ggml_tensor * t, const char * why) {
    snprintf(s->error, sizeof(s->error), "%s (%s of %s)", why, t ? ggml_op_desc(t) : "?", t ? t->name : "?");
    return false;
}

// Scale tensors pass through reshape and repeat; what counts is the weight.
static const struct ggml_tensor * weight_of(const struct ggml_tensor * t) {
    while (t && (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_REPEAT)) {
        t = t->src[0];
    }
    return t && t->op == GGML_OP_NONE && is_ours(t) ? t : NULL;
}

static bool add_weight(struct reader * r, const struct ggml_tensor * t, int32_t * index) {
    struct kv_split * s = r->split;
    const struct ggml_tensor * w = weight_of(t);
    int layer = -1, n = 0;
    if (!w || sscanf(w->name, "blk.%d.%n", &layer, &n) != 1 || n == 0 || strlen(w->name + n) >= KV_NAME) {
        return refuse(s, t, "the weight's name is not blk.N.…");
    }
    const ggml_backend_buffer_type_t buft = w->buffer->buft;
    if (s->n_weights == 0) {
        s->layer = layer;
        s->model = (uintptr_t) buft->context;
    } else if (s->layer != layer || s->model != (uintptr_t) buft->context) {
        return refuse(s, t, "weights of two layers in one split");
    }
    if (s->n_weights == KV_MAX_WEIGHTS) {
        return refuse(s, t, "too many weights");
    }
    *index = s->n_weights;
    strncpy(s->weights[s->n_weights++], w->name + n, KV_NAME); // pads with zeros: names are compared as bytes
    return true;
}

static bool set_ids(struct reader * r, const struct ggml_tensor * t) {
    if (r->ids && r->ids != t) {
        return refuse(r->split, t, "two lists of experts in one split");
    }
    if (!t || t->type != GGML_TYPE_I32 || t->nb[0] != sizeof(int32_t) || t->ne[2] != 1 || t->ne[3] != 1) {
        return refuse(r->split, t, "the list of experts is not [used, tokens] i32");
    }
    r->ids = t;
    return true;
}

// The value a source stands for: an earlier result, or the input row.
static bool value_of(struct reader * r, const struct ggml_tensor * t, int32_t * value) {
    for (int i = 0; i < r->split->n_ops; i++) {
        if (r->node[i] == t) {
            *value = i + 1;
            return true;
        }
    }
    if (in_chain(t) || t->type != GGML_TYPE_F32 || (r->rows && r->rows != t)) {
        return refuse(r->split, t, "an input that is neither the rows nor the ids");
    }
    r->rows = t;
    *value  = 0;
    return true;
}

static bool read_node(struct reader * r, const struct ggml_tensor * t) {
    struct kv_split * s = r->split;
    if (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_REPEAT) {
        return true; // on the way to a scale's GET_ROWS
    }
    if (s->n_ops == KV_MAX_OPS) {
        return refuse(s, t, "too many operations");
    }
    struct kv_op op = { .op = t->op, .weight = -1, .width = (int32_t) t->ne[0] };
    memcpy(op.params, t->op_params, sizeof(op.params));
    bool ok = false;
    switch (t->op) {
        case GGML_OP_MUL_MAT_ID:
            ok = add_weight(r, t->src[0], &op.weight) && value_of(r, t->src[1], &op.a) && set_ids(r, t->src[2]);
            break;
        case GGML_OP_ADD_ID:
            ok = value_of(r, t->src[0], &op.a) && add_weight(r, t->src[1], &op.weight) && set_ids(r, t->src[2]);
            break;
        case GGML_OP_GET_ROWS:
            ok = add_weight(r, t->src[0], &op.weight) && set_ids(r, t->src[1]);
            break;
        case GGML_OP_GLU:
        case GGML_OP_MUL:
            ok = value_of(r, t->src[0], &op.a) && (!t->src[1] || value_of(r, t->src[1], &op.b));
            break;
        case GGML_OP_VIEW:
            memset(op.params, 0, sizeof(op.params)); // the offset, in bytes
            op.offset = (int32_t) ((t->view_offs - t->src[0]->view_offs) / sizeof(float));
            ok = value_of(r, t->src[0], &op.a);
            break;
        case GGML_OP_UNARY:
        case GGML_OP_CLAMP:
        case GGML_OP_SCALE:
        case GGML_OP_SQR:
            ok = value_of(r, t->src[0], &op.a);
            break;
        default:
            return refuse(s, t, "an operation outside the set");
    }
    if (ok) {
        r->node[s->n_ops] = t;
        s->ops[s->n_ops++] = op;
    }
    return ok;
}

// The tail comes after the experts, and in order.
static bool read_tail(struct reader * r, const struct ggml_tensor * t) {
    const struct ggml_tensor * before = r->sum ? r->sum : r->weighted;
    if (t->op == GGML_OP_MUL) {
        if (before || r->split->n_ops == 0 || t->src[0] != r->node[r->split->n_ops - 1]) {
            return refuse(r->split, t, "a weighting of something else than the experts' rows");
        }
        r->weighted = t;
        return true;
    }
    const struct ggml_tensor * a = t->src[0];
    if (!before || t->src[1]->src[0] != r->weighted || (r->sum ? a != r->sum : a->src[0] != r->weighted)) {
        return refuse(r->split, t, "a sum of something else than the experts' rows");
    }
    r->sum = t;
    return true;
}

// The whole of the tail, or none of it.
static bool check_tail(struct reader * r) {
    if (!r->weighted) {
        return true;
    }
    int64_t n = 0;
    if (!r->sum || sum_of(r->sum, &n) != r->weighted || n + 1 != r->weighted->ne[1] ||
        r->weighted->ne[1] != r->ids->ne[0] || r->weighted->ne[2] != r->ids->ne[1]) {
        return refuse(r->split, r->sum ? r->sum : r->weighted, "a part of the sum over a token's experts");
    }
    r->split->router = r->weighted->src[1]->data;
    r->split->sum    = r->sum->data;
    return true;
}

static bool read_split(struct kv_split * s, struct ggml_cgraph * graph, const struct ggml_tensor ** ids) {
    struct reader r = { .split = s };
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const struct ggml_tensor * t = ggml_graph_node(graph, i);
        // the scheduler leaves views with their source: those that are not the experts' compute nothing
        const bool idle = t->op == GGML_OP_NONE || (t->op == GGML_OP_VIEW && !in_chain(t));
        if (!idle && !(in_tail(t) ? read_tail(&r, t) : read_node(&r, t))) {
            return false;
        }
    }
    if (s->n_ops == 0 || !r.rows || !r.ids || s->n_weights == 0) {
        return refuse(s, NULL, "no rows, no experts or no weights in it");
    }
    if (!check_tail(&r)) {
        return false;
    }
    const struct ggml_tensor * out = r.node[s->n_ops - 1];
    s->used      = (int32_t) r.ids->ne[0];
    s->tokens    = (int32_t) r.ids->ne[1];
    s->row_width = (int32_t) r.rows->ne[0];
    s->out_width = (int32_t) out->ne[0];
    // rows are [width, 1 or used, tokens], or [width, tokens] when one reshape was folded away
    const int64_t n_rows = ggml_nrows(r.rows);
    if (n_rows != s->tokens && n_rows != (int64_t) s->tokens * s->used) {
        return refuse(s, r.rows, "the rows do not match the tokens");
    }
    s->rows_per_token = n_rows == s->tokens ? 1 : s->used;
    if (!ggml_is_contiguous(out) || ggml_nrows(out) != (int64_t) s->tokens * s->used) {
        return refuse(s, out, "the result is not one row per pair");
    }
    if (!ggml_is_contiguous(r.rows)) {
        return refuse(s, r.rows, "the rows are not contiguous");
    }
    s->rows = r.rows->data;
    s->out  = out->data;
    s->ids  = r.ids->data;
    *ids    = r.ids;
    return true;
}

// ---- backend ----

struct scratch {
    void * data;
    size_t size;
};

struct swarm_backend {
    uintptr_t       context;
    struct scratch  ids, rows, router, out;
    struct kv_split split;
};

static bool grow(struct scratch * s, size_t size) {
    if (size > s->size) {
        void * data = realloc(s->data, size);
        if (!data) {
            return false;
        }
        s->data = data;
        s->size = size;
    }
    return true;
}

static bool overlap(const void * a, size_t n, const void * b, size_t m) {
    return (const char *) a < (const char *) b + m && (const char *) b < (const char *) a + n;
}

// Whether what is read lies in what is written.
static bool clobbered(const struct kv_split * s, const void * data, size_t size) {
    const size_t sum = (size_t) s->tokens * s->out_width * sizeof(float);
    return overlap(data, size, s->out, sum * s->used) || (s->sum && overlap(data, size, s->sum, sum));
}

static bool copy_out(struct scratch * to, const float ** data, size_t size) {
    if (!grow(to, size)) {
        return false;
    }
    memcpy(to->data, *data, size);
    *data = to->data;
    return true;
}

// The chosen ids are often a view of the first columns of a sorted list: they are
// packed. And the graph's allocator may have given the result the memory of the
// rows or ids, since the whole layer is done with them by then; whoever computes
// pairs one after the other is not: then they are copied. The result, too, may lie
// where the sum will: then it is put elsewhere.
static bool pack_inputs(struct swarm_backend * b, const struct ggml_tensor * ids) {
    struct kv_split * s      = &b->split;
    const size_t      column = (size_t) s->used * sizeof(int32_t);
    const size_t      pairs  = (size_t) s->tokens * s->used;
    const size_t      out    = pairs * s->out_width * sizeof(float);
    const size_t      rows   = (size_t) s->tokens * s->rows_per_token * s->row_width * sizeof(float);
    bool ok = true;
    if (s->sum && overlap(s->out, out, s->sum, out / s->used)) {
        ok     = grow(&b->out, out);
        s->out = b->out.data;
    }
    if (ids->nb[1] != column || clobbered(s, s->ids, column * s->tokens)) {
        ok = ok && grow(&b->ids, column * s->tokens);
        for (int t = 0; ok && t < s->tokens; t++) {
            memcpy((char *) b->ids.data + t * column, (const char *) ids->data + t * ids->nb[1], column);
        }
        s->ids = b->ids.data;
    }
    if (clobbered(s, s->rows, rows)) {
        ok = ok && copy_out(&b->rows, &s->rows, rows);
    }
    if (s->router && clobbered(s, s->router, pairs * sizeof(float))) {
        ok = ok && copy_out(&b->router, &s->router, pairs * sizeof(float));
    }
    return ok || refuse(s, ids, "out of memory");
}

// Two steps, as in the graph: a compiler must not make fused multiply-adds of them,
// which round once instead of twice.
static void weigh(const struct kv_split * s) {
    for (size_t p = 0; p < (size_t) s->tokens * s->used; p++) {
        float *     row = s->out + p * s->out_width;
        const float w   = s->router[p];
        for (int i = 0; i < s->out_width; i++) {
            row[i] *= w;
        }
    }
}

static void add_up(const struct kv_split * s) {
    for (int t = 0; t < s->tokens; t++) {
        float *       sum = s->sum + (size_t) t * s->out_width;
        const float * row = s->out + (size_t) t * s->used * s->out_width;
        for (int i = 0; i < s->out_width; i++) {
            sum[i] = row[i] + row[s->out_width + i];
        }
        for (int k = 2; k < s->used; k++) {
            const float * next = row + (size_t) k * s->out_width;
            for (int i = 0; i < s->out_width; i++) {
                sum[i] += next[i];
            }
        }
    }
}

static enum ggml_status backend_compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    struct swarm_backend * b = backend->context;
    struct kv_split *      s = &b->split;
    memset(s, 0, offsetof(struct kv_split, ops));
    s->error[0] = 0;
    s->context  = b->context;
    const struct ggml_tensor * ids;
    if (read_split(s, graph, &ids)) {
        pack_inputs(b, ids);
    }
    if (kvExperts(s) != 0) {
        return GGML_STATUS_FAILED;
    }
    if (s->sum && !s->summed) {
        weigh(s);
        add_up(s);
    }
    return GGML_STATUS_SUCCESS;
}

static const char * backend_name(ggml_backend_t backend) {
    (void) backend;
    return SWARM;
}

static void backend_free(ggml_backend_t backend) {
    struct swarm_backend * b = backend->context;
    free(b->ids.data);
    free(b->rows.data);
    free(b->router.data);
    free(b->out.data);
    free(b);
    free(backend);
}

static ggml_guid_t swarm_guid(void) {
    static ggml_guid guid = { 0x6b, 0x76, 0x61, 0x73, 0x69, 0x72, 0x2d, 0x73, 0x77, 0x61, 0x72, 0x6d, 0x2d, 0x64, 0x65, 0x76 };
    return &guid;
}

// ---- device and registration ----

static const char * dev_name(ggml_backend_dev_t dev) {
    (void) dev;
    return SWARM;
}

static const char * dev_description(ggml_backend_dev_t dev) {
    (void) dev;
    return "experts held by peers";
}

static void dev_memory(ggml_backend_dev_t dev, size_t * free_bytes, size_t * total) {
    (void) dev;
    *free_bytes = 0;
    *total      = 0;
}

// Contexts add devices of this type to their scheduler by themselves.
static enum ggml_backend_dev_type dev_type(ggml_backend_dev_t dev) {
    (void) dev;
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void dev_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props) {
    memset(props, 0, sizeof(*props));
    props->name        = dev_name(dev);
    props->description = dev_description(dev);
    props->type        = dev_type(dev);
}

static ggml_backend_t dev_init(ggml_backend_dev_t dev, const char * params) {
    (void) params;
    struct ggml_backend *  backend = calloc(1, sizeof(*backend));
    struct swarm_backend * b       = calloc(1, sizeof(*b));
    if (!backend || !b) {
        free(backend);
        free(b);
        return NULL;
    }
    b->context     = next_context;
    backend->guid  = swarm_guid();
    backend->iface = (struct ggml_backend_i) {
        .get_name      = backend_name,
        .free          = backend_free,
        .graph_compute = backend_compute,
    };
    backend->device  = dev;
    backend->context = b;
    return backend;
}

// Activations live where the CPU's do, so they cross without a copy.
static ggml_backend_buffer_type_t dev_buffer_type(ggml_backend_dev_t dev) {
    (void) dev;
    return ggml_backend_cpu_buffer_type();
}

static bool dev_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor * op) {
    (void) dev;
    return op->op == GGML_OP_NONE || in_chain(op) || in_tail(op);
}

static bool dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    (void) dev;
    return buft->iface.get_name == buft_name || ggml_backend_buft_is_host(buft);
}

static const char * reg_name(ggml_backend_reg_t reg) {
    (void) reg;
    return SWARM;
}

static size_t reg_count(ggml_backend_reg_t reg) {
    (void) reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    (void) reg;
    return index == 0 ? &swarm_dev : NULL;
}

void kv_swarm_register(void) {
    swarm_reg = (struct ggml_backend_reg) {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface       = {
            .get_name         = reg_name,
            .get_device_count = reg_count,
            .get_device       = reg_device,
        },
    };
    swarm_dev = (struct ggml_backend_device) {
        .iface = {
            .get_name        = dev_name,
            .get_description = dev_description,
            .get_memory      = dev_memory,
            .get_type        = dev_type,
            .get_props       = dev_props,
            .init_backend    = dev_init,
            .get_buffer_type = dev_buffer_type,
            .supports_op     = dev_supports_op,
            .supports_buft   = dev_supports_buft,
        },
        .reg = &swarm_reg,
    };
    ggml_backend_register(&swarm_reg);
}

void kv_swarm_set_context(uintptr_t context) {
    next_context = context;
}
