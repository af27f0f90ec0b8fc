// Rows of K/V kept on the device: the kernels against the host's own run of kv-rows.h and against the bytes in host memory; their speed.
//
//   nvcc -std=c++17 -O2 -arch=native -I engine engine/tests/test-kv-rows-cuda.cu -o test-kv-rows-cuda
//   test-kv-rows-cuda [small]          small: no figures, for compute-sanitizer (memcheck, racecheck)
//
// Exit codes: 0 all as expected, 1 a check failed, 77 no GPU.

#include "../kv-rows-cuda.cu"

#include "check-cuda.h"
#include "kv-rows-tables.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

static bool report(bool ok, const char * what, int a, int b) {
    (ok ? n_passed : n_failed)++;
    if (!ok && n_failed < 20) {
        std::printf("FAILED %s (%d, %d)\n", what, a, b);
    }
    return ok;
}

template <typename T>
struct device_array {
    T * data = nullptr;
    explicit device_array(size_t n) { CHECK(cudaMalloc(&data, n*sizeof(T))); }
    ~device_array() { (void) cudaFree(data); }
    void set(const std::vector<T> & host) {
        CHECK(cudaMemcpy(data, host.data(), host.size()*sizeof(T), cudaMemcpyHostToDevice));
        CHECK(cudaStreamSynchronize(nullptr)); // from pageable memory it may still be on its way, and other streams do not wait for it
    }
    std::vector<T> get(size_t n) const {
        std::vector<T> host(n);
        CHECK(cudaMemcpy(host.data(), data, n*sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// K/V of a layer in pinned memory: each 4-byte word of a row is its version.
struct layer {
    int             n_rows, n_slots, k_bytes, v_bytes;
    uint8_t       * k = nullptr;
    uint8_t       * v = nullptr;
    phase_kv_rows * rows = nullptr;
    uint32_t        version = 0;

    layer(int n_rows, int n_slots, int k_bytes = 1024, int v_bytes = 512) :
        n_rows(n_rows), n_slots(n_slots), k_bytes(k_bytes), v_bytes(v_bytes) {
        CHECK(cudaHostAlloc(&k, (size_t) n_rows*k_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
        CHECK(cudaHostAlloc(&v, (size_t) n_rows*v_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
        for (int row = 0; row < n_rows; ++row) {
            change(row);
        }
        const char * why = phase_cuda_kv_rows_new(0, { k, v, (size_t) k_bytes, (size_t) v_bytes, n_rows, n_slots }, &rows);
        if (why) {
            std::fprintf(stderr, "%s\n", why);
            std::exit(1);
        }
    }
    ~layer() {
        phase_cuda_kv_rows_free(rows);
        (void) cudaFreeHost(k);
        (void) cudaFreeHost(v);
    }

    void change(int row) {
        ++version;
        std::fill_n((uint32_t *) (k + (size_t) row*k_bytes), k_bytes/4, version);
        std::fill_n((uint32_t *) (v + (size_t) row*v_bytes), v_bytes/4, version ^ 0xffffu);
    }

    // every list entry is a slot with the bytes of its row, and -1 where it was
    bool holds(const std::vector<int32_t> & lists, const std::vector<int32_t> & slots, int n_max, int per_sequence, int first, int stride) const {
        std::vector<uint8_t> dk((size_t) n_slots*k_bytes), dv((size_t) n_slots*v_bytes);
        CHECK(cudaMemcpy(dk.data(), rows->k, dk.size(), cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(dv.data(), rows->v, dv.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < lists.size(); ++i) {
            if (lists[i] < 0) {
                if (slots[i] != -1) {
                    return false;
                }
                continue;
            }
            const size_t row  = first + (i/n_max/per_sequence)*stride + lists[i];
            const int    slot = slots[i];
            if (slot < 0 || slot >= n_slots || std::memcmp(&dk[(size_t) slot*k_bytes], k + row*k_bytes, k_bytes) != 0 ||
                    std::memcmp(&dv[(size_t) slot*v_bytes], v + row*v_bytes, v_bytes) != 0) {
                return false;
            }
        }
        return true;
    }

    phase_kv_rows_counters counted() const {
        phase_kv_rows_counters counters {};
        phase_cuda_kv_rows_totals(rows, &counters);
        return counters;
    }

    kv_rows_tables tables() const {
        return kv_rows_tables::of(rows->state, [](const int32_t * at, int32_t n) {
            std::vector<int32_t> host(n);
            CHECK(cudaMemcpy(host.data(), at, n*sizeof(int32_t), cudaMemcpyDeviceToHost));
            return host;
        });
    }

    bool consistent() const { return tables().consistent(); }

    // no block of a lookup is ahead of another, or it waits for ever some time
    bool turns_agree() const {
        std::vector<uint32_t> turns(PHASE_CUDA_KV_ROWS_BLOCKS);
        CHECK(cudaMemcpy(turns.data(), rows->turns, turns.size()*sizeof(uint32_t), cudaMemcpyDeviceToHost));
        return std::count(turns.begin(), turns.end(), turns[0]) == (int) turns.size();
    }
};

// `alike`: the newest rows, but for a few
static std::vector<int32_t> random_lists(std::mt19937 & random, int n_lists, int n_max, int n_rows, bool alike,
        std::vector<int32_t> & counts) {
    std::vector<int32_t> lists;
    for (int list = 0; list < n_lists; ++list) {
        std::set<int32_t> chosen;
        const int n = random() % (std::min(n_max, n_rows) + 1);
        for (int i = 0; alike && i < n - 20; ++i) {
            chosen.insert(n_rows - 1 - i);
        }
        while ((int) chosen.size() < n) {
            chosen.insert(random() % n_rows);
        }
        lists.insert(lists.end(), chosen.begin(), chosen.end());
        lists.resize((size_t) (list + 1)*n_max, -1);
        counts.push_back(n);
    }
    return lists;
}

// lookups, writes and resets in random order
static void test_random(int n_rows, int n_slots, int n_sequences, int n_steps, int k_bytes = 1024, int v_bytes = 512) {
    std::mt19937 random(n_rows + n_slots);
    layer        kept(n_rows, n_slots, k_bytes, v_bytes);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    device_array<int32_t> lists(n_slots), counts(64), slots(n_slots), slot_counts(64);
    device_array<int64_t> ids(n_rows);
    uint64_t looked_up = 0;
    for (int step = 0; step < n_steps; ++step) {
        if (random() % 3 == 0) { // a graph that writes
            std::vector<int64_t> rows(n_rows);
            std::iota(rows.begin(), rows.end(), 0);
            std::shuffle(rows.begin(), rows.end(), random);
            rows.resize(1 + random() % (random() % 2 ? 8 : n_rows));
            ids.set(rows);
            const phase_cuda_written written[] = { { kept.rows, ids.data, (int32_t) rows.size(), 0 }, { kept.rows, ids.data, (int32_t) rows.size(), 0 } };
            CHECK(phase_cuda_kv_rows_forget(written, 2, 8, stream));
            CHECK(cudaStreamSynchronize(stream));
            for (const auto row : rows) {
                kept.change((int) row);
            }
            if (rows.size() > 8) {
                CHECK(phase_cuda_kv_rows_settle(written, 1, stream));
                CHECK(cudaStreamSynchronize(stream));
                report(kept.consistent(), "tables after a prompt", step, n_slots);
                report(kept.turns_agree(), "turns after a prompt", step, n_slots);
            }
        } else if (random() % 10 == 0) {
            if (random() % 2) {
                phase_cuda_kv_rows_forget_all(kept.rows);
            } else {
                const phase_cuda_written all = { kept.rows, nullptr, 0, 0 };
                CHECK(phase_cuda_kv_rows_forget(&all, 1, 8, stream));
                CHECK(cudaStreamSynchronize(stream));
            }
            for (int row = 0; row < n_rows; ++row) {
                kept.change(row);
            }
        }
        const int queries = 1 + random() % 3;
        const int n_lists = queries*n_sequences;
        const int n_max   = n_slots/n_lists;
        const int stride  = n_rows/n_sequences;
        if (n_max == 0) {
            continue;
        }
        std::vector<int32_t> n_chosen;
        const auto chosen = random_lists(random, n_lists, n_max, stride, random() % 2, n_chosen);
        std::vector<int32_t> wanted;
        for (size_t i = 0; i < chosen.size(); ++i) {
            wanted.push_back(chosen[i] < 0 ? -1 : (int32_t) (i/n_max/queries)*stride + chosen[i]);
        }
        lists.set(chosen);
        counts.set(n_chosen);
        const bool in_place = random() % 2;
        auto &     found    = in_place ? lists : slots;
        const auto before   = kept.tables();
        const auto missed   = kept.counted().missed;
        CHECK(phase_cuda_kv_rows_find(*kept.rows, { lists.data, counts.data, found.data, in_place ? counts.data : slot_counts.data, n_lists, n_max,
                queries, 0, stride }, stream));
        CHECK(cudaStreamSynchronize(stream));
        const auto   after = kept.tables();
        const char * wrong = kv_rows_judge(before, after, wanted);
        report(!wrong, wrong ? wrong : "policy", step, n_slots);
        report(kept.holds(chosen, found.get(chosen.size()), n_max, queries, 0, stride), "rows", step, n_slots);
        report(kept.turns_agree(), "turns", step, n_slots);
        report((in_place ? counts : slot_counts).get(n_lists) == n_chosen, "counts", step, n_slots);
        report(kept.counted().missed - missed == (uint64_t) after.head[PHASE_KV_ROWS_N_JOBS], "counted as missed", step, n_slots);
        looked_up += std::accumulate(n_chosen.begin(), n_chosen.end(), (uint64_t) 0);
        report(kept.counted().looked_up == looked_up, "counted", step, n_slots);
    }
    CHECK(cudaStreamDestroy(stream));
}

// all rows of some sequences side by side
static void test_gather(int n_rows, int n_slots, int n_sequences, int n) {
    layer kept(n_rows, n_slots);
    const int stride = n_rows/n_sequences, first = stride > n ? 1 : 0;
    device_array<uint8_t> k((size_t) n*n_sequences*kept.k_bytes), v((size_t) n*n_sequences*kept.v_bytes);
    for (int turn = 0; turn < 3; ++turn) {
        CHECK(phase_cuda_kv_rows_gather(*kept.rows, { n, n_sequences, first, stride }, k.data, v.data, cudaStreamPerThread));
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        const auto got_k = k.get((size_t) n*n_sequences*kept.k_bytes), got_v = v.get((size_t) n*n_sequences*kept.v_bytes);
        bool same = true;
        for (int i = 0; i < n*n_sequences; ++i) {
            const size_t row = first + (i/n)*stride + i%n;
            same = same && std::memcmp(&got_k[(size_t) i*kept.k_bytes], kept.k + row*kept.k_bytes, kept.k_bytes) == 0;
            same = same && std::memcmp(&got_v[(size_t) i*kept.v_bytes], kept.v + row*kept.v_bytes, kept.v_bytes) == 0;
        }
        report(same, "side by side", n, n_slots);
        report(kept.consistent(), "tables", n, n_slots);
        report(kept.counted().missed == (uint64_t) n*n_sequences*(turn/2 + 1), "copied once", turn, n_slots);
        if (turn == 1) {
            phase_cuda_kv_rows_forget_all(kept.rows);
            for (int row = 0; row < n_rows; ++row) {
                kept.change(row);
            }
        }
    }
}

static void test_policy() {
    layer                 kept(5000, 3000);
    device_array<int32_t> lists(3000), counts(1);
    const auto find = [&](int first, int n) {
        std::vector<int32_t> rows(n);
        std::iota(rows.begin(), rows.end(), first);
        lists.set(rows);
        counts.set({ n });
        const uint64_t before = kept.counted().missed;
        CHECK(phase_cuda_kv_rows_find(*kept.rows, { lists.data, counts.data, lists.data, counts.data, 1, n, 1, 0, 0 }, cudaStreamPerThread));
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        return (int) (kept.counted().missed - before);
    };
    report(find(0, 3000) == 3000, "all missing", 0, 0);
    report(find(0, 3000) == 0, "all there", 0, 0);
    report(find(0, 1000) == 0, "used again", 0, 0);
    report(find(3000, 2000) == 2000, "the others go", 0, 0);
    report(find(0, 1000) == 0, "the least recently used went", 0, 0);
    report(phase_cuda_kv_rows_find(*kept.rows, { lists.data, counts.data, lists.data, counts.data, 2, 2000, 1, 0, 0 }, cudaStreamPerThread) == cudaErrorInvalidValue, "too many", 0, 0);
}

// Microseconds of what `queue` puts on a stream, N times in a graph; `prepare` comes before each of the runs of which the best counts.
template <typename prepare_fn, typename queue_fn>
static double graph_us(int n, const prepare_fn & prepare, const queue_fn & queue) {
    cudaStream_t    stream;
    cudaEvent_t     begin, end;
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < n; ++i) {
        queue(i, stream);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    float best = 1e9f;
    for (int run = 0; run < 4; ++run) {
        prepare(stream);
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        best = std::min(best, ms);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaStreamDestroy(stream));
    return best*1000/n;
}

// Lookups one after the other, of which each asks for n_missing rows that were never asked for, and for the rest of the first.
static double lookup_us(int n_rows, int n_slots, int n_missing, int row_bytes) {
    constexpr int N = 2051, REPEATS = 50;
    layer                 kept(n_rows, n_slots, row_bytes, row_bytes);
    device_array<int32_t> lists((size_t) N*(REPEATS + 1)), counts(1), slots(N), slot_counts(1);
    std::vector<int32_t>  all;
    int                   next = N;
    for (int i = 0; i <= REPEATS; ++i) {
        for (int k = 0; k < N; ++k) {
            all.push_back((int) (((int64_t) (i > 0 && k < n_missing ? next++ : k)*40503) % n_rows)); // spread; 40503 is odd, n_rows a power of two
        }
    }
    lists.set(all);
    counts.set({ N });
    const auto find = [&](int i, cudaStream_t stream) {
        CHECK(phase_cuda_kv_rows_find(*kept.rows, { lists.data + i*N, counts.data, slots.data, slot_counts.data, 1, N, 1, 0, 0 }, stream));
    };
    const auto fresh = [&](cudaStream_t stream) {
        phase_cuda_kv_rows_forget_all(kept.rows);
        find(0, stream);
    };
    const double us = graph_us(REPEATS, fresh, [&](int i, cudaStream_t stream) { find(i + 1, stream); });
    report(kept.counted().missed == (uint64_t) 4*(N + REPEATS*n_missing), "missing as planned", n_slots, n_missing);
    return us;
}

static void measure() {
    constexpr int N_ROWS = 131072;
    {
        std::vector<layer *> layers;
        std::vector<phase_cuda_written> written;
        device_array<int64_t> ids(1);
        ids.set({ 7 });
        for (int i = 0; i < 6; ++i) {
            layers.push_back(new layer(1024, 512));
            written.insert(written.end(), 2, { layers[i]->rows, ids.data, 1, 0 });
        }
        std::printf("one row of 6 layers forgotten: %.1f us\n", graph_us(50, [](cudaStream_t) {}, [&](int, cudaStream_t stream) {
            CHECK(phase_cuda_kv_rows_forget(written.data(), (int) written.size(), 8, stream));
        }));
        for (auto * own : layers) {
            delete own;
        }
    }
    for (const int n_slots : { 16384, N_ROWS }) {
        for (const int n_missing : { 0, 1, 205, 820, 2051 }) {
            std::printf("%6d slots, %4d of 2051 missing: %6.1f us, of which the link %6.1f us\n", n_slots, n_missing,
                    lookup_us(N_ROWS, n_slots, n_missing, 1024), n_missing*2048/50e3);
            std::printf("%6s        %4s rows of 32 bytes: %6.1f us\n", "", "", lookup_us(N_ROWS, n_slots, n_missing, 16));
        }
    }
}

int main(int argc, char ** argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::printf("test-kv-rows-cuda: no GPU\n");
        return 77;
    }
    const bool small = argc > 1 && std::string(argv[1]) == "small";
    for (const int n_sequences : { 1, 4 }) {
        test_random(64, 24, n_sequences, small ? 12 : 200);
        test_random(64, 64, n_sequences, small ? 12 : 200);
        test_random(4000, 2500, n_sequences, small ? 5 : 60);
        test_random(30000, 20000, n_sequences, small ? 3 : 40);
    }
#ifndef __CUDACC__
    emulated::state().together = true; // as a GPU has them: blocks wait for each other
    test_random(3000, 2000, 1, 6);
    test_random(3000, 2000, 2, 2, 2064, 1040);
    emulated::state().together = false;
#endif
    test_random(300, 200, 1, small ? 5 : 100, 2064, 1040); // more than a warp has in flight
    test_random(300, 200, 1, small ? 5 : 100, 16, 32);
    test_policy();
    test_gather(1000, 1000, 1, 256);
    test_gather(1000, 512, 2, 256);
    test_gather(20000, 17000, 4, small ? 256 : 4096);
    if (!small) {
        measure();
    }
    std::printf("test-kv-rows-cuda: %d passed, %d failed\n", n_passed, n_failed);
    return n_failed > 0;
}
