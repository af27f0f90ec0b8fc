"""A machine to plan for as given on the command line: facts of another one, or numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from llama_phase.errors import UsageError
from llama_phase.hardware import Gpu, Machine, from_json
from llama_phase.pcie import parse_link

_GIB = 1 << 30


def read_machine(path: Path) -> Machine:
    """Facts recorded with `doctor --record`. Raises UsageError."""
    try:
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read {path}: {reason}", fix="record it: `llama-phase doctor --record FILE`") from None


def with_given(base: Machine, *, vram: str | None = None, ram: str | None = None, pcie: str | None = None) -> Machine:
    """`base` with other GPUs (`vram`: free GiB of each), memory (GiB), links (`4x16`: one for all, or one each).

    GPUs by hand stand for another machine: its memory and links are then unknown unless they are given, too.
    Raises UsageError.
    """
    machine = base
    if vram is not None:
        sizes = [_bytes("--vram", item) for item in vram.split(",")]
        gpus = tuple(Gpu(index, "given", size, size) for index, size in enumerate(sizes))
        machine = Machine(gpus=gpus, unknown={"ram_available_bytes": "not given (--ram)"})
    if ram is not None:
        size = _bytes("--ram", ram)
        unknown = {name: why for name, why in machine.unknown.items() if not name.startswith("ram_")}
        machine = replace(machine, ram_total_bytes=size, ram_available_bytes=size, unknown=unknown)
    if pcie is not None:
        links = [parse_link(item) for item in pcie.split(",")]
        if len(links) == 1:
            links *= len(machine.gpus)
        if len(links) != len(machine.gpus):
            raise UsageError(
                f"--pcie gives {len(links)} links for {len(machine.gpus)} GPUs", fix="give one for all, or one for each"
            )
        gpus = tuple(
            replace(
                gpu, pcie_generation=generation, pcie_generation_max=generation, pcie_width=width, pcie_width_max=width
            )
            for gpu, (generation, width) in zip(machine.gpus, links, strict=True)
        )
        machine = replace(machine, gpus=gpus)
    return machine


def _bytes(flag: str, text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not (math.isfinite(size) and 0 < size < 1e6):
        raise UsageError(f"{flag} does not accept {text!r}", fix="write GiB, for example 24, or 24,24 for two GPUs")
    return int(size * _GIB)
