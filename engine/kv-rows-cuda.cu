#include "kv-rows-cuda.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int N_THREADS      = 1024;
constexpr int N_COPY_THREADS = 512;
constexpr int N_COPY_BLOCKS  = 132; // of a list; rows of 2 KiB, one per warp and turn
constexpr int N_FEW_BLOCKS   = 16;  // of each layer when there are many

struct block_group {
    int thread;
    int n_threads;

    __host__ __device__ void sync() {
#ifdef __CUDA_ARCH__
        __syncthreads();
#endif
    }
    __host__ __device__ int add(int * at, int n) {
#ifdef __CUDA_ARCH__
        return atomicAdd(at, n);
#else
        return 0;
#endif
    }
    __host__ __device__ bool claim(int * at) {
#ifdef __CUDA_ARCH__
        return atomicCAS(at, PHASE_KV_ROWS_NONE, PHASE_KV_ROWS_CLAIMED) == PHASE_KV_ROWS_NONE;
#else
        return false;
#endif
    }
};

struct list_rows {
    phase_cuda_row_lists lists;

    __host__ __device__ int64_t operator()(int32_t i) const {
        const int32_t row = lists.rows[i];
        return row < 0 ? -1 : lists.first_row + (int64_t) (i/(lists.n_max*lists.lists_per_sequence))*lists.sequence_rows + row;
    }
};

struct range_rows {
    phase_cuda_row_range range;

    __host__ __device__ int64_t operator()(int32_t i) const {
        return range.first_row + (int64_t) (i/range.n_rows)*range.sequence_rows + i%range.n_rows;
    }
};

struct written_rows {
    phase_cuda_written written;

    __host__ __device__ int64_t operator()(int32_t i) const { return written.first_row + written.ids[i]; }
};

struct pending_rows {
    const int32_t * rows;

