#include "phase-context.h"

#include "expert-cache.h"
#include "graph-writes.h"
#include "phase-chunks.h"
#include "phase-group.h"
#include "kpool-memo.h"
#include "phase-kv.h"
#include "phase-stats.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

// Shapes that come up with drafts of up to 7 tokens: verify batches of 1 to 8, the draft's first batches of 1 to 8 and its full queue.
static constexpr uint32_t SMALL_GRAPHS = 10;

//
// creation
//

// the largest prefill micro-batch of a context, or its own when it cannot switch
static uint32_t choose_prefill_ubatch(const llama_cparams & cparams, const phase_config & config) {
    if (config.mode == PHASE_MODE_OFF) {
        return cparams.n_ubatch;
    }
    if (cparams.embeddings || cparams.pooling_type != LLAMA_POOLING_TYPE_NONE || !cparams.causal_attn) {
        LLAMA_LOG_INFO("llama-phase: no prefill phase for this context: %s\n", cparams.causal_attn ? "it computes embeddings" : "its attention is not causal");
        return cparams.n_ubatch;
    }
    uint32_t ubatch = std::min((uint32_t) std::max(config.prefill_ubatch, 0), cparams.n_batch);
    if (config.prefill_ubatch < 0) {
        const auto candidates = phase_ubatch_candidates(cparams.n_ubatch, cparams.n_batch);
        ubatch = candidates.empty() ? cparams.n_ubatch : candidates.back();
    } else if (cparams.n_batch < std::min((uint32_t) config.prefill_ubatch, cparams.n_ctx)) {
        LLAMA_LOG_WARN("llama-phase: the logical batch is %u, so micro-batches end at %u and not at LLAMA_PHASE_PREFILL_UBATCH=%u: start with -b %u\n",
                cparams.n_batch, ubatch, config.prefill_ubatch, config.prefill_ubatch);
    }
    if (ubatch <= cparams.n_ubatch) {
        LLAMA_LOG_WARN("llama-phase: no prefill phase for this context: its micro-batch is %u already\n", cparams.n_ubatch);
    }
    return std::max(ubatch, cparams.n_ubatch);
}

std::shared_ptr<phase_context> phase_context_create(llama_context & ctx) {
    const phase_config config = phase_config_load();
    phase_kv_set_select(phase_select_is_fast());
    const bool nothing_but_a_switch = config.expert_slots == 0 && config.kv == PHASE_KV_DEVICE && !config.draft_auto;
    if (ctx.model.hparams.vocab_only || (config.mode == PHASE_MODE_OFF && nothing_but_a_switch)) {
        return nullptr;
    }
    const uint32_t ubatch_prefill = choose_prefill_ubatch(ctx.cparams, config);
    if (ctx.model.hparams.no_alloc) {
        // with auto the fit has to leave room for the smallest: larger ones take what is left
        const auto candidates = phase_ubatch_candidates(ctx.cparams.n_ubatch, ubatch_prefill);
        ctx.cparams.n_ubatch = config.prefill_ubatch < 0 && !candidates.empty() ? candidates.front() : ubatch_prefill;
        phase_set_chunks(ctx.cparams, ctx.model, config.mode == PHASE_MODE_TRANSACTION ? config.chunk : 0);
        return nullptr;
    }
    if (ubatch_prefill == ctx.cparams.n_ubatch && nothing_but_a_switch) {
        return nullptr;
    }
    return std::make_shared<phase_context>(ctx, config, ubatch_prefill);
}

phase_context::phase_context(llama_context & ctx, const phase_config & config, uint32_t ubatch_prefill) :
        ubatch_decode(ctx.cparams.n_ubatch),
        ubatch_largest(ubatch_prefill),
        ubatch_prefill(ubatch_prefill),
        group(std::make_shared<phase_group>(config, *this)),
        ctx(ctx),
        config(config),
        small_graphs(ctx, config.graphs < 0 ? SMALL_GRAPHS : config.graphs, config.expert_batch, [this] { return beyond_budget().empty(); }) {
}

phase_context::~phase_context() {
    group->remove(*this);
    ctx.cparams.phase_experts = nullptr;
}

void phase_context::create_slots() {
    inputs = input_upload::create(ctx.backend_ptrs);
    create_cache();
    group->choose_ubatch();
}

