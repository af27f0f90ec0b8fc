"""All that a plan depends on beside the facts: what `serve` is to be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from llama_phase.errors import UsageError
from llama_phase.gguf_facts import ModelFacts
from llama_phase.plan_devices import shares
from llama_phase.plan_draft import DraftPlace
from llama_phase.settings import Settings
from llama_phase.speculation import MTP_GRAPHS, UPSTREAM_N_MAX
from llama_phase.upstream_flags import (
    DRAFT_N_MAX,
    DRAFT_TYPE_K,
    DRAFT_TYPE_V,
    FALSE,
    FLASH,
    UPSTREAM_PARALLEL,
    flag_value,
    n_parallel,
    spec_types,
)

_MIB = 1 << 20
MIN_TOKENS_FLOOR = 240  # of engine/phase-ubatch.cpp
RING_LEAST = 3  # regions of a ring by its own choice, of engine/ring-depth.h
KV_ROWS_AUTO = 16384  # positions of K/V in host memory that a device keeps as well, or a multiple: engine/kv-place.cpp
KV_ROWS_LEAST = 4096
CONTEXT_CELLS = 256  # contexts are rounded up to this many tokens
# bytes per element of a K/V cache type
KV_TYPES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
            "q4_0": 18 / 32, "iq4_nl": 18 / 32}  # fmt: skip


def least_tokens(ubatch: int, setting: int | str) -> int:
    """New tokens from which a prompt switches, as phase_min_tokens of engine/phase-ubatch.cpp has it."""
    return max(ubatch + ubatch // 4, MIN_TOKENS_FLOOR) if setting == "auto" else int(setting)


@dataclass(frozen=True)
class Choices:
    """All that a plan depends on beside the facts. `slots` None: as many as fit; `draft_slots` None: all experts if
    they fit, else as `slots`; `batch` None: not limited."""

    ctx: int
    slots: int | None = None
    draft_slots: int | None = None
    ubatch: int = 512
    prefill_ubatch: int = 2048
    prefill_auto: bool = False  # prefill_ubatch is then what the plan finds
    batch: int | None = None
    switches: bool = True
    min_tokens: int = 640
    expert_batch: int = 8
    ring: int | None = None  # None: by the number of devices
    chunk: int | str = 0  # tokens that a large micro-batch is computed in at a time; auto: by size, 0: all
    budgets_mib: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()  # of the layers, by device; empty: by free memory
    type_k: str = "f16"
    type_v: str = "f16"
    sequences: int = UPSTREAM_PARALLEL
    kv: str = "device"
    kv_rows: int | None = None  # None: auto
    flash: bool = True  # flash attention, which llama.cpp's `auto` finds possible on a GPU
    draft_tokens: int = 0  # longest MTP draft; the recurrent state is kept once more for each of its tokens
    draft_type_k: str = "f16"
    draft_type_v: str = "f16"
    draft_place: DraftPlace = field(default_factory=DraftPlace)
    flags: tuple[str, ...] = field(default=(), compare=False)  # of llama-server, as they were given

    @classmethod
    def of(cls, settings: Settings, facts: ModelFacts) -> Choices:
        """From the settings of `serve`; slots that nobody chose are auto.

        Raises UsageError for a K/V type that is not known, and when neither settings nor model give a context.
        """
        ctx = settings.ctx or facts.context_length
        if not ctx:
            raise UsageError(f"{facts.path} does not say its context length", fix="give one: --ctx N")
        types = [
            flag_value(settings.upstream, names) or "f16"
            for names in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"), DRAFT_TYPE_K, DRAFT_TYPE_V)
        ]
        for name in types:
            if name not in KV_TYPES:
                raise UsageError(f"there is no K/V type {name!r}", fix=f"one of {', '.join(KV_TYPES)}")
        chosen = settings.source("expert_slots") != "default"
        return cls(
            ctx=ctx,
            slots=None if settings.expert_slots == "auto" or not chosen else settings.expert_slots,
            draft_slots=None if settings.draft_slots == "auto" else settings.draft_slots,
            ubatch=settings.ubatch,
            prefill_ubatch=settings.largest_prefill_ubatch,
            prefill_auto=settings.prefill_ubatch == "auto",
            batch=settings.effective_batch,
            switches=settings.prefill_mode == "transaction" and settings.largest_prefill_ubatch > settings.ubatch,
            min_tokens=least_tokens(settings.ubatch, settings.prefill_min_tokens),
            expert_batch=settings.expert_batch,
            ring=None if settings.ring == "auto" else settings.ring,
            chunk=settings.chunk,
            budgets_mib=tuple(int(item) for item in settings.budget_mib.split(",") if item.strip()),
            shares=shares(settings.upstream),
            type_k=types[0],
            type_v=types[1],
            sequences=n_parallel(settings.upstream),
            kv=settings.kv,
            kv_rows=None if settings.kv_rows == "auto" else settings.kv_rows,
            flash=flag_value(settings.upstream, FLASH) not in FALSE,
            draft_tokens=_draft_tokens(settings, facts),
            draft_type_k=types[2],
            draft_type_v=types[3],
            draft_place=DraftPlace.of(settings),
            flags=settings.upstream,
        )

    @property
    def cells(self) -> int:
        return -(-self.ctx // CONTEXT_CELLS) * CONTEXT_CELLS

    def kept_rows(self, position_bytes: float, free_bytes: float) -> int:
        """Positions of K/V in host memory that a device keeps as well, as engine/kv-place.cpp decides.
        `position_bytes`: of one in all such layers."""
        if not position_bytes:
            return 0
        if self.kv_rows is not None:
            return min(self.kv_rows, self.cells)
        fit = int(free_bytes / 8 / position_bytes)
        rows = min(max(KV_ROWS_AUTO, fit // 4 // KV_ROWS_AUTO * KV_ROWS_AUTO), self.cells, fit)
        return rows if rows >= min(KV_ROWS_LEAST, self.cells) else 0

    def budget(self, device: int) -> float:
        """Cap on slots (or ring) and compute buffers together, in bytes."""
        if not self.budgets_mib:
            return float("inf")
        return self.budgets_mib[min(device, len(self.budgets_mib) - 1)] * _MIB


def _draft_tokens(settings: Settings, facts: ModelFacts) -> int:
    """As llama_phase.speculation gives them to the server: --mtp, or the flags after `--`."""
    if not any(layer.mtp for layer in (facts.draft or facts).layers):
        return 0
    theirs = "draft-mtp" in (spec_types(settings.upstream) or settings.spec).split(",")
    if not theirs and (settings.mtp == 0 or spec_types(settings.upstream)):
        return 0
    if settings.mtp == "auto" and not theirs and (facts.draft or facts).architecture not in MTP_GRAPHS:
        return 0
    length = flag_value(settings.upstream, DRAFT_N_MAX) or ""
    if length.isdigit():
        return int(length)
    if settings.mtp == "auto":
        return settings.expert_batch - 1
    return settings.mtp or UPSTREAM_N_MAX