    __host__ __device__ int64_t operator()(int32_t i) const { return rows[i]; }
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

__device__ void count(const phase_kv_rows & rows, int64_t looked_up, int64_t missed) {
    rows.counters->looked_up = rows.totals[0] += looked_up;
    rows.counters->missed    = rows.totals[1] += missed;
    rows.counters->runs      = rows.totals[2] += 1;
}

__global__ void __launch_bounds__(N_THREADS, 1) find_kernel(phase_kv_rows rows, phase_cuda_row_lists lists) {
    __shared__ phase_kv_rows_shared shared;

    block_group     g { (int) threadIdx.x, N_THREADS };
    const list_rows row_of { lists };
    const int32_t   n      = lists.n_lists*lists.n_max;
    const int32_t   n_jobs = phase_kv_rows_lookup(g, rows.state, shared, row_of, n);
    for (int32_t i = threadIdx.x; i < n; i += N_THREADS) {
        const int64_t row = row_of(i);
        lists.slots[i] = row < 0 ? -1 : rows.state.map[row];
    }
    if (threadIdx.x == 0) {
        int64_t looked_up = 0;
        for (int32_t i = 0; i < lists.n_lists; ++i) {
            const int32_t n = lists.counts[i];
            lists.slot_counts[i] = n;
            looked_up += n;
        }
        count(rows, looked_up, n_jobs);
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

// A warp copies the K row, the next one the V row of a job.
__device__ void copy_jobs(const phase_kv_rows & rows) {
    const int lane    = threadIdx.x % 32;
    const int warp    = (blockIdx.x*blockDim.x + threadIdx.x)/32;
    const int n_warps = gridDim.x*blockDim.x/32;
    const int n_jobs  = rows.state.head[PHASE_KV_ROWS_N_JOBS];
    for (int i = warp; i < 2*n_jobs; i += n_warps) {
        const int64_t row   = rows.state.jobs[i/2*2];
        const int64_t slot  = rows.state.jobs[i/2*2 + 1];
        const size_t  bytes = i % 2 == 0 ? rows.shape.k_bytes : rows.shape.v_bytes;
        const auto *  src   = (i % 2 == 0 ? rows.shape.k : rows.shape.v) + row*bytes;
        auto *        dst   = (i % 2 == 0 ? rows.k : rows.v) + slot*bytes;
        copy_row((const uint4 *) src, (uint4 *) dst, bytes/16, lane);
    }
}

__global__ void __launch_bounds__(N_COPY_THREADS) copy_kernel(phase_kv_rows rows) {
    copy_jobs(rows);
}

__global__ void __launch_bounds__(N_THREADS, 1) find_range_kernel(phase_kv_rows rows, phase_cuda_row_range range) {
    __shared__ phase_kv_rows_shared shared;

    block_group   g { (int) threadIdx.x, N_THREADS };
    const int32_t n      = range.n_rows*range.n_sequences;
    const int32_t n_jobs = phase_kv_rows_lookup(g, rows.state, shared, range_rows { range }, n);
    if (threadIdx.x == 0) {
        count(rows, n, n_jobs);
    }
}

// A warp puts the K row, the next one the V row in its place.
__global__ void __launch_bounds__(N_COPY_THREADS) gather_kernel(phase_kv_rows rows, phase_cuda_row_range range, uint8_t * k, uint8_t * v) {
    const range_rows row_of { range };
    const int lane    = threadIdx.x % 32;
    const int warp    = (blockIdx.x*blockDim.x + threadIdx.x)/32;
    const int n_warps = gridDim.x*blockDim.x/32;
    const int n       = range.n_rows*range.n_sequences;
    for (int i = warp; i < 2*n; i += n_warps) {
        const int64_t slot  = rows.state.map[row_of(i/2)];
        const size_t  bytes = i % 2 == 0 ? rows.shape.k_bytes : rows.shape.v_bytes;
        const auto *  src   = (i % 2 == 0 ? rows.k : rows.v) + slot*bytes;
        auto *        dst   = (i % 2 == 0 ? k : v) + (i/2)*bytes;
        copy_row((const uint4 *) src, (uint4 *) dst, bytes/16, lane);
    }
}

__global__ void __launch_bounds__(N_COPY_THREADS) copy_pending_kernel(copied_layers copied) {
    copy_jobs(copied.layers[blockIdx.y]);
}

__global__ void __launch_bounds__(N_THREADS, 1) forget_kernel(written_layers written, int32_t n_in_place) {
    const auto & layer = written.layers[blockIdx.x];
    block_group  g { (int) threadIdx.x, N_THREADS };
    if (layer.written.ids) {
        phase_kv_rows_forget(g, layer.state, written_rows { layer.written }, layer.written.n_ids, n_in_place);
    } else {
        phase_kv_rows_clear(g, layer.state);
    }
}

__global__ void __launch_bounds__(N_THREADS, 1) find_pending_kernel(copied_layers copied) {
    __shared__ phase_kv_rows_shared shared;

    const auto & rows = copied.layers[blockIdx.x];
    block_group  g { (int) threadIdx.x, N_THREADS };
    const int32_t n = rows.state.head[PHASE_KV_ROWS_N_PENDING];
    (void) phase_kv_rows_lookup(g, rows.state, shared, pending_rows { rows.state.pending }, n);
    if (threadIdx.x == 0) {
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
    const size_t totals  = 256;
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
    rows->totals = (uint64_t *) ((uint8_t *) rows->zeros + zeros);
    rows->state  = phase_kv_rows_state_at((int32_t *) ((uint8_t *) rows->totals + totals), shape.n_rows, shape.n_slots);
    error = cudaHostAlloc(&rows->counters, sizeof(*rows->counters), cudaHostAllocPortable | cudaHostAllocMapped);
    if (error == cudaSuccess) {
        *rows->counters = {};
        error = cudaMemset(rows->zeros, 0, zeros + totals);
    }
    if (error == cudaSuccess) {
        error = cudaMemset(base, 0, k_size + v_size);
    }
    if (error != cudaSuccess) {
        const char * why = fail("cannot set it up", error);
        phase_cuda_kv_rows_free(rows);
        return why;
    }
    phase_cuda_kv_rows_forget_all(rows);
    *result = rows;
    return nullptr;
}

void phase_cuda_kv_rows_free(phase_kv_rows * rows) {
    const device_scope scope(rows->device);
    (void) cudaFree(rows->k);
    (void) cudaFreeHost(rows->counters);
    (void) cudaGetLastError(); // at the end of the process the driver may be gone already
    delete rows;
}

void phase_cuda_kv_rows_forget_all(phase_kv_rows * rows) {
    const device_scope scope(rows->device);
    clear_kernel<<<32, 256, 0, cudaStreamPerThread>>>(rows->state);
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(cudaStreamPerThread);
    }
    if (error != cudaSuccess) {
        std::fprintf(stderr, "llama-phase: rows of K/V on the device: %s\n", cudaGetErrorString(error));
        std::abort();
    }
}

cudaError_t phase_cuda_kv_rows_find(const phase_kv_rows & rows, const phase_cuda_row_lists & lists, cudaStream_t stream) {
    if ((int64_t) lists.n_lists*lists.n_max > rows.state.n_slots) {
        return cudaErrorInvalidValue;
    }
    find_kernel<<<1, N_THREADS, 0, stream>>>(rows, lists);
    copy_kernel<<<N_COPY_BLOCKS, N_COPY_THREADS, 0, stream>>>(rows);
    return cudaGetLastError();
}

cudaError_t phase_cuda_kv_rows_gather(const phase_kv_rows & rows, const phase_cuda_row_range & range, void * k, void * v, cudaStream_t stream) {
    const int64_t n = (int64_t) range.n_rows*range.n_sequences;
    if (n > rows.state.n_slots) {
        return cudaErrorInvalidValue;
    }
    find_range_kernel<<<1, N_THREADS, 0, stream>>>(rows, range);
    copy_kernel<<<N_COPY_BLOCKS, N_COPY_THREADS, 0, stream>>>(rows);
    const int n_blocks = (int) std::min<int64_t>(4*N_COPY_BLOCKS, (2*n*32 + N_COPY_THREADS - 1)/N_COPY_THREADS);
    gather_kernel<<<n_blocks, N_COPY_THREADS, 0, stream>>>(rows, range, (uint8_t *) k, (uint8_t *) v);
    return cudaGetLastError();
}

cudaError_t phase_cuda_kv_rows_forget(const phase_cuda_written * written, int n, int32_t n_in_place, cudaStream_t stream) {
    for (int i = 0; i < n; i += N_LAYERS) {
        const int      n_layers = std::min(n - i, N_LAYERS);
        written_layers layers {};
        for (int k = 0; k < n_layers; ++k) {
            layers.layers[k] = { written[i + k].rows->state, written[i + k] };
        }
        forget_kernel<<<n_layers, N_THREADS, 0, stream>>>(layers, n_in_place);
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
        find_pending_kernel<<<n_layers, N_THREADS, 0, stream>>>(layers);
        copy_pending_kernel<<<dim3(N_FEW_BLOCKS, n_layers), N_COPY_THREADS, 0, stream>>>(layers);
    }
    return cudaGetLastError();
}
