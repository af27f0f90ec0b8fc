#pragma once

// As much of CUDA as the kernels of select-cuda.cu, kv-rows-cuda.cu and expert-cuda-fetch.cu use, on one CPU: a block's threads are fibers that run until they
// have to wait for each other, in another random order each time; blocks and launches run one after the other, unless a test asks for
// blocks that run together. "Device" memory is host memory. What this cannot show: races between two barriers, memory order, speed.
//
// The sources are prepared by emulate.sed: launches become calls of launch(), shared memory becomes static.

#include <immintrin.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
using cudaStream_t = void *;
static const cudaStream_t cudaStreamPerThread = (cudaStream_t) 2;

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2  { uint32_t x, y; };
struct uint4  { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return { x, y, z, w }; }
using std::max;
using std::min;

namespace emulated {

constexpr size_t STACK_BYTES = 64*1024, STACK_BYTES_TOGETHER = 16*1024;

enum wait_t { RUNS, AT_BLOCK, AT_WARP, ENDED };

struct fiber {
    ucontext_t context;
    dim3       block, thread;
    wait_t     wait    = RUNS;
    uint32_t   n_votes = 0;
};

struct block_state {
    std::vector<fiber>    fibers;
    std::unique_ptr<char[]> stacks; // as they are: most of a stack is never touched
    size_t                stacks_bytes = 0;
    std::vector<uint64_t> slots; // two per thread, in turn: what it says to its warp
    ucontext_t            scheduler;
    size_t                current = 0;
    dim3                  grid, threads;
    bool                  together = false; // of launches from now on: for kernels whose blocks do not each have shared memory
    std::vector<uint32_t> dynamic;
    std::function<void()> kernel;
    std::mt19937          random { 1 };
};

inline block_state & state() {
    static block_state s;
    return s;
}

inline fiber & self() { return state().fibers[state().current]; }

inline void wait(wait_t what) {
    self().wait = what;
    swapcontext(&self().context, &state().scheduler);
}

inline void entry() {
    state().kernel();
    self().wait = ENDED;
    swapcontext(&self().context, &state().scheduler);
}

// Those of [first, last) that did not end are all waiting there: they go on.
inline void release(size_t first, size_t last, wait_t what) {
    auto & f = state().fibers;
    for (size_t i = first; i < last; ++i) {
        if (f[i].wait != what && f[i].wait != ENDED) {
            return;
        }
    }
    for (size_t i = first; i < last; ++i) {
        f[i].wait = f[i].wait == what ? RUNS : f[i].wait;
    }
}

// One block, or some together, of which another half at random gets on in each round.
inline void run_blocks(const std::vector<dim3> & blocks) {
    auto &       s = state();
    const size_t n = s.threads.x, n_all = n*blocks.size(), stack_bytes = blocks.size() > 1 ? STACK_BYTES_TOGETHER : STACK_BYTES;
    s.fibers.assign(n_all, {});
    if (s.stacks_bytes < n_all*stack_bytes) {
        s.stacks_bytes = n_all*stack_bytes;
        s.stacks.reset(); // first, for they are large
        s.stacks.reset(new char[s.stacks_bytes]);
    }
    s.slots.assign(2*n_all, 0);
    std::vector<size_t> order(n_all);
    for (size_t i = 0; i < n_all; ++i) {
        order[i] = i;
        auto & f = s.fibers[i];
        f.block  = blocks[i/n];
        f.thread = dim3((unsigned) (i%n), 0, 0);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp   = &s.stacks[i*stack_bytes];
        f.context.uc_stack.ss_size = stack_bytes;
        f.context.uc_link          = nullptr;
        makecontext(&f.context, entry, 0);
    }
    for (bool any = true; any; ) {
        std::shuffle(order.begin(), order.end(), s.random);
        std::vector<bool> gets_on(blocks.size());
        for (size_t block = 0; block < blocks.size(); ++block) {
            gets_on[block] = blocks.size() == 1 || s.random() % 2;
        }
        for (const size_t i : order) {
            if (gets_on[i/n] && s.fibers[i].wait == RUNS) {
                s.current = i;
                swapcontext(&s.scheduler, &s.fibers[i].context);
            }
        }
        for (size_t first = 0; first < n_all; first += n) {
            for (size_t i = first; i < first + n; i += 32) {
                release(i, std::min(i + 32, first + n), AT_WARP);
            }
            release(first, first + n, AT_BLOCK);
        }
        any = false;
        for (const auto & f : s.fibers) {
            any = any || f.wait == RUNS;
        }
    }
    for (const auto & f : s.fibers) {
        if (f.wait != ENDED) {
            std::fprintf(stderr, "emulated: a barrier that not all threads reach\n");
            std::abort();
        }
    }
}

inline void launch(dim3 grid, dim3 threads, size_t shared_bytes, cudaStream_t, std::function<void()> kernel) {
    auto & s = state();
    s.grid    = grid;
    s.threads = threads;
    s.kernel  = std::move(kernel);
    s.dynamic.assign(shared_bytes/4 + 1, 0x5a5a5a5au);
    std::vector<dim3> blocks;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blocks.push_back(dim3(x, y, 0));
        }
    }
    if (s.together && threads.x % 32 == 0) {
        run_blocks(blocks);
        return;
    }
    for (const auto & block : blocks) {
        s.dynamic.assign(shared_bytes/4 + 1, 0x5a5a5a5au);
        run_blocks({ block });
    }
}

