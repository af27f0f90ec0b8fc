#pragma once

// The operators of expert-op.h on CUDA, without ggml: raw pointers and a stream in, an error code out. expert-cuda.cu calls them
// for graph nodes, engine/tests/test-expert-cuda.cu for its own data.

#include "expert-op.h"
#include "upload-stage.h"

#include <cuda_runtime.h>

// The routed experts of a batch in device memory; the ids of one token are contiguous.
struct phase_cuda_ids {
    const char * data;
    size_t       token_bytes; // from one token to the next
    int32_t      n_used;
    int32_t      n_tokens;
};

// Tables of a lookup live in shared memory: the most words they may take.
constexpr int32_t PHASE_CUDA_TABLE_WORDS = 12*1024;

constexpr int32_t phase_cuda_table_words(int32_t n_expert, int32_t n_slots, int32_t n_ids) {
    return 2*n_expert + 2*n_slots + n_ids;
}

// Queues two kernels: lookup, then copy of what is missing. No host synchronisation; may be captured. `op` is read during the call
// only. `pdl`: both kernels may be launched before their predecessor ends (compute capability 9.0 and PTX built for it, which
// phase_cuda_can_use_pdl tells). `blocks`: of the copy, 0 for one per multiprocessor. `joined`: `stream` has just been
// made to wait for another one, so the first kernel starts behind both.
// cudaErrorInvalidValue: too many ids, too few slots, or tables beyond PHASE_CUDA_TABLE_WORDS.
cudaError_t phase_cuda_fetch(const phase_fetch_op & op, const phase_cuda_ids & ids, int32_t * state, int32_t * slots,
        cudaStream_t stream, bool pdl, int blocks = 0, bool joined = false);

struct phase_cuda_activations {
    const char * data;        // F32 [n_embd] of each token
    size_t       token_bytes; // from one token to the next
    int32_t      n_embd;
    int32_t      n_tokens;
};

struct phase_cuda_router {
    enum type_t { F32, F16, BF16 } type;
    const void * data; // [n_expert][n_embd]
};

// Predicts n_predict experts per token for the next layer, whose state is `state`, and queues their copies on a stream beside `stream`,
// behind what is queued there now. It makes `stream` wait for the prefetch before it, this layer's. May be captured. `scratch`: see
// expert-op.h. phase_cuda_join_prefetch() has to follow on the same thread, before the next layer's fetch and before the end of a capture.
// cudaErrorInvalidValue: as phase_cuda_fetch(), for n_predict*n_tokens ids.
cudaError_t phase_cuda_prefetch(const phase_prefetch_op & op, const phase_cuda_activations & x, const phase_cuda_router & router,
        int32_t n_predict, int32_t * state, int32_t * scratch, cudaStream_t stream, bool pdl);

// Makes `stream` wait for the prefetch of the layer with this state, null: for any in flight. waited: what is queued next stands behind
// two streams, because of this call or of the prefetch that came in between.
cudaError_t phase_cuda_join_prefetch(cudaStream_t stream, const int32_t * state, bool & waited);

// Frees what the first prefetch made. Nothing may be in flight; graphs captured with it stay usable.
void phase_cuda_prefetch_free(phase_prefetch_side & side);

// Queues two kernels: those of the list that take an empty slot, then their copies. No host synchronisation. `op` and `list` are read during
// the call only. cudaErrorInvalidValue: too many experts.
cudaError_t phase_cuda_fill(const phase_fetch_op & op, int32_t * state, const phase_fill & list, cudaStream_t stream);

// Queues one kernel that copies the pieces; not to be captured. cudaErrorInvalidValue: none, or more than PHASE_UPLOAD_PIECES.
cudaError_t phase_cuda_upload(phase_upload_side & side, const phase_upload_piece * pieces, int32_t n, cudaStream_t stream);

// Frees what the first upload made. None may be in flight.
void phase_cuda_upload_free(phase_upload_side & side);

bool phase_cuda_can_use_pdl();

// Makes `stream` wait until the layer is in its region and queues the copies of the layers behind it. Not to be captured: which
// copies are queued depends on what the ring holds now. One thread at a time for one ring.
cudaError_t phase_cuda_stream(const phase_stream_op & op, const phase_cuda_ids & ids, int32_t * state, int32_t * dst, cudaStream_t stream);

// Begins to copy the first layers behind what `stream` has queued.
cudaError_t phase_cuda_ring_start(phase_ring & ring, cudaStream_t stream);

// Waits for the copies in flight. A ring that never ran is fine.
cudaError_t phase_cuda_ring_free(phase_ring & ring);

// See phase_backend_api.
const char * phase_cuda_host_alloc(size_t size, void ** ptr);
void         phase_cuda_host_free(void * ptr);
