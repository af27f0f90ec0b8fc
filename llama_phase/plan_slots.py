"""How many slots per layer target and draft get, as engine/expert-cache.cpp and slot-count.cpp choose. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llama_phase.errors import UsageError
from llama_phase.gguf_facts import LayerFacts, ModelFacts
from llama_phase.plan_choices import Choices


@dataclass(frozen=True)
class SlotCounts:
    """Per layer. `needed`: the fewest that the engine accepts, `fit`: the most that fit, both as `--slots` counts them;
    `draft`: of an MTP draft whose layers have `draft_experts` each, 0 without one. `draft_follows`: a slot more of the
    target is one more of the draft."""

    target: int
    needed: int
    fit: int
    draft: int
    draft_experts: int
    draft_follows: bool

    def of(self, layer: LayerFacts) -> int:
        return min(self.draft if is_mtp_draft(layer) else self.target, layer.n_expert)


def is_mtp_draft(layer: LayerFacts) -> bool:
    """Whether LLAMA_PHASE_DRAFT_SLOTS is about it."""
    return layer.draft and layer.mtp


def slots_needed(facts: ModelFacts, choices: Choices, layer: LayerFacts) -> int:
    used = facts.draft.n_used if facts.draft and layer.draft else facts.n_used
    return min(layer.n_expert, used * choices.expert_batch)


def choose_slots(facts: ModelFacts, choices: Choices, split: list[list[LayerFacts]], rooms: list[float]) -> SlotCounts:
    """`rooms`: bytes for slots on each device, whose layers `split` has.

    Raises UsageError for fewer slots than the engine accepts.
    """
    moe = [[layer for layer in layers if layer.expert_tensor_bytes] for layers in split]
    targets = [[layer for layer in layers if not is_mtp_draft(layer)] for layers in moe]
    drafts = [[layer for layer in layers if is_mtp_draft(layer)] for layers in moe]
    numbered = choices.draft_slots is not None
    follows = targets if numbered else moe
    needed = max((slots_needed(facts, choices, layer) for layer in _all(follows)), default=0)
    draft_needed = max((slots_needed(facts, choices, layer) for layer in _all(drafts)), default=0)
    draft_experts = max((layer.n_expert for layer in _all(drafts)), default=0)
    _refuse_too_few(facts, choices, needed, draft_needed)

    number = choices.draft_slots or 0
    kept = [sum(layer.expert_bytes * min(number, layer.n_expert) for layer in layers) for layers in drafts]
    most = max((layer.n_expert for layer in _all(follows)), default=0)
    fit = min(most, _fit([room - size for room, size in zip(rooms, kept, strict=True)], follows))
    target = fit if fit >= needed else needed
    if choices.slots is not None:
        target = min(choices.slots, most)

    left = [
        room - sum(layer.expert_bytes * min(target, layer.n_expert) for layer in layers)
        for room, layers in zip(rooms, targets, strict=True)
    ]
    draft_fit = _fit(left, drafts)
    if not target or numbered:
        draft = min(number, draft_experts) if target else 0
    elif draft_fit >= draft_experts:
        draft = draft_experts
    elif choices.slots is None and facts.draft is None:
        draft = max(draft_fit, draft_needed)  # the target's `auto` left room for as many as its own, and some bytes
    else:
        draft = min(target, draft_experts)
    return SlotCounts(target, needed, fit, draft, draft_experts, not numbered and draft < draft_experts)


def _fit(rooms: Iterable[float], layers: list[list[LayerFacts]]) -> int:
    sizes = [sum(layer.expert_bytes for layer in those) for those in layers]
    return min((int(max(room, 0) // size) for room, size in zip(rooms, sizes, strict=True) if size), default=0)


def _all(split: list[list[LayerFacts]]) -> list[LayerFacts]:
    return [layer for layers in split for layer in layers]


def _refuse_too_few(facts: ModelFacts, choices: Choices, needed: int, draft_needed: int) -> None:
    per_token = f"experts per token x {choices.expert_batch}, LLAMA_PHASE_EXPERT_BATCH"
    if choices.slots and choices.slots < needed:
        raise UsageError(
            f"{choices.slots} slots are too few: {needed} are needed ({facts.n_used} {per_token})",
            fix=f"--slots {needed} or more, or a smaller LLAMA_PHASE_EXPERT_BATCH",
        )
    if choices.slots != 0 and choices.draft_slots is not None and choices.draft_slots < draft_needed:
        raise UsageError(
            f"{choices.draft_slots} slots are too few for the draft: {draft_needed} are needed ({per_token})",
            fix=f"LLAMA_PHASE_DRAFT_SLOTS={draft_needed} or more, or auto",
        )
