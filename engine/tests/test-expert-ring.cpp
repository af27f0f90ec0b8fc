// The ring of expert-cuda-stream.cu on a runtime of threads (runtime/cuda_runtime.h), so that its ordering is tested without a GPU: every
// layer is whole while it is read, whatever the order of layers, pinned or staged, freed in the middle or not. Layers arrive while another
// runs, a copy that fails is told, a ring keeps to its device.

#include "../expert-cuda-stream.cu"

#include "../ring-depth.h"
#include "check.h"

#include <future>

// no memory is registered here
cudaError_t phase_cuda_copy_in(void * dst, const void * src, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(dst, src, size, cudaMemcpyHostToDevice, stream);
}

namespace {

enum layer_kind { PINNED, STAGED, MIXED }; // mixed: every other layer is staged

constexpr int32_t N_EXPERT = 5;
constexpr size_t  PAD      = 96;

struct stream_ring {
    phase_ring                        ring;
    phase_ring_times                  times;
    phase_op_counters                 counters = {};
    std::vector<std::vector<uint8_t>> experts;
    std::vector<phase_stream_op>      ops;
    std::vector<phase_stream_op *>    layers;
    std::vector<uint8_t>              memory;
    std::vector<uint8_t>              staging;

    stream_ring(int32_t n_layers, int32_t n_regions, layer_kind kind, std::mt19937 & random) : ops(n_layers), staging(64*1024) {
        static const size_t STRIDES[] = { 1000, 40002, 18, 15000 };
        const size_t region = N_EXPERT*(40002 + 15000 + 1000) + PAD;
        memory.assign(n_regions*region, 0xee);
        for (int32_t l = 0; l < n_layers; ++l) {
            const size_t a = STRIDES[l % 4], b = STRIDES[(l + 1) % 4];
            experts.emplace_back(N_EXPERT*(a + b));
            for (auto & byte : experts.back()) {
                byte = (uint8_t) random();
            }
            auto & op = ops[l];
            op.n_expert  = N_EXPERT;
            op.n_tensors = 2;
            op.position  = l;
            op.staged    = kind == STAGED || (kind == MIXED && l % 2);
            op.ring      = &ring;
            op.counters  = &counters;

            uint8_t * dst = memory.data() + (l % n_regions)*region;
            op.tensors[0] = { experts[l].data(),              dst,                      a, PAD };
            op.tensors[1] = { experts[l].data() + N_EXPERT*a, dst + N_EXPERT*a + PAD, b, 0 };
            layers.push_back(&op);
        }
        ring.n_regions = n_regions;
        ring.n_layers  = n_layers;
        ring.layers    = layers.data();
        ring.times     = &times;
        if (kind != PINNED) {
            ring.staging       = staging.data();
            ring.staging_bytes = staging.size();
        }
    }
};

bool whole(const phase_stream_op & op) {
    bool same = true;
    for (int32_t i = 0; i < op.n_tensors; ++i) {
        const auto & t = op.tensors[i];
        const size_t size = op.n_expert*t.stride;
        same = same && std::memcmp(t.dst, t.src, size) == 0 && std::all_of(t.dst + size, t.dst + size + t.pad, [](uint8_t byte) { return byte == 0; });
    }
    return same;
}

void test_passes(int32_t n_layers, int32_t n_regions, layer_kind kind, unsigned seed) {
    std::mt19937     random(seed);
    stream_ring      r(n_layers, n_regions, kind, random);
    std::atomic<int> n_wrong { 0 };
    cudaStream_t     stream;
    cudaStreamCreateWithFlags(&stream, 0);
    for (int pass = 0; pass < 20; ++pass) {
        const int     way = random() % 4;
        const int32_t end = way == 1 ? (int32_t) (random() % n_layers) : n_layers; // a pass cut short
        r.ring.last_pass = way == 2;
        if (pass % 5 == 4) {
            cudaStreamSynchronize(stream);
            CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
            std::fill(r.memory.begin(), r.memory.end(), 0xee);
            if (random() % 2) {
                CHECK_EQ(phase_cuda_ring_start(r.ring, stream), cudaSuccess);
            }
            if (random() % 2) { // at once again: copies are under way
                CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
            }
        }
        for (int32_t l = 0; l < end; ++l) {
            const auto & op = r.ops[way == 3 ? random() % n_layers : l]; // any order
            CHECK_EQ(phase_cuda_stream(op, { nullptr, 0, 1, 1 }, nullptr, nullptr, stream), cudaSuccess);
            const bool slow = random() % 3 == 0;
            stream->push([&op, &n_wrong, slow] {
                n_wrong += !whole(op);
                if (slow) { // a region overwritten too early shows the second time
                    std::this_thread::sleep_for(std::chrono::microseconds(200));
                    n_wrong += !whole(op);
                }
            });
        }
    }
    cudaStreamSynchronize(stream);
    CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
    CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess); // nothing left is fine
    cudaStreamDestroy(stream);
    CHECK_EQ(n_wrong.load(), 0);
    CHECK_EQ(runtime::n_unrecorded_waits.load(), 0);
    CHECK_EQ(runtime::n_events.load(), 0);
    CHECK(r.times.copy_us > 0);
}

