// Lookups and fills of slots, in any order: the kernels against slot-policy.cpp, word for word, and what they copy, byte for byte.
//
//   nvcc -std=c++17 -O2 -arch=native -I engine engine/tests/test-expert-cuda-fetch.cu -o test-expert-cuda-fetch
//   test-expert-cuda-fetch [small]          small: fewer rounds, for compute-sanitizer (memcheck, racecheck)
//
// Exit codes: 0 all as expected, 1 a check failed, 77 no GPU. With streams, graphs and figures: test-expert-cuda.

#include "../expert-cuda-fetch.cu"
#include "slot-policy.cpp"

#include "check-cuda.h"

#include <numeric>
#include <random>
#include <memory>
#include <string>

static int n_failed = 0;
static int n_passed = 0;

static void report(bool ok, const char * what, const char * name, int step) {
    (ok ? n_passed : n_failed)++;
    if (!ok && n_failed < 20) {
        std::printf("FAILED %s: %s, step %d\n", name, what, step);
    }
}

struct memory {
    uint8_t * device = nullptr;
    size_t    size;

    memory(const void * host, size_t size) : size(size) {
        CHECK(cudaMalloc(&device, size));
        CHECK(cudaMemcpy(device, host, size, cudaMemcpyHostToDevice));
    }
    ~memory() { (void) cudaFree(device); }
    memory(const memory &) = delete;

    std::vector<uint8_t> read() const {
        std::vector<uint8_t> host(size);
        CHECK(cudaMemcpy(host.data(), device, size, cudaMemcpyDeviceToHost));
        return host;
    }
};

struct shape {
    const char *        name;
    int32_t             n_expert, n_slots, n_used, n_tokens, n_wanted, piece; // piece: most experts of one fill
    std::vector<size_t> strides;
};

// One layer twice: on the device, and as slot-policy.cpp has it.
struct layer {
    const shape & s;
    std::mt19937  rng;

    phase_fetch_op                        op;
    std::vector<uint8_t *>                pinned;
    std::vector<std::unique_ptr<memory>>  arenas;
    std::vector<std::vector<uint8_t>>     want_arenas;
    phase_op_counters                   * counters = nullptr; // of lookups, of fills
    phase_op_counters                     want_counters[2] = {};
    std::vector<int32_t>                  words;
    slot_policy                           policy;
    std::unique_ptr<memory>               state;

    layer(const shape & s, uint32_t seed) : s(s), rng(seed), words(phase_state_words(s.n_expert, s.n_slots), 0x55555555), policy(words.data(), s.n_expert, s.n_slots) {
        CHECK(cudaHostAlloc(&counters, 2*sizeof(phase_op_counters), cudaHostAllocMapped));
        counters[0] = counters[1] = {};
        op.n_expert  = s.n_expert;
        op.n_slots   = s.n_slots;
        op.n_tensors = (int32_t) s.strides.size();
        op.counters  = &counters[0];
        for (size_t i = 0; i < s.strides.size(); ++i) {
            uint8_t * experts = nullptr;
            CHECK(cudaHostAlloc(&experts, s.n_expert*s.strides[i], cudaHostAllocMapped));
            std::generate_n(experts, s.n_expert*s.strides[i], [&] { return (uint8_t) rng(); });
            pinned.push_back(experts);
            want_arenas.emplace_back((s.n_slots + 1)*s.strides[i], 0xee); // one slot more that nobody may touch
            arenas.push_back(std::make_unique<memory>(want_arenas[i].data(), want_arenas[i].size()));
            op.tensors[i] = { experts, arenas[i]->device, s.strides[i], 0 };
        }
        policy.clear(s.n_wanted);
        state = std::make_unique<memory>(words.data(), words.size()*sizeof(int32_t));
    }

    ~layer() {
        for (auto * experts : pinned) {
            (void) cudaFreeHost(experts);
        }
        (void) cudaFreeHost(counters);
    }

    void copy_jobs() {
        for (int32_t j = 0; j < *policy.n_jobs; ++j) {
            for (size_t i = 0; i < s.strides.size(); ++i) {
                std::copy_n(op.tensors[i].src + policy.jobs[2*j]*s.strides[i], s.strides[i], &want_arenas[i][policy.jobs[2*j + 1]*s.strides[i]]);
            }
        }
    }

