#include "phase-select.h"

#include "expert-op.h"
#include "expert-store.h"
#include "kpool-memo.h"
#include "kv-op.h"

#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

static constexpr uint16_t F16_DROP = 0xfc00; // minus infinity

static bool is_finite(uint16_t f16) {
    return (f16 & 0x7c00) != 0x7c00;
}

static void compute_select(ggml_tensor * dst, int ith, int nth, void * /*userdata*/) {
    const auto * score = dst->src[0];
    const auto * top_k = dst->src[1];
    const auto * pools = dst->src[2];
    const auto * tails = dst->src[3];
    const auto * mask  = dst->src[4];

    const int64_t n_kv     = mask->ne[0];
    const int64_t n_tokens = score->ne[1];
    for (int64_t token = ith; token < n_tokens; token += nth) {
        const auto * values  = (const float    *) ((const char *) score->data + token*score->nb[1]);
        const auto * best    = (const int32_t  *) ((const char *) top_k->data + token*top_k->nb[1]);
        const auto * tail    = (const int32_t  *) ((const char *) tails->data + token*tails->nb[1]);
        const auto * visible = (const uint16_t *) mask->data + token*n_kv;
        auto       * row     = (uint16_t       *) dst->data  + token*n_kv;

        const auto take = [&](int32_t cell) {
            if (cell < n_kv && is_finite(visible[cell])) {
                row[cell] = visible[cell];
            }
        };
        std::fill_n(row, n_kv, F16_DROP);
        for (int64_t i = 0; i < top_k->ne[0]; ++i) {
            const auto * cells = (const int32_t *) ((const char *) pools->data + best[i]*pools->nb[1]);
            if (values[best[i]] >= 0.0f) { // else it is not visible: the choice was short of pools
                std::for_each(cells, cells + pools->ne[0], take);
            }
        }
        std::for_each(tail, tail + tails->ne[0], take);
    }
}

ggml_tensor * phase_select_mask(ggml_context * ctx, const llama_model & model, int il, ggml_tensor * score, ggml_tensor * top_k,
        ggml_tensor * pool_idxs, ggml_tensor * tail_idxs, ggml_tensor * kq_mask) {
    const int64_t n_kv     = kq_mask->ne[0];
    const int64_t n_tokens = score->ne[1];
    if (!phase_select_is_fast() || n_tokens > PHASE_KV_IN_PLACE_TOKENS || n_kv > PHASE_SELECT_CELLS || n_kv % 32 != 0 || kq_mask->type != GGML_TYPE_F16) {
        return nullptr;
    }
    auto *       dev = model.dev_layer(il);
    const auto * api = phase_backend_api_of(dev);
    if (ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU && !(api && api->set_select)) {
        return nullptr;
    }
    static phase_op_head head = { PHASE_OP_MAGIC, PHASE_OP_SELECT };

    const int64_t n_sel = pool_idxs->ne[0]*top_k->ne[0] + tail_idxs->ne[0];
    std::array<ggml_tensor *, 5> args = { score, top_k, pool_idxs, tail_idxs, kq_mask };
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F16, phase_select_halves(n_kv, n_tokens, n_sel), 1, 1, 1, args.data(), (int) args.size(), compute_select,
            GGML_N_TASKS_MAX, &head);
    ggml_set_name(node, "phase_select");
    const size_t row = n_kv*sizeof(uint16_t);
    return ggml_view_4d(ctx, node, n_kv, kq_mask->ne[1], kq_mask->ne[2], kq_mask->ne[3], row, row*kq_mask->ne[1], row*kq_mask->ne[1]*kq_mask->ne[2], 0);
}

// Where the scheduler does not leave the node on the device it was made for.
static void compute_score(ggml_tensor * dst, int ith, int nth, void * /*userdata*/) {
    const auto * q     = dst->src[0];
    const auto * keys  = dst->src[1];
    const auto * cells = dst->src[2];
    const auto * mask  = dst->src[3];

    float weight;
    std::memcpy(&weight, (const char *) dst->op_params + PHASE_SCORE_PARAM*sizeof(float), sizeof(weight));
    for (int64_t token = 0; token < q->ne[2]; ++token) {
        const auto * visible = (const ggml_fp16_t *) ((const char *) mask->data + token*mask->nb[1]);
        auto *       score   = (float *) ((char *) dst->data + token*dst->nb[1]);
        for (int64_t pool = ith; pool < cells->ne[0]; pool += nth) {
            const auto * key = (const ggml_fp16_t *) ((const char *) keys->data + ((const int32_t *) cells->data)[pool]*keys->nb[1]);
            float sum = 0.0f;
            for (int64_t head = 0; head < q->ne[1]; ++head) {
                const auto * query = (const float *) ((const char *) q->data + token*q->nb[2] + head*q->nb[1]);
                float dot = 0.0f;
                for (int64_t i = 0; i < q->ne[0]; ++i) {
                    dot += query[i]*ggml_fp16_to_fp32(key[i]);
                }
                sum += std::max(dot, 0.0f)*weight;
            }
            score[pool] = sum + ggml_fp16_to_fp32(visible[pool]);
        }
    }
}

ggml_tensor * phase_score_pools(ggml_context * ctx, const llama_model & model, int il, ggml_tensor * q, ggml_tensor * pooled, ggml_tensor * weights,
        ggml_tensor * mask) {
    const auto * rows = pooled->view_src ? pooled->view_src : pooled;
    auto *       keys = rows->src[0];
    auto *       dev  = model.dev_layer(il);
    const auto * api  = phase_backend_api_of(dev);
    const bool usable = phase_select_is_fast() && api && api->set_select && rows->op == GGML_OP_GET_ROWS && weights->op == GGML_OP_FILL &&
        q->ne[0] == PHASE_SCORE_EMBD && q->ne[1] == PHASE_SCORE_HEADS && q->ne[2] <= PHASE_SCORE_TOKENS && q->ne[3] == 1 && q->type == GGML_TYPE_F32 &&
        keys->type == GGML_TYPE_F16 && keys->view_src && keys->view_src->buffer && mask->type == GGML_TYPE_F16 &&
        ggml_backend_buft_get_device(ggml_backend_buffer_get_type(keys->view_src->buffer)) == dev;
    if (!usable) {
        return ggml_lightning_indexer(ctx, q, pooled, weights, mask);
    }
    static phase_op_head head = { PHASE_OP_MAGIC, PHASE_OP_SCORE };

    std::array<ggml_tensor *, 4> args = { q, keys, rows->src[1], mask };
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F32, pooled->ne[2], q->ne[2], 1, 1, args.data(), (int) args.size(), compute_score, GGML_N_TASKS_MAX, &head);
    std::memcpy((char *) node->op_params + PHASE_SCORE_PARAM*sizeof(float), weights->op_params, sizeof(float));
    ggml_set_name(node, "phase_score");
    return ggml_view_2d(ctx, node, node->ne[0], node->ne[1], node->nb[1], 0); // the model names what it is given, and the node's name says whose it is
}