// layers that are in their region or were
uint64_t n_arrived(const phase_ring & ring) {
    uint64_t n = 0;
    for (const auto & r : ((ring_state *) ring.backend_state)->regions) {
        n += r.ready->reaches();
    }
    return n;
}

bool arrive(const phase_ring & ring, uint64_t n) {
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (n_arrived(ring) < n && std::chrono::steady_clock::now() < late) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return n_arrived(ring) == n;
}

// Every layer of two passes begins before the layers behind it are copied and is held until they are there, the first ones of the second
// pass behind the last of the first. A multiple of n_regions layers, so that all regions but the running layer's are free.
void test_copies_ahead(int32_t n_layers, int32_t n_regions, layer_kind kind) {
    std::mt19937     random(1);
    stream_ring      r(n_layers, n_regions, kind, random);
    std::atomic<int> n_wrong { 0 };
    cudaStream_t     stream;
    cudaStreamCreateWithFlags(&stream, 0);
    bool ok = true;
    for (int32_t run = 0; run < 2*n_layers && ok; ++run) {
        const auto & op = r.ops[run % n_layers];
        r.ring.last_pass = run >= n_layers;

        std::promise<void> copies, begun, over;
        if (run > 0) {
            ((ring_state *) r.ring.backend_state)->copies->push([&] { copies.get_future().wait(); });
        }
        ok = CHECK_EQ(phase_cuda_stream(op, { nullptr, 0, 1, 1 }, nullptr, nullptr, stream), cudaSuccess);
        stream->push([&] {
            begun.set_value();
            over.get_future().wait();
            n_wrong += !whole(op);
        });
        ok = ok && CHECK(begun.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready);
        copies.set_value();
        const int32_t behind = std::min(run + n_regions, 2*n_layers); // the last layer ahead
        ok = ok && CHECK_EQ(r.counters.missed, (uint64_t) behind*N_EXPERT) && CHECK(arrive(r.ring, behind));
        for (int32_t ahead = run + 1; ahead < behind && ok; ++ahead) {
            ok = CHECK(whole(r.ops[ahead % n_layers]));
        }
        over.set_value();
        cudaStreamSynchronize(stream);
        cudaStreamSynchronize(((ring_state *) r.ring.backend_state)->copies);
    }
    CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
    cudaStreamDestroy(stream);
    CHECK_EQ(n_wrong.load(), 0);
}

