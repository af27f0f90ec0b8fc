"""The ring of the prefill phase: which layers go through it, how deep it is by itself, what it takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llama_phase.gguf_facts import LayerFacts
from llama_phase.plan_choices import RING_LEAST


def ring_depth(layers: Sequence[int]) -> int:
    """As engine/ring-depth.h: `layers` of each device with experts on the host."""
    devices = sum(1 for n in layers if n)
    longest = max(layers, default=0)
    return max(RING_LEAST, longest - longest // devices + 1 if devices > 1 else 0)


def ringed(layers: list[LayerFacts]) -> list[LayerFacts]:
    """Those that stream their experts: what an MTP draft writes of a prompt, no expert matters to."""
    return [layer for layer in layers if layer.expert_tensor_bytes and not (layer.draft and layer.mtp)]


def ring_bytes(layers: list[LayerFacts], regions: int) -> int:
    """Of a device with these layers: at most one region each, of its largest layer."""
    those = ringed(layers)
    region = max((sum(-(-size // 256) * 256 for size in layer.expert_tensor_bytes) for layer in those), default=0)
    return min(regions, len(those)) * region
