// stream: a ring of regions that layers pass through, filled by DMA on a stream of its own.
//
// Ordering. Regions are written by the copy stream only and read by the compute stream only.
//   done[r]   recorded on the compute stream when the next layer's operator is queued, that is behind everything that reads the
//             layer in region r; the copy stream waits for it before it overwrites r.
//   ready[r]  recorded on the copy stream behind the copy into r; the compute stream waits for it before the layer in r runs.
// `holds[r]` says what is in r or on its way there, so it does not matter in which order positions come, or that a micro-batch ends
// early: what is missing is copied, what is there is used. A layer still being read (`active`) is never a target of copies ahead.

#include "expert-cuda-kernels.cuh"

#include <algorithm>
#include <vector>

#ifndef _WIN32
#include <unistd.h>
#endif

namespace {

struct region {
    cudaEvent_t ready = nullptr;
    cudaEvent_t done  = nullptr;
    int32_t     holds = -1; // position
};

struct ring_state {
    int                 device = 0;
    cudaStream_t        copies = nullptr;
    std::vector<region> regions;

    int32_t      active = -1;      // region that the layer queued last reads
    cudaStream_t reader = nullptr; // on this stream
};

} // namespace

#define TRY(call)                           \
    do {                                    \
        const cudaError_t error_ = (call);  \
        if (error_ != cudaSuccess) {        \
            return error_;                  \
        }                                   \
    } while (0)

static __global__ void pass_ids_kernel(phase_cuda_ids ids, int32_t n_expert, int32_t * seen, int32_t * dst) {
    const int32_t i = blockIdx.x*blockDim.x + threadIdx.x;
    if (i >= ids.n_used*ids.n_tokens) {
        return;
    }
    const int32_t token = i/ids.n_used;
    const int32_t id    = *(const int32_t *) (ids.data + token*ids.token_bytes + (i - token*ids.n_used)*sizeof(int32_t));
    dst[i] = id;
    if (token >= ids.n_tokens - PHASE_SEEN_TOKENS && id >= 0 && id < n_expert) {
        atomicAdd(&seen[id], 1);
    }
}

static cudaError_t destroy(ring_state * state) {
    cudaError_t first = cudaSuccess;
    const auto keep = [&](cudaError_t error) {
        if (first == cudaSuccess) {
            first = error;
        }
    };
    int current = 0;
    keep(cudaGetDevice(&current));
    keep(cudaSetDevice(state->device));
    if (state->copies) {
        keep(cudaStreamSynchronize(state->copies));
        keep(cudaStreamDestroy(state->copies));
    }
    for (auto & r : state->regions) {
        for (cudaEvent_t event : { r.ready, r.done }) {
            if (event) {
                keep(cudaEventDestroy(event));
            }
        }
    }
    keep(cudaSetDevice(current));
    delete state;
    return first;
}

// The regions may have been anything until now: nothing is copied before what `stream` has queued so far is over.
static cudaError_t create(phase_ring & ring, cudaStream_t stream) {
    auto * state = new ring_state;
    const auto init = [&]() {
        TRY(cudaGetDevice(&state->device));
        TRY(cudaStreamCreateWithFlags(&state->copies, cudaStreamNonBlocking));
        state->regions.resize(ring.n_regions);
        for (auto & r : state->regions) {
            TRY(cudaEventCreateWithFlags(&r.ready, cudaEventDisableTiming));
            TRY(cudaEventCreateWithFlags(&r.done,  cudaEventDisableTiming));
            TRY(cudaEventRecord(r.done, stream));
        }
        return cudaSuccess;
    };
    const cudaError_t error = init();
    if (error != cudaSuccess) {
        (void) destroy(state);
        return error;
    }
    ring.backend_state = state;
    return cudaSuccess;
}

