"""What a server will need, before it is started: bytes per device and phase, slots, ring. Pure: facts in, plan out.

    VRAM of a device, decode phase    context | dense weights | K/V, state | compute (ubatch)         | slots | reserve
    the same, prefill phase           context | dense weights | K/V, state | compute (prefill ubatch) | ring

All experts are planned in host memory (`-ngl 99 --cpu-moe`), layers split by free memory or `-ts`, slots and ring sized
as the engine does it (engine/slot-count.cpp, expert-cache.cpp, expert-ring.cpp). Weights, K/V, state, slots and ring
are computed; ``ESTIMATES`` names the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from llama_phase import plan_compute
from llama_phase.errors import UsageError
from llama_phase.gguf_facts import LayerFacts, ModelFacts
from llama_phase.hardware import Machine
from llama_phase.plan_choices import KV_TYPES, RING_LEAST, Choices
from llama_phase.plan_draft import draft_host_bytes, draft_layers
from llama_phase.plan_kv import kv_places
from llama_phase.plan_ring import ring_bytes, ring_depth, ringed
from llama_phase.plan_slots import choose_slots, is_mtp_draft, slots_needed
from llama_phase.plan_ubatch import QUANTIZED_BYTES, Candidate, Need, candidate_ubatches, largest_that_fits

_MIB = 1 << 20
RESERVE_BYTES = 512 * _MIB  # of engine/expert-cache.cpp and phase-ubatch-plan.cpp: never planned with

CONTEXT_BYTES = 500 * _MIB  # what a CUDA process takes before it loads anything
ESTIMATES = (
    plan_compute.ESTIMATES,
    "context: 500 MiB per GPU for CUDA itself",
)


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of one device. `*_short_bytes`: by how much a phase does not fit, 0 when it does."""

    name: str
    free_bytes: int
    layers: int
    moe_layers: int
    experts_bytes: int  # of its layers, in host memory
    streamed_bytes: int  # of those, what one pass of a prompt moves over its link
    expert_bytes: int  # what a slot more takes: an expert of each of its layers, not of a draft that gets no more
    context_bytes: int
    dense_bytes: int
    kv_bytes: int
    state_bytes: int
    decode_compute_bytes: int
    prefill_compute_bytes: int
    kv_host_bytes: int = 0  # of its layers, in host memory
    kv_rows: int = 0  # of those, positions that the device keeps as well, over all layers
    kv_rows_bytes: int = 0
    kv_reasons: tuple[str, ...] = ()  # why K/V stays that was to go to host memory
    late_bytes: int = 0  # needed, at least, for a draft from its own file behind slots that are auto
    slots_bytes: int = 0
    draft_slots_bytes: int = 0  # of those
    ring_bytes: int = 0
    decode_short_bytes: int = 0
    prefill_short_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.context_bytes + self.dense_bytes + self.kv_bytes + self.kv_rows_bytes + self.state_bytes

    @property
    def decode_bytes(self) -> int:
        return self.fixed_bytes + self.decode_compute_bytes + self.slots_bytes

    @property
    def prefill_bytes(self) -> int:
        return self.fixed_bytes + self.prefill_compute_bytes + self.ring_bytes


@dataclass(frozen=True)
class Plan:
    """Slots are per layer; `slots_needed` are the fewest the engine accepts, `slots_fit` the most that fit. Those of an
    MTP draft, whose experts may all be resident, are `draft_slots`."""

    choices: Choices
    devices: tuple[DevicePlan, ...]
    slots: int
    slots_needed: int
    slots_fit: int
    ring_regions: int
    pinned_bytes: int
    host_bytes: int  # all that is read from host memory: experts, embedding tables, K/V there
    host_short_bytes: int | None  # None: the machine's memory is unknown
    candidates: tuple[Candidate, ...] = ()  # of the prefill micro-batch `auto`
    draft_slots: int = 0  # per layer of an MTP draft; 0: none has experts in host memory
    draft_experts: int = 0  # of such a layer

    @property
    def has_late_draft(self) -> bool:
        """A draft from a file of its own needs more than slots that are auto leave behind."""
        return any(device.late_bytes > RESERVE_BYTES for device in self.devices)

    @property
    def fits_vram(self) -> bool:
        return not any(device.decode_short_bytes or device.prefill_short_bytes for device in self.devices)

    @property
    def fits(self) -> bool:
        return self.fits_vram and not self.host_short_bytes


