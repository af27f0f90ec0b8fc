// The CUDA operators against plain references, byte for byte, and their speed.
//
//   nvcc -std=c++17 -O2 -arch=native -I engine engine/tests/test-expert-cuda.cu -o test-expert-cuda
//   test-expert-cuda          all checks, then the figures
//   test-expert-cuda small    fewer and smaller checks, no figures: for compute-sanitizer
//   test-expert-cuda bench    the figures alone
//
// Exit codes: 0 all as expected, 1 a check failed, 77 no GPU.

#include "../expert-cuda-fetch.cu"
#include "../expert-cuda-pin.cu"
#include "../expert-cuda-prefetch.cu"
#include "../expert-cuda-stream.cu"
#include "../input-cuda.cu"

#include "check-cuda.h"

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static int n_failed = 0;

#define EXPECT(condition, ...)                                                   \
    do {                                                                         \
        if (!(condition) && ++n_failed <= 20) {                                  \
            std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::fprintf(stderr, __VA_ARGS__);                                   \
            std::fprintf(stderr, "\n");                                          \
        }                                                                        \
    } while (0)

struct device_bytes {
    uint8_t * data = nullptr;
    size_t    size = 0;

    device_bytes(size_t size, int fill) : size(size) {
        CHECK(cudaMalloc(&data, size));
        CHECK(cudaMemset(data, fill, size));
    }
    ~device_bytes() { CHECK(cudaFree(data)); }
    device_bytes(const device_bytes &) = delete;

    std::vector<uint8_t> read() const {
        std::vector<uint8_t> host(size);
        CHECK(cudaMemcpy(host.data(), data, size, cudaMemcpyDeviceToHost));
        return host;
    }
};

struct pinned_bytes {
    uint8_t * data = nullptr;

    explicit pinned_bytes(size_t size) { CHECK(cudaMallocHost(&data, size)); }
    ~pinned_bytes() { CHECK(cudaFreeHost(data)); }
    pinned_bytes(const pinned_bytes &) = delete;
};

static void fill_random(uint8_t * data, size_t size, uint32_t seed) {
    for (size_t i = 0; i < size; ++i) {
        seed    = seed*1664525u + 1013904223u;
        data[i] = (uint8_t) (seed >> 24);
    }
}

static __host__ __device__ uint32_t weigh(uint8_t byte, size_t i) {
    return byte*(uint32_t) (i % 65521 + 1);
}

static uint32_t sum_of(const uint8_t * data, size_t size) {
    uint32_t sum = 0;
    for (size_t i = 0; i < size; ++i) {
        sum += weigh(data[i], i);
    }
    return sum;
}

static __device__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

static __global__ void sum_kernel(const uint8_t * data, size_t size, uint32_t * sum) {
    uint32_t mine = 0;
    for (size_t i = (size_t) blockIdx.x*blockDim.x + threadIdx.x; i < size; i += (size_t) gridDim.x*blockDim.x) {
        mine += weigh(data[i], i);
    }
    atomicAdd(sum, mine);
}

static __global__ void delay_kernel(long long cycles) {
    spin(cycles);
}

// what a matmul would read: the expert behind each slot id
static __global__ void sum_slots_kernel(const int32_t * slots, const uint8_t * arena, size_t stride, uint32_t * sums) {
    const uint8_t * expert = arena + slots[blockIdx.x]*stride;
    uint32_t mine = 0;
    for (size_t i = threadIdx.x; i < stride; i += blockDim.x) {
        mine += weigh(expert[i], i);
    }
    atomicAdd(&sums[blockIdx.x], mine);
}

//
// fetch
//

// The policy of expert-op.h once more, written for clarity: recency is a sorted set.
struct reference {
    int32_t n_expert, n_slots;
    int32_t clock = 0;
    std::map<int32_t, int32_t> slot_of; // expert -> slot
    std::vector<int32_t> expert_of, stamp;
    std::vector<std::pair<int32_t, int32_t>> jobs;
    uint64_t looked_up = 0, missed = 0, evicted = 0, runs = 0;

    reference(int32_t n_expert, int32_t n_slots) : n_expert(n_expert), n_slots(n_slots), expert_of(n_slots, -1), stamp(n_slots, 0) {}

    std::vector<int32_t> fetch(const std::vector<int32_t> & ids) {
        if (clock == INT32_MAX) {
            std::fill(stamp.begin(), stamp.end(), 0);
            clock = 0;
        }
        ++clock;
        std::set<std::pair<int32_t, int32_t>> free_for_use; // (stamp, slot) of slots this batch does not use
        std::set<int32_t> used;
        for (int32_t id : ids) {
            if (slot_of.count(id)) {
                stamp[slot_of[id]] = clock;
                used.insert(slot_of[id]);
            }
        }
        for (int32_t s = 0; s < n_slots; ++s) {
            if (!used.count(s)) {
                free_for_use.insert({ stamp[s], s });
            }
        }
        jobs.clear();
        for (int32_t id : ids) {
            if (slot_of.count(id)) {
                continue;
            }
            const int32_t slot = free_for_use.begin()->second;
            free_for_use.erase(free_for_use.begin());
            if (expert_of[slot] >= 0) {
                slot_of.erase(expert_of[slot]);
                ++evicted;
            }
            expert_of[slot] = id;
            slot_of[id]     = slot;
            stamp[slot]     = clock;
            jobs.push_back({ id, slot });
        }
        looked_up += ids.size();
        missed    += jobs.size();
        ++runs;
        std::vector<int32_t> slots;
        for (int32_t id : ids) {
            slots.push_back(slot_of[id]);
        }
        return slots;
    }

    // into what is empty; returns how many were copied
    size_t fill(const std::vector<int32_t> & wanted, int32_t newest) {
        jobs.clear();
        for (size_t i = 0; i < wanted.size(); ++i) {
            const auto empty = std::find(expert_of.begin(), expert_of.end(), -1);
            if (slot_of.count(wanted[i]) || empty == expert_of.end()) {
                continue;
            }
            const int32_t slot = (int32_t) (empty - expert_of.begin());
            expert_of[slot]    = wanted[i];
            slot_of[wanted[i]] = slot;
            stamp[slot]        = newest - (int32_t) i;
            jobs.push_back({ wanted[i], slot });
        }
        return jobs.size();
    }

    std::vector<int32_t> words() const {
        std::vector<int32_t> w(n_expert, 0); // seen
        for (int32_t e = 0; e < n_expert; ++e) {
            w.push_back(slot_of.count(e) ? slot_of.at(e) : -1);
        }
        w.insert(w.end(), expert_of.begin(), expert_of.end());
        w.insert(w.end(), stamp.begin(), stamp.end());
        w.push_back(clock);
        w.push_back((int32_t) jobs.size());
        for (const auto & job : jobs) {
            w.push_back(job.first);
            w.push_back(job.second);
        }
        return w;
    }
};

// One layer: experts in pinned memory, slots on the device, state, counters.
struct fetch_layer {
    static constexpr size_t GUARD = 512;

    std::vector<std::unique_ptr<pinned_bytes>> experts;
    std::vector<std::unique_ptr<device_bytes>> slots;
    std::vector<std::vector<uint32_t>>         sums; // [tensor][expert]
    device_bytes   state;
    pinned_bytes   counter_memory{sizeof(phase_op_counters)};
    phase_fetch_op op;

