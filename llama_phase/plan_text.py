"""A plan's report as lines to read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from llama_phase.pcie import HIT_RATES_EXPERTS, HIT_RATES_SOURCE
from llama_phase.plan import ESTIMATES, DevicePlan, Plan
from llama_phase.plan_changes import changes
from llama_phase.plan_report import Report
from llama_phase.plan_ubatch import Need

_ROWS = (
    ("context *", "context_bytes", "context_bytes"),
    ("dense weights", "dense_bytes", "dense_bytes"),
    ("K/V", "kv_bytes", "kv_bytes"),
    ("kept of host K/V", "kv_rows_bytes", "kv_rows_bytes"),
    ("recurrent state", "state_bytes", "state_bytes"),
    ("compute buffers *", "decode_compute_bytes", "prefill_compute_bytes"),
    ("slots", "slots_bytes", ""),
    ("ring", "", "ring_bytes"),
    ("sum", "decode_bytes", "prefill_bytes"),
    ("free before", "free_bytes", "free_bytes"),
)


def gib(size: float) -> str:
    return f"{size / (1 << 30):.2f}"


def lines(report: Report) -> Iterator[str]:
    """Sizes in GiB, a column per device and phase."""
    facts, plan = report.facts, report.plan
    mtp = len(facts.layers) - len(facts.served_layers)
    tokens = plan.choices.draft_tokens
    planned = f" drafting {tokens} tokens" if tokens else " (not planned: --mtp)"
    if facts.draft is not None:
        planned = " not used"
    yield (
        f"{facts.name} ({facts.architecture}): {len(facts.served_layers)} layers, {len(facts.moe_layers)} with experts"
        f"{f', {mtp} MTP{planned}' if mtp else ''}; {facts.n_expert} experts, {facts.n_used} per token; "
        f"{gib(facts.experts_bytes)} GiB of experts; context {plan.choices.ctx}"
    )
    if facts.draft is not None:
        drafted = f", {tokens} tokens at a time" if tokens else ""
        yield f"draft: {facts.draft.name} ({facts.draft.architecture}), {gib(facts.draft.file_bytes)} GiB{drafted}"
    yield ""
    yield from _table(plan.devices, plan.choices.switches)
    yield "* an estimate"
    yield ""
    for device in plan.devices:
        for reason in device.kv_reasons:
            yield f"K/V stays on {device.name}: {reason}"
    if facts.moe_layers:
        most = f"at most {plan.slots_fit} fit, at least {plan.slots_needed} are needed"
        yield f"slots per layer: {plan.slots} ({most})"
        if facts.draft is not None and plan.has_late_draft:
            yield f"`serve` gives slots that are auto this number, so that the draft from {facts.draft.path.name} fits"
        if facts.draft is not None and (device := plan.choices.draft_place.found):
            yield f"`serve` puts the draft on {device}, which has most room for it"
        if plan.draft_slots:
            yield f"slots of the draft: {_of_the_draft(plan)}"
        yield f"ring: {plan.ring_regions} layers" if plan.ring_regions else "ring: none, stock uploads"
    yield from _candidates(plan)
    if in_host := sum(device.kv_host_bytes for device in plan.devices):
        yield f"K/V: {gib(in_host)} GiB in host memory"
    each = ", ".join(f"{size / 1024:.1f}" for size in report.vram_bytes_per_token)
    yield f"VRAM per token of context, decode phase *: {each} KiB"
    ram = "unknown" if plan.host_short_bytes is None else "enough" if not plan.host_short_bytes else "too little"
    yield f"host memory: {gib(plan.host_bytes)} GiB read there, {gib(plan.pinned_bytes)} GiB of it pinned; RAM: {ram}"
    yield from _pcie(report)
    for what, why in facts.unknown.items():
        yield f"unknown: {what}: {why}"
    yield ""
    yield from _verdict(report)


def _table(devices: tuple[DevicePlan, ...], switches: bool) -> Iterator[str]:
    phases = ("decode", "prefill") if switches else ("decode",)
    columns = [(device, phase) for device in devices for phase in phases]
    yield f"{'GiB':18}" + "".join(f"{f'{device.name} {phase}':>16}" for device, phase in columns)
    for title, decode, prefill in _ROWS:
        cells = ""
        for device, phase in columns:
            name = decode if phase == "decode" else prefill
            cells += f"{gib(getattr(device, name)) if name else '-':>16}"
        yield f"{title:18}{cells}"


def _of_the_draft(plan: Plan) -> str:
    if plan.draft_slots == plan.draft_experts:
        return f"{plan.draft_slots}, all its experts"
    chosen = plan.choices.draft_slots is not None
    why = "LLAMA_PHASE_DRAFT_SLOTS" if chosen else "more do not fit beside those of the target"
    return f"{plan.draft_slots} of {plan.draft_experts} experts per layer ({why})"


def _candidates(plan: Plan) -> Iterator[str]:
    whole = plan.choices.chunk == 0
    for one in plan.candidates:
        parts = [
            f"{device.name} compute * {gib(n.compute_bytes)}{_in_chunks(n) if whole else ''}, "
            f"ring {gib(n.ring_bytes)}, pool * {gib(n.pool_bytes)}"
            for device, n in zip(plan.devices, one.needs, strict=True)
            if device.layers
        ]
        verdict = "fits" if one.fits else f"short by {gib(one.short_bytes)}"
        yield f"prefill ubatch {one.ubatch}: {'; '.join(parts)}: {verdict}"
    if plan.candidates:
        chosen = plan.choices.prefill_ubatch if plan.choices.switches else "none, no switch"
        chunks = f", LLAMA_PHASE_CHUNK={plan.choices.chunk}" if not whole else ""
        yield f"prefill ubatch auto: {chosen} *{chunks}"


def _in_chunks(need: Need) -> str:
    saved = need.in_chunks_bytes < need.compute_bytes
    return f" ({gib(need.in_chunks_bytes)} with LLAMA_PHASE_CHUNK=auto)" if saved else ""


def _pcie(report: Report) -> Iterator[str]:
    prompts = report.prompts()
    if not prompts:
        return
    if None in prompts.values():
        yield "PCIe: the link of a GPU is unknown, so no times; give it: --pcie GENERATIONxLANES"
    else:
        yield f"streaming experts, estimate without compute: {_prompt_times(prompts)}"
        if larger := report.of_larger_ubatch:
            flag = f"--prefill-ubatch {larger.plan.choices.prefill_ubatch}"
            yield f"  with {flag}, which fits: {_prompt_times(larger.prompts())}"
    if not report.plan.slots:
        return
    for slots, rate in report.rates():
        if rate is None:
            worst = report.missed_bytes_per_token(0.0)
            yield f"decode with {slots} slots: hit rate unknown; {worst / 1e6:.0f} MB per token if every expert missed"
            continue
        seconds = report.missed_seconds_per_token(rate)
        time = "" if seconds is None else f", {seconds * 1e3:.1f} ms"
        missed = report.missed_bytes_per_token(rate) / 1e6
        yield f"decode with {slots} slots: {rate:.0%} found, {missed:.0f} MB per token missed{time}"
    if report.facts.n_expert == HIT_RATES_EXPERTS:
        yield f"hit rates: {HIT_RATES_SOURCE}"


def _prompt_times(prompts: dict[int, float | None]) -> str:
    return ", ".join(f"{seconds:.1f} s for {tokens} tokens" for tokens, seconds in prompts.items())


def _verdict(report: Report) -> Iterator[str]:
    plan = report.plan
    if report.experts_fit_in_vram:
        yield "all experts fit in VRAM too: llama.cpp without --cpu-moe is faster for this model"
    for device in plan.devices:
        for phase, short in (("decode", device.decode_short_bytes), ("prefill", device.prefill_short_bytes)):
            if short:
                then = " (prompts would run at the small micro-batch)" if phase == "prefill" else ""
                yield f"does not fit: {device.name} is {gib(short)} GiB short in the {phase} phase{then}"
    if not plan.fits_vram:
        found = changes(report.facts, report.machine, plan.choices)
        for number, change in enumerate(found, 1):
            slots = f"; then {change.slots} slots" if plan.slots or change.slots else ""
            yield f"  fix {number}: {change.what} ({change.costs}{slots})"
        if not found:
            yield "  fix: more VRAM or a smaller quantization; no setting is enough"
    if plan.host_short_bytes:
        yield (
            f"does not fit: host memory is {gib(plan.host_short_bytes)} GiB short\n"
            "  fix: more RAM or a smaller quantization; experts have to stay in memory"
        )
    if plan.fits:
        yield f"estimates: {'; '.join(ESTIMATES)}"
        yield "command:"
        words = [f"{name}={value}" for name, value in report.environment.items()]
        yield "  " + " ".join([*words, shlex.join(report.serve_argv)])
