#include "lent-buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <stdexcept>
#include <string>

struct lent_buffers::entry {
    ggml_backend_buffer_type_t type;
    ggml_backend_buffer_ptr    buffer;
};

lent_buffers::lent_buffers(const std::vector<ggml_backend_buffer_type_t> & types, const std::vector<size_t> & sizes) {
    for (size_t i = 0; i < types.size(); ++i) {
        size_t size = 0;
        for (size_t j = 0; j < types.size(); ++j) {
            size = types[j] == types[i] ? std::max(size, sizes[j]) : size;
        }
        if (size == 0 || bytes(types[i]) > 0) {
            continue;
        }
        auto of_type = std::make_unique<entry>();
        of_type->type = types[i];
        of_type->buffer.reset(ggml_backend_buft_alloc_buffer(types[i], size));
        if (!of_type->buffer) {
            throw std::runtime_error(std::string("no memory of type ") + ggml_backend_buft_name(types[i]));
        }
        ggml_backend_buffer_set_usage(of_type->buffer.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
        entries.push_back(std::move(of_type));
    }
}

lent_buffers::~lent_buffers() = default;

size_t lent_buffers::bytes(ggml_backend_buffer_type_t type) const {
    for (const auto & entry : entries) {
        if (entry->type == type) {
            return entry->buffer->size;
        }
    }
    return 0;
}

// the first member is what a scheduler holds
struct lent_types::type {
    ggml_backend_buffer_type   lent;
    ggml_backend_buffer_type_t inner;
    ggml_backend_buffer_t      buffer; // null: none of this type
};

static ggml_backend_buffer_t lend(size_t size, ggml_backend_buffer_type_t inner, ggml_backend_buffer_t & buffer) {
    if (!buffer || size > buffer->size) {
        return ggml_backend_buft_alloc_buffer(inner, size);
    }
    ggml_backend_buffer_i iface = buffer->iface;
    iface.free_buffer = [](ggml_backend_buffer_t) {};
    auto * alias = ggml_backend_buffer_init(buffer->buft, iface, buffer->context, size);
    buffer = nullptr; // once
    return alias;
}

lent_types::lent_types(lent_buffers & buffers, const std::vector<ggml_backend_buffer_type_t> & inner_types) {
    for (size_t i = 0; i < inner_types.size(); ++i) {
        auto * inner = inner_types[i];
        // a scheduler tells by the type which backends share a buffer
        const auto same = std::find(inner_types.begin(), inner_types.begin() + i, inner);
        if (same != inner_types.begin() + i) {
            pointers.push_back(pointers[same - inner_types.begin()]);
            continue;
        }
        auto made = std::make_unique<type>(type { *inner, inner, nullptr });
        for (const auto & entry : buffers.entries) {
            made->buffer = entry->type == inner ? entry->buffer.get() : made->buffer;
        }
        made->lent.iface.alloc_buffer = [](ggml_backend_buffer_type_t of, size_t size) {
            auto * self = (type *) of;
            return lend(size, self->inner, self->buffer);
        };
        made->lent.iface.alloc_buffer_n = nullptr;
        pointers.push_back(&made->lent);
        types.push_back(std::move(made));
    }
}

lent_types::~lent_types() = default;
