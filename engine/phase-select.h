#pragma once

// The choice of rows of sparse attention as one operator, where LLAMA_PHASE_SELECT=fast: from the best pools and the tail to the mask, in
// place of about twenty nodes per layer, four of which are as wide as the context. A decode step's time is mostly such small kernels.
//
// And the scores of the pools, from the keys where they are in place of a gathered F32 copy of all of them, whose bytes are five times
// those of the keys.
//
// Called by src/models/qwen4exp.cpp.

#include "ggml.h"

struct llama_model;

// The mask [n_kv, n_tokens / sequences, 1, sequences] of the rows that `score` [n_pool, n_tokens], `top_k` [n_top, n_tokens], `pool_idxs`
// [kpool, n_pool] and `tail_idxs` [n_tail, n_tokens] select, `kq_mask` included; equal, bit for bit, to what upstream's nodes give. Null,
// with nothing added, where those are to be used: other settings, devices without the operator, and prompts.
ggml_tensor * phase_select_mask(ggml_context * ctx, const llama_model & model, int il, ggml_tensor * score, ggml_tensor * top_k,
        ggml_tensor * pool_idxs, ggml_tensor * tail_idxs, ggml_tensor * kq_mask);

// In place of ggml_lightning_indexer(q, pooled, weights, mask), equal to it bit for bit on the device; its node, where the operator is not
// to be used. `pooled` is a reshape of ggml_get_rows(keys, cells), `weights` a ggml_fill().
ggml_tensor * phase_score_pools(ggml_context * ctx, const llama_model & model, int il, ggml_tensor * q, ggml_tensor * pooled, ggml_tensor * weights,
        ggml_tensor * mask);
