// Pinned host memory that kernels read and write in place.

#include "expert-cuda-kernels.cuh"
#include "expert-cuda.cuh"
#include "kv-op.h"

#include <cstdio>

static thread_local char failure[256];

static const char * fail(const char * what, cudaError_t error) {
    (void) cudaGetLastError(); // it would be reported by the next unrelated call
    std::snprintf(failure, sizeof(failure), "%s: %s", what, cudaGetErrorString(error));
    return failure;
}

const char * phase_cuda_host_alloc(size_t size, void ** ptr) {
    *ptr = nullptr;
    cudaError_t error = cudaHostAlloc(ptr, size, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
        *ptr = nullptr;
        return fail("cannot pin it", error);
    }
    void * of_device = nullptr;
    error = cudaHostGetDevicePointer(&of_device, *ptr, 0);
    if (error != cudaSuccess || of_device != *ptr) {
        (void) cudaFreeHost(*ptr);
        *ptr = nullptr;
        return fail("the device does not see it at the host's address", error);
    }
    return nullptr;
}

void phase_cuda_host_free(void * ptr) {
    if (cudaFreeHost(ptr) != cudaSuccess) {
        (void) cudaGetLastError(); // at the end of the process the driver may be gone already
    }
}

bool phase_cuda_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_device(buft) == dev && phase_kv_is_host_name(ggml_backend_buft_name(buft));
}
