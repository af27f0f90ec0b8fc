// Rows kept on the device: every slot that is used holds its row's newest bytes, whatever was asked, written and forgotten before.

#include "check.h"
#include "kv-rows-tables.h"
#include "kv-rows.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace {

// The K/V of a layer: host rows and slots are version numbers.
struct layer {
    std::vector<int32_t> words;
    phase_kv_rows_state  s;
    std::vector<int64_t> host, device;
    phase_kv_rows_one_thread g;
    phase_kv_rows_shared shared {};
    int64_t              version = 0;

    layer(int32_t n_rows, int32_t n_slots) :
        words(phase_kv_rows_words(n_rows, n_slots), 12345),
        s(phase_kv_rows_state_at(words.data(), n_rows, n_slots)), host(n_rows), device(n_slots, -1) {
        phase_kv_rows_clear(g, s);
    }

    void write(const std::vector<int32_t> & rows, int32_t n_in_place = 8) {
        phase_kv_rows_forget(g, s, [&](int32_t i) { return (int64_t) rows[i]; }, (int32_t) rows.size(), n_in_place);
        for (const auto row : rows) {
            host[row] = ++version;
        }
    }

    int32_t copy(int32_t n_jobs) {
        for (int32_t i = 0; i < n_jobs; ++i) {
            device[s.jobs[2*i + 1]] = host[s.jobs[2*i]];
        }
        return n_jobs;
    }

    int32_t settle() { // the end of a prompt's micro-batch
        return copy(phase_kv_rows_lookup(g, s, shared, phase_kv_rows_list { s.pending }, s.head[PHASE_KV_ROWS_N_PENDING]));
    }

    int32_t read(const std::vector<int32_t> & rows) {
        const auto before = tables();
        auto       slots  = rows; // in place
        const int32_t n_jobs = copy(phase_kv_rows_lookup(g, s, shared, phase_kv_rows_list { slots.data() }, (int32_t) rows.size(), slots.data()));
        for (size_t i = 0; i < rows.size(); ++i) {
            CHECK(slots[i] == (rows[i] < 0 ? PHASE_KV_ROWS_NONE : s.map[rows[i]]));
            CHECK(rows[i] < 0 || (slots[i] >= 0 && device[slots[i]] == host[rows[i]]));
        }
        const char * wrong = kv_rows_judge(before, tables(), rows);
        CHECK_EQ(std::string(wrong ? wrong : ""), "");
        return n_jobs;
    }

    kv_rows_tables tables() const {
        return kv_rows_tables::of(s, [](const int32_t * at, int32_t n) { return std::vector<int32_t>(at, at + n); });
    }

    bool consistent() const { return tables().consistent(); }
};

std::vector<int32_t> some(std::mt19937 & random, int32_t n_rows, int32_t n) {
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < n; ++i) {
        rows.push_back((int32_t) (random() % (n_rows + n_rows/8)) - n_rows/8); // some are none; some twice
    }
    return rows;
}

} // namespace

TEST(random_steps) {
    std::mt19937 random(1);
    for (const auto & [n_rows, n_slots] : { std::pair(64, 7), { 64, 64 }, { 64, 100 }, { 1000, 40 }, { 60000, 20000 } }) {
        layer kept(n_rows, n_slots);
        for (int step = 0; step < 300; ++step) {
            const auto rows = some(random, n_rows, 1 + random() % n_slots);
            switch (random() % 4) {
                case 0: {
                    std::set<int32_t> distinct;
                    for (const auto row : rows) {
                        distinct.insert(std::max(row, 0));
                    }
                    kept.write({ distinct.begin(), distinct.end() });
                    if (random() % 2) {
                        kept.settle();
                    }
                    break;
                }
                case 1:
                    if (random() % 20 == 0) {
                        phase_kv_rows_clear(kept.g, kept.s);
                        std::fill(kept.device.begin(), kept.device.end(), -1);
                    }
                    break;
                default:
                    kept.read(rows);
                    CHECK(kept.read(rows) == 0); // all of them are there now
            }
            CHECK(kept.consistent());
        }
    }
}

