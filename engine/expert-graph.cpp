#include "expert-graph.h"

#include "slot-policy.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>

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

static void compute_fetch(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    auto & op = *(phase_fetch_op *) userdata;

    slot_policy policy((int32_t *) dst->src[1]->data, op.n_expert, op.n_slots);

    const auto ids = read_ids(dst->src[0]);
    policy.fetch(ids.data(), (int32_t) ids.size(), (int32_t *) dst->data, *op.counters);

    for (int32_t j = 0; j < *policy.n_jobs; ++j) {
        const size_t expert = policy.jobs[2*j];
        const size_t slot   = policy.jobs[2*j + 1];
        for (int32_t i = 0; i < op.n_tensors; ++i) {
            const auto & t = op.tensors[i];
            std::memcpy(t.dst + slot*t.stride, t.src + expert*t.stride, t.stride);
        }
    }
}

// Synchronous: on the CPU nothing overlaps, the ring is there so that its logic can be tested.
static void compute_stream(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    auto & op = *(phase_stream_op *) userdata;

    for (int32_t i = 0; i < op.n_tensors; ++i) {
        const auto & t = op.tensors[i];
        std::memcpy(t.dst, t.src, op.n_expert*t.stride);
        std::memset(t.dst + op.n_expert*t.stride, 0, t.pad);
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

static ggml_tensor * build(ggml_context * ctx, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors, int32_t n_tensors,
        ggml_custom_op_t compute, void * op, const char * name) {
    ggml_tensor * args[2 + PHASE_MAX_TENSORS] = { ids, state };
    std::copy(tensors, tensors + n_tensors, args + 2);
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, args, 2 + n_tensors, compute, 1, op);
    ggml_set_name(node, name);
    return node;
}

ggml_tensor * phase_build_fetch(ggml_context * ctx, phase_fetch_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors) {
    return build(ctx, ids, state, tensors, op.n_tensors, compute_fetch, &op, "phase_fetch");
}

ggml_tensor * phase_build_stream(ggml_context * ctx, phase_stream_op & op, ggml_tensor * ids, ggml_tensor * state, ggml_tensor ** tensors) {
    return build(ctx, ids, state, tensors, op.n_tensors, compute_stream, &op, "phase_stream");
}