void phase_context::create_cache() {
    if (config.expert_slots == 0) {
        return;
    }
    const auto & hparams = ctx.model.hparams;
    const bool   mtp     = ctx.cparams.ctx_type == LLAMA_CONTEXT_TYPE_MTP;
    auto wanted = config;
    if (prompts_only_write()) {
        wanted.ring_regions = 0;
    }
    auto cache = std::make_unique<expert_cache>(ctx.model, mtp ? hparams.n_layer() : 0, mtp ? hparams.n_layer_all : hparams.n_layer(), wanted);
    if (cache->empty() && !cache->has_unusable()) {
        LLAMA_LOG_INFO("llama-phase: no experts of this context are in host memory, no slots needed\n");
        return;
    }
    if (cache->empty()) {
        group->change_experts([&] { experts = std::move(cache); }); // for the figures, which say why
        return;
    }

    std::vector<std::pair<ggml_backend_dev_t, size_t>> taken;
    for (auto * backend : ctx.backend_ptrs) {
        auto * dev = ggml_backend_get_device(backend);
        // an MTP draft joins its target later, but shares the budget from the start
        taken.emplace_back(dev, taken_bytes(dev) + (mtp ? phase_group::taken_by_target_bytes(*this, dev) : 0));
    }
    cache->create_slots(taken, mtp);

    group->change_experts([&] { experts = std::move(cache); });
    ctx.cparams.phase_experts = experts.get();
    drop_buffers();
    reserve(false);
}

const llama_model & phase_context::model() const {
    return ctx.model;
}

phase_memory_scope::phase_memory_scope(phase_context * phase) : phase(phase) {
    if (phase) {
        phase->ctx.cparams.n_ubatch = phase->ubatch_largest;
        phase_kv_begin_notes();
    }
}

phase_memory_scope::~phase_memory_scope() {
    if (phase) {
        phase->ctx.cparams.n_ubatch = phase->ubatch_decode;
        phase->group->change_experts([&] { phase->kv = phase_kv_end_notes(); });
    }
}

//
// effects
//

// What follows, up to the graph of a micro-batch, is to find the context's own scheduler: planning, shifts, a switch.
bool phase_context::before_decode(uint32_t n_tokens) {
    small_graphs.restore();
    if (experts && experts->note_adapters(*ctx.loras)) {
        group->change_experts([] {}); // for the figures
    }
    return group->before_decode(*this, n_tokens);
}

float * phase_context::host_scores(int32_t i) const {
    return ctx.sampling.samplers.empty() ? ctx.get_logits_ith(i) : nullptr;
}

// Samplers or adapters changed: what is kept was planned without them.
void phase_context::before_reserve() {
    small_graphs.drop();
}

// Samplers on the device with inputs of their own (random numbers, tables of penalties) know those of the graph that was built last.
static bool has_inputs(const llama_sampler * sampler) {
    auto * chain = const_cast<llama_sampler *>(sampler);
    const int n = std::strcmp(llama_sampler_name(sampler), "chain") == 0 ? llama_sampler_chain_n(chain) : -1;
    for (int i = 0; i < n; ++i) {
        if (has_inputs(llama_sampler_chain_get(chain, i))) {
            return true;
        }
    }
    return n < 0 && sampler->iface->backend_set_input && llama_sampler_name(sampler)[0] != '?'; // "?": one that does nothing
}

bool phase_context::keeps_graphs() const {
    return std::none_of(ctx.sampling.samplers.begin(), ctx.sampling.samplers.end(), [](const auto & entry) { return has_inputs(entry.second); });
}

void phase_context::before_graph(uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    if (!planned_prefill && experts && experts->fill_left_bytes() > 0 && n_tokens <= config.expert_batch && experts->before_small_batch(backends())) {
        group->note_fill();
    }
    if (!planned_prefill && keeps_graphs()) {
        small_graphs.select(n_tokens, n_seqs, n_outputs);
        if (small_graphs.changed()) {
            group->note_decode_memory();
        }
    }
    if (inputs && ctx.sched) {
        inputs->install(ctx.sched.get()); // each time: the scheduler may be another one
    }
}

bool phase_context::prompts_only_write() const {
    const auto & cparams = ctx.cparams;
    const auto & layers  = cparams.embeddings_layer_inp;
    return cparams.ctx_type == LLAMA_CONTEXT_TYPE_MTP && !cparams.embeddings && (!cparams.embeddings_nextn || cparams.embeddings_nextn_masked) &&
        std::find(layers.begin(), layers.end(), true) == layers.end();
}

