// In front of the CUDA runtime (LD_PRELOAD): when each call that a decode step makes began and ended, and how long each CUDA graph ran.
// Written to $BETWEEN_GRAPHS when the process ends, a line per call:
//
//   call begin_ns end_ns bytes direct_kernels graph_begin_ms graph_end_ms
//
// direct_kernels: launched outside of graphs since the line before. graph_*: of launches, by events on their stream; 0 when not known.
// Built and read by tools/between_graphs.py.

#include <cuda_runtime_api.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <vector>

namespace {

constexpr size_t MAX_CALLS  = 400000;
constexpr size_t MAX_EVENTS = 32000;
constexpr size_t READ_LATER = 16; // events behind the newest: over by then

struct call {
    const char * name;
    long long    begin, end;
    size_t       bytes;
    int          n_direct;
    long         event; // of its begin, the next one is of its end; -1: none
};

std::mutex               lock;
std::vector<call>        calls;
std::vector<cudaEvent_t> events;
std::vector<float>       ms; // of each event, since the first one
int                      n_direct = 0;

long long now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec*1000000000ll + t.tv_nsec;
}

// what stands behind us
template <typename F>
F next(const char * name) {
    return (F) dlsym(RTLD_NEXT, name);
}

long mark(cudaStream_t stream) {
    if (events.size() >= MAX_EVENTS) {
        return -1;
    }
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    cudaEventRecord(event, stream);
    events.push_back(event);
    ms.push_back(0);
    if (events.size() > READ_LATER) {
        const size_t i = events.size() - 1 - READ_LATER;
        cudaEventElapsedTime(&ms[i], events[0], events[i]);
    }
    return (long) events.size() - 1;
}

void note(const char * name, long long begin, size_t bytes, long event = -1) {
    const long long end = now();
    std::lock_guard<std::mutex> guard(lock);
    if (calls.size() < MAX_CALLS) {
        calls.push_back({ name, begin, end, bytes, n_direct, event });
    }
    n_direct = 0;
}

struct at_exit {
    ~at_exit() {
        const char * path = getenv("BETWEEN_GRAPHS");
        FILE * out = path && !calls.empty() ? fopen(path, "w") : nullptr;
        if (!out) {
            return;
        }
        for (const auto & c : calls) {
            const bool known = c.event >= 0 && (size_t) c.event + 1 < ms.size();
            fprintf(out, "%s %lld %lld %zu %d %.4f %.4f\n", c.name, c.begin, c.end, c.bytes, c.n_direct, known ? ms[c.event] : 0, known ? ms[c.event + 1] : 0);
        }
        fclose(out);
    }
} writer;

} // namespace

#define FORWARD(function, line, bytes, ...)                             \
    static const auto real = next<decltype(&function)>(#function);      \
    const long long   begin = now();                                    \
    const auto        error = real(__VA_ARGS__);                        \
    note(line, begin, bytes);                                           \
    return error;

extern "C" {

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    static const auto real = next<decltype(&cudaGraphLaunch)>("cudaGraphLaunch");
    const long        event = mark(stream);
    const long long   begin = now();
    const auto        error = real(graph, stream);
    note("launch", begin, 0, event);
    mark(stream);
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    FORWARD(cudaStreamSynchronize, "wait", 0, stream)
}

cudaError_t cudaMemcpyAsync(void * dst, const void * src, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    FORWARD(cudaMemcpyAsync, kind == cudaMemcpyHostToDevice ? "up" : kind == cudaMemcpyDeviceToHost ? "down" : "copy", size, dst, src, size, kind, stream)
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    FORWARD(cudaStreamBeginCapture, "capture", 0, stream, mode)
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t * instance, cudaGraph_t graph, unsigned long long flags) {
    FORWARD(cudaGraphInstantiate, "instantiate", 0, instance, graph, flags)
}

cudaError_t cudaLaunchKernel(const void * function, dim3 grid, dim3 block, void ** arguments, size_t shared_bytes, cudaStream_t stream) {
    static const auto real = next<decltype(&cudaLaunchKernel)>("cudaLaunchKernel");
    ++n_direct;
    return real(function, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void * function, void ** arguments) {
    static const auto real = next<decltype(&cudaLaunchKernelExC)>("cudaLaunchKernelExC");
    ++n_direct;
    return real(config, function, arguments);
}

}
