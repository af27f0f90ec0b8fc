#pragma once

// Binds the phases to a llama_context: creation, and the effects of a transaction on this one context. What decides is phase-group.
//
//   llama_context ──owns──> phase_context ──shares──> phase_group ──refers to──> its phase_contexts
//
// Called by src/llama-context.cpp (creation, memory, each decode) and by phase-group.

#include "host-pool.h"
#include "input-upload.h"
#include "phase-config.h"
#include "phase-graphs.h"
#include "phase-ubatch.h"

#include "ggml-backend.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

struct expert_cache;
struct kv_layer_stats;
class llm_graph_result;
struct llama_context;
struct llama_memory_context_i;
struct llama_model;
struct phase_device_memory;
struct phase_group;

struct phase_context {
    phase_context(llama_context & ctx, const phase_config & config, uint32_t ubatch_prefill);
    ~phase_context();

    phase_context(const phase_context &) = delete;
    phase_context & operator=(const phase_context &) = delete;

    // Called at the end of the context's constructor: allocates the slots, plans the decode graphs with them, chooses the prefill
    // micro-batch where it is auto.
    // Throws std::runtime_error when they do not fit.
    void create_slots();

    // The scores of an output whose computation has been waited for; null when a sampler runs on a device.
    float * host_scores(int32_t i) const;

    // Called at the start of each decode, before anything of the batch is allocated. False: the context is unusable.
    bool before_decode(uint32_t n_tokens);

    // Called before the scheduler is made anew, in decode(), encode() or a training run.
    void before_reserve();

    // Called before the graph of each micro-batch is looked up.
    void before_graph(uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);

    // Called when a graph was built anew, to run or to plan with, before it is allocated.
    void after_build(llm_graph_result & built, uint32_t n_outputs);

    // Waits for the work in flight. On the way into the prefill phase the flags that a reserve may clear are remembered.
    void quiesce(bool entering);

    // Frees scheduler, graphs and compute buffers. Safe when there are none. Returns minus the bytes freed.
    int64_t drop_buffers();

    // Plans and allocates for the micro-batch of the phase. When the prefill buffers do not fit beside the ring, the ring is made
    // smaller, then given up. Returns the bytes allocated; throws std::exception, for the prefill phase with the shortfall per device.
    int64_t reserve_buffers(bool prefill);

    // As the functions of expert_cache; they return bytes as phase_step does, and do nothing without host experts.
    using fault_point = std::function<void(const char * step)>;
    int64_t remember_slots();
    int64_t free_slots();
    int64_t allocate_slots(const fault_point & fault);
    int64_t refill_slots(bool as_before);
    int64_t allocate_ring(const fault_point & fault);
    int64_t free_ring();

    // Lets the first layers' copies begin. An allocation waits for copies in flight, so this comes behind the last one of all members.
    void start_ring(const fault_point & fault);

    void note_no_slots(const std::string & reason);

    // Forgets what did not fit.
    void reset();

    // Whether the next micro-batch is the last one before the ring is freed.
    void set_last_pass(bool last);

    // A scheduler without buffers, so that the context can be destroyed after a failed reserve.
    void ensure_scheduler(uint32_t n_tokens = 1);

    const llama_model & model() const;

    phase_graph_stats graph_stats() const { return small_graphs.stats(); }

    // slots or ring and compute buffers on a device
    size_t taken_bytes(ggml_backend_dev_t dev) const;

    // one entry per backend of the context
    std::vector<phase_device_memory> read_memory() const;

    // Adds what the prefill phase of this member would take with a candidate's micro-batch. Throws std::exception when that cannot be planned.
    void plan_ubatch(phase_ubatch_candidate & candidate);
    void set_prefill_ubatch(uint32_t ubatch);
    std::vector<kv_layer_stats> kv; // where the context's attention K/V is, when LLAMA_PHASE_KV is set

    const uint32_t ubatch_decode;
    const uint32_t ubatch_largest; // that the prefill phase may get: memory is made for it
    uint32_t       ubatch_prefill; // the same as ubatch_decode when this context does not switch

    std::shared_ptr<phase_group>  group;
    std::unique_ptr<expert_cache> experts; // null: none in host memory, or no slots asked for

  private:
    friend class phase_memory_scope;

    // Of a draft's prompts nothing is read but what they write to memory: no experts, no ring for them.
    bool        prompts_only_write() const;

    void        create_cache();
    void        reserve(bool prefill);
    bool        plan_prompts(const llama_memory_context_i * mctx, size_t * sizes);
    bool        plan_prefill(const llama_memory_context_i * mctx, size_t * sizes);
    bool        keeps_graphs() const;
    void        pool_host_buffers();
    std::vector<size_t> plan_compute(uint32_t ubatch); // bytes for each backend

    void        park_graphs();
    void        unpark_graphs(bool prefill, size_t max_nodes);
    std::string beyond_budget() const; // empty: within it
    size_t      budget_of(ggml_backend_dev_t dev, size_t index) const; // index: of its backend; SIZE_MAX when there is none
    std::string shortfall();

    std::map<ggml_backend_dev_t, ggml_backend_t> backends() const;

    llama_context &    ctx;
    const phase_config config;

    bool pipeline_parallel = false; // of the decode phase

    std::unique_ptr<host_pool>    pinned; // of the compute buffers
    std::unique_ptr<input_upload> inputs; // null: the scheduler copies them

    // the graphs of the phase that is not planned now: [decode, prefill]
    struct parked_graphs {
        std::array<std::unique_ptr<llm_graph_result>, 2> prev;
        std::unique_ptr<llm_graph_result>                reserve;
    };
    std::array<parked_graphs, 2> graphs;
    bool                         planned_prefill = false;
    bool                         plans_writes    = false; // graphs built now are cut down to them

    phase_graphs small_graphs; // of batches served from slots
};

// Null when the mode is off or the context cannot switch (said once in the log), and neither slots, a place for K/V nor
// draft lengths are asked for. A context that only measures memory
// (no_alloc, made by --fit) gets the larger micro-batch instead, so that the fit covers both phases.
// Throws std::invalid_argument when the environment is wrong.
std::shared_ptr<phase_context> phase_context_create(llama_context & ctx);

// While it lives the context parameters carry the larger of the two micro-batches: memory modules size their sliding windows
// by it. At its end the context knows where its K/V is.
class phase_memory_scope {
  public:
    explicit phase_memory_scope(phase_context * phase);
    ~phase_memory_scope();

  private:
    phase_context * phase;
};
