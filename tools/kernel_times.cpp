// How long each kernel and each copy of each CUDA graph ran, by CUPTI. The driver loads this library (CUDA_INJECTION64_PATH); it writes to
// $KERNEL_TIMES when the process ends, a line per node of a graph:
//
//   graph node runs run_us gap_us blocks threads name
//
// run_us and gap_us are means. The gap is the time since all that began before in the same run of the graph had ended, negative when some of
// it had not. Built and read by tools/kernel_times.py.

#include <cupti.h>

#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t   BUFFER_BYTES = 8 << 20;
constexpr size_t   MAX_RECORDS  = 8000000;
constexpr uint64_t BETWEEN_RUNS = 150000; // ns in which nothing of a graph runs: the next run begins

using kernel_record = CUpti_ActivityKernel9; // what is read here stands at the same place in later ones
using copy_record   = CUpti_ActivityMemcpy5;

struct record {
    uint64_t begin, end, node;
    uint32_t graph;
    int      name, blocks, threads;
};

std::mutex                 lock;
std::vector<record>        records;
std::vector<std::string>   names;
std::map<std::string, int> name_ids;

int name_id(const char * name) {
    const auto [at, added] = name_ids.emplace(name, (int) names.size());
    if (added) {
        int    status = 0;
        char * plain  = abi::__cxa_demangle(name, nullptr, nullptr, &status);
        names.push_back(plain ? plain : name);
        std::free(plain);
    }
    return at->second;
}

void CUPTIAPI give_buffer(uint8_t ** buffer, size_t * size, size_t * max_records) {
    *buffer      = (uint8_t *) std::aligned_alloc(8, BUFFER_BYTES);
    *size        = *buffer ? BUFFER_BYTES : 0;
    *max_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t * buffer, size_t, size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    CUpti_Activity * activity = nullptr;
    while (records.size() < MAX_RECORDS && cuptiActivityGetNextRecord(buffer, size, &activity) == CUPTI_SUCCESS) {
        if (activity->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto & k = *(const kernel_record *) activity;
            if (k.graphId != 0) {
                records.push_back({ k.start, k.end, k.graphNodeId, k.graphId, name_id(k.name), k.gridX*k.gridY*k.gridZ, k.blockX*k.blockY*k.blockZ });
            }
        } else if (activity->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto & c = *(const copy_record *) activity;
            if (c.graphId != 0) {
                records.push_back({ c.start, c.end, c.graphNodeId, c.graphId, name_id("memcpy"), 0, 0 });
            }
        }
    }
    std::free(buffer);
}

struct node_times {
    int     n = 0, name = 0, blocks = 0, threads = 0;
    int64_t run = 0, gap = 0; // ns
};

void finish() {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::lock_guard<std::mutex> guard(lock);
    std::sort(records.begin(), records.end(), [](const record & a, const record & b) { return a.begin < b.begin; });
    std::map<uint32_t, uint64_t>                        ended; // by graph
    std::map<std::pair<uint32_t, uint64_t>, node_times> nodes;
    for (const auto & r : records) {
        auto & node = nodes[{ r.graph, r.node }];
        auto & end  = ended[r.graph];
        node.n++;
        node.name    = r.name;
        node.blocks  = r.blocks;
        node.threads = r.threads;
        node.run += (int64_t) (r.end - r.begin);
        node.gap += end == 0 || r.begin > end + BETWEEN_RUNS ? 0 : (int64_t) r.begin - (int64_t) end;
        end = std::max(end, r.end);
    }
    const char * path = std::getenv("KERNEL_TIMES");
    std::FILE *  file = path ? std::fopen(path, "w") : nullptr;
    if (!file) {
        return;
    }
    for (const auto & [id, node] : nodes) {
        std::fprintf(file, "%u %llu %d %.3f %.3f %d %d %s\n", id.first, (unsigned long long) id.second, node.n, node.run/1e3/node.n,
                node.gap/1e3/node.n, node.blocks, node.threads, names[node.name].c_str());
    }
    if (records.size() >= MAX_RECORDS) {
        std::fprintf(stderr, "kernel_times: what ran behind the first %zu records is not in %s\n", MAX_RECORDS, path);
    }
    std::fclose(file);
}

} // namespace

extern "C" int InitializeInjection() {
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    const auto kernels = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    const auto copies  = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    if (kernels != CUPTI_SUCCESS || copies != CUPTI_SUCCESS) {
        const char * reason = nullptr;
        cuptiGetResultString(kernels != CUPTI_SUCCESS ? kernels : copies, &reason);
        std::fprintf(stderr, "kernel_times: CUPTI cannot trace kernels here: %s\n", reason ? reason : "no reason given");
        return 0;
    }
    std::atexit(finish);
    return 1;
}