// as generation does: the rows of the step before, but for a few
TEST(steps_that_are_much_alike) {
    std::mt19937 random(2);
    const int32_t windows[] = { PHASE_KV_ROWS_SMALL_WINDOW, PHASE_KV_ROWS_WINDOW };
    for (const int32_t n_slots : { 700, windows[0], windows[0] + 1, 3*windows[0] - 5, windows[1], 2*windows[1] + 3 }) {
        layer kept(4*n_slots, n_slots);
        std::vector<int32_t> rows;
        for (int32_t i = 0; i < n_slots/3; ++i) {
            rows.push_back(i);
        }
        for (int step = 0; step < 100; ++step) {
            const int32_t n_other = step % 10 == 0 ? n_slots/4 : (int32_t) (random() % (PHASE_KV_ROWS_FEW + 3));
            for (int32_t i = 0; i < n_other; ++i) {
                rows[random() % rows.size()] = (int32_t) (random() % kept.s.n_rows);
            }
            kept.write({ rows[random() % rows.size()] });
            kept.read(rows);
        }
    }
}

TEST(a_small_window_with_too_few_victims) {
    const int32_t n_slots = 4*PHASE_KV_ROWS_SMALL_WINDOW;
    layer kept(2*n_slots, n_slots);
    std::vector<int32_t> all, first;
    for (int32_t i = 0; i < n_slots; ++i) {
        all.push_back(i);
    }
    kept.read(all);
    const int32_t hand = kept.s.head[PHASE_KV_ROWS_HAND];
    for (int32_t i = 0; i < PHASE_KV_ROWS_SMALL_WINDOW - 1; ++i) {
        first.push_back(kept.s.owner[(hand + i) % n_slots]);
    }
    first.push_back(n_slots);
    first.push_back(n_slots + 1);
    CHECK(kept.read(first) == 2);
    CHECK(kept.read(first) == 0);
}

TEST(lists_of_none_and_of_one_row) {
    layer kept(100, 10);
    CHECK(kept.read({}) == 0);
    CHECK(kept.read({ -1, -1, -1 }) == 0);
    CHECK(kept.read({ 99, 99, -1, 99, 99, 99, 99, 99, 99 }) == 1);
    CHECK(kept.read({ 99 }) == 0);
    CHECK(kept.read({ 0 }) == 1);
}

TEST(least_recently_used_goes_first) {
    layer kept(100, 4);
    kept.read({ 10, 11, 12, 13 });
    kept.read({ 11, 12 });
    kept.read({ 13 });
    CHECK(kept.read({ 20 }) == 1);
    CHECK(kept.s.map[10] == PHASE_KV_ROWS_NONE);
    CHECK(kept.read({ 13, 20 }) == 0);
    CHECK(kept.read({ 30, 31 }) == 2);
    CHECK(kept.s.map[11] == PHASE_KV_ROWS_NONE && kept.s.map[12] == PHASE_KV_ROWS_NONE);
    CHECK(kept.read({ 13, 20, 30, 31 }) == 0);
}

TEST(a_written_row_is_copied_again) {
    for (const int32_t n_slots : { 8, 100 }) {
        layer kept(100, n_slots);
        kept.read({ 1, 2, 3 });
        kept.write({ 2 });
        CHECK(kept.read({ 1, 2, 3 }) == 1);
    }
}

TEST(prompts_leave_their_newest_rows) {
    layer kept(100, 10);
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < 50; ++i) {
        rows.push_back(i);
    }
    kept.write(rows);
    CHECK(kept.settle() == 10);
    CHECK(kept.read({ 40, 41, 42, 43, 44, 45, 46, 47, 48, 49 }) == 0);
    kept.write({ 50 });
    CHECK(kept.settle() == 0); // so few come with the next lookup
}

TEST(window_with_too_few_victims) {
    const int32_t n_slots = 2*PHASE_KV_ROWS_WINDOW;
    layer kept(4*n_slots, n_slots);
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < n_slots; ++i) {
        rows.push_back(i);
    }
    kept.read(rows);
    for (int32_t i = 0; i < 100; ++i) {
        rows[n_slots - 1 - i] = n_slots + i; // all but 100 slots are in use
    }
    CHECK(kept.read(rows) == 100);
    CHECK(kept.consistent());
}

TEST(ages) {
    int32_t last = 0;
    for (uint32_t age = 0; age < 100000; ++age) {
        const int32_t group = phase_kv_rows_age(age);
        CHECK(group >= last && group < PHASE_KV_ROWS_AGES);
        last = group;
    }
    CHECK(phase_kv_rows_age(15) == 15 && phase_kv_rows_age(16) == 16 && phase_kv_rows_age(31) == 16 && phase_kv_rows_age(32) == 17);
    CHECK(phase_kv_rows_age(PHASE_KV_ROWS_OLD) == PHASE_KV_ROWS_AGES - 1 && phase_kv_rows_age(0xffffffffu) == PHASE_KV_ROWS_AGES - 1);
}

TEST_MAIN("test-kv-rows")
