//go:build cgo

#define _GNU_SOURCE
#include "bridge.h"

#include <dlfcn.h>
#include <string.h>

// Exported by Go.
extern void kvLog(int level, char * text);

static void log_bridge(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    kvLog((int) level, (char *) text);
}

void kv_log_install(void) {
    llama_log_set(log_bridge, NULL);
}

const char * kv_lib_path(void) {
    Dl_info info;
    return dladdr((void *) ggml_backend_load_all_from_path, &info) ? info.dli_fname : NULL;
}

struct ggml_backend_feature * kv_features(ggml_backend_reg_t reg) {
    ggml_backend_get_features_t get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    return get ? get(reg) : NULL;
}

static bool lap(struct ggml_tensor * t, bool ask, void * data) {
    struct kv_stopwatch * w     = data;
    const bool            begin = strncmp(t->name, w->from, strlen(w->from)) == 0;
    const bool            end   = strncmp(t->name, w->to, strlen(w->to)) == 0;
    if (ask) {
        return begin || end;
    }
    const int64_t now = ggml_time_us();
    if (begin) {
        w->since_us = now;
    } else if (end && w->since_us) {
        w->total_us += now - w->since_us;
        w->since_us = 0;
        w->laps++;
    }
    return true;
}

void kv_set_stopwatch(struct llama_context_params * params, struct kv_stopwatch * watch) {
    params->cb_eval           = lap;
    params->cb_eval_user_data = watch;
}

// Polled by the CPU backend between operations.
static bool stop_asked(void * flag) {
    return __atomic_load_n((int32_t *) flag, __ATOMIC_RELAXED) != 0;
}

void kv_set_abort(struct llama_context_params * params, int32_t * flag) {
    params->abort_callback      = stop_asked;
    params->abort_callback_data = flag;
}
