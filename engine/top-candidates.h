#pragma once

// What a sampler chain whose first active sampler is top-k may choose from, without a table of the whole vocabulary: filling and sorting
// one of 150,000 tokens takes 0.3 to 0.6 ms per token, during which the GPU waits.
//
// The result is exactly upstream's, ties included. Without equal scores among the best, every way of sorting finds the same. With them it is
// std::partial_sort's own order: it keeps the best k so far in a heap and never looks again at an element that is not better than the heap's worst;
// so leaving such elements out, in place, changes nothing.
//
// Header only, no llama.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// Whether top-k is the first active sampler, or the first behind logit-bias: then `biased`. `name_of(i)` is upstream's name of sampler i of n, which
// begins with '?' when it is set to do nothing.
template <typename F>
bool phase_top_k_is_first(int32_t n, const F & name_of, bool & biased) {
    biased = false;
    for (int32_t i = 0; i < n; ++i) {
        const std::string name = name_of(i);
        if (name.front() == '?') {
            continue;
        }
        if (name != "logit-bias" || biased) {
            return name == "top-k";
        }
        biased = true;
    }
    return false;
}

// Appends to `out`, in the order of their ids, the k best of n tokens and few others. False, with nothing done, when equal scores leave open which
// those are or in which order, when the first k are not all numbers (upstream begins with those), or n is small.
template <typename Token>
bool phase_top_distinct(const float * scores, int32_t n, int32_t k, std::vector<Token> & out) {
    constexpr int32_t BLOCK = 256;
    constexpr int32_t LANES = 4;
    typedef float lanes __attribute__((vector_size(LANES*sizeof(float)))); // left alone, compilers take the maximum one by one

    const int32_t n_blocks = n/BLOCK; // the rest is looked at one by one
    if (n_blocks < 2*k || std::any_of(scores, scores + k, [](float x) { return std::isnan(x); })) {
        return false;
    }
    std::vector<float> most(n_blocks);
    for (int32_t b = 0; b < n_blocks; ++b) {
        const float * x = scores + b*BLOCK;
        lanes m[4];
        std::memcpy(m, x, sizeof(m));
        for (int32_t j = 0; j < 4; ++j) {
            m[j] = m[j] == m[j] ? m[j] : lanes {} - INFINITY; // not a number
        }
        for (int32_t i = 4*LANES; i < BLOCK; i += 4*LANES) {
            lanes y[4];
            std::memcpy(y, x + i, sizeof(y));
            for (int32_t j = 0; j < 4; ++j) {
                m[j] = y[j] > m[j] ? y[j] : m[j];
            }
        }
        for (int32_t j = 1; j < 4; ++j) {
            m[0] = m[j] > m[0] ? m[j] : m[0];
        }
        most[b] = std::max(std::max(m[0][0], m[0][1]), std::max(m[0][2], m[0][3]));
    }
    // k blocks reach it, so k scores do
    std::vector<float> best = most;
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
    const float least = best[k - 1];

    const size_t begin = out.size();
    best.clear();
    const auto look_at = [&](int32_t from, int32_t to) {
        for (int32_t i = from; i < to; ++i) {
            if (scores[i] >= least) {
                out.push_back(Token { i, scores[i], 0.0f });
                best.push_back(scores[i]);
            }
        }
    };
    for (int32_t b = 0; b < n_blocks; ++b) {
        if (most[b] >= least) {
            look_at(b*BLOCK, (b + 1)*BLOCK);
        }
    }
    look_at(n_blocks*BLOCK, n);

    const auto end = best.begin() + std::min<size_t>(best.size(), k + 1);
    std::partial_sort(best.begin(), end, best.end(), std::greater<float>());
    if (std::adjacent_find(best.begin(), end) != end) {
        out.resize(begin);
        return false;
    }
    return true;
}

// Appends to `out`, in the order of their ids, what the k best of n > k tokens are sorted from. With scores [n] that leave their order open: the first
// k and of the others at least those that are better than the k-th best before them.
template <typename Token>
void phase_top_candidates(const float * scores, int32_t n, int32_t k, std::vector<Token> & out) {
    constexpr int32_t BLOCK = 64;

    if (phase_top_distinct(scores, n, k, out)) {
        return;
    }
    float   least  = -INFINITY; // at most the k-th best so far
    bool    exact  = std::none_of(scores, scores + k, [](float x) { return std::isnan(x); }); // else nothing is known of the heap
    size_t  ranked = 0;         // of out, when `least` was found
    std::vector<float> best;

    for (int32_t i = 0; i < k; ++i) {
        out.push_back(Token { i, scores[i], 0.0f });
    }
    for (int32_t begin = k; begin < n; begin += BLOCK) {
        const int32_t end = std::min(n, begin + BLOCK);

        int32_t n_better = 0; // without a branch per score
        for (int32_t i = begin; i < end; ++i) {
            n_better += scores[i] > least;
        }
        if (n_better == 0 && exact) {
            continue;
        }
        for (int32_t i = begin; i < end; ++i) {
            if (scores[i] > least || !exact) {
                out.push_back(Token { i, scores[i], 0.0f });
            }
        }
        if (exact && out.size() > ranked + std::max<size_t>(128, ranked/2)) {
            ranked = out.size();
            best.resize(ranked);
            std::transform(out.begin(), out.end(), best.begin(), [](const Token & token) { return token.logit; });
            std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<float>());
            least = best[k - 1];
        }
    }
}

// Not many, and no token twice, which upstream's logit-bias treats in another way when it does not see the whole vocabulary.
template <typename Bias>
bool phase_biases_are_plain(const std::vector<Bias> & biases) {
    constexpr size_t MOST = 64;

    bool plain = biases.size() <= MOST;
    for (size_t i = 0; plain && i < biases.size(); ++i) {
        plain = std::none_of(biases.begin(), biases.begin() + i, [&](const Bias & other) { return other.token == biases[i].token; });
    }
    return plain;
}

// The same in front of a sampler that adds plain `biases` (token, bias) to the scores: chooses by the sums, and leaves what it appends and `scores`
// without them.
template <typename Token, typename Bias>
void phase_top_candidates(float * scores, int32_t n, int32_t k, const std::vector<Bias> & biases, std::vector<Token> & out) {
    std::vector<std::pair<int32_t, float>> raw;
    for (const auto & bias : biases) {
        if (bias.token >= 0 && bias.token < n) {
            raw.emplace_back(bias.token, scores[bias.token]);
            scores[bias.token] += bias.bias;
        }
    }
    const size_t begin = out.size();
    phase_top_candidates(scores, n, k, out);
    for (const auto & [token, score] : raw) {
        scores[token] = score;
        const auto it = std::lower_bound(out.begin() + begin, out.end(), token, [](const Token & a, int32_t id) { return a.id < id; });
        if (it != out.end() && it->id == token) {
            it->logit = score;
        }
    }
}