    fetch_layer(int32_t n_expert, int32_t n_slots, const std::vector<size_t> & strides, size_t misalign = 0, bool with_sums = true) :
            state(phase_state_words(n_expert, n_slots)*sizeof(int32_t), 0xff) {
        op.n_expert  = n_expert;
        op.n_slots   = n_slots;
        op.n_tensors = (int32_t) strides.size();
        op.counters  = (phase_op_counters *) counter_memory.data;
        *op.counters = {};
        for (size_t i = 0; i < strides.size(); ++i) {
            const size_t size = n_expert*strides[i];
            experts.push_back(std::make_unique<pinned_bytes>(size + misalign));
            slots.push_back(std::make_unique<device_bytes>(n_slots*strides[i] + GUARD, 0xee));
            fill_random(experts[i]->data, size + misalign, (uint32_t) (i + 1)*7919);
            op.tensors[i] = { experts[i]->data + misalign, slots[i]->data, strides[i], 0 };
            sums.emplace_back();
            for (int32_t e = 0; with_sums && e < n_expert; ++e) {
                sums[i].push_back(sum_of(op.tensors[i].src + e*strides[i], strides[i]));
            }
        }
        set(reference(n_expert, n_slots));
    }

    void set(const reference & want) {
        const auto words = want.words();
        CHECK(cudaMemcpy(state.data, words.data(), words.size()*sizeof(int32_t), cudaMemcpyHostToDevice));
    }

    void expect(const reference & want, const char * what, int step) const {
        const auto words = want.words();
        const auto bytes = state.read();
        const auto * got = (const int32_t *) bytes.data();
        for (size_t i = 0; i < words.size(); ++i) {
            EXPECT(got[i] == words[i], "%s, step %d: word %zu of the state is %d, not %d", what, step, i, got[i], words[i]);
        }
        EXPECT(op.counters->looked_up == want.looked_up && op.counters->missed == want.missed && op.counters->evicted == want.evicted &&
                op.counters->runs == want.runs, "%s, step %d: counters differ", what, step);
        for (int32_t i = 0; i < op.n_tensors; ++i) {
            const auto   arena  = slots[i]->read();
            const size_t stride = op.tensors[i].stride;
            for (int32_t s = 0; s < op.n_slots; ++s) {
                const int32_t e = want.expert_of[s];
                const bool same = e >= 0 ? std::memcmp(&arena[s*stride], op.tensors[i].src + e*stride, stride) == 0
                                         : std::all_of(&arena[s*stride], &arena[s*stride] + stride, [](uint8_t b) { return b == 0xee; });
                EXPECT(same, "%s, step %d: slot %d of tensor %d is not expert %d", what, step, s, i, e);
            }
            EXPECT(std::all_of(arena.end() - GUARD, arena.end(), [](uint8_t b) { return b == 0xee; }), "%s: wrote behind the slots", what);
        }
    }
};

// Some experts are popular; ids repeat across tokens, and inside a token where `repeats`.
static std::vector<int32_t> random_ids(std::mt19937 & rng, int32_t n_expert, int32_t n_used, int32_t n_tokens, bool repeats) {
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < n_tokens; ++t) {
        std::vector<int32_t> token;
        while ((int32_t) token.size() < n_used) {
            const double  u  = std::uniform_real_distribution<>(0, 1)(rng);
            const int32_t id = std::min(n_expert - 1, (int32_t) (n_expert*u*u*u));
            if (repeats || std::find(token.begin(), token.end(), id) == token.end()) {
                token.push_back(id);
            }
        }
        ids.insert(ids.end(), token.begin(), token.end());
    }
    return ids;
}

// Ids as the graph has them: the first n_used columns of a wider matrix.
struct device_ids {
    device_bytes   memory;
    phase_cuda_ids view;

    device_ids(const std::vector<int32_t> & ids, int32_t n_used, int32_t width) : memory(ids.size()/n_used*width*sizeof(int32_t), 0x7f) {
        view = { (const char *) memory.data, width*sizeof(int32_t), n_used, (int32_t) ids.size()/n_used };
        CHECK(cudaMemcpy2D(memory.data, view.token_bytes, ids.data(), n_used*sizeof(int32_t), n_used*sizeof(int32_t), view.n_tokens, cudaMemcpyHostToDevice));
    }
};

struct fetch_case {
    const char *        name;
    int32_t             n_expert, n_slots, n_used, max_tokens;
    std::vector<size_t> strides;
    size_t              misalign   = 0;
    bool                repeats    = false;
    int32_t             last_clock = 0;
};

static void test_fetch(const fetch_case & c, int n_steps, bool pdl) {
    fetch_layer layer(c.n_expert, c.n_slots, c.strides, c.misalign);
    reference   want(c.n_expert, c.n_slots);
    want.clock = c.last_clock;
    layer.set(want);

    std::mt19937 rng(42);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // a few at a time without waiting in between, each followed by a reader
    for (int step = 0; step < n_steps; ) {
        struct queued {
            std::unique_ptr<device_ids>   ids;
            std::unique_ptr<device_bytes> slots, sums;
            std::vector<int32_t>          host_ids, want_slots;
        };
        std::vector<queued> burst;
        for (int k = 0; k < 5 && step < n_steps; ++k, ++step) {
            queued q;
            const int32_t n_tokens = 1 + (int32_t) (rng() % c.max_tokens);
            q.host_ids = random_ids(rng, c.n_expert, c.n_used, n_tokens, c.repeats);
            q.ids      = std::make_unique<device_ids>(q.host_ids, c.n_used, c.n_expert + 3);
            q.slots    = std::make_unique<device_bytes>(q.host_ids.size()*sizeof(int32_t), 0x55);
            q.sums     = std::make_unique<device_bytes>(q.host_ids.size()*sizeof(uint32_t)*c.strides.size(), 0);
            q.want_slots = want.fetch(q.host_ids);
            burst.push_back(std::move(q));
        }
        CHECK(cudaDeviceSynchronize());
        for (auto & q : burst) {
            CHECK(phase_cuda_fetch(layer.op, q.ids->view, (int32_t *) layer.state.data, (int32_t *) q.slots->data, stream, pdl));
            for (size_t i = 0; i < c.strides.size(); ++i) {
                sum_slots_kernel<<<(int) q.host_ids.size(), 128, 0, stream>>>((const int32_t *) q.slots->data, layer.op.tensors[i].dst,
                        c.strides[i], (uint32_t *) q.sums->data + i*q.host_ids.size());
            }
        }
        CHECK(cudaStreamSynchronize(stream));
        for (auto & q : burst) {
            const auto slots = q.slots->read();
            const auto sums  = q.sums->read();
            EXPECT(std::memcmp(slots.data(), q.want_slots.data(), slots.size()) == 0, "%s, before step %d: slot ids differ", c.name, step);
            for (size_t i = 0; i < c.strides.size(); ++i) {
                for (size_t k = 0; k < q.host_ids.size(); ++k) {
                    EXPECT(((const uint32_t *) sums.data())[i*q.host_ids.size() + k] == layer.sums[i][q.host_ids[k]],
                            "%s, before step %d: the reader of tensor %zu saw another expert than %d", c.name, step, i, q.host_ids[k]);
                }
            }
        }
        layer.expect(want, c.name, step);
    }
    CHECK(cudaStreamDestroy(stream));
}

