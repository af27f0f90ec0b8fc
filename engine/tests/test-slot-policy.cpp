// slot-policy: properties over seeded random sequences, and agreement with an independent LRU written for clarity.

#include "check.h"

#include "slot-policy.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

namespace {

// The policy as expert-op.h words it, over sets and maps.
struct naive_lru {
    std::map<int, int> expert_in;  // slot -> expert
    std::map<int, int> last_used;  // slot -> time, missing: never
    int                n_slots;
    int                now = 0;

    int slot_with(int expert) const {
        for (const auto & [slot, e] : expert_in) {
            if (e == expert) {
                return slot;
            }
        }
        return -1;
    }

    std::vector<int> fetch(const std::vector<int> & ids) {
        if (now == std::numeric_limits<int32_t>::max()) {
            last_used.clear();
            now = 0;
        }
        ++now;
        for (const int id : ids) {
            if (const int slot = slot_with(id); slot >= 0) {
                last_used[slot] = now;
            }
        }
        std::vector<int> slots;
        for (const int id : ids) {
            int slot = slot_with(id);
            if (slot < 0) {
                slot = 0;
                for (int s = 1; s < n_slots; ++s) {
                    const auto time = [&](int x) { return last_used.count(x) ? last_used.at(x) : 0; };
                    slot = time(s) < time(slot) ? s : slot;
                }
                expert_in[slot] = id;
                last_used[slot] = now;
            }
            slots.push_back(slot);
        }
        return slots;
    }
};

// A state of exactly as many words as the layout says, so that the sanitizer sees the word behind it.
struct cache {
    std::vector<int32_t> words;
    slot_policy          policy;
    phase_op_counters    counters = {}, filled = {};
    std::vector<int>     content; // what a copy of each job would have put into the slots

    cache(int n_expert, int n_slots) : words(phase_state_words(n_expert, n_slots), 0x55555555), policy(words.data(), n_expert, n_slots), content(n_slots, -1) {
        policy.clear();
    }

    std::vector<int> fetch(const std::vector<int> & ids) {
        std::vector<int32_t> slots(ids.size(), -1);
        policy.fetch(ids.data(), (int32_t) ids.size(), slots.data(), counters);
        for (int j = 0; j < *policy.n_jobs; ++j) {
            content[policy.jobs[2*j + 1]] = policy.jobs[2*j];
        }
        return slots;
    }

    // `wanted`, the most wanted first, into what is empty
    int fill(const std::vector<int32_t> & wanted, int newest) {
        policy.fill(wanted.data(), (int32_t) wanted.size(), newest, filled);
        for (int j = 0; j < *policy.n_jobs; ++j) {
            REQUIRE(content[policy.jobs[2*j + 1]] == -1); // empty until now
            content[policy.jobs[2*j + 1]] = policy.jobs[2*j];
        }
        return *policy.n_jobs;
    }

    // a cleared state with `experts`, the least recently used first
    void refill(const std::vector<int32_t> & experts) {
        policy.clear((int32_t) experts.size());
        std::fill(content.begin(), content.end(), -1);
        fill({ experts.rbegin(), experts.rend() }, (int) experts.size());
    }

    bool is_resident(int expert) const { return policy.slot_of[expert] >= 0; }

    // slot_of and expert_of say the same, so no expert is in two slots and no slot holds two experts
    bool is_consistent() const {
        int n_resident = 0;
        for (int e = 0; e < policy.n_expert; ++e) {
            const int slot = policy.slot_of[e];
            n_resident += slot >= 0;
            if (slot < -1 || slot >= policy.n_slots || (slot >= 0 && policy.expert_of[slot] != e)) {
                return false;
            }
        }
        for (int s = 0; s < policy.n_slots; ++s) {
            const int expert = policy.expert_of[s];
            n_resident -= expert >= 0;
            if (expert < -1 || expert >= policy.n_expert || (expert >= 0 && policy.slot_of[expert] != s)) {
                return false;
            }
        }
        return n_resident == 0;
    }
};

struct shape {
    int n_expert, n_used, n_tokens, n_slots;
};

// from the fewest slots that are safe to all experts; one expert; as many ids as a fetch may have
const shape SHAPES[] = {
    { 1, 1, 1, 1 }, { 1, 1, 8, 1 }, { 2, 1, 1, 1 }, { 8, 1, 8, 8 }, { 16, 4, 1, 4 }, { 16, 4, 1, 5 }, { 16, 4, 4, 16 }, { 32, 4, 2, 8 }, { 32, 4, 8, 32 },
    { 64, 6, 3, 20 }, { 512, 10, 8, 80 }, { 512, 10, 1, 10 }, { 512, 10, 8, 512 }, { 256, 16, 64, 256 }, { 1024, 16, 64, 1024 },
};

struct batches {
    std::mt19937 rng;
    shape        s;
    int          hot; // experts drawn from mostly

