"""Configurations that compare ways of prefilling: micro-batches, the staging ring, two GPUs."""

from __future__ import annotations

from llama_phase.bench import GPU, HOST_EXPERTS, PINNED, Configuration, phase_slots

_STOCK = {"prefill_mode": "off", "ctx": 16384}
_PHASE = phase_slots(128)


def _server(threads: int) -> tuple[str, ...]:
    return ("-np", "1", "-t", str(threads), "--no-warmup")


def prefill_suite(threads: int) -> list[Configuration]:
    """Micro-batch fixed and auto, rings, memory that is not pinned (injected) against stock's mapped file."""
    flags = (*HOST_EXPERTS, *_server(threads))
    return [
        Configuration("stock, mapped file, -ub 512", {**_STOCK, "ubatch": 512}, flags),
        Configuration("phase, prefill 2048", _PHASE, flags),
        Configuration("phase, prefill auto", {**_PHASE, "prefill_ubatch": "auto"}, flags),
        Configuration("phase, ring 2", {**_PHASE, "ring": 2}, flags),
        Configuration("phase, staged", {**_PHASE, "fault": "pin.register:*,pin.copy:*"}, flags),
    ]


def gpu2_suite(threads: int) -> list[Configuration]:
    """One GPU of two against both, layers split evenly: each GPU streams its own layers over its own link. In
    micro-batches of 1024 a layer's copy takes longer than its computing, so the links bound the prompt: `GB/s` of two
    GPUs over that of one says what the second link brings."""
    more = _server(threads)
    one, two = ("--device", "CUDA0"), ("-ts", "1,1")
    small = {**_PHASE, "prefill_ubatch": 1024}
    return [
        Configuration("all on 2 GPUs, -ub 2048", {**_STOCK, "ubatch": 2048}, (*GPU, *more, *two)),
        Configuration("1 GPU: stock, pinned, -ub 2048", {**_STOCK, "ubatch": 2048}, (*PINNED, *more, *one)),
        Configuration("2 GPUs: stock, pinned, -ub 2048", {**_STOCK, "ubatch": 2048}, (*PINNED, *more, *two)),
        Configuration("1 GPU: phase, 128 slots", _PHASE, (*HOST_EXPERTS, *more, *one)),
        Configuration("2 GPUs: phase, 128 slots", _PHASE, (*HOST_EXPERTS, *more, *two)),
        Configuration("1 GPU: phase, prefill 1024", small, (*HOST_EXPERTS, *more, *one)),
        Configuration("2 GPUs: phase, prefill 1024", small, (*HOST_EXPERTS, *more, *two)),
        Configuration("2 GPUs: phase, auto", {**_PHASE, "prefill_ubatch": "auto"}, (*HOST_EXPERTS, *more, *two)),
    ]
