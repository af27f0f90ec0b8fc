#include "phase-stats.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>

using json = nlohmann::ordered_json;

void phase_histogram::add(double seconds) {
    ++count;
    sum += seconds;
    for (size_t i = 0; i < PHASE_SWAP_BUCKETS.size(); ++i) {
        if (seconds <= PHASE_SWAP_BUCKETS[i]) {
            ++counts[i];
            return;
        }
    }
}

double phase_now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const char * phase_outcome_name(phase_outcome outcome) {
    switch (outcome) {
        case PHASE_COMMITTED:   return "committed";
        case PHASE_ROLLED_BACK: return "rolled back";
        case PHASE_BROKEN:      return "broken";
    }
    return "?";
}

static json memory_json(const std::vector<phase_device_memory> & memory) {
    json list = json::array();
    for (const auto & device : memory) {
        json entry = { { "device", device.name }, { "compute_buffer_bytes", device.buffer_bytes } };
        if (device.free_bytes) {
            entry["free_bytes"] = device.free_bytes;
        }
        list.push_back(std::move(entry));
    }
    return list;
}

size_t phase_total_bytes(const std::vector<phase_device_memory> & memory) {
    size_t sum = 0;
    for (const auto & device : memory) {
        sum += device.buffer_bytes;
    }
    return sum;
}

static phase_op_counters total(const expert_stats & experts, phase_op_counters expert_layer_stats::*which) {
    phase_op_counters sum = {};
    for (const auto & layer : experts.layers) {
        sum.looked_up += (layer.*which).looked_up;
        sum.missed    += (layer.*which).missed;
        sum.evicted   += (layer.*which).evicted;
        sum.runs      += (layer.*which).runs;
    }
    return sum;
}

static uint64_t copied_bytes(const expert_stats & experts, phase_op_counters expert_layer_stats::*which) {
    uint64_t sum = 0;
    for (const auto & layer : experts.layers) {
        sum += (layer.*which).missed*layer.expert_bytes;
    }
    return sum;
}

static json experts_json(const expert_stats & experts) {
    const auto counters = [](const phase_op_counters & c, uint64_t bytes) {
        return json { { "looked_up", c.looked_up }, { "hit", c.looked_up - std::min(c.missed, c.looked_up) }, { "missed", c.missed },
                { "evicted", c.evicted }, { "runs", c.runs }, { "copied_bytes", bytes } };
    };
    json result = {
        { "slots_per_layer", experts.n_slots },
        { "slot_bytes",      experts.slot_bytes },
        { "ring_regions",    experts.n_regions },
        { "ring_bytes",      experts.ring_bytes },
        { "pinned_bytes",    experts.pinned_bytes },
        { "graph_replays",   experts.graph_replays },
        { "slots",           counters(total(experts, &expert_layer_stats::slots), copied_bytes(experts, &expert_layer_stats::slots)) },
    };
    const auto prefetch = total(experts, &expert_layer_stats::prefetch);
    result["prefetch"] = { { "predicted", prefetch.looked_up }, { "copied", prefetch.missed }, { "copied_bytes", copied_bytes(experts, &expert_layer_stats::prefetch) } };
    const auto filled = total(experts, &expert_layer_stats::filled);
    result["refill"] = { { "copied", filled.missed }, { "copied_bytes", copied_bytes(experts, &expert_layer_stats::filled) },
            { "wanted_bytes", experts.fill.wanted_bytes }, { "left_bytes", experts.fill.left_bytes }, { "batches", experts.fill.n_batches } };
    const auto ring = total(experts, &expert_layer_stats::ring);
    const auto & times = experts.ring_times;
    result["ring"] = { { "layers_streamed", ring.runs }, { "copied_bytes", copied_bytes(experts, &expert_layer_stats::ring) },
            { "copy_ms", times.copy_us/1000.0 }, { "exposed_ms", times.exposed_us/1000.0 } };
    if (times.copy_us > 0) { // waits for what the copies themselves wait for can make it a little negative
        result["ring"]["overlap"] = 1.0 - (double) times.exposed_us/times.copy_us;
    }

    json layers = json::array();
    for (const auto & layer : experts.layers) {
        json entry = { { "layer", layer.il }, { "device", layer.device } };
        entry.update(counters(layer.slots, layer.slots.missed*layer.expert_bytes));
        entry["prefetched"] = layer.prefetch.missed;
        layers.push_back(std::move(entry));
    }
    result["layers"] = std::move(layers);
    const auto reasons = [](const std::vector<std::pair<int, std::string>> & of) {
        json list = json::array();
        for (const auto & [il, reason] : of) {
            list.push_back({ { "layer", il }, { "reason", reason } });
        }
        return list;
    };
    result["stock_layers"]  = reasons(experts.unusable);
    result["staged_layers"] = reasons(experts.staged);
    result["copied_layers"] = reasons(experts.copied);
    if (!experts.note.empty()) {
        result["note"] = experts.note;
    }
    return result;
}

