"""A plan against what the engine reports after it was loaded: an estimate that nobody compares is worth nothing.

What a phase takes is known once it has been entered, so compare after the probe prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llama_phase.errors import LlamaPhaseError
from llama_phase.gguf_facts import read_facts
from llama_phase.hardware import Machine, probe
from llama_phase.plan import DevicePlan, Plan, plan_server
from llama_phase.plan_choices import Choices
from llama_phase.plan_devices import used_by
from llama_phase.plan_draft import not_planned
from llama_phase.settings import Settings
from llama_phase.tree import write_atomically
from llama_phase.upstream_flags import CPU_MOE, DRAFT_MODEL, NGL, flag_value, normalise

FILE_NAME = "plan-check.json"
COMPUTED_ERROR, ESTIMATED_ERROR = 0.01, 0.15  # shares of what is reported; beyond them a deviation is worth a word
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Deviation:
    """One figure as planned and as reported. `unit`: bytes, slots, layers, positions or tokens."""

    item: str
    planned: int
    reported: int
    unit: str = "bytes"
    estimate: bool = False

    @property
    def error(self) -> float | None:
        """Planned against reported, as a share: 0.1 is 10 % too much. None: nothing was reported, but planned."""
        if self.planned == self.reported:
            return 0.0
        return (self.planned - self.reported) / self.reported if self.reported else None

    @property
    def is_notable(self) -> bool:
        limit = ESTIMATED_ERROR if self.estimate else COMPUTED_ERROR
        return self.error is None or abs(self.error) > limit

    def __str__(self) -> str:
        def shown(value: int) -> str:
            return f"{value / _MIB:.0f} MiB" if self.unit == "bytes" else f"{value} {self.unit}"

        error = "" if self.error is None else f" ({self.error:+.0%})"
        return f"{self.item}: {shown(self.planned)} planned, {shown(self.reported)} reported{error}"


def compare(plan: Plan, phase: Mapping[str, Any], props: Mapping[str, Any] | None = None) -> list[Deviation]:
    """All that both know. `phase` of GET /phase, `props` of GET /props. Pure.

    Left out is what was not reported: a phase that was not entered yet, devices other than GPUs.
    """
    return [*_experts(plan, phase), *_kv(plan, phase), *_devices(plan, phase), *_context(plan, props or {})]


def lines(deviations: Sequence[Deviation]) -> Iterator[str]:
    """A line for each, the notable ones marked."""
    for deviation in deviations:
        estimate = ", an estimate" if deviation.estimate else ""
        yield f"{'!' if deviation.is_notable else ' '} {deviation}{estimate}"


def summary(deviations: Sequence[Deviation]) -> str:
    """A sentence with the figure that is most off; empty when the plan was right."""
    notable = [deviation for deviation in deviations if deviation.is_notable]
    if not notable:
        return ""
    worst = max(notable, key=lambda deviation: float("inf") if deviation.error is None else abs(deviation.error))
    return f"the plan is off in {len(notable)} of {len(deviations)} figures, most in {worst}"


def shortfalls(plan: Plan, settings: Settings) -> list[str]:
    """What cannot fit, device by device: only what is computed counts, no estimate, and slots only if their number was
    chosen. Pure."""
    short = []
    for device in plan.devices:
        certain = device.dense_bytes + device.kv_bytes + device.state_bytes
        what = "weights and K/V"
        if settings.expert_slots not in ("auto", 0):
            fewest = ", the fewest" if plan.slots == plan.slots_needed else ""
            certain, what = certain + device.slots_bytes, f"weights, K/V and {plan.slots} slots{fewest}"
        elif settings.expert_slots == "auto" and settings.draft_slots != "auto":
            certain += device.draft_slots_bytes
            what = f"weights, K/V and {plan.draft_slots} slots of the draft"
        if certain > device.free_bytes:
            missing = (certain - device.free_bytes) / _GIB
            short.append(
                f"{device.name} is {missing:.2f} GiB short for {what} ({device.free_bytes / _GIB:.2f} GiB free)"
            )
    return short


def for_a_late_draft(plan: Plan, settings: Settings) -> dict[str, Any]:
    """Settings that a draft from a file of its own needs, which is loaded after slots that are auto took all but the
    reserve: their number, at least the fewest that the engine accepts, unless the reserve is enough for it; and the
    device that was found for it. Pure."""
    found: dict[str, Any] = {}
    if settings.expert_slots == "auto" and plan.has_late_draft:
        found["expert_slots"] = plan.slots
    if plan.choices.draft_place.found:
        found["draft_device"] = plan.choices.draft_place.found
    return found


def save(folder: Path, deviations: Sequence[Deviation], *, model: str, engine: str) -> None:
    """Write them to `plan-check.json` in `folder`, the state folder. Raises OSError."""
    rows = [asdict(deviation) | {"error": deviation.error} for deviation in deviations]
    content = json.dumps({"model": model, "engine": engine, "deviations": rows}, indent=1) + "\n"
    write_atomically(folder / FILE_NAME, content.encode(), mode=0o600)


def read(folder: Path) -> tuple[str, list[Deviation]] | None:
    """Model and deviations last saved in `folder`; None when there are none that can be read."""
    try:
        saved = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        rows = [{key: value for key, value in row.items() if key != "error"} for row in saved["deviations"]]
        return str(saved["model"]), [Deviation(**row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(state: Path, model: Path) -> list[Deviation]:
    """The newest comparison of `model` that a supervisor left in the state folder or its own; empty when none did."""
    paths = [path for path in (state / FILE_NAME, *state.glob(f"port-*/{FILE_NAME}")) if path.is_file()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        saved = read(path.parent)
        if saved is not None and saved[0] == str(model.absolute()):
            return saved[1]
    return []


def plan_of(settings: Settings, machine: Machine | None = None) -> tuple[Plan | None, str]:
    """(the plan of a server about to be started, ""), or (None, why there is none). Reads the model's header and the
    machine's free memory, so call it before the server takes its share. Never raises for a model or machine."""
    flags = {normalise(word) for word in settings.upstream}
    if not settings.check_plan:
        return None, "check_plan is off"
    if not flags & set(CPU_MOE) or flag_value(settings.upstream, NGL) is None:
        return None, "plans are for `-ngl 99 --cpu-moe`"
    try:
        facts = read_facts(settings.model, flag_value(settings.upstream, DRAFT_MODEL))
        if why := not_planned(settings, facts):
            return None, why
        choices = Choices.of(settings, facts)
        if settings.expert_slots != "auto":
            choices = replace(choices, slots=settings.expert_slots)
        return plan_server(facts, used_by(probe() if machine is None else machine, settings.upstream), choices), ""
    except LlamaPhaseError as error:
        return None, str(error)


