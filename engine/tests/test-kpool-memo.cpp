// The memo against what is computed anew, over random histories: appended, rewound, built anew.

#include "check.h"
#include "kpool-memo.h"

#include <algorithm>
#include <numeric>
#include <set>

bool phase_select_is_fast() {
    return true;
}

namespace {

constexpr size_t N_KV = 256;

struct sequence {
    int32_t pos_min = 0;
    bool    shared  = false;
    size_t  j_next  = 0;

    phase_kpool_memo::cell_list cells;
    std::vector<uint32_t>       pools;
    mutable phase_kpool_memo    memo;
};

struct state {
    std::vector<uint32_t> is_new;
    uint32_t              generation = 7;
};

// as llama_memory_hybrid_idx::kpool_layout_update
void update(sequence & sq, const std::set<std::pair<int32_t, uint32_t>> & now, int32_t stale_from, size_t kpool) {
    const bool stale = stale_from >= 0 && !phase_kpool_rewind(sq, now, stale_from, true, kpool);
    if (!stale && !sq.cells.empty() && !now.empty() && sq.pos_min == now.begin()->first) {
        for (auto it = now.upper_bound(sq.cells.back()); it != now.end(); ++it) {
            sq.cells.push_back(*it);
        }
    }
    if (sq.cells.size() != now.size() || stale) {
        sq.memo.clear();
        sq.cells.assign(now.begin(), now.end());
        sq.pools.clear();
        sq.j_next  = 0;
        sq.pos_min = now.empty() ? 0 : now.begin()->first;
    }
    for (; sq.j_next + kpool <= sq.cells.size(); sq.j_next += kpool) {
        sq.pools.push_back((uint32_t) sq.j_next);
    }
}

std::vector<uint16_t> plain_mask(const std::set<std::pair<int32_t, uint32_t>> & now, int32_t pos, size_t n) {
    std::vector<uint16_t> row(n, 0xfc00);
    for (const auto & [p, cell] : now) {
        if (p <= pos && cell < n) {
            row[cell] = 0;
        }
    }
    return row;
}

} // namespace

TEST(random_histories) {
    std::mt19937 random(3);
    for (int history = 0; history < 60; ++history) {
        const size_t kpool = 2 + history % 3;
        std::set<std::pair<int32_t, uint32_t>> now;
        std::vector<uint32_t> free_cells(N_KV);
        std::iota(free_cells.begin(), free_cells.end(), 0);
        std::shuffle(free_cells.begin(), free_cells.end(), random);
        sequence sq;
        int32_t  next = history % 5;
        for (int step = 0; step < 60; ++step) {
            int32_t stale = -1;
            if (random() % 4 == 0 && next > 0) { // the tail goes, or the beginning
                const bool tail = random() % 3 != 0;
                const int32_t at = (int32_t) (random() % next);
                stale = tail ? at : 0;
                for (auto it = now.begin(); it != now.end();) {
                    if (tail ? it->first >= at : it->first < at) {
                        free_cells.push_back(it->second);
                        it = now.erase(it);
                    } else {
                        ++it;
                    }
                }
                next = tail ? at : next;
            }
            for (int n = random() % 9; n > 0 && !free_cells.empty(); --n) {
                now.insert({ next++, free_cells.back() });
                free_cells.pop_back();
            }
            update(sq, now, stale, kpool);
            REQUIRE(sq.cells == phase_kpool_memo::cell_list(now.begin(), now.end()));
            REQUIRE(sq.pools.size() == sq.cells.size()/kpool);

            state st;
            st.is_new.assign(sq.pools.size() + 3, 0);
            const size_t first_new = random() % (sq.pools.size() + 1);
            if (first_new < sq.pools.size()) {
                st.is_new[3 + first_new] = st.generation;
            }
            std::vector<int32_t> pcell(3 + sq.pools.size(), -7), pidx((3 + sq.pools.size())*kpool, -7), end(3, -7);
            const int32_t inert = random() % 2 ? -1 : 999;
            const size_t n = phase_kpool_fill(sq, st, kpool, 1000, inert, pcell.data(), pidx.data(), end);
            CHECK_EQ(n, first_new);
            REQUIRE(end.size() == 3 + n);
            for (size_t i = 0; i < n; ++i) {
                const auto * members = &sq.cells[sq.pools[i]];
                CHECK_EQ(pcell[3 + i], 1000 + (int32_t) members[kpool - 1].second);
                CHECK_EQ(end[3 + i], members[kpool - 1].first);
                for (size_t k = 0; k < kpool; ++k) {
                    CHECK_EQ(pidx[(3 + i)*kpool + k], inert >= 0 ? inert : (int32_t) members[k].second);
                }
            }
            const auto view = phase_kpool_seq_of(sq, N_KV);
            for (const int32_t pos : { next - 1, next - 3, next + 2, 0 }) {
                std::vector<uint16_t> row(N_KV);
                CHECK(phase_kpool_mask(*view.memo, *view.cells, pos, N_KV, row.data()));
                CHECK(row == plain_mask(now, pos, N_KV));
            }
        }
    }
}

TEST(cells_that_share_a_position_are_left_to_others) {
    sequence sq;
    update(sq, { { 0, 4 }, { 1, 5 }, { 1, 6 }, { 2, 7 } }, -1, 4);
    const auto view = phase_kpool_seq_of(sq, N_KV);
    std::vector<uint16_t> row(N_KV, 1);
    CHECK(!phase_kpool_mask(*view.memo, *view.cells, 1, N_KV, row.data()));
    CHECK(row == std::vector<uint16_t>(N_KV, 1));
    CHECK(phase_kpool_mask(*view.memo, *view.cells, 2, N_KV, row.data()));
}

TEST(shared_cells_and_other_pools_are_built_anew) {
    const std::set<std::pair<int32_t, uint32_t>> now = { { 0, 0 }, { 1, 1 }, { 2, 2 } };
    sequence sq;
    update(sq, now, -1, 2);
    CHECK(!phase_kpool_rewind(sq, now, 2, false, 2));
    CHECK(!phase_kpool_rewind(sq, now, 0, true, 2));
    sq.shared = true;
    CHECK(!phase_kpool_rewind(sq, now, 2, true, 2));
    CHECK_EQ(sq.cells.size(), 3u);
}

TEST(low_cells_are_enough_for_the_smallest_free_ones) {
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        const size_t n = random() % 600;
        std::vector<int32_t> pcell;
        for (size_t i = 0; i < n; ++i) {
            pcell.push_back((int32_t) (round % 2 ? i : random() % 2000));
        }
        const size_t n_free = 1 + random() % 40;
        auto low = phase_kpool_low_cells(pcell.data(), n, n_free);
        const std::set<int64_t> all(pcell.begin(), pcell.end()), some(low.begin(), low.end());
        int64_t a = 0, b = 0;
        for (size_t i = 0; i < n_free; ++i, ++a, ++b) {
            while (all.count(a)) { ++a; }
            while (some.count(b)) { ++b; }
            CHECK_EQ(a, b);
        }
    }
}

TEST_MAIN("test-kpool-memo")
