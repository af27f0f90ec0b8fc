// phase-config: every variable of the registry, every kind of mistake.

#include "check.h"

#include "phase-config.h"
#include "phase-steps.h"

#include <cstdlib>
#include <set>
#include <stdexcept>

#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace {

struct variable {
    std::string name;
    std::string kind;
    std::string def;
    int64_t     min;
    int64_t     max;
    std::string choices;
    std::string accepted;
};

const std::vector<variable> VARIABLES = {
#define PHASE_ENV(name, kind, def, min, max, choices, accepted) { #name, #kind, def, min, max, choices, accepted },
#define PHASE_ENV_OTHER(name)
#include "phase-env.inc"
#undef PHASE_ENV
#undef PHASE_ENV_OTHER
};

const std::vector<std::string> OTHERS = {
#define PHASE_ENV(name, kind, def, min, max, choices, accepted)
#define PHASE_ENV_OTHER(name) #name,
#include "phase-env.inc"
#undef PHASE_ENV
#undef PHASE_ENV_OTHER
};

std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, '|');) {
        parts.push_back(part);
    }
    return parts;
}

// all fields, so that two configurations can be compared
std::string text(const phase_config & c) {
    std::ostringstream out;
    out << c.mode << ' ' << c.prefill_ubatch << ' ' << c.prefill_min_tokens << ' ' << c.expert_slots << ' ' << c.draft_slots << ' ' << c.expert_batch << ' '
        << c.ring_regions << ' ' << c.prefetch << ' ' << c.chunk << ' ' << c.log << ' ' << c.restore << ' ' << c.refill_bytes << ' ' << c.kv << ' ' << c.kv_rows << ' ' << c.select << ' ' << c.draft_auto << ' ' << c.graphs << " budget";
    for (const auto bytes : c.budget_bytes) {
        out << ' ' << bytes;
    }
    out << " faults";
    for (const auto & fault : c.faults) {
        out << ' ' << fault.step << ':' << fault.nth;
    }
    return out.str();
}

std::string parsed(const std::string & name, const std::string & value) {
    return text(phase_config_parse({ { name, value } }));
}

std::string refusal(const std::string & name, const std::string & value) {
    return check::thrown<std::invalid_argument>([&] { phase_config_parse({ { name, value } }); });
}

const std::string DEFAULTS = text(phase_config());

} // namespace

TEST(registry_is_not_empty) {
    REQUIRE(VARIABLES.size() >= 10);
    REQUIRE(!OTHERS.empty());
}

TEST(nothing_set) {
    CHECK_EQ(text(phase_config_parse({})), DEFAULTS);
}

TEST(empty_is_unset) {
    for (const auto & v : VARIABLES) {
        CHECK_EQ(parsed(v.name, ""), DEFAULTS);
    }
}

TEST(registered_default_is_the_field_default) {
    for (const auto & v : VARIABLES) {
        CHECK_EQ(parsed(v.name, v.def), DEFAULTS);
    }
}

// a variable that is registered but not read would be accepted and do nothing
TEST(every_variable_is_read) {
    for (const auto & v : VARIABLES) {
        std::string value;
        if (v.kind == "CHOICE") {
            for (const auto & choice : split(v.choices)) {
                value = choice != v.def ? choice : value;
            }
        } else if (v.kind == "TEXT") {
            value = PHASE_STEP_ENTER_QUIESCE;
        } else {
            value = std::to_string(v.max);
        }
        if (!CHECK(parsed(v.name, value) != DEFAULTS)) {
            std::printf("  %s=%s\n", v.name.c_str(), value.c_str());
        }
    }
}

