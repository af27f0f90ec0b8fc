// fetch: which slot holds an expert, and the copy of those that none holds. fill: experts for empty slots, and their copies.
//
// One block looks up (all tables in shared memory, so that a batch costs one round trip to device memory), then a grid copies by
// reading the pinned host memory with 16-byte loads. Both are launched with programmatic dependencies where the GPU has them: their
// blocks are in place when the predecessor ends, and wait there. Every kernel waits before it reads or writes anything but the
// counters, so the end of one implies the end of all before it.
//
// The counters are added to with atomics that return nothing: a read of host memory would stall for a PCIe round trip.

#include "expert-cuda-kernels.cuh"
#include "expert-cuda-launch.cuh"

#include <algorithm>
#include <climits>

static constexpr int BLOCK  = 256;
static constexpr int UNROLL = 4; // loads in flight per thread

static __device__ __forceinline__ void prefetch_l2(const void * p) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

static __device__ __forceinline__ int32_t warp_min(int32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_min_sync(~0u, x);
#else
    for (int offset = 16; offset > 0; offset /= 2) {
        x = min(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
#endif
}

static __device__ __forceinline__ void add(uint64_t * counter, uint64_t n) {
    atomicAdd((unsigned long long *) counter, (unsigned long long) n);
}

struct lookup_args {
    phase_cuda_ids      ids;
    int32_t             n_expert;
    int32_t             n_slots;
    int32_t           * state;
    int32_t           * slots; // out, [n_ids]
    phase_op_counters * counters;
};

// Lane l of the warp owns the slots l, l + 32, ...: the least recently used of them.
static __device__ __forceinline__ void oldest_of_lane(const int32_t * stamp, int32_t n_slots, int lane, int32_t & oldest, int32_t & slot) {
    oldest = INT_MAX;
    slot   = INT_MAX;
    for (int32_t s = lane; s < n_slots; s += 32) {
        if (stamp[s] < oldest) {
            oldest = stamp[s];
            slot   = s;
        }
    }
}

static __global__ void __launch_bounds__(BLOCK, 1) lookup_kernel(lookup_args a) {
    extern __shared__ int32_t tables[];
    int32_t * const slot_of   = tables;
    int32_t * const first     = slot_of   + a.n_expert; // where in the batch an expert appears first
    int32_t * const expert_of = first     + a.n_expert;
    int32_t * const stamp     = expert_of + a.n_slots;
    int32_t * const ids       = stamp     + a.n_slots;

    int32_t * const g_slot_of   = a.state + a.n_expert; // behind seen
    int32_t * const g_expert_of = g_slot_of   + a.n_expert;
    int32_t * const g_stamp     = g_expert_of + a.n_slots;
    int32_t * const g_clock     = g_stamp     + a.n_slots;
    int32_t * const g_n_jobs    = g_clock  + 1;
    int32_t * const g_jobs      = g_n_jobs + 1;

    const int     tid   = threadIdx.x;
    const int32_t n_ids = a.ids.n_used*a.ids.n_tokens;

    phase_let_successor_launch();
    for (int32_t i = 32*tid; i < a.n_expert + 2*a.n_slots + 2; i += 32*BLOCK) {
        prefetch_l2(g_slot_of + i);
    }
    if (tid == 0 && a.counters) {
        add(&a.counters->looked_up, n_ids);
        add(&a.counters->runs, 1);
    }
    phase_wait_for_predecessor();

    const int32_t last_clock = *g_clock;
    const bool    wrapped    = last_clock == INT_MAX;
    const int32_t clock      = wrapped ? 1 : last_clock + 1;

    for (int32_t i = tid; i < n_ids; i += BLOCK) {
        const int32_t id = *(const int32_t *) (a.ids.data + (i/a.ids.n_used)*a.ids.token_bytes + (i%a.ids.n_used)*sizeof(int32_t));
        ids[i] = id >= 0 && id < a.n_expert ? id : -1; // nonsense (NaN in the router) must not become an address
    }
    for (int32_t e = tid; e < a.n_expert; e += BLOCK) {
        slot_of[e] = g_slot_of[e];
        first[e]   = INT_MAX;
    }
    for (int32_t s = tid; s < a.n_slots; s += BLOCK) {
        expert_of[s] = g_expert_of[s];
        stamp[s]     = wrapped ? 0 : g_stamp[s];
    }
    __syncthreads();

    for (int32_t i = tid; i < n_ids; i += BLOCK) {
        if (ids[i] >= 0) {
            atomicMin(&first[ids[i]], i);
        }
    }
    __syncthreads();

    for (int32_t i = tid; i < n_ids; i += BLOCK) {
        const int32_t e = ids[i];
        if (e >= 0 && first[e] == i && slot_of[e] >= 0) {
            stamp[slot_of[e]] = clock;
        }
    }
    __syncthreads();

    if (tid < 32) {
        int32_t n_jobs    = 0;
        int32_t n_evicted = 0; // by this lane
        int32_t oldest    = 0;
        int32_t oldest_slot = -1;

        for (int32_t base = 0; base < n_ids; base += 32) {
            const int32_t i    = base + tid;
            const int32_t e    = i < n_ids ? ids[i] : -1;
            unsigned   missing = __ballot_sync(~0u, e >= 0 && first[e] == i && slot_of[e] < 0);

            while (missing) {
                const int32_t expert = __shfl_sync(~0u, e, __ffs(missing) - 1);
                missing &= missing - 1;

                if (n_jobs == 0) {
                    oldest_of_lane(stamp, a.n_slots, tid, oldest, oldest_slot);
                }
                const int32_t least = warp_min(oldest);
                const int32_t slot  = warp_min(oldest == least ? oldest_slot : INT_MAX);

                if (oldest_slot == slot) {
                    const int32_t evicted = expert_of[slot];
                    if (evicted >= 0) {
                        slot_of[evicted]   = -1;
                        g_slot_of[evicted] = -1;
                        n_evicted++;
                    }
                    expert_of[slot]   = expert;
                    slot_of[expert]   = slot;
                    stamp[slot]       = clock;
                    g_jobs[2*n_jobs]     = expert;
                    g_jobs[2*n_jobs + 1] = slot;
                    oldest_of_lane(stamp, a.n_slots, tid, oldest, oldest_slot);
                }
                n_jobs++;
            }
            __syncwarp();
        }

        for (int offset = 16; offset > 0; offset /= 2) {
            n_evicted += __shfl_xor_sync(~0u, n_evicted, offset);
        }
        if (tid == 0) {
            *g_n_jobs = n_jobs;
            *g_clock  = clock;
            if (a.counters && n_jobs > 0) {
                add(&a.counters->missed,  n_jobs);
                add(&a.counters->evicted, n_evicted);
            }
        }
    }
    __syncthreads();

    for (int32_t i = tid; i < n_ids; i += BLOCK) {
        const int32_t e = ids[i];
        a.slots[i] = e >= 0 ? slot_of[e] : 0;
        if (e >= 0 && first[e] == i) {
            g_slot_of[e] = slot_of[e];
        }
    }
    for (int32_t s = tid; s < a.n_slots; s += BLOCK) {
        if (wrapped || stamp[s] == clock) {
            g_stamp[s]     = stamp[s];
            g_expert_of[s] = expert_of[s];
        }
    }
}

struct fill_args {
    int32_t    n_expert;
    int32_t    n_slots;
    int32_t  * state;
    phase_fill list;
};

// A tile is what one block moves at once: BLOCK*UNROLL units of 16 bytes, or of the largest size that divides addresses and stride.
struct copy_part {
    const uint8_t * src;
    uint8_t       * dst;
    size_t          stride;
    int32_t         unit;
    int32_t         tiles_end; // tiles of this tensor and of those before it, in one expert; INT_MAX: no tensor
};

struct copy_args {
    copy_part       parts[PHASE_MAX_TENSORS];
    int32_t         n_tiles; // of one expert
    const int32_t * n_jobs;  // the jobs follow
};

template <typename T>
static __device__ __forceinline__ void copy_tile(const uint8_t * src_bytes, uint8_t * dst_bytes, size_t n_bytes, int32_t tile) {
    const T * src = (const T *) src_bytes;
    T       * dst = (T *) dst_bytes;

    const size_t n     = n_bytes/sizeof(T);
    const size_t begin = (size_t) tile*(BLOCK*UNROLL) + threadIdx.x;

    T v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (begin + u*BLOCK < n) {
            v[u] = __ldcs(src + begin + u*BLOCK);
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (begin + u*BLOCK < n) {
            dst[begin + u*BLOCK] = v[u]; // stays in L2, the matmul reads it next
        }
    }
}

static __global__ void __launch_bounds__(BLOCK) copy_kernel(copy_args a) {
    phase_let_successor_launch();
    phase_wait_for_predecessor();

    const int32_t * const jobs  = a.n_jobs + 1;
    const int32_t         total = *a.n_jobs*a.n_tiles;

    for (int32_t t = blockIdx.x; t < total; t += gridDim.x) {
        const int32_t job      = t/a.n_tiles;
        const int32_t job_tile = t - job*a.n_tiles;
        int32_t       tile     = job_tile;

        copy_part part = a.parts[0];
#pragma unroll
        for (int i = 1; i < PHASE_MAX_TENSORS; ++i) { // not indexed by a variable: the arguments stay in constant memory
            if (job_tile >= a.parts[i - 1].tiles_end) {
                part = a.parts[i];
                tile = job_tile - a.parts[i - 1].tiles_end;
            }
        }

        const uint8_t * src = part.src + jobs[2*job]*part.stride;
        uint8_t       * dst = part.dst + jobs[2*job + 1]*part.stride;
        switch (part.unit) {
            case 16: copy_tile<uint4>   (src, dst, part.stride, tile); break;
            case  4: copy_tile<uint32_t>(src, dst, part.stride, tile); break;
            case  2: copy_tile<uint16_t>(src, dst, part.stride, tile); break;
            default: copy_tile<uint8_t> (src, dst, part.stride, tile); break;
        }
    }
}

static int32_t unit_of(const phase_op_tensor & t) {
    const uintptr_t bits = (uintptr_t) t.src | (uintptr_t) t.dst | t.stride;
    return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

bool phase_cuda_can_use_pdl() {
    // compiled for 9.0 or newer and not translated from older PTX, which would lack the wait
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, lookup_kernel) != cudaSuccess) {
        (void) cudaGetLastError();
        return false;
    }
    return attributes.ptxVersion >= 90;
}

static copy_args copy_args_of(const phase_fetch_op & op, const int32_t * state) {
    copy_args copy = {};
    for (int32_t i = 0; i < PHASE_MAX_TENSORS; ++i) {
        const auto & t = op.tensors[i];
        if (i >= op.n_tensors) {
            copy.parts[i].tiles_end = INT_MAX;
            continue;
        }
        const int32_t unit       = unit_of(t);
        const size_t  tile_bytes = (size_t) BLOCK*UNROLL*unit;
        copy.n_tiles += (int32_t) ((t.stride + tile_bytes - 1)/tile_bytes);
        copy.parts[i] = { t.src, t.dst, t.stride, unit, copy.n_tiles };
    }
    copy.n_jobs = state + 2*op.n_expert + 2*op.n_slots + 1;
    return copy;
}

// one block per multiprocessor, unless the caller has chosen
static cudaError_t multiprocessors(int & blocks) {
    int device = 0;
    if (blocks > 0) {
        return cudaSuccess;
    }
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
}

cudaError_t phase_cuda_fetch(const phase_fetch_op & op, const phase_cuda_ids & ids, int32_t * state, int32_t * slots,
        cudaStream_t stream, bool pdl, int blocks, bool joined) {
    const int32_t n_ids = ids.n_used*ids.n_tokens;
    const int32_t words = phase_cuda_table_words(op.n_expert, op.n_slots, n_ids);
    if (n_ids <= 0 || n_ids > PHASE_MAX_IDS || std::min(n_ids, op.n_expert) > op.n_slots || words > PHASE_CUDA_TABLE_WORDS ||
            op.n_tensors < 1 || op.n_tensors > PHASE_MAX_TENSORS) {
        return cudaErrorInvalidValue;
    }

    const lookup_args lookup = { ids, op.n_expert, op.n_slots, state, slots, op.counters };
    cudaError_t error = multiprocessors(blocks);
    if (error == cudaSuccess) {
        error = phase_cuda_launch(lookup_kernel, lookup, 1, BLOCK, words*sizeof(int32_t), stream, pdl && !joined);
    }
    return error != cudaSuccess ? error : phase_cuda_launch(copy_kernel, copy_args_of(op, state), blocks, BLOCK, 0, stream, pdl);
}

// One warp: the empty slots in their order, then the experts of the list in theirs.
static __global__ void __launch_bounds__(32) fill_kernel(fill_args a) {
    __shared__ int32_t empty[PHASE_FILL_IDS];

    int32_t * const slot_of   = a.state + a.n_expert; // behind seen
    int32_t * const expert_of = slot_of   + a.n_expert;
    int32_t * const stamp     = expert_of + a.n_slots;
    int32_t * const n_jobs    = stamp     + a.n_slots + 1; // behind the clock
    int32_t * const jobs      = n_jobs + 1;

    const int32_t  lane   = threadIdx.x;
    const unsigned before = (1u << lane) - 1;

    int32_t n_empty = 0;
    for (int32_t base = 0; base < a.n_slots; base += 32) {
        const int32_t  slot  = base + lane;
        const bool     mine  = slot < a.n_slots && expert_of[slot] < 0;
        const unsigned mask  = __ballot_sync(~0u, mine);
        const int32_t  index = n_empty + __popc(mask & before);
        if (mine && index < PHASE_FILL_IDS) {
            empty[index] = slot;
        }
        n_empty += __popc(mask);
    }
    n_empty = min(n_empty, PHASE_FILL_IDS);
    __syncwarp();

    int32_t n_absent = 0;
    for (int32_t base = 0; base < a.list.n; base += 32) {
        const int32_t  i      = base + lane;
        const int32_t  expert = i < a.list.n ? a.list.experts[i] : 0;
        const bool     absent = i < a.list.n && slot_of[expert] < 0;
        const unsigned mask   = __ballot_sync(~0u, absent);
        const int32_t  index  = n_absent + __popc(mask & before);
        if (absent && index < n_empty) {
            const int32_t slot = empty[index];
            expert_of[slot]   = expert;
            slot_of[expert]   = slot;
            stamp[slot]       = a.list.newest - i;
            jobs[2*index]     = expert;
            jobs[2*index + 1] = slot;
        }
        n_absent += __popc(mask);
    }
    if (lane == 0) {
        const int32_t n_filled = min(n_absent, n_empty);
        *n_jobs = n_filled;
        if (a.list.counters) {
            add(&a.list.counters->looked_up, a.list.n);
            add(&a.list.counters->missed, n_filled);
            add(&a.list.counters->runs, 1);
        }
    }
}

cudaError_t phase_cuda_fill(const phase_fetch_op & op, int32_t * state, const phase_fill & list, cudaStream_t stream) {
    if (list.n < 0 || list.n > PHASE_FILL_IDS || op.n_tensors < 1 || op.n_tensors > PHASE_MAX_TENSORS) {
        return cudaErrorInvalidValue;
    }
    int         blocks = 0;
    cudaError_t error  = multiprocessors(blocks);
    if (error == cudaSuccess) {
        const fill_args args = { op.n_expert, op.n_slots, state, list };
        error = phase_cuda_launch(fill_kernel, args, 1, 32, 0, stream, false);
    }
    return error != cudaSuccess ? error : phase_cuda_launch(copy_kernel, copy_args_of(op, state), blocks, BLOCK, 0, stream, false);
}
