#pragma once

// What to do about host memory that cannot be pinned. Pure.

#include <cstdint>
#include <cstdio>
#include <string>

constexpr uint64_t PHASE_NO_LIMIT = UINT64_MAX;

// limit_bytes: of locked memory, PHASE_NO_LIMIT for none; needed_bytes: all that is to be locked. Empty when there is no limit; else it
// begins with a semicolon and goes behind the reason that the driver gave, which seldom says that it is the limit.
inline std::string phase_memlock_advice(uint64_t limit_bytes, uint64_t needed_bytes) {
    if (limit_bytes == PHASE_NO_LIMIT) {
        return "";
    }
    char text[256];
    std::snprintf(text, sizeof(text), "; this process may lock %.1f MiB and all experts need %.0f MiB: raise the limit (ulimit -l unlimited, "
            "LimitMEMLOCK=infinity in a systemd unit)", limit_bytes/1048576.0, needed_bytes/1048576.0);
    return text;
}

// Why `bytes` more of pinned memory are not asked for, or empty. available_bytes: what the machine can give without swapping, 0 when
// unknown. Memory that is pinned is never given back, and a driver that finds too little ends in the kernel's hands and not in an error.
inline std::string phase_pin_refusal(uint64_t bytes, uint64_t available_bytes, uint64_t reserve_bytes) {
    if (available_bytes == 0 || available_bytes >= bytes + reserve_bytes) {
        return "";
    }
    char text[160];
    std::snprintf(text, sizeof(text), "%.0f MiB of memory are available and %.0f MiB have to stay so", available_bytes/1048576.0, reserve_bytes/1048576.0);
    return text;
}