// A captured graph of several layers, replayed with other ids each time.
static void test_fetch_graph(int n_replays, bool pdl) {
    const int32_t n_layers = 3, n_expert = 32, n_slots = 12, n_used = 4, n_tokens = 2;
    const std::vector<size_t> strides = { 4096, 1000, 18*64 };

    std::mt19937 rng(7);
    std::vector<std::unique_ptr<fetch_layer>>  layers;
    std::vector<std::unique_ptr<device_ids>>   ids;
    std::vector<std::unique_ptr<device_bytes>> slots;
    std::vector<reference>                     want;
    for (int l = 0; l < n_layers; ++l) {
        layers.push_back(std::make_unique<fetch_layer>(n_expert, n_slots, strides));
        ids.push_back(std::make_unique<device_ids>(random_ids(rng, n_expert, n_used, n_tokens, false), n_used, n_used));
        slots.push_back(std::make_unique<device_bytes>(n_used*n_tokens*sizeof(int32_t), 0));
        want.emplace_back(n_expert, n_slots);
    }

    cudaStream_t    stream;
    cudaGraph_t     graph;
    cudaGraphExec_t instance;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int l = 0; l < n_layers; ++l) {
        CHECK(phase_cuda_fetch(layers[l]->op, ids[l]->view, (int32_t *) layers[l]->state.data, (int32_t *) slots[l]->data, stream, pdl));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0));

    for (int replay = 0; replay < n_replays; ++replay) {
        std::vector<std::vector<int32_t>> want_slots;
        for (int l = 0; l < n_layers; ++l) {
            const auto now = random_ids(rng, n_expert, n_used, n_tokens, false);
            CHECK(cudaMemcpy(ids[l]->memory.data, now.data(), now.size()*sizeof(int32_t), cudaMemcpyHostToDevice));
            want_slots.push_back(want[l].fetch(now));
        }
        CHECK(cudaGraphLaunch(instance, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int l = 0; l < n_layers; ++l) {
            EXPECT(std::memcmp(slots[l]->read().data(), want_slots[l].data(), slots[l]->size) == 0, "graph, replay %d: slot ids differ", replay);
        }
    }
    for (int l = 0; l < n_layers; ++l) {
        layers[l]->expect(want[l], "graph", n_replays);
    }
    CHECK(cudaGraphExecDestroy(instance));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

// As behind a prompt: the replays of a graph, and fills of its layers in turn in front of them, without waiting in between.
static void test_fill_between_replays(int n_rounds, bool pdl) {
    const int32_t n_layers = 3, n_expert = 64, n_slots = 48, n_used = 4, n_tokens = 2, piece = 13;
    const std::vector<size_t> strides = { 4096, 1000, 18*64 };

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::mt19937   rng(17);
    pinned_bytes   fill_counters(n_layers*sizeof(phase_op_counters));
    auto         * filled = (phase_op_counters *) fill_counters.data;
    std::fill_n(filled, n_layers, phase_op_counters());

    for (int round = 0; round < n_rounds; ++round) {
        std::vector<std::unique_ptr<fetch_layer>>  layers;
        std::vector<std::unique_ptr<device_bytes>> slots, sums;
        std::vector<std::vector<int32_t>>          wanted;
        std::vector<reference>                     want;
        const int32_t n_steps = n_layers*((n_slots + piece - 1)/piece) + 2;
        device_bytes ids(n_layers*n_used*n_tokens*sizeof(int32_t), 0);
        for (int l = 0; l < n_layers; ++l) {
            layers.push_back(std::make_unique<fetch_layer>(n_expert, n_slots, strides));
            slots.push_back(std::make_unique<device_bytes>(n_used*n_tokens*sizeof(int32_t), 0));
            sums.push_back(std::make_unique<device_bytes>(n_steps*n_used*n_tokens*sizeof(uint32_t), 0));
            want.emplace_back(n_expert, n_slots);
            want[l].clock = n_slots;
            layers[l]->set(want[l]);
            wanted.emplace_back(n_expert);
            for (int32_t e = 0; e < n_expert; ++e) {
                wanted[l][e] = e;
            }
            std::shuffle(wanted[l].begin(), wanted[l].end(), rng);
            wanted[l].resize(n_slots);
        }
        cudaGraph_t     graph;
        cudaGraphExec_t instance;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        for (int l = 0; l < n_layers; ++l) {
            const phase_cuda_ids view = { (const char *) ids.data + l*slots[l]->size, n_used*sizeof(int32_t), n_used, n_tokens };
            CHECK(phase_cuda_fetch(layers[l]->op, view, (int32_t *) layers[l]->state.data, (int32_t *) slots[l]->data, stream, pdl));
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0));

        pinned_bytes all_ids(n_steps*ids.size); // each step's own: they are read when the stream gets there
        std::vector<std::vector<uint32_t>> want_sums(n_layers);
        for (int32_t step = 0, fills = 0; step < n_steps; ++step) {
            if (step > 0 && fills < n_steps - 2) { // the first goes without
                const int32_t l = fills % n_layers, at = fills/n_layers*piece;
                phase_fill list;
                list.n        = std::min(piece, n_slots - at);
                list.newest   = n_slots - at;
                list.counters = &filled[l];
                std::copy_n(wanted[l].begin() + at, list.n, list.experts);
                CHECK(phase_cuda_fill(layers[l]->op, (int32_t *) layers[l]->state.data, list, stream));
                want[l].fill({ wanted[l].begin() + at, wanted[l].begin() + at + list.n }, list.newest);
                ++fills;
            }
            auto * step_ids = (int32_t *) (all_ids.data + step*ids.size);
            for (int l = 0; l < n_layers; ++l) {
                const auto now = random_ids(rng, n_expert, n_used, n_tokens, false);
                std::copy(now.begin(), now.end(), step_ids + l*n_used*n_tokens);
                want[l].fetch(now);
                for (const int32_t e : now) {
                    want_sums[l].push_back(layers[l]->sums[0][e]);
                }
            }
            CHECK(cudaMemcpyAsync(ids.data, step_ids, ids.size, cudaMemcpyHostToDevice, stream));
            CHECK(cudaGraphLaunch(instance, stream));
            for (int l = 0; l < n_layers; ++l) {
                sum_slots_kernel<<<n_used*n_tokens, 128, 0, stream>>>((const int32_t *) slots[l]->data, layers[l]->op.tensors[0].dst, strides[0],
                        (uint32_t *) sums[l]->data + step*n_used*n_tokens);
            }
        }
        CHECK(cudaStreamSynchronize(stream));
        for (int l = 0; l < n_layers; ++l) {
            EXPECT(std::memcmp(sums[l]->read().data(), want_sums[l].data(), sums[l]->size) == 0, "fill, round %d: a reader saw another expert", round);
            layers[l]->expect(want[l], "fill", round);
        }
        CHECK(cudaGraphExecDestroy(instance));
        CHECK(cudaGraphDestroy(graph));
    }
    for (int l = 0; l < n_layers; ++l) {
        EXPECT(filled[l].missed > 0 && filled[l].missed < filled[l].looked_up, "layer %d: %d of %d were filled in", l, (int) filled[l].missed, (int) filled[l].looked_up);
    }
    CHECK(cudaStreamDestroy(stream));
}

static void test_fetch_limits() {
    fetch_layer layer(8, 4, { 64 });
    device_ids  many({ 0, 1, 2, 3, 4 }, 5, 5);
    device_bytes slots(64, 0);
    EXPECT(phase_cuda_fetch(layer.op, many.view, (int32_t *) layer.state.data, (int32_t *) slots.data, nullptr, false) == cudaErrorInvalidValue,
            "five distinct ids in four slots have to be refused");

    // ids out of range: no access out of bounds, the others unharmed
    device_ids nonsense({ 5, -1, INT_MAX, 8 }, 4, 4);
    reference  want(8, 4);
    const auto slot = want.fetch({ 5 });
    CHECK(phase_cuda_fetch(layer.op, nonsense.view, (int32_t *) layer.state.data, (int32_t *) slots.data, nullptr, false));
    CHECK(cudaDeviceSynchronize());
    want.looked_up = 4;
    layer.expect(want, "ids out of range", 0);
    EXPECT(((const int32_t *) slots.read().data())[0] == slot[0], "the good id has its slot");
}

