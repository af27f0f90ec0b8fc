#pragma once

// What ggml-cuda.cu calls.

#include "pinned-cuda.cuh"

#include "ggml-backend.h"

#include <cstddef>

struct ggml_backend_cuda_context;
struct ggml_cgraph;
struct ggml_tensor;
struct phase_backend_api;

// GGML_OP_CUSTOM nodes: false for those that are not ours, or that this implementation cannot run.
bool phase_cuda_supports_op(const ggml_tensor * op);

// A node that may be captured in a CUDA graph; a stream node may not.
bool phase_cuda_capturable(const ggml_tensor * op);

// A graph of the decode phase that has changed: the next ones of its shape follow at once, so it is captured now and not at its second
// run (a run without a CUDA graph takes 10 to 20 ms). Not the first graph of a process: libraries prepare themselves in it.
bool phase_cuda_capture_at_once(const ggml_cgraph * graph);

// Runs a node that is ours; false: it is not.
bool phase_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Called before the first node and behind the last one of a graph that is run or captured.
void phase_cuda_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph);
void phase_cuda_finish(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph);

// Called once per launch of a CUDA graph.
void phase_cuda_count_replay();

// Buffer types of kv-buffer.h, which operators of their device may use in place.
bool phase_cuda_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);

const phase_backend_api * phase_cuda_backend_api();