    void fetch(bool pdl) {
        std::vector<int32_t> ids;
        const int32_t n_tokens = 1 + (int32_t) (rng() % s.n_tokens);
        for (int32_t t = 0; t < n_tokens; ++t) {
            std::vector<int32_t> all(s.n_expert);
            std::iota(all.begin(), all.end(), 0);
            std::shuffle(all.begin(), all.end(), rng);
            ids.insert(ids.end(), all.begin(), all.begin() + s.n_used);
        }
        std::vector<int32_t> slots(ids.size(), -1);
        memory device_ids(ids.data(), ids.size()*sizeof(int32_t)), device_slots(slots.data(), slots.size()*sizeof(int32_t));
        const phase_cuda_ids view = { (const char *) device_ids.device, s.n_used*sizeof(int32_t), s.n_used, n_tokens };
        CHECK(phase_cuda_fetch(op, view, (int32_t *) state->device, (int32_t *) device_slots.device, cudaStreamPerThread, pdl));
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));

        policy.fetch(ids.data(), (int32_t) ids.size(), slots.data(), want_counters[0]);
        copy_jobs();
        report(std::memcmp(device_slots.read().data(), slots.data(), device_slots.size) == 0, "slots of a lookup", s.name, (int) want_counters[0].runs);
    }

    void fill(const std::vector<int32_t> & experts, int32_t newest) {
        phase_fill list;
        list.n        = (int32_t) experts.size();
        list.newest   = newest;
        list.counters = &counters[1];
        std::copy(experts.begin(), experts.end(), list.experts);
        CHECK(phase_cuda_fill(op, (int32_t *) state->device, list, cudaStreamPerThread));
        list = {}; // read during the call
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));

        policy.fill(experts.data(), (int32_t) experts.size(), newest, want_counters[1]);
        copy_jobs();
    }

    void compare(const char * what, int step) {
        report(std::memcmp(state->read().data(), words.data(), state->size) == 0, (std::string("state after ") + what).c_str(), s.name, step);
        for (size_t i = 0; i < arenas.size(); ++i) {
            report(arenas[i]->read() == want_arenas[i], (std::string("slots after ") + what).c_str(), s.name, step);
        }
        report(std::memcmp(counters, want_counters, sizeof(want_counters)) == 0, (std::string("counters after ") + what).c_str(), s.name, step);
    }
};

// Behind a prompt: pieces of a list between lookups, which may take the slots first; then lookups alone, which evict in the order of stamps.
static void run(const shape & s, uint32_t seed, bool pdl) {
    layer l(s, seed);
    std::vector<int32_t> wanted(s.n_expert);
    std::iota(wanted.begin(), wanted.end(), 0);
    std::shuffle(wanted.begin(), wanted.end(), l.rng);
    wanted.resize(s.n_wanted);
    int step = 0;
    for (int32_t at = 0; at < s.n_wanted; ++step) {
        if (l.rng() % 3) {
            const int32_t n = std::min(s.n_wanted - at, (int32_t) (l.rng() % (s.piece + 1)));
            l.fill({ wanted.begin() + at, wanted.begin() + at + n }, s.n_wanted - at);
            l.compare("a fill", step);
            at += n;
        } else {
            l.fetch(pdl);
            l.compare("a lookup", step);
        }
    }
    for (int i = 0; i < 10; ++i, ++step) {
        l.fetch(pdl);
        l.compare("a lookup behind the fills", step);
    }
}

int main(int argc, char ** argv) {
    const bool small = argc > 1 && std::string(argv[1]) == "small";
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::fprintf(stderr, "no GPU\n");
        return 77;
    }
    const shape shapes[] = {
        { "one expert",              1,   1,  1, 1,   1,   1, { 16 } },
        { "fewest slots",           64,  16,  2, 8,  16,   5, { 48, 34, 7 } },
        { "as many slots as experts", 40, 40, 4, 2,  40,  40, { 1000, 18 } },
        { "few are wanted",        512, 128, 10, 4,  20,   7, { 16 } },
        { "128 of 512",            512, 128, 10, 1, 128, 100, { 64, 16 } },
        { "more than one fill",    600, 560, 10, 1, 560, PHASE_FILL_IDS, { 4 } },
        { "more than one tile",     12,   7,  2, 1,   7,   3, { 40000, 4098, 17000 } },
    };
    for (const bool pdl : { false, true }) {
        if (pdl && !phase_cuda_can_use_pdl()) {
            continue;
        }
        for (const auto & s : shapes) {
            for (uint32_t seed = 1; seed <= (small ? 2u : 40u); ++seed) {
                run(s, seed, pdl);
            }
        }
    }
    layer l(shapes[0], 1);
    phase_fill too_many;
    too_many.n = PHASE_FILL_IDS + 1;
    report(phase_cuda_fill(l.op, (int32_t *) l.state->device, too_many, cudaStreamPerThread) == cudaErrorInvalidValue, "too many experts are refused", "limits", 0);
    std::printf("test-expert-cuda-fetch: %d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
