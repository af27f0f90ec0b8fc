#pragma once

// The rows of kv-rows.h on CUDA, without ggml: raw pointers and a stream in, an error code out. kv-attention-cuda.cu calls them for graph
// nodes, engine/tests/test-kv-rows-cuda.cu for its own data.

#include "kv-op.h"
#include "kv-rows.h"

#include <cuda_runtime.h>

// The rows of one layer; all memory but `counters` is the device's. Its address and those in it do not change while it lives.
struct phase_kv_rows {
    phase_kv_rows_shape shape;
    phase_kv_rows_state state;

    int       device;
    uint8_t * k;     // [n_slots] rows
    uint8_t * v;
    void    * zeros; // n_slots halves: the mask of a row that is in a list
    uint64_t * totals; // looked up, missed, runs

    phase_kv_rows_counters * counters; // pinned, what the kernels write and the host reads
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

// Forgets all rows. The device is idle.
void phase_cuda_kv_rows_forget_all(phase_kv_rows * rows);

// Queues two kernels: lookup, which turns rows into slots, then copy. May be captured. n_lists*n_max at most n_slots.
cudaError_t phase_cuda_kv_rows_find(const phase_kv_rows & rows, const phase_cuda_row_lists & lists, cudaStream_t stream);

// Queues three kernels: lookup, copy, and one that puts the rows side by side: k and v [n_sequences][n_rows]. May be captured. At most
// n_slots rows in all.
cudaError_t phase_cuda_kv_rows_gather(const phase_kv_rows & rows, const phase_cuda_row_range & range, void * k, void * v, cudaStream_t stream);

// Queues, before the writes, a kernel that forgets what is written; more rows than n_in_place become pending.
cudaError_t phase_cuda_kv_rows_forget(const phase_cuda_written * written, int n, int32_t n_in_place, cudaStream_t stream);

// Queues, behind the writes, two kernels that look up and copy what is pending.
cudaError_t phase_cuda_kv_rows_settle(const phase_cuda_written * written, int n, cudaStream_t stream);
