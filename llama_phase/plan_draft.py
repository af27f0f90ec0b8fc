"""What a draft adds to a plan: the model's own MTP block, or the file that `-md` names. Pure.

The block's experts are where the model's are. A draft from a file of its own has flags of its own: all its weights are
on the GPU unless `-cmoed`, `-ncmoed`, `-ngld 0` or the device `none` say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llama_phase.gguf_facts import LayerFacts, ModelFacts
from llama_phase.settings import Settings
from llama_phase.upstream_flags import (
    CPU_MOE,
    DRAFT_CPU_MOE,
    DRAFT_DEVICE,
    DRAFT_N_CPU_MOE,
    DRAFT_NGL,
    DRAFT_OVERRIDE,
    DRAFT_REPO,
    N_CPU_MOE,
    NGL,
    OVERRIDE,
    SPEC_TYPE,
    flag_value,
    normalise,
)

_ALL = 1 << 30  # layers


@dataclass(frozen=True)
class DraftPlace:
    """Where a draft from its own file goes. `host_experts`: so many first layers leave theirs in host memory; `gpu`:
    the one it was given, None: split as the model is; `named`: somebody chose; `words`: flags that stand for settings
    of ours, and for a GPU that was found for it."""

    on_gpu: bool = True
    host_experts: int = 0
    gpu: int | None = None
    named: bool = False
    words: tuple[str, ...] = ()

    @property
    def found(self) -> str:
        """The device that was found for it; empty when it is where it was put, or where llama.cpp puts it."""
        return "" if self.named or self.gpu is None else f"CUDA{self.gpu}"

    def on(self, gpu: int) -> DraftPlace:
        return replace(self, gpu=gpu, words=(*self.words, DRAFT_DEVICE[0], f"CUDA{gpu}"))

    @classmethod
    def of(cls, settings: Settings) -> DraftPlace:
        upstream = settings.upstream
        words = []
        if settings.spec and flag_value(upstream, SPEC_TYPE) is None:
            words += [SPEC_TYPE[0], settings.spec]
        device = flag_value(upstream, DRAFT_DEVICE) or settings.draft_device
        if settings.draft_device and flag_value(upstream, DRAFT_DEVICE) is None:
            words += [DRAFT_DEVICE[0], settings.draft_device]
        first = flag_value(upstream, DRAFT_N_CPU_MOE) or "0"
        host_experts = int(first) if first.isdigit() else 0
        if any(normalise(word) in DRAFT_CPU_MOE for word in upstream):
            host_experts = _ALL
        number = device[len(device.rstrip("0123456789")) :]
        return cls(
            on_gpu=flag_value(upstream, DRAFT_NGL) != "0" and device != "none",
            host_experts=host_experts,
            gpu=int(number) if number and "," not in device else None,
            named=bool(device),
            words=tuple(words),
        )


def not_planned(settings: Settings, model: ModelFacts) -> str:
    """Why there is no plan with these flags; empty when there is one."""
    draft = model.draft
    layers = flag_value(settings.upstream, NGL) or ""
    if layers.isdigit() and int(layers) <= len(model.served_layers):
        return f"plans are for all layers on the GPU, not for {layers} of them"
    given = {normalise(word) for word in settings.upstream}
    if model.moe_layers and not given & set(CPU_MOE) and (some := given & set(N_CPU_MOE)):
        return f"plans are for all experts in host memory (--cpu-moe), not for {some.pop()}"
    if some := given & set(OVERRIDE):
        return f"plans do not read the patterns of {some.pop()}"
    if flag_value(settings.upstream, DRAFT_REPO) is not None:
        return "the draft is a download, whose size is not known yet"
    if draft is None:
        return ""
    if given & set(DRAFT_OVERRIDE):
        return "plans do not read the patterns of -otd"
    layers = flag_value(settings.upstream, DRAFT_NGL) or ""
    if layers.isdigit() and 0 < int(layers) <= len(draft.layers):
        return "plans are for a draft that is on the GPU as a whole, or not at all"
    return ""


def draft_layers(facts: ModelFacts, drafts: bool, place: DraftPlace) -> list[LayerFacts]:
    """The layers that the draft context computes on GPUs, marked as its own; none without a draft. The head of a file
    of its own counts with its last layer. `drafts`: the model's own block is used."""
    if facts.draft is None:
        return [replace(layer, draft=True) for layer in facts.layers if layer.mtp and drafts]
    if not place.on_gpu:
        return []
    layers = [
        layer if layer.index < place.host_experts else _experts_on_gpu(layer)
        for layer in facts.draft.layers
        if layer.dense_bytes or layer.experts_bytes
    ]
    if layers:
        last = layers[-1]
        layers[-1] = replace(last, dense_bytes=last.dense_bytes + facts.draft.output_bytes)
    return [replace(layer, draft=True) for layer in layers]


def draft_host_bytes(facts: ModelFacts, place: DraftPlace) -> int:
    """What the draft from its own file reads from host memory beside experts that GPUs read."""
    if facts.draft is None:
        return 0
    if place.on_gpu:
        return facts.draft.input_bytes
    own = facts.draft
    layers = sum(layer.dense_bytes + layer.host_extra_bytes + layer.experts_bytes for layer in own.layers)
    return own.input_bytes + own.output_bytes + layers


def _experts_on_gpu(layer: LayerFacts) -> LayerFacts:
    dense_bytes = layer.dense_bytes + layer.host_extra_bytes + layer.experts_bytes
    return replace(layer, dense_bytes=dense_bytes, host_extra_bytes=0, expert_tensor_bytes=(), n_expert=0)
