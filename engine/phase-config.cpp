#include "phase-config.h"
#include "phase-steps.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>

#ifndef _WIN32
extern char ** environ;
#else
#define environ _environ
#endif

namespace {

enum env_kind { ENV_CHOICE, ENV_INT, ENV_INT_OR_AUTO, ENV_INT_LIST, ENV_TEXT, ENV_BOOL };

struct env_variable {
    const char * name;
    env_kind     kind;
    int64_t      min;
    int64_t      max;
    const char * choices; // separated by '|'
    const char * accepted;
};

const env_variable ENGINE_VARIABLES[] = {
#define PHASE_ENV(name, kind, def, min, max, choices, accepted) { #name, ENV_##kind, min, max, choices, accepted },
#define PHASE_ENV_OTHER(name)
#include "phase-env.inc"
#undef PHASE_ENV
#undef PHASE_ENV_OTHER
};

const std::vector<std::string> KNOWN_NAMES = {
#define PHASE_ENV(name, kind, def, min, max, choices, accepted) #name,
#define PHASE_ENV_OTHER(name) #name,
#include "phase-env.inc"
#undef PHASE_ENV
#undef PHASE_ENV_OTHER
};

const char PREFIX[] = "LLAMA_PHASE_";

std::vector<std::string> split(const std::string & text, char separator) {
    std::vector<std::string> parts;
    size_t begin = 0;
    for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
        parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    return parts;
}

size_t edit_distance(const std::string & a, const std::string & b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t substitute = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({ row[j] + 1, row[j - 1] + 1, substitute });
        }
    }
    return row[b.size()];
}

[[noreturn]] void refuse(const env_variable & variable, const std::string & value) {
    throw std::invalid_argument(std::string(variable.name) + "=" + value + " is not accepted: use " + variable.accepted);
}

int64_t parse_int(const std::string & value, bool & ok) {
    int64_t number = 0;
    const char * end = value.data() + value.size();
    const auto result = std::from_chars(value.data(), end, number);
    ok = result.ec == std::errc() && result.ptr == end;
    return number;
}

// the number, the index of the choice, or -1 for `auto`; lists are only checked
int64_t parse_value(const env_variable & variable, const std::string & value) {
    switch (variable.kind) {
        case ENV_TEXT:
            return 0;
        case ENV_BOOL: {
            for (const char * word : { "1", "on", "true" })  { if (value == word) { return 1; } }
            for (const char * word : { "0", "off", "false" }) { if (value == word) { return 0; } }
            refuse(variable, value);
        }
        case ENV_CHOICE: {
            const auto choices = split(variable.choices, '|');
            const auto it = std::find(choices.begin(), choices.end(), value);
            if (it == choices.end()) {
                refuse(variable, value);
            }
            return it - choices.begin();
        }
        case ENV_INT_OR_AUTO:
            if (value == "auto") {
                return -1;
            }
            [[fallthrough]];
        case ENV_INT: {
            bool ok = false;
            const int64_t number = parse_int(value, ok);
            if (!ok || number < variable.min || number > variable.max) {
                refuse(variable, value);
            }
            return number;
        }
        case ENV_INT_LIST: {
            for (const auto & entry : split(value, ',')) {
                bool ok = false;
                const int64_t number = parse_int(entry, ok);
                if (!ok || number < variable.min || number > variable.max) {
                    refuse(variable, value);
                }
            }
            return 0;
        }
    }
    refuse(variable, value);
}

std::vector<phase_fault> parse_faults(const std::string & value) {
    const std::vector<std::string> steps(std::begin(PHASE_STEPS), std::end(PHASE_STEPS));
    std::vector<phase_fault> faults;
    for (const auto & entry : split(value, ',')) {
        const auto colon = entry.find(':');
        phase_fault fault;
        fault.step = entry.substr(0, colon);
        if (std::find(steps.begin(), steps.end(), fault.step) == steps.end()) {
            throw std::invalid_argument("LLAMA_PHASE_FAULT: no step '" + fault.step + "', nearest: " +
                    phase_config_nearest(fault.step, steps));
        }
        if (colon != std::string::npos) {
            const std::string nth = entry.substr(colon + 1);
            bool ok = nth == "*";
            fault.nth = ok ? 0 : (uint64_t) parse_int(nth, ok);
            if (!ok || (nth != "*" && (int64_t) fault.nth < 1)) {
                throw std::invalid_argument("LLAMA_PHASE_FAULT: '" + nth + "' in '" + entry + "' is not accepted: use * or a number from 1");
            }
        }
        faults.push_back(std::move(fault));
    }
    return faults;
}

} // namespace

