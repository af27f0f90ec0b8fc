#include "kv-attention-cuda.cuh"

#include "expert-op.h"
#include "kv-rows-cuda.cuh"
#include "select-cuda.cuh"

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

//
// the rows of a cache tensor, by its address
//

static std::mutex                              lock;
static std::map<const void *, phase_kv_rows *> rows_of_tensor; // K and V of a layer
static std::atomic<bool>                       has_rows { false };

const char * phase_cuda_kv_rows_create(ggml_backend_dev_t dev, const phase_kv_rows_shape * shape, phase_kv_rows ** rows) {
    auto * reg    = ggml_backend_dev_backend_reg(dev);
    int    device = 0;
    while (ggml_backend_reg_dev_get(reg, device) != dev) {
        ++device;
    }
    const char * why = phase_cuda_kv_rows_new(device, *shape, rows);
    if (!why) {
        std::lock_guard<std::mutex> guard(lock);
        rows_of_tensor[shape->k] = rows_of_tensor[shape->v] = *rows;
        has_rows = true;
    }
    return why;
}

void phase_cuda_kv_rows_destroy(phase_kv_rows * rows) {
    {
        std::lock_guard<std::mutex> guard(lock);
        rows_of_tensor.erase(rows->shape.k);
        rows_of_tensor.erase(rows->shape.v);
        has_rows = !rows_of_tensor.empty();
    }
    phase_cuda_kv_rows_free(rows);
}

void phase_cuda_kv_rows_reset(phase_kv_rows * rows) {
    phase_cuda_kv_rows_forget_all(rows);
}

void phase_cuda_kv_rows_count(const phase_kv_rows * rows, phase_kv_rows_counters * counters) {
    phase_cuda_kv_rows_totals(rows, counters);
}

static phase_kv_rows * find_rows(const ggml_tensor * view) {
    const auto * root = view->view_src ? view->view_src : view;
    if (!has_rows || !root->data) {
        return nullptr;
    }
    std::lock_guard<std::mutex> guard(lock);
    const auto at = rows_of_tensor.find(root->data);
    return at == rows_of_tensor.end() ? nullptr : at->second;
}

//
// what a graph writes
//

static bool is_view_op(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

// Whole rows, listed by an input of the graph: what such a list says is known before the graph runs.
static bool is_list_of_rows(const ggml_tensor * node, size_t row_bytes) {
    const auto * ids = node->src[1];
    return node->op == GGML_OP_SET_ROWS && ids->type == GGML_TYPE_I64 && ggml_is_contiguous(ids) && ids->ne[0] == ggml_nelements(ids) &&
        (ids->op == GGML_OP_NONE || (ids->view_src && ids->view_src->op == GGML_OP_NONE && is_view_op(ids))) &&
        node->nb[1] == row_bytes && ggml_row_size(node->type, node->ne[0]) == row_bytes && node->ne[2] == 1 && node->ne[3] == 1;
}

static std::vector<phase_cuda_written> written_by(const ggml_cgraph * graph) {
    std::vector<phase_cuda_written> result;
    for (int i = 0; has_rows && i < graph->n_nodes; ++i) {
        const auto * node = graph->nodes[i];
        const auto * rows = !node->view_src || is_view_op(node) ? nullptr : find_rows(node);
        if (!rows) {
            continue;
        }
        const bool   is_k      = node->view_src->data == rows->shape.k;
        const size_t row_bytes = is_k ? rows->shape.k_bytes : rows->shape.v_bytes;
        if (is_list_of_rows(node, row_bytes)) {
            const auto first_row = ((const char *) node->data - (const char *) node->view_src->data)/row_bytes;
            result.push_back({ rows, (const int64_t *) node->src[1]->data, (int32_t) node->src[1]->ne[0], (int32_t) first_row });
        } else {
            result.push_back({ rows, nullptr, 0, 0 });
        }
    }
    return result;
}

void phase_cuda_kv_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) {
    const auto written = written_by(graph);
    if (!written.empty()) {
        CUDA_CHECK(phase_cuda_kv_rows_forget(written.data(), (int) written.size(), PHASE_KV_IN_PLACE_TOKENS, ctx.stream()));
    }
}