def make_plan(facts: ModelFacts, machine: Machine, choices: Choices) -> Plan:
    """Raises UsageError: no GPU, one whose memory is unknown, a draft on one that is not planned for, or fewer slots
    than the engine accepts."""
    free = []
    for gpu in machine.gpus:
        bytes_ = gpu.vram_free_bytes if gpu.vram_free_bytes is not None else gpu.vram_total_bytes
        if bytes_ is None:
            raise UsageError(f"the memory of GPU {gpu.index} is unknown", fix="give it: --vram GIB[,GIB]")
        free.append(bytes_)
    if not free or not any(free):
        reason = machine.unknown.get("gpus", "none is there")
        raise UsageError(f"no GPU to plan for: {reason}", fix="give the memory of each: --vram GIB[,GIB]")
    place = choices.draft_place
    if facts.draft and place.gpu is not None:
        numbers = [gpu.index for gpu in machine.gpus]
        if place.gpu not in numbers:
            raise UsageError(f"no plan: the draft is on GPU {place.gpu}, the model is not", fix="plan without it")
        choices = replace(choices, draft_place=replace(place, gpu=numbers.index(place.gpu)))  # of `free`

    candidates = _candidates(facts, choices, free) if choices.prefill_auto and choices.switches else ()
    if candidates:
        ubatch = largest_that_fits(candidates, choices.ubatch)
        choices = replace(choices, prefill_ubatch=ubatch, switches=ubatch > choices.ubatch)
    split = _split(facts, choices, free)
    bare = [
        _bare_device(facts, choices, f"GPU {gpu.index}", free[i], layers, i == _device_of_output(facts, choices, free))
        for i, (gpu, layers) in enumerate(zip(machine.gpus, split, strict=True))
    ]
    moe = [layer for layers in split for layer in layers if layer.expert_tensor_bytes]
    rooms = [_slot_room(device, choices, i) for i, device in enumerate(bare)]
    slots = choose_slots(facts, choices, split, rooms)
    regions = _ring_regions(choices, bare, split, slots.target)
    most = max((layer.n_expert for layer in moe), default=0)
    devices = []
    for i, (device, layers) in enumerate(zip(bare, split, strict=True)):
        slots_bytes = sum(layer.expert_bytes * slots.of(layer) for layer in layers)
        ring = ring_bytes(layers, regions)
        prefill = device.prefill_compute_bytes
        if choices.switches and not regions:
            prefill += _uploaded_bytes(ringed(layers))
        short = slots_bytes - rooms[i] if slots_bytes or rooms[i] < 0 else 0
        over = device.fixed_bytes + prefill + ring - device.free_bytes if choices.switches else 0
        over = max(over, prefill + ring - choices.budget(i)) if choices.switches else 0
        devices.append(
            DevicePlan(
                **vars(device)
                | {
                    "expert_bytes": sum(x.expert_bytes for x in layers if slots.draft_follows or not is_mtp_draft(x)),
                    "late_bytes": _late_bytes(facts, choices, layers) if slots.fit < most else 0,
                    "slots_bytes": slots_bytes,
                    "draft_slots_bytes": sum(x.expert_bytes * slots.of(x) for x in layers if is_mtp_draft(x)),
                    "ring_bytes": ring,
                    "prefill_compute_bytes": prefill if choices.switches else 0,
                    "decode_short_bytes": max(0, int(short)),
                    "prefill_short_bytes": max(0, int(over)),
                }
            )
        )
    kv_host = sum(device.kv_host_bytes for device in devices)
    experts_bytes = sum(layer.experts_bytes for layer in moe)
    extra_bytes = sum(layer.host_extra_bytes for layers in split for layer in layers)
    host = kv_host + experts_bytes + facts.input_bytes + extra_bytes + draft_host_bytes(facts, choices.draft_place)
    ram = machine.ram_available_bytes if machine.ram_available_bytes is not None else machine.ram_total_bytes
    return Plan(
        choices=replace(choices, draft_place=place),
        devices=tuple(devices),
        slots=slots.target,
        slots_needed=slots.needed,
        slots_fit=slots.fit,
        ring_regions=regions,
        pinned_bytes=kv_host + (experts_bytes if slots.target else 0),
        host_bytes=host,
        host_short_bytes=None if ram is None else max(0, host - ram),
        candidates=candidates,
        draft_slots=slots.draft,
        draft_experts=slots.draft_experts,
    )