//
// prefetch
//

// The best n_predict of each token, the lower id of equals. Small integers over 16: the sums are exact in any order and type.
static std::vector<int32_t> predict(const std::vector<float> & x, const std::vector<float> & router, const std::vector<float> & bias, int32_t n_expert,
        int32_t n_predict) {
    const size_t n_embd = router.size()/n_expert;
    std::vector<int32_t> ids;
    for (size_t t = 0; t < x.size()/n_embd; ++t) {
        std::vector<std::pair<float, int32_t>> order; // ascending
        for (int32_t e = 0; e < n_expert; ++e) {
            float sum = 0;
            for (size_t i = 0; i < n_embd; ++i) {
                sum += x[t*n_embd + i]*router[e*n_embd + i];
            }
            order.push_back({ -(bias.empty() ? sum : 1.0f/(1.0f + std::exp(-sum)) + bias[e]), e });
        }
        std::sort(order.begin(), order.end());
        for (int32_t k = 0; k < n_predict; ++k) {
            ids.push_back(order[k].second);
        }
    }
    return ids;
}

template <typename T>
static std::unique_ptr<device_bytes> on_device(const std::vector<float> & values) {
    std::vector<T> converted;
    for (float value : values) {
        converted.push_back(T(value));
    }
    auto bytes = std::make_unique<device_bytes>(values.size()*sizeof(T), 0);
    CHECK(cudaMemcpy(bytes->data, converted.data(), bytes->size, cudaMemcpyHostToDevice));
    return bytes;
}

// Three layers as a graph runs them: the prefetch of the next one, then the fetch, then something that takes time. As single launches
// and as a graph that is replayed.
static void test_prefetch(phase_cuda_router::type_t type, int32_t n_tokens, bool with_bias, bool captured, int n_steps) {
    const int32_t n_layers = 3, n_expert = 70, n_slots = 40, n_used = 5, n_predict = 6, n_embd = 100;
    const std::vector<size_t> strides = { 4096, 1000, 18*64 };
    const std::string what = std::string(captured ? "captured" : "single") + " prefetch, router type " + std::to_string(type) + ", tokens " + std::to_string(n_tokens);

    std::mt19937 rng(3);
    const auto   small_integers = [&](size_t n) {
        std::vector<float> values(n);
        for (auto & value : values) {
            value = (float) (int32_t) (rng() % 7) - 3;
        }
        return values;
    };

    struct layer_t {
        fetch_layer         memory;
        reference           want;
        std::vector<float>  router, bias;
        std::unique_ptr<device_bytes> weights, bias_memory;
        device_bytes        scratch, slots;
        device_ids          ids;
        phase_prefetch_side side;
        phase_prefetch_op   op; // that fills its slots
    };
    std::vector<std::unique_ptr<layer_t>> layers;
    for (int32_t i = 0; i < n_layers; ++i) {
        layers.emplace_back(new layer_t {
            fetch_layer(n_expert, n_slots, strides), reference(n_expert, n_slots), small_integers((size_t) n_expert*n_embd),
            with_bias ? small_integers(n_expert) : std::vector<float>(), nullptr, nullptr,
            device_bytes((size_t) n_tokens*(n_expert + 2*n_predict)*sizeof(int32_t), 0x55), device_bytes(n_tokens*n_used*sizeof(int32_t), 0x55),
            device_ids(std::vector<int32_t>(n_tokens*n_used, 0), n_used, n_used), {}, {},
        });
        auto & l = *layers.back();
        l.weights     = type == phase_cuda_router::F32 ? on_device<float>(l.router) : type == phase_cuda_router::F16 ? on_device<__half>(l.router) : on_device<__nv_bfloat16>(l.router);
        l.bias_memory = on_device<float>(with_bias ? l.bias : std::vector<float>{ 0 });
        l.op.side     = &l.side;
        l.op.n_expert = n_expert;
        l.op.bias     = with_bias ? (const float *) l.bias_memory->data : nullptr;
        l.op.next     = &l.memory.op;
        l.op.counters = l.memory.op.counters;
    }
    device_bytes x(n_tokens*n_embd*sizeof(float), 0);
    const bool   pdl = phase_cuda_can_use_pdl();

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const auto queue = [&] {
        for (int32_t i = 0; i < n_layers; ++i) {
            auto & l = *layers[i];
            if (i + 1 < n_layers) {
                auto & next = *layers[i + 1];
                CHECK(phase_cuda_prefetch(next.op, { (const char *) x.data, n_embd*sizeof(float), n_embd, n_tokens }, { type, next.weights->data }, n_predict,
                        (int32_t *) next.memory.state.data, (int32_t *) next.scratch.data, stream, pdl));
            }
            bool waited = false;
            CHECK(phase_cuda_join_prefetch(stream, (const int32_t *) l.memory.state.data, waited));
            EXPECT(waited == (i > 0), "%s: layer %d behind another stream", what.c_str(), i);
            CHECK(phase_cuda_fetch(l.memory.op, l.ids.view, (int32_t *) l.memory.state.data, (int32_t *) l.slots.data, stream, pdl, 0, waited));
            delay_kernel<<<1, 1, 0, stream>>>(20000);
        }
        bool waited = true;
        CHECK(phase_cuda_join_prefetch(stream, nullptr, waited));
        EXPECT(!waited, "%s: joined twice", what.c_str());
    };

    cudaGraph_t     graph    = nullptr;
    cudaGraphExec_t instance = nullptr;
    if (captured) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        queue();
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0));
    }
    for (int step = 0; step < n_steps; ++step) {
        auto activations = small_integers((size_t) n_tokens*n_embd);
        for (auto & value : activations) {
            value /= 16; // a sigmoid then keeps different sums well apart
        }
        CHECK(cudaMemcpy(x.data, activations.data(), x.size, cudaMemcpyHostToDevice));
        std::vector<std::vector<int32_t>> routed;
        for (auto & l : layers) {
            routed.push_back(random_ids(rng, n_expert, n_used, n_tokens, false));
            CHECK(cudaMemcpy(l->ids.memory.data, routed.back().data(), routed.back().size()*sizeof(int32_t), cudaMemcpyHostToDevice));
        }
        if (captured) {
            CHECK(cudaGraphLaunch(instance, stream));
        } else {
            queue();
        }
        CHECK(cudaStreamSynchronize(stream));
        for (int32_t i = 0; i < n_layers; ++i) {
            auto & l = *layers[i];
            if (i > 0) {
                l.want.fetch(predict(activations, l.router, l.bias, n_expert, n_predict));
            }
            const auto want_slots = l.want.fetch(routed[i]);
            EXPECT(std::memcmp(l.slots.read().data(), want_slots.data(), l.slots.size) == 0, "%s, step %d: slot ids of layer %d differ", what.c_str(), step, i);
            l.memory.expect(l.want, what.c_str(), step);
        }
    }
    if (captured) {
        // the graph does not need what it was captured with
        for (auto & l : layers) {
            phase_cuda_prefetch_free(l->side);
        }
        CHECK(cudaGraphLaunch(instance, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(instance));
        CHECK(cudaGraphDestroy(graph));
    }
    for (auto & l : layers) {
        phase_cuda_prefetch_free(l->side);
        EXPECT(l->side.backend_state == nullptr, "%s: freed", what.c_str());
    }
    CHECK(cudaStreamDestroy(stream));
}

