"""Which of a machine's GPUs a server's flags give it, and what share of the layers each has. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from llama_phase.errors import UsageError
from llama_phase.hardware import Machine
from llama_phase.upstream_flags import DEVICE, SPLIT_MODE, TENSOR_SPLIT, flag_value


def used_by(machine: Machine, upstream: tuple[str, ...]) -> Machine:
    """`machine` with the GPUs of `--device CUDA1,CUDA0`, in that order. Raises UsageError for other devices, and for
    splits other than by layer, which no plan is for."""
    mode = flag_value(upstream, SPLIT_MODE)
    if mode not in (None, "layer") and len(machine.gpus) > 1:
        raise UsageError(f"no plan: plans are for --split-mode layer, not {mode}", fix="plan without it")
    listed = flag_value(upstream, DEVICE)
    if listed is None:
        return machine
    of_name = {f"CUDA{gpu.index}": gpu for gpu in machine.gpus}
    names = listed.split(",")
    if unknown := [name for name in names if name not in of_name]:
        there = ", ".join(of_name) or "none"
        raise UsageError(f"no plan: --device names {unknown[0]}, and planned is for {there}", fix="plan without it")
    return replace(machine, gpus=tuple(of_name[name] for name in names))


def shares(upstream: tuple[str, ...]) -> tuple[float, ...]:
    """Of `--tensor-split 3,1`; empty: layers are split by free memory. Raises UsageError."""
    given = flag_value(upstream, TENSOR_SPLIT)
    if given is None:
        return ()
    try:
        found = tuple(float(part) for part in re.split("[,/]+", given))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise UsageError(f"no plan: {TENSOR_SPLIT[1]} {given} is no split", fix="write proportions: 3,1")
    return found
