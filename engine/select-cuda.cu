#include "select-cuda.cuh"

#include "expert-op.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

static std::atomic<bool> is_fast{false};

void phase_cuda_set_select(bool fast) {
    is_fast = fast;
}

static constexpr int N_THREADS = 1024;
static constexpr int N_WARPS   = N_THREADS/32;
static constexpr unsigned FULL = 0xffffffffu;

// Inclusive prefix sum of one number per lane. All lanes call it.
static __device__ int scan_lanes(int own) {
    const int lane = threadIdx.x % 32;
    int       sum  = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(FULL, sum, d);
        sum += lane >= d ? below : 0;
    }
    return sum;
}

// Exclusive prefix sum of one number per warp; `total` gets the sum. Every thread of the block calls it, with the number of its warp.
static __device__ int scan_warps(int of_warp, int & total, int * shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    __syncthreads(); // the previous use of `shared` is over
    if (lane == 0) {
        shared[warp] = of_warp;
    }
    __syncthreads();
    const int sum = scan_lanes(shared[lane]);
    total = __shfl_sync(FULL, sum, 31);
    return warp == 0 ? 0 : __shfl_sync(FULL, sum, warp - 1);
}

//
// mask -> indices
//

// Columns of one chunk: warp w owns STEPS*256 consecutive ones, of which a lane holds 8 neighbours per step as bits.
static constexpr int STEPS = 16;
static constexpr int CHUNK = N_WARPS*STEPS*256;

static __global__ void __launch_bounds__(N_THREADS, 1) compact_mask_kernel(const half * mask, int32_t * indices, int32_t * counts,
        int32_t n_kv, int32_t n_kv_max, int64_t query_stride, int64_t sequence_stride) {
    __shared__ int shared[N_WARPS];

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row  = blockIdx.y*gridDim.x + blockIdx.x;

    mask    += blockIdx.y*sequence_stride + blockIdx.x*query_stride;
    indices += (int64_t) row*n_kv_max;

    int n_found = 0;
    for (int chunk = 0; chunk < n_kv; chunk += CHUNK) {
        const int begin = chunk + warp*STEPS*256 + lane*8;
        uint4 raw[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int column = begin + step*256;
            raw[step] = column < n_kv ? *(const uint4 *) (mask + column) : make_uint4(0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u, 0xfc00fc00u);
        }
        unsigned bits[STEPS/4] = {};
        int of_lane = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const unsigned words[4] = { raw[step].x, raw[step].y, raw[step].z, raw[step].w };
            unsigned found = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const unsigned value = (words[i/2] >> (i%2*16)) & 0x7fff;
                found |= (value < 0x7c00 ? 1u : 0u) << i; // finite
            }
            bits[step/4] |= found << (step%4*8);
            of_lane += __popc(found);
        }
        int of_warp = of_lane;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            of_warp += __shfl_xor_sync(FULL, of_warp, d);
        }
        int in_chunk = 0;
        int dst = n_found + scan_warps(of_warp, in_chunk, shared);
        n_found += in_chunk;
        if (of_warp > 0) { // the same for the whole warp
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const unsigned found = (bits[step/4] >> (step%4*8)) & 0xff;
                if (__ballot_sync(FULL, found != 0) == 0) {
                    continue;
                }
                const int before = scan_lanes(__popc(found));
                const int in_step = __shfl_sync(FULL, before, 31);
                int at = dst + before - __popc(found);
                for (unsigned left = found; left; left &= left - 1) {
                    if (at < n_kv_max) {
                        indices[at] = begin + step*256 + __ffs(left) - 1;
                    }
                    ++at;
                }
                dst += in_step;
            }
        }
    }
    const int count = min(n_found, n_kv_max);
    for (int i = count + threadIdx.x; i < n_kv_max; i += N_THREADS) {
        indices[i] = -1;
    }
    if (threadIdx.x == 0) {
        counts[row] = count;
    }
}

cudaError_t phase_cuda_launch_compact_mask(const half * mask, int32_t * indices, int32_t * counts, int32_t n_kv, int32_t n_queries,
        int32_t n_sequences, int32_t n_kv_max, int64_t query_stride, int64_t sequence_stride, cudaStream_t stream) {
    compact_mask_kernel<<<dim3(n_queries, n_sequences), N_THREADS, 0, stream>>>(mask, indices, counts, n_kv, n_kv_max, query_stride, sequence_stride);
    return cudaGetLastError();
}

