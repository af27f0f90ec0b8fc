#include "kv-rows-cuda.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int      N_THREADS        = 1024;
constexpr int      N_WARPS          = N_THREADS/32;
constexpr int      N_COPY_BLOCKS    = PHASE_CUDA_KV_ROWS_BLOCKS - 1;
constexpr int      N_UNITS          = 4; // of 16 bytes that a lane has in flight: K and V rows of 1 KiB
constexpr int      N_GATHER_THREADS = 512;
constexpr int      N_GATHER_BLOCKS  = 528; // at most
constexpr unsigned FULL             = 0xffffffffu;

// A block, or threads that come to none of sync, add and tally.
struct block_group {
    int thread;
    int n_threads;

    __host__ __device__ void sync() {
#ifdef __CUDA_ARCH__
        __syncthreads();
#endif
    }
    // one atomic per warp
    __host__ __device__ int add(int * at, int n) {
#ifdef __CUDA_ARCH__
        if (__ballot_sync(FULL, n > 0) == 0) {
            return 0;
        }
        const int lane = thread % 32;
        int       sum  = n;
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(FULL, sum, d);
            sum += lane >= d ? below : 0;
        }
        return __shfl_sync(FULL, lane == 31 ? atomicAdd(at, sum) : 0, 31) + sum - n;
#else
        return 0;
#endif
    }
    // one atomic per warp and value
    __host__ __device__ void tally(int * counts, int which) {
#ifdef __CUDA_ARCH__
        const unsigned same = __match_any_sync(FULL, which);
        if (which >= 0 && thread % 32 == __ffs(same) - 1) {
            atomicAdd(&counts[which], __popc(same));
        }
#endif
    }
    __host__ __device__ bool claim(int * at) {
#ifdef __CUDA_ARCH__
        return atomicCAS(at, PHASE_KV_ROWS_NONE, PHASE_KV_ROWS_CLAIMED) == PHASE_KV_ROWS_NONE;
#else
        return false;
#endif
    }
    __host__ __device__ void prefetch(const void * p) {
#ifdef __CUDA_ARCH__
        asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
#endif
    }
};

struct list_rows {
    phase_cuda_row_lists lists;

    __host__ __device__ int32_t read(int32_t i) const { return lists.rows[i]; }
    __host__ __device__ int64_t row(int32_t i, int32_t entry) const {
        const int32_t sequence = lists.n_lists == lists.lists_per_sequence ? 0 : i/(lists.n_max*lists.lists_per_sequence);
        return lists.first_row + (int64_t) sequence*lists.sequence_rows + entry;
    }
};

struct range_rows {
    phase_cuda_row_range range;

    __host__ __device__ int32_t read(int32_t i) const { return range.n_sequences == 1 ? i : i%range.n_rows; }
    __host__ __device__ int64_t row(int32_t i, int32_t entry) const {
        const int32_t sequence = range.n_sequences == 1 ? 0 : i/range.n_rows;
        return range.first_row + (int64_t) sequence*range.sequence_rows + entry;
    }
};

struct written_rows {
    phase_cuda_written written;

    __host__ __device__ int64_t operator()(int32_t i) const { return written.first_row + written.ids[i]; }
};

// Kernel parameters, so that a captured graph has them: at most 4 KiB.
constexpr int N_LAYERS = 16;

struct written_layer {
    phase_kv_rows_state state;
    phase_cuda_written  written;
};

struct written_layers {
    written_layer layers[N_LAYERS];
};

struct copied_layers {
    phase_kv_rows layers[N_LAYERS];
};

static_assert(sizeof(written_layers) <= 4000 && sizeof(copied_layers) <= 4000, "kernel parameters");

__device__ void add_total(uint64_t & total, int64_t n) {
    atomicAdd((unsigned long long *) &total, (unsigned long long) n);
}

