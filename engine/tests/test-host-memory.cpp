// Memory that can be had, on file systems of its own.

#include "host-memory.h"

#include "check.h"

#include <filesystem>

namespace fs = std::filesystem;

// Lives in a folder that goes with it.
struct machine {
    fs::path root = fs::temp_directory_path() / ("host-memory-" + std::to_string(++n_machines) + "-" + std::to_string((uintptr_t) this));

    ~machine() { fs::remove_all(root); }

    void write(const std::string & path, const std::string & text) const {
        fs::create_directories((root / path).parent_path());
        std::ofstream(root / path) << text;
    }
    void group(const std::string & path, const std::string & max, uint64_t current, uint64_t cache) const {
        write("sys/fs/cgroup" + path + "/memory.max", max + "\n");
        write("sys/fs/cgroup" + path + "/memory.current", std::to_string(current) + "\n");
        write("sys/fs/cgroup" + path + "/memory.stat", "anon 5\ninactive_file " + std::to_string(cache) + "\nactive_file 100\n");
    }
    uint64_t available() const { return phase_available_bytes(root.string()); }

    static inline int n_machines = 0;
};

TEST(machine_alone) {
    machine m;
    CHECK_EQ(m.available(), 0u);
    m.write("proc/meminfo", "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n");
    CHECK_EQ(m.available(), 1000u << 10);
    m.write("proc/self/cgroup", "9:name=systemd:/\n0::/\n");
    m.group("", "max", 500000, 0);
    CHECK_EQ(m.available(), 1000u << 10);
}

TEST(limits) {
    machine m;
    m.write("proc/meminfo", "MemAvailable: 1000 kB\n");
    m.group("", "700000", 600000, 200000); // a container: its group is the root of what it sees
    CHECK_EQ(m.available(), 700000u - (600000 - 200100));
    m.write("proc/self/cgroup", "0::/a.slice/b.service\n");
    m.group("", "max", 0, 0);
    m.group("/a.slice", "400000", 300000, 0);
    m.group("/a.slice/b.service", "800000", 200000, 0);
    CHECK_EQ(m.available(), 400000u - (300000 - 100));
    m.group("/a.slice/b.service", "250000", 200000, 0);
    CHECK_EQ(m.available(), 250000u - (200000 - 100));
    m.group("/a.slice/b.service", "250000", 900000, 0);
    CHECK_EQ(m.available(), 1u); // none, which is not unknown
    m.write("proc/self/cgroup", "0::/of/another/namespace\n");
    CHECK_EQ(m.available(), 1000u << 10);
}

TEST_MAIN("test-host-memory")