//
// scores of pools
//

static constexpr int SCORE_WARPS = 8;
static constexpr int SCORE_KEYS  = 8; // of a warp, all in flight; a lane has four elements of each

static __global__ void __launch_bounds__(SCORE_WARPS*32) score_kernel(phase_cuda_scores s) {
    __shared__ float4 q[PHASE_SCORE_HEADS][PHASE_SCORE_EMBD/4];

    const int  lane  = threadIdx.x % 32;
    const int  token = blockIdx.y;
    const int  first = (blockIdx.x*SCORE_WARPS + threadIdx.x/32)*SCORE_KEYS;
    const auto cell_of = [&](int pool) { return pool < s.n_pool ? s.cells[pool] : -1; };

    const int own_cell = lane < SCORE_KEYS ? cell_of(first + lane) : -1;
    uint2 raw[SCORE_KEYS];
#pragma unroll
    for (int k = 0; k < SCORE_KEYS; ++k) {
        const int cell = __shfl_sync(FULL, own_cell, k);
        raw[k] = cell < 0 ? make_uint2(0, 0) : ((const uint2 *) (s.keys + (int64_t) cell*s.key_bytes))[lane];
    }
    if (threadIdx.x < PHASE_SCORE_HEADS*PHASE_SCORE_EMBD/4) {
        const int head = threadIdx.x/32;
        q[head][lane] = ((const float4 *) (s.q + token*s.token_bytes + head*s.head_bytes))[lane];
    }
    __syncthreads();

    float score = 0.0f; // of key `lane`
#pragma unroll
    for (int k = 0; k < SCORE_KEYS; ++k) {
        const float2 low  = __half22float2(*(const half2 *) &raw[k].x);
        const float2 high = __half22float2(*(const half2 *) &raw[k].y);
        float of_key = 0.0f;
#pragma unroll
        for (int head = 0; head < PHASE_SCORE_HEADS; ++head) {
            const float4 of_head = q[head][lane];
            float sum = 0.0f;
            sum = fmaf(of_head.x, low.x, sum);
            sum = fmaf(of_head.y, low.y, sum);
            sum = fmaf(of_head.z, high.x, sum);
            sum = fmaf(of_head.w, high.y, sum);
#pragma unroll
            for (int d = 16; d > 0; d /= 2) {
                sum += __shfl_xor_sync(FULL, sum, d);
            }
            sum = sum > 0.0f ? sum : 0.0f;
            of_key = fmaf(sum, s.weight, of_key);
        }
        score = lane == k ? of_key : score;
    }
    const int pool = first + lane;
    if (lane < SCORE_KEYS && pool < s.n_pool) {
        s.score[(int64_t) token*s.n_pool + pool] = score + __half2float(((const half *) (s.mask + token*s.mask_bytes))[pool]);
    }
}

cudaError_t phase_cuda_launch_score(const phase_cuda_scores & s, cudaStream_t stream) {
    static_assert(PHASE_SCORE_EMBD == 4*32 && PHASE_SCORE_HEADS <= SCORE_WARPS, "a warp and a key");
    constexpr int PER_BLOCK = SCORE_WARPS*SCORE_KEYS;
    score_kernel<<<dim3((s.n_pool + PER_BLOCK - 1)/PER_BLOCK, s.n_tokens), SCORE_WARPS*32, 0, stream>>>(s);
    return cudaGetLastError();
}

//
// pools and tail -> mask and indices
//

// Cells of the mask that a block writes; more blocks per token choose the same rows and write other parts.
static constexpr int SELECT_PART = 32768;

