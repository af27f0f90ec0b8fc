#pragma once

// Host memory that a device's kernels read and write in place, as a ggml buffer type.
//
// To ggml it is a buffer of the device (is_host is false, except for the CPU), so that the scheduler runs the operators on it there and
// copies nothing. Its bytes are host memory: what the host sets, gets and clears is a plain memcpy, to which the same rule applies as
// to any buffer: the caller waits for the device first.

#include "kv-op.h"

#include "ggml-backend.h"

#include <string>

struct phase_kv_rows;

// "<device>_KV_Host", one for each device and process; null when the device's backend offers no such memory.
ggml_backend_buffer_type_t phase_kv_host_buffer_type(ggml_backend_dev_t dev);

// Keeps positions of a layer on the device as well: `k` and `v` are tensors of one of our buffers. Returns why not, or nothing. What the
// host changes in the buffer is forgotten there.
std::string phase_kv_keep_rows(const ggml_tensor * k, const ggml_tensor * v, int64_t n_slots);

// How many positions are kept of the layer whose K is at this address; 0 and zeros when there is no such layer. Any thread.
int64_t phase_kv_rows_kept(const void * k, phase_kv_rows_counters * counters);

// Those of kv-rows-host.h, of the layer whose K this is; null: none.
phase_kv_rows * phase_kv_rows_on_host(const ggml_tensor * k);

bool phase_kv_is_host_buffer_type(ggml_backend_buffer_type_t buft);
