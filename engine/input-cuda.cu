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

// A CUDA graph of this one kernel. Launched by itself in front of a token's graph, once any other stream has run a kernel, it would make each
// kernel of that graph that waits for another one start 0.35 us later (docs/performance.md, "What a kernel waits for").
struct upload_graph {
    cudaGraph_t     graph = nullptr;
    cudaGraphNode_t node  = nullptr;
    cudaGraphExec_t exec  = nullptr;
};

static cudaError_t set_kernel(upload_graph & own, const cudaKernelNodeParams & kernel) {
    if (own.exec) {
        return cudaGraphExecKernelNodeSetParams(own.exec, own.node, &kernel);
    }
    cudaError_t error = cudaGraphCreate(&own.graph, 0);
    if (error == cudaSuccess) {
        error = cudaGraphAddKernelNode(&own.node, own.graph, nullptr, 0, &kernel);
    }
    if (error == cudaSuccess) {
        error = cudaGraphInstantiate(&own.exec, own.graph, nullptr, nullptr, 0);
    }
    return error;
}

cudaError_t phase_cuda_upload(phase_upload_side & side, const phase_upload_piece * pieces, int32_t n, cudaStream_t stream) {
    if (n < 1 || n > PHASE_UPLOAD_PIECES) {
        return cudaErrorInvalidValue;
    }
    upload_args args = {};
    for (int32_t i = 0; i < n; ++i) {
        args.pieces[i] = pieces[i];
    }
    void * parameters[] = { &args };
    cudaKernelNodeParams kernel = {};
    kernel.func         = (void *) upload_kernel;
    kernel.gridDim      = dim3(n);
    kernel.blockDim     = dim3(UPLOAD_BLOCK);
    kernel.kernelParams = parameters;

    if (!side.backend_state) {
        side.backend_state = new upload_graph();
    }
    auto * own = (upload_graph *) side.backend_state;
    const cudaError_t error = set_kernel(*own, kernel);
    return error == cudaSuccess ? cudaGraphLaunch(own->exec, stream) : error;
}

void phase_cuda_upload_free(phase_upload_side & side) {
    auto * own = (upload_graph *) side.backend_state;
    side.backend_state = nullptr;
    if (!own) {
        return;
    }
    // errors are of earlier work, or of a process that ends and has unloaded the driver already
    if (own->exec) {
        (void) cudaGraphExecDestroy(own->exec);
    }
    if (own->graph) {
        (void) cudaGraphDestroy(own->graph);
    }
    delete own;
}