static __global__ void __launch_bounds__(N_THREADS, 1) select_kernel(phase_cuda_selection s) {
    extern __shared__ uint32_t bits[]; // of the chosen cells
    __shared__ int shared[N_WARPS];

    const int token   = blockIdx.x;
    const int n_words = s.n_kv/32;

    const auto * score   = s.score   + (int64_t) token*s.n_pool;
    const auto * top_k   = s.top_k   + (int64_t) token*s.n_top;
    const auto * tail    = s.tails   + (int64_t) token*s.n_tail;
    const auto * visible = s.visible + (int64_t) token*s.n_kv;

    for (int i = threadIdx.x; i < n_words; i += N_THREADS) {
        bits[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.kpool*s.n_top + s.n_tail; i += N_THREADS) {
        int cell = s.n_kv;
        if (i < s.kpool*s.n_top) {
            const int pool = top_k[i/s.kpool];
            if (score[pool] >= 0.0f) { // else it is not visible: the choice was short of pools
                cell = s.pools[(int64_t) pool*s.kpool + i%s.kpool];
            }
        } else {
            cell = tail[i - s.kpool*s.n_top];
        }
        if (cell < s.n_kv && (visible[cell] & 0x7c00) != 0x7c00) {
            atomicOr(&bits[cell/32], 1u << cell%32);
        }
    }
    __syncthreads();

    if (blockIdx.y == 0) {
        const int n_own = (n_words + N_THREADS - 1)/N_THREADS;
        const int begin = min((int) threadIdx.x*n_own, n_words);
        const int end   = min(begin + n_own, n_words);
        int found = 0;
        for (int i = begin; i < end; ++i) {
            found += __popc(bits[i]);
        }
        const int upto = scan_lanes(found);
        int n_found = 0;
        int at = scan_warps(__shfl_sync(FULL, upto, 31), n_found, shared) + upto - found;
        auto * rows = s.rows() + (int64_t) token*s.n_sel();
        for (int i = begin; i < end; ++i) {
            for (uint32_t left = bits[i]; left; left &= left - 1) {
                rows[at++] = i*32 + __ffs(left) - 1;
            }
        }
        for (int i = n_found + threadIdx.x; i < s.n_sel(); i += N_THREADS) {
            rows[i] = -1;
        }
        if (threadIdx.x == 0) {
            s.counts()[token] = n_found;
        }
    }

    auto *    mask = s.mask + (int64_t) token*s.n_kv;
    const int last = min((int) (blockIdx.y + 1)*SELECT_PART, s.n_kv);
    for (int i = blockIdx.y*SELECT_PART + threadIdx.x*8; i < last; i += N_THREADS*8) {
        const uint32_t chosen = (bits[i/32] >> i%32) & 0xff;
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t low  = chosen >> 2*k       & 1 ? visible[i + 2*k]     : 0xfc00;
            const uint32_t high = chosen >> (2*k + 1) & 1 ? visible[i + 2*k + 1] : 0xfc00;
            words[k] = low | high << 16;
        }
        *(uint4 *) (mask + i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

static constexpr int SELECT_PLAIN_BYTES = 40*1024; // what a kernel may have without asking, less what select_kernel has beside

bool phase_cuda_select_fits(int64_t n_kv) {
    int device = 0, most = 0;
    (void) cudaGetDevice(&device);
    (void) cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return n_kv/8 + 1024 <= most;
}

cudaError_t phase_cuda_launch_select(const phase_cuda_selection & s, cudaStream_t stream) {
    const int n_bytes = s.n_kv/8;
    if (n_bytes > SELECT_PLAIN_BYTES) {
        const cudaError_t error = cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
        if (error != cudaSuccess) {
            return error;
        }
    }
    select_kernel<<<dim3(s.n_tokens, (s.n_kv + SELECT_PART - 1)/SELECT_PART), N_THREADS, n_bytes, stream>>>(s);
    return cudaGetLastError();
}

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "llama-phase: selection of rows: %s\n", cudaGetErrorString(error));
        std::abort();
    }
}

bool phase_cuda_compact_mask(const half * mask, int32_t * indices, int32_t * counts, int64_t n_kv, int64_t n_queries, int64_t n_sequences,
        int32_t n_kv_max, int64_t query_stride, int64_t sequence_stride, cudaStream_t stream) {
    const bool aligned = (uintptr_t) mask % 16 == 0 && n_kv % 8 == 0 && query_stride % 8 == 0 && sequence_stride % 8 == 0;
    if (!is_fast || !aligned || n_sequences > 65535 || n_kv > INT32_MAX/2) {
        return false;
    }
    check(phase_cuda_launch_compact_mask(mask, indices, counts, (int32_t) n_kv, (int32_t) n_queries, (int32_t) n_sequences, n_kv_max,
            query_stride, sequence_stride, stream));
    return true;
}

//
// top k
//

