// phase-stats: /phase is JSON that says what the counters say, /metrics is the text format of Prometheus.

#include "check.h"

#include "phase-stats.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

using json = nlohmann::json;

namespace {

phase_stats example() {
    phase_stats s;
    s.mode           = PHASE_MODE_TRANSACTION;
    s.since_ms       = 100.0;
    s.n_members      = 2;
    s.ubatch_decode  = 512;
    s.ubatch_prefill = 2048;
    s.min_tokens     = 1024;
    s.n_entered = 1; s.n_left = 2; s.n_rolled_back = 3; s.n_failed = 4; s.n_short = 5; s.n_blocked = 6; s.n_aborted = 7; s.n_prompts = 8;
    s.decode_memory  = { { "CPU", 1000, 0 }, { "GPU0", 50, 77 } };
    s.prefill_memory = { { "CPU", 4000, 0 } };

    expert_stats target;
    target.pinned_bytes = 640; target.slot_bytes = 64; target.n_slots = 4; target.n_regions = 3; target.ring_bytes = 96; target.graph_replays = 12;
    target.layers.push_back({ 0, "GPU0", 4, { 40, 10, 6, 5 }, { 700, 32, 0, 1 }, 16 });
    target.layers.push_back({ 3, "CPU", 4, { 20, 5, 1, 5 }, { 0, 0, 0, 0 }, 8, { 30, 12, 3, 6 }, { 9, 7, 0, 2 } });
    target.fill = { 72, 16, 2 };
    target.ring_times = { 4000, 1000 };
    target.staged.emplace_back(1, "no memory that may be locked");
    target.unusable.emplace_back(2, "a \"quoted\"\nreason \\ with \x01 bytes");
    target.note = "fewer";
    expert_stats draft;
    draft.pinned_bytes = 7; draft.slot_bytes = 1; draft.ring_bytes = 2; draft.n_slots = 4; // from a file of its own
    draft.layers.push_back({ 8, "CPU", 4, { 4, 4, 0, 1 }, {}, 100 });
    s.experts = { target, draft };
    return s;
}

// without the suffixes that a histogram's samples have
std::string family_of(std::string name) {
    for (const std::string suffix : { "_bucket", "_sum", "_count" }) {
        if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
            name.resize(name.size() - suffix.size());
        }
    }
    return name;
}

// name{labels} -> value; every sample needs the HELP and TYPE of its family before it, every line a form
std::map<std::string, double> samples(const std::string & text) {
    std::map<std::string, double> out;
    std::map<std::string, std::set<std::string>> comments; // "HELP" and "TYPE" -> families
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        std::string first, second, third, more;
        words >> first >> second >> third;
        if (first == "#") {
            CHECK(words >> more || second == "TYPE");
            CHECK(comments[second].insert(third).second);
            continue;
        }
        const auto brace  = first.find('{');
        const auto family = family_of(first.substr(0, brace));
        CHECK(brace == std::string::npos || first.back() == '}');
        CHECK(comments["HELP"].count(family) && comments["TYPE"].count(family));
        char * end = nullptr;
        const double value = std::strtod(second.c_str(), &end);
        CHECK(third.empty() && !second.empty() && *end == 0);
        CHECK(out.emplace(first, value).second);
    }
    CHECK_EQ(comments.size(), out.empty() ? 0u : 2u);
    return out;
}

} // namespace

TEST(off) {
    const auto parsed = json::parse(phase_stats_json(phase_stats(), 0.0));
    CHECK_EQ(parsed, (json { { "mode", "off" }, { "phase", "decode" } }));
    CHECK_EQ(phase_stats_prometheus(phase_stats()), "");
}

// slots without transactions
TEST(off_with_experts) {
    auto stats = example();
    stats.mode = PHASE_MODE_OFF;
    const auto parsed = json::parse(phase_stats_json(stats, 0.0));
    CHECK_EQ(parsed.size(), 3u);
    CHECK_EQ(parsed["experts"].size(), 2u);
    const auto text = samples(phase_stats_prometheus(stats));
    CHECK_EQ(text.count("llama_phase_expert_lookups_total"), 1u);
    CHECK_EQ(text.count("llama_phase_entered_total"), 0u);
}

