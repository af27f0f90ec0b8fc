#pragma once

// The rows of kv-rows.h on CUDA, without ggml: raw pointers and a stream in, an error code out. kv-attention-cuda.cu calls them for graph
// nodes, engine/tests/test-kv-rows-cuda.cu for its own data.

#include "kv-op.h"
#include "kv-rows.h"

#include <cuda_runtime.h>

// Blocks of a lookup: one finds, the others copy, a row of K and V per warp and turn. 32 x 32 rows of 2 KiB are more than the link has in
// flight, and so few start quickly.
constexpr int PHASE_CUDA_KV_ROWS_BLOCKS = 1 + 32;

// The rows of one layer, in the device's memory. Its address and those in it do not change while it lives. Kernels of a layer run one
// after the other.
struct phase_kv_rows {
    phase_kv_rows_shape shape;
    phase_kv_rows_state state;

    int       device;
    uint8_t * k;     // [n_slots] rows
    uint8_t * v;
    void    * zeros; // n_slots halves: the mask of a row that is in a list
    phase_kv_rows_counters * totals;
    uint32_t               * turns; // [PHASE_CUDA_KV_ROWS_BLOCKS] how far each block of a lookup is; see find_and_copy

    mutable cudaStream_t used_on; // by what was queued last; null: by nothing yet
};

// One list per query, of n_max entries each: a row of the query's sequence, -1 behind the last.
struct phase_cuda_row_lists {
    const int32_t * rows;
    const int32_t * counts; // [n_lists]
    int32_t       * slots;       // may be `rows`
    int32_t       * slot_counts; // becomes `counts`, may be that
    int32_t         n_lists;
    int32_t         n_max;
    int32_t         lists_per_sequence;
    int32_t         first_row;     // of the first sequence
    int32_t         sequence_rows; // from one sequence to the next
};

// All rows of some sequences, from the first on.
struct phase_cuda_row_range {
    int32_t n_rows;        // of a sequence
    int32_t n_sequences;
    int32_t first_row;     // of the first sequence
    int32_t sequence_rows; // from one sequence to the next
};

// The rows that a graph writes to one layer.
struct phase_cuda_written {
    const phase_kv_rows * rows;
    const int64_t       * ids; // on the device; null: all rows
    int32_t               n_ids;
    int32_t               first_row;
};

// Returns null, or why not (valid until the next call on this thread).
const char * phase_cuda_kv_rows_new(int device, const phase_kv_rows_shape & shape, phase_kv_rows ** rows);
void         phase_cuda_kv_rows_free(phase_kv_rows * rows);

// Forgets all rows, behind what the device still does.
void phase_cuda_kv_rows_forget_all(phase_kv_rows * rows);

// What was counted by lookups that have ended; zeros when the device cannot be asked. Any thread may ask, also while another captures.
void phase_cuda_kv_rows_totals(const phase_kv_rows * rows, phase_kv_rows_counters * counters);

// Queues a kernel that turns rows into slots and copies what is missing. May be captured. n_lists*n_max at most n_slots.
cudaError_t phase_cuda_kv_rows_find(const phase_kv_rows & rows, const phase_cuda_row_lists & lists, cudaStream_t stream);

// Queues two kernels: the same for a range, and one that puts the rows side by side: k and v [n_sequences][n_rows]. May be captured. At
// most n_slots rows in all.
cudaError_t phase_cuda_kv_rows_gather(const phase_kv_rows & rows, const phase_cuda_row_range & range, void * k, void * v, cudaStream_t stream);

// Queues, before the writes, a kernel that forgets what is written; more rows than n_in_place become pending.
cudaError_t phase_cuda_kv_rows_forget(const phase_cuda_written * written, int n, int32_t n_in_place, cudaStream_t stream);

// Queues, behind the writes, a kernel that looks up and copies what is pending.
cudaError_t phase_cuda_kv_rows_settle(const phase_cuda_written * written, int n, cudaStream_t stream);