void phase_context::after_build(llm_graph_result & built, uint32_t n_outputs) {
    small_graphs.give_places();
    if (plans_writes || (n_outputs == 0 && prompts_only_write())) {
        phase_keep_writes(built.get_ctx(), built.get_gf());
    }
}

void phase_context::quiesce(bool entering) {
    ctx.synchronize();
    if (entering) {
        pipeline_parallel = ctx.cparams.pipeline_parallel;
    }
}

int64_t phase_context::drop_buffers() {
    int64_t bytes = (int64_t) phase_total_bytes(read_memory());
    small_graphs.drop();
    park_graphs();
    ctx.sched.reset();

    // pools grow with the micro-batch, and captured graphs hold their addresses
    for (auto * backend : ctx.backend_ptrs) {
        if (const auto * api = phase_backend_api_of(ggml_backend_get_device(backend))) {
            bytes += (int64_t) api->trim(backend);
        }
    }
    return -bytes;
}

int64_t phase_context::reserve_buffers(bool prefill) {
    ctx.cparams.n_ubatch = prefill ? ubatch_prefill : ubatch_decode;
    phase_set_chunks(ctx.cparams, ctx.model, prefill ? config.chunk : 0);
    if (!prefill) {
        ctx.cparams.pipeline_parallel = pipeline_parallel;
    }
    std::string shrunk; // why the ring had to become smaller
    while (true) {
        try {
            reserve(prefill);
            if (prefill) {
                auto text = beyond_budget();
                if (text.empty() && experts) {
                    text = experts->ring_shortfall();
                }
                if (!text.empty()) {
                    throw std::runtime_error(text);
                }
            }
            break;
        } catch (const std::exception & error) {
            const int32_t regions = experts ? experts->ring_regions() : 0;
            if (!prefill || regions == 0) {
                throw std::runtime_error(error.what() + (prefill ? shortfall() : std::string()));
            }
            LLAMA_LOG_WARN("llama-phase: the prefill buffers do not fit beside a ring of %d layers, trying fewer: %s\n", regions, error.what());
            drop_buffers();
            experts->free_ring();
            experts->allocate_ring(regions - 1, [](const char *) {});
            shrunk = error.what();
        }
    }
    if (!shrunk.empty()) {
        experts->limit_ring(experts->ring_regions(), shrunk);
    }
    return (int64_t) phase_total_bytes(read_memory());
}

// The arrays that graphs are built in grow with the micro-batch (about 16 KiB per token) and are zeroed when they are made, which
// took most of a switch. They are host memory, so each phase keeps its own; only the tensors in them are stale.
void phase_context::park_graphs() {
    auto & parked = graphs[planned_prefill];
    if (ctx.gf_res_reserve) {
        parked.reserve = std::move(ctx.gf_res_reserve);
        parked.prev    = std::move(ctx.gf_res_prev);
    }
    ctx.gf_res_prev_active = nullptr;
}

