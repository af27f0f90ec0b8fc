// upload: the inputs of a graph, read by one kernel from pinned memory.

#include "expert-cuda-kernels.cuh"

static constexpr int UPLOAD_BLOCK = 256;

struct upload_args {
    phase_upload_piece pieces[PHASE_UPLOAD_PIECES];
};

template <typename T>
static __device__ __forceinline__ void copy_piece(const phase_upload_piece & piece) {
    const T * src = (const T *) piece.src;
    T       * dst = (T *) piece.dst;
    for (uint32_t i = threadIdx.x; i < piece.size/sizeof(T); i += UPLOAD_BLOCK) {
        dst[i] = src[i];
    }
}

// A block copies one piece.
static __global__ void __launch_bounds__(UPLOAD_BLOCK) upload_kernel(const __grid_constant__ upload_args a) {
    const phase_upload_piece piece = a.pieces[blockIdx.x];
    const uintptr_t bits = (uintptr_t) piece.src | (uintptr_t) piece.dst | piece.size;
    if (bits % 16 == 0) {
        copy_piece<uint4>(piece);
    } else if (bits % 4 == 0) {
        copy_piece<uint32_t>(piece);
    } else {
        copy_piece<uint8_t>(piece);
    }
}

cudaError_t phase_cuda_upload(const phase_upload_piece * pieces, int32_t n, cudaStream_t stream) {
    if (n < 1 || n > PHASE_UPLOAD_PIECES) {
        return cudaErrorInvalidValue;
    }
    upload_args args = {};
    for (int32_t i = 0; i < n; ++i) {
        args.pieces[i] = pieces[i];
    }
    upload_kernel<<<n, UPLOAD_BLOCK, 0, stream>>>(args);
    return cudaGetLastError();
}
