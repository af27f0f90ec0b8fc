#include "kv-place.h"

#include <algorithm>
#include <cstdio>

static std::string text(const char * format, double a, double b) {
    char buffer[256];
    std::snprintf(buffer, sizeof(buffer), format, a, b);
    return buffer;
}

phase_kv_choice phase_kv_choose(phase_kv_mode mode, const phase_kv_facts & facts) {
    constexpr double MiB = 1024.0*1024.0;

    if (mode == PHASE_KV_DEVICE) {
        return {};
    }
    if (mode == PHASE_KV_AUTO) {
        // the other half is for compute buffers, slots and the ring, none of which exist yet
        if (!facts.sparse || !facts.known_free || facts.sparse_bytes <= facts.free_bytes/2) {
            return {};
        }
    }
    if (!facts.capable) {
        return { false, "the device cannot read host memory in place" };
    }
    if (!facts.flash) {
        return { false, "without flash attention (-fa on) all K/V is read for each token" };
    }
    if (!facts.f16) {
        return { false, "only f16 K/V is read in place: other types are converted as a whole for each token (-ctk f16 -ctv f16)" };
    }
    if (!facts.sparse && mode != PHASE_KV_HOST_ALL) {
        return { false, (facts.indexer ? "of models with an indexer, only qwen4exp is known to read nothing but what it picks; " : "") + text("dense attention would read %.0f MiB over the link for each token of a full context, at most %.1f tok/s "
                             "(LLAMA_PHASE_KV=host-all does it all the same)",
                facts.dense_bytes/MiB, facts.dense_bytes ? PHASE_LINK_BYTES_PER_S/facts.dense_bytes : 0.0) };
    }
    if (mode == PHASE_KV_AUTO) {
        return { true, text("%.0f MiB would take more than half of the %.0f MiB that the device has free", facts.sparse_bytes/MiB, facts.free_bytes/MiB) };
    }
    return { true, "" };
}

int64_t phase_kv_rows_choose(int64_t asked, int64_t n_rows, uint64_t position_bytes, uint64_t free_bytes) {
    if (asked >= 0) {
        return std::min(asked, n_rows);
    }
    const int64_t fit   = position_bytes ? (int64_t) (free_bytes/8/position_bytes) : 0;
    const int64_t cheap = fit/4/PHASE_KV_ROWS_AUTO*PHASE_KV_ROWS_AUTO;
    const int64_t n     = std::min({ std::max(PHASE_KV_ROWS_AUTO, cheap), n_rows, fit });
    return n < std::min(PHASE_KV_ROWS_LEAST, n_rows) ? 0 : n;
}
