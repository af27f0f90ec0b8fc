#include "kv-buffer.h"

#include "expert-store.h"
#include "kv-op.h"
#include "kv-rows-host.h"
#include "phase-config.h"
#include "phase-steps.h"
#include "transaction.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

struct type_context {
    std::string               name;
    const phase_backend_api * api = nullptr; // null: the CPU
};

struct kept_rows {
    phase_kv_rows *     rows;
    phase_kv_rows_shape shape;
};

struct buffer_context {
    void *                    base = nullptr;
    size_t                    size = 0;
    const phase_backend_api * api  = nullptr;
    std::vector<kept_rows>    kept;

    const phase_backend_api & rows_api() const { return api ? *api : phase_kv_rows_host_api(); }
};

// by the address of K: figures are asked for by threads that do not know which buffers live
std::mutex                                                                 kept_lock;
std::map<const void *, std::pair<const phase_backend_api *, kept_rows>> kept_of_k;

buffer_context & context_of(ggml_backend_buffer_t buffer) {
    return *(buffer_context *) buffer->context;
}

const char * get_name(ggml_backend_buffer_type_t buft) {
    return ((type_context *) buft->context)->name.c_str();
}

void free_buffer(ggml_backend_buffer_t buffer) {
    auto & ctx = context_of(buffer);
    for (const auto & layer : ctx.kept) {
        std::lock_guard<std::mutex> guard(kept_lock);
        kept_of_k.erase(layer.shape.k);
        ctx.rows_api().kv_rows_free(layer.rows);
    }
    if (ctx.api) {
        ctx.api->host_free(ctx.base);
    } else {
        ggml_aligned_free(ctx.base, ctx.size);
    }
    delete &ctx;
}

// The host is about to write: no row of this layer is what it was.
void forget(ggml_backend_buffer_t buffer, const void * data) {
    const auto & ctx = context_of(buffer);
    for (const auto & layer : ctx.kept) {
        const auto & [k, v, k_bytes, v_bytes, n_rows, n_slots] = layer.shape;
        const auto in = [&](const uint8_t * begin, size_t row_bytes) { return data >= begin && data < begin + n_rows*row_bytes; };
        if (!data || in(k, k_bytes) || in(v, v_bytes)) {
            ctx.rows_api().kv_rows_reset(layer.rows);
        }
    }
}

const ggml_backend_buffer_i BUFFER_INTERFACE = {
    /* .free_buffer   = */ free_buffer,
    /* .get_base      = */ [](ggml_backend_buffer_t buffer) { return context_of(buffer).base; },
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ [](ggml_backend_buffer_t buffer, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
        forget(buffer, t->data);
        std::memset((char *) t->data + offset, value, size);
    },
    /* .set_tensor    = */ [](ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
        forget(buffer, t->data);
        std::memcpy((char *) t->data + offset, data, size);
    },
    /* .get_tensor    = */ [](ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
        std::memcpy(data, (const char *) t->data + offset, size);
    },
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ [](ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
        const auto * from = src->view_src ? src->view_src->buffer : src->buffer;
        if (!phase_kv_is_host_buffer_type(from->buft) && !ggml_backend_buft_is_host(from->buft)) {
            return false; // by way of get and set
        }
        forget(buffer, dst->data);
        std::memmove(dst->data, src->data, ggml_nbytes(src));
        return true;
    },
    /* .clear         = */ [](ggml_backend_buffer_t buffer, uint8_t value) {
        forget(buffer, nullptr);
        std::memset(context_of(buffer).base, value, buffer->size);
    },
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

std::string phase_kv_keep_rows(const ggml_tensor * k, const ggml_tensor * v, int64_t n_slots) {
    auto & ctx = context_of(k->buffer);
    phase_kv_rows_shape shape {};
    shape.k       = (const uint8_t *) k->data;
    shape.v       = (const uint8_t *) v->data;
    shape.k_bytes = k->nb[1];
    shape.v_bytes = v->nb[1];
    shape.n_rows  = (int32_t) (k->ne[1]*k->ne[2]);
    shape.n_slots = (int32_t) n_slots;

    phase_kv_rows * rows = nullptr;
    if (const char * error = ctx.rows_api().kv_rows_new(ggml_backend_buft_get_device(k->buffer->buft), &shape, &rows)) {
        return error;
    }
    ctx.kept.push_back({ rows, shape });
    std::lock_guard<std::mutex> guard(kept_lock);
    kept_of_k[k->data] = { &ctx.rows_api(), ctx.kept.back() };
    return "";
}

int64_t phase_kv_rows_kept(const void * k, phase_kv_rows_counters * counters) {
    *counters = {};
    std::lock_guard<std::mutex> guard(kept_lock);
    const auto at = kept_of_k.find(k);
    if (at == kept_of_k.end()) {
        return 0;
    }
    at->second.first->kv_rows_count(at->second.second.rows, counters);
    return at->second.second.shape.n_slots;
}

phase_kv_rows * phase_kv_rows_on_host(const ggml_tensor * k) {
    const auto * buffer = k->buffer;
    // a context that only measures has buffers without memory
    if (buffer && buffer->context && phase_kv_is_host_buffer_type(buffer->buft) && !context_of(k->buffer).api) {
        for (const auto & layer : context_of(k->buffer).kept) {
            if (layer.shape.k == k->data) {
                return layer.rows;
            }
        }
    }
    return nullptr;
}
