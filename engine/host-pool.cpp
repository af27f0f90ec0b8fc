#include "host-pool.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <vector>

struct host_pool::shared : std::enable_shared_from_this<host_pool::shared> {
    ggml_backend_buffer_type_t           inner;
    ggml_backend_buffer_type             type = {};
    std::vector<ggml_backend_buffer_ptr> parked;
};

struct pooled_buffer {
    std::shared_ptr<host_pool::shared> pool;
    ggml_backend_buffer_ptr            inner;
};

static ggml_backend_buffer_t inner_of(ggml_backend_buffer_t buffer) {
    return ((pooled_buffer *) buffer->context)->inner.get();
}

static void pooled_free(ggml_backend_buffer_t buffer) {
    auto * pooled = (pooled_buffer *) buffer->context;
    pooled->pool->parked.push_back(std::move(pooled->inner));
    delete pooled;
}

static ggml_backend_buffer_t pooled_alloc(ggml_backend_buffer_type_t type, size_t size) {
    auto pool = ((host_pool::shared *) type->context)->shared_from_this();

    // the smallest that is large enough, so that each phase finds its own
    auto best = pool->parked.end();
    for (auto it = pool->parked.begin(); it != pool->parked.end(); ++it) {
        if ((*it)->size >= size && (best == pool->parked.end() || (*it)->size < (*best)->size)) {
            best = it;
        }
    }
    ggml_backend_buffer_ptr inner;
    if (best != pool->parked.end()) {
        inner = std::move(*best);
        pool->parked.erase(best);
    } else {
        inner.reset(ggml_backend_buft_alloc_buffer(pool->inner, size));
        if (!inner) {
            return nullptr;
        }
    }

    ggml_backend_buffer_i iface = {};
    iface.free_buffer   = pooled_free;
    iface.get_base      = [](ggml_backend_buffer_t b) { return ggml_backend_buffer_get_base(inner_of(b)); };
    iface.memset_tensor = [](ggml_backend_buffer_t b, ggml_tensor * t, uint8_t value, size_t offset, size_t n) { inner_of(b)->iface.memset_tensor(inner_of(b), t, value, offset, n); };
    iface.set_tensor    = [](ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t offset, size_t n) { inner_of(b)->iface.set_tensor(inner_of(b), t, data, offset, n); };
    iface.get_tensor    = [](ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t offset, size_t n) { inner_of(b)->iface.get_tensor(inner_of(b), t, data, offset, n); };
    iface.cpy_tensor    = [](ggml_backend_buffer_t b, const ggml_tensor * src, ggml_tensor * dst) { return inner_of(b)->iface.cpy_tensor(inner_of(b), src, dst); };
    iface.clear         = [](ggml_backend_buffer_t b, uint8_t value) { inner_of(b)->iface.clear(inner_of(b), value); };

    auto * context = new pooled_buffer{ pool, std::move(inner) };
    return ggml_backend_buffer_init(type, iface, context, size);
}

host_pool::host_pool(ggml_backend_buffer_type_t inner) : state(std::make_shared<shared>()) {
    state->inner = inner;
    state->type  = *inner;
    state->type.context              = state.get();
    state->type.iface.alloc_buffer   = pooled_alloc;
    state->type.iface.alloc_buffer_n = nullptr;
}

ggml_backend_buffer_type_t host_pool::type() const {
    return &state->type;
}

size_t host_pool::parked_bytes() const {
    size_t bytes = 0;
    for (const auto & buffer : state->parked) {
        bytes += buffer->size;
    }
    return bytes;
}