// A router that has gone wrong predicts nothing, and nothing is copied.
static void test_prefetch_nan() {
    fetch_layer  layer(8, 4, { 64 });
    reference    want(8, 4);
    const auto   x       = on_device<float>({ NAN, 1 });
    const auto   router  = on_device<float>(std::vector<float>(16, 1.0f));
    device_bytes scratch(12*sizeof(int32_t), 0);
    phase_prefetch_side side;
    phase_prefetch_op   op;
    op.side     = &side;
    op.n_expert = 8;
    op.next     = &layer.op;
    op.counters = layer.op.counters;
    bool waited = false;
    CHECK(phase_cuda_prefetch(op, { (const char *) x->data, 8, 2, 1 }, { phase_cuda_router::F32, router->data }, 2, (int32_t *) layer.state.data,
            (int32_t *) scratch.data, nullptr, false));
    CHECK(phase_cuda_join_prefetch(nullptr, nullptr, waited));
    CHECK(cudaDeviceSynchronize());
    want.fetch({});
    want.looked_up = 2;
    layer.expect(want, "prefetch of NaN", 0);
    phase_cuda_prefetch_free(side);
}

//
// stream
//

enum stream_kind { STREAM_PINNED, STREAM_STAGED, STREAM_MIXED }; // mixed: every other layer is staged

struct stream_ring {
    phase_ring                                 ring;
    phase_ring_times                           times;
    std::vector<std::unique_ptr<pinned_bytes>> pinned;
    std::vector<std::vector<uint8_t>>          pageable;
    std::unique_ptr<pinned_bytes>              staging;
    std::vector<phase_stream_op>               ops;
    std::vector<phase_stream_op *>             pointers;
    std::vector<uint32_t>                      sums; // of region contents, padding included
    std::vector<size_t>                        sizes;
    std::unique_ptr<device_bytes>              memory;
    phase_op_counters                          counters = {};
    size_t                                     region_bytes = 0;

    stream_ring(int32_t n_layers, int32_t n_regions, int32_t n_expert, const std::vector<size_t> & strides, stream_kind kind = STREAM_PINNED,
            size_t staging_bytes = 64*1024) : ops(n_layers) {
        static constexpr size_t PAD = 96;
        for (int32_t l = 0; l < n_layers; ++l) {
            const size_t a = strides[l % strides.size()], b = strides[(l + 1) % strides.size()];
            const size_t size = n_expert*(a + b);
            auto & op = ops[l];
            op.staged = kind == STREAM_STAGED || (kind == STREAM_MIXED && l % 2);
            uint8_t * experts;
            if (op.staged) {
                pageable.emplace_back(size + 64);
                experts = pageable.back().data();
            } else {
                pinned.push_back(std::make_unique<pinned_bytes>(size + 64));
                experts = pinned.back()->data;
            }
            fill_random(experts, size + 64, l*31 + 5);
            op.n_expert   = n_expert;
            op.n_tensors  = 2;
            op.position   = l;
            op.ring       = &ring;
            op.counters   = &counters;
            op.tensors[0] = { experts + 32,              nullptr, a, PAD };
            op.tensors[1] = { experts + 32 + n_expert*a, nullptr, b, 0 };

            std::vector<uint8_t> region(n_expert*a + PAD + n_expert*b, 0);
            std::memcpy(region.data(), op.tensors[0].src, n_expert*a);
            std::memcpy(region.data() + n_expert*a + PAD, op.tensors[1].src, n_expert*b);
            sums.push_back(sum_of(region.data(), region.size()));
            sizes.push_back(region.size());
            region_bytes = std::max(region_bytes, region.size());
        }
        memory = std::make_unique<device_bytes>(n_regions*region_bytes, 0xee);
        for (auto & op : ops) {
            op.tensors[0].dst = memory->data + (op.position % n_regions)*region_bytes;
            op.tensors[1].dst = op.tensors[0].dst + n_expert*op.tensors[0].stride + PAD;
            pointers.push_back(&op);
        }
        ring.n_regions = n_regions;
        ring.n_layers  = n_layers;
        ring.layers    = pointers.data();
        ring.times     = &times;
        if (kind != STREAM_PINNED) {
            staging = std::make_unique<pinned_bytes>(staging_bytes);
            ring.staging       = staging->data;
            ring.staging_bytes = staging_bytes;
        }
    }
};

static void test_stream(int32_t n_layers, int32_t n_regions, int n_passes, int32_t n_expert, const std::vector<size_t> & strides,
        stream_kind kind = STREAM_PINNED) {
    stream_ring  r(n_layers, n_regions, n_expert, strides, kind);
    std::mt19937 rng(n_layers*10 + n_regions);

    const int32_t n_used = 3, n_tokens = 300;
    const auto    host_ids = random_ids(rng, n_expert, n_used, n_tokens, false);
    device_ids    ids(host_ids, n_used, n_used + 2);
    device_bytes  state(phase_state_words(n_expert, n_expert)*sizeof(int32_t), 0);
    device_bytes  dst(host_ids.size()*sizeof(int32_t), 0x55);

    cudaStream_t streams[2];
    for (auto & stream : streams) {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }

    // full passes, passes cut short, single layers in any order, the ring freed in between
    std::vector<int32_t> order;
    std::vector<bool>    freed_before, last;
    for (int pass = 0; pass < n_passes; ++pass) {
        const int     way   = rng() % 4;
        const int32_t end   = way == 1 ? (int32_t) (rng() % n_layers) : n_layers;
        const bool    final_pass = way == 2;
        for (int32_t l = 0; l < end; ++l) {
            order.push_back(way == 3 ? (int32_t) (rng() % n_layers) : l);
            freed_before.push_back(l == 0 && pass % 7 == 6);
            last.push_back(final_pass);
        }
    }

    device_bytes sums(2*order.size()*sizeof(uint32_t), 0);
    CHECK(cudaDeviceSynchronize());
    cudaStream_t stream = streams[0];
    for (size_t i = 0; i < order.size(); ++i) {
        if (freed_before[i]) {
            CHECK(cudaStreamSynchronize(stream));
            CHECK(phase_cuda_ring_free(r.ring));
            CHECK(cudaMemset(r.memory->data, 0xee, r.memory->size));
            CHECK(cudaDeviceSynchronize());
            stream = streams[i % 2];
        }
        r.ring.last_pass = last[i];
        const auto & op = r.ops[order[i]];
        CHECK(phase_cuda_stream(op, ids.view, (int32_t *) state.data, (int32_t *) dst.data, stream));
        // read twice with a pause between: a region overwritten too early shows in the second sum, a layer begun too early in the first
        const size_t size = r.sizes[order[i]];
        sum_kernel<<<32, 256, 0, stream>>>(op.tensors[0].dst, size, (uint32_t *) sums.data + 2*i);
        delay_kernel<<<1, 1, 0, stream>>>(rng() % 100000);
        sum_kernel<<<32, 256, 0, stream>>>(op.tensors[0].dst, size, (uint32_t *) sums.data + 2*i + 1);
    }
    CHECK(cudaDeviceSynchronize());
    const auto   got_bytes = sums.read();
    const auto * got = (const uint32_t *) got_bytes.data();
    for (size_t i = 0; i < order.size(); ++i) {
        for (int k = 0; k < 2; ++k) {
            EXPECT(got[2*i + k] == r.sums[order[i]], "ring of %d, %d layers: layer %d (number %zu) was wrong when read the %s time", n_regions,
                    n_layers, order[i], i, k ? "second" : "first");
        }
    }
    EXPECT(std::memcmp(dst.read().data(), host_ids.data(), dst.size) == 0, "ring of %d: the ids did not pass", n_regions);

    std::vector<int32_t> seen(n_expert, 0);
    for (size_t i = host_ids.size() - n_used*PHASE_SEEN_TOKENS; i < host_ids.size(); ++i) {
        seen[host_ids[i]] += (int32_t) order.size();
    }
    EXPECT(std::memcmp(state.read().data(), seen.data(), n_expert*sizeof(int32_t)) == 0, "ring of %d: seen counts differ", n_regions);
    EXPECT(r.counters.runs == order.size() && r.counters.looked_up == order.size()*host_ids.size(), "ring of %d: counters differ", n_regions);

    CHECK(phase_cuda_ring_free(r.ring));
    CHECK(phase_cuda_ring_free(r.ring)); // nothing left is fine
    EXPECT(r.times.copy_us > 0, "ring of %d: no copy was timed", n_regions);
    for (auto & s : streams) {
        CHECK(cudaStreamDestroy(s));
    }
}