void phase_context::unpark_graphs(bool prefill, size_t max_nodes) {
    park_graphs();
    planned_prefill = prefill;
    auto & parked = graphs[prefill];
    if (!parked.reserve || parked.reserve->get_max_nodes() < (int64_t) max_nodes) {
        parked.prev = {};
        parked.reserve.reset(new llm_graph_result(max_nodes));
    }
    ctx.gf_res_reserve = std::move(parked.reserve);
    ctx.gf_res_prev    = std::move(parked.prev);
    for (auto & res : ctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
}

// Inputs of a micro-batch (masks) are written in pinned memory.
void phase_context::pool_host_buffers() {
    for (size_t i = 0; i < ctx.backend_ptrs.size() && !pinned; ++i) {
        auto *& type = ctx.backend_buft[i];
        if (ggml_backend_buft_is_host(type) && type != ggml_backend_cpu_buffer_type()) {
            pinned.reset(new host_pool(type));
            type = pinned->type();
        }
    }
}

// `sizes` may be null.
static void keep_most(size_t * sizes, const std::vector<size_t> & others) {
    for (size_t i = 0; sizes && i < others.size(); ++i) {
        sizes[i] = std::max(sizes[i], others[i]);
    }
}

// A micro-batch of prompts. `sizes`: nothing is allocated, but the bytes for each backend are put there.
bool phase_context::plan_prompts(const llama_memory_context_i * mctx, size_t * sizes) {
    const uint32_t n_seqs    = ctx.cparams.n_seq_max;
    const uint32_t n_tokens  = std::min(ctx.cparams.n_ctx, ctx.cparams.n_ubatch);
    const uint32_t n_outputs = std::min(n_tokens, ctx.cparams.n_outputs_max);
    if (!ctx.graph_reserve(n_tokens, n_seqs, n_outputs, mctx, sizes != nullptr, sizes)) {
        return false;
    }
    // of one sequence it needs more, as llama_context::sched_reserve() knows
    if (n_seqs == 1 || (ctx.model.arch != LLM_ARCH_KIMI_LINEAR && ctx.model.arch != LLM_ARCH_MINIMAX_01)) {
        return true;
    }
    std::vector<size_t> of_one(ctx.backend_ptrs.size());
    const bool planned = ctx.graph_reserve(n_tokens, 1, n_outputs, mctx, sizes != nullptr, sizes ? of_one.data() : nullptr);
    keep_most(sizes, of_one);
    return planned;
}

// Of a draft's prompts only the writes, which take no experts. Drafts of other sequences, few tokens, come between them.
bool phase_context::plan_prefill(const llama_memory_context_i * mctx, size_t * sizes) {
    const uint32_t n_seqs = ctx.cparams.n_seq_max;
    if (!prompts_only_write()) {
        return plan_prompts(mctx, sizes);
    }
    std::vector<size_t> of_drafts(ctx.backend_ptrs.size());
    if (!ctx.graph_reserve(n_seqs, n_seqs, n_seqs, mctx, sizes != nullptr, sizes ? of_drafts.data() : nullptr)) {
        return false;
    }
    struct scope {
        bool & flag;
        ~scope() { flag = false; }
    } cut_down { plans_writes };
    plans_writes = true;
    const bool planned = plan_prompts(mctx, sizes);
    keep_most(sizes, of_drafts);
    return planned;
}

// llama_context::sched_reserve() without what is known since the context was created (fused operators, node counts for the log): it
// plans three graphs, a switch needs one for the prefill and two for the decode phase. The plan made last is the one that the next
// batch finds, so generation comes after the worst case.
void phase_context::reserve(bool prefill) {
    const uint32_t n_seqs    = ctx.cparams.n_seq_max;
    const size_t   max_nodes = ctx.graph_max_nodes(std::min(ctx.cparams.n_ctx, ctx.cparams.n_ubatch));

    pool_host_buffers();
    const auto plan = [&] {
        unpark_graphs(prefill, max_nodes);
        ctx.sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(), max_nodes,
                ctx.cparams.pipeline_parallel, ctx.cparams.op_offload));

        const auto mctx = ctx.memory ? ctx.memory->init_full() : nullptr;
        if (ctx.memory && !mctx) {
            return false;
        }
        return prefill ? plan_prefill(mctx.get(), nullptr) :
            plan_prompts(mctx.get(), nullptr) && ctx.graph_reserve(n_seqs, n_seqs, n_seqs, mctx.get());
    };
    bool planned = plan();
    if (!planned && ctx.cparams.pipeline_parallel) {
        ctx.cparams.pipeline_parallel = false;
        planned = plan();
    }
    if (!planned) {
        throw std::runtime_error("failed to allocate the compute buffers");
    }

    ctx.sched_need_reserve = false;
    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        ctx.backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(ctx.sched.get(), ctx.backend_ptrs[i]);
    }
}

size_t phase_context::taken_bytes(ggml_backend_dev_t dev) const {
    size_t bytes = experts ? experts->bytes(dev) : 0;
    for (auto * backend : ctx.backend_ptrs) {
        bytes += ggml_backend_get_device(backend) == dev ? small_graphs.bytes(backend) : 0;
    }
    return bytes;
}

