"""The prefill micro-batch `auto`: the engine's rule (engine/phase-ubatch.h) over estimated needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

UBATCHES = (512, 1024, 2048, 4096, 8192)
QUANTIZED_BYTES = 36 / 32  # per value of a routed token that a matmul quantizes for itself


@dataclass(frozen=True)
class Need:
    """Bytes that a candidate takes of one device. `room_bytes`: free beside weights and K/V, less the engine's reserve;
    `budget_bytes`: cap on compute buffers and ring, pools not counted; `in_chunks_bytes`: what the compute buffers
    are, or would be, with LLAMA_PHASE_CHUNK=auto."""

    compute_bytes: int
    ring_bytes: int
    pool_bytes: int
    room_bytes: int
    budget_bytes: float
    in_chunks_bytes: int = 0

    @property
    def short_bytes(self) -> int:
        taken = self.compute_bytes + self.ring_bytes
        return max(0, taken + self.pool_bytes - self.room_bytes, int(max(0, taken - self.budget_bytes)))


@dataclass(frozen=True)
class Candidate:
    ubatch: int
    needs: tuple[Need, ...]  # one per device

    @property
    def short_bytes(self) -> int:
        return max((need.short_bytes for need in self.needs), default=0)

    @property
    def fits(self) -> bool:
        return not self.short_bytes


def candidate_ubatches(decode: int, batch: int) -> list[int]:
    """Those above the decode micro-batch, each at most the logical batch; ascending."""
    return sorted({min(n, batch) for n in UBATCHES if min(n, batch) > decode})


def largest_that_fits(candidates: tuple[Candidate, ...], decode: int) -> int:
    """Its micro-batch, or the decode phase's when none fits: no switch then."""
    return max((candidate.ubatch for candidate in candidates if candidate.fits), default=decode)
