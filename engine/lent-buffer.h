#pragma once

// One buffer for several schedulers of which one computes at a time, each believing that it has its own.
//
//   lent_buffers ──owns──> one buffer per type ──lent to──> the compute buffer of each scheduler that plans with lent_types
//
// What is lent is an ordinary buffer of the inner type (same type, same context) but for its free_buffer, by which a backend must not
// know its buffers. A scheduler that wants
// more than there is, or a second buffer, gets memory of its own. Contents do not survive another scheduler's computing, and schedulers
// keep none: inputs are written before each graph.

#include "ggml-backend.h"

#include <cstddef>
#include <memory>
#include <vector>

class lent_buffers {
  public:
    // `sizes[i]` bytes of `types[i]`, 0: none of it is lent; types that come up again share one buffer. Throws std::runtime_error when there is no memory.
    lent_buffers(const std::vector<ggml_backend_buffer_type_t> & types, const std::vector<size_t> & sizes);
    ~lent_buffers();

    size_t bytes(ggml_backend_buffer_type_t type) const;

  private:
    friend class lent_types;
    struct entry;
    std::vector<std::unique_ptr<entry>> entries;
};

// The buffer types that one scheduler plans with. They outlive it, and the lent_buffers outlive both.
class lent_types {
  public:
    lent_types(lent_buffers & buffers, const std::vector<ggml_backend_buffer_type_t> & types);
    ~lent_types();

    ggml_backend_buffer_type_t * data() { return pointers.data(); }

  private:
    struct type;
    std::vector<std::unique_ptr<type>>      types;
    std::vector<ggml_backend_buffer_type_t> pointers;
};