    // distinct within a token, as a router chooses them; repeated between tokens
    std::vector<int> next() {
        const int n_tokens = 1 + (int) (rng() % s.n_tokens);
        std::vector<int> ids;
        for (int t = 0; t < n_tokens; ++t) {
            std::set<int> chosen;
            while ((int) chosen.size() < s.n_used) {
                chosen.insert((int) (rng() % (rng() % 4 ? std::max(hot, s.n_used) : s.n_expert)));
            }
            std::vector<int> token(chosen.begin(), chosen.end());
            std::shuffle(token.begin(), token.end(), rng);
            ids.insert(ids.end(), token.begin(), token.end());
        }
        return ids;
    }
};

int n_rounds(const shape & s) {
    return s.n_used*s.n_tokens > 256 ? 60 : 600;
}

} // namespace

TEST(properties) {
    for (const auto & s : SHAPES) {
        for (uint32_t seed = 1; seed <= 3; ++seed) {
            cache   c(s.n_expert, s.n_slots);
            batches source { std::mt19937(seed), s, std::max(1, s.n_expert/4) };
            REQUIRE(c.is_consistent());
            for (int round = 0; round < n_rounds(s); ++round) {
                const auto ids = source.next();
                const std::set<int> distinct(ids.begin(), ids.end());

                const auto counted = c.counters;
                const std::vector<int32_t> held(c.policy.expert_of, c.policy.expert_of + s.n_slots);
                std::set<int> missing;
                for (const int e : distinct) {
                    if (!c.is_resident(e)) {
                        missing.insert(e);
                    }
                }

                const auto slots = c.fetch(ids);
                REQUIRE(c.is_consistent());
                for (size_t i = 0; i < ids.size(); ++i) {
                    REQUIRE(slots[i] >= 0 && slots[i] < s.n_slots);
                    REQUIRE(c.policy.expert_of[slots[i]] == ids[i]);
                    REQUIRE(c.content[slots[i]] == ids[i]);
                }

                // each missing expert is copied once, never over one that the batch uses
                std::set<int> copied, overwritten;
                uint64_t n_evicted = 0;
                for (int j = 0; j < *c.policy.n_jobs; ++j) {
                    const int slot = c.policy.jobs[2*j + 1];
                    copied.insert(c.policy.jobs[2*j]);
                    REQUIRE(overwritten.insert(slot).second);
                    REQUIRE(!distinct.count(held[slot]));
                    n_evicted += held[slot] >= 0;
                }
                REQUIRE(copied == missing && *c.policy.n_jobs == (int) missing.size());

                REQUIRE(c.counters.runs == counted.runs + 1);
                REQUIRE(c.counters.looked_up == counted.looked_up + ids.size());
                REQUIRE(c.counters.missed == counted.missed + missing.size());
                REQUIRE(c.counters.evicted == counted.evicted + n_evicted);
                const auto n_resident = s.n_slots - std::count(c.policy.expert_of, c.policy.expert_of + s.n_slots, -1);
                REQUIRE((int64_t) (c.counters.missed - c.counters.evicted) == n_resident);
            }
            CHECK(s.n_slots < s.n_expert || c.counters.evicted == 0);
        }
    }
}

TEST(same_as_a_naive_lru) {
    for (const auto & s : SHAPES) {
        cache     c(s.n_expert, s.n_slots);
        naive_lru naive { {}, {}, s.n_slots };
        batches   source { std::mt19937(11), s, std::max(1, s.n_expert/4) };
        for (int round = 0; round < n_rounds(s)/4; ++round) {
            const auto ids = source.next();
            REQUIRE(c.fetch(ids) == naive.fetch(ids));
        }
    }
}

TEST(deterministic) {
    const shape s { 64, 6, 3, 20 };
    cache one(s.n_expert, s.n_slots), other(s.n_expert, s.n_slots);
    batches of_one { std::mt19937(3), s, 16 }, of_other { std::mt19937(3), s, 16 };
    for (int round = 0; round < 500; ++round) {
        REQUIRE(one.fetch(of_one.next()) == other.fetch(of_other.next()));
        REQUIRE(std::equal(one.words.begin(), one.words.end() - 2*PHASE_MAX_IDS, other.words.begin()));
    }
}

