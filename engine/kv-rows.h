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
// window that moves on with each lookup (of all, when the window has too few); never one used by this lookup. The window is small when
// few rows are missing, as in most steps: the new row alone. Ages of 16 lookups and more are told apart by powers of two. A lookup of at
// most n_slots distinct rows always succeeds.
//
// A lookup has three steps, each by the whole group. claim finds the slots that are there, and the rows that are missing: those may be
// read from now on. place chooses their slots: those may be written from now on. resolve completes the list of slots. On a device a
// thread's loads of a step are issued together: what a lookup costs is the number of loads that wait for one another.

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#    define PHASE_KV_ROWS_FN __host__ __device__ inline
#else
#    define PHASE_KV_ROWS_FN inline
#endif

constexpr int32_t  PHASE_KV_ROWS_NONE    = -1;
constexpr int32_t  PHASE_KV_ROWS_CLAIMED = -2;
constexpr int32_t  PHASE_KV_ROWS_WINDOW  = 8192; // slots looked at to find victims; at most half as many
constexpr int32_t  PHASE_KV_ROWS_FEW     = 64;   // missing rows for which a small window does
constexpr int32_t  PHASE_KV_ROWS_SMALL_WINDOW = 1024;
constexpr int32_t  PHASE_KV_ROWS_AGES    = 32;
constexpr uint32_t PHASE_KV_ROWS_OLD     = 1u << 20; // age of a free slot; the clock begins with it
constexpr int32_t  PHASE_KV_ROWS_LISTED  = 4; // list entries that a thread has in flight: 1024 threads, 2051 rows
constexpr int32_t  PHASE_KV_ROWS_AGED    = 8; // slots of a window

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
};

// What claim found, the same in all threads.
struct phase_kv_rows_claimed {
    uint32_t clock;
    int32_t  begin; // of the window
    int32_t  n_jobs;
};

PHASE_KV_ROWS_FN int32_t phase_kv_rows_age(uint32_t age) {
    const uint32_t above = age | 16; // 16 begins a group
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
    const int32_t bits = 31 - __clz((int) above);
#else
    const int32_t bits = 31 - __builtin_clz(above);
#endif
    const int32_t group = bits + 12 < PHASE_KV_ROWS_AGES ? bits + 12 : PHASE_KV_ROWS_AGES - 1;
    return age < 16 ? (int32_t) age : group;
}

// A list of rows, negative: none. Another kind has the same functions: entries are all read before one of them is looked at.
struct phase_kv_rows_list {
    const int32_t * rows;

    PHASE_KV_ROWS_FN int32_t read(int32_t i) const { return rows[i]; }
    PHASE_KV_ROWS_FN int64_t row(int32_t /*i*/, int32_t entry) const { return entry; } // of what was read
};

// How many of n entries a thread has in a turn that begins with entry `first`, at most N. The same for all threads, of which some have one
// less.
PHASE_KV_ROWS_FN int32_t phase_kv_rows_in_turn(int32_t n, int32_t first, int32_t n_threads, int32_t N) {
    const int32_t left = (n - first + n_threads - 1)/n_threads;
    return left < N ? left : N;
}

