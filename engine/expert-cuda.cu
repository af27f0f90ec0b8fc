// The operators of expert-op.h as nodes of ggml graphs, and phase_backend_api.

#include "expert-cuda.cuh"
#include "expert-cuda-kernels.cuh"

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <atomic>
#include <cstring>

static std::atomic<uint64_t> n_replays{0};

// The struct of a node that is ours, else null. Names and types come first: the userdata of others may point to anything.
static const phase_fetch_op * op_of(const ggml_tensor * node) {
    const bool named = strcmp(node->name, "phase_fetch") == 0 || strcmp(node->name, "phase_stream") == 0;
    if (node->op != GGML_OP_CUSTOM || !named || node->type != GGML_TYPE_I32 || !node->src[0] || node->src[0]->type != GGML_TYPE_I32 ||
            !node->src[1] || node->src[1]->type != GGML_TYPE_I32) {
        return nullptr;
    }
    ggml_custom_op_params params;
    memcpy(&params, node->op_params, sizeof(params));
    const auto * op = (const phase_fetch_op *) params.userdata; // magic and kind begin both structs
    return op && op->magic == PHASE_OP_MAGIC ? op : nullptr;
}

static phase_cuda_ids ids_of(const ggml_tensor * node) {
    const auto * ids = node->src[0];
    return { (const char *) ids->data, ids->nb[1], (int32_t) ids->ne[0], (int32_t) ids->ne[1] };
}

bool phase_cuda_supports_op(const ggml_tensor * node) {
    const auto * op = op_of(node);
    if (!op || node->src[0]->nb[0] != sizeof(int32_t)) {
        return false;
    }
    if (op->kind == PHASE_OP_STREAM) {
        return true;
    }
    const int64_t n_ids = ggml_nelements(node);
    return n_ids <= PHASE_MAX_IDS && phase_cuda_table_words(op->n_expert, op->n_slots, (int32_t) n_ids) <= PHASE_CUDA_TABLE_WORDS;
}

bool phase_cuda_capturable(const ggml_tensor * node) {
    const auto * op = op_of(node);
    return op && op->kind == PHASE_OP_FETCH;
}

static bool use_pdl() {
#if defined(GGML_CUDA_USE_PDL)
    static const bool enabled = [] {
        const char * env = getenv("GGML_CUDA_PDL");
        return env == nullptr || std::atoi(env) != 0;
    }();
    static std::atomic<int> able[GGML_CUDA_MAX_DEVICES] = {}; // 0: not asked yet
    auto & device = able[ggml_cuda_get_device()];
    if (device == 0) {
        device = phase_cuda_can_use_pdl() ? 1 : -1;
    }
    return enabled && device > 0;
#else
    return false;
#endif
}

bool phase_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const auto * op = op_of(node);
    if (!op) {
        return false;
    }
    const auto ids   = ids_of(node);
    auto     * state = (int32_t *) node->src[1]->data;
    auto     * dst   = (int32_t *) node->data;
    if (op->kind == PHASE_OP_FETCH) {
        GGML_ASSERT((size_t) ggml_nelements(node->src[1]) >= phase_state_words(op->n_expert, op->n_slots));
        CUDA_CHECK(phase_cuda_fetch(*op, ids, state, dst, ctx.stream(), use_pdl()));
    } else {
        CUDA_CHECK(phase_cuda_stream(*(const phase_stream_op *) op, ids, state, dst, ctx.stream()));
    }
    return true;
}

void phase_cuda_count_replay() {
    n_replays.fetch_add(1, std::memory_order_relaxed);
}

// Between graphs nothing holds pool memory: operators give it back before they return. Captured graphs hold its addresses.
static size_t trim(ggml_backend_cuda_context & ctx) {
    ggml_cuda_set_device(ctx.device);
    for (auto & of_device : ctx.streams) {
        for (cudaStream_t stream : of_device) {
            if (stream) {
                CUDA_CHECK(cudaStreamSynchronize(stream));
            }
        }
    }
#ifdef USE_CUDA_GRAPH
    ctx.cuda_graphs.clear();
#endif
    ctx.stream_context().reset();

    size_t freed = 0;
    for (auto & of_device : ctx.pools) {
        for (auto & pool : of_device) {
            freed += pool ? pool->size() : 0;
            pool.reset();
        }
    }
    return freed;
}

const phase_backend_api * phase_cuda_backend_api() {
    static const phase_backend_api api = {
        /*.pin           =*/ phase_cuda_pin,
        /*.unpin         =*/ phase_cuda_unpin,
        /*.fill          =*/ [](void * backend, const phase_fetch_op * op, void * state) {
            auto & ctx = *(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context;
            ggml_cuda_set_device(ctx.device);
            CUDA_CHECK(phase_cuda_fill(*op, (const int32_t *) state, ctx.stream()));
        },
        /*.ring_start    =*/ [](void * backend, phase_ring * ring) {
            auto & ctx = *(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context;
            ggml_cuda_set_device(ctx.device);
            CUDA_CHECK(phase_cuda_ring_start(*ring, ctx.stream()));
        },
        /*.ring_free     =*/ [](phase_ring * ring) { CUDA_CHECK(phase_cuda_ring_free(*ring)); },
        /*.trim          =*/ [](void * backend) { return trim(*(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context); },
        /*.graph_replays =*/ [] { return n_replays.load(std::memory_order_relaxed); },
    };
    return &api;
}
