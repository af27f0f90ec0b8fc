#pragma once

// Public C API of the phases. ABI rule: functions are only added, structs only grow at the end, and the caller passes the size
// of the struct that it was compiled with.
//
// A context whose LLAMA_PHASE_PREFILL_MODE is off, or that cannot switch (embeddings, non-causal attention, logical batch not
// larger than the micro-batch), answers every call as if it were in the decode phase for good.
//
// Threads: prompt_*, join and reset belong to the thread that decodes. The stats and text functions may be called from any thread.

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

enum llama_phase {
    LLAMA_PHASE_DECODE  = 0, // generation: micro-batch n_ubatch of the context parameters
    LLAMA_PHASE_PREFILL = 1, // a long prompt: micro-batch LLAMA_PHASE_PREFILL_UBATCH
};

enum llama_phase_event_type {
    LLAMA_PHASE_EVENT_ENTERED     = 0,
    LLAMA_PHASE_EVENT_LEFT        = 1,
    LLAMA_PHASE_EVENT_ROLLED_BACK = 2, // enter failed, the decode phase goes on
    LLAMA_PHASE_EVENT_FAILED      = 3, // no decode buffers: the context cannot compute any more
};

struct llama_phase_event {
    enum llama_phase_event_type type;
    double                      ms;           // duration of the transaction
    uint32_t                    ubatch;       // tokens, in force from now on
    uint64_t                    buffer_bytes; // compute buffers, all devices, held from now on
    const char                * step;   // the step that failed, or ""
    const char                * reason; // why, or ""
};

// valid during the call only; called on the thread that decodes, must not call into the context
typedef void (*llama_phase_callback)(const struct llama_phase_event * event, void * user_data);

struct llama_phase_stats {
    uint32_t         size;           // sizeof(struct llama_phase_stats) of the caller, set before the call
    enum llama_phase phase;
    uint32_t         ubatch_decode;  // tokens
    uint32_t         ubatch_prefill; // tokens
    uint32_t         min_tokens;     // tokens
    uint64_t         n_entered;      // transactions
    uint64_t         n_left;
    uint64_t         n_rolled_back;
    uint64_t         n_failed;
    uint64_t         n_short;        // prompts under min_tokens
    uint64_t         n_blocked;      // prompts not tried, because enter had failed repeatedly
    uint64_t         n_aborted;      // prompts that ended before their first token
    double           enter_ms_last;
    double           leave_ms_last;
    uint64_t         buffer_bytes;   // compute buffers held now, all devices
};

// A prompt of `n_new` tokens that are not in the cache begins on sequence `seq_id`. Enters the prefill phase when that pays.
// Returns the micro-batch (tokens) that its batches will be cut into, or -1 when the context is unusable.
// The first call switches the context from watching batch sizes to these explicit events.
LLAMA_API int32_t llama_phase_prompt_begin(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_new);

// Whether a prompt's batch may end behind `n_tokens` for the sake of a checkpoint. In the prefill phase each batch is a pass over the host's
// experts, so only behind as many as a pass is worth (LLAMA_PHASE_PREFILL_MIN_TOKENS).
LLAMA_API bool llama_phase_may_cut(const struct llama_context * ctx, int32_t n_tokens);

// The prompt of `seq_id` has been decoded; call it before its first token is sampled, after everything that reads the outputs of
// other member contexts. Leaves the prefill phase when no other long prompt is being processed.
// Returns 0, or -1 when the context is unusable (see llama_phase_failure).
LLAMA_API int32_t llama_phase_prompt_done(struct llama_context * ctx, llama_seq_id seq_id);

// As prompt_done, for a prompt that was cancelled. Nothing happens when none is in progress on `seq_id`.
LLAMA_API int32_t llama_phase_prompt_abort(struct llama_context * ctx, llama_seq_id seq_id);

// `member` (an MTP draft context, say) enters and leaves with `ctx` from now on. Both have to be in the decode phase.
// Returns false when one of them has no phases.
LLAMA_API bool llama_phase_join(struct llama_context * ctx, struct llama_context * member);

// The scores of output i, [n_vocab], of a context with phases whose tokens are sampled on the host only; null for others, for which upstream's
// functions say what was sampled where. Does not wait for the computation, as those do, each of them: llama_synchronize() comes first.
LLAMA_API float * llama_phase_host_scores(struct llama_context * ctx, int32_t i);

// Draft lengths chosen by measurement (LLAMA_PHASE_DRAFT=auto); without it `choose` returns n_limit and the others do nothing. Each
// round of generation: choose for every sequence that generates, done once when the drafts are made, verified for each draft.
LLAMA_API bool llama_phase_draft_adaptive(const struct llama_context * ctx);

// Tokens to draft for `seq_id`: at most n_limit (what its context takes) and n_max (what the drafter makes), 0 for none.
LLAMA_API int32_t llama_phase_draft_choose(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_limit, int32_t n_max);
// Most tokens that may wait for the draft context to compute them, 0 for none: see draft-queue.h.
LLAMA_API int32_t llama_phase_draft_waiting_max(const struct llama_context * ctx);
LLAMA_API void    llama_phase_draft_done(struct llama_context * ctx);
LLAMA_API void    llama_phase_draft_verified(struct llama_context * ctx, llama_seq_id seq_id, int32_t n_drafted, int32_t n_accepted);

// Forget the failures after which a switch is not tried any more.
LLAMA_API void llama_phase_reset(struct llama_context * ctx);

LLAMA_API enum llama_phase llama_phase_current(const struct llama_context * ctx);

// Why the context cannot compute any more, or NULL. Valid until the context is freed.
LLAMA_API const char * llama_phase_failure(const struct llama_context * ctx);

// Exit code a process should end with: 75 once any context became unusable, else 0.
LLAMA_API int llama_phase_exit_code(void);

// Fills the first stats->size bytes. Returns false, and a decode phase, when the context has no phases.
LLAMA_API bool llama_phase_get_stats(const struct llama_context * ctx, struct llama_phase_stats * stats);

LLAMA_API void llama_phase_set_callback(struct llama_context * ctx, llama_phase_callback callback, void * user_data);

// JSON (GET /phase) and Prometheus text (GET /metrics) of the oldest living context with phases; written like snprintf: returns the
// length without the terminating zero, whatever `size` is. The Prometheus text is empty when there is no such context.
LLAMA_API int32_t llama_phase_json(char * buf, size_t size);
LLAMA_API int32_t llama_phase_prometheus(char * buf, size_t size);

// What LLAMA_PHASE_PREFILL_UBATCH=auto found for this context's group, one line per candidate; written like snprintf. Empty: not auto.
LLAMA_API int32_t llama_phase_candidates(const struct llama_context * ctx, char * buf, size_t size);

// As llama_phase_json, of this context's group. The mode is "off" when the context has no phases.
LLAMA_API int32_t llama_phase_context_json(const struct llama_context * ctx, char * buf, size_t size);

#ifdef __cplusplus
}
#endif