def plan_server(facts: ModelFacts, machine: Machine, choices: Choices) -> Plan:
    """make_plan, and a place for a draft from a file of its own that nobody gave one: the GPU with room, which is the
    one that leaves the model more slots than llama.cpp's own choice does, or lets it fit at all. Raises as make_plan
    does."""
    place = choices.draft_place
    places = [place]
    if facts.draft is not None and place.on_gpu and not place.named and len(machine.gpus) > 1:
        places += [place.on(gpu.index) for gpu in machine.gpus]
    plans: list[Plan] = []
    refusals: list[UsageError] = []
    for one in places:
        try:
            plans.append(make_plan(facts, machine, replace(choices, draft_place=one)))
        except UsageError as error:  # too few slots with the draft there
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return max(plans, key=lambda plan: (plan.fits_vram, plan.slots))  # the first of equals


def _candidates(facts: ModelFacts, choices: Choices, free: list[int]) -> tuple[Candidate, ...]:
    """As phase_context::plan_ubatch, with estimated compute buffers: beside the fewest regions that overlap."""
    regions = choices.ring if choices.ring is not None else 2
    split = _split(facts, choices, free)
    tried = []
    for ubatch in candidate_ubatches(choices.ubatch, min(choices.batch or choices.ctx, choices.ctx)):
        needs = []
        for i, layers in enumerate(split):
            with_it = replace(choices, prefill_ubatch=ubatch)
            has_output = i == _device_of_output(facts, choices, free)
            device, chunked = (
                _bare_device(facts, those, f"GPU {i}", free[i], layers, has_output)
                for those in (with_it, replace(with_it, chunk="auto"))
            )
            has_ring = regions >= 2 and choices.slots != 0
            routed = facts.n_embd * facts.n_used * ubatch if any(layer.expert_tensor_bytes for layer in layers) else 0
            needs.append(
                Need(
                    device.prefill_compute_bytes + (0 if has_ring else _uploaded_bytes(ringed(layers))),
                    ring_bytes(layers, regions) if has_ring else 0,
                    int(routed * QUANTIZED_BYTES),
                    free[i] - device.fixed_bytes - RESERVE_BYTES,
                    choices.budget(i),
                    chunked.prefill_compute_bytes + (0 if has_ring else _uploaded_bytes(ringed(layers))),
                )
            )
        tried.append(Candidate(ubatch, tuple(needs)))
    return tuple(tried)


def _split(facts: ModelFacts, choices: Choices, free: list[int]) -> list[list[LayerFacts]]:
    """Layers of each device: llama.cpp splits them, MTP layers and the output by free memory, or by given shares."""
    devices: list[list[LayerFacts]] = [[] for _ in free]
    by = _shares(choices, free)
    for layer in facts.served_layers:
        devices[_device_of(layer.index, by, facts)].append(layer)
    gpu = choices.draft_place.gpu if facts.draft else None
    for layer in draft_layers(facts, choices.draft_tokens > 0, choices.draft_place):
        devices[_device_of(layer.index, by, facts.draft or facts) if gpu is None else gpu].append(layer)
    return devices


def _late_bytes(facts: ModelFacts, choices: Choices, layers: list[LayerFacts]) -> int:
    own = [layer for layer in layers if layer.draft and facts.draft is not None]
    number = choices.draft_slots or 0
    slots = sum(
        layer.expert_bytes * max(slots_needed(facts, choices, layer), min(number, layer.n_expert)) for layer in own
    )
    reserve = RESERVE_BYTES if slots else 0  # which those slots leave as well
    return sum(layer.dense_bytes for layer in own) + slots + reserve


def _shares(choices: Choices, free: Sequence[float]) -> Sequence[float]:
    """One that was not given is 0, one too many says nothing."""
    given = (*choices.shares, *[0.0] * len(free))[: len(free)]
    return given if any(given) else free


def _device_of(index: int, shares: Sequence[float], facts: ModelFacts) -> int:
    ends = [end / sum(shares) for end in accumulate(shares)]
    return min(bisect_right(ends, index / (len(facts.layers) + 1)), len(shares) - 1)


