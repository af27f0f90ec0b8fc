// LLAMA_PHASE_PREFILL_UBATCH=auto: what each candidate would need, planned as the prefill phase plans, without allocating anything.

#include "expert-cache.h"
#include "phase-chunks.h"
#include "phase-context.h"
#include "phase-group.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <stdexcept>

// The scheduler, the graphs and their plan stay as they are: they are put aside and come back, so the decode phase notices nothing.
std::vector<size_t> phase_context::plan_compute(uint32_t ubatch) {
    struct put_aside {
        llama_context & ctx;
        expert_cache  * experts;

        ggml_backend_sched_ptr            sched   = std::move(ctx.sched);
        std::unique_ptr<llm_graph_result> reserve = std::move(ctx.gf_res_reserve);
        decltype(ctx.gf_res_prev)         prev    = std::move(ctx.gf_res_prev);
        decltype(ctx.gf_res_prev_active)  active  = ctx.gf_res_prev_active;
        const uint32_t                    n_ubatch        = ctx.cparams.n_ubatch;
        const uint32_t                    n_input_tensors = ctx.n_input_tensors;
        const int32_t                     chunk           = ctx.cparams.phase_chunk;
        const bool                        chunk_masks     = ctx.cparams.phase_chunk_masks;

        ~put_aside() {
            if (experts) {
                experts->forget_pretended_ring();
            }
            ctx.sched              = std::move(sched);
            ctx.gf_res_reserve     = std::move(reserve);
            ctx.gf_res_prev        = std::move(prev);
            ctx.gf_res_prev_active = active;
            ctx.cparams.n_ubatch   = n_ubatch;
            ctx.n_input_tensors    = n_input_tensors;
            ctx.cparams.phase_chunk       = chunk;
            ctx.cparams.phase_chunk_masks = chunk_masks;
        }
    } aside { ctx, experts.get() };

    if (experts) {
        experts->pretend_ring();
    }
    ctx.cparams.n_ubatch = ubatch;
    phase_set_chunks(ctx.cparams, ctx.model, config.mode == PHASE_MODE_TRANSACTION ? config.chunk : 0);
    const uint32_t n_tokens  = std::min(ctx.cparams.n_ctx, ubatch);
    const size_t   max_nodes = ctx.graph_max_nodes(n_tokens);
    ctx.gf_res_prev_active = nullptr;
    ctx.gf_res_reserve.reset(new llm_graph_result(max_nodes));
    ctx.sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(), max_nodes,
            ctx.cparams.pipeline_parallel, ctx.cparams.op_offload));

    const auto mctx = ctx.memory ? ctx.memory->init_full() : nullptr;
    if (!mctx) {
        throw std::runtime_error("the memory of the context cannot be planned for");
    }
    std::vector<size_t> bytes(ctx.backend_ptrs.size());
    plan_prefill(mctx.get(), bytes.data());
    for (size_t i = 0; i < bytes.size(); ++i) { // backends over one buffer type share the buffer, and each is told its size
        const bool shared = std::find(ctx.backend_buft.begin(), ctx.backend_buft.begin() + i, ctx.backend_buft[i]) != ctx.backend_buft.begin() + i;
        bytes[i] = shared ? 0 : bytes[i];
    }
    return bytes;
}

void phase_context::plan_ubatch(phase_ubatch_candidate & candidate) {
    const uint32_t ubatch  = std::min(candidate.ubatch, ubatch_largest);
    const auto     compute = plan_compute(std::max(ubatch, ubatch_decode));
    const auto     memory  = read_memory();
    for (size_t i = 0; i < compute.size(); ++i) {
        auto * dev = ggml_backend_get_device(ctx.backend_ptrs[i]);
        auto   it  = std::find_if(candidate.devices.begin(), candidate.devices.end(), [&](const phase_ubatch_need & need) { return need.device == memory[i].name; });
        if (it == candidate.devices.end()) {
            phase_ubatch_need need;
            need.device       = memory[i].name;
            need.budget_bytes = budget_of(dev, i);
            if (memory[i].free_bytes) {
                const size_t back = memory[i].free_bytes + group->taken_bytes(dev);
                need.free_bytes = back > RESERVE_BYTES ? back - RESERVE_BYTES : 0;
            }
            candidate.devices.push_back(std::move(need));
            it = candidate.devices.end() - 1;
        }
        it->compute_bytes += compute[i];
        if (experts) {
            it->ring_bytes += experts->planned_ring_bytes(dev);
            it->pool_bytes  = std::max(it->pool_bytes, experts->planned_pool_bytes(dev, ubatch)); // the members take turns
        }
    }
}

void phase_context::set_prefill_ubatch(uint32_t ubatch) {
    ubatch_prefill = std::max(std::min(ubatch, ubatch_largest), ubatch_decode);
}

void phase_group::choose_ubatch() {
    auto & leader = *members.front();
    if (config.mode == PHASE_MODE_OFF || config.prefill_ubatch > 0 || leader.ubatch_largest == leader.ubatch_decode) {
        return;
    }
    std::vector<phase_ubatch_candidate> candidates;
    for (const uint32_t ubatch : phase_ubatch_candidates(leader.ubatch_decode, leader.ubatch_largest)) {
        phase_ubatch_candidate candidate;
        candidate.ubatch = ubatch;
        try {
            for (auto * member : members) {
                member->plan_ubatch(candidate);
            }
        } catch (const std::exception & error) {
            candidate.failure = error.what();
        }
        LLAMA_LOG_INFO("llama-phase: %s\n", candidate.text().c_str());
        candidates.push_back(std::move(candidate));
    }
    const uint32_t chosen = phase_ubatch_choose(candidates, leader.ubatch_decode);
    for (auto * member : members) {
        member->set_prefill_ubatch(chosen);
    }
    if (chosen > leader.ubatch_decode) {
        LLAMA_LOG_INFO("llama-phase: prefill ubatch auto: %u\n", chosen);
    } else {
        LLAMA_LOG_WARN("llama-phase: no prefill phase: no micro-batch above %u fits; free memory, or choose one with LLAMA_PHASE_PREFILL_UBATCH\n", chosen);
    }

    std::lock_guard<std::mutex> guard(lock);
    stats.candidates     = std::move(candidates);
    stats.ubatch_prefill = leader.ubatch_prefill;
    stats.mode           = leader.ubatch_prefill > leader.ubatch_decode ? config.mode : PHASE_MODE_OFF;
}