TEST(json_parses_back) {
    auto stats = example();
    stats.prefill        = true;
    stats.hooked         = true;
    stats.last_direction = "enter";
    stats.last.outcome   = PHASE_ROLLED_BACK;
    stats.last.failed_step = "enter.free_slots";
    stats.last.reason      = "why \"so\"";
    stats.last.steps       = { { "enter.quiesce", 1.5, 0, true }, { "enter.free_slots", 0.5, -7, false } };
    stats.last_enter.steps = { { "enter.quiesce", 1.5, 0, true } };
    stats.last_failure     = "words";
    stats.failure          = "all over";
    const auto p = json::parse(phase_stats_json(stats, 350.0));

    CHECK_EQ(p["mode"], "transaction");
    CHECK_EQ(p["phase"], "prefill");
    CHECK_EQ(p["since_ms"], 250.0);
    CHECK_EQ(p["events"], "explicit");
    CHECK_EQ(p["contexts"], 2);
    CHECK_EQ(p["ubatch"], (json { { "now", 2048 }, { "decode", 512 }, { "prefill", 2048 } }));
    CHECK_EQ(p["min_tokens"], 1024);
    CHECK_EQ(p["counters"], (json { { "entered", 1 }, { "left", 2 }, { "rolled_back", 3 }, { "failed", 4 }, { "short", 5 }, { "blocked", 6 },
                { "aborted", 7 }, { "prompts", 8 } }));
    CHECK_EQ(p["memory"]["decode"], (json::array({ { { "device", "CPU" }, { "compute_buffer_bytes", 1000 } },
                { { "device", "GPU0" }, { "compute_buffer_bytes", 50 }, { "free_bytes", 77 } } })));
    CHECK_EQ(p["last_transaction"]["outcome"], "rolled back");
    CHECK_EQ(p["last_transaction"]["failed_step"], "enter.free_slots");
    CHECK_EQ(p["last_transaction"]["reason"], "why \"so\"");
    CHECK_EQ(p["last_transaction"]["steps"][1], (json { { "step", "enter.free_slots" }, { "ms", 0.5 }, { "bytes", -7 }, { "ok", false } }));
    CHECK_EQ(p["last_enter_steps"].size(), 1u);
    CHECK_EQ(p["last_failure"], "words");
    CHECK_EQ(p["failure"], "all over");

    stats.prefill = false;
    CHECK_EQ(json::parse(phase_stats_json(stats, 0.0))["ubatch"]["now"], 512);
}

TEST(experts_add_up) {
    const auto experts = json::parse(phase_stats_json(example(), 0.0))["experts"];
    REQUIRE(experts.size() == 2);
    const auto & target = experts[0];
    CHECK_EQ(target["slots"], (json { { "looked_up", 60 }, { "hit", 45 }, { "missed", 15 }, { "evicted", 7 }, { "runs", 10 },
                { "copied_bytes", 10*16 + 5*8 } }));
    CHECK_EQ(target["prefetch"], (json { { "predicted", 30 }, { "copied", 12 }, { "copied_bytes", 12*8 } }));
    CHECK_EQ(target["refill"], (json { { "copied", 7 }, { "copied_bytes", 7*8 }, { "wanted_bytes", 72 }, { "left_bytes", 16 }, { "batches", 2 } }));
    CHECK_EQ(target["ring"], (json { { "layers_streamed", 1 }, { "copied_bytes", 32*16 }, { "copy_ms", 4.0 }, { "exposed_ms", 1.0 }, { "overlap", 0.75 } }));
    REQUIRE(target["layers"].size() == 2);
    CHECK_EQ(target["layers"][1]["layer"], 3);
    CHECK_EQ(target["layers"][1]["copied_bytes"], 40);
    CHECK_EQ(target["staged_layers"][0]["layer"], 1);
    CHECK_EQ(target["stock_layers"][0]["layer"], 2);
    CHECK_EQ(target["stock_layers"][0]["reason"], "a \"quoted\"\nreason \\ with \x01 bytes");
    CHECK_EQ(target["note"], "fewer");
    CHECK_EQ(target["slots_per_layer"], 4);
    CHECK_EQ(target["ring_regions"], 3);
    CHECK(!experts[1].contains("note"));
    for (const auto & member : experts) {
        uint64_t looked_up = 0, missed = 0, copied = 0;
        for (const auto & layer : member["layers"]) {
            CHECK_EQ(layer["hit"].get<uint64_t>() + layer["missed"].get<uint64_t>(), layer["looked_up"].get<uint64_t>());
            looked_up += layer["looked_up"].get<uint64_t>();
            missed    += layer["missed"].get<uint64_t>();
            copied    += layer["copied_bytes"].get<uint64_t>();
        }
        CHECK_EQ(member["slots"]["looked_up"], looked_up);
        CHECK_EQ(member["slots"]["missed"], missed);
        CHECK_EQ(member["slots"]["copied_bytes"], copied);
    }
}

