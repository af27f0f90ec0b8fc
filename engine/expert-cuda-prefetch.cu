// prefetch: the next layer's experts are predicted and copied on a second stream, beside what this layer still computes.
//
//   main     .. fetch(l) | matmuls of l, attention of l+1 ..          | fetch(l+1) ..
//   second              \ scores | choose | look up | copy ...       /
//
// fork() and join() are events, so that a captured CUDA graph gets a parallel branch. Whoever ends a graph joins what no fetch did.

#include "expert-cuda-kernels.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <climits>

static constexpr int PREDICT_BLOCK = 256;
static constexpr int PREDICT_BATCH = 8;  // tokens a warp scores at once
static constexpr int COPY_BLOCKS   = 8;  // 128 KiB in flight just fill the link; more of them hold up the reads of the layer (64: slower than no prefetch)

struct predict_args {
    const char  * x;
    size_t        x_token_bytes;
    const void  * router;  // [n_expert][n_embd]
    const float * bias;    // [n_expert] or null
    float       * scores;  // out, [n_tokens][n_expert]
    int32_t       n_embd;
    int32_t       n_expert;
    int32_t       n_tokens;
};

static __device__ __forceinline__ float to_float(float x)         { return x; }
static __device__ __forceinline__ float to_float(__half x)        { return __half2float(x); }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// a warp scores one expert
template <typename T>
static __global__ void __launch_bounds__(PREDICT_BLOCK) predict_kernel(predict_args a) {
    const int lane   = threadIdx.x % 32;
    const int expert = blockIdx.x*(PREDICT_BLOCK/32) + threadIdx.x/32;
    if (expert >= a.n_expert) {
        return;
    }
    const T * row = (const T *) a.router + (size_t) expert*a.n_embd;

    for (int32_t begin = 0; begin < a.n_tokens; begin += PREDICT_BATCH) {
        const int32_t n = min(PREDICT_BATCH, a.n_tokens - begin);
        float sum[PREDICT_BATCH] = {};
#pragma unroll 4
        for (int32_t i = lane; i < a.n_embd; i += 32) {
            const float w = to_float(row[i]);
#pragma unroll
            for (int t = 0; t < PREDICT_BATCH; ++t) {
                if (t < n) {
                    sum[t] += w*((const float *) (a.x + (begin + t)*a.x_token_bytes))[i];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < PREDICT_BATCH; ++t) {
            for (int offset = 16; offset > 0; offset /= 2) {
                sum[t] += __shfl_xor_sync(~0u, sum[t], offset);
            }
            if (t < n && lane == 0) {
                a.scores[(size_t) (begin + t)*a.n_expert + expert] = a.bias ? 1.0f/(1.0f + expf(-sum[t])) + a.bias[expert] : sum[t];
            }
        }
    }
}

// Order of the choice: the larger score, then the lower id.
static __device__ __forceinline__ bool before(float score, int32_t id, float other_score, int32_t other_id) {
    return score > other_score || (score == other_score && id < other_id);
}

// One warp per token: n_predict times the best expert behind the last one chosen. NaN is never chosen; what is left is -1.
static __global__ void __launch_bounds__(32) choose_kernel(const float * scores, int32_t n_expert, int32_t n_predict, int32_t * ids) {
    const float * score = scores + (size_t) blockIdx.x*n_expert;

    float   last_score = FLT_MAX;
    int32_t last_id    = -1;
    for (int32_t k = 0; k < n_predict; ++k) {
        float   best    = -FLT_MAX;
        int32_t best_id = INT_MAX;
        for (int32_t e = threadIdx.x; e < n_expert; e += 32) {
            if (before(last_score, last_id, score[e], e) && before(score[e], e, best, best_id)) {
                best    = score[e];
                best_id = e;
            }
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            const float   other    = __shfl_xor_sync(~0u, best, offset);
            const int32_t other_id = __shfl_xor_sync(~0u, best_id, offset);
            if (before(other, other_id, best, best_id)) {
                best    = other;
                best_id = other_id;
            }
        }
        if (threadIdx.x == 0) {
            ids[blockIdx.x*n_predict + k] = best_id == INT_MAX ? -1 : best_id;
        }
        last_score = best;
        last_id    = best_id;
    }
}

// backend_state of a phase_prefetch_side
struct side_state {
    cudaStream_t stream = nullptr;
    cudaEvent_t  forked = nullptr;
    cudaEvent_t  joined = nullptr;
};

// What the graph that this thread runs has to join: graphs of one backend run on one thread at a time, and nothing stays in flight
// between graphs.
static thread_local const side_state * in_flight = nullptr;

// on the current device, the layer's
static cudaError_t create(phase_prefetch_side & side) {
    auto * state = new side_state;
    side.backend_state = state;
    cudaError_t error = cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&state->forked, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&state->joined, cudaEventDisableTiming);
    }
    if (error != cudaSuccess) {
        phase_cuda_prefetch_free(side);
    }
    return error;
}

