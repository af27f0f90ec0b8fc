#pragma once

// Which micro-batch the prefill phase gets when LLAMA_PHASE_PREFILL_UBATCH is auto. Pure: what each candidate needs is planned elsewhere
// (phase_context::plan_ubatch).

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// what one candidate needs of one device, all members of the group together
struct phase_ubatch_need {
    std::string device;
    size_t      compute_bytes   = 0; // planned by the scheduler, nothing allocated
    size_t      ring_bytes      = 0;
    size_t      pool_bytes      = 0; // what the kernels of the routed experts take from the backend's pool at least, by formula
    size_t      free_bytes      = SIZE_MAX; // free once the decode phase has given back its own; SIZE_MAX: unknown
    size_t      budget_bytes    = SIZE_MAX; // of compute buffers and ring, without pools; SIZE_MAX: none

    size_t short_bytes() const;
};

struct phase_ubatch_candidate {
    uint32_t                       ubatch = 0;
    std::vector<phase_ubatch_need> devices;
    std::string                    failure; // why it could not be planned, or empty

    bool        fits() const;
    std::string text() const; // one line for the log
};

// 512, 1024, 2048, 4096 and 8192 where larger than `decode`, each at most `batch`; ascending, without repeats. Empty: no switch.
std::vector<uint32_t> phase_ubatch_candidates(uint32_t decode, uint32_t batch);

// the largest that fits, else `decode`
uint32_t phase_ubatch_choose(const std::vector<phase_ubatch_candidate> & candidates, uint32_t decode);

// Fewest new tokens of a prompt that switch when LLAMA_PHASE_PREFILL_MIN_TOKENS is auto. A rule of the settings alone, never of measured
// times: the split decides the tokens of a quantized model, so it must not differ from start to start (docs/design.md, section 3).
uint32_t phase_min_tokens(uint32_t ubatch_decode);
