#pragma once

// Programmatic dependent launch: the blocks of a kernel are in place when its predecessor ends, and wait there. A kernel that is launched
// so, or whose successor is, calls both functions before it reads or writes what others write or read.

#include <cuda_runtime.h>

#include <cstddef>

static __device__ __forceinline__ void phase_wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

static __device__ __forceinline__ void phase_let_successor_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <typename Args>
static cudaError_t phase_cuda_launch(void (*kernel)(Args), const Args & args, int blocks, int threads, size_t shared_bytes, cudaStream_t stream, bool pdl) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;

    cudaLaunchConfig_t config = {};
    config.gridDim          = blocks;
    config.blockDim         = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream           = stream;
    config.attrs            = &attribute;
    config.numAttrs         = pdl ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
}
