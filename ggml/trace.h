// What a graph computes on its way: see trace.go.
#ifndef KVASIR_TRACE_H
#define KVASIR_TRACE_H

#include <stdint.h>

#include "llama.h"

void kv_set_trace(struct llama_context_params * params, uintptr_t handle);

#endif
