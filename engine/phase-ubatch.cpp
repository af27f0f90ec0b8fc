#include "phase-ubatch.h"

#include <algorithm>
#include <cstdio>

size_t phase_ubatch_need::short_bytes() const {
    const auto beyond = [](size_t need, size_t room) { return need > room ? need - room : 0; };
    return std::max(beyond(compute_bytes + ring_bytes + pool_bytes, free_bytes), beyond(compute_bytes + ring_bytes, budget_bytes));
}

bool phase_ubatch_candidate::fits() const {
    return failure.empty() && std::all_of(devices.begin(), devices.end(), [](const phase_ubatch_need & need) { return need.short_bytes() == 0; });
}

std::string phase_ubatch_candidate::text() const {
    std::string out = "prefill ubatch " + std::to_string(ubatch) + (fits() ? " fits" : " does not fit");
    if (!failure.empty()) {
        return out + ": it cannot be planned: " + failure;
    }
    const auto add = [&](const char * format, size_t bytes) {
        char piece[64];
        std::snprintf(piece, sizeof(piece), format, bytes/1048576.0);
        out += piece;
    };
    for (const auto & need : devices) {
        out += "; " + need.device + ":";
        add(" %.0f MiB of compute buffers", need.compute_bytes);
        add(", ring %.0f", need.ring_bytes);
        add(", pools %.0f", need.pool_bytes);
        if (need.free_bytes != SIZE_MAX) {
            add(", free %.0f", need.free_bytes);
        }
        if (need.budget_bytes != SIZE_MAX) {
            add(", budget %.0f", need.budget_bytes);
        }
        if (need.short_bytes() > 0) {
            add(", short by %.0f", need.short_bytes());
        }
    }
    return out;
}

std::vector<uint32_t> phase_ubatch_candidates(uint32_t decode, uint32_t batch) {
    std::vector<uint32_t> out;
    for (uint32_t ubatch : { 512u, 1024u, 2048u, 4096u, 8192u }) {
        const uint32_t capped = std::min(ubatch, batch);
        if (capped > decode && (out.empty() || capped > out.back())) {
            out.push_back(capped);
        }
    }
    return out;
}

uint32_t phase_ubatch_choose(const std::vector<phase_ubatch_candidate> & candidates, uint32_t decode) {
    uint32_t best = decode;
    for (const auto & candidate : candidates) {
        if (candidate.fits()) {
            best = std::max(best, candidate.ubatch);
        }
    }
    return best;
}

// what a chat's follow-up adds: 170 to 200 tokens
static constexpr uint32_t MIN_TOKENS_FLOOR = 240;

uint32_t phase_min_tokens(uint32_t ubatch_decode) {
    return std::max(ubatch_decode + ubatch_decode/4, MIN_TOKENS_FLOOR);
}
