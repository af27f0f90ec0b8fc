#pragma once

// K/V of sparse-attention layers in host memory: what the memory modules and the graphs ask.
//
//   decode    attention reads the chosen rows in place, over the link; new rows are written in place
//   prefill   many queries read the same rows: the layer's K/V is copied to a compute buffer once per micro-batch, behind the writes of
//             its new rows, and attention reads the copy
//
// Called by src/llama-kv-cache.cpp (a layer's buffer type, memory figures) and src/llama-graph.cpp (before attention, its mask).

#include "kv-op.h"
#include "phase-stats.h"

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;
struct llama_hparams;
struct llama_model;
struct llama_ubatch;
class  llama_memory_hybrid_context;

struct phase_kv_layer {
    int           il;
    ggml_tensor * k;
    ggml_tensor * v; // null: part of k
};

// The buffer type for the K/V of layer `il`: `buft`, or host memory of the same device. `n_rows` are the rows of all streams. `buft` for
// everything but a model's own attention K/V: indexer caches come with hparams of their own.
ggml_backend_buffer_type_t phase_kv_buffer_type(ggml_backend_buffer_type_t buft, const llama_model & model, const llama_hparams & hparams,
        uint32_t il, ggml_type type_k, ggml_type type_v, bool v_trans, uint64_t n_rows);

// Called with the layers of a cache, whose memory is there: of sparse layers' K/V in host memory, the device keeps LLAMA_PHASE_KV_ROWS
// positions as well. `layers`: il, k, v each.
void phase_kv_keep_rows(const llama_model & model, const std::vector<phase_kv_layer> & layers);

template <typename layer>
void phase_kv_keep_rows_of(const llama_model & model, const std::vector<layer> & layers) {
    std::vector<phase_kv_layer> plain;
    for (const auto & l : layers) {
        plain.push_back({ (int) l.il, l.k, l.v });
    }
    phase_kv_keep_rows(model, plain);
}

// What memory figures count a buffer type as: ours are host memory.
ggml_backend_buffer_type_t phase_kv_counted_as(ggml_backend_buffer_type_t buft);

// Replaces views of a K/V cache in host memory by copies where a batch of `n_tokens` reads them more than once. `v` may be a view of `k`
// (MLA), and stays one. Has to be called behind the nodes that write the new rows. Calls with the same views in one graph, for parts of
// its tokens, get the same copies.
void phase_kv_stage(ggml_context * ctx, ggml_cgraph * gf, int64_t n_tokens, ggml_tensor *& k, ggml_tensor *& v, ggml_tensor * mask);

// Fills in the mask of attention as llama_kv_cache::set_input_kq_mask does, from what kpool-memo.h keeps where that says enough.
void phase_set_kq_mask(const llama_memory_hybrid_context * mctx, ggml_tensor * mask, const llama_ubatch * ubatch, bool causal);

// Whether the K/V of any sparse layer went to host memory, in this process.
bool phase_kv_sparse_in_host();

// Tells every backend.
void phase_kv_set_select(bool fast);

// Notes the places of a context's layers, between its begin and its end, on this thread.
void                   phase_kv_begin_notes();
std::vector<kv_layer_stats> phase_kv_end_notes();

// Brings the figures of rows on the device up to date.
void phase_kv_read_rows(std::vector<kv_layer_stats> & layers);
