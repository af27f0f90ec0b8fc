#pragma once

// What a lookup of kv-rows.h did to the tables, judged by a plain reading of its policy: for the kernels and for the host's own run.

#include "kv-rows.h"

#include <algorithm>
#include <set>
#include <vector>

struct kv_rows_tables {
    std::vector<int32_t> map, owner, stamp, jobs, head;

    int32_t n_rows()  const { return (int32_t) map.size(); }
    int32_t n_slots() const { return (int32_t) owner.size(); }

    // read(at, n): n words of a state
    template <typename read_words>
    static kv_rows_tables of(const phase_kv_rows_state & s, const read_words & read) {
        return { read(s.map, s.n_rows), read(s.owner, s.n_slots), read((const int32_t *) s.stamp, s.n_slots), read(s.jobs, 2*s.n_slots),
                 read(s.head, PHASE_KV_ROWS_HEAD) };
    }

    bool consistent() const {
        for (int32_t row = 0; row < n_rows(); ++row) {
            if (map[row] != PHASE_KV_ROWS_NONE && (map[row] < 0 || map[row] >= n_slots() || owner[map[row]] != row)) {
                return false;
            }
        }
        for (int32_t slot = 0; slot < n_slots(); ++slot) {
            if (owner[slot] != PHASE_KV_ROWS_NONE && map[owner[slot]] != slot) {
                return false;
            }
        }
        return true;
    }
};

// Null, or what is wrong. `wanted`: rows, some of them twice, negative: none.
inline const char * kv_rows_judge(const kv_rows_tables & before, const kv_rows_tables & after, const std::vector<int32_t> & wanted) {
    const int32_t n_slots = before.n_slots();
    const bool    own     = n_slots >= before.n_rows(); // each row has its slot
    std::set<int32_t> rows(wanted.begin(), wanted.end()), missing;
    std::vector<bool> used(n_slots), taken(n_slots);
    rows.erase(rows.begin(), rows.lower_bound(0));
    for (const auto row : rows) {
        if (before.map[row] < 0) {
            missing.insert(row);
        } else if (after.map[row] != before.map[row]) {
            return "a row that was there moved";
        }
    }
    const int32_t  n_jobs = (int32_t) missing.size();
    const uint32_t clock  = (uint32_t) before.head[PHASE_KV_ROWS_CLOCK] + 1;
    if (after.head[PHASE_KV_ROWS_N_JOBS] != n_jobs || (uint32_t) after.head[PHASE_KV_ROWS_CLOCK] != clock) {
        return "number of jobs, or clock";
    }
    for (int32_t job = 0; job < n_jobs; ++job) {
        const int32_t row = after.jobs[2*job], slot = after.jobs[2*job + 1];
        if (missing.erase(row) == 0 || slot < 0 || slot >= n_slots || taken[slot] || after.map[row] != slot || (own && slot != row)) {
            return "a job";
        }
        taken[slot] = true;
    }
    if (!after.consistent()) {
        return "map and owner";
    }
    for (const auto row : rows) {
        used[after.map[row]] = true;
        if (!own && (uint32_t) after.stamp[after.map[row]] != clock) {
            return "the stamp of a row that was asked for";
        }
    }
    for (int32_t slot = 0; slot < n_slots; ++slot) {
        if (!used[slot] && (after.owner[slot] != before.owner[slot] || after.stamp[slot] != before.stamp[slot])) {
            return "a slot that is not of this lookup changed";
        }
    }
    if (own || n_jobs == 0) {
        return after.head[PHASE_KV_ROWS_HAND] == before.head[PHASE_KV_ROWS_HAND] ? nullptr : "the window moved";
    }

    // the longest unused of the window, or of all
    const int32_t begin = before.head[PHASE_KV_ROWS_HAND];
    const int32_t count = std::min(n_slots, n_jobs <= PHASE_KV_ROWS_FEW ? PHASE_KV_ROWS_SMALL_WINDOW
                                          : n_jobs <= PHASE_KV_ROWS_WINDOW/2 ? PHASE_KV_ROWS_WINDOW : n_slots);
    if (after.head[PHASE_KV_ROWS_HAND] != (begin + count) % n_slots) {
        return "where the next window begins";
    }
    const auto in_window = [&](int32_t slot) { return (slot - begin + n_slots) % n_slots < count; };
    int32_t n_victims = 0; // there could be
    for (int32_t slot = 0; slot < n_slots; ++slot) {
        n_victims += in_window(slot) && (!used[slot] || taken[slot]);
    }
    int32_t youngest_taken = PHASE_KV_ROWS_AGES, oldest_left = 0;
    for (int32_t slot = 0; slot < n_slots; ++slot) {
        const int32_t age = phase_kv_rows_age(clock - (uint32_t) before.stamp[slot]);
        if (taken[slot]) {
            if (n_victims >= n_jobs && !in_window(slot)) {
                return "a victim outside the window";
            }
            youngest_taken = std::min(youngest_taken, age);
        } else if (!used[slot] && (n_victims < n_jobs || in_window(slot))) {
            oldest_left = std::max(oldest_left, age);
        }
    }
    return youngest_taken >= oldest_left ? nullptr : "a victim, with an older one beside it";
}
