#pragma once

// Rows of K/V in host memory that are kept on the device as well: layout and policy, in one text for the kernels and for tests on the
// host. Plain data, no ggml.
//
// Per layer, n_slots slots; a slot holds the K row and the V row of one position. Attention gets a list of rows; lookup turns them into
// slots and lists as jobs (row, slot) what has to be copied from host memory first. Results never depend on what is kept: a slot that is
// used holds its row's bytes.
//
//   | map[n_rows] | owner[n_slots] | stamp[n_slots] | jobs[2*n_slots] | pending[n_slots] | head[PHASE_KV_ROWS_HEAD] |
//
//   map      slot of a row, NONE, or CLAIMED during a lookup
//   owner    row in a slot, NONE: free
//   stamp    clock of the last use
//   jobs     (row, slot) pairs of the last lookup, head[N_JOBS] of them
//   pending  rows that the graph in progress writes, head[N_PENDING] of them
//
// Order within a graph: forget (the rows about to be written), the writes, lookup and copy at each layer's attention; behind the last
// node of a prompt's micro-batch, lookup and copy of what was pending, so that the newest rows are there when the answer begins.
//
// Policy: with as many slots as rows, row r has slot r. Else a missing row takes the slot that was not used for longest among those of a
// window that moves on with each lookup (of all, when the window has too few); never one used by this lookup. Ages of 16 lookups and
// more are told apart by powers of two. A lookup of at most n_slots distinct rows always succeeds.

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#    define PHASE_KV_ROWS_FN __host__ __device__ inline
#else
#    define PHASE_KV_ROWS_FN inline
#endif

constexpr int32_t  PHASE_KV_ROWS_NONE    = -1;
constexpr int32_t  PHASE_KV_ROWS_CLAIMED = -2;
constexpr int32_t  PHASE_KV_ROWS_WINDOW  = 8192; // slots looked at to find victims
constexpr int32_t  PHASE_KV_ROWS_AGES    = 32;
constexpr uint32_t PHASE_KV_ROWS_OLD     = 1u << 20; // age of a free slot; the clock begins with it

enum phase_kv_rows_head { PHASE_KV_ROWS_CLOCK, PHASE_KV_ROWS_N_JOBS, PHASE_KV_ROWS_HAND, PHASE_KV_ROWS_N_PENDING, PHASE_KV_ROWS_HEAD };

struct phase_kv_rows_state {
    int32_t    n_rows;
    int32_t    n_slots;
    int32_t  * map;
    int32_t  * owner;
    uint32_t * stamp;
    int32_t  * jobs;
    int32_t  * pending;
    int32_t  * head;
};

constexpr size_t phase_kv_rows_words(size_t n_rows, size_t n_slots) {
    return n_rows + 5*n_slots + PHASE_KV_ROWS_HEAD;
}

// Lays a state out in `words`.
inline phase_kv_rows_state phase_kv_rows_state_at(int32_t * words, int32_t n_rows, int32_t n_slots) {
    phase_kv_rows_state s {};
    s.n_rows  = n_rows;
    s.n_slots = n_slots;
    s.map     = words;
    s.owner   = s.map + n_rows;
    s.stamp   = (uint32_t *) (s.owner + n_slots);
    s.jobs    = (int32_t *) s.stamp + n_slots;
    s.pending = s.jobs + 2*n_slots;
    s.head    = s.pending + n_slots;
    return s;
}

// Of all threads of a lookup: shared memory on a device.
struct phase_kv_rows_shared {
    int32_t ages[PHASE_KV_ROWS_AGES];
    int32_t n_jobs;
    int32_t threshold; // slots of this age and older are taken; negative: there are too few
    int32_t n_older;   // of those, older ones
    int32_t older_taken;
    int32_t equal_taken;
    int32_t begin; // of the window
};

PHASE_KV_ROWS_FN int32_t phase_kv_rows_age(uint32_t age) {
    int32_t group = 12;
    for (uint32_t left = age; left > 1; left /= 2) {
        ++group;
    }
    return age < 16 ? (int32_t) age : group < PHASE_KV_ROWS_AGES ? group : PHASE_KV_ROWS_AGES - 1;
}

