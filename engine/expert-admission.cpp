// Which layers of the model an expert_cache serves, and how: from slots and ring, through a staging ring, or not at all.

#include "expert-cache.h"
#include "expert-staging.h"

#include "phase-steps.h"
#include "transaction.h"

#include "llama-impl.h"

static constexpr size_t STAGING_BYTES = PHASE_STAGING_THREADS*phase_stager::CHUNKS_PER_THREAD*PHASE_STAGING_CHUNK_BYTES;

static ggml_backend_buffer_t allocate_staging(ggml_backend_dev_t dev) {
    auto * buft   = ggml_backend_dev_host_buffer_type(dev);
    auto * buffer = ggml_backend_buft_alloc_buffer(buft ? buft : ggml_backend_cpu_buffer_type(), STAGING_BYTES);
    if (buffer && buft && ggml_backend_buffer_get_type(buffer) != buft) { // the backend fell back to memory that is not pinned
        ggml_backend_buffer_free(buffer);
        return nullptr;
    }
    return buffer;
}

void expert_cache::admit_layers(int il_begin, int il_end) {
    const bool   streams = config.mode != PHASE_MODE_OFF && ring_regions_wanted() >= 2;
    phase_faults faults(config.faults);

    const auto keep_stock = [&](int il, const std::string & reason) {
        LLAMA_LOG_WARN("llama-phase: layer %d keeps the stock path: %s\n", il, reason.c_str());
        unusable.emplace_back(il, reason);
    };
    for (const auto & [il, reason] : store->unusable) {
        if (il >= il_begin && il < il_end) {
            keep_stock(il, reason);
        }
    }
    for (const auto & host : store->layers) {
        if (host.il < il_begin || host.il >= il_end) {
            continue;
        }
        if (!host.pinned()) {
            const std::string reason = "its experts could not be pinned: " + host.pin_failure;
            if (streams && !staging.count(host.dev)) {
                staging[host.dev].reset(faults.fires(PHASE_STEP_PIN_STAGING) ? nullptr : allocate_staging(host.dev));
            }
            if (!streams || !staging[host.dev]) {
                keep_stock(host.il, reason + (streams ? format("; nor could %zu MiB for a staging ring", STAGING_BYTES >> 20) : ""));
                continue;
            }
            LLAMA_LOG_WARN("llama-phase: layer %d is streamed through a staging ring in prompts, and keeps the stock path in generation: %s\n",
                    host.il, reason.c_str());
            staged.emplace_back(host.il, reason);
        }
        if (!host.copied.empty()) {
            copied.emplace_back(host.il, host.copied);
        }
        layers.emplace_back();
        layers.back().host = &host;
    }
}