static uint64_t kv_bytes(const std::vector<kv_layer_stats> & layers, bool host) {
    uint64_t sum = 0;
    for (const auto & layer : layers) {
        sum += layer.host == host ? layer.bytes : 0;
    }
    return sum;
}

static json kv_json(const phase_stats & stats) {
    static const char * const MODES[] = { "device", "host", "auto", "host-all" };

    json contexts = json::array();
    for (const auto & member : stats.kv) {
        json layers = json::array();
        for (const auto & layer : member) {
            json entry = { { "layer", layer.il }, { "device", layer.device }, { "place", layer.host ? "host" : "device" }, { "bytes", layer.bytes } };
            if (layer.rows > 0) {
                entry["rows"] = { { "kept", layer.rows }, { "looked_up", layer.looked_up }, { "missed", layer.missed } };
            }
            if (!layer.reason.empty()) {
                entry["reason"] = layer.reason;
            }
            layers.push_back(std::move(entry));
        }
        contexts.push_back({ { "host_bytes", kv_bytes(member, true) }, { "device_bytes", kv_bytes(member, false) }, { "layers", std::move(layers) } });
    }
    return { { "asked", MODES[stats.kv_mode] }, { "select", stats.fast_select ? "fast" : "stock" }, { "contexts", std::move(contexts) } };
}

static json draft_json(const draft_stats & draft) {
    const auto times = [](const std::map<int32_t, draft_cost::entry> & entries) {
        json list = json::object();
        for (const auto & [size, entry] : entries) {
            list[std::to_string(size)] = { { "ms", entry.ms }, { "samples", entry.n } };
        }
        return list;
    };
    json depths = json::object();
    for (const auto & [seq, depth] : draft.depths) {
        depths[std::to_string(seq)] = depth;
    }
    return {
        { "length",     "auto" },
        { "max_batch",  draft.max_batch },
        { "rounds",     draft.rounds },
        { "changes",    draft.n_changes },
        { "probes",     draft.n_probes },
        { "drafted",    draft.n_drafted },
        { "accepted",   draft.n_accepted },
        { "acceptance", draft.acceptance },
        { "slots",      std::move(depths) },
        { "verify_ms",  times(draft.verify_ms) },
        { "draft_ms",   times(draft.draft_ms) },
    };
}

static json steps_json(const phase_report & report) {
    json steps = json::array();
    for (const auto & step : report.steps) {
        steps.push_back({ { "step", step.name }, { "ms", step.ms }, { "bytes", step.bytes }, { "ok", step.ok } });
    }
    return steps;
}

static json candidates_json(const std::vector<phase_ubatch_candidate> & candidates) {
    json list = json::array();
    for (const auto & candidate : candidates) {
        json devices = json::array();
        for (const auto & need : candidate.devices) {
            json entry = { { "device", need.device }, { "compute_buffer_bytes", need.compute_bytes }, { "ring_bytes", need.ring_bytes },
                    { "pool_bytes", need.pool_bytes }, { "short_bytes", need.short_bytes() } };
            if (need.free_bytes != SIZE_MAX) {
                entry["free_bytes"] = need.free_bytes;
            }
            if (need.budget_bytes != SIZE_MAX) {
                entry["budget_bytes"] = need.budget_bytes;
            }
            devices.push_back(std::move(entry));
        }
        json entry = { { "ubatch", candidate.ubatch }, { "fits", candidate.fits() }, { "devices", std::move(devices) } };
        if (!candidate.failure.empty()) {
            entry["reason"] = candidate.failure;
        }
        list.push_back(std::move(entry));
    }
    return list;
}

