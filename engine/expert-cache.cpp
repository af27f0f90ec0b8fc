#include "expert-cache.h"

#include "phase-steps.h"
#include "slot-count.h"
#include "slot-policy.h"

#include "llama-adapter.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

expert_cache::expert_cache(const llama_model & model, int il_begin, int il_end, const phase_config & config) :
        il_end(il_end), config(config), store(expert_store::of(model, config)) {
    admit_layers(il_begin, il_end);
    if (layers.empty()) {
        return;
    }

    auto * buft = ggml_backend_dev_host_buffer_type(layers[0].host->dev);
    counters.reset(ggml_backend_buft_alloc_buffer(buft ? buft : ggml_backend_cpu_buffer_type(), 4*layers.size()*sizeof(phase_op_counters)));
    if (!counters || (buft && ggml_backend_buffer_get_type(counters.get()) != buft)) {
        throw std::runtime_error(format("llama-phase: %s cannot pin host memory (GGML_CUDA_NO_PINNED set, or the limit of locked memory, ulimit -l, reached)",
                ggml_backend_dev_name(layers[0].host->dev)));
    }
    ggml_backend_buffer_clear(counters.get(), 0);
    auto * counter = (phase_op_counters *) ggml_backend_buffer_get_base(counters.get());

    for (auto & layer : layers) {
        const auto & host = *layer.host;
        layer.fetch.n_expert  = layer.stream.n_expert  = host.n_expert;
        layer.fetch.n_tensors = layer.stream.n_tensors = (int32_t) host.weights.size();
        layer.stream.staged   = !host.pinned();
        layer.fetch.counters  = counter++;
        layer.stream.counters = counter++;
        layer.prefetched      = counter++;
        layer.filled          = counter++;
        for (size_t i = 0; i < host.weights.size(); ++i) {
            layer.fetch.tensors[i] = { (const uint8_t *) host.weights[i]->data, nullptr, host.stride(i), 0 };
        }
        std::copy(std::begin(layer.fetch.tensors), std::end(layer.fetch.tensors), std::begin(layer.stream.tensors));
        layer.state = state_arena.add(host.dev, GGML_TYPE_I32, (int64_t) phase_state_words(host.n_expert, host.n_expert), 1, 1);
        by_down[host.weights.back()] = &layer;

        layer.stream.position = (int32_t) ring_order[host.dev].size();
        ring_order[host.dev].push_back(&layer.stream);
        ring_times[host.dev];
    }
    state_arena.allocate();
    link_layers(model);
}

// The residual stream changes little from layer to layer, so the router of the next layer says most of what it will choose when it
// is given this layer's input.
void expert_cache::link_layers(const llama_model & model) {
    static constexpr int MAX_DISTANCE = 2; // layers
    for (size_t i = 0; i + 1 < layers.size() && config.prefetch != 0; ++i) {
        auto & layer = layers[i];
        auto & next  = layers[i + 1];
        auto * dev   = next.host->dev;

        auto * router = model.layers[next.host->il].ffn_gate_inp;
        if (layer.host->dev != dev || next.host->il - layer.host->il > MAX_DISTANCE || !router || !router->buffer || !ggml_is_contiguous(router) ||
                router->ne[1] != next.host->n_expert || (router->type != GGML_TYPE_F32 && router->type != GGML_TYPE_F16 && router->type != GGML_TYPE_BF16)) {
            continue;
        }
        const auto on_device = [&](const ggml_tensor * t) {
            return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU ? ggml_backend_buffer_is_host(t->buffer) :
                    ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer)) == dev && !ggml_backend_buffer_is_host(t->buffer);
        };
        if (!on_device(router)) {
            continue;
        }
        const auto * bias = model.layers[next.host->il].ffn_exp_probs_b;
        const bool   use_bias = bias && bias->type == GGML_TYPE_F32 && bias->buffer && on_device(bias) &&
                model.hparams.expert_gating_func == LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID;

        layer.next              = &next;
        layer.router            = router;
        layer.prefetch.n_expert = next.host->n_expert;
        layer.prefetch.next     = &next.fetch;
        layer.prefetch.side     = &prefetch_sides[dev];
        layer.prefetch.counters = next.prefetched;
        layer.prefetch.bias     = use_bias ? (const float *) bias->data : nullptr;
    }
}

