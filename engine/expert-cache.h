#pragma once

// The experts of one context: its slots in the decode phase, its ring in the prefill phase, and the graph nodes that use them.
//
// Owned by phase_context. Slots and ring change only between graphs. Not shared between contexts: a target and its MTP draft run
// different layers, and two contexts over the same layers may run at the same time.

#include "expert-arena.h"
#include "expert-graph.h"
#include "phase-config.h"
#include "phase-stats.h"

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct llama_model;
struct llama_adapter_lora;
using phase_loras = std::unordered_map<llama_adapter_lora *, float>;

// device memory that neither slots nor a ring by its own choice take: pools, captured graphs and other processes grow into it
inline constexpr size_t RESERVE_BYTES = size_t(512) << 20;

struct expert_cache {
    using fault_point = std::function<void(const char * step)>; // throws when the step has to fail

    // The layers il_begin .. il_end-1 of the model.
    expert_cache(const llama_model & model, int il_begin, int il_end, const phase_config & config);
    ~expert_cache();

    bool empty() const { return layers.empty(); }
    bool has_unusable() const { return !unusable.empty(); } // layers that keep the stock path

    // Chooses and allocates the number of slots at start, as choose_slots does. taken_bytes: of the budget of each device, in the order
    // that LLAMA_PHASE_BUDGET_MIB lists them: compute buffers of the decode phase; of a draft, all that its target has there, too.
    // Throws std::runtime_error as choose_slots does, and when there is no memory.
    void create_slots(const std::vector<std::pair<ggml_backend_dev_t, size_t>> & taken_bytes, bool draft);

    // Slots again, as many as before; fewer, then none, when they do not fit (noted, never an exception). Returns bytes.
    size_t allocate_slots(const fault_point & fault);
    size_t free_slots();

    // Reads back which experts are resident. The device has to be idle.
    void remember();

    // Empties the slots, and notes what the restore policy wants there. before_small_batch() brings it; with
    // LLAMA_PHASE_REFILL_MIB=0 all of it is queued on the backends now, and so are the experts of before, whatever the policy, `as_before`.
    using backend_map = std::map<ggml_backend_dev_t, ggml_backend_t>;
    void refill(const backend_map & backends, bool as_before);

    // Called in front of each graph that slots serve. Queues on the backends the copies of at most LLAMA_PHASE_REFILL_MIB, at least of one
    // expert, into slots that are empty: behind a refill the first graph goes without, as the first token waits for it. Returns whether it did.
    bool     before_small_batch(const backend_map & backends);
    uint64_t fill_left_bytes() const { return fill.left_bytes; }

    // A ring of at most n_regions; fewer, then none, when it does not fit (noted). Returns bytes.
    size_t allocate_ring(int32_t n_regions, const fault_point & fault);
    size_t free_ring();

    // For planning in the decode phase: between the two calls graphs are built as in the prefill phase, with ring tensors that have no
    // memory. They must not be computed.
    void pretend_ring();
    void forget_pretended_ring();

    // What that ring takes of a device, and what the matmuls of one micro-batch's routed experts take of the backend's pool, at least.
    size_t planned_ring_bytes(ggml_backend_dev_t dev) const;
    size_t planned_pool_bytes(ggml_backend_dev_t dev, uint32_t n_tokens) const;

    // Lets the devices begin with the first layers' copies. Throws std::runtime_error when one cannot; the ring is to be freed then.
    void start_ring(const backend_map & backends, const fault_point & fault);
    int32_t ring_regions() const { return n_regions; }
    int32_t ring_regions_wanted() const;
    std::string ring_shortfall() const; // why a ring deeper than one device needs has to give memory back; empty: it need not

    // From now on at most n_regions layers, since the prefill buffers did not fit beside more.
    void limit_ring(int32_t n_regions, const std::string & reason);
    void unlimit_ring();

    // Notes which layers' experts these adapters change; they keep the stock path. Returns whether the adapters are others than before.
    bool note_adapters(const phase_loras & loras);

    // Says in the figures why there are no slots until the next prompt.
    void note_no_slots(const std::string & reason);
    void    set_last_pass(bool last); // see phase_ring

    // Called once per MoE layer while a graph is built, after the routing. When this batch is served from slots or ring, replaces
    // the weights by the arena's and returns the ids to use with them; else returns `ids`. x: input of the experts, F32 [n_embd, n_tokens].
    ggml_tensor * swap(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * x, ggml_tensor * ids, ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down,
            ggml_tensor *& gate_up, const phase_loras & loras);

    expert_stats stats() const;

    // Brings the counters of earlier stats() up to date. May be called from any thread at any time.
    void read_counters(expert_stats & stats) const;

