#include "transaction.h"

#include <stdexcept>

bool phase_faults::fires(const std::string & step) {
    const uint64_t run = ++runs[step];
    for (const auto & fault : faults) {
        if (fault.step == step && (fault.nth == 0 || fault.nth == run)) {
            return true;
        }
    }
    return false;
}

void phase_faults::pass_or_throw(const std::string & step) {
    if (fires(step)) {
        throw std::runtime_error("injected fault");
    }
}

namespace {

struct runner {
    phase_faults      & faults;
    const phase_clock & clock;
    phase_report      & report;

    // false and the reason of the first failure in the report, when the effect throws
    bool run(const std::string & name, const std::function<int64_t()> & effect) {
        phase_step_record record;
        record.name = name;

        const double start = clock();
        std::string reason;
        try {
            faults.pass_or_throw(name);
            record.bytes = effect ? effect() : 0;
            record.ok    = true;
        } catch (const std::exception & error) {
            reason = error.what();
        }
        record.ms = clock() - start;

        report.steps.push_back(record);
        if (!record.ok && report.failed_step.empty()) {
            report.failed_step = name;
            report.reason      = reason;
        } else if (!record.ok) {
            report.reason += "; then " + name + ": " + reason;
        }
        return record.ok;
    }
};

} // namespace

phase_report phase_transaction_run(const std::vector<phase_step> & steps, phase_faults & faults, const phase_clock & clock) {
    phase_report report;
    runner       runner { faults, clock, report };

    std::vector<const phase_step *> journal;

    const double start = clock();
    for (const auto & step : steps) {
        journal.push_back(&step);
        if (runner.run(step.name, step.act)) {
            continue;
        }
        report.outcome = PHASE_ROLLED_BACK;
        for (auto it = journal.rbegin(); it != journal.rend(); ++it) {
            if ((*it)->undo && !runner.run((*it)->undo_name, (*it)->undo)) {
                report.outcome = PHASE_BROKEN;
            }
        }
        break;
    }
    report.ms = clock() - start;
    return report;
}