def _device_of_output(facts: ModelFacts, choices: Choices, free: Sequence[float]) -> int:
    return _device_of(len(facts.layers), _shares(choices, free), facts)


def _bare_device(
    facts: ModelFacts, choices: Choices, name: str, free: int, layers: list[LayerFacts], has_output: bool
) -> DevicePlan:
    """Without slots and ring. A device without layers takes nothing but its context."""

    own = facts.draft or facts  # of the draft
    contexts = [
        ([x for x in layers if x.draft is draft], own.n_embd if draft else facts.n_embd) for draft in (False, True)
    ]

    def compute(ubatch: int, chunk: int | str = 0) -> int:
        tokens = min(ubatch, choices.ctx)
        return sum(plan_compute.compute_bytes(those, width, tokens, choices.cells, chunk) for those, width in contexts)

    dense_bytes = sum(layer.dense_bytes for layer in layers) + (facts.output_bytes if has_output else 0)
    planned = {layer.index for layer in layers if facts.draft is None or not layer.draft}
    unused = [layer for layer in facts.layers if layer.mtp and layer.index not in planned] if has_output else []
    kv = kv_places(facts, choices, layers, unused, free - CONTEXT_BYTES - dense_bytes)
    staged = max(kv.host, default=0)  # prompts read a copy of one layer's K/V at a time
    indexer_bytes = sum(
        int(layer.indexer_k * KV_TYPES[choices.draft_type_k if layer.draft else choices.type_k] * choices.cells)
        for layer in layers
    )
    states = [(layer.state_bytes or 0) * (1 if layer.draft else 1 + choices.draft_tokens) for layer in layers]
    return DevicePlan(
        name=name,
        free_bytes=free,
        layers=len(layers),
        moe_layers=sum(1 for layer in layers if layer.expert_tensor_bytes),
        experts_bytes=sum(layer.experts_bytes for layer in layers),
        streamed_bytes=sum(layer.experts_bytes for layer in ringed(layers)),
        expert_bytes=sum(layer.expert_bytes for layer in layers),
        context_bytes=CONTEXT_BYTES,
        dense_bytes=dense_bytes,
        kv_bytes=kv.all_bytes - sum(kv.host) + indexer_bytes,
        kv_host_bytes=sum(kv.host),
        kv_rows=kv.kept_rows,
        kv_rows_bytes=kv.kept_bytes,
        kv_reasons=kv.reasons,
        state_bytes=sum(states) * choices.sequences,
        # batches between EXPERT_BATCH and the prefill threshold take the stock path, whose uploads are compute buffers
        decode_compute_bytes=compute(choices.ubatch) + sum(_uploaded_bytes(those) for those, _ in contexts) + staged,
        prefill_compute_bytes=compute(max(choices.prefill_ubatch, choices.ubatch), choices.chunk) + staged,
    )


def _uploaded_bytes(layers: list[LayerFacts]) -> int:
    return max((layer.experts_bytes for layer in layers), default=0)


def _slot_room(device: DevicePlan, choices: Choices, index: int) -> float:
    """As expert_cache::create_slots; without slots nothing is kept in reserve."""
    free = device.free_bytes - device.fixed_bytes - device.decode_compute_bytes
    if choices.slots != 0:
        free -= RESERVE_BYTES if device.expert_bytes else 0
    return min(free, choices.budget(index) - device.decode_compute_bytes)


def _ring_regions(choices: Choices, bare: list[DevicePlan], split: list[list[LayerFacts]], slots: int) -> int:
    """Regions of the prefill phase: as many as wanted, fewer, none, the same number on every device."""
    if not (choices.switches and slots):
        return 0
    lengths = [len(ringed(layers)) for layers in split]
    longest = max(lengths, default=0)
    wanted = choices.ring if choices.ring is not None else ring_depth(lengths)
    for regions in range(min(wanted, max(longest, 2)), 1, -1):
        kept = RESERVE_BYTES if choices.ring is None and regions > RING_LEAST else 0
        for i, (device, layers) in enumerate(zip(bare, split, strict=True)):
            taken = device.prefill_compute_bytes + ring_bytes(layers, regions)
            if taken > min(device.free_bytes - device.fixed_bytes - kept, choices.budget(i)):
                break
        else:
            return regions
    return 0
