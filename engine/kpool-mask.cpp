// The part of kpool-memo.h that knows llama.

#include "kpool-memo.h"

#include "phase-config.h"
#include "phase-kv.h"

#include "llama-batch.h"
#include "llama-memory-hybrid-idx.h"

bool phase_select_is_fast() {
    static const auto config = phase_config_load();
    return config.select == PHASE_SELECT_FAST ||
        (config.select == PHASE_SELECT_AUTO && (config.mode != PHASE_MODE_OFF || phase_kv_sparse_in_host()));
}

static bool fill(const llama_memory_hybrid_idx_context & mctx, ggml_tensor * mask, const llama_ubatch & ubatch) {
    const size_t n_kv = mask->ne[0];
    auto *       rows = (uint16_t *) mask->data;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const auto seq = mctx.phase_seq_get(ubatch.seq_id[i][0]);
        if (!seq.memo || !phase_kpool_mask(*seq.memo, *seq.cells, ubatch.pos[i], n_kv, rows + i*n_kv)) {
            return false;
        }
    }
    return true;
}

void phase_set_kq_mask(const llama_memory_hybrid_context * mctx, ggml_tensor * mask, const llama_ubatch * ubatch, bool causal) {
    const auto * indexed = causal && phase_select_is_fast() && mask->type == GGML_TYPE_F16 ? dynamic_cast<const llama_memory_hybrid_idx_context *>(mctx) : nullptr;
    if (!indexed || !fill(*indexed, mask, *ubatch)) {
        mctx->get_attn()->set_input_kq_mask(mask, ubatch, causal);
    }
}
