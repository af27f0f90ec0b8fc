#pragma once

// The small inputs of a graph (tokens, positions, indices, masks of a few rows) go to the device together. The scheduler alone copies
// each with two waits: 24 of them, 0.2 ms per token, with qwen4exp.
//
//   scheduler ──each input──> stage of the device ──before the graph, one kernel──> the inputs' copies
//
// The kernel is ordered by the stream: behind the graph before, in front of the graph that reads.

#include "ggml-backend.h"

#include <memory>
#include <vector>

struct input_upload {
    // null when no backend can
    static std::unique_ptr<input_upload> create(const std::vector<ggml_backend_t> & backends);
    ~input_upload();

    // From now on the scheduler's inputs go this way. To be gone before the backends; the scheduler must not compute after that.
    void install(ggml_backend_sched_t sched);

  private:
    struct device_stage;
    std::vector<std::unique_ptr<device_stage>> stages;

    device_stage * of(ggml_backend_t backend) const;
};