void phase_cuda_kv_finish(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph) {
    std::map<const phase_kv_rows *, phase_cuda_written> layers; // K and V are one
    for (const auto & written : written_by(graph)) {
        if (written.n_ids > PHASE_KV_IN_PLACE_TOKENS) {
            layers.emplace(written.rows, written);
        }
    }
    std::vector<phase_cuda_written> settled;
    for (const auto & [rows, written] : layers) {
        settled.push_back(written);
    }
    if (!settled.empty()) {
        CUDA_CHECK(phase_cuda_kv_rows_settle(settled.data(), (int) settled.size(), ctx.stream()));
    }
}

//
// attention
//

namespace {

struct pending_node {
    const phase_kv_rows * rows = nullptr;
    const ggml_tensor   * mask = nullptr; // of the original node
    int32_t               first_row     = 0;
    int32_t               sequence_rows = 0;
};

} // namespace

static thread_local pending_node pending;

// Views of whole rows, `k` and `v` of the same ones.
static bool is_rows_of(const phase_kv_rows & rows, const ggml_tensor * k, const ggml_tensor * v) {
    const size_t k_offset = (const uint8_t *) k->data - rows.shape.k;
    const size_t v_offset = (const uint8_t *) v->data - rows.shape.v;
    return k->view_src && v->view_src && k->view_src->data == rows.shape.k && v->view_src->data == rows.shape.v &&
        k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && k->nb[1] == rows.shape.k_bytes && v->nb[1] == rows.shape.v_bytes &&
        k_offset % k->nb[1] == 0 && v_offset % v->nb[1] == 0 && k_offset/k->nb[1] == v_offset/v->nb[1] &&
        k->nb[3] % k->nb[1] == 0 && k->nb[3]/k->nb[1] == v->nb[3]/v->nb[1];
}

// Rows that the sparse kernel needs at least, as fattn.cu decides (8 queries fill a tile of its dense kernel). Where this differs from what
// upstream does, a copy is made for nothing, or host memory is read; the result is the same.
static int64_t n_sparse_rows(const ggml_tensor * dst) {
    return std::max<int64_t>(4096, 2*std::min<int64_t>(dst->src[0]->ne[1], 8)*ggml_get_op_params_i32(dst, 4));
}

phase_cuda_kv_copy::phase_cuda_kv_copy(ggml_backend_cuda_context & ctx, ggml_tensor * dst) : ctx(ctx), node(dst) {
    const auto * original_k = dst->src[1];
    const auto * original_v = dst->src[2];
    const auto * rows = find_rows(original_k);
    const int64_t n = original_k->ne[1]*original_k->ne[3];
    if (!rows || !is_rows_of(*rows, original_k, original_v) || original_v->ne[3] != original_k->ne[3] || n > rows->shape.n_slots ||
            (ggml_get_op_params_i32(dst, 4) > 0 && original_k->ne[1] >= n_sparse_rows(dst))) {
        return;
    }
    own = *dst;
    k   = *original_k;
    v   = *original_v;

    const size_t k_bytes = GGML_PAD(n*rows->shape.k_bytes, 256);
    k.data = ctx.pool().alloc(k_bytes + n*rows->shape.v_bytes, &size);
    v.data = (char *) k.data + k_bytes;
    k.nb[3] = k.ne[1]*k.nb[1];
    v.nb[3] = v.ne[1]*v.nb[1];
    k.view_src = v.view_src = nullptr;
    own.src[1] = &k;
    own.src[2] = &v;
    node = &own;

    phase_cuda_row_range range {};
    range.n_rows        = (int32_t) k.ne[1];
    range.n_sequences   = (int32_t) k.ne[3];
    range.first_row     = ((const uint8_t *) original_k->data - rows->shape.k)/rows->shape.k_bytes;
    range.sequence_rows = original_k->nb[3]/original_k->nb[1];
    CUDA_CHECK(phase_cuda_kv_rows_gather(*rows, range, k.data, v.data, ctx.stream()));
}