//
// The functions below are run by all threads of a group. A group has: int thread, n_threads; and
//   void sync()
//   int  add(int * at, int n)               each thread adds its own n; gives what was there, as if one after the other
//   void tally(int * counts, int which)     one more at counts[which], negative: nowhere
//   bool claim(int * at)                    NONE to CLAIMED, atomic
//   void prefetch(const void * at)          it will be read
// All threads come to sync, add and tally together.
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
    void tally(int32_t * counts, int32_t which) {
        if (which >= 0) {
            ++counts[which];
        }
    }
    bool claim(int32_t * at) {
        const bool mine = *at == PHASE_KV_ROWS_NONE;
        *at = mine ? PHASE_KV_ROWS_CLAIMED : *at;
        return mine;
    }
    void prefetch(const void *) {}
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
    const int32_t  n_pending  = n <= n_in_place ? 0 : n < s.n_slots ? n : s.n_slots;
    const uint32_t free_stamp = (uint32_t) s.head[PHASE_KV_ROWS_CLOCK] - PHASE_KV_ROWS_OLD;
    for (int32_t i = g.thread; i < n; i += g.n_threads) {
        const int64_t row = row_of(i);
        const bool valid = row >= 0 && row < s.n_rows;
        const int32_t slot = valid ? s.map[row] : PHASE_KV_ROWS_NONE; // read once: K and V of a layer are forgotten side by side
        if (slot >= 0) {
            s.map[row]    = PHASE_KV_ROWS_NONE;
            s.owner[slot] = PHASE_KV_ROWS_NONE;
            s.stamp[slot] = free_stamp;
        }
        if (i >= n - n_pending) {
            s.pending[i - (n - n_pending)] = valid ? (int32_t) row : PHASE_KV_ROWS_NONE;
        }
    }
    if (g.thread == 0) {
        s.head[PHASE_KV_ROWS_N_PENDING] = n_pending;
    }
}

// Slot i of a window.
PHASE_KV_ROWS_FN int32_t phase_kv_rows_slot(const phase_kv_rows_state & s, int32_t begin, int32_t i) {
    return begin + i < s.n_slots ? begin + i : begin + i - s.n_slots;
}

// What the list of slots has for a missing row until resolve: less than NONE.
PHASE_KV_ROWS_FN int32_t phase_kv_rows_missing(int32_t row) {
    return PHASE_KV_ROWS_NONE - 1 - row; // and back
}

template <typename group>
PHASE_KV_ROWS_FN void phase_kv_rows_none_taken(group & g, phase_kv_rows_shared & shared) {
    for (int32_t i = g.thread; i < PHASE_KV_ROWS_AGES; i += g.n_threads) {
        shared.ages[i] = 0;
    }
    if (g.thread == 0) {
        shared.threshold   = -1;
        shared.older_taken = 0;
        shared.equal_taken = 0;
    }
}

// At most n_slots distinct rows. slots[i] (or null): where each of n is, NONE, or missing. It may be what `list` reads: a thread reads an
// entry before it writes it. jobs has the rows that are missing, without slots as yet.
template <typename group, typename list_of>
PHASE_KV_ROWS_FN phase_kv_rows_claimed phase_kv_rows_claim(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared,
        const list_of & list, int32_t n, int32_t * slots) {
    constexpr int32_t N = PHASE_KV_ROWS_LISTED;

    if (g.thread == 0) {
        shared.n_jobs = 0;
    }
    phase_kv_rows_none_taken(g, shared);
    g.sync();
    for (int32_t begin = 0; begin < n; begin += N*g.n_threads) {
        const int32_t in_turn = phase_kv_rows_in_turn(n, begin, g.n_threads, N);
        const int32_t first   = begin + g.thread;
        int32_t row[N], slot[N];
        bool    mine[N];
        int32_t n_mine = 0;
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            const int32_t i = first + k*g.n_threads;
            row[k] = i < n ? list.read(i) : PHASE_KV_ROWS_NONE;
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            const int64_t found = list.row(first + k*g.n_threads, row[k]);
            row[k]  = row[k] >= 0 && (uint64_t) found < (uint64_t) s.n_rows ? (int32_t) found : PHASE_KV_ROWS_NONE;
            slot[k] = row[k] >= 0 ? s.map[row[k]] : 0;
        }
        const uint32_t clock  = (uint32_t) s.head[PHASE_KV_ROWS_CLOCK] + 1; // read beside the map, not before the list
        const int32_t  window = s.head[PHASE_KV_ROWS_HAND];
        for (int32_t i = first; i < PHASE_KV_ROWS_SMALL_WINDOW && i < s.n_slots && s.n_slots < s.n_rows; i += g.n_threads) { // in the first turn
            g.prefetch(&s.stamp[phase_kv_rows_slot(s, window, i)]);
            g.prefetch(&s.owner[phase_kv_rows_slot(s, window, i)]);
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            const int32_t i = first + k*g.n_threads;
            mine[k] = slot[k] == PHASE_KV_ROWS_NONE && g.claim(&s.map[row[k]]);
            n_mine += mine[k];
            if (row[k] >= 0 && slot[k] >= 0) {
                s.stamp[slot[k]] = clock;
            }
            if (slots && i < n) {
                slots[i] = row[k] < 0 ? PHASE_KV_ROWS_NONE : slot[k] >= 0 ? slot[k] : phase_kv_rows_missing(row[k]);
            }
        }
        int32_t job = g.add(&shared.n_jobs, n_mine);
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            if (mine[k]) {
                s.jobs[2*job++] = row[k];
            }
        }
    }
    phase_kv_rows_claimed claimed { (uint32_t) s.head[PHASE_KV_ROWS_CLOCK] + 1, s.head[PHASE_KV_ROWS_HAND], 0 };
    g.sync();
    claimed.n_jobs = shared.n_jobs;
    if (g.thread == 0) {
        s.head[PHASE_KV_ROWS_CLOCK]  = (int32_t) claimed.clock;
        s.head[PHASE_KV_ROWS_N_JOBS] = claimed.n_jobs;
    }
    return claimed;
}

