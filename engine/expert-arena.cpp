#include "expert-arena.h"

#include "llama-impl.h"

#include <stdexcept>

// tensors of one device: at most three weights and a state for each layer
static constexpr size_t MAX_TENSORS = 4096;

expert_arena::part & expert_arena::part_of(ggml_backend_dev_t dev) {
    auto & p = parts[dev];
    if (!p.tensors) {
        p.tensors.reset(ggml_init({ MAX_TENSORS*ggml_tensor_overhead(), nullptr, true }));
    }
    return p;
}

ggml_tensor * expert_arena::add(ggml_backend_dev_t dev, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    return ggml_new_tensor_3d(part_of(dev).tensors.get(), type, ne0, ne1, ne2);
}

static std::runtime_error no_memory(ggml_backend_dev_t dev, size_t size) {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    return std::runtime_error(format("%s: cannot allocate %.0f MiB (%.0f MiB free)", ggml_backend_dev_name(dev), size/1048576.0, free/1048576.0));
}

void expert_arena::allocate() {
    for (auto & [dev, p] : parts) {
        auto * buft = ggml_backend_dev_buffer_type(dev);
        p.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(p.tensors.get(), buft));
        if (!p.buffer) {
            const size_t size = planned_bytes(dev);
            const auto   error = no_memory(dev, size);
            clear();
            throw error;
        }
        ggml_backend_buffer_set_usage(p.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_clear(p.buffer.get(), 0);
    }
}

void expert_arena::reserve(ggml_backend_dev_t dev, size_t size) {
    auto & p = part_of(dev);
    p.buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), size));
    if (!p.buffer) {
        const auto error = no_memory(dev, size);
        clear();
        throw error;
    }
    ggml_backend_buffer_set_usage(p.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
}

ggml_tensor * expert_arena::place(const ggml_tensor * like, ggml_backend_dev_t dev, size_t offset) {
    auto & p = part_of(dev);
    auto * tensor = ggml_dup_tensor(p.tensors.get(), like);
    ggml_backend_tensor_alloc(p.buffer.get(), tensor, (char *) ggml_backend_buffer_get_base(p.buffer.get()) + offset);
    return tensor;
}

void expert_arena::zero(ggml_backend_dev_t dev) {
    ggml_backend_buffer_clear(part_of(dev).buffer.get(), 0);
}

void expert_arena::clear() {
    parts.clear();
}

size_t expert_arena::bytes() const {
    size_t sum = 0;
    for (const auto & entry : parts) {
        sum += bytes(entry.first);
    }
    return sum;
}

size_t expert_arena::bytes(ggml_backend_dev_t dev) const {
    const auto it = parts.find(dev);
    return it != parts.end() && it->second.buffer ? ggml_backend_buffer_get_size(it->second.buffer.get()) : 0;
}

size_t expert_arena::planned_bytes(ggml_backend_dev_t dev) const {
    const auto it = parts.find(dev);
    return it == parts.end() ? 0 : ggml_backend_alloc_ctx_tensors_from_buft_size(it->second.tensors.get(), ggml_backend_dev_buffer_type(dev));
}
