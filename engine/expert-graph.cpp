#include "expert-graph.h"

#include "expert-staging.h"
#include "slot-policy.h"

#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

static std::vector<int32_t> read_ids(const ggml_tensor * ids) {
    std::vector<int32_t> out;
    out.reserve(ids->ne[0]*ids->ne[1]);
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        for (int64_t k = 0; k < ids->ne[0]; ++k) {
            out.push_back(*(const int32_t *) ((const char *) ids->data + t*ids->nb[1] + k*ids->nb[0]));
        }
    }
    return out;
}

static void copy_jobs(const slot_policy & policy, const phase_fetch_op & op) {
    for (int32_t j = 0; j < *policy.n_jobs; ++j) {
        const size_t expert = policy.jobs[2*j];
        const size_t slot   = policy.jobs[2*j + 1];
        for (int32_t i = 0; i < op.n_tensors; ++i) {
            const auto & t = op.tensors[i];
            std::memcpy(t.dst + slot*t.stride, t.src + expert*t.stride, t.stride);
        }
    }
}

static void compute_fetch(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    auto & op = *(phase_fetch_op *) userdata;

    slot_policy policy((int32_t *) dst->src[1]->data, op.n_expert, op.n_slots);

    const auto ids = read_ids(dst->src[0]);
    policy.fetch(ids.data(), (int32_t) ids.size(), (int32_t *) dst->data, *op.counters);
    copy_jobs(policy, op);
}

void phase_fill_slots(const phase_fetch_op & op, int32_t * state, const phase_fill & list) {
    slot_policy policy(state, op.n_expert, op.n_slots);
    policy.fill(list.experts, list.n, list.newest, *list.counters);
    copy_jobs(policy, op);
}

static float router_weight(const ggml_tensor * router, int64_t i, int64_t expert) {
    const char * p = (const char *) router->data + expert*router->nb[1] + i*router->nb[0];
    switch (router->type) {
        case GGML_TYPE_F16:  return ggml_fp16_to_fp32(*(const ggml_fp16_t *) p);
        case GGML_TYPE_BF16: return ggml_bf16_to_fp32(*(const ggml_bf16_t *) p);
        default:             return *(const float *) p;
    }
}

static void compute_prefetch(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & op     = *(const phase_prefetch_op *) userdata;
    const auto * x      = dst->src[0];
    const auto * router = dst->src[1];

    const int64_t n_tokens  = dst->ne[1];
    const int32_t n_predict = (int32_t) (dst->ne[0] - op.n_expert)/2;

    float   * scores = (float *) dst->data;
    int32_t * ids    = (int32_t *) scores + n_tokens*op.n_expert;
    int32_t * slots  = ids + n_tokens*n_predict;

    for (int64_t t = 0; t < n_tokens; ++t) {
        const float * row   = (const float *) ((const char *) x->data + t*x->nb[1]);
        float       * score = scores + t*op.n_expert;
        for (int32_t e = 0; e < op.n_expert; ++e) {
            float sum = 0.0f;
            for (int64_t i = 0; i < x->ne[0]; ++i) {
                sum += row[i]*router_weight(router, i, e);
            }
            score[e] = op.bias ? 1.0f/(1.0f + std::exp(-sum)) + op.bias[e] : sum;
        }
        std::vector<int32_t> order(op.n_expert);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + n_predict, order.end(),
                [&](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
        std::copy_n(order.begin(), n_predict, ids + t*n_predict);
    }

    slot_policy policy((int32_t *) dst->src[2]->data, op.n_expert, op.next->n_slots);
    policy.fetch(ids, (int32_t) n_tokens*n_predict, slots, *op.counters);
    copy_jobs(policy, *op.next);
}

static void stage(const phase_stream_op & op) {
    const int    n_threads = 2;
    const size_t chunk     = std::min(op.ring->staging_bytes/(n_threads*phase_stager::CHUNKS_PER_THREAD), size_t(64) << 10); // so that small models have several

    phase_stage_effects effects;
    effects.send = [&](int i, uint8_t * dst, size_t size) { std::memcpy(dst, op.ring->staging + i*chunk, size); };

    std::vector<phase_stage_piece> pieces;
    for (int32_t i = 0; i < op.n_tensors; ++i) {
        const auto & t = op.tensors[i];
        pieces.push_back({ t.dst, t.src, op.n_expert*t.stride });
    }
    phase_stager stager(op.ring->staging, chunk, n_threads, effects);
    stager.wait(stager.submit(pieces, 0));
}

// Synchronous: on the CPU nothing overlaps, the ring is there so that its logic can be tested.
static void compute_stream(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    auto & op = *(phase_stream_op *) userdata;

    const auto begin = std::chrono::steady_clock::now();
    if (op.staged) {
        stage(op);
    }
    for (int32_t i = 0; i < op.n_tensors; ++i) {
        const auto & t = op.tensors[i];
        if (!op.staged) {
            std::memcpy(t.dst, t.src, op.n_expert*t.stride);
        }
        std::memset(t.dst + op.n_expert*t.stride, 0, t.pad);
    }
    if (op.ring->times) {
        const auto us = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
        op.ring->times->copy_us    += us;
        op.ring->times->exposed_us += us; // nothing is computed meanwhile
    }
    op.counters->missed += op.n_expert;
    op.counters->runs++;

    const auto    ids      = read_ids(dst->src[0]);
    const int64_t n_used   = dst->src[0]->ne[0];
    const int64_t n_tokens = dst->src[0]->ne[1];
    std::copy(ids.begin(), ids.end(), (int32_t *) dst->data);

    int32_t * seen = (int32_t *) dst->src[1]->data; // first in the state, whatever the number of slots
    for (int64_t t = std::max<int64_t>(0, n_tokens - PHASE_SEEN_TOKENS); t < n_tokens; ++t) {
        for (int64_t k = 0; k < n_used; ++k) {
            seen[ids[t*n_used + k]]++;
        }
    }
    op.counters->looked_up += ids.size();
}

using tensor_list = std::vector<ggml_tensor *>;

static ggml_tensor * build(ggml_context * ctx, int64_t ne0, int64_t ne1, tensor_list args, ggml_custom_op_t compute, void * op, const char * name) {
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_I32, ne0, ne1, 1, 1, args.data(), (int) args.size(), compute, 1, op);
    ggml_set_name(node, name);
    return node;
}

ggml_tensor * phase_build_fetch(ggml_context * ctx, phase_fetch_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors,
        ggml_tensor * keep) {
    tensor_list args = { ids, state };
    args.insert(args.end(), tensors, tensors + op.n_tensors);
    if (keep) {
        args.push_back(keep);
        args.push_back(keep->src[0]);
    }
    return build(ctx, ids->ne[0], ids->ne[1], std::move(args), compute_fetch, &op, "phase_fetch");
}

ggml_tensor * phase_build_prefetch(ggml_context * ctx, phase_prefetch_op & op, int32_t n_predict, ggml_tensor * x, ggml_tensor * router,
        ggml_tensor * state, ggml_tensor ** tensors) {
    tensor_list args = { x, router, state };
    args.insert(args.end(), tensors, tensors + op.next->n_tensors);
    return build(ctx, op.n_expert + 2*n_predict, x->ne[1], std::move(args), compute_prefetch, &op, "phase_prefetch");
}

ggml_tensor * phase_build_stream(ggml_context * ctx, phase_stream_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors) {
    tensor_list args = { ids, state };
    args.insert(args.end(), tensors, tensors + op.n_tensors);
    return build(ctx, ids->ne[0], ids->ne[1], std::move(args), compute_stream, &op, "phase_stream");
}
