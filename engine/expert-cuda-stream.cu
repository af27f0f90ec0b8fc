// stream: a ring of regions that layers pass through, filled by DMA on a stream of its own.
//
// Ordering. Regions are written by the copy stream only and read by the compute stream only.
//   done[r]   recorded on the compute stream when the next layer's operator is queued, that is behind everything that reads the
//             layer in region r; the copy stream waits for it before it overwrites r.
//   ready[r]  recorded on the copy stream behind the copy into r; the compute stream waits for it before the layer in r runs.
// `holds[r]` says what is in r or on its way there, so it does not matter in which order positions come, or that a micro-batch ends
// early: what is missing is copied, what is there is used. A layer still being read (`active`) is never a target of copies ahead.
//
// A staged layer's copies are queued by the threads of a stager, between begin_copies and end_copies like any other's. Its `ready` is not
// recorded when the layer's operator is queued, so the host waits for the stager first; what was queued before goes on meanwhile. The
// operators behind a copy of the stager that failed return its error; freeing the ring does not, what no layer needed may fail.

#include "expert-cuda-kernels.cuh"
#include "expert-staging.h"
#include "pinned-cuda.cuh"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct region {
    cudaEvent_t ready = nullptr;
    cudaEvent_t done  = nullptr;
    int32_t     holds = -1; // position

    const phase_stream_op * op = nullptr; // copied last
    uint64_t                job = 0;      // of the stager, when that op is staged
    cudaEvent_t             began = nullptr; // its copies: of the stopwatch
};

// Times between two events of one stream, added up once the second is seen to be over. Events are used again; one whose measurement
// never came about, since a call failed, is destroyed with the rest.
class stopwatch {
  public:
    cudaError_t mark(cudaStream_t stream, cudaEvent_t & event) {
        std::lock_guard<std::mutex> guard(lock);
        if (spare.empty()) {
            const cudaError_t error = cudaEventCreate(&event);
            if (error != cudaSuccess) {
                return error;
            }
            events.push_back(event);
        } else {
            event = spare.back();
            spare.pop_back();
        }
        return cudaEventRecord(event, stream);
    }

    cudaError_t measure(cudaEvent_t begin, cudaStream_t stream, bool exposed) {
        cudaEvent_t end = nullptr;
        const cudaError_t error = mark(stream, end);
        if (error == cudaSuccess) {
            std::lock_guard<std::mutex> guard(lock);
            open[exposed].push_back({ begin, end });
        }
        return error;
    }

    // Called by the thread that owns `times` only.
    void collect(phase_ring_times * times) {
        std::lock_guard<std::mutex> guard(lock);
        for (const bool exposed : { false, true }) {
            while (!open[exposed].empty() && cudaEventQuery(open[exposed].front().end) == cudaSuccess) {
                const auto span = open[exposed].front();
                open[exposed].pop_front();
                float ms = 0;
                if (cudaEventElapsedTime(&ms, span.begin, span.end) == cudaSuccess && times) {
                    (exposed ? times->exposed_us : times->copy_us) += (uint64_t) (1000*ms);
                }
                spare.push_back(span.begin);
                spare.push_back(span.end);
            }
        }
        if (cudaPeekAtLastError() == cudaErrorNotReady) { // which is no error
            (void) cudaGetLastError();
        }
    }

    ~stopwatch() {
        for (cudaEvent_t event : events) {
            (void) cudaEventDestroy(event);
        }
    }

  private:
    struct span { cudaEvent_t begin, end; };

    std::mutex               lock;
    std::deque<span>         open[2]; // copies, exposed waits
    std::vector<cudaEvent_t> spare;
    std::vector<cudaEvent_t> events;  // all
};

struct ring_state {
    int                 device = 0;
    cudaStream_t        copies = nullptr;
    std::vector<region> regions;
    phase_ring_times  * times = nullptr;
    stopwatch           watch;

    std::vector<cudaEvent_t>      chunk_sent;
    std::atomic<int>              staging_error { cudaSuccess }; // the first one of a thread
    std::unique_ptr<phase_stager> stager; // null: no staging memory

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

#ifdef __CUDACC__
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

static cudaError_t pass_ids(const phase_cuda_ids & ids, int32_t n_expert, int32_t * seen, int32_t * dst, cudaStream_t stream) {
    const int32_t n_ids = ids.n_used*ids.n_tokens;
    pass_ids_kernel<<<(n_ids + 255)/256, 256, 0, stream>>>(ids, n_expert, seen, dst);
    return cudaGetLastError();
}
#else // engine/tests/test-expert-ring.cpp: a runtime without kernels
static cudaError_t pass_ids(const phase_cuda_ids &, int32_t, int32_t *, int32_t *, cudaStream_t) {
    return cudaSuccess;
}
#endif

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
    state->stager.reset(); // its threads first: they queue copies
    if (state->copies) {
        keep(cudaStreamSynchronize(state->copies));
        keep(cudaStreamDestroy(state->copies));
    }
    state->watch.collect(state->times);
    for (auto & r : state->regions) {
        for (cudaEvent_t event : { r.ready, r.done }) {
            if (event) {
                keep(cudaEventDestroy(event));
            }
        }
    }
    for (cudaEvent_t event : state->chunk_sent) {
        keep(cudaEventDestroy(event));
    }
    keep(cudaSetDevice(current));
    delete state;
    return first;
}

