#include "expert-store.h"

#include "host-memory.h"
#include "phase-steps.h"
#include "pin-advice.h"
#include "transaction.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#ifndef _WIN32
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

// memory of the host that copies of experts leave to everything else
static constexpr uint64_t RESERVE_BYTES = uint64_t(2) << 30;

size_t expert_layer::stride(size_t i) const {
    return weights[i]->nb[2];
}

size_t expert_layer::expert_bytes() const {
    size_t sum = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
        sum += stride(i);
    }
    return sum;
}

size_t expert_layer::layer_bytes() const {
    return expert_bytes()*n_expert;
}

const phase_backend_api * phase_backend_api_of(ggml_backend_dev_t dev) {
    using getter = const phase_backend_api * (*)();
    auto * reg = ggml_backend_dev_backend_reg(dev);
    auto   get = (getter) ggml_backend_reg_get_proc_address(reg, "llama_phase_backend_api");
    return get ? get() : nullptr;
}

static bool is_cpu(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

static uintptr_t page_bytes() {
#ifndef _WIN32
    return (uintptr_t) sysconf(_SC_PAGESIZE);
#else
    return 4096;
#endif
}

static uint64_t memlock_limit_bytes() {
#ifndef _WIN32
    rlimit limit = {};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        return limit.rlim_cur;
    }
#endif
    return PHASE_NO_LIMIT;
}

// Pages of a file whose content is elsewhere now. They come back when somebody reads them.
static void page_out(void * data, size_t size) {
#ifdef MADV_PAGEOUT
    const uintptr_t page  = page_bytes();
    const uintptr_t begin = ((uintptr_t) data + page - 1)/page*page;
    const uintptr_t end   = ((uintptr_t) data + size)/page*page;
    if (begin < end) {
        (void) madvise((void *) begin, end - begin, MADV_PAGEOUT);
    }
#else
    (void) data;
    (void) size;
#endif
}

// the device's own host buffer: pinned when it was allocated
static bool in_device_host_buffer(const ggml_tensor * tensor, ggml_backend_dev_t dev) {
    return ggml_backend_buffer_get_type(tensor->buffer) == ggml_backend_dev_host_buffer_type(dev);
}

std::shared_ptr<expert_store> expert_store::of(const llama_model & model, const phase_config & config) {
    static std::mutex                                                  lock;
    static std::map<const llama_model *, std::weak_ptr<expert_store>> stores;

    std::lock_guard<std::mutex> guard(lock);
    auto & known = stores[&model];
    auto   store = known.lock();
    if (!store) {
        store = std::make_shared<expert_store>();
        store->find_layers(model);
        store->pin_layers(config);
        known = store;
    }
    return store;
}

void expert_store::find_layers(const llama_model & model) {
    for (int il = 0; il < (int) model.layers.size(); ++il) {
        const auto & tensors = model.layers[il];
        if (!tensors.ffn_down_exps) {
            continue;
        }
        expert_layer layer;
        layer.il       = il;
        layer.dev      = model.dev_layer(il);
        layer.n_expert = (int32_t) tensors.ffn_down_exps->ne[2];
        layer.n_used   = (int32_t) model.hparams.n_expert_used(il);
        for (auto * weight : { tensors.ffn_gate_up_exps, tensors.ffn_gate_exps, tensors.ffn_up_exps, tensors.ffn_down_exps }) {
            if (weight) {
                layer.weights.push_back(weight);
            }
        }

        const bool on_device = std::none_of(layer.weights.begin(), layer.weights.end(), [&](const ggml_tensor * w) {
            return ggml_backend_buffer_is_host(w->buffer) || ggml_backend_dev_type(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(w->buffer))) == GGML_BACKEND_DEVICE_TYPE_CPU;
        });
        if (on_device) {
            continue;
        }

        std::string reason;
        for (const auto * weight : layer.weights) {
            if (!ggml_backend_buffer_is_host(weight->buffer)) {
                reason = std::string("its experts are in a ") + ggml_backend_buffer_name(weight->buffer) + " buffer, which is not the file's layout: start with --no-repack";
            } else if (weight->ne[2] != layer.n_expert || weight->ne[3] != 1 || weight->nb[2] % ggml_type_size(weight->type) != 0) {
                reason = "its expert tensors differ in shape";
            }
        }
        if (layer.weights.size() > PHASE_MAX_TENSORS || layer.weights.size() < 2) {
            reason = "it has an unknown set of expert tensors";
        } else if (is_cpu(layer.dev) && !model.devices.empty()) {
            reason = "the layer itself is on the CPU (-ngl)";
        } else if (!is_cpu(layer.dev) && !phase_backend_api_of(layer.dev)) {
            reason = std::string("the backend of ") + ggml_backend_dev_name(layer.dev) + " has no slot operators";
        }
        if (reason.empty()) {
            layers.push_back(std::move(layer));
        } else {
            unusable.emplace_back(il, reason);
        }
    }
}