//
// The functions below are run by all threads of a group. A group has: int thread, n_threads; void sync(); int add(int *, int), atomic,
// gives what was there; bool claim(int *), NONE to CLAIMED, atomic.
//

// The group of a host thread.
struct phase_kv_rows_one_thread {
    int  thread    = 0;
    int  n_threads = 1;
    void sync() {}
    int  add(int32_t * at, int32_t n) {
        *at += n;
        return *at - n;
    }
    bool claim(int32_t * at) {
        const bool mine = *at == PHASE_KV_ROWS_NONE;
        *at = mine ? PHASE_KV_ROWS_CLAIMED : *at;
        return mine;
    }
};

template <typename group>
PHASE_KV_ROWS_FN void phase_kv_rows_clear(group & g, const phase_kv_rows_state & s) {
    for (int32_t i = g.thread; i < s.n_rows; i += g.n_threads) {
        s.map[i] = PHASE_KV_ROWS_NONE;
    }
    for (int32_t i = g.thread; i < s.n_slots; i += g.n_threads) {
        s.owner[i] = PHASE_KV_ROWS_NONE;
        s.stamp[i] = 0;
    }
    if (g.thread == 0) {
        s.head[PHASE_KV_ROWS_CLOCK]     = PHASE_KV_ROWS_OLD;
        s.head[PHASE_KV_ROWS_N_JOBS]    = 0;
        s.head[PHASE_KV_ROWS_HAND]      = 0;
        s.head[PHASE_KV_ROWS_N_PENDING] = 0;
    }
}

// Rows about to be written; row_of(i) for i < n. The last of them become pending when `n` is more than `n_in_place`.
template <typename group, typename rows>
PHASE_KV_ROWS_FN void phase_kv_rows_forget(group & g, const phase_kv_rows_state & s, const rows & row_of, int32_t n, int32_t n_in_place) {
    const int32_t n_pending = n <= n_in_place ? 0 : n < s.n_slots ? n : s.n_slots;
    for (int32_t i = g.thread; i < n; i += g.n_threads) {
        const int64_t row = row_of(i);
        const bool valid = row >= 0 && row < s.n_rows;
        const int32_t slot = valid ? s.map[row] : PHASE_KV_ROWS_NONE; // read once: K and V of a layer are forgotten side by side
        if (slot >= 0) {
            s.map[row]    = PHASE_KV_ROWS_NONE;
            s.owner[slot] = PHASE_KV_ROWS_NONE;
            s.stamp[slot] = (uint32_t) s.head[PHASE_KV_ROWS_CLOCK] - PHASE_KV_ROWS_OLD;
        }
        if (i >= n - n_pending) {
            s.pending[i - (n - n_pending)] = valid ? (int32_t) row : PHASE_KV_ROWS_NONE;
        }
    }
    if (g.thread == 0) {
        s.head[PHASE_KV_ROWS_N_PENDING] = n_pending;
    }
}

