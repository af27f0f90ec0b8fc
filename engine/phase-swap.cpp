// The transactions of a group: the steps of enter and leave over all members, and what becomes of a failure.

#include "phase-group.h"

#include "expert-cache.h"
#include "phase-context.h"
#include "phase-steps.h"

#include "llama-impl.h"

// a prefill size that failed this often is not tried again until reset()
static constexpr uint32_t MAX_FAILED_IN_A_ROW = 3;

phase_report phase_group::run(const std::vector<phase_step> & steps) {
    if (config.mode == PHASE_MODE_BYPASS) {
        auto idle = steps;
        for (auto & step : idle) {
            step.act  = nullptr;
            step.undo = step.undo ? [] { return int64_t(0); } : std::function<int64_t()>(); // counted and made to fail, as the acts
        }
        return phase_transaction_run(idle, faults, phase_now_ms);
    }
    return phase_transaction_run(steps, faults, phase_now_ms);
}

static std::function<int64_t()> for_each_member(const std::vector<phase_context *> & members, const std::function<int64_t(phase_context &)> & effect) {
    return [&members, effect] {
        int64_t bytes = 0;
        for (auto * member : members) {
            bytes += effect(*member);
        }
        return bytes;
    };
}

void phase_group::enter() {
    if (n_failed_in_a_row >= MAX_FAILED_IN_A_ROW) {
        std::lock_guard<std::mutex> guard(lock);
        stats.n_blocked++;
        return;
    }

    const auto fault = [this](const char * step) { faults.pass_or_throw(step); }; // attempts inside a step

    const auto quiesce  = for_each_member(members, [](phase_context & m) { m.quiesce(true); return 0; });
    const auto remember = for_each_member(members, [](phase_context & m) { return m.remember_slots(); });
    const auto drop     = for_each_member(members, [](phase_context & m) { return m.drop_buffers(); });
    const auto decode   = for_each_member(members, [](phase_context & m) { return m.reserve_buffers(false); });
    const auto free     = for_each_member(members, [](phase_context & m) { return m.free_slots(); });
    const auto slots    = for_each_member(members, [&](phase_context & m) { return m.allocate_slots(fault) + m.refill_slots(true); });
    const auto ring     = for_each_member(members, [&](phase_context & m) { return m.allocate_ring(fault); });
    const auto no_ring  = for_each_member(members, [](phase_context & m) { return m.free_ring(); });
    // the leader comes last: it has the large ring, which shrinks when all members' buffers together do not fit
    const auto prefill  = [&] {
        int64_t bytes = 0;
        for (auto member = members.rbegin(); member != members.rend(); ++member) {
            bytes += (*member)->reserve_buffers(true);
        }
        for (auto * member : members) {
            member->start_ring(fault);
        }
        return bytes;
    };

    note_decode_memory();

    const phase_report report = run({
        { PHASE_STEP_ENTER_QUIESCE,         quiesce,  "",                             nullptr },
        { PHASE_STEP_ENTER_REMEMBER,        remember, "",                             nullptr },
        { PHASE_STEP_ENTER_DROP_DECODE,     drop,     PHASE_STEP_UNDO_RESERVE_DECODE, decode  },
        { PHASE_STEP_ENTER_FREE_SLOTS,      free,     PHASE_STEP_UNDO_ALLOCATE_SLOTS, slots   },
        { PHASE_STEP_ENTER_ALLOCATE_RING,   ring,     PHASE_STEP_UNDO_FREE_RING,      no_ring },
        { PHASE_STEP_ENTER_RESERVE_PREFILL, prefill,  PHASE_STEP_UNDO_DROP_PREFILL,   drop    },
    });
    log_steps(report);

    {
        std::lock_guard<std::mutex> guard(lock);
        stats.last           = report;
        stats.last_enter     = report;
        note_experts();
        stats.last_direction = "enter";
        stats.enter.add(report.ms / 1000.0);
        stats.enter_ms_last  = report.ms;
        if (report.outcome == PHASE_COMMITTED) {
            stats.n_entered++;
            stats.prefill  = true;
            stats.since_ms = phase_now_ms();
            note_memory(stats.prefill_memory);
        } else if (report.outcome == PHASE_ROLLED_BACK) {
            stats.n_rolled_back++;
            stats.last_failure = report.failed_step + ": " + report.reason;
        }
    }

    switch (report.outcome) {
        case PHASE_COMMITTED:
            n_failed_in_a_row = 0;
            if (config.log >= PHASE_LOG_INFO) {
                LLAMA_LOG_INFO("llama-phase: prefill phase entered in %.1f ms, ubatch %u -> %u, compute buffers %.1f -> %.1f MiB\n",
                        report.ms, stats.ubatch_decode, stats.ubatch_prefill,
                        phase_total_bytes(stats.decode_memory)/1024.0/1024.0, phase_total_bytes(stats.prefill_memory)/1024.0/1024.0);
            }
            emit(LLAMA_PHASE_EVENT_ENTERED, report);
            break;
        case PHASE_ROLLED_BACK:
            ++n_failed_in_a_row;
            LLAMA_LOG_WARN("llama-phase: prefill phase not entered, the prompt runs at ubatch %u: step %s failed: %s%s\n", stats.ubatch_decode,
                    report.failed_step.c_str(), report.reason.c_str(),
                    n_failed_in_a_row == MAX_FAILED_IN_A_ROW ? " (not tried again until a reset)" : "");
            emit(LLAMA_PHASE_EVENT_ROLLED_BACK, report);
            break;
        case PHASE_BROKEN:
            fail("rolling back step " + report.failed_step + " failed: " + report.reason);
            emit(LLAMA_PHASE_EVENT_FAILED, report);
            break;
    }
}

