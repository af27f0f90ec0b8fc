#pragma once

// What libllama and the backends agree on about K/V in host memory: buffer types whose name ends like this are a device's kernels' to use
// when they belong to the device; and the rows of it that the device keeps as well (kv-rows.h).

#include <cstddef>
#include <cstdint>
#include <cstring>

inline bool phase_kv_is_host_name(const char * name) {
    static const char   END[] = "_KV_Host";
    static const size_t n_end = sizeof(END) - 1;
    const size_t n = std::strlen(name);
    return n > n_end && std::strcmp(name + n - n_end, END) == 0;
}

// batches of more tokens read a copy of the layer's K/V on the device
constexpr int64_t PHASE_KV_IN_PLACE_TOKENS = 8;

struct phase_kv_rows_shape {
    const uint8_t * k;       // row 0 in host memory that the device reads at this address
    const uint8_t * v;
    size_t          k_bytes; // of a row, a multiple of 16; rows follow each other without gaps
    size_t          v_bytes;
    int32_t         n_rows;
    int32_t         n_slots;
};

// Counted by the kernels; the host may ask at any time.
struct phase_kv_rows_counters {
    uint64_t looked_up; // rows in lists
    uint64_t missed;    // rows copied
    uint64_t runs;
};

// device memory for `n_slots` slots, about: rows, mask and tables
constexpr size_t phase_kv_rows_bytes(size_t n_rows, size_t n_slots, size_t row_bytes) {
    return n_slots*(row_bytes + 2 + 5*4) + n_rows*4;
}
