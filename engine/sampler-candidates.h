#pragma once

// top-candidates.h for a sampler chain. Header only: it is common/sampling.cpp that uses it, and common links the C API of libllama.

#include "llama-phase.h"
#include "llama.h"
#include "top-candidates.h"

#include <cmath>
#include <cstdint>
#include <vector>

// Puts the candidates of `scores` into `cur`; `scores` is as it was afterwards. `biases` are those of the request, which the chain's logit-bias
// adds, beside those of the model.
// False, with `cur` as it was: something else than logit-bias and top-k looks at them first, or the context has no phases.
inline bool phase_top_candidates(const llama_context * ctx, llama_sampler * chain, int32_t top_k, const std::vector<llama_logit_bias> & biases, float * scores,
        int32_t n_vocab, std::vector<llama_token_data> & cur) {
    constexpr int32_t SORTED_IN_PLACE = 128; // upstream sorts more of them in another way

    if (!scores || top_k < 1 || top_k > SORTED_IN_PLACE || top_k >= n_vocab || !llama_phase_present(ctx)) {
        return false;
    }
    bool biased = false;
    const auto name_of = [chain](int32_t i) { return llama_sampler_name(llama_sampler_chain_get(chain, i)); };
    if (!phase_top_k_is_first(llama_sampler_chain_n(chain), name_of, biased)) {
        return false;
    }
    std::vector<llama_logit_bias> added;
    if (biased) {
        int32_t n_suppressed = 0;
        const llama_token * suppressed = llama_vocab_get_suppress_tokens(llama_model_get_vocab(llama_get_model(ctx)), &n_suppressed);
        added = biases;
        for (int32_t i = 0; i < n_suppressed; ++i) {
            added.push_back({ suppressed[i], -INFINITY });
        }
    }
    if (!phase_biases_are_plain(added)) {
        return false;
    }
    cur.clear();
    phase_top_candidates(scores, n_vocab, top_k, added, cur);
    return true;
}
