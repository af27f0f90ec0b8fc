// top-candidates: a partial sort of what it keeps against one of everything, bit for bit.

#include "check.h"

#include "top-candidates.h"

#include <cstring>

namespace {

struct token {
    int32_t id;
    float   logit;
    float   p;
};

bool better(const token & a, const token & b) {
    return a.logit > b.logit;
}

// the k best, as upstream sorts them
std::vector<token> sorted(std::vector<token> tokens, int32_t k) {
    std::partial_sort(tokens.begin(), tokens.begin() + k, tokens.end(), better);
    tokens.resize(k);
    return tokens;
}

// how many were kept; 0: the best ones differ
size_t kept(const std::vector<float> & scores, int32_t k) {
    std::vector<token> all, some;
    for (size_t i = 0; i < scores.size(); ++i) {
        all.push_back({ (int32_t) i, scores[i], 0.0f });
    }
    phase_top_candidates(scores.data(), (int32_t) scores.size(), k, some);
    const auto a = sorted(all, k), b = sorted(some, k);
    const bool same = std::equal(a.begin(), a.end(), b.begin(), [](const token & x, const token & y) {
        return x.id == y.id && std::memcmp(&x.logit, &y.logit, sizeof(float)) == 0;
    });
    return same ? some.size() : 0;
}

TEST(the_best_are_those_of_a_full_sort) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0, 3);
    for (const int32_t k : { 1, 2, 10, 40, 128 }) {
        for (const size_t n : { 129u, 1000u, 4096u, 151936u }) {
            std::vector<float> scores(n);
            for (auto & x : scores) {
                x = normal(random);
            }
            const size_t n_kept = kept(scores, k);
            CHECK(n_kept >= (size_t) k);
            CHECK(n < 100000 || n_kept < n/10);
        }
    }
}

// ties at the edge and inside: the order among equals is the sort's own
TEST(ties_fall_as_in_a_full_sort) {
    std::mt19937 random(5);
    for (int round = 0; round < 300; ++round) {
        std::vector<float> scores(200 + random() % 3000);
        const int levels = 2 + random() % 60;
        for (auto & x : scores) {
            x = (float) (random() % levels);
        }
        CHECK(kept(scores, 1 + random() % 128) > 0);
    }
}

TEST(order_and_infinities_do_not_matter) {
    std::vector<float> rising(5000), falling(5000), masked(5000, -INFINITY);
    for (int i = 0; i < 5000; ++i) {
        rising[i]  = (float) i;
        falling[i] = (float) -i;
    }
    masked[4321] = 1.0f;
    masked[77]   = INFINITY;
    for (const auto & scores : { rising, falling, masked }) {
        CHECK(kept(scores, 40) > 0);
    }
    CHECK_EQ(kept(falling, 40), size_t(40 + 64*2)); // what comes before the first ranking
}

// a broken model: whatever upstream makes of it
TEST(nan_is_treated_as_upstream_does) {
    std::mt19937 random(9);
    for (int round = 0; round < 100; ++round) {
        std::vector<float> scores(3000);
        for (auto & x : scores) {
            x = random() % 10 == 0 ? NAN : (float) (random() % 1000);
        }
        CHECK(kept(scores, 1 + random() % 128) > 0);
    }
    CHECK(kept(std::vector<float>(500, NAN), 40) > 0);
}

} // namespace

TEST_MAIN("test-top-candidates")
