#pragma once

struct ggml_cgraph;
struct ggml_context;

// Drops from a graph that was built and not yet allocated whatever no write to memory outside of it (a K/V cache, recurrent state) needs.
// For a batch of which nothing but the memory is wanted: a draft that catches up writes the K/V of its layer, and neither attention nor
// experts matter to that. Inputs stay, used or not, since all of them are filled in. `ctx`: where the graph's tensors are made.
// Returns the nodes dropped.
int phase_keep_writes(ggml_context * ctx, ggml_cgraph * graph);
