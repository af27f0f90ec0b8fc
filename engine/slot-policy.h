#pragma once

// Which expert sits in which slot: pure LRU over one block of 32-bit words, laid out as expert-op.h draws it. The CPU operator and
// the tests run this code; the CUDA kernel implements the same policy.

#include "expert-op.h"

#include <cstdint>
#include <vector>

struct slot_policy {
    int32_t n_expert;
    int32_t n_slots;

    int32_t * seen;      // [n_expert]
    int32_t * slot_of;   // [n_expert]
    int32_t * expert_of; // [n_slots]
    int32_t * stamp;     // [n_slots]
    int32_t * clock;
    int32_t * n_jobs;
    int32_t * jobs;      // [2*PHASE_MAX_IDS], (expert, slot) pairs

    // a view of phase_state_words(n_expert, n_slots) words; nothing is written
    slot_policy(int32_t * words, int32_t n_expert, int32_t n_slots);

    // no expert resident, clock and seen 0
    void clear();

    // Looks up n_ids experts (ids[i] in 0 .. n_expert-1, repeats allowed, at most n_slots distinct ones, n_ids <= PHASE_MAX_IDS),
    // makes room for the missing ones and writes the slot of each into `slots`. What has to be copied is in `jobs` afterwards.
    void fetch(const int32_t * ids, int32_t n_ids, int32_t * slots, phase_op_counters & counters);

    // Puts `experts`, the least recently used first, into slots 0, 1, ... of a cleared state; at most n_slots of them.
    // The caller copies their weights.
    void fill(const std::vector<int32_t> & experts);

    // resident experts, the least recently used first
    std::vector<int32_t> resident() const;
};
