// prefetch: the next layer's experts are predicted and copied on a second stream, beside what this layer still computes.
//
//   main     .. choice of l | fetch(l) | matmuls of l, attention of l+1, choice of l+1 | fetch(l+1) ..
//   second                  \ scores | choose | look up | copy ...                     /
//
// fork() and join() are events, so that a captured CUDA graph gets a parallel branch. Whoever ends a graph joins what no fetch did.

#include "expert-cuda-kernels.cuh"
#include "expert-cuda-launch.cuh"

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

// 16 bytes of a row of the router
template <typename T>
struct alignas(16) router_piece {
    static constexpr int SIZE = 16/sizeof(T);
    T w[SIZE];
};

template <typename T>
static __device__ __forceinline__ void add_piece(const predict_args & a, const router_piece<T> & piece, int32_t i, int32_t begin, int32_t n, float * sum) {
#pragma unroll
    for (int t = 0; t < PREDICT_BATCH; ++t) {
        if (t < n) {
            const float * x = (const float *) (a.x + (begin + t)*a.x_token_bytes) + i;
#pragma unroll
            for (int j = 0; j < router_piece<T>::SIZE; ++j) {
                sum[t] += to_float(piece.w[j])*x[j];
            }
        }
    }
}

// A warp scores one expert. In pieces when they are aligned: few loads, all in flight at once.
template <typename T>
static __global__ void __launch_bounds__(PREDICT_BLOCK) predict_kernel(predict_args a) {
    phase_let_successor_launch();

    constexpr int SIZE = router_piece<T>::SIZE;
    const int lane   = threadIdx.x % 32;
    const int expert = blockIdx.x*(PREDICT_BLOCK/32) + threadIdx.x/32;
    if (expert >= a.n_expert) {
        return;
    }
    const T  * row     = (const T *) a.router + (size_t) expert*a.n_embd;
    const bool aligned = (size_t) row % 16 == 0 && a.n_embd % SIZE == 0;

    for (int32_t begin = 0; begin < a.n_tokens; begin += PREDICT_BATCH) {
        const int32_t n = min(PREDICT_BATCH, a.n_tokens - begin);
        float sum[PREDICT_BATCH] = {};
        if (aligned) {
#pragma unroll 8
            for (int32_t i = lane*SIZE; i < a.n_embd; i += 32*SIZE) {
                add_piece(a, *(const router_piece<T> *) (row + i), i, begin, n, sum);
            }
        } else {
            for (int32_t i = lane; i < a.n_embd; i += 32) {
#pragma unroll
                for (int t = 0; t < PREDICT_BATCH; ++t) {
                    if (t < n) {
                        sum[t] += to_float(row[i])*((const float *) (a.x + (begin + t)*a.x_token_bytes))[i];
                    }
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

struct choose_args {
    const float * scores; // [n_tokens][n_expert]
    int32_t     * ids;    // out, [n_tokens][n_predict]
    int32_t       n_expert;
    int32_t       n_predict;
};

// Order of the choice: the larger score, then the lower id.
static __device__ __forceinline__ bool before(float score, int32_t id, float other_score, int32_t other_id) {
    return score > other_score || (score == other_score && id < other_id);
}

// One warp per token: n_predict times the best expert behind the last one chosen. NaN is never chosen; what is left is -1. A lane holds
// HELD scores in registers, enough for 32*HELD experts; 0: it reads them each time.
template <int HELD>
static __global__ void __launch_bounds__(32) choose_kernel(choose_args a) {
    phase_let_successor_launch();
    phase_wait_for_predecessor();

    const float * score = a.scores + (size_t) blockIdx.x*a.n_expert;

    float held[HELD ? HELD : 1];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int32_t e = threadIdx.x + 32*i;
        held[i] = e < a.n_expert ? score[e] : NAN;
    }

    float   last_score = FLT_MAX;
    int32_t last_id    = -1;
    for (int32_t k = 0; k < a.n_predict; ++k) {
        float   best    = -FLT_MAX;
        int32_t best_id = INT_MAX;

        const auto consider = [&](float x, int32_t e) {
            if (before(last_score, last_id, x, e) && before(x, e, best, best_id)) {
                best    = x;
                best_id = e;
            }
        };
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            consider(held[i], threadIdx.x + 32*i);
        }
        for (int32_t e = threadIdx.x; HELD == 0 && e < a.n_expert; e += 32) {
            consider(score[e], e);
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
            a.ids[blockIdx.x*a.n_predict + k] = best_id == INT_MAX ? -1 : best_id;
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
static thread_local const int32_t    * of_layer  = nullptr; // the layer it fills slots of, by its state
static thread_local const int32_t    * joined    = nullptr; // the layer that was joined before its fetch

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

cudaError_t phase_cuda_join_prefetch(cudaStream_t stream, const int32_t * state, bool & waited) {
    const bool earlier = joined && joined == state;
    waited = earlier;
    if (earlier || !state) {
        joined = nullptr;
    }
    if (!in_flight || (state && of_layer != state)) {
        return cudaSuccess;
    }
    const auto * side = in_flight;
    in_flight = nullptr;
    waited    = true;
    return cudaStreamWaitEvent(stream, side->joined, 0);
}

cudaError_t phase_cuda_prefetch(const phase_prefetch_op & op, const phase_cuda_activations & x, const phase_cuda_router & router,
        int32_t n_predict, int32_t * state, int32_t * scratch, cudaStream_t stream, bool pdl) {
    if (n_predict < 1 || x.n_tokens < 1 || !op.side) {
        return cudaErrorInvalidValue;
    }
    // this layer's own prefetch: its fetch comes behind this one
    const int32_t * this_layer = of_layer;
    bool            waited     = false;
    cudaError_t     error      = phase_cuda_join_prefetch(stream, nullptr, waited);
    joined = waited ? this_layer : nullptr;

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
    error = cudaGetLastError();
    if (error == cudaSuccess) {
        const choose_args choice = { scores, ids, op.n_expert, n_predict };
        const auto        kernel = op.n_expert <= 32*4 ? choose_kernel<4> : op.n_expert <= 32*16 ? choose_kernel<16> : choose_kernel<0>;
        error = phase_cuda_launch(kernel, choice, x.n_tokens, 32, 0, side->stream, pdl);
    }
    if (error == cudaSuccess) {
        phase_fetch_op fetch = *op.next;
        fetch.counters = op.counters;
        const phase_cuda_ids predicted = { (const char *) ids, n_predict*sizeof(int32_t), n_predict, x.n_tokens };
        error = phase_cuda_fetch(fetch, predicted, state, slots, side->stream, pdl, COPY_BLOCKS);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(side->joined, side->stream);
    }
    if (error == cudaSuccess) {
        in_flight = side;
        of_layer  = state;
    }
    return error;
}