//
// Lookup and copy in one kernel. Block 0 finds; it starts first, so the others may wait for it. turns[b] is how far block b is: all are
// equal between two kernels, then
//
//   block 0   claim, turn + 1, place, turn + 2, resolve        (turn + 2 at once when nothing is missing)
//   others            `- read from host memory  `- write to slots, turn + 2
//
// A turn is announced behind a barrier, so that it releases what the whole block wrote. Jobs are read past L1: a line of them has slots
// that come later.
//

__device__ void announce(uint32_t * p, uint32_t turn) {
    if (threadIdx.x == 0) {
#ifdef __CUDACC__
        asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(turn) : "memory");
#else
        *p = turn;
#endif
    }
}

__device__ uint32_t turn_of(const uint32_t * p) {
#ifdef __CUDACC__
    uint32_t turn;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(turn) : "l"(p) : "memory");
    return turn;
#else
    return *p;
#endif
}

__device__ void wait_for(const uint32_t * p, uint32_t turn) {
    if (threadIdx.x == 0) {
        while ((int32_t) (turn_of(p) - turn) < 0) {
            __nanosleep(20);
        }
    }
    __syncthreads();
}

// The units of a K row, then those of its V row: a lane has N_UNITS of them from `first` on, all in flight.
struct row_units {
    uint4 units[N_UNITS];

    static __device__ int at(int first, int u) { return first + u*32 + (int) (threadIdx.x % 32); }

    __device__ void load(const phase_kv_rows_shape & from, int64_t row, int first) {
        const int    n_k = from.k_bytes/16, n_v = from.v_bytes/16;
        const auto * k   = (const uint4 *) from.k + row*n_k;
        const auto * v   = (const uint4 *) from.v + row*n_v - n_k;
        for (int u = 0; u < N_UNITS; ++u) {
            const int i = at(first, u);
            if (i < n_k + n_v) {
                units[u] = __ldcs((i < n_k ? k : v) + i);
            }
        }
    }
    __device__ void store(const phase_kv_rows & to, int64_t slot, int first) const {
        const int n_k = to.shape.k_bytes/16, n_v = to.shape.v_bytes/16;
        auto *    k   = (uint4 *) to.k + slot*n_k;
        auto *    v   = (uint4 *) to.v + slot*n_v - n_k;
        for (int u = 0; u < N_UNITS; ++u) {
            const int i = at(first, u);
            if (i < n_k + n_v) {
                (i < n_k ? k : v)[i] = units[u];
            }
        }
    }
};

__device__ void copy_jobs(const phase_kv_rows & rows) {
    const uint32_t turn = rows.turns[blockIdx.x];
    wait_for(rows.turns, turn + 1);
    const int n_jobs  = __ldcg(&rows.state.head[PHASE_KV_ROWS_N_JOBS]);
    const int n_units = (rows.shape.k_bytes + rows.shape.v_bytes)/16;
    const int block   = blockIdx.x - 1;
    bool      placed  = false;
    for (int of_block = block; of_block < n_jobs; of_block += N_COPY_BLOCKS*N_WARPS) { // few jobs are spread over the blocks
        const int  job  = of_block + threadIdx.x/32*N_COPY_BLOCKS;
        const bool mine = job < n_jobs;
        for (int first = 0; first < n_units; first += N_UNITS*32) {
            row_units units;
            if (mine) {
                units.load(rows.shape, __ldcg(&rows.state.jobs[2*job]), first);
            }
            if (!placed) {
                wait_for(rows.turns, turn + 2);
                placed = true;
            }
            if (mine) {
                units.store(rows, __ldcg(&rows.state.jobs[2*job + 1]), first);
            }
        }
    }
    if (threadIdx.x == 0) {
        rows.turns[blockIdx.x] = turn + 2;
    }
}

