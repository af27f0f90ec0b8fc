// draft-queue: what is computed in a draft context, whatever becomes of the drafts.

#include "check.h"

#include "draft-queue.h"

#include <map>

// positions by sequence: the last of the target, and what the draft context was given
struct llama_context {
    std::map<llama_seq_id, llama_pos>              last;
    std::map<llama_seq_id, std::vector<llama_pos>> computed;
};

llama_memory_t llama_get_memory(const llama_context * ctx) {
    return ctx;
}

llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id seq_id) {
    const auto it = memory->last.find(seq_id);
    return it == memory->last.end() ? -1 : it->second;
}

int32_t llama_process(llama_context * ctx, llama_process_type, llama_batch_ext * batch) {
    for (const auto & token : ((common_batch *) batch)->tokens) {
        ctx->computed[token.seq_id].push_back(token.pos[0]);
    }
    return 0;
}

namespace {

constexpr int32_t LIMIT = 16;

struct fixture {
    llama_context target, draft;
    draft_queue   queue;
    float         row[2] = { 1.0f, 2.0f };

    fixture() { queue.set_contexts(&draft, &target); }

    // the target computes positions from .. from + n - 1 of a sequence, and the queue gets them
    bool verify(llama_seq_id seq_id, llama_pos from, int32_t n) {
        common_batch batch;
        for (int32_t i = 0; i < n; ++i) {
            batch.tokens.push_back({ 7, { from + i, 0, 0, 0 }, seq_id, { row, 2 } });
        }
        target.last[seq_id] = from + n - 1;
        return queue.hold(batch, LIMIT);
    }

    std::vector<llama_pos> moved(llama_seq_id seq_id) {
        common_batch batch;
        queue.move_to(batch, 1, LIMIT);
        std::vector<llama_pos> positions;
        for (const auto & token : batch.tokens) {
            if (token.seq_id == seq_id) {
                positions.push_back(token.pos[0]);
            }
        }
        return positions;
    }
};

using positions = std::vector<llama_pos>;

} // namespace

TEST(what_was_rejected_is_dropped) {
    fixture f;
    CHECK(f.verify(0, 10, 4));
    f.queue.drop_last(0, 2);
    f.target.last[0] = 11;
    CHECK(f.moved(0) == positions({ 10, 11 }));
    CHECK(f.moved(0).empty());
}

TEST(what_a_checkpoint_took_back_goes_before_another_sequence_drafts) {
    for (const bool flushed : { false, true }) {
        fixture f;
        CHECK(f.verify(0, 10, 4));
        CHECK(f.verify(1, 20, 2));
        f.target.last[0] = 9; // back to the checkpoint; nobody says how many were rejected
        if (flushed) {
            f.queue.decode();
            CHECK(f.draft.computed[0].empty());
            CHECK(f.draft.computed[1] == positions({ 20, 21 }));
        } else {
            CHECK(f.moved(0).empty());
        }
        CHECK(f.verify(0, 10, 2)); // computed again
        CHECK(f.moved(0) == positions({ 10, 11 }));
    }
}

TEST(a_batch_that_is_computed_again_takes_the_place_of_the_first) {
    fixture f;
    CHECK(f.verify(0, 10, 4));
    CHECK(f.verify(0, 11, 2));
    CHECK(f.moved(0) == positions({ 10, 11, 12 }));
}

TEST(a_full_queue_is_computed_without_a_gap) {
    fixture f;
    for (int32_t i = 0; i < 8; ++i) {
        CHECK(f.verify(0, 3*i, 3));
    }
    f.queue.decode();
    positions all;
    for (int32_t i = 0; i < 24; ++i) {
        all.push_back(i);
    }
    CHECK(f.draft.computed[0] == all);
    CHECK(!f.verify(0, 24, LIMIT + 1));
}

TEST_MAIN("test-draft-queue")
