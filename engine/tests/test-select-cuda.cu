// The selection kernels against plain references, and their speed.
//
//   nvcc -std=c++17 -O2 -arch=native -I engine engine/tests/test-select-cuda.cu -o test-select-cuda
//   test-select-cuda [small]          small: no figures, for compute-sanitizer
//
// Exit codes: 0 all as expected, 1 a check failed, 77 no GPU.

#include "../select-cuda.cu"

#include "check-cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

static void report(bool ok, const char * what, int n, int rows, int k, int kind) {
    (ok ? n_passed : n_failed)++;
    if (!ok) {
        std::printf("FAILED %s: %d columns, %d rows, k %d, kind %d\n", what, n, rows, k, kind);
    }
}

template <typename T>
struct device_array {
    T *    data = nullptr;
    size_t n;

    explicit device_array(size_t n) : n(n) {
        CHECK(cudaMalloc(&data, n*sizeof(T)));
        CHECK(cudaMemset(data, 0x5a, n*sizeof(T)));
    }
    ~device_array() { (void) cudaFree(data); }
    void set(const std::vector<T> & host) { CHECK(cudaMemcpy(data, host.data(), n*sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> get() const {
        std::vector<T> host(n);
        CHECK(cudaMemcpy(host.data(), data, n*sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// kind 0: as many as k; 1: none; 2: all; 3: a run at the end; 4: more than k
static void test_compact(int n, int rows, int k, int kind, std::mt19937 & random) {
    std::vector<uint16_t> mask((size_t) rows*n, 0xfc00);
    std::vector<int32_t> expected, counts;
    for (int row = 0; row < rows; ++row) {
        std::vector<int> order(n);
        std::iota(order.begin(), order.end(), 0);
        if (kind != 3) {
            std::shuffle(order.begin(), order.end(), random);
        } else {
            std::reverse(order.begin(), order.end());
        }
        const int n_set = std::min(n, kind == 1 ? 0 : kind == 2 ? n : kind == 4 ? k + 5 : k);
        order.resize(n_set);
        std::sort(order.begin(), order.end());
        for (int column : order) {
            mask[(size_t) row*n + column] = column % 3 ? 0 : 0x8000 | column % 7;
        }
        counts.push_back(std::min(n_set, k));
        order.resize(k, -1);
        expected.insert(expected.end(), order.begin(), order.end());
    }
    device_array<uint16_t> of_mask(mask.size());
    device_array<int32_t>  indices((size_t) rows*k), found(rows);
    of_mask.set(mask);
    // the first dimension of the grid, then the second
    for (const bool streams : { false, true }) {
        CHECK(phase_cuda_launch_compact_mask((const half *) of_mask.data, indices.data, found.data, n, streams ? 1 : rows, streams ? rows : 1, k, n, n, nullptr));
        report(indices.get() == expected && found.get() == counts, "compact", n, rows, k, kind);
    }
}

// kind 0: random; 1: few different values; 2: all equal; 3: rectified, with both zeros; 4: mostly minus infinity
static void test_top_k(int n, int rows, int k, int kind, std::mt19937 & random) {
    std::vector<float> values((size_t) rows*n);
    std::normal_distribution<float> normal;
    for (auto & value : values) {
        const float x = normal(random);
        switch (kind) {
            case 0: value = x; break;
            case 1: value = std::floor(x); break;
            case 2: value = 1.5f; break;
            case 3: value = x < 0 ? (x < -1 ? -0.0f : 0.0f) : x; break;
            case 4: value = x < 1.5f ? -INFINITY : x; break;
        }
    }
    device_array<float>   of_values(values.size());
    device_array<int32_t> indices((size_t) rows*k);
    of_values.set(values);
    CHECK(phase_cuda_launch_top_k(of_values.data, indices.data, n, rows, k, nullptr));
    auto got = indices.get();
    for (int row = 0; row < rows; ++row) {
        std::vector<int32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[(size_t) row*n + a] > values[(size_t) row*n + b]; });
        order.resize(k);
        std::sort(order.begin(), order.end());
        std::sort(got.begin() + (size_t) row*k, got.begin() + (size_t) (row + 1)*k);
        report(std::equal(order.begin(), order.end(), got.begin() + (size_t) row*k), "top k", n, rows, k, kind);
    }
}

// From pools and tail to mask and rows. kind 0: as many pools as are chosen; 1: few are visible, so that the others chosen are not; 2:
// some cells are masked; 3: no tail.
static void test_select(int n_kv, int n_tokens, int n_top, int kind, std::mt19937 & random) {
    constexpr int KPOOL = 4, TAIL = 3;
    const int n_pool = n_kv/KPOOL, n_sel = KPOOL*n_top + TAIL;
    std::vector<float>    score;
    std::vector<int32_t>  top_k, tails, cells(n_kv), pools;
    std::vector<uint16_t> visible((size_t) n_tokens*n_kv, 0), expected_mask((size_t) n_tokens*n_kv, 0xfc00);
    std::vector<int32_t>  expected_rows, expected_counts;
    std::iota(cells.begin(), cells.end(), 0);
    std::shuffle(cells.begin(), cells.end(), random);
    pools = cells; // pool p: cells[4p .. 4p+3]; the last pool is padding and the tail is its cells
    std::fill(pools.end() - KPOOL, pools.end(), n_kv);
    for (int token = 0; token < n_tokens; ++token) {
        std::vector<int32_t> order(n_pool), chosen;
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        order.resize(n_top);
        std::vector<float> of_token(n_pool, 0.5f);
        if (kind == 1) {
            for (int i = n_top/4; i < n_top; ++i) {
                of_token[order[i]] = -INFINITY;
            }
        }
        of_token[order[0]] = 0.0f;
        auto * see = &visible[(size_t) token*n_kv];
        if (kind == 2) {
            for (int i = 0; i < n_kv; i += 3) {
                see[i] = 0xfc00;
            }
        }
        const auto take = [&](int32_t cell) {
            if (cell < n_kv && see[cell] == 0) {
                chosen.push_back(cell);
                expected_mask[(size_t) token*n_kv + cell] = 0;
            }
        };
        for (const int pool : order) {
            for (int k = 0; k < KPOOL && of_token[pool] >= 0; ++k) {
                take(pools[(size_t) pool*KPOOL + k]);
            }
        }
        for (int k = 0; k < TAIL; ++k) {
            tails.push_back(kind == 3 ? n_kv : cells[n_kv - KPOOL + k]);
            take(tails.back());
        }
        std::sort(chosen.begin(), chosen.end());
        expected_counts.push_back(chosen.size());
        chosen.resize(n_sel, -1);
        expected_rows.insert(expected_rows.end(), chosen.begin(), chosen.end());
        score.insert(score.end(), of_token.begin(), of_token.end());
        top_k.insert(top_k.end(), order.begin(), order.end());
    }
    device_array<float>    d_score(score.size());
    device_array<int32_t>  d_top_k(top_k.size()), d_pools(pools.size()), d_tails(tails.size());
    device_array<uint16_t> d_visible(visible.size()), d_mask((size_t) n_tokens*(n_kv + 2*(n_sel + 1)));
    d_score.set(score);
    d_top_k.set(top_k);
    d_pools.set(pools);
    d_tails.set(tails);
    d_visible.set(visible);
    const phase_cuda_selection s = { d_score.data, d_top_k.data, d_pools.data, d_tails.data, d_visible.data, n_tokens, n_pool, n_top, KPOOL, TAIL, n_kv, d_mask.data };
    CHECK(phase_cuda_launch_select(s, nullptr));
    const auto got = d_mask.get();
    report(std::equal(expected_mask.begin(), expected_mask.end(), got.begin()), "select: mask", n_kv, n_tokens, n_top, kind);
    const auto * rows = (const int32_t *) (got.data() + expected_mask.size());
    report(std::equal(expected_rows.begin(), expected_rows.end(), rows), "select: rows", n_kv, n_tokens, n_top, kind);
    report(std::equal(expected_counts.begin(), expected_counts.end(), rows + expected_rows.size()), "select: counts", n_kv, n_tokens, n_top, kind);
}

// Against the same sums in the same order.
static void test_score(int n_pool, int n_tokens, std::mt19937 & random) {
    constexpr int EMBD = PHASE_SCORE_EMBD, HEADS = PHASE_SCORE_HEADS, STRIDE = 2*EMBD;
    const int   n_cells = 2*n_pool;
    const float weight  = 1.0f/std::sqrt((float) EMBD);
    std::normal_distribution<float> normal;
    std::vector<float>    q((size_t) n_tokens*HEADS*EMBD), expected;
    std::vector<uint16_t> keys((size_t) n_cells*STRIDE), mask((size_t) n_tokens*n_pool, 0);
    std::vector<int32_t>  cells(n_cells);
    for (auto & value : q)    { value = normal(random); }
    for (auto & value : keys) { value = __half_as_ushort(__float2half(normal(random))); }
    std::iota(cells.begin(), cells.end(), 0);
    std::shuffle(cells.begin(), cells.end(), random);
    cells.resize(n_pool);
    for (int token = 0; token < n_tokens; ++token) {
        for (int pool = 0; pool < n_pool; ++pool) {
            float score = 0;
            for (int head = 0; head < HEADS; ++head) {
                float lanes[32];
                for (int lane = 0; lane < 32; ++lane) {
                    float sum = 0;
                    for (int i = 4*lane; i < 4*lane + 4; ++i) {
                        const float key = __half2float(__ushort_as_half(keys[(size_t) cells[pool]*STRIDE + EMBD + i]));
                        sum = std::fma(q[((size_t) token*HEADS + head)*EMBD + i], key, sum);
                    }
                    lanes[lane] = sum;
                }
                for (int d = 16; d > 0; d /= 2) {
                    float next[32];
                    for (int lane = 0; lane < 32; ++lane) {
                        next[lane] = lanes[lane] + lanes[lane ^ d];
                    }
                    std::copy(next, next + 32, lanes);
                }
                score = std::fma(std::max(lanes[0], 0.0f), weight, score);
            }
            const bool visible = (pool + token) % 5 != 0;
            mask[(size_t) token*n_pool + pool] = visible ? 0 : 0xfc00;
            expected.push_back(visible ? score : -INFINITY);
        }
    }
    device_array<float>    d_q(q.size()), d_score(expected.size());
    device_array<uint16_t> d_keys(keys.size()), d_mask(mask.size());
    device_array<int32_t>  d_cells(cells.size());
    d_q.set(q);
    d_keys.set(keys);
    d_mask.set(mask);
    d_cells.set(cells);
    const phase_cuda_scores s = { (const char *) d_q.data, (const char *) (d_keys.data + EMBD), d_cells.data, (const char *) d_mask.data, d_score.data,
        EMBD*sizeof(float), HEADS*EMBD*sizeof(float), STRIDE*2, n_pool*sizeof(uint16_t), n_pool, n_tokens, weight };
    CHECK(phase_cuda_launch_score(s, nullptr));
    const auto got = d_score.get();
    report(std::memcmp(got.data(), expected.data(), got.size()*sizeof(float)) == 0, "score", n_pool, n_tokens, 0, 0);
}

template <typename launch>
static double microseconds(launch && run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 20; ++i) {
        run();
    }
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < 200; ++i) {
        run();
    }
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return ms*1000/200;
}

static void bench() {
    for (int n_kv : { 8192, 32768, 131072, 262144 }) {
        const int rows = 1, k = 2051, pools = n_kv/4;
        device_array<uint16_t> mask((size_t) rows*n_kv);
        std::vector<uint16_t> host(mask.n, 0xfc00);
        for (int i = 0; i < 2048; ++i) {
            host[(size_t) i*n_kv/2048] = 0;
        }
        mask.set(host);
        device_array<float> values(pools);
        std::vector<float> scores(pools);
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        for (auto & score : scores) {
            score = std::max(0.0f, normal(random));
        }
        values.set(scores);
        device_array<int32_t> indices(k), counts(rows);
        const double compact = microseconds([&] { CHECK(phase_cuda_launch_compact_mask((const half *) mask.data, indices.data, counts.data, n_kv, 1, 1, k, n_kv, n_kv, nullptr)); });
        const double top_k   = microseconds([&] { CHECK(phase_cuda_launch_top_k(values.data, indices.data, pools, 1, 512, nullptr)); });
        device_array<int32_t>  cells(n_kv), tail(3);
        device_array<uint16_t> out(n_kv + 2*(k + 1));
        std::vector<int32_t> all(n_kv);
        std::iota(all.begin(), all.end(), 0);
        cells.set(all);
        tail.set({ n_kv, n_kv, n_kv });
        mask.set(std::vector<uint16_t>(n_kv, 0));
        const phase_cuda_selection s = { values.data, indices.data, cells.data, tail.data, mask.data, 1, pools, 512, 4, 3, n_kv, out.data };
        const double select = microseconds([&] { CHECK(phase_cuda_launch_select(s, nullptr)); });
        device_array<uint16_t> keys((size_t) n_kv*2*PHASE_SCORE_EMBD);
        device_array<float>    q(PHASE_SCORE_HEADS*PHASE_SCORE_EMBD), score(pools);
        std::vector<int32_t> last_of_pool(n_kv);
        for (int i = 0; i < pools; ++i) {
            last_of_pool[i] = 4*i + 3;
        }
        cells.set(last_of_pool);
        q.set(std::vector<float>(PHASE_SCORE_HEADS*PHASE_SCORE_EMBD, 0.5f));
        const phase_cuda_scores of_pools = { (const char *) q.data, (const char *) (keys.data + PHASE_SCORE_EMBD), cells.data, (const char *) mask.data, score.data,
            PHASE_SCORE_EMBD*4, PHASE_SCORE_HEADS*PHASE_SCORE_EMBD*4, PHASE_SCORE_EMBD*4, (size_t) pools*2, pools, 1, 0.1f };
        const double scoring = microseconds([&] { CHECK(phase_cuda_launch_score(of_pools, nullptr)); });
        std::printf("n_kv %6d: scores %6.1f us, mask to indices %6.1f us, top 512 of %5d pools %6.1f us, pools to mask and indices %6.1f us\n", n_kv, scoring, compact, pools, top_k, select);
    }
}

int main(int argc, char ** argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::printf("no GPU\n");
        return 77;
    }
    const bool small = argc > 1 && std::strcmp(argv[1], "small") == 0;
    std::mt19937 random(1);
    for (int n : { 8, 65, 2112, 8192 }) {
        for (int tokens : { 1, 3, 7 }) {
            if (!small || n < 100) {
                test_score(n, tokens, random);
            }
        }
    }
    for (int kind = 0; kind < 5; ++kind) {
        for (int n : { 256, 4352, 8192, 131072, 131328, 300032 }) {
            if (!small || n <= 8192) {
                test_compact(n, small ? 2 : 4, std::min(n, 2051), kind, random);
            }
        }
        for (int n : { 256, 8448, 33024, 131328, 500224 }) {
            for (int tokens : { 1, 3, 8 }) {
                if (kind < 4 && (!small || (n <= 8448 && tokens < 8))) {
                    test_select(n, tokens, std::min(n/8, 512), kind, random);
                }
            }
        }
        for (int n : { 1025, 1088, 2048, 8192, 32768, 65600 }) {
            for (int k : { 1, 512, n }) {
                if (!small || n <= 2048) {
                    test_top_k(n, small ? 2 : 5, k, kind, random);
                }
            }
        }
    }
    std::printf("test-select-cuda: %d passed, %d failed\n", n_passed, n_failed);
    if (!small) {
        bench();
    }
    return n_failed != 0;
}
