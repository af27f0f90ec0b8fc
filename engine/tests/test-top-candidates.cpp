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
            CHECK(n < 100000 || k > 40 || n_kept < (size_t) k + 20);
        }
    }
}

// one score twice, inside or at the edge: the order is the full sort's, which only the longer way finds
TEST(a_tie_among_the_best_is_noticed) {
    std::mt19937 random(21);
    std::vector<token> out;
    for (const int32_t k : { 1, 5, 40 }) {
        for (int round = 0; round < 60; ++round) {
            std::vector<float> scores(30000 + random() % 300);
            for (size_t i = 0; i < scores.size(); ++i) {
                scores[i] = (float) i;
            }
            std::shuffle(scores.begin(), scores.end(), random);
            const auto rank = [&](int32_t r) { return std::find(scores.begin(), scores.end(), (float) (scores.size() - 1 - r)); };
            out.clear();
            CHECK(phase_top_distinct(scores.data(), (int32_t) scores.size(), k, out));
            CHECK(out.size() >= (size_t) k);
            const int32_t at = random() % k; // with the next one
            *rank(at) = *rank(at + 1);
            out.clear();
            CHECK(!phase_top_distinct(scores.data(), (int32_t) scores.size(), k, out));
            CHECK(out.empty());
            CHECK(kept(scores, k) > 0);
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
    for (const size_t at : { 3u, 39u, 40u, 20000u, 40099u }) { // among those that upstream begins with, and behind
        std::vector<float> scores(40100);
        for (size_t i = 0; i < scores.size(); ++i) {
            scores[i] = (float) (i*7919 % 40100);
        }
        scores[at] = NAN;
        CHECK(kept(scores, 40) > 0);
    }
}

struct bias {
    int32_t token;
    float   bias;
};

// upstream's logit-bias on candidates that are not the whole vocabulary
std::vector<token> with(std::vector<token> tokens, const std::vector<bias> & biases) {
    for (auto & x : tokens) {
        for (const auto & b : biases) {
            if (x.id == b.token) {
                x.logit += b.bias;
                break;
            }
        }
    }
    return tokens;
}

// a token at the top that is forbidden, one at the bottom that is raised, ties that a bias makes, tokens that are not in the vocabulary
TEST(biased_scores_choose_as_if_all_were_seen) {
    std::mt19937 random(11);
    const float amounts[] = { -INFINITY, -2.0f, 0.0f, 1.0f, 3.0f, 100.0f, INFINITY };
    for (int round = 0; round < 500; ++round) {
        std::vector<float> scores(200 + random() % 3000);
        for (auto & x : scores) {
            x = round % 2 ? (float) (random() % 40) : (float) random()/1e8f;
        }
        std::vector<bias> biases { { (int32_t) (std::max_element(scores.begin(), scores.end()) - scores.begin()), -INFINITY } };
        for (int i = random() % 60; i > 0; --i) {
            biases.push_back({ (int32_t) (random() % (scores.size() + 20)) - 10, amounts[random() % 7] });
        }
        if (!phase_biases_are_plain(biases)) {
            continue;
        }
        std::vector<token> all, some;
        for (size_t i = 0; i < scores.size(); ++i) {
            all.push_back({ (int32_t) i, scores[i], 0.0f });
        }
        const int32_t k      = 1 + random() % 128;
        const auto    before = scores;
        phase_top_candidates(scores.data(), (int32_t) scores.size(), k, biases, some);
        const auto a = sorted(with(all, biases), k), b = sorted(with(some, biases), k);
        CHECK(std::equal(a.begin(), a.end(), b.begin(), [](const token & x, const token & y) {
            return x.id == y.id && std::memcmp(&x.logit, &y.logit, sizeof(float)) == 0;
        }));
        CHECK(std::memcmp(before.data(), scores.data(), scores.size()*sizeof(float)) == 0);
        CHECK(std::all_of(some.begin(), some.end(), [&](const token & x) { return std::memcmp(&x.logit, &scores[x.id], sizeof(float)) == 0; }));
    }
}

TEST(biases_that_depend_on_the_whole_vocabulary) {
    CHECK(phase_biases_are_plain(std::vector<bias> {}));
    CHECK(phase_biases_are_plain(std::vector<bias> { { 1, 1.0f }, { 2, 1.0f } }));
    CHECK(!phase_biases_are_plain(std::vector<bias> { { 1, 1.0f }, { 2, 1.0f }, { 1, 1.0f } }));
    std::vector<bias> many;
    for (int32_t i = 0; i < 65; ++i) {
        many.push_back({ i, 1.0f });
    }
    CHECK(!phase_biases_are_plain(many));
}

TEST(chains_that_begin_with_top_k) {
    const auto first = [](std::vector<std::string> names, bool & biased) {
        return phase_top_k_is_first((int32_t) names.size(), [&](int32_t i) { return names[i]; }, biased);
    };
    bool biased = true;
    CHECK(first({ "?logit-bias", "?penalties", "?dry", "top-k", "top-p", "dist" }, biased));
    CHECK(!biased);
    CHECK(first({ "logit-bias", "?penalties", "top-k", "dist" }, biased));
    CHECK(biased);
    CHECK(!first({ "logit-bias", "penalties", "top-k", "dist" }, biased));
    CHECK(!first({ "logit-bias", "logit-bias", "top-k", "dist" }, biased));
    CHECK(!first({ "dry", "logit-bias", "top-k" }, biased));
    CHECK(!first({ "logit-bias", "?top-k", "dist" }, biased));
    CHECK(!first({}, biased));
}

} // namespace

TEST_MAIN("test-top-candidates")