std::string phase_stats_json(const phase_stats & stats, double now_ms) {
    static const char * const MODES[] = { "off", "transaction", "bypass" };

    json result = { { "mode", MODES[stats.mode] } };
    result["phase"] = stats.prefill ? "prefill" : "decode";
    if (!stats.experts.empty()) {
        json list = json::array();
        for (const auto & experts : stats.experts) {
            list.push_back(experts_json(experts));
        }
        result["experts"] = std::move(list);
    }
    if (!stats.candidates.empty()) {
        result["candidates"] = candidates_json(stats.candidates);
    }
    if (stats.kv_mode != PHASE_KV_DEVICE) {
        result["kv"] = kv_json(stats);
    }
    if (stats.draft.active) {
        result["draft"] = draft_json(stats.draft);
    }
    if (!stats.graphs.empty()) {
        json list = json::array();
        for (const auto & graphs : stats.graphs) {
            list.push_back({ { "batches", graphs.n_batches }, { "reused", graphs.n_reused }, { "kept", graphs.n_kept }, { "made", graphs.n_made },
                    { "bytes", graphs.bytes } });
        }
        result["graphs"] = std::move(list);
    }
    if (stats.mode == PHASE_MODE_OFF) {
        return result.dump();
    }
    result["since_ms"] = now_ms - stats.since_ms;
    result["events"]   = stats.hooked ? "explicit" : "batch size";
    result["contexts"] = stats.n_members;
    result["ubatch"]   = {
        { "now",     stats.prefill ? stats.ubatch_prefill : stats.ubatch_decode },
        { "decode",  stats.ubatch_decode },
        { "prefill", stats.ubatch_prefill },
    };
    result["min_tokens"] = stats.min_tokens;
    result["counters"]   = {
        { "entered",     stats.n_entered },
        { "left",        stats.n_left },
        { "rolled_back", stats.n_rolled_back },
        { "failed",      stats.n_failed },
        { "prompts",     stats.n_prompts },
        { "short",       stats.n_short },
        { "blocked",     stats.n_blocked },
        { "aborted",     stats.n_aborted },
    };
    result["memory"] = {
        { "decode",  memory_json(stats.decode_memory) },
        { "prefill", memory_json(stats.prefill_memory) },
    };
    result["last_enter_ms"] = stats.enter_ms_last;
    result["last_leave_ms"] = stats.leave_ms_last;
    if (!stats.last_direction.empty()) {
        result["last_transaction"] = {
            { "direction", stats.last_direction },
            { "outcome",   phase_outcome_name(stats.last.outcome) },
            { "ms",        stats.last.ms },
            { "steps",     steps_json(stats.last) },
        };
        result["last_enter_steps"] = steps_json(stats.last_enter);
        if (!stats.last.failed_step.empty()) {
            result["last_transaction"]["failed_step"] = stats.last.failed_step;
            result["last_transaction"]["reason"]      = stats.last.reason;
        }
    }
    if (!stats.last_failure.empty()) {
        result["last_failure"] = stats.last_failure;
    }
    if (!stats.failure.empty()) {
        result["failure"] = stats.failure;
    }
    return result.dump();
}

namespace {

struct prometheus_text {
    std::string out;

    void family(const char * name, const char * type, const char * help) {
        out += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
    }

    void sample(const std::string & name, double value) {
        char number[48];
        std::snprintf(number, sizeof(number), " %.10g\n", value);
        out += name + number;
    }

    void one(const char * name, const char * type, const char * help, double value) {
        family(name, type, help);
        sample(name, value);
    }

    void histogram(const std::string & name, const std::string & label, const phase_histogram & h) {
        uint64_t cumulative = 0;
        for (size_t i = 0; i < PHASE_SWAP_BUCKETS.size(); ++i) {
            cumulative += h.counts[i];
            char bound[32];
            std::snprintf(bound, sizeof(bound), "%g", PHASE_SWAP_BUCKETS[i]);
            sample(name + "_bucket{" + label + ",le=\"" + bound + "\"}", (double) cumulative);
        }
        sample(name + "_bucket{" + label + ",le=\"+Inf\"}", (double) h.count);
        sample(name + "_sum{" + label + "}", h.sum);
        sample(name + "_count{" + label + "}", (double) h.count);
    }
};

} // namespace

