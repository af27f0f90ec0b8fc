"""What an engine says about its phases, as typed values: counters and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

PhaseName = Literal["decode", "prefill"]


@dataclass(frozen=True)
class PhaseStats:
    """A snapshot. Micro-batches in tokens, buffers in bytes on all devices, times in milliseconds.

    Without phases (`has_phases` false) the context is as if in the decode phase for good.
    """

    has_phases: bool
    phase: PhaseName
    ubatch_decode: int = 0
    ubatch_prefill: int = 0
    min_tokens: int = 0
    n_entered: int = 0
    n_left: int = 0
    n_rolled_back: int = 0
    n_failed: int = 0
    n_short: int = 0
    n_blocked: int = 0
    n_aborted: int = 0
    enter_ms_last: float = 0.0
    leave_ms_last: float = 0.0
    buffer_bytes: int = 0

    @classmethod
    def from_report(cls, report: dict[str, Any] | None) -> PhaseStats:
        """From the answer of GET /phase; None (stock llama.cpp) has no phases."""
        if report is None or report.get("mode", "off") == "off":
            return cls(has_phases=False, phase="decode")
        counters = {f"n_{name}": n for name, n in report["counters"].items()}
        return cls(
            has_phases=True,
            phase=report["phase"],
            ubatch_decode=report["ubatch"]["decode"],
            ubatch_prefill=report["ubatch"]["prefill"],
            min_tokens=report["min_tokens"],
            enter_ms_last=report["last_enter_ms"],
            leave_ms_last=report["last_leave_ms"],
            buffer_bytes=sum(d["compute_buffer_bytes"] for d in report["memory"][report["phase"]]),
            **{name: n for name, n in counters.items() if name in cls.__dataclass_fields__},
        )


@dataclass(frozen=True)
class PhaseEvent:
    """A transaction that ended. `ubatch` (tokens) and `buffer_bytes` from now on; `step`, `reason`: why it failed."""

    kind: Literal["entered", "left", "rolled_back", "failed"]
    ms: float
    ubatch: int
    buffer_bytes: int
    step: str
    reason: str
