#pragma once

// The two graph operators on the CPU. Backends with their own implementation recognise the nodes by phase_op_of().

#include "expert-op.h"

struct ggml_context;
struct ggml_tensor;

// Adds the operator to the graph of `ctx`; see expert-op.h for sources and result. `state` and `tensors` have to be allocated.
ggml_tensor * phase_build_fetch (ggml_context * ctx, phase_fetch_op  & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors);
ggml_tensor * phase_build_stream(ggml_context * ctx, phase_stream_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors);
