#pragma once

// What libllama and the backends agree on about K/V in host memory: buffer types whose name ends like this are a device's kernels' to use
// when they belong to the device.

#include <cstddef>
#include <cstring>

inline bool phase_kv_is_host_name(const char * name) {
    static const char   END[] = "_KV_Host";
    static const size_t n_end = sizeof(END) - 1;
    const size_t n = std::strlen(name);
    return n > n_end && std::strcmp(name + n - n_end, END) == 0;
}
