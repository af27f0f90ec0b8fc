#include "slot-policy.h"

#include <algorithm>
#include <cstring>
#include <limits>

slot_policy::slot_policy(int32_t * words, int32_t n_expert, int32_t n_slots) :
        n_expert (n_expert),
        n_slots  (n_slots),
        seen     (words),
        slot_of  (seen + n_expert),
        expert_of(slot_of + n_expert),
        stamp    (expert_of + n_slots),
        clock    (stamp + n_slots),
        n_jobs   (clock + 1),
        jobs     (n_jobs + 1) {
}

void slot_policy::clear(int32_t now) {
    std::fill_n(slot_of,   n_expert, -1);
    std::fill_n(expert_of, n_slots,  -1);
    std::fill_n(stamp,     n_slots,   0);
    std::fill_n(seen,      n_expert,  0);
    *clock  = now;
    *n_jobs = 0;
}

void slot_policy::fetch(const int32_t * ids, int32_t n_ids, int32_t * slots, phase_op_counters & counters) {
    if (*clock == std::numeric_limits<int32_t>::max()) {
        std::fill_n(stamp, n_slots, 0);
        *clock = 0;
    }
    const int32_t now = ++*clock;

    for (int32_t i = 0; i < n_ids; ++i) {
        if (slot_of[ids[i]] >= 0) {
            stamp[slot_of[ids[i]]] = now;
        }
    }

    int32_t n = 0;
    for (int32_t i = 0; i < n_ids; ++i) {
        const int32_t expert = ids[i];
        if (slot_of[expert] < 0) {
            const int32_t slot = (int32_t) (std::min_element(stamp, stamp + n_slots) - stamp);
            if (expert_of[slot] >= 0) {
                slot_of[expert_of[slot]] = -1;
                counters.evicted++;
            }
            expert_of[slot] = expert;
            slot_of[expert] = slot;
            stamp[slot]     = now;
            jobs[2*n]       = expert;
            jobs[2*n + 1]   = slot;
            ++n;
        }
        slots[i] = slot_of[expert];
    }

    *n_jobs = n;
    counters.looked_up += n_ids;
    counters.missed    += n;
    counters.runs++;
}

void slot_policy::fill(const int32_t * experts, int32_t n, int32_t newest, phase_op_counters & counters) {
    int32_t n_filled = 0;
    int32_t slot     = 0;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t expert = experts[i];
        if (slot_of[expert] >= 0) {
            continue;
        }
        while (slot < n_slots && expert_of[slot] >= 0) {
            ++slot;
        }
        if (slot == n_slots) {
            break;
        }
        expert_of[slot]    = expert;
        slot_of[expert]    = slot;
        stamp[slot]        = newest - i;
        jobs[2*n_filled]     = expert;
        jobs[2*n_filled + 1] = slot;
        ++n_filled;
    }
    *n_jobs = n_filled;
    counters.looked_up += n;
    counters.missed    += n_filled;
    counters.runs++;
}

std::vector<int32_t> slot_policy::resident() const {
    std::vector<int32_t> order;
    for (int32_t slot = 0; slot < n_slots; ++slot) {
        if (expert_of[slot] >= 0) {
            order.push_back(slot);
        }
    }
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return stamp[a] != stamp[b] ? stamp[a] < stamp[b] : a < b; });
    for (auto & entry : order) {
        entry = expert_of[entry];
    }
    return order;
}