// What `lane` of the warp says, each in its own order of votes.
template <typename T>
std::vector<T> exchange(T value) {
    auto & s = state();
    auto & f = self();
    const size_t turn = f.n_votes++ % 2, me = s.current, first = me/32*32;
    std::memcpy(&s.slots[2*me + turn], &value, sizeof(value));
    wait(AT_WARP);
    std::vector<T> all(32);
    for (size_t lane = 0; lane < 32; ++lane) {
        std::memcpy(&all[lane], &s.slots[2*(first + lane) + turn], sizeof(T));
    }
    return all;
}

inline unsigned lane() { return (unsigned) (state().current % 32); }

} // namespace emulated

#define threadIdx (emulated::self().thread)
#define blockIdx  (emulated::self().block)
inline dim3 & gridDim  = emulated::state().grid; // no macros: the configuration of a launch has members of these names
inline dim3 & blockDim = emulated::state().threads;

inline void __syncthreads() { emulated::wait(emulated::AT_BLOCK); }

inline void __syncwarp() { emulated::wait(emulated::AT_WARP); }

template <typename T> T __shfl_sync(unsigned, T value, int lane)    { return emulated::exchange(value)[lane % 32]; }
template <typename T> T __shfl_xor_sync(unsigned, T value, int d)   { const auto all = emulated::exchange(value); return all[emulated::lane() ^ d]; }
template <typename T> T __shfl_up_sync(unsigned, T value, unsigned d) {
    const auto all = emulated::exchange(value);
    return all[emulated::lane() >= d ? emulated::lane() - d : emulated::lane()];
}
inline unsigned __ballot_sync(unsigned, int vote) {
    const auto all = emulated::exchange(vote);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
        bits |= (all[i] ? 1u : 0u) << i;
    }
    return bits;
}
inline int __reduce_min_sync(unsigned, int value) {
    const auto all = emulated::exchange(value);
    return *std::min_element(all.begin(), all.end());
}
inline unsigned __match_any_sync(unsigned, int value) {
    const auto all = emulated::exchange(value);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
        bits |= (all[i] == value ? 1u : 0u) << i;
    }
    return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x)       { return __builtin_ffs(x); }
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline int      atomicAdd(int * at, int n)             { const int old = *at; *at += n; return old; }
inline unsigned long long atomicAdd(unsigned long long * at, unsigned long long n) { const auto old = *at; *at += n; return old; }
inline int      atomicMin(int * at, int n)             { const int old = *at; *at = min(old, n); return old; }
inline uint32_t atomicOr(uint32_t * at, uint32_t bits) { const uint32_t old = *at; *at |= bits; return old; }
inline int      atomicCAS(int * at, int expected, int value) {
    const int old = *at;
    *at = old == expected ? value : old;
    return old;
}

template <typename T> T __ldcs(const T * at) { return *at; }
template <typename T> T __ldcg(const T * at) { return *at; }

// A block that waits for another. One after the other, it waits for what was done before, or for what never comes.
inline void __nanosleep(unsigned) {
    if (!emulated::state().together) {
        std::fprintf(stderr, "emulated: a block that waits for a later one\n");
        std::abort();
    }
    emulated::wait(emulated::RUNS);
}

