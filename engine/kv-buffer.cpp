#include "kv-buffer.h"

#include "expert-store.h"
#include "kv-op.h"
#include "phase-config.h"
#include "phase-steps.h"
#include "transaction.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace {

struct type_context {
    std::string               name;
    const phase_backend_api * api = nullptr; // null: the CPU
};

struct buffer_context {
    void *                    base = nullptr;
    size_t                    size = 0;
    const phase_backend_api * api  = nullptr;
};

buffer_context & context_of(ggml_backend_buffer_t buffer) {
    return *(buffer_context *) buffer->context;
}

const char * get_name(ggml_backend_buffer_type_t buft) {
    return ((type_context *) buft->context)->name.c_str();
}

void free_buffer(ggml_backend_buffer_t buffer) {
    auto & ctx = context_of(buffer);
    if (ctx.api) {
        ctx.api->host_free(ctx.base);
    } else {
        ggml_aligned_free(ctx.base, ctx.size);
    }
    delete &ctx;
}

const ggml_backend_buffer_i BUFFER_INTERFACE = {
    /* .free_buffer   = */ free_buffer,
    /* .get_base      = */ [](ggml_backend_buffer_t buffer) { return context_of(buffer).base; },
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ [](ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
        std::memset((char *) t->data + offset, value, size);
    },
    /* .set_tensor    = */ [](ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
        std::memcpy((char *) t->data + offset, data, size);
    },
    /* .get_tensor    = */ [](ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
        std::memcpy(data, (const char *) t->data + offset, size);
    },
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ [](ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
        const auto * from = src->view_src ? src->view_src->buffer : src->buffer;
        if (!phase_kv_is_host_buffer_type(from->buft) && !ggml_backend_buft_is_host(from->buft)) {
            return false; // by way of get and set
        }
        std::memmove(dst->data, src->data, ggml_nbytes(src));
        return true;
    },
    /* .clear         = */ [](ggml_backend_buffer_t buffer, uint8_t value) { std::memset(context_of(buffer).base, value, buffer->size); },
    /* .reset         = */ nullptr,
};

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    static phase_faults faults(phase_config_load().faults);

    const auto & type = *(type_context *) buft->context;
    auto ctx = std::make_unique<buffer_context>();
    ctx->size = size;
    ctx->api  = type.api;
    std::string reason;
    if (faults.fires(PHASE_STEP_KV_ALLOCATE)) {
        reason = "injected fault";
    } else if (type.api) {
        const char * error = type.api->host_alloc(size, &ctx->base);
        reason = error ? error : "";
    } else {
        ctx->base = ggml_aligned_malloc(size);
    }
    if (!ctx->base) {
        GGML_LOG_ERROR("llama-phase: no %.0f MiB of host memory for K/V (%s)%s%s: use a smaller context (-c), fewer slots (-np), or "
                       "LLAMA_PHASE_KV=device\n", size/1048576.0, type.name.c_str(), reason.empty() ? "" : ": ", reason.c_str());
        return nullptr;
    }
    return ggml_backend_buffer_init(buft, BUFFER_INTERFACE, ctx.release(), size);
}

} // namespace

ggml_backend_buffer_type_t phase_kv_host_buffer_type(ggml_backend_dev_t dev) {
    static std::mutex                                             lock;
    static std::map<ggml_backend_dev_t, ggml_backend_buffer_type> types; // its entries never move

    const bool   cpu = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    const auto * api = phase_backend_api_of(dev);
    if (!cpu && !(api && api->host_alloc)) {
        return nullptr;
    }
    std::lock_guard<std::mutex> guard(lock);
    auto & type = types[dev];
    if (!type.context) {
        type.iface          = ggml_backend_dev_buffer_type(dev)->iface;
        type.iface.get_name         = get_name;
        type.iface.alloc_buffer     = alloc_buffer;
        type.iface.alloc_buffer_n   = nullptr;
        type.iface.get_alloc_size   = nullptr;
        type.iface.get_alloc_size_n = nullptr;
        type.device  = dev;
        type.context = new type_context { std::string(ggml_backend_dev_name(dev)) + "_KV_Host", cpu ? nullptr : api };
    }
    return &type;
}

bool phase_kv_is_host_buffer_type(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == get_name;
}
