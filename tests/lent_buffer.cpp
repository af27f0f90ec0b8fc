// engine/lent-buffer.h over ggml's CPU buffers, for test_hookless.py. Exit code 0: all as expected, 1: the line says what not.

#include "expect.h"
#include "lent-buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <memory>
#include <vector>

int main() {
    auto * cpu = ggml_backend_cpu_buffer_type();
    const std::vector<ggml_backend_buffer_type_t> inner = { cpu, cpu };

    auto buffers = std::make_unique<lent_buffers>(inner, std::vector<size_t> { 1000, 9000 });
    EXPECT(buffers->bytes(cpu) == 9000);
    auto one = std::make_unique<lent_types>(*buffers, inner);
    auto two = std::make_unique<lent_types>(*buffers, inner);
    EXPECT(one->data()[0] == one->data()[1] && one->data()[0] != two->data()[0]);
    EXPECT(ggml_backend_buft_is_host(one->data()[0]));

    // each has all of it, as a buffer of the inner type
    auto * first  = ggml_backend_buft_alloc_buffer(one->data()[0], 9000);
    auto * second = ggml_backend_buft_alloc_buffer(two->data()[0], 5000);
    void * const base = ggml_backend_buffer_get_base(first);
    EXPECT(ggml_backend_buffer_get_base(second) == base && ggml_backend_buffer_get_size(second) == 5000);
    EXPECT(first->buft == cpu && second->buft == cpu);
    ggml_backend_buffer_clear(second, 7);
    EXPECT(((const char *) base)[4999] == 7);

    // once; and no more than there is
    auto * again = ggml_backend_buft_alloc_buffer(one->data()[0], 10);
    EXPECT(ggml_backend_buffer_get_base(again) != base);
    auto three = std::make_unique<lent_types>(*buffers, inner);
    auto * larger = ggml_backend_buft_alloc_buffer(three->data()[0], 9001);
    EXPECT(ggml_backend_buffer_get_base(larger) != base && ggml_backend_buffer_get_size(larger) == 9001);

    // who gives it back leaves it to the others
    ggml_backend_buffer_free(first);
    ggml_backend_buffer_clear(second, 8);
    EXPECT(((const char *) base)[0] == 8);
    for (auto * buffer : { second, again, larger }) {
        ggml_backend_buffer_free(buffer);
    }
    for (auto * types : { &one, &two, &three }) {
        types->reset();
    }
    buffers.reset();

    // of a type with size 0 nothing is lent
    lent_buffers none(inner, { 0, 0 });
    lent_types   of_none(none, inner), of_none_too(none, inner);
    auto * own   = ggml_backend_buft_alloc_buffer(of_none.data()[0], 100);
    auto * other = ggml_backend_buft_alloc_buffer(of_none_too.data()[0], 100);
    EXPECT(none.bytes(cpu) == 0 && ggml_backend_buffer_get_base(own) != ggml_backend_buffer_get_base(other));
    ggml_backend_buffer_free(own);
    ggml_backend_buffer_free(other);
    return 0;
}