TEST(choices) {
    for (const auto & v : VARIABLES) {
        if (v.kind != "CHOICE") {
            continue;
        }
        std::set<std::string> seen;
        for (const auto & choice : split(v.choices)) {
            seen.insert(parsed(v.name, choice));
        }
        CHECK_EQ(seen.size(), split(v.choices).size());
        for (const auto * wrong : { "x", "OFF ", "-1", "0" }) {
            const auto message = refusal(v.name, wrong);
            CHECK_HAS(message, v.name + "=" + wrong);
            CHECK_HAS(message, v.accepted);
        }
    }
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_PREFILL_MODE", "transaction" } }).mode, (int) PHASE_MODE_TRANSACTION);
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_PREFILL_MODE", "bypass" } }).mode, (int) PHASE_MODE_BYPASS);
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_PREFETCH", "0" } }).prefetch, 0);
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_PREFETCH", "auto" } }).prefetch, -1);
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_RESTORE", "cold" } }).restore, (int) PHASE_RESTORE_COLD);
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_RESTORE", "prompt" } }).restore, (int) PHASE_RESTORE_PROMPT);
    CHECK_EQ(phase_config_parse({}).refill_bytes, size_t(256) << 20);
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_REFILL_MIB", "0" } }).refill_bytes, size_t(0));
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_REFILL_MIB", "5000" } }).refill_bytes, size_t(5000) << 20);
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_LOG", "quiet" } }).log, (int) PHASE_LOG_QUIET);
    CHECK_EQ((int) phase_config_parse({ { "LLAMA_PHASE_LOG", "debug" } }).log, (int) PHASE_LOG_DEBUG);
}

TEST(numbers) {
    for (const auto & v : VARIABLES) {
        if (v.kind.compare(0, 3, "INT") != 0) {
            continue;
        }
        CHECK_EQ(refusal(v.name, std::to_string(v.min)), "");
        CHECK_EQ(refusal(v.name, std::to_string(v.max)), "");
        const std::vector<std::string> wrong = { std::to_string(v.min - 1), std::to_string(v.max + 1), "x", "1x", " 1", "1 ", "+1", "1.5", "0x10", "1e3", "-",
            "99999999999999999999999999" };
        for (const auto & value : wrong) {
            const auto message = refusal(v.name, value);
            CHECK_HAS(message, v.name + "=" + value);
            CHECK_HAS(message, v.accepted);
        }
        CHECK_EQ(refusal(v.name, "auto").empty(), v.kind == "INT_OR_AUTO");
    }
    const auto config = phase_config_parse({ { "LLAMA_PHASE_EXPERT_SLOTS", "auto" }, { "LLAMA_PHASE_RING", "auto" }, { "LLAMA_PHASE_PREFILL_MIN_TOKENS", "auto" } });
    CHECK_EQ(config.expert_slots, -1);
    CHECK_EQ(config.ring_regions, -1);
    CHECK_EQ(config.prefill_min_tokens, -1);
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_EXPERT_SLOTS", "7" } }).expert_slots, 7);
    CHECK_EQ(phase_config_parse({ { "LLAMA_PHASE_RING", "0" } }).ring_regions, 0);
}

TEST(unknown_names_the_nearest) {
    for (const auto & v : VARIABLES) {
        for (size_t i = sizeof("LLAMA_PHASE_") - 1; i < v.name.size(); ++i) {
            auto wrong = v.name;
            wrong[i] = wrong[i] == 'Z' ? 'Y' : 'Z';
            const auto message = refusal(wrong, "1");
            CHECK_HAS(message, wrong + " is not a variable");
            CHECK_HAS(message, "nearest: " + v.name);
        }
        CHECK_HAS(refusal(v.name + "S_", "1"), v.name);
    }
    CHECK_HAS(refusal("LLAMA_PHASE_", "1"), "LLAMA_PHASE_");
    CHECK_EQ(phase_config_nearest("kitten", { "mitten", "sitting", "kitchen" }), "mitten");
    CHECK_EQ(phase_config_nearest("", { "abc", "a" }), "a");
    CHECK_EQ(refusal("LLAMA_PHASE_NO_SUCH", ""), ""); // empty is unset, whatever the name
}

TEST(names_of_others) {
    for (const auto & name : OTHERS) {
        CHECK_EQ(parsed(name, "anything"), DEFAULTS);
    }
    CHECK_EQ(parsed("LLAMA_ARG_MODEL", "x"), DEFAULTS);
    CHECK_EQ(parsed("PATH", "x"), DEFAULTS);
    CHECK_EQ(parsed("XLLAMA_PHASE_RING", "x"), DEFAULTS);
}