void phase_group::leave() {
    const auto fault = [this](const char * step) { faults.pass_or_throw(step); }; // attempts inside a step

    const auto quiesce  = for_each_member(members, [](phase_context & m) { m.quiesce(false); return 0; });
    const auto remember = for_each_member(members, [](phase_context & m) { return m.remember_slots(); });
    const auto drop     = for_each_member(members, [&](phase_context & m) { return m.drop_buffers(); });
    const auto no_ring  = for_each_member(members, [](phase_context & m) { return m.free_ring(); });
    const auto slots    = for_each_member(members, [&](phase_context & m) { return m.allocate_slots(fault); });
    const auto no_slots = for_each_member(members, [](phase_context & m) { return m.free_slots(); });
    const auto refill   = for_each_member(members, [](phase_context & m) { return m.refill_slots(false); });
    const auto decode   = for_each_member(members, [](phase_context & m) { return m.reserve_buffers(false); });
    const auto retry    = [&] { return drop() + no_ring() + no_slots() + decode(); };

    // quiesce comes first for the copies in flight; what the prompt chose is read before the slots' state is written anew; refill comes
    // last, since an allocation waits for copies in flight
    phase_report report = run({
        { PHASE_STEP_LEAVE_QUIESCE,        [&] { return quiesce() + remember(); }, "", nullptr },
        { PHASE_STEP_LEAVE_DROP_PREFILL,   drop,    "", nullptr },
        { PHASE_STEP_LEAVE_FREE_RING,      no_ring, "", nullptr },
        { PHASE_STEP_LEAVE_ALLOCATE_SLOTS, slots,   "", nullptr },
        { PHASE_STEP_LEAVE_RESERVE_DECODE, decode,  "", nullptr },
        { PHASE_STEP_LEAVE_REFILL,         refill,  "", nullptr },
    });
    if (report.outcome != PHASE_COMMITTED) {
        LLAMA_LOG_WARN("llama-phase: leaving the prefill phase: step %s failed, retrying without slots: %s\n", report.failed_step.c_str(), report.reason.c_str());
        const phase_report second = run({ { PHASE_STEP_LEAVE_RETRY_DECODE, retry, "", nullptr } });
        report.steps.insert(report.steps.end(), second.steps.begin(), second.steps.end());
        report.ms += second.ms;
        if (second.outcome == PHASE_COMMITTED) {
            report.outcome = PHASE_COMMITTED;
            for (auto * member : config.mode == PHASE_MODE_TRANSACTION ? members : std::vector<phase_context *>()) {
                member->note_no_slots(report.failed_step + ": " + report.reason);
            }
        } else {
            report.outcome = PHASE_BROKEN;
            report.reason += "; then " + second.failed_step + ": " + second.reason;
        }
    }
    log_steps(report);

    {
        std::lock_guard<std::mutex> guard(lock);
        stats.last           = report;
        stats.last_direction = "leave";
        note_experts();
        stats.leave.add(report.ms / 1000.0);
        stats.leave_ms_last  = report.ms;
        stats.prefill        = false;
        stats.since_ms       = phase_now_ms();
        if (report.outcome == PHASE_COMMITTED) {
            stats.n_left++;
            note_memory(stats.decode_memory);
        }
    }
    if (report.outcome == PHASE_COMMITTED) {
        if (config.log >= PHASE_LOG_INFO) {
            uint64_t left = 0;
            for (const auto * member : members) {
                left += member->experts ? member->experts->fill_left_bytes() : 0;
            }
            LLAMA_LOG_INFO("llama-phase: prefill phase left in %.1f ms, ubatch %u -> %u%s\n", report.ms, stats.ubatch_prefill, stats.ubatch_decode,
                    left > 0 ? format(", %.0f MiB of experts to fill the slots with", left/1048576.0).c_str() : "");
        }
        emit(LLAMA_PHASE_EVENT_LEFT, report);
    } else {
        fail("step " + report.failed_step + " failed: " + report.reason);
        emit(LLAMA_PHASE_EVENT_FAILED, report);
    }
}
