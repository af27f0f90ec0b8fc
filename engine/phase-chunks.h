#pragma once

// Chunks: the heavy pieces of a layer are computed for some of a micro-batch's tokens at a time, inside one graph, so that the
// allocator reuses their memory from chunk to chunk. One pass over the experts, one memory context.
//
//   experts     everything behind the routing; the stream operator runs once, before the first chunk, and a region of the ring is
//               released by the next layer's, behind the last one
//   attention   the mask, what selects from it, and the attention itself
//
// A mask of all tokens would outweigh all that is saved (2 GiB at 8192 tokens and 131072 cells), so the graph gets it as bits and
// each chunk writes its rows out:
//
//   bits    Q1_0 [n_cells padded to 128, n_tokens], scale 65504 (the largest F16): bit set: visible
//   x       = dequantized - 65504: 0 or -131008, and as F16 0 or -inf, exactly what stock fills in
//
// A last chunk of fewer tokens than a tile of the kernels joins the one before, since they would take another path for it.
//
// Order decides what is alive: each chunk's result is expanded into the graph, and copied into its rows of the output, before the next
// chunk's first node is made. Values do not depend on chunks; on a GPU a kernel is chosen, and its sums are cut, by the number of rows.
//
// Called by src/llama-graph.cpp and by the model files whose attention reads the mask itself.

#include "phase-select.h" // the model files that need the one need the other

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <tuple>

struct llama_cparams;
struct llama_model;
struct llama_ubatch;

constexpr int32_t PHASE_CHUNK_AUTO = -1;
constexpr int64_t PHASE_CHUNK_TILE = 64; // tokens, the fewest of a chunk

// Sets how the graphs of a context are chunked. setting: tokens per chunk, 0: not at all, PHASE_CHUNK_AUTO: by size.
void phase_set_chunks(llama_cparams & cparams, const llama_model & model, int32_t setting);

// Tokens per chunk, 0: all at once. n_kv: cells of the mask.
int64_t phase_expert_chunk(const llama_cparams & cparams, int64_t n_tokens);
int64_t phase_mask_chunk(const llama_cparams & cparams, int64_t n_kv, const llama_ubatch & ubatch);

// The most nodes that chunks add to a graph over n_tokens tokens.
uint32_t phase_chunk_nodes(const llama_cparams & cparams, const llama_model & model, uint32_t n_tokens);

// The bits in place of an F16 mask [n_cells, n_tokens] that nothing refers to yet; `mask` when chunk is 0.
ggml_tensor * phase_compact_mask(ggml_context * ctx, int64_t chunk, ggml_tensor * mask);
bool          phase_is_compact(const ggml_tensor * mask);

// Fills a mask, compact or not. `fill` writes F16 rows into the tensor that it is given; the second form may be called several times,
// with a part of the micro-batch whose rows are the tensor's.
void phase_fill_mask(ggml_tensor * mask, const std::function<void(ggml_tensor * rows)> & fill);
void phase_fill_mask(ggml_tensor * mask, const llama_ubatch & ubatch,
        const std::function<void(ggml_tensor * rows, const llama_ubatch * part)> & fill);

//
// building
//

// The tokens of `tensor`, whose last dimension of more than one is the micro-batch's tokens. Of a compact mask F16 rows, in the graph
// before anything else of the chunk, so that the larger half-way product is gone by then.
ggml_tensor * phase_chunk_rows(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * tensor, int64_t first, int64_t count);

// `out` with the rows from `first` on replaced by `rows` [n, count]; null: made like `rows`, for n_tokens
ggml_tensor * phase_chunk_store(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * out, ggml_tensor * rows, int64_t first, int64_t n_tokens);

// build(count, parts of tensors...) -> [n, count] for each chunk. Returns [n, n_tokens]; with chunk 0 what build makes of all tokens.
template <typename F, typename... T>
ggml_tensor * phase_in_chunks(ggml_context * ctx, ggml_cgraph * gf, int64_t chunk, int64_t n_tokens, const F & build, T *... tensors) {
    if (chunk == 0) {
        return build(n_tokens, tensors...);
    }
    ggml_tensor * out = nullptr;
    for (int64_t first = 0, count; first < n_tokens; first += count) {
        const int64_t rest = n_tokens - first;
        count = rest - chunk < PHASE_CHUNK_TILE ? rest : chunk;
        const std::tuple<T *...> parts { phase_chunk_rows(ctx, gf, tensors, first, count)... }; // in this order
        ggml_tensor * rows = std::apply([&](auto *... part) { return build(count, part...); }, parts);
        out = phase_chunk_store(ctx, gf, out, rows, first, n_tokens);
    }
    return out;
}

// Attention over a mask that a layer selects. phase_selection makes the mask and calls phase_attend with it: once, or for the tokens of
// each chunk. q: [.., n_tokens] or null.
using phase_attend = std::function<ggml_tensor * (ggml_tensor * mask, ggml_tensor * q)>;
using phase_selection = std::function<ggml_tensor * (ggml_tensor * q, const phase_attend & attend)>;

// `select` as it is when it works in chunks; else with the mask made here and now, where stock makes it.
phase_selection phase_select_in_chunks(int64_t chunk, const phase_selection & select);
