#pragma once

// Sparse flash attention over K/V in host memory reads rows that are kept on the device (kv-rows.h): what ggml-cuda.cu and fattn.cu call.

#include "kv-op.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cuda_runtime.h>

#include <cstdint>

struct ggml_backend_cuda_context;
struct phase_kv_rows;

// See phase_backend_api.
const char * phase_cuda_kv_rows_create(ggml_backend_dev_t dev, const phase_kv_rows_shape * shape, phase_kv_rows ** rows);
void         phase_cuda_kv_rows_destroy(phase_kv_rows * rows);
void         phase_cuda_kv_rows_reset(phase_kv_rows * rows);
void         phase_cuda_kv_rows_count(const phase_kv_rows * rows, phase_kv_rows_counters * counters);

// Before the first node of a graph that is run or captured: rows about to be written are forgotten. Behind its last node: those of a
// prompt are copied.
void phase_cuda_kv_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph);
void phase_cuda_kv_finish(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph);

// A flash attention node whose K and V are copies of all rows, where the kernel is one that reads them all (a short context, or several
// queries) and the device keeps as many; else `dst` itself.
class phase_cuda_kv_copy {
  public:
    phase_cuda_kv_copy(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
    ~phase_cuda_kv_copy();
    phase_cuda_kv_copy(const phase_cuda_kv_copy &) = delete;

    ggml_tensor * get() { return node; }

  private:
    ggml_backend_cuda_context & ctx;
    ggml_tensor * node;
    ggml_tensor   own, k, v;
    size_t        size = 0; // of the pool memory that both are in
};

// A flash attention node whose K and V are the rows on the device, where there are such and the lists of `dst` are sure to fit in; else
// `dst` itself. All its shapes are those of `dst`: sizes decide how sums are split. Lists of rows that are made while this lives become
// lists of slots, and each row's mask is zero, which it is for all rows that one query selects.
class phase_cuda_kv_node {
  public:
    explicit phase_cuda_kv_node(ggml_tensor * dst);
    ~phase_cuda_kv_node();
    phase_cuda_kv_node(const phase_cuda_kv_node &) = delete;

    ggml_tensor * get() { return node; }

  private:
    ggml_tensor * node;
    ggml_tensor   own, k, v, mask;
};

// Stands at the top of what makes the lists: `mask` becomes the mask of the original node, and when this goes the lists that were queued
// are turned into slots and the rows copied. `n_group` queries share a list.
class phase_cuda_kv_lists {
  public:
    phase_cuda_kv_lists(const ggml_tensor *& mask, int32_t * indices, int32_t * counts, int32_t n_queries, int32_t n_group, int32_t n_max,
            cudaStream_t stream);
    ~phase_cuda_kv_lists();
    phase_cuda_kv_lists(const phase_cuda_kv_lists &) = delete;

    // False: nothing is queued yet, upstream has to make them.
    bool make();

  private:
    const ggml_tensor * mask;
    const int32_t * rows = nullptr; // of a select node, when they are used as they are
    int32_t    * indices;
    int32_t    * counts;
    int32_t      n_lists;
    int32_t      n_queries;
    int32_t      n_group;
    int32_t      n_max;
    cudaStream_t stream;
};
