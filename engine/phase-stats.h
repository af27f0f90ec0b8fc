#pragma once

// Counters, timings and their two texts. Plain data: phase-context fills it under its lock.

#include "draft-depth.h"
#include "expert-op.h"
#include "phase-ubatch.h"
#include "transaction.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// upper bounds of the swap-time histogram, seconds
inline constexpr std::array<double, 10> PHASE_SWAP_BUCKETS = { 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0 };

struct phase_histogram {
    std::array<uint64_t, PHASE_SWAP_BUCKETS.size()> counts {}; // per bucket, not cumulative
    uint64_t count = 0;
    double   sum   = 0.0; // seconds

    void add(double seconds);
};

struct phase_device_memory {
    std::string name;
    size_t      buffer_bytes = 0; // compute buffers
    size_t      free_bytes   = 0; // as the device reports it; 0 for the host
};

struct expert_layer_stats {
    int               il = 0;
    std::string       device;
    int32_t           n_slots      = 0;
    phase_op_counters slots        = {}; // decode phase
    phase_op_counters ring         = {}; // prefill phase
    uint64_t          expert_bytes = 0;  // of one expert
    phase_op_counters prefetch     = {}; // of this layer's experts, by the layer before
    phase_op_counters filled       = {}; // into empty slots, behind prompts
};

// the last refill of the slots
struct expert_fill_stats {
    uint64_t wanted_bytes = 0;
    uint64_t left_bytes   = 0; // not offered to the slots yet
    uint32_t n_batches    = 0; // micro-batches in front of which they were offered
};

struct expert_stats {
    size_t   pinned_bytes  = 0; // of the model, with its first context: host memory that the devices read in place
    size_t   slot_bytes    = 0;
    size_t   ring_bytes    = 0;
    int32_t  n_slots       = 0; // per layer
    int32_t  n_regions     = 0;
    uint64_t graph_replays = 0; // of the process

    phase_ring_times  ring_times; // of all devices
    expert_fill_stats fill;

    std::vector<expert_layer_stats>          layers;
    std::vector<std::pair<int, std::string>> unusable; // layers that keep the stock path, and why
    std::vector<std::pair<int, std::string>> staged;   // layers streamed through the staging ring, and why; stock path in the decode phase
    std::vector<std::pair<int, std::string>> copied;   // layers in a pinned copy, and why not where they were
    std::string                              note;     // why there are fewer slots or regions than asked for
};

// where the attention K/V of a layer is
// graphs of micro-batches in the decode phase, of one context
struct phase_graph_stats {
    uint64_t n_batches = 0; // micro-batches, since the context was created
    uint64_t n_reused  = 0; // of those, with a graph that was there
    uint64_t n_made    = 0; // shapes that were planned to be kept
    uint64_t n_kept    = 0; // shapes, now
    uint64_t bytes     = 0; // of their compute buffers, all backends
};

struct kv_layer_stats {
    int         il = 0;
    std::string device; // that owns the layer
    bool        host  = false;
    uint64_t    bytes = 0;
    const void * k = nullptr; // address of its K, when the device keeps positions as well
    uint64_t    rows = 0;      // positions that the device keeps as well
    uint64_t    looked_up = 0; // positions that attention read
    uint64_t    missed    = 0; // of those, copied from host memory first
    std::string reason; // why not where LLAMA_PHASE_KV would have it, or why `auto` chose the host
};

struct phase_stats {
    phase_mode mode = PHASE_MODE_OFF;
    bool       prefill = false;
    bool       hooked  = false; // explicit events; else batch sizes decide
    double     since_ms = 0.0;  // clock at the last change of phase

    uint32_t n_members      = 0;
    uint32_t ubatch_decode  = 0;
    uint32_t ubatch_prefill = 0;
    uint32_t min_tokens     = 0;

    std::vector<phase_ubatch_candidate> candidates; // of PREFILL_UBATCH=auto

    uint64_t n_entered     = 0;
    uint64_t n_left        = 0;
    uint64_t n_rolled_back = 0;
    uint64_t n_failed      = 0;
    uint64_t n_short       = 0;
    uint64_t n_blocked     = 0;
    uint64_t n_aborted     = 0;
    uint64_t n_prompts     = 0; // prompts long enough for a switch

    phase_histogram enter;
    phase_histogram leave;

    std::string  failure;        // why the context is unusable, or empty
    std::string  last_direction; // "enter", "leave" or empty
    phase_report last;           // the last transaction
    phase_report last_enter;     // the last way in
    std::string  last_failure;   // the last roll back, in words

    double enter_ms_last = 0.0;
    double leave_ms_last = 0.0;

    std::vector<phase_device_memory> decode_memory;  // read after the last leave, or after creation
    std::vector<phase_device_memory> prefill_memory; // read after the last enter

    phase_kv_mode                            kv_mode = PHASE_KV_DEVICE;
    bool                                     fast_select = false; // filled by the snapshot
    std::vector<std::vector<kv_layer_stats>> kv; // one per member, when LLAMA_PHASE_KV is set; filled by the snapshot
    draft_stats draft; // filled by the snapshot

    std::vector<phase_graph_stats> graphs; // one per member; filled by the snapshot

    std::vector<expert_stats> experts; // one per member that has experts in host memory; filled by the snapshot
};

// compute buffers of all devices
size_t phase_total_bytes(const std::vector<phase_device_memory> & memory);

// monotonic; the clock of all times here
double phase_now_ms();

std::string phase_stats_json(const phase_stats & stats, double now_ms);
std::string phase_stats_prometheus(const phase_stats & stats);

const char * phase_outcome_name(phase_outcome outcome);
