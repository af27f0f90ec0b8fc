#pragma once

// Tokens that a draft context has not computed yet. Upstream's MTP drafter decodes every verify batch at once in the draft context, the
// rejected tokens too, and then drafts. Here the batch waits: rejected tokens are dropped from it, and what is left is decoded together
// with the first token of the next draft, or, while nobody drafts, when the queue is full.
//
// Invariant: the context's memory and then the queue hold the positions of a sequence without a gap. So the queue is decoded before
// anybody else looks at or moves the context's memory: at the end of a request, before a context shift, before a prompt's batch.
//
// Header only: it is common/speculative.cpp that uses it, and common links the C API of libllama.

#include "common.h"
#include "llama-phase.h"
#include "log.h"

#include <algorithm>
#include <utility>
#include <vector>

struct draft_queue {
    // Does nothing until contexts are set: hold() answers false, the others find nothing.
    void set_contexts(llama_context * draft, const llama_context * of_target) {
        context = draft;
        target  = of_target;
        waiting = common_batch(draft);
    }

    // Takes over `batch` (token and embedding per entry) when that has at most `limit` tokens. False: the caller is to decode it now, and
    // nothing waits any more.
    bool hold(const common_batch & batch, int32_t limit) {
        if (!context) {
            return false;
        }
        for (const auto & token : batch.tokens) {
            forget(token.seq_id, token.pos[0]); // of a batch that was computed again, from a checkpoint
        }
        const bool fits = batch.size() <= limit;
        if (!fits || waiting.size() + batch.size() > limit) {
            decode();
        }
        for (int32_t i = 0; fits && i < batch.size(); ++i) {
            const auto & embd = batch.tokens[i].embd;
            const auto * row  = static_cast<const float *>(embd.data);
            rows.emplace_back(row, row + embd.n_embd);
            waiting.tokens.push_back(batch.tokens[i]);
            waiting.tokens.back().embd.data = rows.back().data();
        }
        return fits;
    }

    // The last `n` tokens of a sequence were rejected.
    void drop_last(llama_seq_id seq_id, int32_t n) {
        for (int32_t i = waiting.size(); i-- > 0 && n > 0;) {
            if (waiting.tokens[i].seq_id == seq_id) {
                erase(i);
                --n;
            }
        }
    }

    // Puts what waits at the front of `batch` when there is room for `n_more` tokens within `limit`, else decodes it alone. The embeddings
    // stay valid until the next call of hold().
    void move_to(common_batch & batch, int32_t n_more, int32_t limit) {
        forget_undone();
        if (waiting.size() + n_more > limit) {
            decode();
        }
        moved_rows = std::move(rows);
        rows.clear();
        batch.tokens.insert(batch.tokens.begin(), waiting.tokens.begin(), waiting.tokens.end());
        waiting.clear();
    }

    // Without outputs. A failure leaves a gap, which the context refuses at its next batch.
    void decode() {
        forget_undone();
        if (waiting.size() == 0) {
            return;
        }
        const int32_t rc = llama_process(context, LLAMA_PROCESS_TYPE_DECODE, waiting.get());
        if (rc != 0) {
            LOG_ERR("llama-phase: the draft context could not decode %d tokens that waited: %d\n", waiting.size(), rc);
        }
        waiting.clear();
        rows.clear();
    }

  private:
    void forget(llama_seq_id seq_id, llama_pos from) {
        for (int32_t i = waiting.size(); i-- > 0;) {
            if (waiting.tokens[i].seq_id == seq_id && waiting.tokens[i].pos[0] >= from) {
                erase(i);
            }
        }
    }

    // What the target no longer has: it went back to a checkpoint, from where the batch will be computed again.
    void forget_undone() {
        for (int32_t i = waiting.size(); i-- > 0;) {
            const auto & token = waiting.tokens[i];
            if (token.pos[0] > llama_memory_seq_pos_max(llama_get_memory(target), token.seq_id)) {
                erase(i);
            }
        }
    }

    void erase(int32_t i) {
        waiting.tokens.erase(waiting.tokens.begin() + i);
        rows.erase(rows.begin() + i);
    }

    llama_context *                 context = nullptr;
    const llama_context *           target  = nullptr;
    common_batch                    waiting;
    std::vector<std::vector<float>> rows;       // of waiting.tokens
    std::vector<std::vector<float>> moved_rows; // of those that move_to() gave away
};
