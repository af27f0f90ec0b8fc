#pragma once

// How much host memory can be had without swapping. Linux; elsewhere it is unknown.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

// The number behind `name` in a file of lines, 0 when there is none.
inline uint64_t phase_number_in(const std::string & path, const std::string & name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line); ) {
        std::istringstream words(line);
        std::string first;
        uint64_t    number = 0;
        if (words >> first >> number && first == name) {
            return number;
        }
    }
    return 0;
}

// Bytes that a control group (v2) leaves, UINT64_MAX without a limit. Page cache gives way.
inline uint64_t phase_group_leaves(const std::string & folder) {
    std::ifstream file(folder + "/memory.max");
    uint64_t limit = 0;
    if (!(file >> limit)) { // "max", or no such file
        return UINT64_MAX;
    }
    uint64_t used = 0;
    std::ifstream(folder + "/memory.current") >> used;
    const auto     statistics = folder + "/memory.stat";
    const uint64_t cache      = phase_number_in(statistics, "inactive_file") + phase_number_in(statistics, "active_file");
    used -= std::min(used, cache);
    return limit - std::min(limit, used);
}

// Bytes, 0: unknown. A limit on the process's control group (a container's, MemoryMax= of a unit), or on one above it, counts when it
// leaves less than the machine has. root: where /proc and /sys are.
inline uint64_t phase_available_bytes(const std::string & root = "") {
    uint64_t available = phase_number_in(root + "/proc/meminfo", "MemAvailable:") << 10;
    if (available == 0) {
        return 0;
    }
    std::string group; // of "0::/a/b"; as the file system shows it, when it does
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line); ) {
        if (line.rfind("0::", 0) == 0) {
            group = line.substr(3);
        }
    }
    for (;; group.resize(group.rfind('/'))) {
        if (!group.empty() && group.back() == '/') {
            group.pop_back();
        }
        available = std::min(available, std::max<uint64_t>(phase_group_leaves(root + "/sys/fs/cgroup" + group), 1));
        if (group.rfind('/') == std::string::npos) {
            return available;
        }
    }
}