// True in the block that finds, when its part is done.
template <typename list_of>
__device__ bool find_and_copy(const phase_kv_rows & rows, const list_of & list, int32_t n, int32_t * slots) {
    __shared__ phase_kv_rows_shared shared;

    if (blockIdx.x > 0) {
        copy_jobs(rows);
        return false;
    }
    const uint32_t turn = threadIdx.x == 0 ? rows.turns[0] : 0; // of the thread that announces; the others wait for no load
    block_group g { (int) (threadIdx.x % N_THREADS), N_THREADS }; // the compiler sees that it is none of the loops' second turn
    const auto  claimed = phase_kv_rows_claim(g, rows.state, shared, list, n, slots);
    if (claimed.n_jobs == 0) {
        announce(rows.turns, turn + 2);
        return true;
    }
    announce(rows.turns, turn + 1);
    phase_kv_rows_place(g, rows.state, shared, claimed);
    announce(rows.turns, turn + 2);
    if (slots) {
        phase_kv_rows_resolve(g, rows.state, n, slots);
    }
    return true;
}

// By thread 0 of the block that found.
__device__ void count(const phase_kv_rows & rows, int64_t looked_up) {
    add_total(rows.totals->looked_up, looked_up);
    add_total(rows.totals->missed, rows.state.head[PHASE_KV_ROWS_N_JOBS]);
    add_total(rows.totals->runs, 1);
}

__global__ void __launch_bounds__(N_THREADS, 1) find_kernel(phase_kv_rows rows, phase_cuda_row_lists lists) {
    if (!find_and_copy(rows, list_rows { lists }, lists.n_lists*lists.n_max, lists.slots)) {
        return;
    }
    if (threadIdx.x == 0) {
        int64_t looked_up = 0;
        for (int32_t i = 0; i < lists.n_lists; ++i) {
            const int32_t n = lists.counts[i];
            lists.slot_counts[i] = n;
            looked_up += n;
        }
        count(rows, looked_up);
    }
}

__global__ void __launch_bounds__(N_THREADS, 1) find_range_kernel(phase_kv_rows rows, phase_cuda_row_range range) {
    const int32_t n = range.n_rows*range.n_sequences;
    if (find_and_copy(rows, range_rows { range }, n, nullptr) && threadIdx.x == 0) {
        count(rows, n);
    }
}

__device__ void copy_row(const uint4 * __restrict__ src, uint4 * __restrict__ dst, int n, int lane) {
    int i = lane;
    for (; i + 32 < n; i += 64) { // two loads in flight
        const uint4 a = src[i];
        const uint4 b = src[i + 32];
        dst[i]      = a;
        dst[i + 32] = b;
    }
    if (i < n) {
        dst[i] = src[i];
    }
}

// A warp puts the K row, the next one the V row in its place.
__global__ void __launch_bounds__(N_GATHER_THREADS) gather_kernel(phase_kv_rows rows, phase_cuda_row_range range, uint8_t * k, uint8_t * v) {
    const range_rows list { range };
    const int lane    = threadIdx.x % 32;
    const int warp    = (blockIdx.x*blockDim.x + threadIdx.x)/32;
    const int n_warps = gridDim.x*blockDim.x/32;
    const int n       = range.n_rows*range.n_sequences;
    for (int i = warp; i < 2*n; i += n_warps) {
        const int64_t slot  = rows.state.map[list.row(i/2, list.read(i/2))];
        const size_t  bytes = i % 2 == 0 ? rows.shape.k_bytes : rows.shape.v_bytes;
        const auto *  src   = (i % 2 == 0 ? rows.k : rows.v) + slot*bytes;
        auto *        dst   = (i % 2 == 0 ? k : v) + (i/2)*bytes;
        copy_row((const uint4 *) src, (uint4 *) dst, bytes/16, lane);
    }
}

__global__ void __launch_bounds__(N_THREADS, 1) forget_kernel(written_layers written, int32_t n_in_place) {
    const auto & layer = written.layers[blockIdx.x];
    block_group  g { (int) threadIdx.x, (int) blockDim.x };
    if (layer.written.ids) {
        phase_kv_rows_forget(g, layer.state, written_rows { layer.written }, layer.written.n_ids, n_in_place);
    } else {
        phase_kv_rows_clear(g, layer.state);
    }
}