def _experts(plan: Plan, phase: Mapping[str, Any]) -> Iterator[Deviation]:
    # the target's context comes first, then its draft's, whose slots per layer follow from what the first left
    contexts = phase.get("experts", [])
    if not contexts:
        if plan.slots:
            yield Deviation("slots per layer", plan.slots, 0, "slots")
        return
    yield Deviation("slots per layer", plan.slots, contexts[0]["slots_per_layer"], "slots")
    if plan.draft_slots and len(contexts) > 1:
        yield Deviation("slots of the draft per layer", plan.draft_slots, contexts[1]["slots_per_layer"], "slots")
    slots_bytes = sum(device.slots_bytes for device in plan.devices)
    yield Deviation("slots", slots_bytes, sum(experts["slot_bytes"] for experts in contexts))
    pinned_bytes = plan.pinned_bytes - sum(device.kv_host_bytes for device in plan.devices)
    yield Deviation("pinned host memory", pinned_bytes, sum(experts["pinned_bytes"] for experts in contexts))
    layers = sum(device.moe_layers for device in plan.devices) if plan.slots else 0
    yield Deviation("layers with slots", layers, sum(len(experts["layers"]) for experts in contexts), "layers")
    ring = [step["bytes"] for step in phase.get("last_enter_steps", []) if step["step"] == "enter.allocate_ring"]
    if ring:
        yield Deviation("ring", sum(device.ring_bytes for device in plan.devices), ring[0])


def _kv(plan: Plan, phase: Mapping[str, Any]) -> Iterator[Deviation]:
    if "kv" not in phase:
        return
    layers = [layer for context in phase["kv"]["contexts"] for layer in context["layers"] if layer["place"] == "host"]
    planned = sum(device.kv_host_bytes for device in plan.devices)
    if planned or layers:
        yield Deviation("K/V in host memory", planned, sum(layer["bytes"] for layer in layers))
    kept = [layer["rows"]["kept"] for layer in layers if "rows" in layer]
    # a CPU engine keeps none unless it is given a number
    if kept or any(not layer["device"].startswith("CPU") for layer in layers):
        yield Deviation("kept of host K/V", sum(device.kv_rows for device in plan.devices), sum(kept), "positions")


def _devices(plan: Plan, phase: Mapping[str, Any]) -> Iterator[Deviation]:
    for name in ("decode", "prefill"):
        rows = [row for row in phase.get("memory", {}).get(name, []) if "free_bytes" in row]
        # llama.cpp names devices in the order in which the plan has those with layers
        with_layers = [device for device in plan.devices if device.layers]
        for device, row in zip(with_layers, sorted(rows, key=lambda row: _natural(row["device"])), strict=False):
            compute, total = _planned(device, name)
            item = f"{device.name} ({row['device']}), {name} phase"
            yield Deviation(f"{item}: compute buffers", compute, row["compute_buffer_bytes"], estimate=True)
            used = max(0, device.free_bytes - row["free_bytes"])
            yield Deviation(f"{item}: all", total, used, estimate=True)


def _planned(device: DevicePlan, phase: str) -> tuple[int, int]:
    if phase == "decode":
        return device.decode_compute_bytes, device.decode_bytes
    return device.prefill_compute_bytes, device.prefill_bytes


def _context(plan: Plan, props: Mapping[str, Any]) -> Iterator[Deviation]:
    reported = props.get("default_generation_settings", {}).get("n_ctx")
    if isinstance(reported, int):
        yield Deviation("context", plan.choices.cells, reported, "tokens")


def _natural(name: str) -> tuple[str, int]:
    """CUDA2 before CUDA10."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)
