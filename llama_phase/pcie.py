"""What crosses PCIe, and how long that takes: predictions for a plan. Transfers only, no compute is in them."""

from __future__ import annotations

import re
from itertools import pairwise

from llama_phase.errors import UsageError

# bytes per second and lane after line coding, by generation
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# share of that seen on one H200, PCIe 5 x16 (docs/performance.md): the ring's DMA 53 GB/s, fetching experts 50 GB/s
STREAM_SHARE = 53 / 63
FETCH_SHARE = 50 / 63
# share of experts found in slots, by slots per layer
HIT_RATES = {64: 0.59, 128: 0.72, 256: 0.82}
HIT_RATES_SOURCE = "from a synthetic model with 512 experts, 10 per token; real text differs"
HIT_RATES_EXPERTS = 512


def parse_link(text: str) -> tuple[int, int]:
    """Generation and width of `3x16`. Raises UsageError."""
    match = re.fullmatch(r"([1-6])x(1|2|4|8|16)", text.strip().lower())
    if match is None:
        raise UsageError(f"--pcie does not accept {text!r}", fix="write GENERATIONxLANES, for example 4x16")
    return int(match[1]), int(match[2])


def link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    """Bandwidth of a link one way after line coding, None when it is not known."""
    if generation not in _LANE or not width:
        return None
    return _LANE[generation] * width


def passes(prompt_tokens: int, ubatch: int) -> int:
    """How often a prompt goes over all experts in micro-batches of `ubatch`."""
    return -(-prompt_tokens // ubatch)


def hit_rate(slots: int, n_expert: int) -> float | None:
    """From HIT_RATES, linear between its rows; 1.0 when all experts have a slot; else None: not known."""
    if n_expert and slots >= n_expert:
        return 1.0
    rows = sorted(HIT_RATES)
    if n_expert != HIT_RATES_EXPERTS or not rows[0] <= slots <= rows[-1]:
        return None
    for low, high in pairwise(rows):
        if slots <= high:
            share = (slots - low) / (high - low)
            return HIT_RATES[low] + share * (HIT_RATES[high] - HIT_RATES[low])
    return None
