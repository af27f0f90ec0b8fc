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

    // No expert resident, seen 0. `now`: where the clock starts, so that stamps up to it are older than those of any fetch.
    void clear(int32_t now = 0);

    // Looks up n_ids experts (ids[i] in 0 .. n_expert-1, repeats allowed, at most n_slots distinct ones, n_ids <= PHASE_MAX_IDS),
    // makes room for the missing ones and writes the slot of each into `slots`. What has to be copied is in `jobs` afterwards.
    void fetch(const int32_t * ids, int32_t n_ids, int32_t * slots, phase_op_counters & counters);

    // Puts those of n distinct experts (at most PHASE_MAX_IDS) that are not resident into empty slots, the first ones into the lowest, until
    // none is empty: nothing is evicted. experts[i] gets the stamp newest - i. What has to be copied is in `jobs` afterwards.
    void fill(const int32_t * experts, int32_t n, int32_t newest, phase_op_counters & counters);

    // resident experts, the least recently used first
    std::vector<int32_t> resident() const;
};
