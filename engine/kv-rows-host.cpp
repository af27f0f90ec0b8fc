#include "kv-rows-host.h"

#include "kv-op.h"
#include "kv-rows.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

struct host_rows {
    phase_kv_rows_shape    shape;
    std::vector<int32_t>   words;
    phase_kv_rows_state    state;
    std::vector<uint8_t>   k, v;
    phase_kv_rows_counters counters {};
    phase_kv_rows_shared   shared {};
    phase_kv_rows_one_thread group;

    explicit host_rows(const phase_kv_rows_shape & shape) :
        shape(shape), words(phase_kv_rows_words(shape.n_rows, shape.n_slots)), state(phase_kv_rows_state_at(words.data(), shape.n_rows, shape.n_slots)),
        k(shape.n_slots*shape.k_bytes), v(shape.n_slots*shape.v_bytes) {
        phase_kv_rows_clear(group, state);
    }

    // returns how many were copied
    int32_t find(const std::vector<int32_t> & rows) {
        const int32_t n = phase_kv_rows_lookup(group, state, shared, phase_kv_rows_list { rows.data() }, (int32_t) rows.size());
        for (int32_t i = 0; i < n; ++i) {
            const size_t row = state.jobs[2*i], slot = state.jobs[2*i + 1];
            std::memcpy(&k[slot*shape.k_bytes], shape.k + row*shape.k_bytes, shape.k_bytes);
            std::memcpy(&v[slot*shape.v_bytes], shape.v + row*shape.v_bytes, shape.v_bytes);
        }
        return n;
    }
};

host_rows & of(const phase_kv_rows * rows) {
    return *(host_rows *) const_cast<phase_kv_rows *>(rows);
}

bool is_finite(uint16_t f16) {
    return (f16 & 0x7c00) != 0x7c00;
}

// src: K and V [n_embd_head, n_head, n_kv, n_sequences], the list of rows written before (or K again), the mask (or none).
void compute(ggml_tensor * dst, int ith, int /*nth*/, void * userdata) {
    if (ith != 0) { // every thread of the pool comes here
        return;
    }
    auto &       rows = *(host_rows *) userdata;
    const auto * k    = dst->src[0];
    const auto * ids  = dst->src[2];
    const auto * mask = dst->src[3];

    const int64_t n_kv        = k->ne[2];
    const int64_t n_sequences = k->ne[3];
    const int64_t first       = ((const uint8_t *) k->data - rows.shape.k)/rows.shape.k_bytes;
    const int64_t stride      = k->nb[3]/k->nb[2];

    if (ids != k) {
        const auto * written = (const int64_t *) ids->data;
        const auto   n       = (int32_t) ggml_nelements(ids);
        phase_kv_rows_forget(rows.group, rows.state, [&](int32_t i) { return written[i]; }, n, PHASE_KV_IN_PLACE_TOKENS);
    }
    std::vector<int32_t> wanted;
    for (int64_t s = 0; mask && s < n_sequences; ++s) {
        for (int64_t query = 0; query < mask->ne[1]; ++query) {
            const auto * visible = (const uint16_t *) ((const char *) mask->data + s*mask->nb[3] + query*mask->nb[1]);
            for (int64_t i = 0; i < n_kv; ++i) {
                if (is_finite(visible[i])) {
                    wanted.push_back((int32_t) (first + s*stride + i));
                }
            }
        }
    }
    auto * k_dst = (uint8_t *) dst->data;
    auto * v_dst = k_dst + n_kv*n_sequences*rows.shape.k_bytes;
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (mask && (int64_t) wanted.size() <= rows.shape.n_slots) {
        rows.counters.missed    += rows.find(wanted);
        rows.counters.looked_up += wanted.size();
        rows.counters.runs      += 1;
        std::memset(k_dst, 0, ggml_nbytes(dst));
        for (const auto row : wanted) {
            const size_t at   = (row - first)/stride*n_kv + (row - first)%stride;
            const size_t slot = rows.state.map[row];
            std::memcpy(k_dst + at*rows.shape.k_bytes, &rows.k[slot*rows.shape.k_bytes], rows.shape.k_bytes);
            std::memcpy(v_dst + at*rows.shape.v_bytes, &rows.v[slot*rows.shape.v_bytes], rows.shape.v_bytes);
        }
        return;
    }
    rows.find(std::vector<int32_t>(rows.state.pending, rows.state.pending + rows.state.head[PHASE_KV_ROWS_N_PENDING])); // the writes are done
    for (int64_t s = 0; s < n_sequences; ++s) {
        std::memcpy(k_dst + s*n_kv*rows.shape.k_bytes, rows.shape.k + (first + s*stride)*rows.shape.k_bytes, n_kv*rows.shape.k_bytes);
        std::memcpy(v_dst + s*n_kv*rows.shape.v_bytes, rows.shape.v + (first + s*stride)*rows.shape.v_bytes, n_kv*rows.shape.v_bytes);
    }
}

} // namespace

const phase_backend_api & phase_kv_rows_host_api() {
    static const phase_backend_api api = [] {
        phase_backend_api own {};
        own.kv_rows_new = [](ggml_backend_device *, const phase_kv_rows_shape * shape, phase_kv_rows ** rows) -> const char * {
            *rows = (phase_kv_rows *) new host_rows(*shape);
            return nullptr;
        };
        own.kv_rows_free  = [](phase_kv_rows * rows) { delete &of(rows); };
        own.kv_rows_reset = [](phase_kv_rows * rows) { phase_kv_rows_clear(of(rows).group, of(rows).state); };
        own.kv_rows_count = [](const phase_kv_rows * rows, phase_kv_rows_counters * counters) { *counters = of(rows).counters; };
        return own;
    }();
    return api;
}

void phase_kv_rows_host_attend(ggml_context * ctx, ggml_cgraph * gf, phase_kv_rows * handle, int64_t n_tokens, ggml_tensor *& k, ggml_tensor *& v,
        ggml_tensor * mask) {
    auto & rows = of(handle);
    ggml_tensor * ids = k;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        auto * node = ggml_graph_node(gf, i);
        ids = node->op == GGML_OP_SET_ROWS && node->view_src == k->view_src ? node->src[1] : ids;
    }
    const bool few = mask && mask->type == GGML_TYPE_F16 && n_tokens <= PHASE_KV_IN_PLACE_TOKENS;

    ggml_tensor * args[] = { k, v, ids, mask };
    const int64_t n    = k->ne[2]*k->ne[3];
    const size_t  size = n*(rows.shape.k_bytes + rows.shape.v_bytes);
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F16, size/ggml_type_size(GGML_TYPE_F16), 1, 1, 1, args, few ? 4 : 3, compute, 1, &rows);
    ggml_set_name(node, "kv_rows");
    k = ggml_view_4d(ctx, node, k->ne[0], k->ne[1], k->ne[2], k->ne[3], k->nb[1], k->nb[2], k->ne[2]*k->nb[2], 0);
    v = ggml_view_4d(ctx, node, v->ne[0], v->ne[1], v->ne[2], v->ne[3], v->nb[1], v->nb[2], v->ne[2]*v->nb[2], n*rows.shape.k_bytes);
}