TEST(order_within_a_batch) {
    cache c(8, 4);
    CHECK(c.fetch({ 5, 2, 5, 2 }) == (std::vector<int> { 0, 1, 0, 1 }));
    CHECK_EQ(*c.policy.n_jobs, 2);
    CHECK(c.fetch({ 7, 2 }) == (std::vector<int> { 2, 1 }));    // slots never used come first
    CHECK(c.fetch({ 1 }) == (std::vector<int> { 3 }));
    CHECK(c.fetch({ 0 }) == (std::vector<int> { 0 }));          // 5 is the oldest
    CHECK(c.fetch({ 6, 2, 7 }) == (std::vector<int> { 3, 1, 2 })); // 2 and 7 are as old as they get, but in this batch: 1 goes
    CHECK(c.policy.resident() == (std::vector<int32_t> { 0, 2, 7, 6 }));
}

TEST(an_empty_batch_changes_only_the_clock) {
    cache c(8, 4);
    c.fetch({ 1, 2 });
    const auto resident = c.policy.resident();
    CHECK(c.fetch({}).empty());
    CHECK_EQ(*c.policy.n_jobs, 0);
    CHECK(c.policy.resident() == resident);
    CHECK_EQ(c.counters.looked_up, 2u);
}

TEST(largest_batch) {
    cache c(PHASE_MAX_IDS, PHASE_MAX_IDS);
    std::vector<int> ids(PHASE_MAX_IDS);
    for (int i = 0; i < PHASE_MAX_IDS; ++i) {
        ids[i] = PHASE_MAX_IDS - 1 - i;
    }
    const auto slots = c.fetch(ids);
    CHECK_EQ(*c.policy.n_jobs, PHASE_MAX_IDS);
    CHECK_EQ(slots.back(), PHASE_MAX_IDS - 1);
    CHECK_EQ(c.fetch(ids) == slots, true);
    CHECK_EQ(*c.policy.n_jobs, 0);
}

TEST(fill_and_resident_round_trip) {
    std::mt19937 rng(5);
    for (int round = 0; round < 2000; ++round) {
        const int n_expert = 1 + (int) (rng() % 40);
        const int n_slots  = 1 + (int) (rng() % n_expert);
        std::vector<int32_t> experts(n_expert);
        for (int e = 0; e < n_expert; ++e) {
            experts[e] = e;
        }
        std::shuffle(experts.begin(), experts.end(), rng);
        experts.resize(rng() % (n_expert + 1));

        cache c(n_expert, n_slots);
        const size_t n_kept = std::min<size_t>(experts.size(), n_slots);
        const std::vector<int32_t> kept(experts.end() - n_kept, experts.end()); // the most recently used ones
        c.refill(kept);
        REQUIRE(c.is_consistent());
        REQUIRE(c.policy.resident() == kept);

        // the least recently used goes first, once all slots are taken
        if (n_kept == (size_t) n_slots && n_slots < n_expert) {
            int absent = 0;
            while (c.is_resident(absent)) {
                ++absent;
            }
            c.fetch({ absent });
            REQUIRE(!c.is_resident(kept[0]));
        }
    }
}

// A restore gives back a cache that behaves as the old one: hits and misses of any later batches are the same.
TEST(a_restored_cache_behaves_like_the_old_one) {
    const shape s { 64, 6, 3, 20 };
    for (uint32_t seed = 1; seed <= 50; ++seed) {
        batches source { std::mt19937(seed), { s.n_expert, s.n_used, 1, s.n_slots }, 16 };
        cache before(s.n_expert, s.n_slots), after(s.n_expert, s.n_slots);
        // one id at a time: the order of use is then total, and a fill can express it
        for (int round = 0; round < 50; ++round) {
            for (const int id : source.next()) {
                before.fetch({ id });
            }
        }
        after.refill(before.policy.resident());
        const auto offset = before.counters.missed;
        for (int round = 0; round < 50; ++round) {
            for (const int id : source.next()) {
                before.fetch({ id });
                after.fetch({ id });
            }
            REQUIRE(before.counters.missed - offset == after.counters.missed);
            REQUIRE(before.policy.resident() == after.policy.resident());
        }
    }
}