__global__ void __launch_bounds__(N_THREADS, 1) find_pending_kernel(copied_layers copied) {
    const auto &  rows = copied.layers[blockIdx.y];
    const int32_t n    = blockIdx.x == 0 ? rows.state.head[PHASE_KV_ROWS_N_PENDING] : 0;
    if (find_and_copy(rows, phase_kv_rows_list { rows.state.pending }, n, nullptr) && threadIdx.x == 0) {
        rows.state.head[PHASE_KV_ROWS_N_PENDING] = 0;
    }
}

__global__ void clear_kernel(phase_kv_rows_state state) {
    block_group g { (int) (blockIdx.x*blockDim.x + threadIdx.x), (int) (gridDim.x*blockDim.x) };
    phase_kv_rows_clear(g, state);
}

constexpr size_t align_256(size_t n) {
    return (n + 255)/256*256;
}

thread_local char failure[256];

const char * fail(const char * what, cudaError_t error) {
    (void) cudaGetLastError(); // it would be reported by the next unrelated call
    std::snprintf(failure, sizeof(failure), "%s: %s", what, cudaGetErrorString(error));
    return failure;
}

// The calling thread's device is what it was when this goes.
struct device_scope {
    int before = 0;

    explicit device_scope(int device) {
        (void) cudaGetDevice(&before);
        (void) cudaSetDevice(device);
    }
    ~device_scope() { (void) cudaSetDevice(before); }
};

} // namespace

const char * phase_cuda_kv_rows_new(int device, const phase_kv_rows_shape & shape, phase_kv_rows ** result) {
    *result = nullptr;
    if (shape.k_bytes % 16 != 0 || shape.v_bytes % 16 != 0 || (uintptr_t) shape.k % 16 != 0 || (uintptr_t) shape.v % 16 != 0) {
        return "its rows are not of whole 16-byte units";
    }
    const device_scope scope(device);

    const size_t n_slots = shape.n_slots;
    const size_t k_size  = align_256(n_slots*shape.k_bytes);
    const size_t v_size  = align_256(n_slots*shape.v_bytes);
    const size_t zeros   = align_256(n_slots*2);
    const size_t totals  = 512; // and turns
    const size_t words   = phase_kv_rows_words(shape.n_rows, n_slots)*sizeof(int32_t);

    uint8_t *     base  = nullptr;
    cudaError_t   error = cudaMalloc(&base, k_size + v_size + zeros + totals + words);
    if (error != cudaSuccess) {
        return fail("no device memory", error);
    }
    auto * rows = new phase_kv_rows {};
    rows->shape  = shape;
    rows->device = device;
    rows->k      = base;
    rows->v      = base + k_size;
    rows->zeros  = rows->v + v_size;
    rows->totals = (phase_kv_rows_counters *) ((uint8_t *) rows->zeros + zeros);
    rows->turns  = (uint32_t *) ((uint8_t *) rows->totals + 256);
    rows->state  = phase_kv_rows_state_at((int32_t *) ((uint8_t *) rows->totals + totals), shape.n_rows, shape.n_slots);
    static_assert(sizeof(*rows->totals) <= 256 && PHASE_CUDA_KV_ROWS_BLOCKS*sizeof(*rows->turns) <= 256, "totals and turns");
    std::vector<int32_t> tables(words/sizeof(int32_t));
    block_group g { 0, 1 };
    phase_kv_rows_clear(g, phase_kv_rows_state_at(tables.data(), shape.n_rows, shape.n_slots));
    error = cudaMemsetAsync(base, 0, k_size + v_size + zeros + totals, cudaStreamPerThread);
    if (error == cudaSuccess) {
        error = cudaMemcpyAsync(rows->state.map, tables.data(), words, cudaMemcpyHostToDevice, cudaStreamPerThread);
    }
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(cudaStreamPerThread);
    }
    if (error != cudaSuccess) {
        const char * why = fail("cannot set it up", error);
        phase_cuda_kv_rows_free(rows);
        return why;
    }
    *result = rows;
    return nullptr;
}

