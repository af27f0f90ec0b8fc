// transaction: order, undo journal, faults; and a property over random transactions and points of failure.

#include "check.h"

#include "transaction.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace {

using trace = std::vector<std::string>;

std::string joined(const trace & names) {
    std::string out;
    for (const auto & name : names) {
        out += name + " ";
    }
    return out;
}

std::string joined(const phase_report & report) {
    trace names;
    for (const auto & step : report.steps) {
        names.push_back(step.name + (step.ok ? "" : "!"));
    }
    return joined(names);
}

phase_clock ticking() {
    return [t = 0.0]() mutable { return t += 1.0; };
}

// steps a, b, c, d; b has no undo; everything that runs is noted, what is in `failing` throws
std::vector<phase_step> letters(trace & ran, const std::set<std::string> & failing) {
    const auto effect = [&ran, failing](const std::string & name, int64_t bytes) {
        return [&ran, failing, name, bytes]() -> int64_t {
            ran.push_back(name);
            if (failing.count(name)) {
                throw std::runtime_error("no " + name);
            }
            return bytes;
        };
    };
    return {
        { "a", effect("a", 1),  "undo.a", effect("undo.a", -1) },
        { "b", effect("b", 20), "",       nullptr },
        { "c", effect("c", -3), "undo.c", effect("undo.c", 3) },
        { "d", effect("d", 4),  "undo.d", effect("undo.d", -4) },
    };
}

phase_report run(trace & ran, const std::set<std::string> & failing, std::vector<phase_fault> faults = {}) {
    phase_faults injected(std::move(faults));
    return phase_transaction_run(letters(ran, failing), injected, ticking());
}

} // namespace

TEST(commit) {
    trace ran;
    const auto report = run(ran, {});
    CHECK_EQ((int) report.outcome, (int) PHASE_COMMITTED);
    CHECK_EQ(joined(ran), "a b c d ");
    CHECK_EQ(joined(report), "a b c d ");
    CHECK_EQ(report.failed_step, "");
    CHECK_EQ(report.reason, "");
    CHECK_EQ(report.steps[1].bytes, 20);
    CHECK_EQ(report.steps[2].bytes, -3);
    for (const auto & step : report.steps) {
        CHECK_EQ(step.ms, 1.0);
    }
    CHECK_EQ(report.ms, 9.0); // the clock was read ten times
}

TEST(nothing_to_do) {
    phase_faults none;
    const auto report = phase_transaction_run({}, none, ticking());
    CHECK_EQ((int) report.outcome, (int) PHASE_COMMITTED);
    CHECK(report.steps.empty());

    const auto idle = phase_transaction_run({ { "a", nullptr, "", nullptr } }, none, ticking());
    CHECK_EQ((int) idle.outcome, (int) PHASE_COMMITTED);
    CHECK_EQ(joined(idle), "a ");
}

TEST(roll_back_runs_backwards_and_includes_the_step_that_failed) {
    trace ran;
    auto report = run(ran, { "c" });
    CHECK_EQ((int) report.outcome, (int) PHASE_ROLLED_BACK);
    CHECK_EQ(joined(ran), "a b c undo.c undo.a ");
    CHECK_EQ(joined(report), "a b c! undo.c undo.a ");
    CHECK_EQ(report.failed_step, "c");
    CHECK_EQ(report.reason, "no c");

    ran.clear();
    report = run(ran, { "b" });
    CHECK_EQ(joined(ran), "a b undo.a ");
    ran.clear();
    report = run(ran, { "a" });
    CHECK_EQ(joined(ran), "a undo.a ");
}

TEST(injected_fault_replaces_the_step) {
    trace ran;
    const auto report = run(ran, {}, { { "c", 1 } });
    CHECK_EQ((int) report.outcome, (int) PHASE_ROLLED_BACK);
    CHECK_EQ(joined(ran), "a b undo.c undo.a ");
    CHECK_EQ(joined(report), "a b c! undo.c undo.a ");
    CHECK_EQ(report.reason, "injected fault");
}

