#include "phase-group.h"

#include "expert-cache.h"
#include "kpool-memo.h"
#include "phase-context.h"
#include "phase-kv.h"

#include "llama-impl.h"

#include <algorithm>
#include <atomic>
#include <iterator>

// The living groups, oldest first. Process-wide because the server's HTTP threads ask while contexts come and go (a sleeping server
// frees them), so they must not hold a context.
static std::mutex                 registry_lock;
static std::vector<phase_group *> registry;
static std::atomic<bool>          failed_ever { false };

//
// members
//

phase_group::phase_group(const phase_config & config, phase_context & leader) : config(config), members { &leader }, faults(config.faults) {
    stats.mode           = leader.ubatch_prefill > leader.ubatch_decode ? config.mode : PHASE_MODE_OFF;
    stats.kv_mode        = config.kv;
    stats.since_ms       = phase_now_ms();
    stats.n_members      = 1;
    stats.ubatch_decode  = leader.ubatch_decode;
    stats.ubatch_prefill = leader.ubatch_prefill;
    stats.min_tokens     = config.prefill_min_tokens > 0 ? config.prefill_min_tokens : phase_min_tokens(leader.ubatch_decode);

    if (config.draft_auto) {
        drafts.emplace((int32_t) config.expert_batch);
    }

    std::lock_guard<std::mutex> guard(registry_lock);
    registry.push_back(this);
}

void phase_group::remove(phase_context & member) {
    {
        std::lock_guard<std::mutex> guard(lock);
        members.erase(std::remove(members.begin(), members.end(), &member), members.end());
        stats.n_members = (uint32_t) members.size();
        note_experts();
    }
    if (members.empty()) {
        std::lock_guard<std::mutex> guard(registry_lock);
        registry.erase(std::remove(registry.begin(), registry.end(), this), registry.end());
    }
}

bool phase_group::join(phase_group & other) {
    if (&other == this || in_prefill() || other.in_prefill() || other.members.empty()) {
        return false;
    }
    // the members' references keep `other` alive until the last one is moved
    const auto keep  = other.members.front()->group;
    const auto self  = members.front()->group;
    const auto moved = other.members;
    for (auto * member : moved) {
        other.remove(*member);
        member->group = self;
    }
    {
        std::lock_guard<std::mutex> guard(lock);
        members.insert(members.end(), moved.begin(), moved.end());
        stats.n_members = (uint32_t) members.size();
        stats.decode_memory.clear(); // noted anew at the next decode
        note_experts();
    }
    choose_ubatch();
    return true;
}

//
// decisions
//

bool phase_group::before_decode(const phase_context & member, uint32_t n_tokens) {
    if (failure()) {
        return false;
    }
    if (stats.decode_memory.empty()) {
        note_decode_memory();
    }
    if (&member != members.front()) {
        return true;
    }
    // The server cuts the last few tokens off a prompt; they are served from slots, not by another pass over all experts.
    // A cut elsewhere (a checkpoint one token into the prompt, say) must not leave: n_new_left tells them apart.
    const bool small = n_tokens <= config.expert_batch && (!stats.hooked || n_new_left <= config.expert_batch);
    const bool large = n_tokens >= stats.min_tokens && n_tokens > stats.ubatch_decode && (!stats.hooked || left_early);
    if (stats.prefill && small) {
        left_early = true;
        leave();
    } else if (!stats.prefill && large && stats.mode != PHASE_MODE_OFF) {
        enter();
    }
    n_new_left -= std::min<uint64_t>(n_new_left, n_tokens);
    if (stats.prefill) {
        for (auto * context : members) {
            context->set_last_pass(stats.hooked && n_new_left <= config.expert_batch && n_tokens <= stats.ubatch_prefill);
        }
    }
    return !failure();
}

int32_t phase_group::prompt_begin(llama_seq_id seq_id, int32_t n_new) {
    {
        std::lock_guard<std::mutex> guard(lock);
        stats.hooked = true;
        if (drafts) {
            drafts->prompt(seq_id);
        }
        if (stats.mode == PHASE_MODE_OFF || n_new < (int32_t) stats.min_tokens) {
            stats.n_short++;
        } else {
            stats.n_prompts++;
            prompts.insert(seq_id);
            n_new_left += n_new;
        }
    }
    if (!failure() && !prompts.empty() && !stats.prefill) {
        enter();
    }
    if (failure()) {
        prompts.erase(seq_id);
        return -1;
    }
    return (int32_t) (stats.prefill && config.mode == PHASE_MODE_TRANSACTION ? stats.ubatch_prefill : stats.ubatch_decode);
}

bool phase_group::may_cut(int32_t n_tokens) const {
    return !stats.prefill || config.mode != PHASE_MODE_TRANSACTION || n_tokens >= (int32_t) stats.min_tokens;
}

int32_t phase_group::prompt_end(llama_seq_id seq_id, bool aborted) {
    if (drafts) {
        std::lock_guard<std::mutex> guard(lock);
        aborted ? drafts->end(seq_id) : drafts->begin(seq_id);
    }
    if (prompts.erase(seq_id)) {
        if (aborted) {
            std::lock_guard<std::mutex> guard(lock);
            stats.n_aborted++;
        }
        if (prompts.empty()) {
            n_new_left = 0;
            left_early = false;
            if (stats.prefill && !failure()) {
                leave();
            }
        }
    }
    return failure() ? -1 : 0;
}

bool phase_group::adapts_drafts() const {
    return drafts.has_value();
}