void phase_cuda_kv_rows_free(phase_kv_rows * rows) {
    const device_scope scope(rows->device);
    (void) cudaFree(rows->k);
    (void) cudaGetLastError(); // at the end of the process the driver may be gone already
    delete rows;
}

void phase_cuda_kv_rows_forget_all(phase_kv_rows * rows) {
    if (!rows->used_on) {
        return;
    }
    const device_scope scope(rows->device);
    clear_kernel<<<32, 256, 0, rows->used_on>>>(rows->state); // behind a decode in flight, which reads the host memory, too
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(rows->used_on);
    }
    if (error != cudaSuccess) {
        std::fprintf(stderr, "llama-phase: rows of K/V on the device: %s\n", cudaGetErrorString(error));
        std::abort();
    }
}

void phase_cuda_kv_rows_totals(const phase_kv_rows * rows, phase_kv_rows_counters * counters) {
    const device_scope scope(rows->device);
    cudaError_t error = cudaMemcpyAsync(counters, rows->totals, sizeof(*counters), cudaMemcpyDeviceToHost, cudaStreamPerThread);
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(cudaStreamPerThread);
    }
    if (error != cudaSuccess) {
        (void) cudaGetLastError(); // it would be reported by the next unrelated call
        *counters = {};
    }
}

cudaError_t phase_cuda_kv_rows_find(const phase_kv_rows & rows, const phase_cuda_row_lists & lists, cudaStream_t stream) {
    if ((int64_t) lists.n_lists*lists.n_max > rows.state.n_slots) {
        return cudaErrorInvalidValue;
    }
    rows.used_on = stream;
    find_kernel<<<PHASE_CUDA_KV_ROWS_BLOCKS, N_THREADS, 0, stream>>>(rows, lists);
    return cudaGetLastError();
}

cudaError_t phase_cuda_kv_rows_gather(const phase_kv_rows & rows, const phase_cuda_row_range & range, void * k, void * v, cudaStream_t stream) {
    const int64_t n = (int64_t) range.n_rows*range.n_sequences;
    if (n > rows.state.n_slots) {
        return cudaErrorInvalidValue;
    }
    rows.used_on = stream;
    find_range_kernel<<<PHASE_CUDA_KV_ROWS_BLOCKS, N_THREADS, 0, stream>>>(rows, range);
    const int n_blocks = (int) std::min<int64_t>(N_GATHER_BLOCKS, (2*n*32 + N_GATHER_THREADS - 1)/N_GATHER_THREADS);
    gather_kernel<<<n_blocks, N_GATHER_THREADS, 0, stream>>>(rows, range, (uint8_t *) k, (uint8_t *) v);
    return cudaGetLastError();
}

cudaError_t phase_cuda_kv_rows_forget(const phase_cuda_written * written, int n, int32_t n_in_place, cudaStream_t stream) {
    for (int i = 0; i < n; i += N_LAYERS) {
        const int      n_layers = std::min(n - i, N_LAYERS);
        written_layers layers {};
        int            n_threads = 32; // few rows: a small block starts sooner
        for (int k = 0; k < n_layers; ++k) {
            const auto & own = written[i + k];
            own.rows->used_on = stream;
            layers.layers[k] = { own.rows->state, own };
            n_threads = std::max(n_threads, own.ids ? std::min((own.n_ids + 31)/32*32, N_THREADS) : N_THREADS);
        }
        forget_kernel<<<n_layers, n_threads, 0, stream>>>(layers, n_in_place);
    }
    return cudaGetLastError();
}

cudaError_t phase_cuda_kv_rows_settle(const phase_cuda_written * written, int n, cudaStream_t stream) {
    for (int i = 0; i < n; i += N_LAYERS) {
        const int     n_layers = std::min(n - i, N_LAYERS);
        copied_layers layers {};
        for (int k = 0; k < n_layers; ++k) {
            layers.layers[k] = *written[i + k].rows;
        }
        find_pending_kernel<<<dim3(PHASE_CUDA_KV_ROWS_BLOCKS, n_layers), N_THREADS, 0, stream>>>(layers);
    }
    return cudaGetLastError();
}