// A list in pieces between batches: what a batch brought stays, what was filled is older and the first to go, the least wanted before others.
TEST(fill_between_batches) {
    std::mt19937 rng(11);
    for (int round = 0; round < 500; ++round) {
        const int n_expert = 8 + (int) (rng() % 60);
        const int n_slots  = 4 + (int) (rng() % (n_expert - 4));
        std::vector<int32_t> wanted(n_expert);
        for (int e = 0; e < n_expert; ++e) {
            wanted[e] = e;
        }
        std::shuffle(wanted.begin(), wanted.end(), rng);
        wanted.resize(1 + rng() % n_slots);
        const int n_wanted = (int) wanted.size();

        cache c(n_expert, n_slots);
        c.policy.clear(n_wanted);
        std::set<int> brought, admitted;
        batches source { std::mt19937(round), { n_expert, 2, 2, n_slots }, n_expert/2 };
        for (int at = 0; at < n_wanted; ) {
            const auto ids = source.next();
            c.fetch(ids);
            brought.insert(ids.begin(), ids.end());
            const auto before = c.policy.resident();
            const int  n      = std::min(n_wanted - at, 1 + (int) (rng() % 8));
            const int  n_empty = n_slots - (int) before.size();
            const std::vector<int32_t> piece(wanted.begin() + at, wanted.begin() + at + n);
            int n_absent = 0;
            for (const int e : piece) {
                n_absent += !c.is_resident(e);
            }
            const int n_filled = c.fill(piece, n_wanted - at);
            REQUIRE(n_filled == std::min(n_absent, n_empty));
            REQUIRE(c.is_consistent());
            for (const int e : before) {
                REQUIRE(c.is_resident(e));
            }
            for (int j = 0; j < n_filled; ++j) {
                admitted.insert(c.policy.jobs[2*j]);
            }
            at += n;
        }
        for (int s = 0; s < n_slots; ++s) {
            REQUIRE(c.content[s] == c.policy.expert_of[s]);
        }
        // what no token used since is older than all that tokens used, in the order of the list
        const auto order = c.policy.resident();
        size_t n_old = 0;
        while (n_old < order.size() && c.policy.stamp[c.policy.slot_of[order[n_old]]] <= n_wanted) {
            ++n_old;
        }
        const auto place = [&](int e) { return std::find(wanted.begin(), wanted.end(), e) - wanted.begin(); };
        for (size_t i = 0; i < order.size(); ++i) {
            REQUIRE(i < n_old ? admitted.count(order[i]) : brought.count(order[i]));
            REQUIRE(i == 0 || i >= n_old || place(order[i]) < place(order[i - 1]));
        }
        CHECK_EQ(c.filled.looked_up, (uint64_t) n_wanted);
        CHECK_EQ(c.filled.evicted, 0u);
    }
}

TEST(clock_wrap) {
    for (const auto & s : { shape { 16, 4, 1, 4 }, shape { 32, 4, 2, 8 }, shape { 64, 6, 3, 20 } }) {
        cache     c(s.n_expert, s.n_slots);
        naive_lru naive { {}, {}, s.n_slots };
        *c.policy.clock = naive.now = std::numeric_limits<int32_t>::max() - 20;
        batches source { std::mt19937(7), s, s.n_expert/2 };
        for (int round = 0; round < 100; ++round) {
            const auto ids   = source.next();
            const auto slots = c.fetch(ids);
            REQUIRE(slots == naive.fetch(ids));
            REQUIRE(c.is_consistent());
            for (size_t i = 0; i < ids.size(); ++i) {
                REQUIRE(c.content[slots[i]] == ids[i]);
            }
        }
        CHECK_EQ(*c.policy.clock, 80);
    }
}

TEST(clear_forgets) {
    cache c(8, 4);
    c.policy.seen[3] = 9;
    c.fetch({ 1, 2, 3 });
    c.policy.clear();
    CHECK(c.policy.resident().empty());
    CHECK_EQ(*c.policy.clock, 0);
    CHECK_EQ(*c.policy.n_jobs, 0);
    CHECK_EQ(std::count(c.policy.seen, c.policy.seen + 8, 0), 8);
    CHECK(c.fetch({ 3 }) == (std::vector<int> { 0 }));
    CHECK_EQ(*c.policy.n_jobs, 1);
}

// seen belongs to stream: it survives any number of fetches
TEST(fetch_leaves_seen_alone) {
    cache c(8, 4);
    for (int e = 0; e < 8; ++e) {
        c.policy.seen[e] = e;
    }
    c.fetch({ 1, 2, 3 });
    c.fetch({ 4, 5, 6, 7 });
    for (int e = 0; e < 8; ++e) {
        CHECK_EQ(c.policy.seen[e], e);
    }
}

TEST_MAIN("test-slot-policy")