TEST(budget_list) {
    const auto of = [](const std::string & value) { return phase_config_parse({ { "LLAMA_PHASE_BUDGET_MIB", value } }); };
    CHECK_EQ(phase_config().budget_of(0), SIZE_MAX);
    CHECK_EQ(phase_config().budget_of(9), SIZE_MAX);
    CHECK_EQ(of("10").budget_of(0), size_t(10) << 20);
    CHECK_EQ(of("10").budget_of(7), size_t(10) << 20);
    CHECK_EQ(of("1,0,16777216").budget_of(1), size_t(0));
    CHECK_EQ(of("1,0,16777216").budget_of(2), size_t(1) << 44);
    CHECK_EQ(of("1,0,16777216").budget_of(3), size_t(1) << 44);
    for (const auto * wrong : { ",", "1,", ",1", "1,,2", "1, 2", "1;2", "1,x", "1,-1", "1,16777217" }) {
        CHECK_HAS(refusal("LLAMA_PHASE_BUDGET_MIB", wrong), "separated by commas");
    }
}

TEST(faults) {
    const auto of = [](const std::string & value) { return phase_config_parse({ { "LLAMA_PHASE_FAULT", value } }).faults; };
    for (const auto * step : PHASE_STEPS) {
        const auto faults = of(step);
        REQUIRE(faults.size() == 1);
        CHECK_EQ(faults[0].step, step);
        CHECK_EQ(faults[0].nth, 1u);
    }
    const auto several = of(PHASE_STEP_ENTER_QUIESCE ":3," PHASE_STEP_LEAVE_REFILL ":*," PHASE_STEP_SLOTS_ALLOCATE);
    REQUIRE(several.size() == 3);
    CHECK_EQ(several[0].nth, 3u);
    CHECK_EQ(several[1].nth, 0u);
    CHECK_EQ(several[2].step, PHASE_STEP_SLOTS_ALLOCATE);

    for (const auto * nth : { "0", "-1", "x", "", "1x", "**", "99999999999999999999" }) {
        CHECK_HAS(refusal("LLAMA_PHASE_FAULT", std::string(PHASE_STEP_ENTER_QUIESCE ":") + nth), std::string("'") + nth + "'");
    }
    CHECK_HAS(refusal("LLAMA_PHASE_FAULT", "enter.quiese"), "nearest: " PHASE_STEP_ENTER_QUIESCE);
    CHECK_HAS(refusal("LLAMA_PHASE_FAULT", "leave.refil_slots:2"), "nearest: " PHASE_STEP_LEAVE_REFILL);
    CHECK_HAS(refusal("LLAMA_PHASE_FAULT", PHASE_STEP_ENTER_QUIESCE ","), "no step ''");
}

TEST(later_entries_do_not_undo_earlier_ones) {
    const auto config = phase_config_parse({ { "LLAMA_PHASE_RING", "4" }, { "HOME", "/" }, { "LLAMA_PHASE_EXPERT_BATCH", "3" }, { "LLAMA_PHASE_RESTORE", "" } });
    CHECK_EQ(config.ring_regions, 4);
    CHECK_EQ(config.expert_batch, 3u);
}

#ifndef _WIN32
// the process environment, and what the process does with a wrong one
TEST(environment) {
    for (const auto & entry : phase_config_environment()) {
        unsetenv(entry.first.c_str()); // of whoever runs the tests
    }
    setenv("LLAMA_PHASE_RING", "5", 1);
    setenv("NOT_LLAMA_PHASE_RING", "6", 1);
    CHECK_EQ(phase_config_load().ring_regions, 5);
    for (const auto & entry : phase_config_environment()) {
        CHECK_EQ(entry.first.compare(0, 12, "LLAMA_PHASE_"), 0);
    }

    setenv("LLAMA_PHASE_RING", "a ring", 1);
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    std::fflush(stdout);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        phase_config_check_or_exit();
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char buffer[256];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
        said.append(buffer, n);
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    unsetenv("LLAMA_PHASE_RING");
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), PHASE_EXIT_CONFIG);
    CHECK_HAS(said, "llama-phase: LLAMA_PHASE_RING=a ring");
    phase_config_check_or_exit(); // returns
}
#endif

TEST_MAIN("test-phase-config")