int32_t phase_group::draft_choose(llama_seq_id seq_id, int32_t n_limit, int32_t n_max) {
    if (!drafts || n_limit <= 0) {
        return n_limit;
    }
    std::lock_guard<std::mutex> guard(lock);
    return drafts->choose(seq_id, n_limit, n_max, phase_now_ms());
}

int32_t phase_group::draft_waiting_max() const {
    return drafts && drafts->generating() ? (int32_t) config.expert_batch : 0;
}

void phase_group::draft_done() {
    if (drafts) {
        std::lock_guard<std::mutex> guard(lock);
        drafts->drafted(phase_now_ms());
    }
}

void phase_group::draft_verified(llama_seq_id seq_id, int32_t n_drafted, int32_t n_accepted) {
    if (drafts) {
        std::lock_guard<std::mutex> guard(lock);
        drafts->verified(seq_id, n_drafted, n_accepted);
    }
}

void phase_group::reset() {
    n_failed_in_a_row = 0;
    for (auto * member : members) {
        member->reset();
    }
}

void phase_group::fail(const std::string & reason) {
    LLAMA_LOG_ERROR("llama-phase: no decode buffers, this context cannot compute any more: %s\n", reason.c_str());
    for (auto * member : members) {
        member->ensure_scheduler();
    }
    failed_ever = true;

    std::lock_guard<std::mutex> guard(lock);
    stats.n_failed++;
    stats.failure = reason;
    stats.prefill = false;
}

//
// what others read
//

void phase_group::note_memory(std::vector<phase_device_memory> & memory) {
    memory.clear();
    for (auto * member : members) {
        for (auto & entry : member->read_memory()) {
            const auto same = std::find_if(memory.begin(), memory.end(), [&](const phase_device_memory & m) { return m.name == entry.name; });
            if (same == memory.end()) {
                memory.push_back(std::move(entry));
            } else {
                same->buffer_bytes += entry.buffer_bytes;
            }
        }
    }
}

void phase_group::note_decode_memory() {
    std::lock_guard<std::mutex> guard(lock);
    note_memory(stats.decode_memory);
}

void phase_group::note_fill() {
    if (drafts) {
        std::lock_guard<std::mutex> guard(lock);
        drafts->disturbed();
    }
}

void phase_group::note_experts() {
    stats.experts.clear();
    std::vector<const llama_model *> models;
    for (const auto * member : members) {
        if (!member->experts) {
            continue;
        }
        stats.experts.push_back(member->experts->stats());
        if (std::find(models.begin(), models.end(), &member->model()) != models.end()) {
            stats.experts.back().pinned_bytes = 0; // contexts add up
        }
        models.push_back(&member->model());
    }
}

size_t phase_group::taken_bytes(ggml_backend_dev_t dev) const {
    size_t bytes = 0;
    for (const auto * member : members) {
        bytes += member->taken_bytes(dev);
    }
    return bytes;
}

size_t phase_group::taken_by_target_bytes(const phase_context & draft, ggml_backend_dev_t dev) {
    std::lock_guard<std::mutex> guard(registry_lock);
    std::vector<phase_group *> others;
    std::copy_if(registry.begin(), registry.end(), std::back_inserter(others), [&](const auto * group) { return group != draft.group.get(); });
    for (auto * group : others) {
        std::lock_guard<std::mutex> of_group(group->lock); // its last member may be on its way out
        if (!group->members.empty() && (&group->members.front()->model() == &draft.model() || others.size() == 1)) {
            return group->taken_bytes(dev);
        }
    }
    return 0;
}

void phase_group::change_experts(const std::function<void()> & change) {
    std::lock_guard<std::mutex> guard(lock);
    change();
    note_experts();
}

void phase_group::set_callback(llama_phase_callback callback, void * user_data) {
    this->callback  = callback;
    this->user_data = user_data;
}

void phase_group::emit(llama_phase_event_type type, const phase_report & report) const {
    if (callback) {
        const llama_phase_event event = {
            type, report.ms, stats.prefill ? stats.ubatch_prefill : stats.ubatch_decode,
            phase_total_bytes(stats.prefill ? stats.prefill_memory : stats.decode_memory), report.failed_step.c_str(), report.reason.c_str(),
        };
        callback(&event, user_data);
    }
}

void phase_group::log_steps(const phase_report & report) const {
    if (config.log >= PHASE_LOG_DEBUG) {
        for (const auto & step : report.steps) {
            LLAMA_LOG_INFO("llama-phase: step %-30s %8.2f ms %+10.2f MiB%s\n", step.name.c_str(), step.ms, step.bytes/1024.0/1024.0, step.ok ? "" : " failed");
        }
    }
}

bool phase_group::in_prefill() const {
    return stats.prefill;
}

const char * phase_group::failure() const {
    return stats.failure.empty() ? nullptr : stats.failure.c_str();
}

phase_stats phase_group::snapshot() const {
    std::lock_guard<std::mutex> guard(lock);
    phase_stats copy = stats;
    if (drafts) {
        copy.draft = drafts->stats();
    }
    copy.fast_select = phase_select_is_fast();
    auto experts = copy.experts.begin();
    for (const auto * member : members) {
        copy.kv.push_back(member->kv);
        phase_kv_read_rows(copy.kv.back());
        copy.graphs.push_back(member->graph_stats());
        if (member->experts && experts != copy.experts.end()) {
            member->experts->read_counters(*experts++); // slots and ring may change meanwhile, the counters stay where they are
        }
    }
    return copy;
}

phase_stats phase_group::snapshot_of_oldest() {
    std::lock_guard<std::mutex> guard(registry_lock);
    return registry.empty() ? phase_stats() : registry.front()->snapshot();
}

bool phase_group::any_failed() {
    return failed_ever;
}