TEST(prometheus_sums_the_members) {
    const auto text = samples(phase_stats_prometheus(example()));
    CHECK_EQ(text.at("llama_phase_expert_lookups_total"), 64);
    CHECK_EQ(text.at("llama_phase_expert_misses_total"), 19);
    CHECK_EQ(text.at("llama_phase_expert_evictions_total"), 7);
    CHECK_EQ(text.at("llama_phase_expert_copied_bytes_total"), 600);
    CHECK_EQ(text.at("llama_phase_refilled_bytes_total"), 56);
    CHECK_EQ(text.at("llama_phase_refill_left_bytes"), 16);
    CHECK_EQ(text.at("llama_phase_streamed_bytes_total"), 512);
    CHECK_EQ(text.at("llama_phase_slot_bytes"), 65);
    CHECK_EQ(text.at("llama_phase_ring_bytes"), 98);
    CHECK_EQ(text.at("llama_phase_pinned_bytes"), 647);
    CHECK_EQ(text.at("llama_phase_graph_replays_total"), 12); // of the process
    CHECK_EQ(text.at("llama_phase_slots"), 12);
    CHECK_EQ(text.at("llama_phase_layer_expert_lookups_total{context=\"0\",layer=\"3\"}"), 20);
    CHECK_EQ(text.at("llama_phase_layer_expert_misses_total{context=\"0\",layer=\"0\"}"), 10);
    CHECK_EQ(text.at("llama_phase_layer_expert_misses_total{context=\"1\",layer=\"8\"}"), 4);
    for (const std::string counter : { "lookups", "misses" }) {
        double sum = 0;
        for (const auto & [name, value] : text) {
            sum += name.rfind("llama_phase_layer_expert_" + counter, 0) == 0 ? value : 0;
        }
        CHECK_EQ(sum, text.at("llama_phase_expert_" + counter + "_total"));
    }
    CHECK_EQ(text.at("llama_phase_prompts_total"), 8);
    CHECK_EQ(text.at("llama_phase_unusable"), 0);
    CHECK_EQ(text.at("llama_phase_compute_buffer_bytes{phase=\"decode\"}"), 1050);
    CHECK_EQ(text.at("llama_phase_compute_buffer_bytes{phase=\"prefill\"}"), 4000);
}

TEST(large_counters_keep_their_digits) {
    auto stats = example();
    stats.n_entered = 9999999999;
    CHECK_EQ(samples(phase_stats_prometheus(stats)).at("llama_phase_entered_total"), 9999999999.0);
    stats.experts[0].layers[0].slots.missed = uint64_t(1) << 40;
    CHECK_EQ(json::parse(phase_stats_json(stats, 0.0))["experts"][0]["layers"][0]["copied_bytes"], uint64_t(1) << 44);
}

TEST(histogram_is_cumulative) {
    auto stats = example();
    std::mt19937 rng(1);
    std::vector<double> all;
    for (int i = 0; i < 500; ++i) {
        all.push_back((rng() % 12000)/1000.0 / (1 << rng() % 12));
    }
    all.insert(all.end(), PHASE_SWAP_BUCKETS.begin(), PHASE_SWAP_BUCKETS.end()); // a bound belongs to its bucket
    double sum = 0;
    for (const double seconds : all) {
        stats.enter.add(seconds);
        sum += seconds;
    }
    const auto text = samples(phase_stats_prometheus(stats));
    double last = 0;
    for (const double bound : PHASE_SWAP_BUCKETS) {
        char label[32];
        std::snprintf(label, sizeof(label), "%g", bound);
        const double n = text.at(std::string("llama_phase_swap_seconds_bucket{direction=\"enter\",le=\"") + label + "\"}");
        CHECK_EQ(n, (double) std::count_if(all.begin(), all.end(), [&](double s) { return s <= bound; }));
        CHECK(n >= last);
        last = n;
    }
    const double total = text.at("llama_phase_swap_seconds_bucket{direction=\"enter\",le=\"+Inf\"}");
    CHECK(total > last);
    CHECK_EQ(total, (double) all.size());
    CHECK_EQ(text.at("llama_phase_swap_seconds_count{direction=\"enter\"}"), total);
    CHECK(std::abs(text.at("llama_phase_swap_seconds_sum{direction=\"enter\"}") - sum) < 1e-4);
    CHECK_EQ(text.at("llama_phase_swap_seconds_count{direction=\"leave\"}"), 0);
}

TEST(outcomes_have_names) {
    std::set<std::string> names;
    for (const auto outcome : { PHASE_COMMITTED, PHASE_ROLLED_BACK, PHASE_BROKEN }) {
        names.insert(phase_outcome_name(outcome));
    }
    CHECK_EQ(names.size(), 3u);
    CHECK(!names.count("?"));
}

TEST_MAIN("test-phase-stats")