// Whole passes in order copy every layer once per pass, and the last one copies nothing ahead.
static void test_stream_copies_once() {
    const int32_t n_layers = 6, n_regions = 3, n_expert = 4, n_passes = 5;
    stream_ring  r(n_layers, n_regions, n_expert, { 4096 });
    device_ids   ids({ 0, 1 }, 2, 2);
    device_bytes state(phase_state_words(n_expert, n_expert)*sizeof(int32_t), 0), dst(64, 0);
    for (int pass = 0; pass < n_passes; ++pass) {
        r.ring.last_pass = pass == n_passes - 1;
        for (const auto & op : r.ops) {
            CHECK(phase_cuda_stream(op, ids.view, (int32_t *) state.data, (int32_t *) dst.data, nullptr));
        }
    }
    EXPECT(r.counters.missed == (uint64_t) n_passes*n_layers*n_expert, "copied %llu experts", (unsigned long long) r.counters.missed);
    CHECK(phase_cuda_ring_free(r.ring));
}

// The ring is freed while the threads of its stager still copy; then it starts anew.
static void test_stream_freed_early() {
    const int32_t n_expert = 5;
    stream_ring  r(6, 3, n_expert, { 400002, 150000 }, STREAM_STAGED);
    device_ids   ids({ 0, 1 }, 2, 2);
    device_bytes state(phase_state_words(n_expert, n_expert)*sizeof(int32_t), 0), dst(64, 0), sum(sizeof(uint32_t), 0);
    for (int round = 0; round < 30; ++round) {
        CHECK(phase_cuda_ring_start(r.ring, nullptr));
        for (int l = 0; l < round % 4; ++l) {
            CHECK(phase_cuda_stream(r.ops[l], ids.view, (int32_t *) state.data, (int32_t *) dst.data, nullptr));
        }
        CHECK(phase_cuda_ring_free(r.ring));
    }
    CHECK(phase_cuda_stream(r.ops[4], ids.view, (int32_t *) state.data, (int32_t *) dst.data, nullptr));
    sum_kernel<<<32, 256>>>(r.ops[4].tensors[0].dst, r.sizes[4], (uint32_t *) sum.data);
    EXPECT(*(const uint32_t *) sum.read().data() == r.sums[4], "wrong after a ring was freed early");
    CHECK(phase_cuda_ring_free(r.ring));
}

//
// pin
//

static void test_pin() {
    const size_t page = (size_t) sysconf(_SC_PAGESIZE), size = 64*page;
    char path[] = "/tmp/test-expert-cuda-XXXXXX";
    const int fd = mkstemp(path);
    std::vector<uint8_t> content(size);
    fill_random(content.data(), size, 1);
    EXPECT(fd >= 0 && write(fd, content.data(), size) == (ssize_t) size, "cannot write %s", path);
    unlink(path);
    auto * map = (uint8_t *) mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    EXPECT(map != MAP_FAILED, "cannot map %s", path);

    const char * reason = phase_cuda_pin(map, size);
    if (reason) {
        std::printf("pin: a mapped file cannot be pinned here: %s\n", reason);
    } else {
        const char * twice = phase_cuda_pin(map, size);
        EXPECT(twice && std::strstr(twice, "already"), "pinned twice: %s", twice ? twice : "(no reason)");

        fetch_layer layer(16, 4, { 4096 }, 0, false);
        layer.op.tensors[0].src = map;
        device_ids   ids({ 3, 9 }, 2, 2);
        device_bytes slots(8, 0);
        reference    want(16, 4);
        want.fetch({ 3, 9 });
        CHECK(phase_cuda_fetch(layer.op, ids.view, (int32_t *) layer.state.data, (int32_t *) slots.data, nullptr, false));
        CHECK(cudaDeviceSynchronize());
        layer.expect(want, "mapped file", 0);
        phase_cuda_unpin(map);

        // two pieces side by side: what one copy over both does decides how experts have to be registered
        EXPECT(!phase_cuda_pin(map, size/2) && !phase_cuda_pin(map + size/2, size/2), "two pieces side by side");
        device_bytes both(size, 0);
        const cudaError_t error = cudaMemcpy(both.data, map, size, cudaMemcpyHostToDevice);
        (void) cudaGetLastError();
        std::printf("pin: one copy over two registrations: %s\n", cudaGetErrorString(error));
        phase_cuda_unpin(map);
        phase_cuda_unpin(map + size/2);

        // two side by side with memory of none around them and a hole behind: from, to and over each border
        EXPECT(!phase_cuda_pin(map + 8*page, 8*page) && !phase_cuda_pin(map + 16*page, 8*page) && !phase_cuda_pin(map + 32*page, page), "three pieces");
        const size_t borders[] = { 0, 8*page, 16*page, 24*page, 32*page, 33*page, size };
        for (const size_t begin : borders) {
            for (const size_t end : borders) {
                for (const size_t inward : { size_t(0), size_t(33) }) {
                    if (begin + 2*inward >= end) {
                        continue;
                    }
                    const size_t n = end - begin - 2*inward;
                    device_bytes copied(n, 0xAA);
                    CHECK(phase_cuda_copy_in(copied.data, map + begin + inward, n, cudaStreamPerThread));
                    CHECK(cudaStreamSynchronize(cudaStreamPerThread));
                    EXPECT(copied.read() == std::vector<uint8_t>(content.begin() + begin + inward, content.begin() + end - inward),
                            "copied from %zu to %zu", begin, end);
                }
            }
        }
        device_bytes nothing(1, 0);
        CHECK(phase_cuda_copy_in(nothing.data, map, 0, cudaStreamPerThread));
        for (const size_t first : { 8, 16, 32 }) {
            phase_cuda_unpin(map + first*page);
        }
    }
    munmap(map, size);

    // what cannot work has a reason, and leaves no error for the next call
    EXPECT(phase_cuda_pin((void *) page, page) != nullptr, "an address that is not mapped");
    EXPECT(cudaGetLastError() == cudaSuccess, "an error was left behind");
}

//
// figures
//

template <typename Run>
static double microseconds(int n, cudaStream_t stream, Run && run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    run(0);
    CHECK(cudaEventRecord(begin, stream));
    for (int i = 0; i < n; ++i) {
        run(i + 1);
    }
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return ms*1e3/n;
}

