#pragma once

// Tensors in device memory that come and go together: slots, ring or state, on any number of devices.
//
//   slots of one layer     | slot 0 | slot 1 | ... | slot n-1 | zeroed padding |   one tensor per weight, shaped like it with n slots
//   ring of one device     | region 0 | region 1 | ...                           a region holds all experts of one layer:
//   region                 | gate ... pad | up ... pad | down ... pad |           each layer's tensors begin at the region's start
//
// All of it is marked as weights, so that the scheduler runs the operators and matmuls where it lives.

#include "expert-store.h"

#include "ggml-cpp.h"

#include <functional>
#include <map>
#include <vector>

// Bytes on each device, and buffers. Allocation throws std::runtime_error naming device and MiB, and leaves nothing allocated.
struct expert_arena {
    // A tensor of `type` and shape on `dev`, without memory until allocate().
    ggml_tensor * add(ggml_backend_dev_t dev, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2);

    // Memory for all tensors, zeroed.
    void allocate();

    // A block of `size` bytes on `dev`, tensors placed in it, and then zeros: zero() comes last, since a backend may still be
    // clearing the padding of a placed tensor where another one has its data.
    void reserve(ggml_backend_dev_t dev, size_t size);
    ggml_tensor * place(const ggml_tensor * like, ggml_backend_dev_t dev, size_t offset);
    void zero(ggml_backend_dev_t dev);

    // Frees memory and tensors. Safe when there are none.
    void clear();

    size_t bytes() const;
    size_t bytes(ggml_backend_dev_t dev) const;

    // what allocate() will ask of `dev`
    size_t planned_bytes(ggml_backend_dev_t dev) const;

  private:
    struct part {
        ggml_context_ptr        tensors;
        ggml_backend_buffer_ptr buffer;
    };

    std::map<ggml_backend_dev_t, part> parts;

    part & part_of(ggml_backend_dev_t dev);
};