expert_cache::~expert_cache() {
    free_ring();
    for (auto & [dev, side] : prefetch_sides) {
        if (const auto * api = phase_backend_api_of(dev)) {
            api->prefetch_free(&side);
        }
    }
}

//
// slots
//

int32_t expert_cache::slots_needed() const {
    int32_t needed = 0;
    for (const auto & layer : layers) {
        const int32_t n = std::min(layer.host->n_expert, layer.host->n_used*(int32_t) config.expert_batch);
        needed = std::max(needed, layer.host->pinned() ? n : 0);
    }
    return needed;
}

void expert_cache::build_slots(int32_t n) {
    slot_arena.clear();
    for (auto & layer : layers) {
        layer.slots.clear();
        if (!layer.host->pinned()) {
            continue;
        }
        for (const auto * weight : layer.host->weights) {
            layer.slots.push_back(slot_arena.add(layer.host->dev, weight->type, weight->ne[0], weight->ne[1], std::min(n, layer.host->n_expert)));
        }
    }
}

void expert_cache::create_slots(const std::vector<std::pair<ggml_backend_dev_t, size_t>> & taken_bytes, bool draft) {
    slot_bounds bounds = { slots_needed(), 0, 0, "" };
    for (const auto & layer : layers) {
        bounds.all = std::max(bounds.all, layer.host->pinned() ? layer.host->n_expert : 0);
    }
    if (bounds.all == 0) {
        LLAMA_LOG_WARN("llama-phase: no slots: no layer's experts are pinned\n");
        return;
    }

    bounds.fits  = bounds.all;
    size_t index = 0;
    for (const auto & [dev, taken] : taken_bytes) {
        size_t per_slot = 0;
        for (const auto & layer : layers) {
            per_slot += layer.host->dev == dev && layer.host->pinned() ? layer.host->expert_bytes() : 0;
        }
        size_t draft_compute = 0;
        size_t draft_slots   = 0;
        if (config.expert_slots < 0) {
            // a draft on the MTP layers behind ours comes later, with compute buffers of its own, and slots: as many as ours, or a number
            for (const auto & host : store->layers) {
                if (host.il >= il_end && host.dev == dev && host.pinned()) {
                    draft_compute = taken;
                    if (config.draft_slots < 0) {
                        per_slot += host.expert_bytes();
                    } else {
                        draft_slots += std::min(config.draft_slots, host.n_expert)*host.expert_bytes();
                    }
                }
            }
        }
        const size_t for_draft = draft_compute + draft_slots;
        const size_t budget    = config.budget_of(index++);
        if (per_slot == 0) {
            continue;
        }
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        const size_t room = std::min(free > RESERVE_BYTES + for_draft ? free - RESERVE_BYTES - for_draft : 0,
                budget > taken + for_draft ? budget - taken - for_draft : 0);
        const int32_t n = (int32_t) std::min<size_t>(room/per_slot, bounds.all);
        if (bounds.room.empty() || n < bounds.fits) {
            bounds.fits = std::min(bounds.fits, n);
            bounds.room = format("%s has room for %.0f MiB, a slot of every layer takes %.1f MiB", ggml_backend_dev_name(dev), room/1048576.0, per_slot/1048576.0);
        }
    }

    const auto count = choose_slots(bounds, config.expert_slots, config.draft_slots, draft, config.expert_batch);
    n_slots_wanted = count.n;
    slots_note     = count.why_not_all;

    allocate_slots([](const char *) {});
    if (n_slots < n_slots_wanted) {
        throw std::runtime_error("llama-phase: " + note);
    }
    for (auto & layer : layers) {
        if (layer.host->pinned()) {
            write_state(layer);
        }
    }
    if (ggml_backend_dev_type(layers[0].host->dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        LLAMA_LOG_WARN("llama-phase: there is no GPU: slots copy from host memory to host memory, which is of use for tests only\n");
    }
    LLAMA_LOG_INFO("llama-phase: %d slots for each of %zu layers%s, %.1f MiB; experts in host memory %.1f MiB\n", n_slots, layers.size(),
            !draft ? "" : slots_note.empty() ? " of the draft, all its experts" : " of the draft", slot_arena.bytes()/1048576.0, store->pinned_bytes/1048576.0);
    if (!slots_note.empty()) {
        LLAMA_LOG_INFO("llama-phase: %s\n", slots_note.c_str());
    }
}

size_t expert_cache::allocate_slots(const fault_point & fault) {
    note.clear();
    if (n_slots_wanted == 0) {
        return 0;
    }
    const int32_t needed = slots_needed();
    for (int32_t n = n_slots_wanted; n >= needed && n > 0; n = n > needed ? std::max(needed, n/2) : 0) {
        try {
            build_slots(n);
            fault(PHASE_STEP_SLOTS_ALLOCATE);
            slot_arena.allocate();
            n_slots = n;
            break;
        } catch (const std::exception & error) {
            slot_arena.clear();
            note = format("no memory for %d slots per layer: %s", n, error.what());
            LLAMA_LOG_WARN("llama-phase: %s\n", note.c_str());
        }
    }
    if (n_slots == 0) {
        LLAMA_LOG_WARN("llama-phase: no slots, host experts take the stock path until the next prompt\n");
        return 0;
    }
    for (auto & layer : layers) {
        layer.fetch.n_slots = layer.host->pinned() ? std::min(n_slots, layer.host->n_expert) : 0;
        for (size_t i = 0; i < layer.slots.size(); ++i) {
            layer.fetch.tensors[i].dst = (uint8_t *) layer.slots[i]->data;
        }
    }
    return slot_arena.bytes();
}

size_t expert_cache::free_slots() {
    const size_t bytes = slot_arena.bytes();
    slot_arena.clear();
    for (auto & layer : layers) {
        layer.slots.clear();
        layer.wanted.clear();
    }
    n_slots = 0;
    fill.left_bytes = 0;
    return bytes;
}

void expert_cache::note_no_slots(const std::string & reason) {
    note = "no slots until the next prompt: " + reason;
}

void expert_cache::remember() {
    for (auto & layer : layers) {
        if (!layer.host->pinned()) {
            continue;
        }
        std::vector<int32_t> words(phase_state_words(layer.host->n_expert, layer.host->n_expert));
        ggml_backend_tensor_get(layer.state, words.data(), 0, words.size()*sizeof(int32_t));
        slot_policy policy(words.data(), layer.host->n_expert, std::max(layer.fetch.n_slots, 1));
        layer.seen.assign(policy.seen, policy.seen + layer.host->n_expert);
        if (n_slots > 0) {
            // those that did not get their turn are still wanted, less than any that are there
            auto & resident = layer.resident = policy.resident();
            const auto is_there = [&](int32_t e) { return policy.slot_of[e] >= 0; };
            std::vector<int32_t> left;
            std::remove_copy_if(layer.wanted.begin(), layer.wanted.end(), std::back_inserter(left), is_there);
            resident.insert(resident.begin(), left.begin(), left.end());
        }
    }
}

std::vector<int32_t> expert_cache::experts_to_restore(const cached_layer & layer, phase_restore restore) const {
    if (restore == PHASE_RESTORE_COLD) {
        return {};
    }
    auto experts = layer.resident;
    if (restore == PHASE_RESTORE_PROMPT && !layer.seen.empty()) {
        // the experts of before stay at the old end, as far as there is room
        std::vector<int32_t> chosen;
        for (int32_t e = 0; e < layer.host->n_expert; ++e) {
            if (layer.seen[e] > 0) {
                chosen.push_back(e);
            }
        }
        std::stable_sort(chosen.begin(), chosen.end(), [&](int32_t a, int32_t b) { return layer.seen[a] < layer.seen[b]; });
        experts.erase(std::remove_if(experts.begin(), experts.end(), [&](int32_t e) { return layer.seen[e] > 0; }), experts.end());
        experts.insert(experts.end(), chosen.begin(), chosen.end());
    }
    if ((int32_t) experts.size() > layer.fetch.n_slots) {
        experts.erase(experts.begin(), experts.end() - layer.fetch.n_slots);
    }
    return experts;
}

// No expert is resident; those to come are older than what tokens use.
void expert_cache::write_state(cached_layer & layer) {
    std::vector<int32_t> words(phase_state_words(layer.host->n_expert, layer.host->n_expert));
    slot_policy(words.data(), layer.host->n_expert, layer.fetch.n_slots).clear((int32_t) layer.wanted.size());
    ggml_backend_tensor_set(layer.state, words.data(), 0, words.size()*sizeof(int32_t));
}

void expert_cache::refill(const backend_map & backends, bool as_before) {
    if (n_slots == 0) {
        return;
    }
    uint64_t bytes = 0;
    for (auto & layer : layers) {
        if (layer.host->pinned()) {
            layer.wanted = experts_to_restore(layer, as_before ? PHASE_RESTORE_SNAPSHOT : config.restore);
            write_state(layer);
            bytes += layer.wanted.size()*layer.host->expert_bytes();
        }
    }
    fill.wanted_bytes = bytes;
    fill.left_bytes   = bytes;
    fill.n_batches    = 0;
    fill_waits        = config.refill_bytes > 0 && !as_before;
    if (!fill_waits) {
        fill_some(backends, SIZE_MAX);
    }
}

void expert_cache::fill_some(const backend_map & backends, size_t most_bytes) {
    size_t offered = 0; // bytes; what is resident by now is not copied
    for (auto & layer : layers) {
        const size_t expert_bytes = layer.host->expert_bytes();
        while (!layer.wanted.empty() && (offered == 0 || offered + expert_bytes <= most_bytes)) {
            const size_t room = std::max<size_t>((most_bytes - offered)/expert_bytes, 1);

            phase_fill list;
            list.n        = (int32_t) std::min({ layer.wanted.size(), room, (size_t) PHASE_FILL_IDS });
            list.newest   = (int32_t) layer.wanted.size();
            list.counters = layer.filled;
            std::copy_n(layer.wanted.rbegin(), list.n, list.experts);
            layer.wanted.resize(layer.wanted.size() - list.n);

            if (const auto * api = phase_backend_api_of(layer.host->dev)) {
                api->fill(backends.at(layer.host->dev), &layer.fetch, layer.state->data, &list);
            } else {
                phase_fill_slots(layer.fetch, (int32_t *) layer.state->data, list);
            }
            offered += list.n*expert_bytes;
        }
    }
    fill.left_bytes -= std::min<uint64_t>(offered, fill.left_bytes);
    fill.n_batches++;
}

bool expert_cache::before_small_batch(const backend_map & backends) {
    if (std::exchange(fill_waits, false) || fill.left_bytes == 0) {
        return false;
    }
    fill_some(backends, config.refill_bytes);
    if (fill.left_bytes == 0 && config.log >= PHASE_LOG_INFO) {
        LLAMA_LOG_INFO("llama-phase: slots filled in front of %u micro-batches\n", fill.n_batches.load());
    }
    return true;
}

//
// graph
//

// An adapter is looked up by the original weights.
static bool has_adapter(const expert_layer & layer, const phase_loras & loras) {
    return std::any_of(loras.begin(), loras.end(), [&](const auto & lora) {
        return std::any_of(layer.weights.begin(), layer.weights.end(), [&](ggml_tensor * weight) { return lora.first->get_weight(weight); });
    });
}

bool expert_cache::note_adapters(const phase_loras & loras) {
    if (loras == adapters) {
        return false;
    }
    adapters = loras;
    adapted.clear();
    for (const auto & layer : layers) {
        if (has_adapter(*layer.host, loras)) {
            adapted.emplace_back(layer.host->il, "an adapter (LoRA) changes its experts");
        }
    }
    return true;
}

// Only for a layer that fetches: its fetch is what keeps the prefetch's memory until the second stream is done with it.
void expert_cache::build_prefetch(ggml_context * ctx, ggml_cgraph * gf, cached_layer & layer, ggml_tensor * x, const phase_loras & loras) {
    if (!layer.next || has_adapter(*layer.next->host, loras) || x->type != GGML_TYPE_F32 || x->ne[0] != layer.router->ne[0] || x->ne[1] == 0 || x->ne[2] != 1 || x->nb[0] != sizeof(float)) {
        return;
    }
    const int64_t n_tokens = x->ne[1];
    const int32_t wanted   = config.prefetch < 0 ? (6*layer.next->host->n_used + 4)/5 : config.prefetch;
    const int32_t most     = std::min(layer.next->fetch.n_slots, PHASE_MAX_IDS)/(int32_t) n_tokens; // distinct predictions need distinct slots
    const int32_t n        = std::min({ wanted, most, layer.next->host->n_expert });
    if (n > 0) {
        auto * node = phase_build_prefetch(ctx, layer.prefetch, n, x, layer.router, layer.next->state, layer.next->slots.data());
        ggml_build_forward_expand(gf, node);
        pending = { ctx, layer.next, node };
    }
}

ggml_tensor * expert_cache::swap(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * x, ggml_tensor * ids, ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down,
        ggml_tensor *& gate_up, const phase_loras & loras) {
    const auto it = by_down.find(down);
    if (it == by_down.end() || ids->type != GGML_TYPE_I32) {
        return ids;
    }
    auto & layer = *it->second;

    if (has_adapter(*layer.host, loras)) {
        return ids;
    }

    const int64_t n_tokens = ids->ne[1];
    const int64_t n_ids    = ids->ne[0]*n_tokens;

    std::vector<ggml_tensor *> * arena = nullptr;
    ggml_tensor * result = ids;
    if (n_regions > 0) {
        // whatever the batch: the last layer of a prompt computes the sampled token only, and must not differ from the others
        arena  = &layer.ring;
        result = phase_build_stream(ctx, layer.stream, ids, layer.state, arena->data());
    } else if (n_slots > 0 && layer.host->pinned() && n_tokens <= config.expert_batch && n_ids <= PHASE_MAX_IDS &&
            std::min<int64_t>(n_ids, layer.host->n_expert) <= layer.fetch.n_slots) {
        arena  = &layer.slots;
        const auto predicted = std::exchange(pending, {});
        build_prefetch(ctx, gf, layer, x, loras); // first: it is on its way while this layer's experts are fetched
        result = phase_build_fetch(ctx, layer.fetch, ids, layer.state, arena->data(),
                predicted.ctx == ctx && predicted.layer == &layer ? predicted.node : nullptr);
        ggml_build_forward_expand(gf, result);
    }
    if (arena) {
        size_t i = 0;
        for (auto ** weight : { &gate_up, &gate, &up, &down }) {
            if (*weight) {
                *weight = (*arena)[i++];
            }
        }
    }
    return result;
}

ggml_tensor * phase_swap_experts(expert_cache * cache, ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * x, ggml_tensor * ids,
        ggml_tensor *& gate, ggml_tensor *& up, ggml_tensor *& down, ggml_tensor *& gate_up, const phase_loras & loras) {
    return cache ? cache->swap(ctx, gf, x, ids, gate, up, down, gate_up, loras) : ids;
}

//
// figures
//

size_t expert_cache::bytes(ggml_backend_dev_t dev) const {
    return slot_arena.bytes(dev) + ring_arena.bytes(dev);
}

expert_stats expert_cache::stats() const {
    expert_stats out;
    out.pinned_bytes = store->pinned_bytes;
    out.slot_bytes   = slot_arena.bytes();
    out.ring_bytes   = ring_arena.bytes();
    out.n_slots      = n_slots;
    out.n_regions    = n_regions;
    out.unusable     = unusable;
    out.unusable.insert(out.unusable.end(), adapted.begin(), adapted.end());
    out.staged       = staged;
    out.copied       = copied;
    for (const auto & reason : { note, slots_note, ring_note, ring_short }) {
        out.note += (out.note.empty() || reason.empty() ? "" : "; ") + reason;
    }
    for (const auto & layer : layers) {
        out.layers.push_back({ layer.host->il, ggml_backend_dev_name(layer.host->dev), n_slots ? layer.fetch.n_slots : 0,
                {}, {}, layer.host->expert_bytes() });
    }
    read_counters(out);
    return out;
}

void expert_cache::read_counters(expert_stats & stats) const {
    stats.fill       = { fill.wanted_bytes, fill.left_bytes, fill.n_batches };
    stats.ring_times = {};
    for (const auto & entry : ring_times) {
        stats.ring_times.copy_us    += entry.second.copy_us;
        stats.ring_times.exposed_us += entry.second.exposed_us;
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        stats.layers[i].slots = *layers[i].fetch.counters;
        stats.layers[i].ring  = *layers[i].stream.counters;
        stats.layers[i].prefetch = *layers[i].prefetched;
        stats.layers[i].filled   = *layers[i].filled;
        if (const auto * api = phase_backend_api_of(layers[i].host->dev)) {
            stats.graph_replays = api->graph_replays();
        }
    }
}
