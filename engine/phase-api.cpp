// The C API of llama-phase.h: finds the group of a context and answers neutrally when there is none.

#include "llama-phase.h"

#include "phase-context.h"
#include "phase-group.h"

#include "llama-context.h"

#include <algorithm>
#include <cstring>

static phase_group * group_of(const llama_context * ctx) {
    return ctx->phase ? ctx->phase->group.get() : nullptr;
}

int32_t llama_phase_prompt_begin(llama_context * ctx, llama_seq_id seq_id, int32_t n_new) {
    auto * group = group_of(ctx);
    return group ? group->prompt_begin(seq_id, n_new) : (int32_t) ctx->n_ubatch();
}

bool llama_phase_may_cut(const llama_context * ctx, int32_t n_tokens) {
    const auto * group = group_of(ctx);
    return !group || group->may_cut(n_tokens);
}

int32_t llama_phase_prompt_done(llama_context * ctx, llama_seq_id seq_id) {
    auto * group = group_of(ctx);
    return group ? group->prompt_end(seq_id, false) : 0;
}

int32_t llama_phase_prompt_abort(llama_context * ctx, llama_seq_id seq_id) {
    auto * group = group_of(ctx);
    return group ? group->prompt_end(seq_id, true) : 0;
}

bool llama_phase_join(llama_context * ctx, llama_context * member) {
    auto * group = group_of(ctx);
    auto * other = group_of(member);
    return group && other && group->join(*other);
}

float * llama_phase_host_scores(llama_context * ctx, int32_t i) {
    return ctx->phase ? ctx->phase->host_scores(i) : nullptr;
}

bool llama_phase_draft_adaptive(const llama_context * ctx) {
    const auto * group = group_of(ctx);
    return group && group->adapts_drafts();
}

int32_t llama_phase_draft_choose(llama_context * ctx, llama_seq_id seq_id, int32_t n_limit, int32_t n_max) {
    auto * group = group_of(ctx);
    return group ? group->draft_choose(seq_id, n_limit, n_max) : n_limit;
}

int32_t llama_phase_draft_waiting_max(const llama_context * ctx) {
    const auto * group = group_of(ctx);
    return group ? group->draft_waiting_max() : 0;
}

void llama_phase_draft_done(llama_context * ctx) {
    if (auto * group = group_of(ctx)) {
        group->draft_done();
    }
}

void llama_phase_draft_verified(llama_context * ctx, llama_seq_id seq_id, int32_t n_drafted, int32_t n_accepted) {
    if (auto * group = group_of(ctx)) {
        group->draft_verified(seq_id, n_drafted, n_accepted);
    }
}

void llama_phase_reset(llama_context * ctx) {
    if (auto * group = group_of(ctx)) {
        group->reset();
    }
}

enum llama_phase llama_phase_current(const llama_context * ctx) {
    const auto * group = group_of(ctx);
    return group && group->in_prefill() ? LLAMA_PHASE_PREFILL : LLAMA_PHASE_DECODE;
}

const char * llama_phase_failure(const llama_context * ctx) {
    const auto * group = group_of(ctx);
    return group ? group->failure() : nullptr;
}

int llama_phase_exit_code(void) {
    return phase_group::any_failed() ? PHASE_EXIT_FAILED : 0;
}

bool llama_phase_get_stats(const llama_context * ctx, llama_phase_stats * stats) {
    llama_phase_stats filled = {};
    filled.size           = stats->size;
    filled.ubatch_decode  = ctx->n_ubatch();
    filled.ubatch_prefill = ctx->n_ubatch();

    const auto * group = group_of(ctx);
    if (group) {
        const phase_stats s = group->snapshot();
        filled.phase          = s.prefill ? LLAMA_PHASE_PREFILL : LLAMA_PHASE_DECODE;
        filled.ubatch_decode  = s.ubatch_decode;
        filled.ubatch_prefill = s.ubatch_prefill;
        filled.min_tokens     = s.min_tokens;
        filled.n_entered      = s.n_entered;
        filled.n_left         = s.n_left;
        filled.n_rolled_back  = s.n_rolled_back;
        filled.n_failed       = s.n_failed;
        filled.n_short        = s.n_short;
        filled.n_blocked      = s.n_blocked;
        filled.n_aborted      = s.n_aborted;
        filled.enter_ms_last  = s.enter_ms_last;
        filled.leave_ms_last  = s.leave_ms_last;
        filled.buffer_bytes   = phase_total_bytes(s.prefill ? s.prefill_memory : s.decode_memory);
    }
    std::memcpy(stats, &filled, std::min<size_t>(stats->size, sizeof(filled)));
    return group != nullptr;
}

void llama_phase_set_callback(llama_context * ctx, llama_phase_callback callback, void * user_data) {
    if (auto * group = group_of(ctx)) {
        group->set_callback(callback, user_data);
    }
}

static int32_t write_text(const std::string & text, char * buf, size_t size) {
    if (size > 0) {
        const size_t n = std::min(text.size(), size - 1);
        std::memcpy(buf, text.data(), n);
        buf[n] = '\0';
    }
    return (int32_t) text.size();
}

int32_t llama_phase_json(char * buf, size_t size) {
    return write_text(phase_stats_json(phase_group::snapshot_of_oldest(), phase_now_ms()), buf, size);
}

int32_t llama_phase_prometheus(char * buf, size_t size) {
    return write_text(phase_stats_prometheus(phase_group::snapshot_of_oldest()), buf, size);
}

int32_t llama_phase_candidates(const llama_context * ctx, char * buf, size_t size) {
    std::string text;
    if (const auto * group = group_of(ctx)) {
        for (const auto & candidate : group->snapshot().candidates) {
            text += candidate.text() + "\n";
        }
    }
    return write_text(text, buf, size);
}

int32_t llama_phase_context_json(const llama_context * ctx, char * buf, size_t size) {
    const auto * group = group_of(ctx);
    return write_text(phase_stats_json(group ? group->snapshot() : phase_stats(), phase_now_ms()), buf, size);
}