TEST(a_failing_undo_breaks_it_but_the_others_run) {
    trace ran;
    auto report = run(ran, { "d", "undo.c" });
    CHECK_EQ((int) report.outcome, (int) PHASE_BROKEN);
    CHECK_EQ(joined(ran), "a b c d undo.d undo.c undo.a ");
    CHECK_EQ(joined(report), "a b c d! undo.d undo.c! undo.a ");
    CHECK_EQ(report.failed_step, "d");
    CHECK_EQ(report.reason, "no d; then undo.c: no undo.c");

    ran.clear();
    report = run(ran, { "d" }, { { "undo.a", 0 } });
    CHECK_EQ((int) report.outcome, (int) PHASE_BROKEN);
    CHECK_EQ(joined(ran), "a b c d undo.d undo.c ");
}

TEST(faults_count_runs) {
    phase_faults faults({ { "a", 2 }, { "b", 0 }, { "c", 1 }, { "c", 3 } });
    const auto fired = [&](const char * step, int n) {
        std::string out;
        for (int i = 0; i < n; ++i) {
            out += faults.fires(step) ? '1' : '0';
        }
        return out;
    };
    CHECK_EQ(fired("a", 4), "0100");
    CHECK_EQ(fired("b", 3), "111");
    CHECK_EQ(fired("c", 4), "1010");
    CHECK_EQ(fired("d", 2), "00");
    CHECK_EQ(fired("a", 2), "00");
}

TEST(nth_counts_over_transactions) {
    phase_faults faults({ { "b", 2 } });
    std::string outcomes;
    for (int i = 0; i < 3; ++i) {
        trace ran;
        outcomes += std::to_string(phase_transaction_run(letters(ran, {}), faults, ticking()).outcome);
    }
    CHECK_EQ(outcomes, "010");
}

// Steps acquire or release resources, and fail before, in the middle of or after their work, or by injection. Whatever happens: rolled
// back, everything is as it was; committed, everything is as the steps wanted; broken only when an undo failed.
TEST(random_failures) {
    std::mt19937 rng(1);
    const auto below = [&](int n) { return (int) (rng() % n); };

    int n_rolled_back = 0, n_committed = 0, n_broken = 0;
    for (int round = 0; round < 20000; ++round) {
        const int n = 1 + below(8);
        std::vector<bool> held(n), wanted(n);
        std::vector<int>  undone(n), acted(n);
        for (int i = 0; i < n; ++i) {
            held[i]   = below(2);
            wanted[i] = !held[i];
        }
        const auto initial = held;

        const int failing   = below(2*n);       // >= n: none
        const int moment    = below(3);         // before, after half or after all of the work
        const int bad_undo  = below(4*n);       // >= n: none
        const int injecting = below(4*n);       // >= n: none

        std::vector<phase_step> steps;
        for (int i = 0; i < n; ++i) {
            const auto act = [&, i]() -> int64_t {
                ++acted[i];
                if (i == failing && moment == 0) {
                    throw std::runtime_error("before");
                }
                held[i] = wanted[i];
                if (i == failing) {
                    throw std::runtime_error("after");
                }
                return 1;
            };
            const auto undo = [&, i]() -> int64_t {
                ++undone[i];
                if (i == bad_undo) {
                    throw std::runtime_error("undo");
                }
                held[i] = initial[i];
                return -1;
            };
            steps.push_back({ "s" + std::to_string(i), act, "u" + std::to_string(i), undo });
        }
        phase_faults faults(injecting < n ? std::vector<phase_fault> { { "s" + std::to_string(injecting), 1 } } : std::vector<phase_fault> {});
        const auto report = phase_transaction_run(steps, faults, ticking());

        const int first = std::min(failing, injecting);
        if (first >= n) {
            ++n_committed;
            REQUIRE(report.outcome == PHASE_COMMITTED && held == wanted);
            REQUIRE(std::count(undone.begin(), undone.end(), 0) == n);
            REQUIRE(std::count(acted.begin(), acted.end(), 1) == n);
            continue;
        }
        REQUIRE(report.failed_step == "s" + std::to_string(first));
        for (int i = 0; i < n; ++i) {
            REQUIRE(undone[i] == (i <= first));
            REQUIRE(acted[i] == (i < first || (i == first && injecting != first)));
            REQUIRE(held[i] == initial[i] || i == bad_undo);
        }
        REQUIRE(report.outcome == (bad_undo <= first ? PHASE_BROKEN : PHASE_ROLLED_BACK));
        REQUIRE((int) report.steps.size() == 2*(first + 1));
        ++(report.outcome == PHASE_BROKEN ? n_broken : n_rolled_back);
    }
    CHECK(n_committed > 1000 && n_rolled_back > 1000 && n_broken > 1000);
}

TEST_MAIN("test-transaction")
