#pragma once

// The choice of rows of sparse attention, with results equal to upstream's kernels. Called by fattn.cu and top-k.cu; false means that
// nothing was done: LLAMA_PHASE_SELECT=stock, or a shape that upstream serves better.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// Lists the columns of each mask row that are not minus infinity, in ascending order: `indices` [n_rows, n_kv_max], filled up with -1, and
// `counts` [n_rows]. Upstream scans a row with one block in steps of 2048 columns, each of which waits for memory and four barriers
// (about 80 us at 131k columns); here all of a row is in flight at once.
bool phase_cuda_compact_mask(const half * mask, int32_t * indices, int32_t * counts, int64_t n_kv, int64_t n_queries, int64_t n_sequences,
        int32_t n_kv_max, int64_t query_stride, int64_t sequence_stride, cudaStream_t stream);

// Indices of the k largest of each row, unordered; of equal values the lowest indices, as a stable descending sort has them. Upstream sorts
// the whole row.
bool phase_cuda_top_k(const float * values, int32_t * indices, int64_t n_columns, int64_t n_rows, int64_t k, cudaStream_t stream);

void phase_cuda_set_select(bool fast);

// The select operator of expert-op.h.
struct phase_cuda_selection {
    const float    * score;
    const int32_t  * top_k;
    const int32_t  * pools;
    const int32_t  * tails;
    const uint16_t * visible;

    int32_t n_tokens;
    int32_t n_pool;
    int32_t n_top;
    int32_t kpool;
    int32_t n_tail;
    int32_t n_kv;

    uint16_t * mask; // the node's three blocks

    __host__ __device__ int32_t   n_sel()  const { return kpool*n_top + n_tail; }
    __host__ __device__ int32_t * rows()   const { return (int32_t *) (mask + (int64_t) n_tokens*n_kv); }
    __host__ __device__ int32_t * counts() const { return rows() + (int64_t) n_tokens*n_sel(); }
};

bool        phase_cuda_select_fits(int64_t n_kv); // the current device has the shared memory
cudaError_t phase_cuda_launch_select(const phase_cuda_selection & selection, cudaStream_t stream);

// The kernels alone.
cudaError_t phase_cuda_launch_compact_mask(const half * mask, int32_t * indices, int32_t * counts, int32_t n_kv, int32_t n_queries,
        int32_t n_sequences, int32_t n_kv_max, int64_t query_stride, int64_t sequence_stride, cudaStream_t stream);
cudaError_t phase_cuda_launch_top_k(const float * values, int32_t * indices, int32_t n_columns, int32_t n_rows, int32_t k, cudaStream_t stream);

// The score operator of expert-op.h: PHASE_SCORE_HEADS heads of PHASE_SCORE_EMBD. The order of its sums is that of upstream's vector kernel.
struct phase_cuda_scores {
    const char    * q;
    const char    * keys;
    const int32_t * cells;
    const char    * mask;
    float         * score; // [n_tokens][n_pool]

    size_t head_bytes;  // of q
    size_t token_bytes; // of q
    size_t key_bytes;
    size_t mask_bytes;

    int32_t n_pool;
    int32_t n_tokens;
    float   weight;
};

cudaError_t phase_cuda_launch_score(const phase_cuda_scores & scores, cudaStream_t stream);
