// The ring of an expert_cache: memory, the place of each layer in it, and its life.

#include "expert-cache.h"

#include "phase-steps.h"
#include "ring-depth.h"

#include "llama-impl.h"

#include <algorithm>
#include <stdexcept>

int32_t expert_cache::ring_regions_wanted() const {
    return std::min(config.ring_regions < 0 ? ring_depth((int32_t) ring_order.size(), most_ring_layers()) : config.ring_regions, max_regions);
}

int32_t expert_cache::most_ring_layers() const {
    int32_t most = 0;
    for (const auto & [dev, order] : ring_order) {
        most = std::max(most, (int32_t) order.size());
    }
    return most;
}

std::string expert_cache::ring_shortfall() const {
    if (config.ring_regions >= 0 || n_regions <= RING_REGIONS_LEAST) {
        return "";
    }
    for (const auto & [dev, order] : ring_order) {
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        if (phase_backend_api_of(dev) && free < RESERVE_BYTES) {
            return format("%s: %.0f MiB are left, of %.0f to keep", ggml_backend_dev_name(dev), free/1048576.0, RESERVE_BYTES/1048576.0);
        }
    }
    return "";
}

void expert_cache::limit_ring(int32_t n, const std::string & reason) {
    max_regions = n;
    ring_note   = format("ring of %d layers: the prefill buffers do not fit beside more: %s", n, reason.c_str());
}

void expert_cache::unlimit_ring() {
    max_regions = INT32_MAX;
    ring_note.clear();
}

size_t expert_cache::allocate_ring(int32_t n, const fault_point & fault) {
    const auto aligned = [](size_t size) { return (size + 255)/256*256; };

    ring_short.clear();
    const int32_t n_max = most_ring_layers();
    // two are the fewest that overlap, even over a single layer
    for (n = std::min(n, std::max(n_max, 2)); n >= 2 && n_max > 0; --n) {
        try {
            fault(PHASE_STEP_RING_ALLOCATE);
            for (auto & [dev, order] : ring_order) {
                auto * buft = ggml_backend_dev_buffer_type(dev);
                const size_t region_size = region_bytes(dev);
                const int32_t regions = std::min<int32_t>(n, (int32_t) order.size());
                ring_arena.reserve(dev, regions*region_size);

                for (auto & layer : layers) {
                    if (layer.host->dev != dev) {
                        continue;
                    }
                    size_t offset = (layer.stream.position % regions)*region_size;
                    for (size_t i = 0; i < layer.host->weights.size(); ++i) {
                        const auto * weight = layer.host->weights[i];
                        const size_t size   = ggml_backend_buft_get_alloc_size(buft, weight);
                        layer.ring.push_back(ring_arena.place(weight, dev, offset));
                        layer.stream.tensors[i].dst = (uint8_t *) layer.ring.back()->data;
                        layer.stream.tensors[i].pad = size - ggml_nbytes(weight);
                        offset += aligned(size);
                    }
                }
                ring_arena.zero(dev);
                auto & ring = rings[dev];
                ring = {};
                ring.n_regions = regions;
                ring.n_layers  = (int32_t) order.size();
                ring.layers    = order.data();
                ring.times     = &ring_times.at(dev);
                if (const auto it = staging.find(dev); it != staging.end() && it->second) {
                    ring.staging       = (uint8_t *) ggml_backend_buffer_get_base(it->second.get());
                    ring.staging_bytes = ggml_backend_buffer_get_size(it->second.get());
                }
                for (auto * stream : order) {
                    stream->ring = &rings[dev];
                }
            }
            n_regions = n;
            return ring_arena.bytes();
        } catch (const std::exception & error) {
            free_ring();
            ring_short = format("no memory for a ring of %d layers: %s", n, error.what());
            LLAMA_LOG_WARN("llama-phase: %s\n", ring_short.c_str());
        }
    }
    return 0;
}

void expert_cache::start_ring(const backend_map & backends, const fault_point & fault) {
    for (auto & [dev, ring] : rings) {
        fault(PHASE_STEP_RING_START);
        const auto * api     = phase_backend_api_of(dev);
        const char * failure = api ? api->ring_start(backends.at(dev), &ring) : nullptr;
        if (failure) {
            throw std::runtime_error(format("%s cannot stream layers: %s", ggml_backend_dev_name(dev), failure));
        }
    }
}

void expert_cache::set_last_pass(bool last) {
    for (auto & entry : rings) {
        entry.second.last_pass = last;
    }
}

size_t expert_cache::free_ring() {
    for (auto & [dev, ring] : rings) {
        if (const auto * api = phase_backend_api_of(dev)) {
            api->ring_free(&ring);
        }
    }
    rings.clear();
    const size_t bytes = ring_arena.bytes();
    ring_arena.clear();
    for (auto & layer : layers) {
        layer.ring.clear();
        layer.stream.ring = nullptr;
    }
    n_regions = 0;
    return bytes;
}
