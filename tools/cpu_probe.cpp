// One small program per x86 extension, chosen by -DPROBE_<NAME>: computes with the extension, compares with plain code.
// Exit code 0: right, 1: wrong result. What llama_phase/cpu_probe.py makes of it decides the GGML_* options of the build.
// Inputs come through volatile memory, so that nothing is computed at compile time.

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

static volatile int seed = 7;

static int value(int i) { return (i * 37 + seed * 11) % 23 - 11; }

template <typename T> static void fill(T * x, int n, int skip = 0) {
    for (int i = 0; i < n; ++i) x[i] = (T) value(i + skip);
}

template <typename T> static int differ(const T * x, const T * y, int n) {
    for (int i = 0; i < n; ++i) {
        if (x[i] != y[i]) {
            return 1;
        }
    }
    return 0;
}

#if defined(PROBE_SSE42)

int main() {
    alignas(16) int64_t a[2], b[2], c[2], want[2];
    fill(a, 2);
    fill(b, 2, 5);
    _mm_store_si128((__m128i *) c, _mm_cmpgt_epi64(_mm_load_si128((__m128i *) a), _mm_load_si128((__m128i *) b)));
    for (int i = 0; i < 2; ++i) want[i] = a[i] > b[i] ? -1 : 0;
    return differ(c, want, 2);
}

#elif defined(PROBE_AVX)

int main() {
    alignas(32) float a[8], b[8], c[8], want[8];
    fill(a, 8);
    fill(b, 8, 5);
    _mm256_store_ps(c, _mm256_mul_ps(_mm256_load_ps(a), _mm256_load_ps(b)));
    for (int i = 0; i < 8; ++i) want[i] = a[i] * b[i];
    return differ(c, want, 8);
}

#elif defined(PROBE_AVX2)

int main() {
    alignas(32) int32_t a[8], b[8], c[8], want[8];
    fill(a, 8);
    fill(b, 8, 5);
    _mm256_store_si256((__m256i *) c, _mm256_mullo_epi32(_mm256_load_si256((__m256i *) a), _mm256_load_si256((__m256i *) b)));
    for (int i = 0; i < 8; ++i) want[i] = a[i] * b[i];
    return differ(c, want, 8);
}

#elif defined(PROBE_BMI2)

int main() {
    const uint64_t source = (uint64_t) seed * 0x9e3779b97f4a7c15ull, mask = 0x00ff00f0f00fff00ull;
    uint64_t want = 0;
    for (int i = 0, k = 0; i < 64; ++i) {
        if (mask >> i & 1) want |= (source >> i & 1) << k++;
    }
    return _pext_u64(source, mask) != want;
}

#elif defined(PROBE_FMA)

int main() {
    alignas(32) float a[8], b[8], c[8], d[8], want[8];
    fill(a, 8);
    fill(b, 8, 5);
    fill(c, 8, 9);
    _mm256_storeu_ps(d, _mm256_fmadd_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b), _mm256_loadu_ps(c)));
    for (int i = 0; i < 8; ++i) want[i] = a[i] * b[i] + c[i];
    return differ(d, want, 8);
}

#elif defined(PROBE_F16C)

int main() {
    float a[8], b[8];
    fill(a, 8);
    _mm256_storeu_ps(b, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(a), 0)));
    return differ(b, a, 8);
}

#elif defined(PROBE_AVX_VNNI)

int main() {
    uint8_t a[32];
    int8_t b[32];
    int32_t c[8], want[8] = {};
    for (int i = 0; i < 32; ++i) a[i] = (uint8_t) (value(i) + 11);
    fill(b, 32, 5);
    _mm256_storeu_si256((__m256i *) c, _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((__m256i *) a),
                                                                _mm256_loadu_si256((__m256i *) b)));
    for (int i = 0; i < 32; ++i) want[i / 4] += a[i] * b[i];
    return differ(c, want, 8);
}

#elif defined(PROBE_AVX512)

