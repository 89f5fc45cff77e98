//go:build cgo

// The swarm device. Its method, measured for every MoE architecture of
// llama.cpp v0.5.0: expert weights live in a buffer type of ours, which only
// this device supports; so the scheduler gives it the operations over them, in
// one run per layer ("split"), whose only inputs are the rows and the chosen
// ids. The device reads the split as a short program and asks Go to compute it.
//
// Nothing here computes. The weights' buffer is reserved address space.
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

// ---- reading a split ----

struct reader {
    struct kv_split *          split;
    const struct ggml_tensor * rows;
    const struct ggml_tensor * ids;
    const struct ggml_tensor * node[KV_MAX_OPS]; // whose result is value i+1
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

static bool read_split(struct kv_split * s, struct ggml_cgraph * graph, const struct ggml_tensor ** ids) {
    struct reader r = { .split = s };
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const struct ggml_tensor * t = ggml_graph_node(graph, i);
        // the scheduler leaves views with their source: those that are not the experts' compute nothing
        const bool idle = t->op == GGML_OP_NONE || (t->op == GGML_OP_VIEW && !in_chain(t));
        if (!idle && !read_node(&r, t)) {
            return false;
        }
    }
    if (s->n_ops == 0 || !r.rows || !r.ids || s->n_weights == 0) {
        return refuse(s, NULL, "no rows, no experts or no weights in it");
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
    struct scratch  ids, rows;
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

// The chosen ids are often a view of the first columns of a sorted list: they are
// packed. And the graph's allocator may have given the result the memory of the
// rows or ids, since the whole layer is done with them by then; whoever computes
// pairs one after the other is not: then they are copied.
static bool pack_inputs(struct swarm_backend * b, const struct ggml_tensor * ids) {
    struct kv_split * s      = &b->split;
    const size_t      column = (size_t) s->used * sizeof(int32_t);
    const size_t      out    = (size_t) s->tokens * s->used * s->out_width * sizeof(float);
    const size_t      rows   = (size_t) s->tokens * s->rows_per_token * s->row_width * sizeof(float);
    if (ids->nb[1] != column || overlap(s->ids, column * s->tokens, s->out, out)) {
        if (!grow(&b->ids, column * s->tokens)) {
            return refuse(s, ids, "out of memory");
        }
        for (int t = 0; t < s->tokens; t++) {
            memcpy((char *) b->ids.data + t * column, (const char *) ids->data + t * ids->nb[1], column);
        }
        s->ids = b->ids.data;
    }
    if (overlap(s->rows, rows, s->out, out)) {
        if (!grow(&b->rows, rows)) {
            return refuse(s, NULL, "out of memory");
        }
        memcpy(b->rows.data, s->rows, rows);
        s->rows = b->rows.data;
    }
    return true;
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
    return kvExperts(s) == 0 ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

static const char * backend_name(ggml_backend_t backend) {
    (void) backend;
    return SWARM;
}

static void backend_free(ggml_backend_t backend) {
    struct swarm_backend * b = backend->context;
    free(b->ids.data);
    free(b->rows.data);
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
    return op->op == GGML_OP_NONE || in_chain(op);
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
