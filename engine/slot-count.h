#pragma once

// How many slots per layer a context gets at start. Pure.

#include <cstdint>
#include <string>

struct slot_bounds {
    int32_t     needed; // the fewest that are safe: experts per token x LLAMA_PHASE_EXPERT_BATCH, at most all experts
    int32_t     all;    // experts of a layer
    int32_t     fits;   // on every device
    std::string room;   // what the tightest device has room for, in words
};

struct slot_count {
    int32_t     n = 0;
    std::string why_not_all; // of a draft; empty: all, or a target
};

// What the settings of phase_config choose. A target has `expert_slots`; a draft `draft_slots`, and with auto (-1) a slot for each expert
// if those fit, else `expert_slots`. `expert_slots` auto: what fits.
// Throws std::runtime_error when too few are asked for (naming the number needed) or too many (naming what fits).
slot_count choose_slots(const slot_bounds & bounds, int32_t expert_slots, int32_t draft_slots, bool draft, uint32_t expert_batch);