int main() {
    // one instruction each of F, BW, DQ, VL and CD: ggml uses all five as one option
    int64_t a[8], b[8], c[8], want[8];
    fill(a, 8);
    fill(b, 8, 5);
    _mm512_storeu_si512(c, _mm512_mullo_epi64(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
    for (int i = 0; i < 8; ++i) want[i] = a[i] * b[i];
    if (differ(c, want, 8)) return 1;

    int8_t x[64], y[64], z[64], sum[64];
    fill(x, 64);
    fill(y, 64, 5);
    _mm512_storeu_si512(z, _mm512_add_epi8(_mm512_loadu_si512(x), _mm512_loadu_si512(y)));
    for (int i = 0; i < 64; ++i) sum[i] = (int8_t) (x[i] + y[i]);
    if (differ(z, sum, 64)) return 1;

    int32_t v[8], zeros[8], magnitude[8], lanes[8], counted[8];
    fill(v, 8);
    _mm256_storeu_si256((__m256i *) magnitude, _mm256_mask_abs_epi32(_mm256_setzero_si256(), 0x5a, _mm256_loadu_si256((__m256i *) v)));
    for (int i = 0; i < 8; ++i) lanes[i] = (0x5a >> i & 1) ? (v[i] < 0 ? -v[i] : v[i]) : 0;
    for (int i = 0; i < 8; ++i) v[i] = v[i] * v[i] + 1;
    _mm256_storeu_si256((__m256i *) zeros, _mm256_lzcnt_epi32(_mm256_loadu_si256((__m256i *) v)));
    for (int i = 0; i < 8; ++i) counted[i] = __builtin_clz((unsigned) v[i]);
    return differ(magnitude, lanes, 8) || differ(zeros, counted, 8);
}

#elif defined(PROBE_AVX512_VBMI)

int main() {
    uint8_t index[64], table[64], c[64], want[64];
    for (int i = 0; i < 64; ++i) index[i] = (uint8_t) (i * 29 + seed) % 64;
    for (int i = 0; i < 64; ++i) table[i] = (uint8_t) (value(i) + 40);
    _mm512_storeu_si512(c, _mm512_permutexvar_epi8(_mm512_loadu_si512(index), _mm512_loadu_si512(table)));
    for (int i = 0; i < 64; ++i) want[i] = table[index[i]];
    return differ(c, want, 64);
}

#elif defined(PROBE_AVX512_VNNI)

int main() {
    uint8_t a[64];
    int8_t b[64];
    int32_t c[16], want[16] = {};
    for (int i = 0; i < 64; ++i) a[i] = (uint8_t) (value(i) + 11);
    fill(b, 64, 5);
    _mm512_storeu_si512(c, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(a), _mm512_loadu_si512(b)));
    for (int i = 0; i < 64; ++i) want[i / 4] += a[i] * b[i];
    return differ(c, want, 16);
}

#elif defined(PROBE_AVX512_BF16)

int main() {
    // small integers are exact in bf16
    float a[32], b[32], c[16], want[16] = {};
    fill(a, 32);
    fill(b, 32, 5);
    const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(a + 16), _mm512_loadu_ps(a));
    const __m512bh y = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(b + 16), _mm512_loadu_ps(b));
    _mm512_storeu_ps(c, _mm512_dpbf16_ps(_mm512_setzero_ps(), x, y));
    for (int i = 0; i < 32; ++i) want[i / 2] += a[i] * b[i];
    return differ(c, want, 16);
}

#elif defined(PROBE_AMX_TILE) || defined(PROBE_AMX_INT8) || defined(PROBE_AMX_BF16)

#include <sys/syscall.h>
#include <unistd.h>

struct tile_config {
    uint8_t  palette = 0, start_row = 0, reserved[14] = {};
    uint16_t colsb[16] = {};
    uint8_t  rows[16] = {};
};

// The configuration is a local that only the intrinsic reads, as in ggml: a compiler whose intrinsic declares fewer than
// 64 bytes as its input drops the stores to rows and colsb, and the first tile instruction faults.
static void __attribute__((noinline)) configure() {
    tile_config config;
    config.palette = 1;
    for (int t = 0; t < 3; ++t) {
        config.rows[t]  = 16;
        config.colsb[t] = 64;
    }
    _tile_loadconfig(&config);
}

// Leaves something else than zeros where the configuration will lie, or dropped stores might go unnoticed.
static void __attribute__((noinline)) dirty_stack() {
    volatile uint8_t bytes[1024];
    for (int i = 0; i < 1024; ++i) bytes[i] = 0xa5;
}

static int compute() {
    dirty_stack();
    configure();
#if defined(PROBE_AMX_TILE)
    int32_t a[256], c[256];
    fill(a, 256);
    _tile_loadd(0, a, 64);
    _tile_stored(0, c, 64);
    const int wrong = differ(c, a, 256);
#elif defined(PROBE_AMX_INT8)
    int8_t  a[16 * 64], b[16 * 64];
    int32_t c[256], want[256] = {};
    fill(a, 16 * 64);
    fill(b, 16 * 64, 5);
    _tile_zero(0);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, b, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, c, 64);
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n)
            for (int k = 0; k < 64; ++k) want[m * 16 + n] += a[m * 64 + k] * b[k / 4 * 64 + n * 4 + k % 4];
    const int wrong = differ(c, want, 256);
#else
    uint16_t a[16 * 32], b[16 * 32];
    float c[256], want[256] = {};
    const auto narrow = [](float x) { uint32_t u; memcpy(&u, &x, 4); return (uint16_t) (u >> 16); };
    for (int i = 0; i < 512; ++i) a[i] = narrow((float) value(i));
    for (int i = 0; i < 512; ++i) b[i] = narrow((float) value(i + 5));
    _tile_zero(0);
    _tile_loadd(1, a, 64);
    _tile_loadd(2, b, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, 64);
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n)
            for (int k = 0; k < 32; ++k)
                want[m * 16 + n] += (float) value(m * 32 + k) * (float) value(k / 2 * 32 + n * 2 + k % 2 + 5);
    const int wrong = differ(c, want, 256);
#endif
    _tile_release();
    return wrong;
}

int main() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) {
        fprintf(stderr, "the kernel does not grant tile data\n");
        return 2;
    }
    return compute();
}

#else
#error "define PROBE_<NAME>"
#endif