// A page may be registered once, so pieces end where the next begins: the tensors in address order, one piece per run of tensors of
// the same layer.
void expert_store::pin_layers(const phase_config & config) {
    const uintptr_t page = page_bytes();
    struct span { uintptr_t begin, end; size_t layer; };
    std::vector<span> spans;
    for (size_t i = 0; i < layers.size(); ++i) {
        for (const auto * weight : layers[i].weights) {
            pinned_bytes += ggml_nbytes(weight);
            if (!is_cpu(layers[i].dev) && !in_device_host_buffer(weight, layers[i].dev)) {
                spans.push_back({ (uintptr_t) weight->data / page * page, ((uintptr_t) weight->data + ggml_nbytes(weight) + page - 1) / page * page, i });
            }
        }
    }
    std::sort(spans.begin(), spans.end(), [](const span & a, const span & b) { return a.begin < b.begin; });
    for (const auto & s : spans) {
        const uintptr_t begin = pieces.empty() ? s.begin : std::max(s.begin, (uintptr_t) pieces.back().end);
        if (begin >= s.end) {
            continue;
        }
        if (!pieces.empty() && pieces.back().layer == s.layer && (uintptr_t) pieces.back().end == begin) {
            pieces.back().end = (char *) s.end;
        } else {
            pieces.push_back({ (char *) begin, (char *) s.end, s.layer, phase_backend_api_of(layers[s.layer].dev), "" });
        }
    }

    const size_t total = std::accumulate(pieces.begin(), pieces.end(), size_t(0), [](size_t sum, const piece & p) { return sum + (p.end - p.begin); });
    size_t done = 0;
    size_t said = 0;
    phase_faults faults(config.faults);
    for (auto & p : pieces) {
        if (faults.fires(PHASE_STEP_PIN_REGISTER)) {
            p.failure = "injected fault";
        } else if (const char * failure = p.api->pin(p.begin, p.end - p.begin)) {
            p.failure = failure + phase_memlock_advice(memlock_limit_bytes(), total);
        }
        done += p.end - p.begin;
        if (done - said >= (size_t(8) << 30)) {
            LLAMA_LOG_INFO("llama-phase: pinning experts: %zu of %zu MiB\n", done >> 20, total >> 20);
            said = done;
        }
    }

    for (const auto & p : pieces) {
        for (size_t i = 0; i < layers.size() && !p.failure.empty(); ++i) {
            for (const auto * weight : layers[i].weights) {
                if ((char *) weight->data < p.end && (char *) weight->data + ggml_nbytes(weight) > p.begin) {
                    layers[i].pin_failure = p.failure;
                }
            }
        }
    }
    for (auto & layer : layers) {
        if (is_cpu(layer.dev) && faults.fires(PHASE_STEP_PIN_REGISTER)) {
            layer.pin_failure = "injected fault";
        }
    }
    move_unpinned(faults);
    for (const auto & layer : layers) {
        pinned_bytes -= layer.pinned() ? 0 : layer.layer_bytes();
    }
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const piece & p) { return !p.failure.empty(); }), pieces.end());
}

void expert_store::move_unpinned(phase_faults & faults) {
    size_t      bytes = 0;
    std::string reason; // of the last one
    for (auto & layer : layers) {
        if (layer.pinned()) {
            continue;
        }
        const auto failure = faults.fires(PHASE_STEP_PIN_COPY) ? "injected fault" : move(layer);
        if (failure.empty()) {
            bytes += layer.layer_bytes();
            layer.copied = std::exchange(layer.pin_failure, "");
            reason = layer.copied;
        } else {
            layer.pin_failure += format("; nor is there a pinned copy of %.0f MiB: ", layer.layer_bytes()/1048576.0) + failure;
        }
    }
    if (bytes > 0) {
        LLAMA_LOG_WARN("llama-phase: the experts of %zu layers, %.0f MiB, are copied to pinned memory, since they cannot be pinned where the file is mapped: %s\n",
                copies.size(), bytes/1048576.0, reason.c_str());
    }
}

// The model's tensors point to the copy, so that batches on the stock path do not read the file again.
std::string expert_store::move(expert_layer & layer) {
    const auto aligned = [](size_t size) { return (size + 255)/256*256; };
    size_t size = 0;
    for (const auto * weight : layer.weights) {
        size += aligned(ggml_nbytes(weight));
    }
    if (const auto refusal = phase_pin_refusal(size, phase_available_bytes(), RESERVE_BYTES); !refusal.empty()) {
        return refusal;
    }
    auto * buft = is_cpu(layer.dev) ? ggml_backend_cpu_buffer_type() : ggml_backend_dev_host_buffer_type(layer.dev);
    ggml_backend_buffer_ptr buffer(buft ? ggml_backend_buft_alloc_buffer(buft, size) : nullptr);
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != buft) { // a backend falls back to memory that is not pinned
        return std::string(ggml_backend_dev_name(layer.dev)) + " has no pinned memory for it";
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    auto * base = (char *) ggml_backend_buffer_get_base(buffer.get());
    for (auto * weight : layer.weights) {
        std::memcpy(base, weight->data, ggml_nbytes(weight));
        moved.push_back({ weight, weight->data, weight->buffer });
        weight->data   = base;
        weight->buffer = buffer.get();
        base += aligned(ggml_nbytes(weight));
        page_out(moved.back().data, ggml_nbytes(weight));
    }
    copies.push_back(std::move(buffer));
    return "";
}

expert_store::~expert_store() {
    for (const auto & m : moved) {
        m.tensor->data   = m.data;
        m.tensor->buffer = m.buffer;
    }
    for (const auto & p : pieces) {
        p.api->unpin(p.begin);
    }
}