// Finds slots for the jobs in a window of `count` slots; none is taken yet. False: there are too few that this lookup does not use.
template <typename group>
PHASE_KV_ROWS_FN bool phase_kv_rows_assign(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared,
        const phase_kv_rows_claimed & claimed, int32_t count) {
    constexpr int32_t N = PHASE_KV_ROWS_AGED;

    const auto slot_at   = [&](int32_t i) { return phase_kv_rows_slot(s, claimed.begin, i); };
    const auto read_ages = [&](int32_t first, int32_t in_turn, int32_t (&age)[N]) { // -1: no slot
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            const int32_t i = first + k*g.n_threads;
            age[k] = i < count ? (int32_t) s.stamp[slot_at(i)] : 0;
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            age[k] = first + k*g.n_threads < count ? phase_kv_rows_age(claimed.clock - (uint32_t) age[k]) : -1;
        }
    };
    for (int32_t turn = 0; turn < count; turn += N*g.n_threads) {
        const int32_t in_turn = phase_kv_rows_in_turn(count, turn, g.n_threads, N);
        int32_t age[N];
        read_ages(turn + g.thread, in_turn, age);
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            g.tally(shared.ages, age[k]);
        }
    }
    g.sync();
    for (int32_t age = g.thread; age < PHASE_KV_ROWS_AGES; age += g.n_threads) {
        int32_t n_older = 0;
        for (int32_t older = PHASE_KV_ROWS_AGES - 1; older > 0; --older) {
            n_older += older > age ? shared.ages[older] : 0;
        }
        if (age > 0 && n_older < claimed.n_jobs && n_older + shared.ages[age] >= claimed.n_jobs) { // 0: used by this lookup
            shared.threshold = age;
            shared.n_older   = n_older;
        }
    }
    g.sync();
    const int32_t threshold = shared.threshold;
    const int32_t n_older   = shared.n_older;
    if (threshold < 0) {
        return false;
    }
    for (int32_t turn = 0; turn < count; turn += N*g.n_threads) {
        const int32_t in_turn = phase_kv_rows_in_turn(count, turn, g.n_threads, N);
        const int32_t first   = turn + g.thread;
        int32_t job[N], row[N], owner[N];
        int32_t n_old = 0, n_equal = 0;
        read_ages(first, in_turn, job); // in their place
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            n_old   += job[k] > threshold;
            n_equal += job[k] == threshold;
        }
        int32_t old_job   = g.add(&shared.older_taken, n_old);
        int32_t equal_job = g.add(&shared.equal_taken, n_equal) + n_older;
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            job[k] = job[k] > threshold ? old_job++ : job[k] == threshold ? equal_job++ : claimed.n_jobs;
            if (job[k] < claimed.n_jobs) {
                row[k]   = s.jobs[2*job[k]];
                owner[k] = s.owner[slot_at(first + k*g.n_threads)];
            }
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            if (job[k] < claimed.n_jobs) {
                const int32_t slot = slot_at(first + k*g.n_threads);
                if (owner[k] >= 0) {
                    s.map[owner[k]] = PHASE_KV_ROWS_NONE;
                }
                s.owner[slot]        = row[k];
                s.map[row[k]]        = slot;
                s.stamp[slot]        = claimed.clock;
                s.jobs[2*job[k] + 1] = slot;
            }
        }
    }
    return true;
}