// larger values have larger keys; the two zeros are equal, as they are to the sort
static __device__ uint32_t key_of(float value) {
    uint32_t bits = __float_as_uint(value);
    bits = bits == 0x80000000u ? 0 : bits;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static constexpr int N_BINS       = 2048; // of the leading 11 bits, then of 11 and 10 more
static constexpr int N_CANDIDATES = 4096; // keys with the leading bits of the k-th largest

struct top_k_shared {
    int      histogram[N_BINS];
    uint32_t keys[N_CANDIDATES];
    int      columns[N_CANDIDATES];
    int      scan[N_WARPS];
    int      bin;
    int      rank;
    int      n_written;
    int      n_candidates;
};

// Which bin of `n_bins` holds the key of that rank, from the largest, from 1; the rank within the bin.
template <int n_bins>
static __device__ void find_bin(top_k_shared & shared, int rank) {
    constexpr int N_OWN = n_bins/N_THREADS;
    __syncthreads();
    int own[N_OWN];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < N_OWN; ++i) {
        own[i] = shared.histogram[n_bins - 1 - N_OWN*threadIdx.x - i];
        sum += own[i];
    }
    const int upto = scan_lanes(sum);
    int total = 0;
    int before = scan_warps(__shfl_sync(FULL, upto, 31), total, shared.scan) + upto - sum;
    if (before < rank && rank <= before + sum) { // one thread
        int i = 0;
        while (before + own[i] < rank) {
            before += own[i++];
        }
        shared.bin  = n_bins - 1 - N_OWN*threadIdx.x - i;
        shared.rank = rank - before;
    }
    __syncthreads();
}

static __device__ void clear_bins(top_k_shared & shared) {
    __syncthreads();
    for (int i = threadIdx.x; i < N_BINS; i += N_THREADS) {
        shared.histogram[i] = 0;
    }
    __syncthreads();
}

// Reads the row twice: once for a histogram of the leading bits, once to write what is above the k-th largest and to gather what shares
// its leading bits, of which the rest is found in shared memory. False, with nothing written, when those are too many.
static __device__ bool top_k_of_candidates(const float * __restrict__ values, int32_t * __restrict__ indices, int n_columns, int k, top_k_shared & shared) {
    constexpr int IN_FLIGHT = 8;
    const auto each = [&](const auto & use) {
        for (int base = threadIdx.x; base < n_columns; base += IN_FLIGHT*N_THREADS) {
            float value[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int column = base + i*N_THREADS;
                value[i] = column < n_columns ? values[column] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int column = base + i*N_THREADS;
                if (column < n_columns) {
                    use(column, key_of(value[i]));
                }
            }
        }
    };
    clear_bins(shared);
    each([&](int, uint32_t key) { atomicAdd(&shared.histogram[key >> 21], 1); });
    find_bin<N_BINS>(shared, k);
    const uint32_t leading = shared.bin;
    const int      rank    = shared.rank;
    const int      n       = shared.histogram[leading];
    if (n > N_CANDIDATES) {
        return false;
    }
    if (threadIdx.x == 0) {
        shared.n_written    = 0;
        shared.n_candidates = 0;
    }
    clear_bins(shared);
    each([&](int column, uint32_t key) {
        if (key >> 21 > leading) {
            indices[atomicAdd(&shared.n_written, 1)] = column;
        } else if (key >> 21 == leading) {
            const int at = atomicAdd(&shared.n_candidates, 1);
            shared.keys[at]    = key;
            shared.columns[at] = column;
            atomicAdd(&shared.histogram[key >> 10 & 2047], 1);
        }
    });
    find_bin<N_BINS>(shared, rank);
    const uint32_t middle      = leading << 11 | shared.bin;
    const int      rank_middle = shared.rank;
    clear_bins(shared);
    for (int i = threadIdx.x; i < n; i += N_THREADS) {
        if (shared.keys[i] >> 10 == middle) {
            atomicAdd(&shared.histogram[shared.keys[i] & 1023], 1);
        }
    }
    find_bin<N_BINS/2>(shared, rank_middle);
    const uint32_t last    = middle << 10 | shared.bin;
    const int      n_equal = shared.rank; // of the keys equal to the last, so many are taken
    const bool     all     = shared.histogram[shared.bin] == n_equal;
    for (int i = threadIdx.x; i < n; i += N_THREADS) {
        bool taken = shared.keys[i] > last;
        if (shared.keys[i] == last) {
            int n_before = 0;
            for (int other = 0; !all && other < n; ++other) {
                n_before += shared.keys[other] == last && shared.columns[other] < shared.columns[i];
            }
            taken = n_before < n_equal;
        }
        if (taken) {
            indices[atomicAdd(&shared.n_written, 1)] = shared.columns[i];
        }
    }
    return true;
}