    size_t bytes(ggml_backend_dev_t dev) const; // slots or ring, whichever there is

  private:
    struct cached_layer {
        const expert_layer * host = nullptr;

        phase_fetch_op    fetch;
        phase_prefetch_op prefetch; // of the next layer
        phase_stream_op   stream;

        phase_op_counters * prefetched = nullptr; // experts of this layer, by the layer before
        phase_op_counters * filled     = nullptr; // behind a prompt

        cached_layer * next   = nullptr; // null: its experts cannot be predicted from here
        ggml_tensor  * router = nullptr; // of the next layer

        ggml_tensor *              state = nullptr;
        std::vector<ggml_tensor *> slots;
        std::vector<ggml_tensor *> ring;

        std::vector<int32_t> resident; // remembered, least recently used first
        std::vector<int32_t> seen;     // remembered counts of the prompt
        std::vector<int32_t> wanted;   // not offered to the slots yet, the least wanted first; stamps are places in it, from 1
    };

    void    link_layers(const llama_model & model); // which layer predicts for which
    void    build_prefetch(ggml_context * ctx, ggml_cgraph * gf, cached_layer & layer, ggml_tensor * x, const phase_loras & loras);
    size_t  region_bytes(ggml_backend_dev_t dev) const; // of the ring: the largest layer
    int32_t ring_regions_to_plan() const; // as asked for; auto: two, the fewest that overlap. 0: no ring

    int32_t slots_needed() const; // the fewest that are safe
    void    build_slots(int32_t n);
    void    write_state(cached_layer & layer);
    void    fill_some(const backend_map & backends, size_t most_bytes);

    int32_t most_ring_layers() const; // of one device

    std::vector<int32_t> experts_to_restore(const cached_layer & layer, phase_restore restore) const;

    const int                     il_end;
    const phase_config            config;
    std::shared_ptr<expert_store> store;
    std::vector<cached_layer>     layers;

    std::vector<std::pair<int, std::string>> unusable; // of this context's layers
    std::vector<std::pair<int, std::string>> staged;   // not pinned: streamed through the staging ring, stock path in the decode phase
    std::vector<std::pair<int, std::string>> copied;   // in a pinned copy, and why not where they were

    phase_loras                              adapters; // noted last
    std::vector<std::pair<int, std::string>> adapted;  // layers that keep the stock path because of them

    void admit_layers(int il_begin, int il_end);

    std::map<ggml_backend_dev_t, ggml_backend_buffer_ptr> staging; // pinned, for the life of the context

    std::unordered_map<const ggml_tensor *, cached_layer *> by_down; // the down weights name the layer

    // the prefetch in the graph that is being built, until the fetch of its layer
    struct pending_prefetch {
        ggml_context * ctx;
        cached_layer * layer;
        ggml_tensor  * node;
    };
    pending_prefetch pending = {};

    int32_t n_slots_wanted = 0;
    int32_t n_slots        = 0; // now
    int32_t n_regions      = 0; // now

    // written by the thread that decodes
    struct {
        std::atomic<uint64_t> wanted_bytes { 0 }; // by the last refill
        std::atomic<uint64_t> left_bytes { 0 };   // of those, not offered to the slots yet
        std::atomic<uint32_t> n_batches { 0 };    // in front of which they were
    } fill;
    bool fill_waits = false; // for the first graph to pass

    expert_arena state_arena; // for the life of the context
    expert_arena slot_arena;
    expert_arena ring_arena;

    ggml_context_ptr                                      pretended_tensors;
    std::map<ggml_backend_dev_t, ggml_backend_buffer_ptr> pretended; // of no bytes

    std::map<ggml_backend_dev_t, phase_ring>                     rings;
    std::map<ggml_backend_dev_t, std::vector<phase_stream_op *>> ring_order;

    std::map<ggml_backend_dev_t, phase_prefetch_side> prefetch_sides; // for the life of the context

    std::map<ggml_backend_dev_t, phase_ring_times> ring_times; // for the life of the context, as the counters are

    ggml_backend_buffer_ptr counters; // phase_op_counters [4*n_layers], host memory the devices can write
    std::string             note;       // of the slots
    std::string             slots_note; // of the number at start, which stays
    std::string             ring_note;  // of a limit that stays
    std::string             ring_short; // of the last ring, also when it is gone: memory for more could not be had
    int32_t                 max_regions = INT32_MAX;
};

// what src/llama-graph.cpp calls; `cache` may be null
ggml_tensor * phase_swap_experts(expert_cache * cache, ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * x, ggml_tensor * ids,
        ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down, ggml_tensor *& gate_up, const phase_loras & loras);
