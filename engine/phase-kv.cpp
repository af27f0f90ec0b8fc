#include "phase-kv.h"

#include "expert-store.h"
#include "kpool-memo.h"
#include "kv-buffer.h"
#include "kv-place.h"
#include "kv-rows-host.h"

#include "llama-impl.h"
#include "llama-model.h"

#include "ggml.h"

#include <atomic>
#include <map>

static thread_local bool                        noting = false;
static thread_local std::vector<kv_layer_stats> notes;

static std::atomic<bool> sparse_in_host{false};

// Whether the graph of the architecture reads only the rows that the layer's indexer picked.
static bool is_sparse(const llama_model & model, uint32_t il) {
    return model.arch == LLM_ARCH_QWEN4EXP && model.hparams.indexer_kpool > 0 && model.hparams.dsv4_compress_ratios[il] > 0;
}

static uint64_t layer_bytes(const llama_hparams & hparams, uint32_t il, ggml_type type_k, ggml_type type_v, uint64_t n_rows) {
    const size_t v = hparams.is_mla() ? 0 : ggml_row_size(type_v, hparams.n_embd_v_gqa(il));
    return n_rows*(ggml_row_size(type_k, hparams.n_embd_k_gqa(il)) + v);
}

ggml_backend_buffer_type_t phase_kv_buffer_type(ggml_backend_buffer_type_t buft, const llama_model & model, const llama_hparams & hparams,
        uint32_t il, ggml_type type_k, ggml_type type_v, bool v_trans, uint64_t n_rows) {
    const auto mode = phase_config_load().kv;
    if (mode == PHASE_KV_DEVICE || &hparams != &model.hparams) {
        return buft;
    }
    auto * dev  = model.dev_layer(il);
    auto * host = phase_kv_host_buffer_type(dev);

    phase_kv_facts facts;
    facts.sparse     = is_sparse(model, il);
    facts.indexer    = model.hparams.indexer_top_k > 0;
    facts.f16        = type_k == GGML_TYPE_F16 && (type_v == GGML_TYPE_F16 || hparams.is_mla());
    facts.flash      = !v_trans;
    facts.capable    = host != nullptr;
    facts.known_free = !hparams.no_alloc;
    for (uint32_t other = 0; other < hparams.n_layer_all; ++other) {
        if (hparams.has_kv(other) && !hparams.is_recr(other) && model.dev_layer(other) == dev) {
            (is_sparse(model, other) ? facts.sparse_bytes : facts.dense_bytes) += layer_bytes(hparams, other, type_k, type_v, n_rows);
        }
    }
    size_t free_bytes = 0, total_bytes = 0;
    ggml_backend_dev_memory(dev, &free_bytes, &total_bytes);
    facts.free_bytes = free_bytes;

    const auto choice = phase_kv_choose(mode, facts);
    if (!choice.host && !choice.reason.empty()) {
        LLAMA_LOG_WARN("llama-phase: K/V of layer %u stays on %s: %s\n", il, ggml_backend_dev_name(dev), choice.reason.c_str());
    }
    if (noting) {
        kv_layer_stats note;
        note.il     = (int) il;
        note.device = ggml_backend_dev_name(dev);
        note.host   = choice.host;
        note.bytes  = layer_bytes(hparams, il, type_k, type_v, n_rows);
        note.reason = choice.reason;
        notes.push_back(std::move(note));
    }
    if (choice.host && facts.sparse && !sparse_in_host.exchange(true)) {
        phase_kv_set_select(phase_select_is_fast());
    }
    return choice.host ? host : buft;
}