// launches with attributes; a kernel runs when its predecessor has ended
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    int id;
    struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
    dim3                  gridDim, blockDim;
    size_t                dynamicSmemBytes;
    cudaStream_t          stream;
    cudaLaunchAttribute * attrs;
    unsigned              numAttrs;
};
template <typename Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(Args), const Args & args) {
    emulated::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, [=] { kernel(args); });
    return cudaSuccess;
}
inline void cudaGridDependencySynchronize()           {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
struct cudaFuncAttributes { int ptxVersion; };
template <typename F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, F) { attributes->ptxVersion = 90; return cudaSuccess; }

// half, as a number of its bits
struct half  { uint16_t bits; };
struct half2 { half x, y; };
inline float  __half2float(half h)            { return _cvtsh_ss(h.bits); }
inline half   __float2half(float f)           { return { (uint16_t) _cvtss_sh(f, 0) }; }
inline half   __ushort_as_half(uint16_t bits) { return { bits }; }
inline uint16_t __half_as_ushort(half h)      { return h.bits; }
inline float2 __half22float2(half2 h)         { return { __half2float(h.x), __half2float(h.y) }; }

inline cudaError_t  cudaGetLastError()                       { return cudaSuccess; }
inline const char * cudaGetErrorString(cudaError_t)          { return "error"; }
inline cudaError_t  cudaGetDevice(int * device)              { *device = 0; return cudaSuccess; }
inline cudaError_t  cudaSetDevice(int)                       { return cudaSuccess; }
inline cudaError_t  cudaGetDeviceCount(int * n)              { *n = 1; return cudaSuccess; }
inline cudaError_t  cudaDeviceGetAttribute(int * value, cudaDeviceAttr what, int) {
    *value = what == cudaDevAttrMultiProcessorCount ? 3 : 227*1024;
    return cudaSuccess;
}
template <typename F> cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) { return cudaSuccess; }
template <typename T> cudaError_t cudaMalloc(T ** at, size_t size)     { *at = (T *) std::aligned_alloc(256, (size + 255)/256*256); return cudaSuccess; }
template <typename T> cudaError_t cudaHostAlloc(T ** at, size_t size, unsigned) { return cudaMalloc(at, size); }
inline cudaError_t  cudaFree(void * at)                      { std::free(at); return cudaSuccess; }
inline cudaError_t  cudaFreeHost(void * at)                  { std::free(at); return cudaSuccess; }
inline cudaError_t  cudaMemset(void * at, int value, size_t size) { std::memset(at, value, size); return cudaSuccess; }
inline cudaError_t  cudaMemsetAsync(void * at, int value, size_t size, cudaStream_t) { return cudaMemset(at, value, size); }
inline cudaError_t  cudaMemcpy(void * to, const void * from, size_t size, cudaMemcpyKind) { std::memcpy(to, from, size); return cudaSuccess; }
inline cudaError_t  cudaMemcpyAsync(void * to, const void * from, size_t size, cudaMemcpyKind kind, cudaStream_t) { return cudaMemcpy(to, from, size, kind); }
inline cudaError_t  cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) { *stream = (cudaStream_t) 3; return cudaSuccess; }
inline cudaError_t  cudaStreamSynchronize(cudaStream_t)      { return cudaSuccess; }
inline cudaError_t  cudaStreamDestroy(cudaStream_t)          { return cudaSuccess; }

// figures are for GPUs
using cudaEvent_t = void *;
using cudaGraph_t = void *;
using cudaGraphExec_t = void *;
enum { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaEventCreate(cudaEvent_t *)                              { return cudaErrorInvalidValue; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr)        { return cudaErrorInvalidValue; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t)                           { return cudaErrorInvalidValue; }
inline cudaError_t cudaEventElapsedTime(float *, cudaEvent_t, cudaEvent_t)     { return cudaErrorInvalidValue; }
inline cudaError_t cudaEventDestroy(cudaEvent_t)                               { return cudaErrorInvalidValue; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int)                   { return cudaErrorInvalidValue; }
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *)           { return cudaErrorInvalidValue; }
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, void *, char *, size_t) { return cudaErrorInvalidValue; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t)              { return cudaErrorInvalidValue; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t)                       { return cudaErrorInvalidValue; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t)                               { return cudaErrorInvalidValue; }
