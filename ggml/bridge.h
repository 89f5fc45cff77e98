// C that Go cannot write itself: function pointers for the library.
#ifndef KVASIR_BRIDGE_H
#define KVASIR_BRIDGE_H

#include "llama.h"

// Sends the library's log to Go.
void kv_log_install(void);

// The file that the linked library was loaded from, or NULL.
const char * kv_lib_path(void);

// What a backend uses of its hardware, ended by an entry without name; NULL when it does not say.
struct ggml_backend_feature * kv_features(ggml_backend_reg_t reg);

// Time between the end of one node of the graph and the end of another, summed
// over all pairs of them. Names match as prefixes. The scheduler computes up to
// such a node and waits, so this is for measuring, not for serving.
struct kv_stopwatch {
    char    from[64], to[64];
    int64_t since_us; // 0: not running
    int64_t total_us;
    int64_t laps;
};
void kv_set_stopwatch(struct llama_context_params * params, struct kv_stopwatch * watch);

// Lets decodes stop when *flag is not 0.
void kv_set_abort(struct llama_context_params * params, int32_t * flag);

#endif