// Finds slots for n_jobs rows among `count` slots from `begin` on. False: there are too few that this lookup does not use.
template <typename group>
PHASE_KV_ROWS_FN bool phase_kv_rows_assign(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared, uint32_t clock, int32_t n_jobs,
        int32_t begin, int32_t count) {
    g.sync();
    for (int32_t i = g.thread; i < PHASE_KV_ROWS_AGES; i += g.n_threads) {
        shared.ages[i] = 0;
    }
    g.sync();
    for (int32_t i = g.thread; i < count; i += g.n_threads) {
        const int32_t slot = begin + i < s.n_slots ? begin + i : begin + i - s.n_slots;
        g.add(&shared.ages[phase_kv_rows_age(clock - s.stamp[slot])], 1);
    }
    g.sync();
    if (g.thread == 0) {
        shared.threshold   = -1;
        shared.older_taken = 0;
        shared.equal_taken = 0;
        int32_t n = 0;
        for (int32_t age = PHASE_KV_ROWS_AGES - 1; age > 0; --age) { // 0: used by this lookup
            const int32_t more = n + shared.ages[age];
            if (n < n_jobs && more >= n_jobs) {
                shared.threshold = age;
                shared.n_older   = n;
            }
            n = more;
        }
    }
    g.sync();
    const int32_t threshold = shared.threshold;
    const int32_t n_older   = shared.n_older;
    if (threshold < 0) {
        return false;
    }
    for (int32_t i = g.thread; i < count; i += g.n_threads) {
        const int32_t slot = begin + i < s.n_slots ? begin + i : begin + i - s.n_slots;
        const int32_t age  = phase_kv_rows_age(clock - s.stamp[slot]);
        if (age < threshold || (age == threshold && *(volatile int32_t *) &shared.equal_taken >= n_jobs - n_older)) {
            continue;
        }
        const int32_t job = age > threshold ? g.add(&shared.older_taken, 1) : n_older + g.add(&shared.equal_taken, 1);
        if (job >= n_jobs) {
            continue;
        }
        const int32_t row   = s.jobs[2*job];
        const int32_t owner = s.owner[slot];
        if (owner >= 0) {
            s.map[owner] = PHASE_KV_ROWS_NONE;
        }
        s.owner[slot]     = row;
        s.map[row]        = slot;
        s.stamp[slot]     = clock;
        s.jobs[2*job + 1] = slot;
    }
    return true;
}

// Gives every row a slot: row_of(i) for i < n, negative: none. At most n_slots distinct ones. Afterwards map says where each is, and
// jobs what to copy. Returns their number, to all threads.
template <typename group, typename rows>
PHASE_KV_ROWS_FN int32_t phase_kv_rows_lookup(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared, const rows & row_of, int32_t n) {
    if (g.thread == 0) {
        shared.n_jobs = 0;
        shared.begin  = s.head[PHASE_KV_ROWS_HAND];
    }
    const uint32_t clock = (uint32_t) s.head[PHASE_KV_ROWS_CLOCK] + 1;
    g.sync();
    for (int32_t i = g.thread; i < n; i += g.n_threads) {
        const int64_t row = row_of(i);
        if (row < 0 || row >= s.n_rows) {
            continue;
        }
        const int32_t slot = s.map[row];
        if (slot >= 0) {
            s.stamp[slot] = clock;
        } else if (slot == PHASE_KV_ROWS_NONE && g.claim(&s.map[row])) {
            s.jobs[2*g.add(&shared.n_jobs, 1)] = (int32_t) row;
        }
    }
    g.sync();
    const int32_t n_jobs = shared.n_jobs;
    const int32_t begin  = shared.begin;
    int32_t       count  = s.n_slots;
    if (s.n_slots >= s.n_rows) {
        for (int32_t job = g.thread; job < n_jobs; job += g.n_threads) {
            const int32_t row = s.jobs[2*job];
            s.jobs[2*job + 1] = row;
            s.map[row]        = row;
            s.owner[row]      = row;
        }
    } else if (n_jobs > 0) {
        const int32_t wanted = n_jobs <= PHASE_KV_ROWS_WINDOW/2 ? PHASE_KV_ROWS_WINDOW : s.n_slots;
        count = wanted < s.n_slots ? wanted : s.n_slots;
        if (!phase_kv_rows_assign(g, s, shared, clock, n_jobs, begin, count)) {
            phase_kv_rows_assign(g, s, shared, clock, n_jobs, 0, s.n_slots);
        }
    }
    g.sync();
    if (g.thread == 0) {
        s.head[PHASE_KV_ROWS_CLOCK]  = (int32_t) clock;
        s.head[PHASE_KV_ROWS_N_JOBS] = n_jobs;
        s.head[PHASE_KV_ROWS_HAND]   = n_jobs > 0 ? (int32_t) (((int64_t) begin + count) % s.n_slots) : begin;
    }
    g.sync();
    return n_jobs;
}