void phase_kv_keep_rows(const llama_model & model, const std::vector<phase_kv_layer> & layers) {
    std::map<ggml_backend_dev_t, std::vector<phase_kv_layer>> of_device;
    for (const auto & layer : layers) {
        phase_kv_rows_counters counters;
        const bool host = layer.k && layer.v && layer.k->data && layer.k->buffer && phase_kv_is_host_buffer_type(ggml_backend_buffer_get_type(layer.k->buffer));
        if (host && is_sparse(model, layer.il) && phase_kv_rows_kept(layer.k->data, &counters) == 0) { // else shared with another cache
            of_device[ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.k->buffer))].push_back(layer);
        }
    }
    const auto wanted = phase_config_load().kv_rows;
    for (const auto & [dev, own] : of_device) {
        if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU && wanted <= 0) {
            continue; // it has no memory of its own: only for tests
        }
        const int64_t n_rows = own[0].k->ne[1]*own[0].k->ne[2];
        uint64_t      bytes  = 0;
        for (const auto & layer : own) {
            bytes += phase_kv_rows_bytes(0, 1, layer.k->nb[1] + layer.v->nb[1]);
        }
        size_t free_bytes = 0, total_bytes = 0;
        ggml_backend_dev_memory(dev, &free_bytes, &total_bytes);
        const int64_t n_slots = phase_kv_rows_choose(wanted, n_rows, bytes, free_bytes);
        std::string   why     = n_slots > 0 ? "" : "LLAMA_PHASE_KV_ROWS is 0, or little device memory is free";
        size_t n_kept = 0; // layers
        while (n_kept < own.size() && why.empty()) {
            why = phase_kv_keep_rows(own[n_kept].k, own[n_kept].v, n_slots);
            n_kept += why.empty();
        }
        if (why.empty()) {
            LLAMA_LOG_INFO("llama-phase: %s keeps %lld of %lld positions of K/V in host memory, %.0f MiB for %zu layers\n", ggml_backend_dev_name(dev),
                    (long long) n_slots, (long long) n_rows, n_slots*bytes/1048576.0, own.size());
        } else {
            LLAMA_LOG_WARN("llama-phase: %s reads all K/V of %zu of %zu layers over the link: %s\n", ggml_backend_dev_name(dev), own.size() - n_kept,
                    own.size(), why.c_str());
        }
        if (noting) {
            for (auto & note : notes) {
                for (const auto & layer : own) {
                    if (note.host && note.il == layer.il && note.device == ggml_backend_dev_name(dev)) {
                        note.k = layer.k->data;
                    }
                }
            }
        }
    }
}

void phase_kv_read_rows(std::vector<kv_layer_stats> & layers) {
    for (auto & layer : layers) {
        if (layer.k) {
            phase_kv_rows_counters counters;
            layer.rows      = phase_kv_rows_kept(layer.k, &counters);
            layer.looked_up = counters.looked_up;
            layer.missed    = counters.missed;
        }
    }
}

ggml_backend_buffer_type_t phase_kv_counted_as(ggml_backend_buffer_type_t buft) {
    if (!phase_kv_is_host_buffer_type(buft)) {
        return buft;
    }
    auto * host = ggml_backend_dev_host_buffer_type(ggml_backend_buft_get_device(buft));
    return host ? host : ggml_backend_cpu_buffer_type();
}

static bool is_in_host_memory(const ggml_tensor * tensor) {
    const auto * buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer && phase_kv_is_host_buffer_type(ggml_backend_buffer_get_type(const_cast<ggml_backend_buffer_t>(buffer)));
}

// A copy of `view` that was made before in this graph. Contexts of graphs are reset and their memory used again, so what `copy` points to
// counts only if it lies in the part in use and still is that copy.
static bool is_copy_of(ggml_context * ctx, const ggml_tensor * copy, const ggml_tensor * view) {
    const auto * begin = (const char *) ggml_get_mem_buffer(ctx);
    const auto * end   = begin + ggml_used_mem(ctx);
    const auto * at    = (const char *) copy;
    return at >= begin && at + sizeof(*copy) <= end && copy->op == GGML_OP_CONT && copy->src[0] == view;
}

static ggml_tensor * copy_once(ggml_context * ctx, ggml_tensor * view, ggml_tensor *& last) {
    if (!last || !is_copy_of(ctx, last, view)) {
        last = ggml_cont(ctx, view);
    }
    return last;
}

void phase_kv_stage(ggml_context * ctx, ggml_cgraph * gf, int64_t n_tokens, ggml_tensor *& k, ggml_tensor *& v, ggml_tensor * mask) {
    if (auto * rows = k->view_src ? phase_kv_rows_on_host(k->view_src) : nullptr) {
        phase_kv_rows_host_attend(ctx, gf, rows, n_tokens, k, v, mask);
        return;
    }
    if (n_tokens <= PHASE_KV_IN_PLACE_TOKENS || !is_in_host_memory(k)) {
        return;
    }
    static thread_local ggml_tensor * last_k = nullptr;
    static thread_local ggml_tensor * last_v = nullptr;

    auto * copy = copy_once(ctx, k, last_k);
    if (v->view_src == k->view_src && v->view_src) {
        v = ggml_view_4d(ctx, copy, v->ne[0], v->ne[1], v->ne[2], v->ne[3], copy->nb[1], copy->nb[2], copy->nb[3], v->view_offs - k->view_offs);
    } else {
        v = copy_once(ctx, v, last_v);
    }
    k = copy;
}

bool phase_kv_sparse_in_host() {
    return sparse_in_host;
}

void phase_kv_set_select(bool fast) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto * api = phase_backend_api_of(ggml_backend_dev_get(i));
        if (api && api->set_select) {
            api->set_select(fast);
        }
    }
}

void phase_kv_begin_notes() {
    noting = true;
    notes.clear();
}

std::vector<kv_layer_stats> phase_kv_end_notes() {
    noting = false;
    return std::move(notes);
}