// When top_k_of_candidates() does not do: finds the k-th largest key byte by byte, from a histogram of those that agree with it so far;
// then writes what is larger, and of the equal ones the first.
static __global__ void __launch_bounds__(N_THREADS, 1) top_k_kernel(const float * __restrict__ values, int32_t * __restrict__ indices,
        int32_t n_columns, int32_t k) {
    __shared__ top_k_shared candidates;
    __shared__ uint32_t s_prefix;
    __shared__ int s_rank;

    int * const histogram = candidates.histogram;
    int * const shared    = candidates.scan;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    values  += (int64_t) blockIdx.x*n_columns;
    indices += (int64_t) blockIdx.x*k;

    if (top_k_of_candidates(values, indices, n_columns, k, candidates)) { // the same for the whole block
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s_prefix = 0;
        s_rank   = k; // of the key sought among those that agree with the prefix, from the largest, from 1
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) {
            histogram[threadIdx.x] = 0;
        }
        __syncthreads();
        const uint32_t prefix = s_prefix;
        const int      rank   = s_rank;
#pragma unroll 4
        for (int base = 0; base < n_columns; base += N_THREADS) { // uniform: the warp votes below
            const int      i     = base + threadIdx.x;
            const uint32_t key   = i < n_columns ? key_of(values[i]) : 0;
            const bool     takes = i < n_columns && (shift == 24 || (key >> (shift + 8)) == (prefix >> (shift + 8)));
            const int      bin   = (key >> shift) & 255;
            if (__ballot_sync(FULL, takes) == 0) {
                continue;
            }
            // scores share their leading bytes, so one atomic per bin and warp
            const unsigned same   = __match_any_sync(FULL, takes ? bin : -1);
            if (takes && lane == __ffs(same) - 1) {
                atomicAdd(&histogram[bin], __popc(same));
            }
        }
        __syncthreads();
        if (warp == 0) {
            // lane l holds bins 255 - 8*l down to 248 - 8*l
            int own[8];
            int sum = 0;
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                own[b] = histogram[255 - 8*lane - b];
                sum += own[b];
            }
            const int upto = scan_lanes(sum);
            int before = upto - sum;
            if (before < rank && rank <= upto) { // one lane
                int b = 0;
                while (before + own[b] < rank) {
                    before += own[b++];
                }
                s_prefix = prefix | (uint32_t) (255 - 8*lane - b) << shift;
                s_rank   = rank - before;
            }
        }
        __syncthreads();
    }

    const uint32_t last    = s_prefix;
    const int      n_equal = s_rank; // of the keys equal to the last, so many are taken
    const int      n_above = k - n_equal;
    int above = 0;
    int equal = 0;
    for (int base = 0; base < n_columns; base += N_THREADS) {
        const int      i   = base + threadIdx.x;
        const uint32_t key = i < n_columns ? key_of(values[i]) : 0;
        const unsigned is_above = __ballot_sync(FULL, i < n_columns && key > last);
        const unsigned is_equal = __ballot_sync(FULL, i < n_columns && key == last);
        // both counts of a warp in one number: neither reaches 2^15 in a step
        int total = 0;
        const int begin = scan_warps(__popc(is_above) | __popc(is_equal) << 16, total, shared);
        const unsigned lower = (1u << lane) - 1;
        if (is_above >> lane & 1) {
            indices[above + (begin & 0xffff) + __popc(is_above & lower)] = i;
        }
        if (is_equal >> lane & 1) {
            const int at = equal + (begin >> 16) + __popc(is_equal & lower);
            if (at < n_equal) {
                indices[n_above + at] = i;
            }
        }
        above += total & 0xffff;
        equal += total >> 16;
    }
}

cudaError_t phase_cuda_launch_top_k(const float * values, int32_t * indices, int32_t n_columns, int32_t n_rows, int32_t k, cudaStream_t stream) {
    top_k_kernel<<<n_rows, N_THREADS, 0, stream>>>(values, indices, n_columns, k);
    return cudaGetLastError();
}

bool phase_cuda_top_k(const float * values, int32_t * indices, int64_t n_columns, int64_t n_rows, int64_t k, cudaStream_t stream) {
    // up to 1024 columns upstream sorts in shared memory, and not stably; the rows of a prompt it sorts not stably either
    if (!is_fast || n_columns <= 1024 || n_columns > INT32_MAX/2 || n_rows > 8 || k > n_columns) {
        return false;
    }
    check(phase_cuda_launch_top_k(values, indices, (int32_t) n_columns, (int32_t) n_rows, (int32_t) k, stream));
    return true;
}
