#pragma once

// The graph operators on the CPU. Backends with their own implementation recognise the nodes as expert-op.h says.

#include "expert-op.h"

struct ggml_context;
struct ggml_tensor;

// A node of `ctx`; see expert-op.h for sources and result. `state` and `tensors` have to be allocated; `keep`: the prefetch node for
// this layer, or null.
ggml_tensor * phase_build_fetch(ggml_context * ctx, phase_fetch_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors,
        ggml_tensor * keep);
ggml_tensor * phase_build_prefetch(ggml_context * ctx, phase_prefetch_op & op, int32_t n_predict, ggml_tensor * x, ggml_tensor * router,
        ggml_tensor * state, ggml_tensor ** tensors);
ggml_tensor * phase_build_stream(ggml_context * ctx, phase_stream_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors);

// phase_backend_api.fill on the CPU, done when it returns.
void phase_fill_slots(const phase_fetch_op & op, int32_t * state, const phase_fill & list);