// The ring and the other members count against the budget too, and what the scheduler takes is known only now. Beside a GPU the
// host has no budget.
std::string phase_context::beyond_budget() const {
    size_t index = 0;
    for (auto * backend : ctx.backend_ptrs) {
        auto *       dev    = ggml_backend_get_device(backend);
        const size_t budget = budget_of(dev, index++);
        const size_t taken  = group->taken_bytes(dev);
        if (taken > budget) {
            return format("%s: %.0f MiB of compute buffers and ring exceed the budget of %.0f MiB by %.0f MiB",
                    ggml_backend_dev_name(dev), taken/1048576.0, budget/1048576.0, (taken - budget)/1048576.0);
        }
    }
    return "";
}

size_t phase_context::budget_of(ggml_backend_dev_t dev, size_t index) const {
    const bool host = ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_GPU && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_IGPU;
    return host && !ctx.model.devices.empty() ? SIZE_MAX : config.budget_of(index);
}

int64_t phase_context::remember_slots() {
    if (experts) {
        experts->remember();
    }
    return 0;
}

int64_t phase_context::free_slots() {
    return experts ? -(int64_t) experts->free_slots() : 0;
}

int64_t phase_context::allocate_slots(const fault_point & fault) {
    return experts ? (int64_t) experts->allocate_slots(fault) : 0;
}

std::map<ggml_backend_dev_t, ggml_backend_t> phase_context::backends() const {
    std::map<ggml_backend_dev_t, ggml_backend_t> map;
    for (auto * backend : ctx.backend_ptrs) {
        map[ggml_backend_get_device(backend)] = backend;
    }
    return map;
}

int64_t phase_context::refill_slots(bool as_before) {
    if (experts) {
        experts->refill(backends(), as_before);
    }
    return 0;
}

int64_t phase_context::allocate_ring(const fault_point & fault) {
    if (!experts) {
        return 0;
    }
    return (int64_t) experts->allocate_ring(experts->ring_regions_wanted(), fault);
}

void phase_context::start_ring(const fault_point & fault) {
    if (experts) {
        experts->start_ring(backends(), fault);
    }
}

void phase_context::note_no_slots(const std::string & reason) {
    if (experts) {
        experts->note_no_slots(reason);
    }
}

void phase_context::reset() {
    if (experts) {
        experts->unlimit_ring();
    }
}

int64_t phase_context::free_ring() {
    return experts ? -(int64_t) experts->free_ring() : 0;
}

void phase_context::set_last_pass(bool last) {
    if (experts) {
        experts->set_last_pass(last);
    }
}

void phase_context::ensure_scheduler(uint32_t n_tokens) {
    if (!ctx.sched) {
        ctx.sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(),
                ctx.graph_max_nodes(n_tokens), false, ctx.cparams.op_offload));
    }
}

std::vector<phase_device_memory> phase_context::read_memory() const {
    std::vector<phase_device_memory> memory;
    for (auto * backend : ctx.backend_ptrs) {
        auto * dev = ggml_backend_get_device(backend);
        phase_device_memory entry;
        entry.name         = dev ? ggml_backend_dev_name(dev) : ggml_backend_name(backend);
        entry.buffer_bytes = small_graphs.bytes(backend);
        if (dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            size_t total = 0;
            ggml_backend_dev_memory(dev, &entry.free_bytes, &total);
        }
        memory.push_back(std::move(entry));
    }
    return memory;
}

// Plans the prefill graph without allocating and compares with what the devices have free now, the decode buffers being dropped.
std::string phase_context::shortfall() {
    const double MiB = 1024.0*1024.0;
    try {
        auto mctx = ctx.memory ? ctx.memory->init_full() : nullptr;
        if (!mctx) {
            return "";
        }
        std::vector<size_t> need(ctx.backend_ptrs.size());

        drop_buffers();
        const uint32_t n_tokens = std::min(ctx.cparams.n_ctx, ubatch_prefill);
        unpark_graphs(true, ctx.graph_max_nodes(n_tokens));
        ensure_scheduler(n_tokens);
        plan_prefill(mctx.get(), need.data());

        std::string text;
        const auto memory = read_memory();
        for (size_t i = 0; i < need.size(); ++i) {
            if (memory[i].free_bytes && need[i] > memory[i].free_bytes) {
                text += format("; %s needs %.0f MiB and has %.0f MiB free, short by %.0f MiB", memory[i].name.c_str(), need[i]/MiB,
                        memory[i].free_bytes/MiB, (need[i] - memory[i].free_bytes)/MiB);
            }
        }
        return text;
    } catch (const std::exception &) {
        return "";
    }
}
