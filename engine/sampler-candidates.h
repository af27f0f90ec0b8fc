#pragma once

// top-candidates.h for a sampler chain. Header only: it is common/sampling.cpp that uses it, and common links the C API of libllama.

#include "llama-phase.h"
#include "llama.h"
#include "top-candidates.h"

#include <cstdint>
#include <string>
#include <vector>

// Puts the candidates of `scores` into `cur`. False, with `cur` as it was: something else than top-k looks at them first, or the context has no
// phases.
inline bool phase_top_candidates(const llama_context * ctx, llama_sampler * chain, int32_t top_k, const float * scores, int32_t n_vocab,
        std::vector<llama_token_data> & cur) {
    constexpr int32_t SORTED_IN_PLACE = 128; // upstream sorts more of them in another way

    if (!scores || top_k < 1 || top_k > SORTED_IN_PLACE || top_k >= n_vocab || !llama_phase_present(ctx)) {
        return false;
    }
    for (int32_t i = 0; i < llama_sampler_chain_n(chain); ++i) {
        const std::string name = llama_sampler_name(llama_sampler_chain_get(chain, i));
        if (name.front() == '?') { // set to do nothing
            continue;
        }
        if (name != "top-k") {
            return false;
        }
        cur.clear();
        phase_top_candidates(scores, n_vocab, top_k, cur);
        return true;
    }
    return false;
}