static cudaError_t begin_copies(ring_state & state, region & r) {
    TRY(cudaStreamWaitEvent(state.copies, r.done, 0));
    return state.watch.mark(state.copies, r.began);
}

static cudaError_t end_copies(ring_state & state, region & r) {
    for (int32_t i = 0; i < r.op->n_tensors; ++i) {
        const auto & t = r.op->tensors[i];
        if (t.pad > 0) {
            TRY(cudaMemsetAsync(t.dst + r.op->n_expert*t.stride, 0, t.pad, state.copies));
        }
    }
    TRY(state.watch.measure(r.began, state.copies, false));
    return cudaEventRecord(r.ready, state.copies);
}

static cudaError_t create_stager(ring_state & state, const phase_ring & ring) {
    const int    n_threads = std::max(1, std::min<int>(PHASE_STAGING_THREADS, std::thread::hardware_concurrency()/2));
    const int    n_chunks  = n_threads*phase_stager::CHUNKS_PER_THREAD;
    const size_t chunk     = ring.staging_bytes/n_chunks;
    for (int i = 0; i < n_chunks; ++i) {
        cudaEvent_t event = nullptr;
        TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
        state.chunk_sent.push_back(event);
    }
    const auto keep = [&state](cudaError_t error) {
        int none = cudaSuccess;
        state.staging_error.compare_exchange_strong(none, error);
    };
    phase_stage_effects effects;
    effects.start   = [&state, keep] { keep(cudaSetDevice(state.device)); };
    effects.reclaim = [&state, keep](int i) { keep(cudaEventSynchronize(state.chunk_sent[i])); };
    effects.begin   = [&state, keep](int tag) { keep(begin_copies(state, state.regions[tag])); };
    effects.send    = [&state, keep, chunk, memory = ring.staging](int i, uint8_t * dst, size_t size) {
        keep(cudaMemcpyAsync(dst, memory + i*chunk, size, cudaMemcpyHostToDevice, state.copies));
        keep(cudaEventRecord(state.chunk_sent[i], state.copies));
    };
    effects.end     = [&state, keep](int tag) { keep(end_copies(state, state.regions[tag])); };
    state.stager.reset(new phase_stager(ring.staging, chunk, n_threads, effects));
    return cudaSuccess;
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
        state->times = ring.times;
        return ring.staging ? create_stager(*state, ring) : cudaSuccess;
    };
    const cudaError_t error = init();
    if (error != cudaSuccess) {
        (void) destroy(state);
        return error;
    }
    ring.backend_state = state;
    return cudaSuccess;
}

static cudaError_t upload(ring_state & state, const phase_stream_op & op) {
    const int32_t index = op.position % state.regions.size();
    auto & r = state.regions[index];
    if (r.op && r.op->staged) {
        state.stager->wait(r.job); // over already, unless its layer never ran
    }
    r.holds = -1; // until all of it is queued
    r.op    = &op;
    if (op.staged) {
        std::vector<phase_stage_piece> pieces;
        for (int32_t i = 0; i < op.n_tensors; ++i) {
            const auto & t = op.tensors[i];
            pieces.push_back({ t.dst, t.src, op.n_expert*t.stride });
        }
        r.job = state.stager->submit(pieces, index);
    } else {
        TRY(begin_copies(state, r));
        for (int32_t i = 0; i < op.n_tensors; ++i) {
            const auto & t = op.tensors[i];
            TRY(phase_cuda_copy_in(t.dst, t.src, op.n_expert*t.stride, state.copies));
        }
        TRY(end_copies(state, r));
    }
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
    cudaEvent_t before = nullptr;
    TRY(state.watch.mark(stream, before));
    if (op.staged) {
        state.stager->wait(state.regions[mine].job);
        TRY((cudaError_t) state.staging_error.load());
    }
    TRY(cudaStreamWaitEvent(stream, state.regions[mine].ready, 0));
    TRY(state.watch.measure(before, stream, true));
    state.watch.collect(state.times);
    state.active = mine;
    state.reader = stream;

    TRY(pass_ids(ids, op.n_expert, state_words, dst, stream));

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
        op.counters->looked_up += ids.n_used*ids.n_tokens;
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
