// The operators of expert-op.h as nodes of ggml graphs, and phase_backend_api.

#include "expert-cuda.cuh"
#include "expert-cuda-kernels.cuh"
#include "kv-attention-cuda.cuh"
#include "select-cuda.cuh"

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstring>

static std::atomic<uint64_t> n_replays{0};

// All structs of ours begin with magic and kind.

// The struct of a node that is ours, else null. Names and types come first: the userdata of others may point to anything.
static const phase_op_head * op_of(const ggml_tensor * node) {
    static constexpr const char * NAMES[] = { "phase_fetch", "phase_prefetch", "phase_stream", "phase_select", "phase_score" };
    const bool named = std::any_of(std::begin(NAMES), std::end(NAMES), [&](const char * name) { return strcmp(node->name, name) == 0; });
    if (node->op != GGML_OP_CUSTOM || !named || (node->type != GGML_TYPE_I32 && node->type != GGML_TYPE_F16 && node->type != GGML_TYPE_F32) || !node->src[0] || !node->src[1]) {
        return nullptr;
    }
    ggml_custom_op_params params;
    memcpy(&params, node->op_params, sizeof(params));
    const auto * op = (const phase_op_head *) params.userdata;
    return op && op->magic == PHASE_OP_MAGIC ? op : nullptr;
}

static phase_cuda_ids ids_of(const ggml_tensor * node) {
    const auto * ids = node->src[0];
    return { (const char *) ids->data, ids->nb[1], (int32_t) ids->ne[0], (int32_t) ids->ne[1] };
}

static int64_t n_predict_of(const ggml_tensor * node) {
    return (node->ne[0] - ((const phase_prefetch_op *) op_of(node))->n_expert)/2;
}

bool phase_cuda_supports_op(const ggml_tensor * node) {
    const auto * op = op_of(node);
    if (!op || node->src[0]->nb[0] != sizeof(int32_t)) { // of an id or an activation
        return false;
    }
    const auto fits = [](const phase_fetch_op & fetch, int64_t n_ids) {
        return n_ids <= PHASE_MAX_IDS && phase_cuda_table_words(fetch.n_expert, fetch.n_slots, (int32_t) n_ids) <= PHASE_CUDA_TABLE_WORDS;
    };
    switch (op->kind) {
        case PHASE_OP_FETCH:    return fits(*(const phase_fetch_op *) op, ggml_nelements(node));
        case PHASE_OP_PREFETCH: return fits(*((const phase_prefetch_op *) op)->next, n_predict_of(node)*node->ne[1]);
        case PHASE_OP_STREAM:   return true;
        case PHASE_OP_SELECT:   return phase_cuda_select_fits(node->src[4]->ne[0]);
        case PHASE_OP_SCORE:    return true;
    }
    return false;
}

bool phase_cuda_capturable(const ggml_tensor * node) {
    const auto * op = op_of(node);
    return op && op->kind != PHASE_OP_STREAM;
}

