// What a ring would take, and a ring that exists for planning only.

#include "expert-cache.h"

#include <algorithm>

static size_t aligned(size_t size) {
    return (size + 255)/256*256;
}

size_t expert_cache::region_bytes(ggml_backend_dev_t dev) const {
    auto * buft = ggml_backend_dev_buffer_type(dev);
    size_t largest = 0;
    for (const auto & layer : layers) {
        size_t bytes = 0;
        for (const auto * weight : layer.host->weights) {
            bytes += aligned(ggml_backend_buft_get_alloc_size(buft, weight));
        }
        largest = std::max(largest, layer.host->dev == dev ? bytes : 0);
    }
    return largest;
}

int32_t expert_cache::ring_regions_to_plan() const {
    const int32_t wanted = config.ring_regions < 0 ? 2 : config.ring_regions;
    return wanted >= 2 && !layers.empty() ? wanted : 0;
}

size_t expert_cache::planned_ring_bytes(ggml_backend_dev_t dev) const {
    const auto it = ring_order.find(dev);
    return it == ring_order.end() ? 0 : std::min<size_t>(ring_regions_to_plan(), it->second.size())*region_bytes(dev);
}

size_t expert_cache::planned_pool_bytes(ggml_backend_dev_t dev, uint32_t n_tokens) const {
    size_t largest = 0;
    for (const auto & layer : layers) {
        if (layer.host->dev != dev || !phase_backend_api_of(dev)) {
            continue;
        }
        for (const auto * weight : layer.host->weights) {
            // every token once for each of its experts: quantized to 36 bytes for 32 values (MMQ), or F32 in and out, sorted by expert
            const size_t row = ggml_is_quantized(weight->type) ? weight->ne[0]*36/32 : (weight->ne[0] + weight->ne[1])*sizeof(float);
            largest = std::max(largest, row*n_tokens*layer.host->n_used);
        }
    }
    return largest;
}

void expert_cache::pretend_ring() {
    n_regions = ring_regions_to_plan();
    for (auto & layer : layers) {
        auto & buffer = pretended[layer.host->dev];
        if (!buffer) {
            buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(layer.host->dev), 0));
            ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
        if (!pretended_tensors) {
            pretended_tensors.reset(ggml_init({ layers.size()*PHASE_MAX_TENSORS*ggml_tensor_overhead(), nullptr, true }));
        }
        for (const auto * weight : layer.host->weights) {
            auto * tensor = ggml_dup_tensor(pretended_tensors.get(), weight);
            tensor->buffer = buffer.get();
            tensor->data   = buffer.get(); // any address: nothing reads it, but a tensor without one would be allocated
            layer.ring.push_back(tensor);
        }
    }
}

void expert_cache::forget_pretended_ring() {
    for (auto & layer : layers) {
        layer.ring.clear();
    }
    n_regions = 0;
    pretended_tensors.reset();
    pretended.clear();
}
