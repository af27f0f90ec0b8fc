"""A plan as a picture: VRAM of each device in the two phases side by side, against what is free. Needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from llama_phase.errors import LlamaPhaseError, MissingPrerequisite, UsageError
from llama_phase.plan_report import Report
from llama_phase.tree import write_atomically

_GIB = 1 << 30
# name, colour, attribute in the decode phase, in the prefill phase; drawn from the bottom up
PARTS = (
    ("context *", "#8c8c8c", "context_bytes", "context_bytes"),
    ("dense weights", "#4c72b0", "dense_bytes", "dense_bytes"),
    ("K/V", "#64b5cd", "kv_bytes", "kv_bytes"),
    ("kept of host K/V", "#93d0e0", "kv_rows_bytes", "kv_rows_bytes"),
    ("recurrent state", "#8172b3", "state_bytes", "state_bytes"),
    ("compute buffers *", "#ccb974", "decode_compute_bytes", "prefill_compute_bytes"),
    ("slots", "#55a868", "slots_bytes", ""),
    ("ring", "#c44e52", "", "ring_bytes"),
)


def write_plot(report: Report, path: Path) -> None:
    """Draw it in the format of the file's suffix (png, svg, pdf).

    Raises MissingPrerequisite without matplotlib, UsageError for another suffix, LlamaPhaseError when it cannot be
    written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPrerequisite(
            "matplotlib is not installed, which draws the plan", fix="pip install 'llama-phase[plot]'"
        ) from None
    figure = draw(report, Figure)
    kind = path.suffix.lower().removeprefix(".")
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise UsageError(f"{path} has no suffix of a picture", fix=f"one of {', '.join(sorted(known))}")
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=150)
    try:
        write_atomically(path, data.getvalue())
    except OSError as error:
        raise LlamaPhaseError(f"cannot write {path}: {error.strerror}", fix="choose another place") from None


def bars(report: Report) -> list[tuple[str, dict[str, int], int]]:
    """(label, bytes by part, free bytes) of each bar: every device in each phase there is. Pure."""
    phases = ("decode", "prefill") if report.plan.choices.switches else ("decode",)
    found = []
    for device in report.plan.devices:
        for index, phase in enumerate(phases):
            sizes = {part[0]: getattr(device, part[2 + index]) if part[2 + index] else 0 for part in PARTS}
            found.append((f"{device.name}\n{phase}", sizes, device.free_bytes))
    return found


def draw(report: Report, figure_of: Any) -> Any:
    """A matplotlib figure made by `figure_of`, without any window or backend."""
    columns = bars(report)
    per_device = len(columns) // len(report.plan.devices)
    places = [i + 0.6 * (i // per_device) for i in range(len(columns))]
    figure = figure_of(figsize=(2.6 + 1.15 * len(columns), 4.8), layout="constrained")
    axes = figure.add_subplot()
    below = [0.0] * len(columns)
    for name, colour, *_ in PARTS:
        heights = [sizes[name] / _GIB for _, sizes, _ in columns]
        if any(heights):
            axes.bar(places, heights, 0.8, bottom=below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for number, (place, (_, _, free)) in enumerate(zip(places, columns, strict=True)):
        label = "free before" if number == 0 else None
        axes.hlines(free / _GIB, place - 0.45, place + 0.45, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(places, [f"{label}\n{top:.1f}" for (label, _, _), top in zip(columns, below, strict=True)])
    axes.set_ylabel("GiB")
    axes.margins(y=0.08)
    plan = report.plan
    axes.set_title(f"{report.facts.name}\ncontext {plan.choices.ctx}, {plan.slots} slots per layer", fontsize=9)
    figure.legend(loc="outside right center", fontsize=8, title="* an estimate", title_fontsize=8, frameon=False)
    return figure