// time per call when `calls` of them are replayed as one graph
template <typename Run>
static double graph_microseconds(int calls, cudaStream_t stream, Run && run) {
    cudaGraph_t     graph;
    cudaGraphExec_t instance;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < calls; ++i) {
        run(i);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0));
    const double us = microseconds(3, stream, [&](int) { CHECK(cudaGraphLaunch(instance, stream)); })/calls;
    CHECK(cudaGraphExecDestroy(instance));
    CHECK(cudaGraphDestroy(graph));
    return us;
}

static void bench() {
    const bool can_pdl = phase_cuda_can_use_pdl();
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    const int32_t n_expert = 512, n_slots = 256, calls = 480;
    const std::vector<size_t> strides = { 307200, 307200, 307200 };
    const double expert_bytes = 3*307200;
    fetch_layer  layer(n_expert, n_slots, strides, 0, false);
    device_bytes slots(PHASE_MAX_IDS*sizeof(int32_t), 0);
    auto * state = (int32_t *) layer.state.data;

    // n_missing of n_used ids are new in each call, and in each replay of the calls: they walk through more experts than there are slots
    const auto ids_for = [&](int32_t of, int32_t n_used, int32_t n_missing) {
        std::vector<std::unique_ptr<device_ids>> list;
        int32_t next = 0;
        for (int i = 0; i < calls; ++i) {
            std::vector<int32_t> ids;
            for (int32_t k = 0; k < n_used; ++k) {
                const int32_t n_hot = n_used - n_missing;
                ids.push_back(k < n_hot ? k : n_hot + next++ % (of - n_hot));
            }
            list.push_back(std::make_unique<device_ids>(ids, n_used, n_used));
        }
        return list;
    };

    std::printf("\n| lookup alone, replayed | 128 slots | 256 | 512 |\n|---|---|---|---|\n");
    for (const auto & [n_used, n_missing] : { std::pair<int, int>{ 10, 0 }, { 10, 4 }, { 10, 10 }, { 80, 0 }, { 80, 40 } }) {
        std::printf("| %d ids, %d missing, us |", n_used, n_missing);
        for (int32_t n : { 128, 256, 512 }) {
            fetch_layer tables(n_expert*2, n, { 16 }, 0, false);
            const auto ids = ids_for(n_expert*2, n_used, n_missing);
            const double us = graph_microseconds(calls, stream, [&](int i) {
                const auto & view = ids[i % calls]->view;
                const lookup_args args = { view, n_expert*2, n, (int32_t *) tables.state.data, (int32_t *) slots.data, tables.op.counters };
                CHECK(phase_cuda_launch(lookup_kernel, args, 1, BLOCK, phase_cuda_table_words(n_expert*2, n, view.n_used)*sizeof(int32_t), stream, can_pdl));
            });
            std::printf(" %.2f |", us);
        }
        std::printf("\n");
    }

    for (const bool pdl : { false, true }) {
        if (pdl && !can_pdl) {
            continue;
        }
        std::printf("\n| fetch, replayed, %s | 0 | 1 | 2 | 4 | 10 | 32 experts |\n|---|---|---|---|---|---|---|\n", pdl ? "PDL" : "no PDL");
        for (int blocks : { 66, 132, 264 }) {
            std::string speed;
            std::printf("| %d blocks, us |", blocks);
            for (int32_t n_missing : { 0, 1, 2, 4, 10, 32 }) {
                const auto ids = ids_for(n_expert, std::max(10, n_missing), n_missing);
                const double us = graph_microseconds(calls, stream, [&](int i) {
                    CHECK(phase_cuda_fetch(layer.op, ids[i % calls]->view, state, (int32_t *) slots.data, stream, pdl, blocks));
                });
                std::printf(" %.1f |", us);
                char text[32];
                std::snprintf(text, sizeof(text), " %.1f |", n_missing*expert_bytes/us/1e3);
                speed += text;
            }
            std::printf("\n| GB/s |%s\n", speed.c_str());
        }
    }

    // the same from a mapped file, where every page is on its own, with experts in random order
    const size_t map_bytes = strides.size()*n_expert*strides[0];
    const int    fd        = memfd_create("experts", 0);
    EXPECT(fd >= 0 && ftruncate(fd, (off_t) map_bytes) == 0, "no memory for the mapped experts");
    auto * writable = (uint8_t *) mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    for (size_t i = 0; i < map_bytes; i += 64) {
        writable[i] = (uint8_t) (i >> 6);
    }
    munmap(writable, map_bytes);
    auto * map = (uint8_t *) mmap(nullptr, map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (const char * reason = phase_cuda_pin(map, map_bytes)) {
        std::printf("\nmapped experts cannot be pinned here: %s\n", reason);
    } else {
        phase_fetch_op mapped = layer.op;
        for (size_t i = 0; i < strides.size(); ++i) {
            mapped.tensors[i].src = map + i*n_expert*strides[i];
        }
        for (const bool random_order : { false, true }) {
            std::printf("\n| fetch, %s order, from | 1 | 4 | 10 | 32 experts |\n|---|---|---|---|---|\n", random_order ? "random" : "file");
            for (const auto & [name, op] : { std::pair<const char *, const phase_fetch_op *>{ "pinned buffer", &layer.op }, { "mapped file", &mapped } }) {
                const phase_fetch_op & source = *op;
                for (int blocks : { 132, 264, 528 }) {
                    std::printf("| %s, %d blocks, GB/s |", name, blocks);
                    for (int32_t n_missing : { 1, 4, 10, 32 }) {
                        auto list = ids_for(n_expert, std::max(10, n_missing), n_missing);
                        if (random_order) {
                            list.clear();
                            std::vector<int32_t> order(n_expert);
                            std::iota(order.begin(), order.end(), 0);
                            std::shuffle(order.begin() + 10, order.end(), std::mt19937(n_missing));
                            int32_t next = 0;
                            for (int i = 0; i < calls; ++i) {
                                std::vector<int32_t> ids;
                                for (int32_t k = 0; k < std::max(10, n_missing); ++k) {
                                    const int32_t n_hot = std::max(10, n_missing) - n_missing;
                                    ids.push_back(k < n_hot ? k : order[n_hot + next++ % (n_expert - n_hot)]);
                                }
                                list.push_back(std::make_unique<device_ids>(ids, (int32_t) ids.size(), (int32_t) ids.size()));
                            }
                        }
                        const double us = graph_microseconds(calls, stream, [&](int i) {
                            CHECK(phase_cuda_fetch(source, list[i % calls]->view, state, (int32_t *) slots.data, stream, can_pdl, blocks));
                        });
                        std::printf(" %.1f |", n_missing*expert_bytes/us/1e3);
                    }
                    std::printf("\n");
                }
            }
        }
        phase_cuda_unpin(map);
    }
    munmap(map, map_bytes);

    // what an answer's token waits for, when the slots are filled in front of it
    std::printf("\n| fill of empty slots | 16 | 64 | 128 | 256 experts |\n|---|---|---|---|---|\n| us (GB/s) |");
    for (const int32_t n : { 16, 64, 128, 256 }) {
        phase_fill list;
        list.n = list.newest = n;
        for (int32_t k = 0; k < n; ++k) {
            list.experts[k] = 2*k;
        }
        const auto empty = reference(n_expert, n_slots).words();
        device_bytes cleared(empty.size()*sizeof(int32_t), 0);
        CHECK(cudaMemcpy(cleared.data, empty.data(), cleared.size, cudaMemcpyHostToDevice));
        const double us = microseconds(10, stream, [&](int) {
            CHECK(cudaMemcpyAsync(state, cleared.data, cleared.size, cudaMemcpyDeviceToDevice, stream));
            CHECK(phase_cuda_fill(layer.op, state, list, stream));
        });
        std::printf(" %.0f (%.1f) |", us, n*expert_bytes/us/1e3);
    }
    std::printf("\n");

    std::printf("\n| DMA of the same | 1 | 4 | 10 | 32 experts |\n|---|---|---|---|---|\n| us |");
    for (int32_t n : { 1, 4, 10, 32 }) {
        const double us = microseconds(50, stream, [&](int i) {
            for (int32_t k = 0; k < n; ++k) {
                for (const auto & t : layer.op.tensors) {
                    const size_t e = (i*n + k)*7 % n_expert;
                    CHECK(cudaMemcpyAsync(t.dst + k*t.stride, t.src + e*t.stride, t.stride, cudaMemcpyHostToDevice, stream));
                }
            }
        });
        std::printf(" %.1f (%.1f GB/s) |", us, n*expert_bytes/us/1e3);
    }
    std::printf("\n");

    for (const auto & [kind, name] : { std::make_pair(STREAM_PINNED, "pinned"), std::make_pair(STREAM_STAGED, "staged"), std::make_pair(STREAM_MIXED, "mixed") })
    for (const int32_t n_regions : { 2, 3 }) {
        stream_ring  r(6, n_regions, 512, { 307200 }, kind, PHASE_STAGING_THREADS*phase_stager::CHUNKS_PER_THREAD*PHASE_STAGING_CHUNK_BYTES);
        device_ids   ids(std::vector<int32_t>(10*2048, 1), 10, 10);
        device_bytes dst(10*2048*sizeof(int32_t), 0);
        const int n_passes = 8;
        const double us = microseconds(n_passes, stream, [&](int i) {
            r.ring.last_pass = i == n_passes;
            for (const auto & op : r.ops) {
                CHECK(phase_cuda_stream(op, ids.view, state, (int32_t *) dst.data, stream));
            }
        });
        std::printf("\nstream, %s, ring of %d, nothing computed: %.1f GB/s\n", name, n_regions, 6.0*r.region_bytes/us/1e3);
        CHECK(phase_cuda_ring_free(r.ring));
        std::printf("    copies %.1f ms, exposed %.1f ms\n", r.times.copy_us/1e3, r.times.exposed_us/1e3);
    }
    CHECK(cudaStreamDestroy(stream));
}

// Pieces of every alignment arrive, as many as one kernel takes, and no byte beside them is touched.
static void test_upload() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    void * memory = nullptr;
    CHECK(cudaHostAlloc(&memory, 1 << 16, cudaHostAllocPortable));
    phase_upload_side side;
    std::mt19937      random(11);
    for (int round = 0; round < 50; ++round) {
        const int32_t n = round == 0 ? PHASE_UPLOAD_PIECES : 1 + (int32_t) (random() % PHASE_UPLOAD_PIECES);
        auto * host = (uint8_t *) memory;
        for (int i = 0; i < 1 << 16; ++i) {
            host[i] = (uint8_t) random();
        }
        device_bytes dst(1 << 16, 0xee);
        std::vector<uint8_t> expected(1 << 16, 0xee);
        std::vector<phase_upload_piece> pieces;
        size_t at = 0;
        for (int32_t i = 0; i < n; ++i) {
            const size_t   begin = at + random() % 40;
            const uint32_t size  = random() % 5 == 0 ? 1024 : random() % 200;
            pieces.push_back({ host + begin, (uint8_t *) dst.data + begin, size });
            std::copy_n(host + begin, size, expected.begin() + begin);
            at = begin + size;
        }
        for (int32_t first = 0, part = 0; first < n; first += part) { // several in flight, of other sizes
            part = std::min(n - first, round == 0 ? PHASE_UPLOAD_PIECES : 1 + (int32_t) (random() % 12));
            CHECK(phase_cuda_upload(side, pieces.data() + first, part, stream));
        }
        std::vector<uint8_t> got(1 << 16);
        CHECK(cudaMemcpyAsync(got.data(), dst.data, got.size(), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (got != expected) {
            std::printf("upload: round %d differs\n", round);
            n_failed++;
        }
    }
    phase_cuda_upload_free(side);
    CHECK(cudaFreeHost(memory));
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char ** argv) {
    const std::string mode  = argc > 1 ? argv[1] : "";
    const bool        small = mode == "small";
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::fprintf(stderr, "no GPU\n");
        return 77;
    }
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s, programmatic launch %s\n", properties.name, phase_cuda_can_use_pdl() ? "yes" : "no");

    if (mode != "bench") {
        const size_t big = small ? 9216 : 307200;
        const std::vector<fetch_case> cases = {
            { "fewest slots",             64,  16, 2, 8, { 4096, 4096, 4096 } },
            { "all resident",             32,  32, 4, 8, { 1024, 2048 } },
            { "one expert",                1,   1, 1, 8, { 256 } },
            { "one slot, one token",       8,   1, 1, 1, { 512 } },
            { "repeated ids",             16,  12, 8, 1, { 512, 512 },         0, true },
            { "repeats across a batch",   24,  24, 6, 8, { 1000, 18, 34 },     0, true },
            { "strides of 2 bytes",       48,  24, 3, 8, { 18, 34, 1000 } },
            { "odd stride and address",   20,  16, 2, 8, { 333, 4096 },        1 },
            { "stride 4096 + 2",          40,  16, 2, 8, { 4096 + 2, 4096 + 4 } },
            { "ten of 512",              512, 128, 10, 8, { 576, 288, 64 } },
            { "a thousand ids",          900, 900, 128, 8, { 64 } },
            { "whole experts",            40,  20, 2, 8, { big, big, big } },
            { "the clock restarts",       32,  12, 3, 3, { 256 },              0, false, INT32_MAX - 20 },
        };
        for (const bool pdl : { false, true }) {
            if (pdl && !phase_cuda_can_use_pdl()) {
                continue;
            }
            for (const auto & c : cases) {
                test_fetch(c, small ? 30 : 200, pdl);
            }
            test_fetch_graph(small ? 10 : 300, pdl);
            test_fill_between_replays(small ? 2 : 20, pdl);
        }
        test_fetch_limits();
        std::printf("fetch: %d failed\n", n_failed);

        for (const auto type : { phase_cuda_router::F32, phase_cuda_router::F16, phase_cuda_router::BF16 }) {
            for (const bool captured : { false, true }) {
                test_prefetch(type, 1, false, captured, small ? 10 : 100);
                test_prefetch(type, 3, true,  captured, small ? 10 : 100);
            }
        }
        test_prefetch_nan();
        std::printf("prefetch: %d failed so far\n", n_failed);

        const int passes = small ? 8 : 120;
        for (const int32_t n_regions : { 2, 3 }) {
            for (const int32_t n_layers : { 3, 4, 5, 6 }) {
                for (const auto kind : { STREAM_PINNED, STREAM_STAGED, STREAM_MIXED }) {
                    test_stream(n_layers, n_regions, passes, 5,
                            small ? std::vector<size_t>{ 1000, 4098, 18 } : std::vector<size_t>{ 1000, 400002, 18, 150000 }, kind);
                }
            }
        }
        test_stream_freed_early();
        test_stream(1, 1, passes, 5, { 1000 });
        test_stream(2, 2, passes, 5, { 1000, 4098 });
        test_stream_copies_once();
        std::printf("stream: %d failed so far\n", n_failed);
        test_pin();
        test_upload();
        std::printf("upload: %d failed so far\n", n_failed);
    }
    if (!small) {
        bench();
    }
    std::printf("%s: %d passed, %d failed\n", argv[0], n_failed == 0, n_failed);
    return n_failed ? 1 : 0;
}
