#pragma once

// top-candidates.h for a sampler chain. Header only: it is common/sampling.cpp that uses it, and common links the C API of libllama.

#include "llama-phase.h"
#include "llama.h"
#include "top-candidates.h"

#include <cmath>
#include <cstdint>
#include <vector>

// Puts the candidates of output i of `ctx`, whose computation has been waited for, into `cur`. `biases` are those of the request, which the
// chain's logit-bias adds, beside those of the model.
// False, with `cur` as it was: something else than logit-bias and top-k looks at them first, or the context has no phases.
inline bool phase_top_candidates(llama_context * ctx, int32_t i, llama_sampler * chain, int32_t top_k, const std::vector<llama_logit_bias> & biases,
        std::vector<llama_token_data> & cur) {
    constexpr int32_t SORTED_IN_PLACE = 128; // upstream sorts more of them in another way

    const llama_vocab * vocab   = llama_model_get_vocab(llama_get_model(ctx));
    const int32_t       n_vocab = llama_vocab_n_tokens(vocab);
    if (top_k < 1 || top_k > SORTED_IN_PLACE || top_k >= n_vocab) {
        return false;
    }
    bool biased = false;
    const auto name_of = [chain](int32_t j) { return llama_sampler_name(llama_sampler_chain_get(chain, j)); };
    if (!phase_top_k_is_first(llama_sampler_chain_n(chain), name_of, biased)) {
        return false;
    }
    std::vector<llama_logit_bias> added;
    if (biased) {
        int32_t n_suppressed = 0;
        const llama_token * suppressed = llama_vocab_get_suppress_tokens(vocab, &n_suppressed);
        added = biases;
        for (int32_t j = 0; j < n_suppressed; ++j) {
            added.push_back({ suppressed[j], -INFINITY });
        }
    }
    if (!phase_biases_are_plain(added)) {
        return false;
    }
    float * scores = llama_phase_host_scores(ctx, i);
    if (!scores) {
        return false;
    }
    cur.clear();
    phase_top_candidates(scores, n_vocab, top_k, added, cur);
    return true;
}
