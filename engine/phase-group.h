#pragma once

// The coordinator: decides when to switch, runs the transaction over its member contexts, counts.
//
// A group is made with each context and holds it alone; join() merges two (a target and its MTP draft). The first member leads:
// its batch sizes count when there are no explicit events. Everything that switches runs on the thread that decodes; the lock guards
// the stats, which other threads read.

#include "draft-depth.h"
#include "llama-phase.h"
#include "phase-stats.h"

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

struct phase_context;

struct phase_group {
    phase_group(const phase_config & config, phase_context & leader);

    void remove(phase_context & member);

    // Takes over the members of `other`. False when they are the same or one is not in the decode phase.
    bool join(phase_group & other);

    bool before_decode(const phase_context & member, uint32_t n_tokens);

    // Compute buffers of the decode phase came or went, outside of a transaction.
    void note_decode_memory();

    // A member fills its slots beside this round's work.
    void note_fill();

    // slots, rings and compute buffers of all members on a device
    size_t taken_bytes(ggml_backend_dev_t dev) const;

    // The same of the draft's target: the oldest other group over its model, or, for a draft from a file of its own, the only other group.
    // 0 when there is none. The target has to be idle.
    static size_t taken_by_target_bytes(const phase_context & draft, ggml_backend_dev_t dev);

    // Runs `change`, which replaces the experts of a member, while nobody reads them.
    void change_experts(const std::function<void()> & change);

    // Where the prefill micro-batch is auto: the largest that fits all members, once a context is created or has joined.
    void choose_ubatch();

    // see llama-phase.h
    int32_t prompt_begin(llama_seq_id seq_id, int32_t n_new);
    bool    may_cut(int32_t n_tokens) const;
    int32_t prompt_end(llama_seq_id seq_id, bool aborted);
    void    reset();
    void    set_callback(llama_phase_callback callback, void * user_data);

    bool    adapts_drafts() const;
    int32_t draft_choose(llama_seq_id seq_id, int32_t n_limit, int32_t n_max);
    int32_t draft_waiting_max() const; // 0 while a prompt is in progress, and when nobody tells us about prompts
    void    draft_done();
    void    draft_verified(llama_seq_id seq_id, int32_t n_drafted, int32_t n_accepted);

    bool         in_prefill() const;
    const char * failure() const; // null while usable
    phase_stats  snapshot() const;

    // a copy of the stats of the oldest living group; mode off when there is none
    static phase_stats snapshot_of_oldest();

    static bool any_failed();

  private:
    void enter();
    void leave();
    void fail(const std::string & reason);

    phase_report run(const std::vector<phase_step> & steps);
    void         note_memory(std::vector<phase_device_memory> & memory);
    void         note_experts();
    void         emit(llama_phase_event_type type, const phase_report & report) const;
    void         log_steps(const phase_report & report) const;

    const phase_config           config;
    std::vector<phase_context *> members;
    std::set<llama_seq_id>       prompts; // long prompts in progress
    phase_faults                 faults;
    uint64_t                     n_new_left = 0; // tokens of those that are still to be decoded
    bool                         left_early = false; // a small batch came in the middle of a prompt; more may follow
    uint32_t                     n_failed_in_a_row = 0;

    llama_phase_callback callback  = nullptr;
    void               * user_data = nullptr;

    mutable std::mutex         lock;
    phase_stats                stats;
    std::optional<draft_depth> drafts; // LLAMA_PHASE_DRAFT=auto
};
