#pragma once

// The rows of kv-rows.h on the CPU, whose memory of its own they are not: for tests of everything around them. Attention reads a copy in
// which only those rows are filled in that the mask shows, from their slots; so a row that should have been forgotten changes the answer.

#include "expert-op.h"

struct ggml_cgraph;
struct ggml_context;

// Only its kv_rows_* are set.
const phase_backend_api & phase_kv_rows_host_api();

// Replaces `k` and `v`, views of the K/V whose rows these are, by views of such a copy; of the whole, when the rows do not suffice or the
// batch is a prompt's. The rows that nodes of `gf` write are forgotten first. `mask` may be null.
void phase_kv_rows_host_attend(ggml_context * ctx, ggml_cgraph * gf, phase_kv_rows * rows, int64_t n_tokens, ggml_tensor *& k, ggml_tensor *& v,
        ggml_tensor * mask);