std::string phase_config_nearest(const std::string & name, const std::vector<std::string> & candidates) {
    return *std::min_element(candidates.begin(), candidates.end(), [&](const std::string & a, const std::string & b) {
        return edit_distance(name, a) < edit_distance(name, b);
    });
}

phase_config phase_config_parse(const phase_environment & env) {
    phase_config config;
    for (const auto & [name, value] : env) {
        if (name.compare(0, sizeof(PREFIX) - 1, PREFIX) != 0 || value.empty()) {
            continue;
        }
        const auto * variable = std::find_if(std::begin(ENGINE_VARIABLES), std::end(ENGINE_VARIABLES),
                [&](const env_variable & v) { return name == v.name; });
        if (variable == std::end(ENGINE_VARIABLES)) {
            if (std::find(KNOWN_NAMES.begin(), KNOWN_NAMES.end(), name) != KNOWN_NAMES.end()) {
                continue;
            }
            throw std::invalid_argument(name + " is not a variable of llama-phase, nearest: " + phase_config_nearest(name, KNOWN_NAMES));
        }
        const int64_t parsed = parse_value(*variable, value);
        if (name == "LLAMA_PHASE_PREFILL_MODE") {
            config.mode = (phase_mode) parsed;
        } else if (name == "LLAMA_PHASE_PREFILL_UBATCH") {
            config.prefill_ubatch = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_PREFILL_MIN_TOKENS") {
            config.prefill_min_tokens = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_EXPERT_SLOTS") {
            config.expert_slots = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_DRAFT_SLOTS") {
            config.draft_slots = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_RING") {
            config.ring_regions = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_PREFETCH") {
            config.prefetch = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_CHUNK") {
            config.chunk = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_RESTORE") {
            config.restore = (phase_restore) parsed;
        } else if (name == "LLAMA_PHASE_REFILL_MIB") {
            config.refill_bytes = (size_t) parsed << 20;
        } else if (name == "LLAMA_PHASE_KV") {
            config.kv = (phase_kv_mode) parsed;
        } else if (name == "LLAMA_PHASE_KV_ROWS") {
            config.kv_rows = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_SELECT") {
            config.select = (phase_select_mode) parsed;
        } else if (name == "LLAMA_PHASE_BUDGET_MIB") {
            for (const auto & entry : split(value, ',')) {
                bool ok = false;
                config.budget_bytes.push_back((size_t) parse_int(entry, ok) << 20);
            }
        } else if (name == "LLAMA_PHASE_EXPERT_BATCH") {
            config.expert_batch = (uint32_t) parsed;
        } else if (name == "LLAMA_PHASE_DRAFT") {
            config.draft_auto = parsed == 1;
        } else if (name == "LLAMA_PHASE_GRAPHS") {
            config.graphs = (int32_t) parsed;
        } else if (name == "LLAMA_PHASE_LOG") {
            config.log = (phase_log) parsed;
        } else if (name == "LLAMA_PHASE_FAULT") {
            config.faults = parse_faults(value);
        }
    }
    return config;
}

size_t phase_config::budget_of(size_t device) const {
    return budget_bytes.empty() ? SIZE_MAX : budget_bytes[std::min(device, budget_bytes.size() - 1)];
}

phase_environment phase_config_environment() {
    phase_environment env;
    for (char ** entry = environ; entry && *entry; ++entry) {
        const char * equals = std::strchr(*entry, '=');
        if (equals && std::strncmp(*entry, PREFIX, sizeof(PREFIX) - 1) == 0) {
            env.emplace_back(std::string(*entry, equals - *entry), equals + 1);
        }
    }
    return env;
}

phase_config phase_config_load() {
    return phase_config_parse(phase_config_environment());
}

void phase_config_check_or_exit() {
    try {
        phase_config_load();
    } catch (const std::invalid_argument & error) {
        std::fprintf(stderr, "llama-phase: %s (all variables: docs/env.md)\n", error.what());
        std::exit(PHASE_EXIT_CONFIG);
    }
}
