#include "phase-graphs.h"

#include "expert-op.h"
#include "expert-store.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <stdexcept>

struct phase_graphs::planned {
    shape of;

    std::unique_ptr<lent_types>         types; // outlives the scheduler
    ggml_backend_sched_ptr              sched;
    std::array<llm_graph_result_ptr, 2> prev;
    llm_graph_result *                  active = nullptr;
    llm_graph_result_ptr                reserve;
    std::vector<size_t>                 expected; // bytes of the compute buffers, as the context notes them
};

phase_graphs::phase_graphs(llama_context & ctx, uint32_t n_most, uint32_t n_tokens_most, std::function<bool()> fits) :
    ctx(ctx), n_most(n_most), n_tokens_most(n_tokens_most), fits(std::move(fits)) {
}

phase_graphs::~phase_graphs() {
    restore();
}

void phase_graphs::swap_with_context(planned & with) {
    std::swap(with.sched,   ctx.sched);
    std::swap(with.prev,    ctx.gf_res_prev);
    std::swap(with.active,  ctx.gf_res_prev_active);
    std::swap(with.reserve, ctx.gf_res_reserve);
    std::swap(with.expected, ctx.backend_buf_exp_size);
}

void phase_graphs::restore() {
    awaits_small = false;
    if (in_use) {
        swap_with_context(*in_use);
        in_use = nullptr;
    }
}

void phase_graphs::drop() {
    restore();
    if (!kept.empty()) {
        ctx.synchronize();
        is_changed = true;
    }
    kept.clear();
    buffers.reset();
    seen.clear();
    full = false;
    count(0);
}

// what the largest small batch needs
void phase_graphs::plan_buffers() {
    planned largest;
    const uint32_t n_tokens  = std::max(n_tokens_most, ctx.cparams.n_seq_max);
    const size_t   max_nodes = ctx.graph_max_nodes(n_tokens);
    largest.sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(), max_nodes, false, ctx.cparams.op_offload));
    largest.reserve.reset(new llm_graph_result(max_nodes));
    largest.expected.resize(ctx.backend_ptrs.size());

    std::vector<size_t> sizes(ctx.backend_ptrs.size());
    const auto mctx = ctx.memory->init_full();
    bool done = false;
    swap_with_context(largest);
    try {
        done = mctx && ctx.graph_reserve(n_tokens, ctx.cparams.n_seq_max, std::min(n_tokens, ctx.cparams.n_outputs_max), mctx.get(), true, sizes.data());
    } catch (...) {
        swap_with_context(largest);
        throw;
    }
    swap_with_context(largest);
    if (!done) {
        throw std::runtime_error("a small batch cannot be planned");
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
        // others may know their buffers by how they are freed, as the one of tensor parallelism does: each scheduler has its own of those
        if (!ggml_backend_buft_is_host(ctx.backend_buft[i]) && !phase_backend_api_of(ggml_backend_get_device(ctx.backend_ptrs[i]))) {
            sizes[i] = 0;
        }
    }
    buffers = std::make_unique<lent_buffers>(ctx.backend_buft, sizes);
}

// Nothing of the context changes but what stands in its place.
bool phase_graphs::make(const shape & of) {
    const size_t   max_nodes       = ctx.graph_max_nodes(std::max(of.n_tokens, ctx.cparams.n_seq_max));
    const uint32_t n_input_tensors = ctx.n_input_tensors;
    const auto     n_outputs       = ctx.n_outputs;

    bool done = false;
    try {
        if (!buffers) {
            plan_buffers();
        }
        auto fresh = std::make_unique<planned>();
        fresh->of = of;
        fresh->types = std::make_unique<lent_types>(*buffers, ctx.backend_buft);
        fresh->sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), fresh->types->data(), ctx.backend_ptrs.size(), max_nodes, false, ctx.cparams.op_offload));
        fresh->reserve.reset(new llm_graph_result(max_nodes));
        fresh->expected.resize(ctx.backend_ptrs.size());
        kept.push_back(std::move(fresh));
        in_use = kept.back().get();
        swap_with_context(*in_use);

        const auto mctx = ctx.memory->init_full();
        done = mctx && ctx.graph_reserve(of.n_tokens, ctx.cparams.n_seq_max, std::max(of.n_outputs, 1u), mctx.get()) && fits();
    } catch (const std::exception & error) {
        LLAMA_LOG_DEBUG("llama-phase: %s\n", error.what());
    }
    ctx.n_input_tensors = n_input_tensors;
    ctx.n_outputs       = n_outputs;
    if (!done && in_use) {
        restore();
        kept.pop_back();
    }
    if (kept.empty()) {
        buffers.reset();
    }
    for (size_t i = 0; done && i < ctx.backend_ptrs.size(); ++i) {
        ctx.backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(ctx.sched.get(), ctx.backend_ptrs[i]);
    }
    return done;
}

