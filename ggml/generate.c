#include "generate.h"

#include "swarm.h"

#include <stdlib.h>
#include <string.h>

static void collect(struct ggml_tensor * t, void * ud) {
    struct kv_made_list * l = ud;
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2*l->cap : 256;
        struct kv_made_tensor * at = realloc(l->at, cap*sizeof(*at));
        if (!at) {
            l->out_of_memory = true;
            return;
        }
        l->at  = at;
        l->cap = cap;
    }
    struct kv_made_tensor * s = &l->at[l->n++];
    memcpy(s->name, t->name, sizeof(s->name));
    memcpy(s->ne, t->ne, sizeof(s->ne));
}

bool kv_made_tensors(struct gguf_context * meta, struct kv_made_list * out) {
    ggml_backend_dev_t no_devices[1] = { NULL };
    // Whatever its size, the model takes addresses only.
    ggml_backend_buffer_type_t nowhere = kv_swarm_buft_new(0, false);
    const struct llama_model_tensor_buft_override all[2] = { { ".*", nowhere }, { NULL, NULL } };
    struct llama_model_params p = llama_model_default_params();
    p.devices      = no_devices;
    p.n_gpu_layers = 0;
    p.tensor_buft_overrides = nowhere ? all : NULL;
    struct llama_model * m = llama_model_init_from_user(meta, collect, out, p);
    if (m) {
        llama_model_free(m);
    }
    if (nowhere) {
        kv_swarm_buft_free(nowhere);
    }
    return m && !out->out_of_memory;
}