// Memory is registered in pieces that end at page borders, and one copy must not span two: the page in which a tensor begins may
// belong to the piece before.
static cudaError_t copy_in(uint8_t * dst, const uint8_t * src, size_t size, cudaStream_t stream) {
#ifndef _WIN32
    static const size_t page = (size_t) sysconf(_SC_PAGESIZE);
#else
    static const size_t page = 4096;
#endif
    const size_t head = std::min(size, (page - (uintptr_t) src % page) % page);
    if (head > 0) {
        TRY(cudaMemcpyAsync(dst, src, head, cudaMemcpyHostToDevice, stream));
    }
    return size > head ? cudaMemcpyAsync(dst + head, src + head, size - head, cudaMemcpyHostToDevice, stream) : cudaSuccess;
}

static cudaError_t upload(ring_state & state, const phase_stream_op & op) {
    auto & r = state.regions[op.position % state.regions.size()];
    r.holds = -1; // until all of it is queued
    TRY(cudaStreamWaitEvent(state.copies, r.done, 0));
    for (int32_t i = 0; i < op.n_tensors; ++i) {
        const auto & t = op.tensors[i];
        const size_t size = op.n_expert*t.stride;
        TRY(copy_in(t.dst, t.src, size, state.copies));
        if (t.pad > 0) {
            TRY(cudaMemsetAsync(t.dst + size, 0, t.pad, state.copies));
        }
    }
    TRY(cudaEventRecord(r.ready, state.copies));
    r.holds = op.position;
    if (op.counters) {
        op.counters->missed += op.n_expert;
    }
    return cudaSuccess;
}

cudaError_t phase_cuda_stream(const phase_stream_op & op, const phase_cuda_ids & ids, int32_t * state_words, int32_t * dst, cudaStream_t stream) {
    auto & ring = *op.ring;
    if (!ring.backend_state) {
        TRY(create(ring, stream));
    }
    auto & state = *(ring_state *) ring.backend_state;

    const int32_t n_regions = (int32_t) state.regions.size();
    const int32_t mine      = op.position % n_regions;

    if (state.active >= 0) {
        TRY(cudaEventRecord(state.regions[state.active].done, state.reader));
        state.active = -1;
    }
    if (state.regions[mine].holds != op.position) {
        TRY(upload(state, op));
    }
    TRY(cudaStreamWaitEvent(stream, state.regions[mine].ready, 0));
    state.active = mine;
    state.reader = stream;

    const int32_t n_ids = ids.n_used*ids.n_tokens;
    pass_ids_kernel<<<(n_ids + 255)/256, 256, 0, stream>>>(ids, op.n_expert, state_words, dst);
    TRY(cudaGetLastError());

    // Nearest first. Where n_layers is no multiple of n_regions, a layer behind the wrap can share a region with one before it: it
    // has to wait for its own turn.
    for (int32_t ahead = 1; ahead < std::min(n_regions, ring.n_layers); ++ahead) {
        const int32_t next = (op.position + ahead) % ring.n_layers;
        bool taken = false;
        for (int32_t before = 0; before < ahead; ++before) {
            taken = taken || (op.position + before) % ring.n_layers % n_regions == next % n_regions;
        }
        if (taken || (next < op.position && ring.last_pass)) {
            break;
        }
        if (state.regions[next % n_regions].holds != next) {
            TRY(upload(state, *ring.layers[next]));
        }
    }

    if (op.counters) {
        op.counters->looked_up += n_ids;
        op.counters->runs++;
    }
    return cudaSuccess;
}

cudaError_t phase_cuda_ring_start(phase_ring & ring, cudaStream_t stream) {
    TRY(ring.backend_state ? cudaSuccess : create(ring, stream));
    auto & state = *(ring_state *) ring.backend_state;
    for (int32_t position = 0; position < std::min(ring.n_regions, ring.n_layers); ++position) {
        TRY(upload(state, *ring.layers[position]));
    }
    return cudaSuccess;
}

cudaError_t phase_cuda_ring_free(phase_ring & ring) {
    auto * state = (ring_state *) ring.backend_state;
    ring.backend_state = nullptr;
    return state ? destroy(state) : cudaSuccess;
}
