// engine/host-pool.h over ggml's CPU buffers, for test_hookless.py. Exit code 0: all as expected, 1: the line says what not.

#include "expect.h"
#include "host-pool.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdlib>
#include <memory>
#include <vector>

int main() {
    auto pool = std::make_unique<host_pool>(ggml_backend_cpu_buffer_type());
    auto * type = pool->type();
    EXPECT(ggml_backend_buft_is_host(type));
    EXPECT(ggml_backend_buft_get_alignment(type) == ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type()));

    auto * small = ggml_backend_buft_alloc_buffer(type, 1000);
    auto * large = ggml_backend_buft_alloc_buffer(type, 9000);
    void * const small_base = ggml_backend_buffer_get_base(small);
    void * const large_base = ggml_backend_buffer_get_base(large);
    EXPECT(ggml_backend_buffer_get_size(small) == 1000 && pool->parked_bytes() == 0);

    // each phase finds its own memory again, whatever the order
    ggml_backend_buffer_free(large);
    ggml_backend_buffer_free(small);
    EXPECT(pool->parked_bytes() == 10000);
    small = ggml_backend_buft_alloc_buffer(type, 900);
    large = ggml_backend_buft_alloc_buffer(type, 9000);
    EXPECT(ggml_backend_buffer_get_base(small) == small_base && ggml_backend_buffer_get_base(large) == large_base);
    EXPECT(ggml_backend_buffer_get_size(small) == 900 && pool->parked_bytes() == 0);

    // too small for what is parked: new memory, the parked stays
    ggml_backend_buffer_free(small);
    auto * other = ggml_backend_buft_alloc_buffer(type, 2000);
    EXPECT(ggml_backend_buffer_get_base(other) != small_base && pool->parked_bytes() == 1000);

    // data goes through as in the inner type
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor  * t   = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8);
    EXPECT(ggml_backend_tensor_alloc(other, t, ggml_backend_buffer_get_base(other)) == GGML_STATUS_SUCCESS);
    const std::vector<float> values = { 1, 2, 3, 4, 5, 6, 7, 8 };
    std::vector<float> read(8);
    ggml_backend_tensor_set(t, values.data(), 0, 8*sizeof(float));
    ggml_backend_tensor_get(t, read.data(), 0, 8*sizeof(float));
    EXPECT(read == values);
    ggml_backend_buffer_clear(other, 0);
    ggml_backend_tensor_get(t, read.data(), 0, 8*sizeof(float));
    EXPECT(read == std::vector<float>(8, 0.0f));
    ggml_free(ctx);

    // a scheduler is freed behind the phases
    pool.reset();
    ggml_backend_buffer_free(other);
    ggml_backend_buffer_free(large);
    return 0;
}
