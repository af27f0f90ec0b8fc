#pragma once

// Pinned host memory of compute buffers, kept while a phase does not need it. Pinning costs about 80 ms per GiB and a switch of phases
// would pay it twice, although the memory that has to change hands is the device's.
//
//   scheduler of a phase ──owns──> buffer ──wraps──> inner buffer <──parked between phases── pool
//
// A buffer of the pool behaves as the inner type's, and gives its memory back to the pool when it is freed. Buffers may outlive
// the host_pool: the last one frees what is parked. Used by one thread at a time.

#include "ggml-backend.h"

#include <cstddef>
#include <memory>

struct host_pool {
    // inner: a host buffer type
    explicit host_pool(ggml_backend_buffer_type_t inner);

    // lives as long as the pool or a buffer of it
    ggml_backend_buffer_type_t type() const;

    size_t parked_bytes() const;

    struct shared;

  private:
    std::shared_ptr<shared> state;
};