// Gives every job a slot. Afterwards map says where each row is, and jobs what to copy.
template <typename group>
PHASE_KV_ROWS_FN void phase_kv_rows_place(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared,
        const phase_kv_rows_claimed & claimed) {
    const int32_t n_jobs = claimed.n_jobs;
    if (n_jobs == 0) {
        return;
    }
    if (s.n_slots >= s.n_rows) {
        for (int32_t job = g.thread; job < n_jobs; job += g.n_threads) {
            const int32_t row = s.jobs[2*job];
            s.jobs[2*job + 1] = row;
            s.map[row]        = row;
            s.owner[row]      = row;
        }
    } else {
        const int32_t window = n_jobs <= PHASE_KV_ROWS_FEW ? PHASE_KV_ROWS_SMALL_WINDOW : PHASE_KV_ROWS_WINDOW;
        const int32_t count  = n_jobs <= window/2 && window < s.n_slots ? window : s.n_slots;
        int32_t n_looked_at = count;
        while (!phase_kv_rows_assign(g, s, shared, claimed, n_looked_at) && n_looked_at < s.n_slots) {
            g.sync();
            phase_kv_rows_none_taken(g, shared);
            g.sync();
            n_looked_at = s.n_slots;
        }
        if (g.thread == 0) {
            s.head[PHASE_KV_ROWS_HAND] = phase_kv_rows_slot(s, claimed.begin, count);
        }
    }
    g.sync();
}

// Puts the slots of rows that were missing into the list of claim.
template <typename group>
PHASE_KV_ROWS_FN void phase_kv_rows_resolve(group & g, const phase_kv_rows_state & s, int32_t n, int32_t * slots) {
    constexpr int32_t N = PHASE_KV_ROWS_LISTED;

    for (int32_t begin = 0; begin < n; begin += N*g.n_threads) {
        const int32_t in_turn = phase_kv_rows_in_turn(n, begin, g.n_threads, N);
        const int32_t first   = begin + g.thread;
        int32_t slot[N];
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            const int32_t i = first + k*g.n_threads;
            slot[k] = i < n ? slots[i] : PHASE_KV_ROWS_NONE;
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            slot[k] = slot[k] < PHASE_KV_ROWS_NONE ? s.map[phase_kv_rows_missing(slot[k])] : PHASE_KV_ROWS_NONE;
        }
        for (int32_t k = 0; k < N && k < in_turn; ++k) {
            if (slot[k] >= 0) {
                slots[first + k*g.n_threads] = slot[k];
            }
        }
    }
}

// All three. Returns the number of jobs, to all threads.
template <typename group, typename list_of>
PHASE_KV_ROWS_FN int32_t phase_kv_rows_lookup(group & g, const phase_kv_rows_state & s, phase_kv_rows_shared & shared, const list_of & list,
        int32_t n, int32_t * slots = nullptr) {
    const auto claimed = phase_kv_rows_claim(g, s, shared, list, n, slots);
    phase_kv_rows_place(g, s, shared, claimed);
    if (slots && claimed.n_jobs > 0) {
        phase_kv_rows_resolve(g, s, n, slots);
    }
    return claimed.n_jobs;
}
