"""What would make a plan fit: settings that cost little first. Pure; each change is tried by planning with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llama_phase.gguf_facts import ModelFacts
from llama_phase.hardware import Machine
from llama_phase.plan import make_plan
from llama_phase.plan_choices import Choices

_SMALLEST_CTX = 4096


@dataclass(frozen=True)
class Change:
    """Settings that make the plan fit. `slots`: per layer with the change, `costs`: what is given up."""

    what: str
    costs: str
    slots: int


@dataclass(frozen=True)
class _Step:
    what: str
    costs: str
    update: dict[str, Any]  # of Choices


def changes(facts: ModelFacts, machine: Machine, choices: Choices) -> list[Change]:
    """For a plan that does not fit in VRAM: single changes that do it, cheapest first; else up to two sets of several.

    Empty when nothing is enough, or when the plan fits.
    """

    def slots_with(steps: Iterable[_Step]) -> int | None:
        merged = {name: value for step in steps for name, value in step.update.items()}
        plan = make_plan(facts, machine, replace(choices, **merged))
        return plan.slots if plan.fits_vram else None

    if slots_with(()) is not None:
        return []
    families = [steps for steps in (list(family) for family in _families(choices, facts)) if steps]
    found: list[Change] = []
    for steps in families:  # mildest first
        fitting = ((step, slots_with([step])) for step in steps)
        found += [Change(step.what, step.costs, slots) for step, slots in fitting if slots is not None][:1]
    if found:
        return found
    # all to their end; then each back as far as it can: first the dear ones, for comparison first the cheap ones
    strongest = dict(enumerate(steps[-1] for steps in families))
    if slots_with(strongest.values()) is None:
        return []
    for order in (reversed(range(len(families))), range(len(families))):
        chosen = dict(strongest)
        for i in order:
            others = [step for j, step in chosen.items() if j != i]
            del chosen[i]
            if slots_with(others) is None:
                chosen[i] = next(step for step in families[i] if slots_with([*others, step]) is not None)
        kept = [chosen[i] for i in sorted(chosen)]
        slots = slots_with(kept)
        change = Change(" and ".join(s.what for s in kept), "; ".join(s.costs for s in kept), slots or 0)
        if change not in found:
            found.append(change)
    return found


def _families(now: Choices, facts: ModelFacts) -> Iterator[Iterator[_Step]]:
    """Cheapest family first, in each the mildest step first."""
    moe = bool(facts.moe_layers)
    if now.slots:
        yield iter([_Step("--slots auto", "more misses during decode", {"slots": None})])
    if now.draft_slots is not None:
        yield iter([_Step("LLAMA_PHASE_DRAFT_SLOTS=auto", "more misses of the draft", {"draft_slots": None})])
    yield (
        _Step(f"--ubatch {n}", "prompts too short for a switch are slower", {"ubatch": n})
        for n in _halved(now.ubatch, 128)
    )
    if now.switches and not now.prefill_auto:
        yield (
            _Step(f"--prefill-ubatch {n}", "more passes over the experts per prompt", {"prefill_ubatch": n})
            for n in _halved(now.prefill_ubatch, 2 * now.ubatch)
        )
    if moe and now.slots is None:
        yield (
            _Step(f"LLAMA_PHASE_EXPERT_BATCH={n}", "larger MTP verify batches miss the slots", {"expert_batch": n})
            for n in _halved(now.expert_batch, 1)
        )
    if now.type_k == now.type_v == "f16":
        update = {"type_k": "q8_0", "type_v": "q8_0"}
        yield iter([_Step("`-ctk q8_0 -ctv q8_0` after `--`", "K/V a little less exact", update)])
    yield (_Step(f"--ctx {n}", "shorter context", {"ctx": n}) for n in _halved(now.ctx, _SMALLEST_CTX))
    if moe and now.slots != 0:
        costs = "experts on the CPU during decode, stock uploads during prefill"
        yield iter([_Step("--slots 0", costs, {"slots": 0})])


def _halved(value: int, least: int) -> Iterator[int]:
    while value > least:
        value = max(least, value // 2)
        yield value
