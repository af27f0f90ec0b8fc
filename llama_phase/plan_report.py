"""A plan as a command for `serve`, as JSON, and as lines to read; predictions of what crosses PCIe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from llama_phase.gguf_facts import ModelFacts
from llama_phase.hardware import Machine
from llama_phase.pcie import (
    FETCH_SHARE,
    HIT_RATES,
    HIT_RATES_EXPERTS,
    HIT_RATES_SOURCE,
    STREAM_SHARE,
    hit_rate,
    link_bytes_per_s,
    passes,
)
from llama_phase.plan import ESTIMATES, Plan, make_plan
from llama_phase.plan_changes import changes
from llama_phase.plan_choices import KV_ROWS_AUTO, Choices
from llama_phase.plan_ubatch import UBATCHES
from llama_phase.upstream_flags import CPU_MOE, NGL, normalise

PROMPTS = (2048, 8192, 32768)
_DEFAULTS = Choices(ctx=0)


@dataclass(frozen=True)
class Report:
    """Everything `llama-phase plan` says. Seconds and rates are None where the link or the rate is unknown."""

    facts: ModelFacts
    machine: Machine
    plan: Plan

    @property
    def links(self) -> list[float | None]:
        """Per device: the width negotiated, and the generation possible, since an idle GPU lowers that."""
        return [
            link_bytes_per_s(
                gpu.pcie_generation_max or gpu.pcie_generation,
                gpu.pcie_width or gpu.pcie_width_max,
            )
            for gpu in self.machine.gpus
        ]

    @property
    def vram_bytes_per_token(self) -> list[float]:
        """What a token more of context takes of each device in the decode phase: the difference to a plan of twice the
        context, masks, scores and the copy of one layer's host K/V included. Slots are aside, and there are as many
        positions of host K/V that are kept as well."""
        choices = self.plan.choices
        if choices.kv == "auto":  # may choose otherwise there
            choices = replace(choices, kv="host" if any(d.kv_host_bytes for d in self.plan.devices) else "device")
        if choices.kv_rows is None:
            choices = replace(choices, kv_rows=min(KV_ROWS_AUTO, choices.cells))
        taken, before = (
            [d.fixed_bytes + d.decode_compute_bytes for d in make_plan(self.facts, self.machine, one).devices]
            for one in (replace(choices, ctx=2 * choices.cells), choices)
        )
        return [(more - less) / choices.cells for more, less in zip(taken, before, strict=True)]

    def prompt_seconds(self, tokens: int) -> float | None:
        """Time to stream the experts for a prompt: devices one after the other, no compute. None: a link is unknown."""
        choices = self.plan.choices
        switched = choices.switches and tokens >= choices.min_tokens
        ubatch = max(choices.prefill_ubatch, choices.ubatch) if switched else choices.ubatch
        return self._seconds([d.streamed_bytes for d in self.plan.devices], STREAM_SHARE, passes(tokens, ubatch))

    def missed_bytes_per_token(self, rate: float) -> float:
        return (1 - rate) * self.facts.n_used * sum(device.expert_bytes for device in self.plan.devices)

    def missed_seconds_per_token(self, rate: float) -> float | None:
        per_device = [(1 - rate) * self.facts.n_used * device.expert_bytes for device in self.plan.devices]
        return self._seconds(per_device, FETCH_SHARE, 1)

    def _seconds(self, sizes: list[float] | list[int], share: float, times: int) -> float | None:
        if any(size and link is None for size, link in zip(sizes, self.links, strict=True)):
            return None
        return times * sum(size / (link * share) for size, link in zip(sizes, self.links, strict=True) if link)

    def rates(self) -> Iterator[tuple[int, float | None]]:
        """(slots, share of experts found there): of this plan, and of the table where it is of this kind of model."""
        yield self.plan.slots, hit_rate(self.plan.slots, self.facts.n_expert)
        if self.facts.n_expert == HIT_RATES_EXPERTS:
            yield from ((slots, rate) for slots, rate in HIT_RATES.items() if slots != self.plan.slots)

    @property
    def experts_fit_in_vram(self) -> bool:
        """Whether nothing has to stay in host memory, in which case stock llama.cpp is faster."""
        return bool(self.facts.moe_layers) and all(
            d.fixed_bytes + max(d.decode_compute_bytes, d.prefill_compute_bytes) + d.experts_bytes <= d.free_bytes
            for d in self.plan.devices
        )

    @property
    def serve_argv(self) -> list[str]:
        choices = self.plan.choices
        words = ["llama-phase", "serve", str(self.facts.path), "--ctx", str(choices.ctx)]
        if self.facts.moe_layers:
            words += ["--slots", str(self.plan.slots)]
        if choices.ubatch != _DEFAULTS.ubatch:
            words += ["--ubatch", str(choices.ubatch)]
        if not choices.switches and not choices.prefill_auto:
            words += ["--prefill-mode", "off"]
        elif choices.prefill_auto:
            words += ["--prefill-ubatch", "auto"]
        elif choices.prefill_ubatch != _DEFAULTS.prefill_ubatch:
            words += ["--prefill-ubatch", str(choices.prefill_ubatch)]
        if choices.draft_tokens:
            auto = choices.draft_tokens == choices.expert_batch - 1
            words += ["--mtp", "auto" if auto else str(choices.draft_tokens)]
        given = {normalise(word) for word in choices.flags}
        words.append("--")
        words += [] if given & set(NGL) else ["-ngl", "99"]
        words += ["--cpu-moe"] if self.facts.moe_layers and not given & set(CPU_MOE) else []
        words += choices.flags
        if self.facts.draft is not None:
            words += choices.draft_place.words
        return words

    @property
    def environment(self) -> dict[str, str]:
        """What has no flag of `serve`."""
        choices = self.plan.choices
        values = {
            "LLAMA_PHASE_DRAFT_SLOTS": (str(choices.draft_slots), str(_DEFAULTS.draft_slots)),
            "LLAMA_PHASE_EXPERT_BATCH": (str(choices.expert_batch), str(_DEFAULTS.expert_batch)),
            "LLAMA_PHASE_RING": (str(choices.ring), str(_DEFAULTS.ring)),
            "LLAMA_PHASE_KV": (choices.kv, _DEFAULTS.kv),
            "LLAMA_PHASE_KV_ROWS": (str(choices.kv_rows), str(_DEFAULTS.kv_rows)),
            "LLAMA_PHASE_CHUNK": (str(choices.chunk), str(_DEFAULTS.chunk)),
            "LLAMA_PHASE_BUDGET_MIB": (",".join(map(str, choices.budgets_mib)), ""),
        }
        return {name: value for name, (value, default) in values.items() if value != default}

    def as_dict(self) -> dict[str, Any]:
        plan, larger = self.plan, self.of_larger_ubatch
        return {
            "model": {
                "path": str(self.facts.path),
                "architecture": self.facts.architecture,
                "layers": len(self.facts.served_layers),
                "moe_layers": len(self.facts.moe_layers),
                "mtp_layers": len(self.facts.layers) - len(self.facts.served_layers),
                "n_expert": self.facts.n_expert,
                "n_used": self.facts.n_used,
                "experts_bytes": self.facts.experts_bytes,
                "unknown": self.facts.unknown,
            },
            "plan": asdict(plan)
            | {"candidates": [asdict(one) | {"fits": one.fits} for one in plan.candidates]}
            | {"fits": plan.fits, "experts_fit_in_vram": self.experts_fit_in_vram, "fits_vram": plan.fits_vram},
            "phases": [
                {"name": d.name, "decode_bytes": d.decode_bytes, "prefill_bytes": d.prefill_bytes} for d in plan.devices
            ],
            "vram_bytes_per_token": self.vram_bytes_per_token,
            "changes": [asdict(change) for change in changes(self.facts, self.machine, plan.choices)],
            "pcie": {
                "links_bytes_per_s": self.links,
                "prompt_seconds": _by_text(self.prompts()),
                "larger_prefill_ubatch": larger
                and {"ubatch": larger.plan.choices.prefill_ubatch, "prompt_seconds": _by_text(larger.prompts())},
                "slots": [
                    {
                        "slots": slots,
                        "hit_rate": rate,
                        "missed_bytes_per_token": None if rate is None else self.missed_bytes_per_token(rate),
                        "seconds_per_token": None if rate is None else self.missed_seconds_per_token(rate),
                    }
                    for slots, rate in (self.rates() if plan.slots else ())
                ],
                "hit_rate_source": HIT_RATES_SOURCE,
            },
            "estimates": list(ESTIMATES),
            "unknown": self.machine.unknown,
            "argv": self.serve_argv,
            "environment": self.environment,
        }

    @cached_property
    def of_larger_ubatch(self) -> Report | None:
        """The same with the largest prefill micro-batch that fits beside as many slots, where that is larger: prompts
        stream the experts less often. None where the engine chooses, or nothing larger fits."""
        plan = self.plan
        if plan.choices.prefill_auto or not plan.choices.switches or not plan.fits:
            return None
        wins = [n for n in UBATCHES if plan.choices.prefill_ubatch < n < 2 * plan.choices.ctx]
        for ubatch in reversed(wins):
            choices = replace(plan.choices, prefill_ubatch=ubatch, batch=None)
            larger = make_plan(self.facts, self.machine, choices)
            if larger.fits and larger.slots >= plan.slots:
                return Report(self.facts, self.machine, larger)
        return None

    def prompts(self) -> dict[int, float | None]:
        """Seconds of streaming by prompt length, for lengths that the context holds."""
        lengths = [n for n in PROMPTS if n <= self.plan.choices.ctx] if self.facts.moe_layers else []
        return {n: self.prompt_seconds(n) for n in lengths}


def _by_text(prompts: dict[int, float | None]) -> dict[str, float | None]:
    """With keys that JSON has."""
    return {str(n): seconds for n, seconds in prompts.items()}