// The ring was freed: the next prompt finds nothing of it.
void test_next_prompt(stream_ring & r, cudaStream_t stream) {
    CHECK_EQ(runtime::n_events.load(), 0);
    CHECK_EQ(runtime::n_streams.load(), 1); // `stream`

    CHECK_EQ(phase_cuda_ring_start(r.ring, stream), cudaSuccess);
    CHECK_EQ(phase_cuda_stream(r.ops[0], { nullptr, 0, 1, 1 }, nullptr, nullptr, stream), cudaSuccess);
    cudaStreamSynchronize(stream);
    CHECK(whole(r.ops[0]));
    CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
}

void test_kind(layer_kind kind) {
    for (int32_t n_regions : { 1, 2, 3 }) {
        for (int32_t n_layers = n_regions; n_layers <= 6; ++n_layers) {
            test_passes(n_layers, n_regions, kind, 100*n_regions + n_layers);
        }
    }
}

} // namespace

TEST(pinned_layers) { test_kind(PINNED); }
TEST(staged_layers) { test_kind(STAGED); }
TEST(mixed_layers)  { test_kind(MIXED); }

TEST(whole_passes_copy_every_layer_once) {
    for (const auto kind : { PINNED, STAGED, MIXED }) {
        std::mt19937 random(1);
        stream_ring  r(6, 3, kind, random);
        cudaStream_t stream;
        cudaStreamCreateWithFlags(&stream, 0);
        phase_cuda_ring_start(r.ring, stream);
        for (int pass = 0; pass < 5; ++pass) {
            r.ring.last_pass = pass == 4;
            for (const auto & op : r.ops) {
                phase_cuda_stream(op, { nullptr, 0, 1, 1 }, nullptr, nullptr, stream);
            }
        }
        phase_cuda_ring_free(r.ring);
        cudaStreamDestroy(stream);
        CHECK_EQ(r.counters.missed, (uint64_t) 5*6*N_EXPERT);
    }
}

TEST(layers_behind_the_running_one_arrive_meanwhile) {
    for (const auto kind : { PINNED, STAGED, MIXED }) {
        for (const int32_t n_regions : { 2, 3 }) {
            test_copies_ahead(6, n_regions, kind);
        }
    }
}

// Links that are busy all the time: devices take turns, each copy takes as long as any, computing takes no time. A device's ring holds what came
// before its turn; the layer computed last is freed by the next one of its device.
static int32_t copies_of_a_pass(int32_t n_devices, int32_t n_layers, int32_t depth) {
    std::vector<int32_t> filled(n_devices, 0);
    int32_t now = 0, begun = 0;
    for (int32_t pass = 0; pass < 8; ++pass) {
        begun = pass == 7 ? now : begun;
        for (int32_t turn = 0; turn < n_devices; ++turn) {
            for (int32_t layer = 0; layer < n_layers; ++layer) {
                for (; filled[turn] == 0; ++now) { // wait for a copy, while the links of the others copy, too
                    for (int32_t d = 0; d < n_devices; ++d) {
                        filled[d] = std::min(filled[d] + 1, d == turn ? depth : depth - 1);
                    }
                }
                filled[turn]--;
            }
        }
    }
    return now - begun;
}

TEST(a_ring_by_its_own_choice_is_as_deep_as_the_links_need) {
    CHECK_EQ(ring_depth(0, 0), RING_REGIONS_LEAST);
    CHECK_EQ(ring_depth(1, 48), RING_REGIONS_LEAST);
    for (const int32_t n_devices : { 2, 3, 4 }) {
        for (const int32_t n_layers : { 12, 24 }) {
            const int32_t depth = ring_depth(n_devices, n_layers);
            CHECK(depth <= n_layers);
            CHECK_EQ(copies_of_a_pass(n_devices, n_layers, depth), n_layers);
            CHECK(copies_of_a_pass(n_devices, n_layers, depth - 1) > n_layers);
            CHECK(copies_of_a_pass(n_devices, n_layers, RING_REGIONS_LEAST) > n_layers*n_devices*2/3);
        }
    }
}

