#pragma once

// What draft-queue.h uses of llama.cpp's common.

#include "llama.h"

#include <array>
#include <vector>

struct llama_embd {
    const void * data;
    size_t       n_embd;
};

struct common_batch {
    struct token {
        llama_token              id;
        std::array<llama_pos, 4> pos;
        llama_seq_id             seq_id;
        llama_embd               embd;
    };

    std::vector<token> tokens;

    common_batch() = default;
    explicit common_batch(llama_context *) {}

    llama_batch_ext * get() { return (llama_batch_ext *) this; }
    int32_t           size() const { return (int32_t) tokens.size(); }
    void              clear() { tokens.clear(); }
};
