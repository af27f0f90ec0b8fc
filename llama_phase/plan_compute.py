"""Compute buffers by micro-batch and context, estimated. Pure.

Fitted to what the engine plans for the shapes of Qwen3.8-Flash-Next (docs/design-wavefront.md), and to what one GPU
allocated for flash-next-small at 8192 tokens and 16384 cells: 3197 MiB whole, 1930 in chunks; here 3167 and 1829.
"""

from __future__ import annotations

from collections.abc import Sequence

from llama_phase.gguf_facts import LayerFacts

_MIB = 1 << 20

N_EMBD = 2560  # the width that bytes per token are for; in proportion for others
BYTES_PER_TOKEN = 0.34 * _MIB
MASK_BYTES = 2.0  # per token and K/V cell: the mask, F16
INDEXER_BYTES = 7.3  # the same with an indexer's scores and selection, holes of the allocator included

# in chunks (engine/phase-chunks.cpp)
CHUNKED_BYTES_PER_TOKEN = 0.26 * _MIB
CHUNKED_MASK_BYTES = 0.23  # masks as bits
CHUNK_BYTES = 96 * _MIB  # what one chunk has at a time
AUTO_TOKENS, AUTO_ELEMENTS = 2048, 1 << 25  # more of either is chunked when it is `auto`

ESTIMATES = (
    "compute buffers: 0.34 MiB per token of the micro-batch at n_embd 2560, in proportion to n_embd, and 2 bytes per "
    "token and K/V cell, 7.3 with an indexer; in chunks 96 MiB, 0.26 MiB per token and 0.23 bytes per token and cell; "
    "without slots and ring one layer's experts (stock's upload)"
)


def in_chunks(tokens: int, cells: int, chunk: int | str) -> bool:
    """Whether a micro-batch is. `chunk`: LLAMA_PHASE_CHUNK, tokens or auto; 0: never."""
    if chunk == "auto":
        return tokens > AUTO_TOKENS or tokens * cells > AUTO_ELEMENTS
    return 0 < int(chunk) < tokens


def compute_bytes(layers: Sequence[LayerFacts], n_embd: int, tokens: int, cells: int, chunk: int | str = 0) -> int:
    """Of the graph of a micro-batch of `tokens` over `layers`, the device's."""
    if not layers:
        return 0
    width = n_embd / N_EMBD
    cell = INDEXER_BYTES if any(layer.indexer_k for layer in layers) else MASK_BYTES
    whole = tokens * (BYTES_PER_TOKEN * width + cell * cells)
    if not in_chunks(tokens, cells, chunk):
        return int(whole)
    chunked = CHUNK_BYTES + tokens * (CHUNKED_BYTES_PER_TOKEN * width + CHUNKED_MASK_BYTES * cells)
    return int(min(whole, chunked))
