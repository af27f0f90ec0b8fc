#pragma once

// What ggml-backend.cpp lets us do with the inputs of a split: copy them to the device ourselves.

#include "ggml-backend.h"

struct phase_sched_inputs {
    // Queues the copy of src to dst, in front of what `backend` computes next. The contents of src may change after the call.
    // False: the scheduler is to copy, as upstream does.
    bool (*add)(void * data, ggml_backend_t backend, const struct ggml_tensor * src, struct ggml_tensor * dst);

    // Behind the last input of a split, before its graph.
    void (*flush)(void * data, ggml_backend_t backend);

    void * data;
};

// Defined in ggml-backend.cpp; a scheduler begins without.
GGML_API void phase_sched_set_inputs(ggml_backend_sched_t sched, phase_sched_inputs inputs);
