#pragma once

// The only place that reads LLAMA_PHASE_*. Pure: text in, typed configuration or a message out.
// The names come from phase-env.inc, which tools/gen_env.py makes from llama_phase/env.toml.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

enum phase_mode {
    PHASE_MODE_OFF,
    PHASE_MODE_TRANSACTION,
    PHASE_MODE_BYPASS, // bookkeeping without a switch
};

enum phase_log {
    PHASE_LOG_QUIET, // failures only
    PHASE_LOG_INFO,  // one line per transaction
    PHASE_LOG_DEBUG, // every step
};

// what the slots hold after a transaction
enum phase_restore {
    PHASE_RESTORE_SNAPSHOT, // the experts of before
    PHASE_RESTORE_COLD,     // nothing
    PHASE_RESTORE_PROMPT,   // the experts that the end of the prompt chose most
};

// where the attention K/V of sparse-attention layers is
enum phase_kv_mode {
    PHASE_KV_DEVICE,
    PHASE_KV_HOST,
    PHASE_KV_AUTO,
    PHASE_KV_HOST_ALL, // dense layers, too
};

// how the indexer's choice of rows is prepared and carried out; the choice is the same
enum phase_select_mode {
    PHASE_SELECT_AUTO, // fast where there are phases, or a sparse layer's K/V is in host memory
    PHASE_SELECT_STOCK,
    PHASE_SELECT_FAST,
};

// one entry of LLAMA_PHASE_FAULT
struct phase_fault {
    std::string step;
    uint64_t    nth = 1; // which run of the step fails, counted from 1; 0: every one
};

struct phase_config {
    phase_mode mode               = PHASE_MODE_OFF;
    int32_t    prefill_ubatch     = 2048; // tokens; -1: auto
    int32_t    prefill_min_tokens = -1;   // tokens; -1: auto
    int32_t    expert_slots       = 0;    // per layer; -1: auto
    int32_t    draft_slots        = -1;   // per layer; -1: auto
    uint32_t   expert_batch       = 8;    // tokens
    int32_t    ring_regions       = -1;   // -1: auto
    int32_t    prefetch           = -1;   // experts per token; -1: auto
    int32_t    chunk              = 0;    // tokens; 0: off, -1: auto
    bool       draft_auto         = false; // choose draft lengths
    int32_t    graphs             = -1;   // shapes of small batches; -1: auto
    phase_log  log                = PHASE_LOG_INFO;

    phase_restore restore = PHASE_RESTORE_COLD;
    size_t        refill_bytes = size_t(256) << 20; // in front of a micro-batch; 0: all before the first token
    phase_kv_mode kv      = PHASE_KV_DEVICE;
    int32_t       kv_rows = -1; // positions per layer that the device keeps of K/V in host memory; -1: auto
    phase_select_mode select = PHASE_SELECT_AUTO;

    std::vector<size_t>      budget_bytes; // per device, the last one for all further devices; empty: none
    std::vector<phase_fault> faults;

    // of a device, SIZE_MAX when there is none
    size_t budget_of(size_t device) const;
};

using phase_environment = std::vector<std::pair<std::string, std::string>>; // name, value

// exit code of a process whose LLAMA_PHASE_* are wrong, and of one whose transaction could not be left
// (EX_CONFIG and EX_TEMPFAIL of sysexits.h)
constexpr int PHASE_EXIT_CONFIG = 78;
constexpr int PHASE_EXIT_FAILED = 75;

// Parses the LLAMA_PHASE_* entries of `env`; others are skipped, empty values count as unset.
// Throws std::invalid_argument naming the variable, the nearest known name and what is accepted.
phase_config phase_config_parse(const phase_environment & env);

// the process environment, LLAMA_PHASE_* only
phase_environment phase_config_environment();

// phase_config_parse() of the process environment
phase_config phase_config_load();

// Called by llama_backend_init(), before anything is loaded: ends the process with PHASE_EXIT_CONFIG and a message on stderr
// when the environment is wrong.
void phase_config_check_or_exit();

// the candidate with the smallest edit distance to `name`
std::string phase_config_nearest(const std::string & name, const std::vector<std::string> & candidates);