static void experts_prometheus(prometheus_text & text, const std::vector<expert_stats> & members) {
    if (members.empty()) {
        return;
    }
    phase_op_counters sum = {};
    uint64_t copied = 0, prefetched = 0, filled = 0, left = 0, streamed = 0, slots = 0, slot_bytes = 0, ring_bytes = 0, pinned_bytes = 0;
    phase_ring_times times;
    for (const auto & experts : members) {
        const auto c = total(experts, &expert_layer_stats::slots);
        sum.looked_up += c.looked_up;
        sum.missed    += c.missed;
        sum.evicted   += c.evicted;
        copied     += copied_bytes(experts, &expert_layer_stats::slots);
        prefetched += copied_bytes(experts, &expert_layer_stats::prefetch);
        filled     += copied_bytes(experts, &expert_layer_stats::filled);
        left       += experts.fill.left_bytes;
        streamed   += copied_bytes(experts, &expert_layer_stats::ring);
        for (const auto & layer : experts.layers) {
            slots += layer.n_slots;
        }
        slot_bytes   += experts.slot_bytes;
        pinned_bytes += experts.pinned_bytes;
        times.copy_us    += experts.ring_times.copy_us;
        times.exposed_us += experts.ring_times.exposed_us;
        ring_bytes += experts.ring_bytes;
    }
    text.one("llama_phase_expert_lookups_total",      "counter", "Experts looked up in the slots.",                 (double) sum.looked_up);
    text.one("llama_phase_expert_misses_total",       "counter", "Experts that a lookup had to copy.",              (double) sum.missed);
    text.one("llama_phase_expert_evictions_total",    "counter", "Of those, copied over another expert.",           (double) sum.evicted);
    text.one("llama_phase_expert_copied_bytes_total", "counter", "Bytes copied into slots.",                        (double) copied);
    text.one("llama_phase_prefetched_bytes_total",    "counter", "Bytes copied into slots ahead of a lookup.",       (double) prefetched);
    text.one("llama_phase_refilled_bytes_total",      "counter", "Bytes copied into empty slots behind prompts.",   (double) filled);
    text.one("llama_phase_refill_left_bytes",         "gauge",   "Bytes of experts that wait for an empty slot.",   (double) left);
    text.one("llama_phase_streamed_bytes_total",      "counter", "Bytes streamed through the ring.",                (double) streamed);
    text.one("llama_phase_stream_copy_seconds_total",    "counter", "Time in which layers were copied into the ring.", times.copy_us/1e6);
    text.one("llama_phase_stream_exposed_seconds_total", "counter", "Of that, time in which nothing was computed.",    times.exposed_us/1e6);
    text.one("llama_phase_slots",                     "gauge",   "Slots of all layers.",                            (double) slots);
    text.one("llama_phase_slot_bytes",                "gauge",   "Device memory of the slots.",                     (double) slot_bytes);
    text.one("llama_phase_ring_bytes",                "gauge",   "Device memory of the ring.",                      (double) ring_bytes);
    text.one("llama_phase_pinned_bytes",              "gauge",   "Host memory of experts that devices read in place.", (double) pinned_bytes);
    text.one("llama_phase_graph_replays_total",       "counter", "CUDA graphs launched.",                           (double) members[0].graph_replays);

    // families of their own: sums over one that holds its own total count everything twice
    const auto by_layer = [&](const char * name, const char * help, uint64_t phase_op_counters::*counter) {
        text.family(name, "counter", help);
        for (size_t i = 0; i < members.size(); ++i) {
            for (const auto & layer : members[i].layers) {
                text.sample(std::string(name) + "{context=\"" + std::to_string(i) + "\",layer=\"" + std::to_string(layer.il) + "\"}", (double) (layer.slots.*counter));
            }
        }
    };
    by_layer("llama_phase_layer_expert_lookups_total", "Experts looked up in a layer's slots; context 0 is the target, 1 its draft.", &phase_op_counters::looked_up);
    by_layer("llama_phase_layer_expert_misses_total",  "Of those, experts that had to be copied.",                                    &phase_op_counters::missed);
}