void phase_graphs::select(uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    count(1);
    if (n_most == 0 || n_tokens > n_tokens_most || ctx.cparams.pipeline_parallel || !ctx.memory) {
        restore();
        return;
    }
    put_in_place({ n_tokens, n_seqs, n_outputs });
    awaits_small = true;
}

void phase_graphs::put_in_place(const shape & of) {
    if (in_use && in_use->of == of) {
        return;
    }
    restore();
    const auto same_as = [&](const shape & other) { return other == of; };
    const bool again   = !seen.empty() && seen.back() == of;
    const auto before  = std::find_if(seen.begin(), seen.end(), same_as);
    const bool known   = before != seen.end();
    if (known) {
        seen.erase(before);
    }
    seen.push_back(of);

    const auto it = std::find_if(kept.begin(), kept.end(), [&](const auto & entry) { return entry->of == of; });
    if (it != kept.end()) {
        std::rotate(it, it + 1, kept.end());
        in_use = kept.back().get();
        swap_with_context(*in_use);
        return;
    }
    if (again || !known || full) {
        return;
    }
    if (kept.size() >= n_most) {
        ctx.synchronize();
        kept.erase(kept.begin());
        is_changed = true;
    }
    if (!make(of)) {
        full = true;
        LLAMA_LOG_INFO("llama-phase: no memory to keep the graph of batches of %u tokens: it is built anew at each change of size\n", of.n_tokens);
        return;
    }
    is_changed = true;
    std::lock_guard<std::mutex> guard(lock);
    counters.n_made++;
}

void phase_graphs::give_places() {
    if (!std::exchange(awaits_small, false)) {
        return;
    }
    const ggml_context_ptr tiny { ggml_init({ 2*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }) };
    auto * graph = ggml_new_graph(tiny.get());
    ggml_build_forward_expand(graph, ggml_neg(tiny.get(), ggml_new_tensor_1d(tiny.get(), GGML_TYPE_F32, 1)));
    ggml_backend_sched_reserve(ctx.sched.get(), graph);
}

size_t phase_graphs::lent_bytes(ggml_backend_t backend) const {
    for (size_t i = 0; buffers && i < ctx.backend_ptrs.size(); ++i) {
        if (ctx.backend_ptrs[i] == backend) {
            return buffers->bytes(ctx.backend_buft[i]);
        }
    }
    return 0;
}

size_t phase_graphs::bytes(ggml_backend_t backend) const {
    const auto & own = in_use ? in_use->sched : ctx.sched;
    return (own ? ggml_backend_sched_get_buffer_size(own.get(), backend) : 0) + lent_bytes(backend);
}

void phase_graphs::count(uint32_t n_batches) {
    const int32_t n_reused = ctx.n_reused;
    uint64_t      all      = 0;
    for (auto * backend : ctx.backend_ptrs) {
        all += lent_bytes(backend);
    }
    std::lock_guard<std::mutex> guard(lock);
    counters.n_batches += n_batches;
    counters.n_reused  += n_reused - (n_reused >= n_reused_before ? n_reused_before : 0);
    counters.n_kept     = kept.size();
    counters.bytes      = all;
    n_reused_before     = n_reused;
}

phase_graph_stats phase_graphs::stats() const {
    std::lock_guard<std::mutex> guard(lock);
    return counters;
}
