#pragma once

// What a sampler chain whose first active sampler is top-k may choose from, without a table of the whole vocabulary: filling and sorting
// one of 150,000 tokens takes 0.3 to 0.6 ms per token, during which the GPU waits.
//
// The result is exactly upstream's, ties included. std::partial_sort keeps the best k so far in a heap and never looks again at an element
// that is not better than the heap's worst; so leaving such elements out, in place, changes nothing.
//
// Header only, no llama.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

// Appends to `out`, in the order of their ids, the first k of n > k tokens and of the others at least those that are better than the k-th
// best before them. The scores of those are [n].
template <typename Token>
void phase_top_candidates(const float * scores, int32_t n, int32_t k, std::vector<Token> & out) {
    constexpr int32_t BLOCK = 64;

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