phase_cuda_kv_copy::~phase_cuda_kv_copy() {
    if (size > 0) {
        ctx.pool().free(k.data, size);
    }
}

phase_cuda_kv_node::phase_cuda_kv_node(ggml_tensor * dst) : node(dst) {
    const auto * original_k = dst->src[1];
    const auto * original_v = dst->src[2];
    const auto * original_m = dst->src[3];
    const auto * rows = original_m ? find_rows(original_k) : nullptr;
    if (!rows || !is_rows_of(*rows, original_k, original_v)) {
        return;
    }
    const int64_t n_sequences = dst->src[0]->ne[3];
    const int64_t n_max       = std::min<int64_t>(original_k->ne[1], ggml_get_op_params_i32(dst, 4));
    if (original_k->ne[3] != n_sequences || original_m->ne[3] != n_sequences || dst->src[0]->ne[1]*n_sequences*n_max > rows->shape.n_slots) {
        return;
    }
    own  = *dst;
    k    = *original_k;
    v    = *original_v;
    mask = *original_m;

    k.data    = rows->k;
    v.data    = rows->v;
    mask.data = rows->zeros;
    k.nb[3] = v.nb[3] = 0; // a slot is of all sequences
    mask.nb[1] = mask.nb[2] = mask.nb[3] = 0;
    own.src[1] = &k;
    own.src[2] = &v;
    own.src[3] = &mask;
    node = &own;

    pending.rows          = rows;
    pending.mask          = original_m;
    pending.first_row     = ((const uint8_t *) original_k->data - rows->shape.k)/rows->shape.k_bytes;
    pending.sequence_rows = original_k->nb[3]/original_k->nb[1];
}

phase_cuda_kv_node::~phase_cuda_kv_node() {
    pending = {};
}

phase_cuda_kv_lists::phase_cuda_kv_lists(const ggml_tensor *& mask, int32_t * indices, int32_t * counts, int32_t n_queries, int32_t n_group,
        int32_t n_max, cudaStream_t stream) :
    indices(indices), counts(counts), n_lists(n_queries*(int32_t) mask->ne[3]), n_queries(n_queries), n_group(n_group), n_max(n_max), stream(stream) {
    mask = pending.rows ? pending.mask : mask;
    this->mask = mask;
}

// The rows of the select node that `mask` is of, one list per query; null when they are not these lists.
static const int32_t * rows_of_select(const ggml_tensor * mask, int32_t n_lists, int32_t n_max) {
    const auto * node = mask->view_src;
    if (!node || node->op != GGML_OP_CUSTOM || strcmp(node->name, "phase_select") != 0 || mask->data != node->data) {
        return nullptr;
    }
    const bool same = node->src[0]->ne[1] == n_lists && node->ne[0] == phase_select_halves(mask->ne[0], n_lists, n_max);
    return same ? (const int32_t *) ((const uint16_t *) node->data + n_lists*mask->ne[0]) : nullptr;
}

bool phase_cuda_kv_lists::make() {
    if (n_group != 1) {
        return false;
    }
    rows = rows_of_select(mask, n_lists, n_max);
    if (!rows) {
        return phase_cuda_compact_mask((const half *) mask->data, indices, counts, mask->ne[0], n_queries, mask->ne[3], n_max,
                mask->nb[1]/sizeof(half), mask->nb[3]/sizeof(half), stream);
    }
    if (!pending.rows) { // lists and counts follow each other, there as here
        GGML_ASSERT(counts == indices + (int64_t) n_lists*n_max);
        CUDA_CHECK(cudaMemcpyAsync(indices, rows, (size_t) n_lists*(n_max + 1)*sizeof(int32_t), cudaMemcpyDeviceToDevice, stream));
    }
    return true;
}

phase_cuda_kv_lists::~phase_cuda_kv_lists() {
    if (pending.rows) {
        const int32_t * found = rows ? rows : indices;
        const int32_t * n     = rows ? rows + (int64_t) n_lists*n_max : counts;
        CUDA_CHECK(phase_cuda_kv_rows_find(*pending.rows, { found, n, indices, counts, n_lists, n_max, n_queries, pending.first_row, pending.sequence_rows },
                stream));
    }
}