bool phase_cuda_capture_at_once(const ggml_cgraph * graph) {
    return n_replays > 0 && std::any_of(graph->nodes, graph->nodes + graph->n_nodes,
            [](const ggml_tensor * node) { return node->op == GGML_OP_CUSTOM && phase_cuda_capturable(node); });
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

static void compute_fetch(ggml_backend_cuda_context & ctx, const phase_fetch_op & op, ggml_tensor * node) {
    GGML_ASSERT((size_t) ggml_nelements(node->src[1]) >= phase_state_words(op.n_expert, op.n_slots));
    bool waited = false;
    CUDA_CHECK(phase_cuda_join_prefetch(ctx.stream(), (const int32_t *) node->src[1]->data, waited));
    // a kernel that depends on two streams cannot be launched before its predecessors end
    CUDA_CHECK(phase_cuda_fetch(op, ids_of(node), (int32_t *) node->src[1]->data, (int32_t *) node->data, ctx.stream(), use_pdl(), 0, waited));
}

static void compute_prefetch(ggml_backend_cuda_context & ctx, const phase_prefetch_op & op, ggml_tensor * node) {
    const auto * x      = node->src[0];
    const auto * router = node->src[1];

    const phase_cuda_activations activations = { (const char *) x->data, x->nb[1], (int32_t) x->ne[0], (int32_t) x->ne[1] };
    const auto type = router->type == GGML_TYPE_F16 ? phase_cuda_router::F16 : router->type == GGML_TYPE_BF16 ? phase_cuda_router::BF16 : phase_cuda_router::F32;
    CUDA_CHECK(phase_cuda_prefetch(op, activations, { type, router->data }, (int32_t) n_predict_of(node), (int32_t *) node->src[2]->data,
            (int32_t *) node->data, ctx.stream(), use_pdl()));
}

static void compute_select(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const auto * score = node->src[0];
    const auto * pools = node->src[2];

    phase_cuda_selection s {};
    s.score    = (const float *) score->data;
    s.top_k    = (const int32_t *) node->src[1]->data;
    s.pools    = (const int32_t *) pools->data;
    s.tails    = (const int32_t *) node->src[3]->data;
    s.visible  = (const uint16_t *) node->src[4]->data;
    s.n_tokens = (int32_t) score->ne[1];
    s.n_pool   = (int32_t) score->ne[0];
    s.n_top    = (int32_t) node->src[1]->ne[0];
    s.kpool    = (int32_t) pools->ne[0];
    s.n_tail   = (int32_t) node->src[3]->ne[0];
    s.n_kv     = (int32_t) node->src[4]->ne[0];
    for (int i = 0; i < 5; ++i) {
        GGML_ASSERT(ggml_is_contiguous(node->src[i]));
    }
    s.mask     = (uint16_t *) node->data;
    CUDA_CHECK(phase_cuda_launch_select(s, ctx.stream()));
}

static void compute_score(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const auto * q    = node->src[0];
    const auto * keys = node->src[1];
    const auto * mask = node->src[3];

    phase_cuda_scores s {};
    s.q           = (const char *) q->data;
    s.keys        = (const char *) keys->data;
    s.cells       = (const int32_t *) node->src[2]->data;
    s.mask        = (const char *) mask->data;
    s.score       = (float *) node->data;
    s.head_bytes  = q->nb[1];
    s.token_bytes = q->nb[2];
    s.key_bytes   = keys->nb[1];
    s.mask_bytes  = mask->nb[1];
    s.n_pool      = (int32_t) node->ne[0];
    s.n_tokens    = (int32_t) node->ne[1];
    memcpy(&s.weight, (const char *) node->op_params + PHASE_SCORE_PARAM*sizeof(float), sizeof(float));
    GGML_ASSERT(q->nb[0] == sizeof(float) && q->nb[1] % 16 == 0 && q->nb[2] % 16 == 0 && keys->nb[1] % 8 == 0 && (uintptr_t) keys->data % 8 == 0);
    CUDA_CHECK(phase_cuda_launch_score(s, ctx.stream()));
}

bool phase_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const auto * op = op_of(node);
    if (!op) {
        return false;
    }
    switch (op->kind) {
        case PHASE_OP_FETCH:    compute_fetch   (ctx, *(const phase_fetch_op    *) op, node); break;
        case PHASE_OP_PREFETCH: compute_prefetch(ctx, *(const phase_prefetch_op *) op, node); break;
        case PHASE_OP_SELECT:   compute_select(ctx, node); break;
        case PHASE_OP_SCORE:    compute_score(ctx, node); break;
        case PHASE_OP_STREAM:
            CUDA_CHECK(phase_cuda_stream(*(const phase_stream_op *) op, ids_of(node), (int32_t *) node->src[1]->data, (int32_t *) node->data, ctx.stream()));
            break;
    }
    return true;
}

void phase_cuda_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) {
    phase_cuda_kv_begin(ctx, graph);
}

void phase_cuda_finish(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) {
    phase_cuda_kv_finish(ctx, graph);
    bool waited = false;
    CUDA_CHECK(phase_cuda_join_prefetch(ctx.stream(), nullptr, waited));
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
        /*.fill          =*/ [](void * backend, const phase_fetch_op * op, void * state, const phase_fill * list) {
            auto & ctx = *(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context;
            ggml_cuda_set_device(ctx.device);
            CUDA_CHECK(phase_cuda_fill(*op, (int32_t *) state, *list, ctx.stream()));
        },
        /*.ring_start    =*/ [](void * backend, phase_ring * ring) -> const char * {
            auto & ctx = *(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context;
            ggml_cuda_set_device(ctx.device);
            const cudaError_t error = phase_cuda_ring_start(*ring, ctx.stream());
            if (error != cudaSuccess) {
                (void) cudaGetLastError(); // the next unrelated call would report it
            }
            return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
        },
        /*.ring_free     =*/ [](phase_ring * ring) { CUDA_CHECK(phase_cuda_ring_free(*ring)); },
        /*.prefetch_free =*/ [](phase_prefetch_side * side) { phase_cuda_prefetch_free(*side); },
        /*.trim          =*/ [](void * backend) { return trim(*(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context); },
        /*.graph_replays =*/ [] { return n_replays.load(std::memory_order_relaxed); },
        /*.host_alloc    =*/ phase_cuda_host_alloc,
        /*.host_free     =*/ phase_cuda_host_free,
        /*.kv_rows_new   =*/ phase_cuda_kv_rows_create,
        /*.kv_rows_free  =*/ phase_cuda_kv_rows_destroy,
        /*.kv_rows_reset =*/ phase_cuda_kv_rows_reset,
        /*.kv_rows_count =*/ phase_cuda_kv_rows_count,
        /*.set_select    =*/ phase_cuda_set_select,
        /*.upload        =*/ [](void * backend, phase_upload_side * side, const phase_upload_piece * pieces, int32_t n) {
            auto & ctx = *(ggml_backend_cuda_context *) ((ggml_backend_t) backend)->context;
            ggml_cuda_set_device(ctx.device);
            CUDA_CHECK(phase_cuda_upload(*side, pieces, n, ctx.stream()));
        },
        /*.upload_free   =*/ [](phase_upload_side * side) { phase_cuda_upload_free(*side); },
    };
    return &api;
}
