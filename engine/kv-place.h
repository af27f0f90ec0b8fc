#pragma once

// Which memory the attention K/V of a layer goes to. Pure: facts in, place and reason out.
//
// A sparse-attention (indexer) layer reads at most a few thousand rows of K/V per token, however long the context is, so that they can
// be read over the link. A dense layer reads all of it, so it keeps its K/V on the device unless that is forced.

#include "phase-config.h"

#include <cstddef>
#include <cstdint>
#include <string>

// what a token's reads over the link are estimated with: PCIe 4 x16, and what it takes of it
constexpr double PHASE_LINK_BYTES_PER_S = 25e9;

struct phase_kv_facts {
    bool sparse     = false; // the layer picks rows with an indexer
    bool indexer    = false; // the model has an indexer; when the layer is not `sparse`, its attention is not known to read only what it picks
    bool f16        = false; // K and V; other types are converted as a whole before they are read
    bool flash      = false; // flash attention; without it K/V is read as a whole
    bool capable    = false; // the device reads host memory in place
    bool known_free = false; // free_bytes says something: the weights are loaded

    uint64_t sparse_bytes = 0; // K/V of all sparse layers of the device, at the full context
    uint64_t dense_bytes  = 0; // of all dense ones
    uint64_t free_bytes   = 0; // of the device, before any K/V
};

struct phase_kv_choice {
    bool        host = false;
    std::string reason; // why it is not where `mode` would have it, or why `auto` chose the host; else empty
};

// Positions per layer that the device keeps as well, of K/V in host memory. `asked`: LLAMA_PHASE_KV_ROWS, negative: auto. `n_rows`: of a
// layer. `position_bytes`: of one position in all such layers of the device, tables included. Auto: PHASE_KV_ROWS_AUTO within an eighth of
// the free memory, or as many times that as a 32nd holds.
constexpr int64_t PHASE_KV_ROWS_AUTO  = 16384; // eight tokens' choices, 2051 each
constexpr int64_t PHASE_KV_ROWS_LEAST = 4096;  // fewer serve a single token and hardly anything twice

int64_t phase_kv_rows_choose(int64_t asked, int64_t n_rows, uint64_t position_bytes, uint64_t free_bytes);

phase_kv_choice phase_kv_choose(phase_kv_mode mode, const phase_kv_facts & facts);
