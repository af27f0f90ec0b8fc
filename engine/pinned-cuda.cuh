#pragma once

// Host memory that the GPUs read in place, without ggml.

#include <cuda_runtime.h>

#include <cstddef>

// See phase_backend_api.
const char * phase_cuda_pin(void * ptr, size_t size);
void         phase_cuda_unpin(void * ptr);

// cudaMemcpyAsync from any host memory to the current device. The driver refuses a copy (invalid argument) that spans two pieces that
// were pinned on their own, or one and memory beside it; this one is cut there. A tensor that was never pinned may begin or end in a
// page that its neighbour's experts were pinned with.
cudaError_t phase_cuda_copy_in(void * dst, const void * src, size_t size, cudaStream_t stream);