void phase_cuda_prefetch_free(phase_prefetch_side & side) {
    auto * state = (side_state *) side.backend_state;
    side.backend_state = nullptr;
    if (!state) {
        return;
    }
    // errors are of earlier work, or of a process that ends and has unloaded the driver already
    if (state->joined) {
        (void) cudaEventDestroy(state->joined);
    }
    if (state->forked) {
        (void) cudaEventDestroy(state->forked);
    }
    if (state->stream) {
        (void) cudaStreamDestroy(state->stream);
    }
    delete state;
}

cudaError_t phase_cuda_join_prefetch(cudaStream_t stream, bool & waited) {
    waited = in_flight != nullptr;
    if (!waited) {
        return cudaSuccess;
    }
    const auto * side = in_flight;
    in_flight = nullptr;
    return cudaStreamWaitEvent(stream, side->joined, 0);
}

cudaError_t phase_cuda_prefetch(const phase_prefetch_op & op, const phase_cuda_activations & x, const phase_cuda_router & router,
        int32_t n_predict, int32_t * state, int32_t * scratch, cudaStream_t stream) {
    if (n_predict < 1 || x.n_tokens < 1 || !op.side) {
        return cudaErrorInvalidValue;
    }
    bool waited = false;
    cudaError_t error = phase_cuda_join_prefetch(stream, waited); // a layer that was predicted for and then not fetched

    if (error == cudaSuccess && !op.side->backend_state) {
        error = create(*op.side);
    }
    const auto * side = (const side_state *) op.side->backend_state;
    if (error == cudaSuccess) {
        error = cudaEventRecord(side->forked, stream);
    }
    if (error == cudaSuccess) {
        error = cudaStreamWaitEvent(side->stream, side->forked, 0);
    }
    if (error != cudaSuccess) {
        return error;
    }

    float   * scores = (float *) scratch;
    int32_t * ids    = scratch + (size_t) x.n_tokens*op.n_expert;
    int32_t * slots  = ids + (size_t) x.n_tokens*n_predict;

    const predict_args args   = { x.data, x.token_bytes, router.data, op.bias, scores, x.n_embd, op.n_expert, x.n_tokens };
    const int          blocks = (op.n_expert*32 + PREDICT_BLOCK - 1)/PREDICT_BLOCK;
    switch (router.type) {
        case phase_cuda_router::F32:  predict_kernel<float>        <<<blocks, PREDICT_BLOCK, 0, side->stream>>>(args); break;
        case phase_cuda_router::F16:  predict_kernel<__half>       <<<blocks, PREDICT_BLOCK, 0, side->stream>>>(args); break;
        case phase_cuda_router::BF16: predict_kernel<__nv_bfloat16><<<blocks, PREDICT_BLOCK, 0, side->stream>>>(args); break;
    }
    choose_kernel<<<x.n_tokens, 32, 0, side->stream>>>(scores, op.n_expert, n_predict, ids);
    error = cudaGetLastError();

    if (error == cudaSuccess) {
        phase_fetch_op fetch = *op.next;
        fetch.counters = op.counters;
        const phase_cuda_ids predicted = { (const char *) ids, n_predict*sizeof(int32_t), n_predict, x.n_tokens };
        error = phase_cuda_fetch(fetch, predicted, state, slots, side->stream, false, COPY_BLOCKS);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(side->joined, side->stream);
    }
    if (error == cudaSuccess) {
        in_flight = side;
    }
    return error;
}
