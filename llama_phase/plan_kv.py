"""Where the attention K/V of a device's layers goes, as engine/kv-place.cpp and phase-kv.cpp decide, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llama_phase.gguf_facts import LayerFacts, ModelFacts
from llama_phase.plan_choices import KV_TYPES, Choices

_MIB = 1 << 20
LINK_BYTES_PER_S = 25e9  # what the engine estimates a token's reads over the link with: PCIe 4 x16
SLOT_BYTES, ROW_BYTES = 22, 4  # tables: of a position that the device keeps, and of every position
SPARSE_IN_PLACE = ("qwen4exp",)  # architectures whose graph reads only the rows that the layer's indexer picks


@dataclass(frozen=True)
class KvFacts:
    """Of one layer, and of the device it is on: bytes of K/V of all layers there that pick rows, of all others, and
    what is free beside weights."""

    sparse: bool = False
    indexer: bool = False  # the model has one
    f16: bool = True
    flash: bool = True
    sparse_bytes: float = 0
    dense_bytes: float = 0
    free_bytes: float = 0


@dataclass(frozen=True)
class KvPlaces:
    """Of a device. `host`: bytes in host memory, layer by layer; `kept_rows`: positions of those that the device keeps
    as well, over all layers, in `kept_bytes` with their tables; `reasons`: why K/V is not where it was asked for."""

    all_bytes: int
    host: tuple[int, ...]
    kept_rows: int
    kept_bytes: int
    reasons: tuple[str, ...]


def choose(mode: str, facts: KvFacts) -> tuple[bool, str]:
    """(whether the layer's K/V goes to host memory, why not when `mode` would have it there)."""
    if mode == "device" or (mode == "auto" and (not facts.sparse or facts.sparse_bytes <= facts.free_bytes / 2)):
        return False, ""
    if not facts.flash:
        return False, "without flash attention (-fa on) all K/V is read for each token"
    if not facts.f16:
        return False, (
            "only f16 K/V is read in place: other types are converted as a whole for each token (-ctk f16 -ctv f16)"
        )
    if not facts.sparse and mode != "host-all":
        others = "of models with an indexer, only qwen4exp is known to read nothing but what it picks; "
        return False, (
            f"{others if facts.indexer else ''}dense attention would read {_dense_reads(facts.dense_bytes)} "
            "(LLAMA_PHASE_KV=host-all does it all the same)"
        )
    return True, ""


def _dense_reads(size: float) -> str:
    if not size:  # its layout is not known here
        return "all of it over the link for each token"
    return (
        f"{size / _MIB:.0f} MiB over the link for each token of a full context, at most {LINK_BYTES_PER_S / size:.1f} "
        f"tok/s at {LINK_BYTES_PER_S / 1e9:.0f} GB/s"
    )


def kv_places(
    facts: ModelFacts, choices: Choices, layers: Sequence[LayerFacts], unused: Sequence[LayerFacts], free_bytes: float
) -> KvPlaces:
    """`layers`: of one device, which has `free_bytes` beside weights; `unused`: layers there that are no part of the
    plan, which the engine counts in what all layers of a model would take."""

    def model_of(layer: LayerFacts) -> ModelFacts:
        return facts.draft if facts.draft and layer.draft else facts

    def is_sparse(layer: LayerFacts) -> bool:
        return model_of(layer).architecture in SPARSE_IN_PLACE and layer.indexer_k > 0

    host, reasons = [], []
    for layer in layers:
        if layer.kind not in ("attention", "both"):
            host.append(0)
            continue
        types = _types(layer, choices)
        all_there = [(x, _bytes(x, types, choices)) for x in (*layers, *unused) if model_of(x) is model_of(layer)]
        of_layer = KvFacts(
            sparse=is_sparse(layer),
            indexer=model_of(layer).has_indexer,
            f16=types[0] == "f16" and (types[1] == "f16" or layer.kv_v == 0),
            flash=choices.flash,
            sparse_bytes=sum(size for x, size in all_there if is_sparse(x)),
            dense_bytes=sum(size for x, size in all_there if not is_sparse(x)),
            free_bytes=free_bytes,
        )
        in_host, reason = choose(choices.kv, of_layer)
        host.append(_bytes(layer, types, choices) if in_host else 0)
        if reason and reason not in reasons:
            reasons.append(reason)
    kept = [size for size, layer in zip(host, layers, strict=True) if size and is_sparse(layer)]
    rows, kept_bytes = _kept(kept, choices, free_bytes)
    all_bytes = sum(_bytes(layer, _types(layer, choices), choices) for layer in layers)
    return KvPlaces(all_bytes, tuple(host), rows, kept_bytes, tuple(reasons))


def _types(layer: LayerFacts, choices: Choices) -> tuple[str, str]:
    return (choices.draft_type_k, choices.draft_type_v) if layer.draft else (choices.type_k, choices.type_v)


def _bytes(layer: LayerFacts, types: tuple[str, str], choices: Choices) -> int:
    k, v = types
    return int(((layer.kv_k or 0) * KV_TYPES[k] + (layer.kv_v or 0) * KV_TYPES[v]) * choices.cells)


def _kept(sizes: list[int], choices: Choices, free_bytes: float) -> tuple[int, int]:
    """(positions over all layers, bytes with tables) that the device keeps of host K/V, of `sizes` bytes a layer
    (engine/kv-op.h: phase_kv_rows_bytes)."""
    position_bytes = sum(sizes) / choices.cells + SLOT_BYTES * len(sizes)
    rows = choices.kept_rows(position_bytes if sizes else 0, free_bytes)
    return rows * len(sizes), int(rows * position_bytes + ROW_BYTES * choices.cells * len(sizes)) if rows else 0