static void draft_prometheus(prometheus_text & text, const draft_stats & draft) {
    if (!draft.active) {
        return;
    }
    text.family("llama_phase_draft_rounds_total", "counter", "Rounds of generation by the draft length chosen for a slot.");
    for (size_t depth = 0; depth < draft.rounds.size(); ++depth) {
        text.sample("llama_phase_draft_rounds_total{length=\"" + std::to_string(depth) + "\"}", (double) draft.rounds[depth]);
    }
    text.one("llama_phase_draft_changes_total",  "counter", "Changes of a slot's draft length.",              (double) draft.n_changes);
    text.one("llama_phase_draft_probes_total",   "counter", "Other lengths tried for a few rounds.",          (double) draft.n_probes);
    text.one("llama_phase_draft_tokens_total",   "counter", "Tokens drafted.",                                (double) draft.n_drafted);
    text.one("llama_phase_draft_accepted_total", "counter", "Of those, accepted.",                            (double) draft.n_accepted);
}

std::string phase_stats_prometheus(const phase_stats & stats) {
    prometheus_text text;
    experts_prometheus(text, stats.experts);
    if (stats.kv_mode != PHASE_KV_DEVICE) {
        text.family("llama_phase_kv_bytes", "gauge", "Attention K/V by place; indexer keys and recurrent state are not in it.");
        for (const bool host : { false, true }) {
            uint64_t sum = 0;
            for (const auto & member : stats.kv) {
                sum += kv_bytes(member, host);
            }
            text.sample(host ? "llama_phase_kv_bytes{place=\"host\"}" : "llama_phase_kv_bytes{place=\"device\"}", (double) sum);
        }
        uint64_t looked_up = 0, missed = 0, kept = 0;
        for (const auto & member : stats.kv) {
            for (const auto & layer : member) {
                looked_up += layer.looked_up;
                missed    += layer.missed;
                kept      += layer.rows;
            }
        }
        text.one("llama_phase_kv_rows",              "gauge",   "Positions of K/V in host memory that devices keep as well, over all layers.", (double) kept);
        text.one("llama_phase_kv_rows_looked_up_total", "counter", "Positions that attention read of layers with such rows.",                 (double) looked_up);
        text.one("llama_phase_kv_rows_missed_total", "counter", "Of those, copied from host memory first.",                                   (double) missed);
    }
    draft_prometheus(text, stats.draft);
    if (stats.mode == PHASE_MODE_OFF) {
        return text.out;
    }
    text.one("llama_phase_prefill", "gauge", "1 while the context is in the prefill phase.", stats.prefill ? 1 : 0);
    text.one("llama_phase_unusable", "gauge", "1 once the decode buffers could not be had back.", stats.failure.empty() ? 0 : 1);
    text.one("llama_phase_entered_total",     "counter", "Transactions that reached the prefill phase.",                 (double) stats.n_entered);
    text.one("llama_phase_left_total",        "counter", "Transactions that came back to the decode phase.",             (double) stats.n_left);
    text.one("llama_phase_rolled_back_total", "counter", "Transactions rolled back; the prompt ran in the decode phase.", (double) stats.n_rolled_back);
    text.one("llama_phase_failed_total",      "counter", "Transactions that left the context unusable.",                  (double) stats.n_failed);
    text.one("llama_phase_prompts_total",     "counter", "Prompts long enough for a switch.",                            (double) stats.n_prompts);
    text.one("llama_phase_short_total",       "counter", "Prompts under the threshold.",                                 (double) stats.n_short);
    text.one("llama_phase_blocked_total",     "counter", "Prompts not tried after repeated failures.",                   (double) stats.n_blocked);
    text.one("llama_phase_aborted_total",     "counter", "Long prompts that ended before their first token.",            (double) stats.n_aborted);

    text.family("llama_phase_compute_buffer_bytes", "gauge", "Compute buffers of each phase; only one phase's are held at a time.");
    text.sample("llama_phase_compute_buffer_bytes{phase=\"decode\"}",  (double) phase_total_bytes(stats.decode_memory));
    text.sample("llama_phase_compute_buffer_bytes{phase=\"prefill\"}", (double) phase_total_bytes(stats.prefill_memory));

    text.family("llama_phase_swap_seconds", "histogram", "Duration of a transaction.");
    text.histogram("llama_phase_swap_seconds", "direction=\"enter\"", stats.enter);
    text.histogram("llama_phase_swap_seconds", "direction=\"leave\"", stats.leave);
    return text.out;
}