// `run` lets the nth call fail and returns whether there was one; at least `n_least` of each kind of ring there are.
template <typename fn>
void fail_each(int n_least, const fn & run) {
    for (const auto kind : { PINNED, MIXED, STAGED }) {
        int n_failed = 0;
        for (bool hit = true; hit; n_failed += hit) {
            std::mt19937 random(1);
            stream_ring  r(4, 3, kind, random);
            cudaStream_t stream;
            cudaStreamCreateWithFlags(&stream, 0);
            hit = run(r, kind, stream, n_failed);
            CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
            test_next_prompt(r, stream);
            cudaStreamDestroy(stream);
        }
        CHECK(n_failed >= n_least);
    }
}

TEST(start_fails_at_each_creation) {
    fail_each(7, [](stream_ring & r, layer_kind, cudaStream_t stream, int nth) { // a stream, and two events for each region
        runtime::n_creations_left = nth;
        const cudaError_t error = phase_cuda_ring_start(r.ring, stream);
        const bool        hit   = std::exchange(runtime::n_creations_left, -1) < 0;
        CHECK_EQ(error == cudaErrorMemoryAllocation, hit);
        return hit;
    });
}

TEST(each_copy_fails) {
    fail_each(8, [](stream_ring & r, layer_kind kind, cudaStream_t stream, int nth) { // two for each layer
        r.ring.last_pass = true;
        runtime::n_copies_left = nth;
        cudaError_t error = kind == PINNED ? cudaSuccess : phase_cuda_ring_start(r.ring, stream);
        for (int32_t l = 0; l < 4 && error == cudaSuccess; ++l) {
            error = phase_cuda_stream(r.ops[l], { nullptr, 0, 1, 1 }, nullptr, nullptr, stream);
        }
        const bool hit = runtime::n_copies_left.exchange(-1) < 0;
        CHECK_EQ(error, hit ? cudaErrorInvalidValue : cudaSuccess);
        if (kind == PINNED) { // what was queued in part is not there
            for (const auto & op : r.ops) {
                CHECK_EQ(phase_cuda_stream(op, { nullptr, 0, 1, 1 }, nullptr, nullptr, stream), cudaSuccess);
                cudaStreamSynchronize(stream);
                CHECK(whole(op));
            }
        }
        return hit;
    });
}

TEST(rings_of_two_devices_keep_to_their_own) {
    for (const auto kind : { PINNED, STAGED, MIXED }) {
        std::mt19937     random(1);
        std::atomic<int> n_wrong { 0 };
        stream_ring      rings[] = { { 5, 3, kind, random }, { 5, 2, kind, random } };
        cudaStream_t     streams[2];
        const auto on_each = [&](const auto & run) { // of devices 1 and 2: 0 is a new thread's
            for (int i = 0; i < 2; ++i) {
                cudaSetDevice(1 + i);
                run(rings[i], streams[i]);
            }
            cudaSetDevice(0);
        };
        on_each([&](auto & r, auto & stream) {
            cudaStreamCreateWithFlags(&stream, 0);
            CHECK_EQ(phase_cuda_ring_start(r.ring, stream), cudaSuccess);
        });
        for (int32_t run = 0; run < 4*5; ++run) {
            on_each([&](auto & r, auto & stream) {
                const auto & op = r.ops[run % 5];
                CHECK_EQ(phase_cuda_stream(op, { nullptr, 0, 1, 1 }, nullptr, nullptr, stream), cudaSuccess);
                stream->push([&op, &n_wrong] { n_wrong += !whole(op); });
            });
        }
        for (auto & r : rings) {
            CHECK_EQ(phase_cuda_ring_free(r.ring), cudaSuccess);
            int device = -1;
            cudaGetDevice(&device);
            CHECK_EQ(device, 0);
        }
        for (cudaStream_t stream : streams) {
            cudaStreamDestroy(stream);
        }
        CHECK_EQ(n_wrong.load(), 0);
        CHECK_EQ(runtime::n_foreign.load(), 0);
        CHECK_EQ(runtime::n_events.load(), 0);
    }
}

TEST_MAIN("test-expert-ring")
